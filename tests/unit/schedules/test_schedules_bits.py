"""Bits of reductions: the order of additions that the proof of a schedule says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from allpairspy import AllPairs

import funccoll as fc
from funccoll.schedules.collective import chunk_bounds
from funccoll.schedules.streams.interpret import interpret
from tests.support.cases.schedule_calls import CALLS, REDUCTIONS, SCANS, forced, numbers, of, options_of, streamed
from tests.support.spmd import bits, per_device

pytestmark = pytest.mark.covers("schedules")

SIZES = range(1, 9)
MESHES = {p: fc.make_mesh({"x": p}) for p in SIZES}


def combined(values: list[np.ndarray], op: str, count: int) -> np.ndarray:
    """One combine, written out: 16-bit floats in float32; `count` divides a mean whose sum is complete."""
    dtype = values[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    total = values[0].astype(wide)
    with np.errstate(over="ignore"):
        for value in values[1:]:
            value = value.astype(wide)
            total = np.maximum(total, value) if op == "max" else total * value if op == "prod" else total + value
        return (total / wide.type(count) if count else total).astype(dtype)


def by_the_proof(schedule: Any, shards: list[np.ndarray], op: str) -> dict[int, np.ndarray]:
    """Each rank's output of a reduction, flat, from the trees of the proof: recursive, chunk by chunk."""
    proof, collective = schedule.prove(), schedule.collective
    p, flat = schedule.nranks, [s.reshape(-1) for s in shards]
    if collective.kind == "reduce_scatter":
        blocks = [[b.reshape(-1) for b in np.split(s, p, axis=1)] for s in shards]
    out: dict[int, np.ndarray] = {}

    def value(tree: Any, part: slice, rank: int) -> np.ndarray:
        if isinstance(tree[0], int):
            return (blocks[tree[0]][rank] if collective.kind == "reduce_scatter" else flat[tree[0]])[part]
        complete = leaves(tree) == p
        return combined([value(t, part, rank) for t in tree], op, p if op == "mean" and complete else 0)

    def leaves(tree: Any) -> int:
        return 1 if isinstance(tree[0], int) else sum(map(leaves, tree))

    elements = flat[0].size // (p if collective.kind == "reduce_scatter" else 1)
    bounds = chunk_bounds(elements, collective.parts, flat[0].dtype.itemsize)
    for rank, chunk, node in zip(*(c.tolist() for c in proof.outputs)):
        part = int(collective.parts_of_rows[collective.input_chunks + chunk])
        where = slice(bounds[part], bounds[part + 1])
        result = out.setdefault(rank, np.empty(elements, flat[0].dtype))
        result[where] = value(proof.tree(node), where, rank)
    return out


FOLDED = ("sum", "mean", "prod", "max")
DTYPES, RANKS = (np.float32, np.float16, fc.bfloat16), (2, 3, 5, 8)


@pytest.mark.parametrize(
    ("kind", "op", "dtype", "sizes"),
    [
        *(
            pytest.param(kind, op, dtype, [p], id=f"{kind}-{op}-{np.dtype(dtype).name}-{p}")
            for kind, op, dtype, p in AllPairs([REDUCTIONS, FOLDED, DTYPES, RANKS])
        ),
        *(
            pytest.param(kind, op, dtype, RANKS, id=f"{kind}-{op}-{np.dtype(dtype).name}-all", marks=pytest.mark.slow)
            for kind, op, dtype in product(REDUCTIONS, FOLDED, DTYPES)
        ),
    ],
)
def test_reductions_combine_as_the_proof_says(kind: str, op: str, dtype: Any, sizes: Sequence[int]):
    if op == "mean" and kind in SCANS:
        return  # it has no scan
    different = 0
    for p in sizes:
        x = numbers(MESHES[p], dtype, (7, 24 * p))
        options = options_of(kind, p)
        default = forced(kind, None, MESHES[p], op=op, **options)(x)
        for how in fc.schedules.algorithms(kind, p):
            run = forced(kind, how, MESHES[p], op=op, **options)
            got = run(x)
            want = by_the_proof(of(run.lower(x), kind), list(x), op)
            for rank, value in want.items():
                assert bits(got.shards[rank].reshape(-1)) == bits(value), (p, how, rank)
            different += bits(got) != bits(default)
    orders = max(sizes) > (3 if kind == "exclusive_scan" else 2)  # there are several
    assert different > 0 or op == "max" or not orders


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("kind", CALLS)
def test_the_runtime_and_the_streams_give_the_same_bits(kind: str, dtype: Any):
    """What the program computes is what the schedule's streams compute, in a random order of events."""
    for p in (1, 3, 4):
        x = numbers(MESHES[p], dtype)
        for how in fc.schedules.algorithms(kind, p):
            run = forced(kind, how, MESHES[p])
            for rank, output in enumerate(streamed(run.lower(x), kind, x, seed=p)):
                if output is not None:
                    assert bits(run(x).shards[rank][0]) == bits(output), (p, how, rank)


