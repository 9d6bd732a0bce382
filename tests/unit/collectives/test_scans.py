"""inclusive_scan and exclusive_scan: what the tables of all collectives do not show."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, schedules
from funccoll.errors import DTypeError, MeshError, ScheduleError, UnsupportedError, VaryingError
from funccoll.schedules import Move, build
from funccoll.schedules.collective import KINDS
from tests.support.cases.collective_cases import OPS, before, has_op, left_fold, neutral, sample
from tests.support.example_counts import examples
from tests.support.groups import in_groups
from tests.support.misuse import X, run, wrong
from tests.support.refused_schedules import refused
from tests.support.spmd import MESHES, axis_choices, bits, expected, per_device

pytestmark = pytest.mark.covers("collectives")

SCANS = ("inclusive_scan", "exclusive_scan")
ALGORITHMS = [(kind, name) for kind in SCANS for name in schedules.algorithms(kind)]


def oracle(kind: str, op: str, group: list[Any], i: int, reverse: bool) -> Any:
    values = before(group, i, reverse)
    values = [*values, group[i]] if kind == "inclusive_scan" else values or [neutral(op, group[i])]
    return left_fold(op, values)


# ---------------------------------------------------------------- values


@given(
    st.sampled_from(SCANS),
    st.sampled_from([op for op in OPS if op != "mean"]),
    st.sampled_from([np.dtype(t) for t in ("?", "i1", "u8", "f2", "f4", "c16")]),
    st.sampled_from([(mesh, axes) for mesh, m in MESHES.items() for axes in axis_choices(m)]),
    st.booleans(),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 2**32),
)
@examples(25)
def test_any_scan_is_the_fold_of_the_devices_before(kind, op, dtype, where, reverse, shape, seed):
    if not has_op(op, dtype):
        return
    mesh, axes = MESHES[where[0]], where[1]
    x = sample(dtype, (mesh.size, *shape), np.random.default_rng(seed))
    call = lambda x: getattr(fc, kind)(x, axes, op=op, reverse=reverse)
    wanted = expected(mesh, axes, list(x), lambda g, i: oracle(kind, op, g, i, reverse))
    for got, want in zip(per_device(mesh, call)(x).shards, wanted, strict=True):
        assert got.dtype == dtype and bits(got[0]) == bits(np.asarray(want, dtype))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_mpi4py_expects_of_scan_and_exscan(size: int):
    """All ranks give the numbers 0 to p - 1: sums are multiples of them, products powers, extremes the numbers."""
    mesh, numbers = fc.make_mesh({"d": size}), np.arange(size)
    ops = {"sum": lambda n: n * numbers, "prod": lambda n: numbers**n, "max": lambda n: numbers, "min": lambda n: numbers}
    for dtype in (np.int16, np.uint64, np.float32, np.complex128):
        for op, of in ops.items():
            if np.dtype(dtype).kind == "c" and op in ("max", "min"):
                continue
            x = np.tile(numbers.astype(dtype), (size, 1))
            scan, exscan = (
                per_device(mesh, lambda x, f=f, op=op: f(x, "d", op=op))(x) for f in (fc.inclusive_scan, fc.exclusive_scan)
            )
            for rank in range(size):
                np.testing.assert_array_equal(scan.shards[rank][0], of(rank + 1))
                if rank:  # MPI says nothing about rank 0
                    np.testing.assert_array_equal(exscan.shards[rank][0], of(rank))


def test_a_tree_is_one_operation_and_empty_trees_are_nothing():
    mesh = MESHES["line"]

    def call(x: Any) -> Any:
        assert fc.inclusive_scan((), "data") == ()
        return fc.exclusive_scan({"a": x, "b": [x * 2, 3 * x]}, "data", op="prod")

    lowered = per_device(mesh, call).lower(np.ones((4, 2)))
    assert [eqn.primitive.name for eqn in lowered.program.collectives()] == ["exclusive_scan"]


@pytest.mark.parametrize("op", ["max", "min"])
def test_the_first_device_has_a_copy_of_its_own_nan(op: str):
    """As in everything that is only moved, bits are kept: here of a NaN that is not the canonical one."""
    nan = np.array([0x7FC00001], np.uint32).view(np.float32)
    for p in (1, 2):
        x = np.stack([nan] * p)
        for name in schedules.algorithms("inclusive_scan", p):
            got = per_device(fc.make_mesh({"d": p}), lambda x, n=name: fc.inclusive_scan(x, "d", op=op, algorithm=n))(x)
            assert bits(got.shards[0][0]) == bits(nan), name
            assert p == 1 or bits(got.shards[1][0]) == bits(np.array([np.nan], np.float32)), name


# ---------------------------------------------------------------- transformations


@pytest.mark.parametrize("kind", SCANS)
@pytest.mark.parametrize("op", ["max", "prod"])
def test_gradients_with_ties_and_zeros(kind: str, op: str):
    """Written out element by element: winners of a prefix share its cotangent, a product has no division."""
    mesh, p = MESHES["line"], 4
    rng = np.random.default_rng(0)
    x, ct = (rng.integers(low, 3, (p, 30)).astype(np.float64) for low in (-1, 1))

    def pull(x: Any, ct: Any) -> Any:
        return fc.vjp(lambda x: getattr(fc, kind)(x, "data", op=op), x)[1](ct)[0]

    wanted = np.zeros_like(x)
    for r in range(p):
        ranks = range(r + (kind == "inclusive_scan"))
        for e in range(x.shape[1]):
            column = x[: len(ranks), e]
            for i in ranks:
                others = np.prod(np.delete(column, i))
                winners = column == column.max()
                wanted[i, e] += ct[r, e] * (others if op == "prod" else winners[i] / winners.sum())
    np.testing.assert_allclose(np.asarray(per_device(mesh, pull)(x, ct)), wanted, rtol=1e-12)


def test_the_cotangent_of_a_sum_runs_back_with_the_users_algorithm():
    def loss(x: Any) -> Any:
        return fc.all_reduce(np.sum(fc.inclusive_scan(x, "data", algorithm="blelloch") ** 2), "data")

    lowered = per_device(MESHES["line"], fc.grad(loss)).lower(np.ones((4, 2)))
    scans = [(e.params["algorithm"], e.params["reverse"]) for e in lowered.program.collectives() if "scan" in e.primitive.name]
    assert scans == [("blelloch", False), ("blelloch", True)]


def test_in_vmap_scan_and_cond():
    mesh = MESHES["line"]
    x = np.random.default_rng(0).integers(-9, 9, (4, 3, 2))

    def nested(x: Any) -> Any:
        batched = fc.vmap(lambda row: fc.exclusive_scan(row, "data", op="max"))(x)
        carried, _ = fc.scan(lambda c, _: (fc.inclusive_scan(c, "data", reverse=True), None), x, None, length=2)
        chosen = fc.cond(fc.axis_size("data") > 2, lambda x: fc.inclusive_scan(x, "data"), lambda x: x, x)
        return batched, carried, chosen

    batched, carried, chosen = (np.asarray(y) for y in per_device(mesh, nested)(x))
    np.testing.assert_array_equal(batched[1:], np.maximum.accumulate(x)[:-1])
    np.testing.assert_array_equal(carried, np.cumsum(np.cumsum(x[::-1], 0), 0)[::-1])
    np.testing.assert_array_equal(chosen, np.cumsum(x, 0))


# ---------------------------------------------------------------- schedules


def leaves(tree: Any) -> list[int]:
    """The ranks of an expression from left to right."""
    return [tree[0]] if isinstance(tree[0], int) else [rank for kid in tree for rank in leaves(kid)]


@in_groups(("kind", "name"), ALGORITHMS)
@pytest.mark.parametrize("reverse", [False, True])
def test_no_algorithm_commutes_anything(kind: str, name: str, reverse: bool):
    for p in (1, 2, 3, 5, 8, 13):
        proof = build(kind, p, name, reverse=reverse).prove()
        for rank, _, node in zip(*(column.tolist() for column in proof.outputs), strict=True):
            ranks = range(p - 1, rank - 1, -1) if reverse else range(rank + 1)
            assert leaves(proof.tree(node)) == list(ranks)[: len(ranks) - (kind == "exclusive_scan")]


def test_a_scan_that_adds_ranks_in_another_order_is_refused():
    def commutes(p):
        for r in range(p):
            yield Move((r, "output", 0), [(i, "input", 0) for i in (*range(1, r + 1), 0)])

    error = str(refused("inclusive_scan", commutes))
    assert "output[0] of rank 1 must hold x0[0] + x1[0], and it holds x1[0] + x0[0]" in error
    assert "a scan combines in the order of ranks" in error


def test_a_scan_with_too_many_or_too_few_ranks_is_refused():
    def reduces(p):
        r = np.arange(p)
        yield Move((r, "output", 0), [(i, "input", 0) for i in range(p)])

    error = str(refused("inclusive_scan", reduces))
    assert "output[0] of rank 0 must hold x0[0]" in error and "ranks 1, 2, 3 are not in this prefix" in error

    def forgets(p):
        yield [Move((r, "output", 0), [(i, "input", 0) for i in range(max(1, r - 1))]) for r in range(1, p)]

    assert "must hold x0[0] + x1[0], and it holds x0[0]: rank 1 is missing" in str(refused("exclusive_scan", forgets))

    def writes(p):
        yield Move((0, "output", 0), (0, "input", 0))

    assert "in exclusive_scan on 4 ranks that rank has no output" in str(refused("exclusive_scan", writes))


def test_reverse_is_for_scans():
    with pytest.raises(ScheduleError, match=r"all_reduce has no order of ranks.*It is for inclusive_scan, exclusive_scan"):
        build("all_reduce", 4, reverse=True)
    with pytest.raises(ScheduleError, match=re.escape("inclusive_scan: reverse=2 must be True or False")):
        build("inclusive_scan", 4, reverse=2)  # type: ignore[arg-type]
    assert str(build("inclusive_scan", 4, reverse=True).collective) == "inclusive_scan on 4 ranks, reverse"


def test_a_reversed_schedule_is_kept_in_files_and_as_an_algorithm():
    for reverse in (False, True):
        schedule = build("exclusive_scan", 3, "blelloch", reverse=reverse, channels=2)
        again = schedules.from_json(schedule.to_json())
        assert again.digest == schedule.digest and again.collective == schedule.collective
        name = schedules.register(again, f"from_file_{reverse}")
        try:
            for back in (False, True):  # a registered schedule runs in both directions
                call = lambda x, n=name, back=back: fc.exclusive_scan(x, "d", reverse=back, algorithm=n)
                x = np.arange(12).reshape(3, 4)
                got = np.asarray(per_device(fc.make_mesh({"d": 3}), call)(x))
                wanted = [oracle("exclusive_scan", "sum", list(x), i, back) for i in range(3)]
                np.testing.assert_array_equal(got, wanted)
        finally:
            del schedules.registry._ALGORITHMS["exclusive_scan"][name]


def test_the_choice_never_rounds_partial_results_of_16_bit_floats_and_is_shown():
    for kind in SCANS:
        for nbytes in (64, 1 << 22):
            assert schedules.select(kind, 8, nbytes, dtype=np.float16).algorithm == "one_shot"
        assert schedules.select(kind, 8, 1 << 22, dtype=np.float32).algorithm == "two_shot"
        found = schedules.explain(kind, schedules.Topology.ethernet(8), 64, reverse=True)
        assert found.chosen.algorithm == "kogge_stone" and f"{kind} on 8 ranks, reverse" in str(found)
        assert KINDS[kind].prefix


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("kind", SCANS)
def test_errors(kind: str):
    scan = getattr(fc, kind)
    wrong(UnsupportedError, lambda: run(lambda x: scan(x, "data", op="mean")), kind, '"mean" has no scan', 'op="sum"')
    wrong(UnsupportedError, lambda: run(lambda x: scan(x, "data", op="plus")), kind, "unknown op 'plus'", "sum")
    wrong(UnsupportedError, lambda: run(lambda x: scan(x, "data", reverse="yes")), kind, "reverse='yes'", "True or False")
    wrong(MeshError, lambda: run(lambda x: scan(x, "rows")), kind, "unknown axis 'rows'", "data")
    wrong(MeshError, lambda: scan(X, "data"), kind, "outside a mesh")
    wrong(VaryingError, lambda: run(lambda x: scan(x, "data"), spec=P()), kind, "does not vary", "fc.pvary(x, 'data')")
    wrong(DTypeError, lambda: run(lambda x: scan(x, "data", op="and")), "'and'", "integers or booleans")
    wrong(ScheduleError, lambda: run(lambda x: scan(x, "data", algorithm="ring")), "unknown algorithm 'ring'", "blelloch")
