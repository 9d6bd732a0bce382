"""Every collective against an oracle written with slices and a left fold over the list of shards.

One table of cases × axes × dtypes × meshes. Floats are random, so that a wrong order of combination shows:
results must be bitwise equal to the left fold in axis order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pytest
from spmd import MESHES, ON_MESHES, bits, expected, group_of, per_device, size

import funccoll as fc
from funccoll import P
from funccoll.errors import DTypeError, MeshError, ScheduleError, ShapeError, UnsupportedError, VaryingError

BF16 = fc.bfloat16
INTEGERS = [np.dtype(f"{u}int{b}") for u in ("", "u") for b in (8, 16, 32, 64)]
HALVES = [np.dtype(np.float16), BF16]
FLOATS = [*HALVES, np.dtype(np.float32), np.dtype(np.float64)]
COMPLEX = [np.dtype(np.complex64), np.dtype(np.complex128)]
DTYPES = [np.dtype(bool), *INTEGERS, *FLOATS, *COMPLEX]
OPS = ["sum", "mean", "max", "min", "prod", "and", "or", "xor"]


def has_op(op: str, dtype: np.dtype) -> bool:
    """Which ops a dtype has, by the table in the design."""
    if op in ("sum", "prod"):
        return dtype.kind != "b"
    if op == "mean":
        return dtype in FLOATS + COMPLEX
    return dtype not in COMPLEX if op in ("max", "min") else dtype.kind in "iub"


def sample(dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-1, 2, shape)
    if dtype in COMPLEX:
        values = values + 1j * rng.normal(size=shape)
    return np.asarray(values).astype(dtype)


# ---------------------------------------------------------------- the oracle


def combine(op: str) -> Callable[[Any, Any], Any]:
    def extremum(a: Any, b: Any) -> Any:
        first, second = (a > b, b > a) if op == "max" else (a < b, b < a)
        if a.dtype.kind in "iub":
            return np.where(first, a, b)
        tie = np.where(np.signbit(a) == (op == "max"), b, a)  # -0 < +0
        best = np.where(first, a, np.where(second, b, tie))
        return np.where(np.isnan(a) | np.isnan(b), np.asarray(np.nan, a.dtype), best)

    def product(a: Any, b: Any) -> Any:
        if a.dtype.kind != "c":
            return a * b
        # In real numbers: NumPy's complex a * b and b * a differ in the last bit where it fuses operations.
        parts = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
        return np.stack(parts, axis=-1).view(a.dtype)[..., 0]

    table = {"sum": np.add, "mean": np.add, "prod": product, "and": np.bitwise_and, "or": np.bitwise_or}
    return extremum if op in ("max", "min") else table.get(op, np.bitwise_xor)


def left_fold(op: str, xs: list[Any]) -> Any:
    dtype = xs[0].dtype
    if dtype in HALVES and op in ("sum", "mean", "prod"):  # in float32, rounded once
        xs = [x.astype(np.float32) for x in xs]
    with np.errstate(all="ignore"):
        total = reduce(combine(op), xs)
        return (total / total.dtype.type(len(xs)) if op == "mean" else total).astype(dtype)


def block(x: Any, dim: int, i: int, p: int) -> Any:
    return np.split(x, p, axis=dim)[i]


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Case:
    """`call(x, axes, p)` on shards of `shape(p)`; `oracle(group, i)` is what place i of a group gets."""

    name: str
    call: Callable[..., Any]
    oracle: Callable[[list[Any], int], Any]
    shape: Callable[[int], tuple[int, ...]]
    varies: bool = True
    op: str = "or"  # moving data works for every dtype
    moves: bool = True


def cases() -> list[Case]:
    out = []

    def add(name: str, call: Any, oracle: Any, *shapes: Any, **more: Any) -> None:
        for shape in shapes:
            fixed = shape if callable(shape) else lambda p, s=shape: s
            out.append(Case(f"{name} {fixed(2)}", call, oracle, fixed, **more))

    small = [(), (0,), (5,), (2, 3)]
    by_rows = [lambda p: (2 * p, 3), lambda p: (0, 3)]
    for op in OPS:
        arith = {"op": op, "moves": False}
        add(f"all_reduce {op}", lambda x, a, p, op=op: fc.all_reduce(x, a, op=op),
            lambda g, i, op=op: left_fold(op, g), *small, varies=False, **arith)
        add(f"reduce {op}", lambda x, a, p, op=op: fc.reduce(x, a, root=p - 1, op=op),
            lambda g, i, op=op: left_fold(op, g) if i == len(g) - 1 else np.zeros_like(g[i]), (), (3,), **arith)
        add(f"reduce_scatter {op} 0", lambda x, a, p, op=op: fc.reduce_scatter(x, a, op=op),
            lambda g, i, op=op: left_fold(op, [block(s, 0, i, len(g)) for s in g]), *by_rows, **arith)
        add(f"reduce_scatter {op} -1", lambda x, a, p, op=op: fc.reduce_scatter(x, a, dim=-1, op=op),
            lambda g, i, op=op: left_fold(op, [block(s, 1, i, len(g)) for s in g]), lambda p: (2, p), **arith)
    for dim in (0, 1, -1):
        add(f"all_gather {dim}", lambda x, a, p, d=dim: fc.all_gather(x, a, dim=d),
            lambda g, i, d=dim: np.concatenate(g, d), (2, 3), (2, 0), varies=False)
        add(f"all_gather {dim} stack", lambda x, a, p, d=dim: fc.all_gather(x, a, dim=d, stack=True),
            lambda g, i, d=dim: np.stack(g, d), (2, 3), (0,), varies=False)
        add(f"own_slice {dim}", lambda x, a, p, d=dim: fc.own_slice(fc.broadcast(x, a), a, dim=d),
            lambda g, i, d=dim: block(g[0], d, i, len(g)), lambda p: (p, 2 * p))
        for root in (0, -1):
            add(f"gather {dim} root {root}", lambda x, a, p, d=dim, r=root: fc.gather(x, a, root=r % p, dim=d),
                lambda g, i, d=dim, r=root: np.concatenate(g if i == r % len(g) else [np.zeros_like(s) for s in g], d),
                (2, 3), (2, 0))
            add(f"scatter {dim} root {root}", lambda x, a, p, d=dim, r=root: fc.scatter(x, a, root=r % p, dim=d),
                lambda g, i, d=dim, r=root: block(g[r % len(g)], d, i, len(g)), lambda p: (p, 2 * p))
    add("all_gather stack scalar", lambda x, a, p: fc.all_gather(x, a, stack=True), lambda g, i: np.stack(g), (),
        varies=False)
    for split, concat in ((0, 1), (1, 0), (0, 0), (1, -1)):
        add(f"all_to_all {split}->{concat}",
            lambda x, a, p, s=split, c=concat: fc.all_to_all(x, a, split_dim=s, concat_dim=c),
            lambda g, i, s=split, c=concat: np.concatenate([block(x, s, i, len(g)) for x in g], c),
            lambda p: (p, 2 * p), lambda p: (0, p))
    for name, pairs in {
        "ring": lambda p: [(i, (i + 1) % p) for i in range(p)], "mirror": lambda p: [(p - 1 - i, i) for i in range(p)],
        "one": lambda p: [(p - 1, 0)], "none": lambda p: [],
    }.items():  # fmt: skip
        def received(g: list[Any], i: int, pairs: Any = pairs) -> Any:
            sources = [s for s, d in pairs(len(g)) if d == i]
            return g[sources[0]] if sources else np.zeros_like(g[i])

        add(f"permute {name}", lambda x, a, p, q=pairs: fc.permute(x, a, pairs=q(p)), received, (), (2, 3), (0,))
    for root in (0, 1, -1):
        add(f"broadcast {root}", lambda x, a, p, r=root: fc.broadcast(x, a, root=r % p),
            lambda g, i, r=root: g[r % len(g)], (), (2, 3), (0,), varies=False)
    add("pvary", lambda x, a, p: fc.pvary(fc.broadcast(x, a), a), lambda g, i: g[0], (2,))
    add("axis_index", lambda x, a, p: fc.axis_index(a), lambda g, i: np.int32(i), (2,))
    return out


CASES = {c.name: c for c in cases()}


@pytest.mark.parametrize("where", ON_MESHES, ids=lambda w: f"{w[0]}-{'.'.join(w[1])}")
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str, where: tuple[str, tuple[str, ...]]):
    case, mesh, axes = CASES[name], MESHES[where[0]], where[1]
    p = size(mesh, axes)
    over = axes[0] if len(axes) == 1 else axes
    seen: list[Any] = []

    def call(x: Any) -> Any:
        y = case.call(x, over, p)
        seen.append((fc.axis_size(over), y.dtype, y.varying))
        return y

    run = per_device(mesh, call)
    kept = set(mesh.axis_names) - (set() if case.varies else set(axes))
    if name.startswith("axis_index"):
        kept = set(axes)
    dtypes = [d for d in DTYPES if has_op(case.op, d)] if not case.moves else DTYPES
    # All dtypes on every choice of axes would repeat the same code: the small axes take them in turn.
    if len(axes) > 1 or p == 1:
        dtypes = dtypes[:: max(1, len(dtypes) // 3)]
    rng = np.random.default_rng(p)
    for dtype in dtypes:
        x = sample(dtype, (mesh.size, *case.shape(p)), rng)
        want = expected(mesh, axes, list(x), case.oracle)
        got = run(x)
        for device, (w, g) in enumerate(zip(want, got.shards, strict=True)):
            w = np.asarray(w)
            if not name.startswith("axis_index"):
                assert seen[-1] == (p, dtype, frozenset(kept))
                w = w.astype(dtype)
            assert bits(g[0]) == bits(w), (dtype, device)
    assert seen[-1][2] == kept


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
        (odd, one, canonical, canonical), (negative, inf, canonical, canonical), (odd, negative, canonical, canonical),
        (zero, minus, zero, minus), (minus, minus, minus, minus), (zero, zero, zero, zero), (one, minus, one, minus),
        (-inf, zero, zero, -inf), (inf, one, inf, one), (odd, zero, canonical, canonical),
    ]  # fmt: skip
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
    ("all_reduce", lambda x: fc.all_reduce(x, "data")), ("all_gather", lambda x: fc.all_gather(x, "data")),
    ("permute", lambda x: fc.permute(x, "data", pairs=[(0, 1)])), ("broadcast", lambda x: fc.broadcast(x, "data")),
    ("reduce", lambda x: fc.reduce(x, "data")), ("gather", lambda x: fc.gather(x, "data")),
    ("scatter", lambda x: fc.scatter(x, "data")), ("reduce_scatter", lambda x: fc.reduce_scatter(x, "data")),
    ("all_to_all", lambda x: fc.all_to_all(x, "data", split_dim=0, concat_dim=1)),
]  # fmt: skip


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
}  # fmt: skip


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
