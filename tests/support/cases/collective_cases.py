"""The one table of collectives: case x shape x dtype x axis x op, with an oracle of slices and a left fold over shards.

`test_collectives.py` runs it on virtual devices, `process_cases.py` in each process of a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

import funccoll as fc

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


def sample_nans(dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Floats of which half are NaNs of any sign and payload, quiet and signalling; among the rest infinities and zeros."""
    if dtype in COMPLEX:
        return sample_nans(np.empty(0, dtype).real.dtype, (*shape[:-1], 2 * shape[-1]), rng).view(dtype)
    word = np.dtype(f"u{dtype.itemsize}")
    infinity = np.asarray(np.inf, dtype).view(word)
    payload = rng.integers(1, (np.iinfo(word).max // 2) & ~int(infinity), shape, word, endpoint=True)
    sign = rng.integers(0, 2, shape, word) << word.type(8 * dtype.itemsize - 1)
    number = np.array([np.inf, 0.0, 1.0, 3.0], dtype).view(word)[rng.integers(0, 4, shape)]
    return (np.where(rng.random(shape) < 0.5, infinity | payload, number) | sign).view(dtype)


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


def before(group: list[Any], i: int, reverse: bool) -> list[Any]:
    """The shards that a scan combines before that of place i."""
    return group[:i:-1] if reverse else group[:i]


def neutral(op: str, x: Any) -> Any:
    """What changes nothing, in the shape and dtype of `x`."""
    if op in ("max", "min"):
        limits = np.iinfo(x.dtype) if x.dtype.kind in "iu" else None
        lowest = False if x.dtype.kind == "b" else limits.min if limits else -np.inf
        highest = True if x.dtype.kind == "b" else limits.max if limits else np.inf
        return np.full_like(x, lowest if op == "max" else highest)
    return ~np.zeros_like(x) if op == "and" else np.full_like(x, op == "prod")


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
        add(
            f"all_reduce {op}",
            lambda x, a, p, op=op: fc.all_reduce(x, a, op=op),
            lambda g, i, op=op: left_fold(op, g),
            *small,
            varies=False,
            **arith,
        )
        add(
            f"reduce {op}",
            lambda x, a, p, op=op: fc.reduce(x, a, root=p - 1, op=op),
            lambda g, i, op=op: left_fold(op, g) if i == len(g) - 1 else np.zeros_like(g[i]),
            (),
            (3,),
            **arith,
        )
        add(
            f"reduce_scatter {op} 0",
            lambda x, a, p, op=op: fc.reduce_scatter(x, a, op=op),
            lambda g, i, op=op: left_fold(op, [block(s, 0, i, len(g)) for s in g]),
            *by_rows,
            **arith,
        )
        add(
            f"reduce_scatter {op} -1",
            lambda x, a, p, op=op: fc.reduce_scatter(x, a, dim=-1, op=op),
            lambda g, i, op=op: left_fold(op, [block(s, 1, i, len(g)) for s in g]),
            lambda p: (2, p),
            **arith,
        )
        if op != "mean":
            for reverse, *shapes in ((False, (), (0,), (2, 3)), (True, (5,))):
                way = " reverse" * reverse
                add(
                    f"inclusive_scan {op}{way}",
                    lambda x, a, p, op=op, back=reverse: fc.inclusive_scan(x, a, op=op, reverse=back),
                    lambda g, i, op=op, back=reverse: left_fold(op, before(g, i, back) + [g[i]]),
                    *shapes,
                    **arith,
                )
                add(
                    f"exclusive_scan {op}{way}",
                    lambda x, a, p, op=op, back=reverse: fc.exclusive_scan(x, a, op=op, reverse=back),
                    lambda g, i, op=op, back=reverse: left_fold(op, before(g, i, back) or [neutral(op, g[i])]),
                    *shapes[-1:],
                    **arith,
                )
    for dim in (0, 1, -1):
        add(
            f"all_gather {dim}",
            lambda x, a, p, d=dim: fc.all_gather(x, a, dim=d),
            lambda g, i, d=dim: np.concatenate(g, d),
            (2, 3),
            (2, 0),
            varies=False,
        )
        add(
            f"all_gather {dim} stack",
            lambda x, a, p, d=dim: fc.all_gather(x, a, dim=d, stack=True),
            lambda g, i, d=dim: np.stack(g, d),
            (2, 3),
            (0,),
            varies=False,
        )
        add(
            f"own_slice {dim}",
            lambda x, a, p, d=dim: fc.own_slice(fc.broadcast(x, a), a, dim=d),
            lambda g, i, d=dim: block(g[0], d, i, len(g)),
            lambda p: (p, 2 * p),
        )
        for root in (0, -1):
            add(
                f"gather {dim} root {root}",
                lambda x, a, p, d=dim, r=root: fc.gather(x, a, root=r % p, dim=d),
                lambda g, i, d=dim, r=root: np.concatenate(g if i == r % len(g) else [np.zeros_like(s) for s in g], d),
                (2, 3),
                (2, 0),
            )
            add(
                f"scatter {dim} root {root}",
                lambda x, a, p, d=dim, r=root: fc.scatter(x, a, root=r % p, dim=d),
                lambda g, i, d=dim, r=root: block(g[r % len(g)], d, i, len(g)),
                lambda p: (p, 2 * p),
            )
    add("all_gather stack scalar", lambda x, a, p: fc.all_gather(x, a, stack=True), lambda g, i: np.stack(g), (), varies=False)
    for split, concat in ((0, 1), (1, 0), (0, 0), (1, -1)):
        add(
            f"all_to_all {split}->{concat}",
            lambda x, a, p, s=split, c=concat: fc.all_to_all(x, a, split_dim=s, concat_dim=c),
            lambda g, i, s=split, c=concat: np.concatenate([block(x, s, i, len(g)) for x in g], c),
            lambda p: (p, 2 * p),
            lambda p: (0, p),
        )
    for name, pairs in {
        "ring": lambda p: [(i, (i + 1) % p) for i in range(p)],
        "mirror": lambda p: [(p - 1 - i, i) for i in range(p)],
        "one": lambda p: [(p - 1, 0)],
        "none": lambda p: [],
    }.items():

        def received(g: list[Any], i: int, pairs: Any = pairs) -> Any:
            sources = [s for s, d in pairs(len(g)) if d == i]
            return g[sources[0]] if sources else np.zeros_like(g[i])

        add(f"permute {name}", lambda x, a, p, q=pairs: fc.permute(x, a, pairs=q(p)), received, (), (2, 3), (0,))
    for root in (0, 1, -1):
        add(
            f"broadcast {root}",
            lambda x, a, p, r=root: fc.broadcast(x, a, root=r % p),
            lambda g, i, r=root: g[r % len(g)],
            (),
            (2, 3),
            (0,),
            varies=False,
        )
    add("barrier", lambda x, a, p: (fc.barrier(a), x)[1], lambda g, i: g[i], (2,))
    add("pvary", lambda x, a, p: fc.pvary(fc.broadcast(x, a), a), lambda g, i: g[0], (2,))
    add("axis_index", lambda x, a, p: fc.axis_index(a), lambda g, i: np.int32(i), (2,))
    return out


CASES = {c.name: c for c in cases()}


def dtypes_of(case: Case) -> list[np.dtype]:
    """The dtypes that a case is for."""
    return DTYPES if case.moves else [d for d in DTYPES if has_op(case.op, d)]