@pytest.mark.parametrize("op", ["mean", "prod", "min"])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.complex64], ids=lambda d: d.__name__)
def test_and_so_they_do_for_every_op(dtype: Any, op: str):
    if op == "min" and np.dtype(dtype).kind == "c":
        return
    for kind in REDUCTIONS if op != "mean" else set(REDUCTIONS).difference(SCANS):
        options = options_of(kind, 3)
        x = numbers(MESHES[3], dtype, (5, 33))
        for how in fc.schedules.algorithms(kind, 3):
            run = forced(kind, how, MESHES[3], op=op, **options)
            for rank, output in enumerate(streamed(run.lower(x), kind, x, op=op)):
                if output is not None:
                    assert bits(run(x).shards[rank][0]) == bits(output), (kind, how, rank)


def test_a_ring_adds_along_the_ring():
    """Chunk c goes from rank to rank and ends where it is kept; written out without any schedule."""
    p, per = 4, 16
    x = numbers(MESHES[4], np.float32, (p * per,))
    got = np.asarray(forced("all_reduce", "ring", MESHES[4])(x))[0]
    for c in range(p):
        chunk = x[:, c * per : (c + 1) * per]
        total = chunk[(c + 1) % p]
        for step in range(2, p + 1):
            total = total + chunk[(c + step) % p]
        assert bits(got[c * per : (c + 1) * per]) == bits(total), c


def test_left_folds_are_the_choice_on_one_host():
    for p in (1, 2, 3, 8):
        for kind in REDUCTIONS:
            for rows in (1, 1 << 20):
                x = np.broadcast_to(np.float32(0), (p, rows, p))  # types only: nothing runs
                schedule = of(forced(kind, None, MESHES[p]).lower(x), kind)
                assert schedule.prove().left_fold or schedule.prove().sequential, schedule


def test_large_and_indivisible_and_empty():
    mesh = MESHES[3]
    for shape in ((), (0,), (1,), (17,), (100_003,)):
        x = numbers(mesh, np.float32, shape)
        for how in fc.schedules.algorithms("all_reduce", 3):
            run = forced("all_reduce", how, mesh, op="mean")
            want = by_the_proof(of(run.lower(x), "all_reduce"), list(x), "mean")
            assert bits(run(x).shards[0].reshape(-1)) == bits(want[0]), (shape, how)


@pytest.mark.parametrize("dtype", [np.int16, np.float64, np.complex64], ids=lambda d: d.__name__)
def test_blocks_along_any_dimension(dtype: Any):
    mesh, p = MESHES[3], 3
    x = numbers(mesh, dtype, (6, 9, 12))
    for dim in (0, 1, 2, -1):
        for how in fc.schedules.algorithms("reduce_scatter", p):
            for op in ("sum", "prod"):
                run = forced("reduce_scatter", how, mesh, dim=dim, op=op)
                streams = of(run.lower(x), "reduce_scatter").streams()
                (outputs,) = interpret(streams, [list(x)], op=op, dim=dim % 3)
                assert [bits(v[0]) for v in run(x).shards] == [bits(v) for v in outputs], (dim, how, op)


def test_several_operands_each_by_themselves():
    """A pytree is one operation; every array is cut into the schedule's chunks."""
    mesh = MESHES[4]
    a, b = numbers(mesh, np.float32, (5, 13)), numbers(mesh, np.float32, (100,))
    together = per_device(mesh, lambda a, b: fc.all_reduce((a, b), "x", algorithm="ring"))(a, b)
    alone = [forced("all_reduce", "ring", mesh)(v) for v in (a, b)]
    assert [bits(v) for v in together] == [bits(v) for v in alone]
