"""Every collective against an oracle written with slices and a left fold over the list of shards.

One table of cases × axes × dtypes × meshes. Floats are random, so that a wrong order of combination shows:
results must be bitwise equal to the left fold in axis order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import DTypeError, MeshError, ScheduleError, ShapeError, UnsupportedError, VaryingError
from tests.support.cases.collective_cases import CASES, FLOATS, dtypes_of, left_fold, sample
from tests.support.groups import in_groups
from tests.support.spmd import MESHES, bits, expected, group_of, on_meshes, per_device, size

pytestmark = pytest.mark.covers("collectives")

FEW = 24
"""Of the 24 choices of axes one for each of 180 cases, another one for the next case."""


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(FEW, id="a few axes"),
        pytest.param(3, id="more axes", marks=pytest.mark.slow),
        pytest.param(1, id="all axes", marks=pytest.mark.exhaustive),
    ],
)
@in_groups("name", CASES, of=5)
def test_against_the_oracle(name: str, every: int):
    """On every mesh along choices of axes; all dtypes are in one program, along a few axes a third of them in turn."""
    case = CASES[name]
    for number, (of_mesh, axes) in enumerate(on_meshes(name, CASES, every), list(CASES).index(name)):
        mesh, over = MESHES[of_mesh], axes[0] if len(axes) == 1 else axes
        p = size(mesh, axes)
        # All dtypes on every choice of axes would repeat the same code: the small axes take them in turn.
        dtypes = dtypes_of(case)
        if every == FEW:
            dtypes = dtypes[number % 3 :: 3]
        elif len(axes) > 1 or p == 1:
            dtypes = dtypes[:: max(1, len(dtypes) // 3)]
        seen: list[Any] = []

        def every_dtype(*xs: Any, over: Any = over, p: int = p, seen: list[Any] = seen) -> Any:
            ys = [case.call(x, over, p) for x in xs]
            seen.extend((fc.axis_size(over), y.dtype, y.varying) for y in ys)
            return ys

        rng = np.random.default_rng(p)
        xs = [sample(dtype, (mesh.size, *case.shape(p)), rng) for dtype in dtypes]
        found = per_device(mesh, every_dtype)(*xs)
        kept = set(mesh.axis_names) - (set() if case.varies else set(axes))
        kept = set(axes) if name.startswith("axis_index") else kept
        for dtype, x, got, what in zip(dtypes, xs, found, seen, strict=True):
            wanted = dtype if not name.startswith("axis_index") else np.dtype(np.int32)
            assert what == (p, wanted, frozenset(kept)), (of_mesh, axes, dtype)
            for device, (w, g) in enumerate(zip(expected(mesh, axes, list(x), case.oracle), got.shards, strict=True)):
                assert bits(g[0]) == bits(np.asarray(w).astype(wanted)), (of_mesh, axes, dtype, device)


def test_all_replicas_are_one_value(mesh):
    """A replicated result, asked for per device, is the same bits everywhere."""
    x = np.random.default_rng(0).normal(size=(8, 33)).astype(np.float32)
    for axes in ("data", ("model", "data")):
        for shard in per_device(mesh, lambda x: fc.all_reduce(x, axes))(x).shards[::2]:
            group, _ = group_of(mesh, (axes,) if isinstance(axes, str) else axes, 0)
            assert bits(shard[0]) == bits(left_fold("sum", [x[d] for d in group]))


def test_blocked_fold_of_large_arrays(line):
    """Arrays larger than a cache block take another path through the fold: the same bits."""
    x = np.random.default_rng(0).normal(size=(4, 100_003)).astype(np.float32)
    for op in ("sum", "mean", "prod", "max"):
        got = per_device(line, lambda x, op=op: fc.all_reduce(x, "data", op=op))(x)
        assert bits(got.shards[3][0]) == bits(left_fold(op, list(x)))


# ---------------------------------------------------------------- bits of max and min


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extrema_do_not_see_the_order_of_devices(dtype):
    mesh = fc.make_mesh({"x": 2})
    unsigned = np.dtype(f"u{dtype.itemsize}")
    canonical = np.asarray(np.nan, dtype)
    odd = (canonical.view(unsigned) | 1).view(dtype)  # a NaN with another payload
    negative = (canonical.view(unsigned) ^ unsigned.type(1 << (8 * dtype.itemsize - 1))).view(dtype)
    zero, minus = np.asarray(0.0, dtype), np.asarray(-0.0, dtype)
    one, inf = np.asarray(1, dtype), np.asarray(np.inf, dtype)
    pairs = [  # a, b, max, min
        (odd, one, canonical, canonical),
        (negative, inf, canonical, canonical),
        (odd, negative, canonical, canonical),
        (zero, minus, zero, minus),
        (minus, minus, minus, minus),
        (zero, zero, zero, zero),
        (one, minus, one, minus),
        (-inf, zero, zero, -inf),
        (inf, one, inf, one),
        (odd, zero, canonical, canonical),
    ]
    left, right, high, low = (np.array(column, dtype) for column in zip(*pairs))
    for a, b in ((left, right), (right, left)):
        for op, want in (("max", high), ("min", low)):
            x = np.stack([a, b])
            for shard in per_device(mesh, lambda x, op=op: fc.all_reduce(x, "x", op=op))(x).shards:
                assert bits(shard[0]) == bits(want), op
            on_root = per_device(mesh, lambda x, op=op: fc.reduce(x, "x", root=1, op=op))(x).shards[1]
            assert bits(on_root[0]) == bits(want)
            scatter = per_device(mesh, lambda x, op=op: fc.reduce_scatter(x, "x", op=op))(x).shards
            assert bits(np.concatenate([s[0] for s in scatter])) == bits(want)
    lonely = fc.make_mesh({"x": 1})
    for op in ("max", "min"):  # one device alone gives the same NaN, and leaves signed zeros as they are
        (shard,) = per_device(lonely, lambda x, op=op: fc.all_reduce(x, "x", op=op))(left[None]).shards
        assert bits(shard[0]) == bits(np.where(np.isnan(left), canonical, left))


# ---------------------------------------------------------------- programs


CALLS = [
    ("all_reduce", lambda x: fc.all_reduce(x, "data")),
    ("all_gather", lambda x: fc.all_gather(x, "data")),
    ("permute", lambda x: fc.permute(x, "data", pairs=[(0, 1)])),
    ("broadcast", lambda x: fc.broadcast(x, "data")),
    ("reduce", lambda x: fc.reduce(x, "data")),
    ("gather", lambda x: fc.gather(x, "data")),
    ("scatter", lambda x: fc.scatter(x, "data")),
    ("reduce_scatter", lambda x: fc.reduce_scatter(x, "data")),
    ("all_to_all", lambda x: fc.all_to_all(x, "data", split_dim=0, concat_dim=1)),
]


def test_a_pytree_is_one_operation(mesh):
    def tree_of(x: Any) -> Any:
        return {"a": x, "b": (x[:4], [2 * x])}

    together = per_device(mesh, lambda x: [call(tree_of(x)) for _, call in CALLS])
    alone = per_device(mesh, lambda x: [fc.tree.map(call, tree_of(x)) for _, call in CALLS])
    x = np.random.default_rng(0).normal(size=(8, 8, 4)).astype(np.float32)
    found = [(e.primitive.name, len(e.outputs)) for e in together.trace(x).program.check().collectives()]
    assert found == [(name, 3) for name, _ in CALLS]
    assert len(alone.trace(x).program.collectives()) == 3 * len(CALLS)
    assert fc.tree.map(bits, together(x)) == fc.tree.map(bits, alone(x))


def test_an_empty_tree_communicates_nothing(line):
    run = per_device(line, lambda x: (fc.all_reduce({"none": [], "nothing": None}, "data"), x))
    assert run.trace(np.ones((4, 2))).program.collectives() == []


def test_barrier_keeps_its_place(line):
    def around(x: Any, barrier: bool) -> Any:
        first = fc.all_reduce(x, "data")
        if barrier:
            fc.barrier("data")
        return first, fc.all_reduce(2 * x, "data"), fc.all_gather(x, "data")

    def order(barrier: bool) -> list[str]:
        jitted = per_device(line, lambda x: around(x, barrier))
        return [e.primitive.name for e in jitted.lower(np.ones((4, 2))).program.collectives()]

    assert order(True) == ["all_reduce", "barrier", "all_reduce", "all_gather"]
    assert sorted(order(False)) == ["all_gather", "all_reduce"]  # the two all_reduces become one


# ---------------------------------------------------------------- refusals


REFUSED = {
    "algorithm": (lambda x: fc.all_reduce(x, "data", algorithm="rnig"), ScheduleError, "For 4 ranks there are: "),
    "no algorithm": (lambda x: fc.gather(x, "data", algorithm=True), ScheduleError, "gather: algorithm=True must be the name"),
    "axis": (lambda x: fc.all_reduce(x, "rows"), MeshError, "data"),
    "twice": (lambda x: fc.all_reduce(x, ("data", "data")), MeshError, "twice"),
    "no axis": (lambda x: fc.all_reduce(x, ()), MeshError, "no axis"),
    "not varying": (lambda x: fc.all_reduce(fc.all_reduce(x, "data"), "data"), VaryingError, "pvary"),
    "one not varying": (lambda x: fc.gather(fc.broadcast(x, "data"), ("data", "model")), VaryingError, "'data'"),
    "op": (lambda x: fc.all_reduce(x, "data", op="median"), UnsupportedError, "sum"),
    "complex max": (lambda x: fc.all_reduce(x + 1j, "data", op="max"), DTypeError, "order"),
    "float and": (lambda x: fc.reduce(x, "data", op="and"), DTypeError, "bitwise"),
    "bool sum": (lambda x: fc.all_reduce(x > 0, "data"), DTypeError, "astype"),
    "integer mean": (lambda x: fc.reduce_scatter(x.astype(np.int32), "data", op="mean"), DTypeError, "float32"),
    "divide": (lambda x: fc.reduce_scatter(x[:6], "data"), ShapeError, "Pad it to 8"),
    "dim": (lambda x: fc.all_gather(x, "data", dim=1), ShapeError, "dim=1"),
    "root": (lambda x: fc.broadcast(x, "data", root=4), ShapeError, "0 to 3"),
    "pairs twice": (lambda x: fc.permute(x, "data", pairs=[(0, 1), (2, 1)]), ShapeError, "destination"),
    "pairs range": (lambda x: fc.permute(x, "data", pairs=[(0, 4)]), ShapeError, "position"),
    "own slice": (lambda x: fc.own_slice(x, "data"), VaryingError, "varies"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, mesh):
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        per_device(mesh, call).trace(np.ones((8, 8), np.float32))


def test_outside_a_mesh():
    with pytest.raises(MeshError, match="outside a mesh"):
        fc.all_reduce(np.ones(3), "data")


def test_out_specs_cannot_claim_more_than_the_type_proves(line):
    run = fc.jit(lambda x: fc.permute(x, "data", pairs=[(0, 1)]), mesh=line, in_specs=P("data"), out_specs=P())
    with pytest.raises(VaryingError, match="out_specs"):
        run(np.ones(4))
