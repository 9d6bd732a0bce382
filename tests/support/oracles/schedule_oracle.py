"""What each collective must give, from plain NumPy, and the schedules that the tests run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

import funccoll.schedules as fs
from funccoll.schedules.registry import find
from funccoll.schedules.schedule import Schedule

FLOAT_KINDS = "fcV"  # ml_dtypes' bfloat16 has kind V

REDUCE = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def wide(x: np.ndarray) -> np.ndarray:
    """Floats in the longest type there is, everything else as it is."""
    if x.dtype.kind not in FLOAT_KINDS:
        return x
    return x.astype(np.clongdouble if x.dtype.kind == "c" else np.longdouble)


def reduced(inputs: Sequence[np.ndarray], op: str) -> np.ndarray:
    """The reduction over all ranks, in wide floats; integers wrap."""
    x = np.stack([wide(a) for a in inputs])
    total = REDUCE[op].reduce(x, axis=0, dtype=x.dtype)
    return total / len(inputs) if op == "mean" else total


def expected(
    collective: Any, inputs: Sequence[np.ndarray], op: str = "sum", dim: int = 0, concat_dim: int = 0
) -> list[np.ndarray | None]:
    """Every rank's output, None for ranks without one; reductions of floats are in wide floats."""
    p, root = collective.nranks, collective.root
    ranks = range(p)

    def scanned(r: int, own: int) -> np.ndarray | None:
        before = range(p - 1, r - own, -1) if collective.reverse else range(r + own)
        return reduced([inputs[i] for i in before], op) if before else None

    def split(x: np.ndarray) -> list[np.ndarray]:
        return np.split(x, p, axis=dim)

    match collective.kind:
        case "all_reduce" | "barrier":
            return [reduced(inputs, op)] * p
        case "reduce":
            return [reduced(inputs, op) if r == root else None for r in ranks]
        case "reduce_scatter":
            return list(split(reduced(inputs, op)))
        case "all_gather":
            return [np.concatenate(inputs, axis=dim)] * p
        case "gather":
            return [np.concatenate(inputs, axis=dim) if r == root else None for r in ranks]
        case "broadcast":
            return [inputs[root]] * p
        case "scatter":
            return list(split(inputs[root]))
        case "all_to_all":
            blocks = [split(x) for x in inputs]
            return [np.concatenate([of_one[r] for of_one in blocks], axis=concat_dim) for r in ranks]
        case "inclusive_scan":
            return [scanned(r, 1) for r in ranks]
        case "exclusive_scan":
            return [scanned(r, 0) for r in ranks]
        case "permute":
            sources = {d: s for s, d in collective.pairs}
            return [inputs[sources[r]] if r in sources else None for r in ranks]
    raise AssertionError(collective.kind)


class Oracle:
    """What must come out for some inputs; keeps it, to compare many runs with it."""

    def __init__(self, collective: Any, inputs: Sequence[np.ndarray], op: str = "sum", dim: int = 0, concat_dim: int = 0):
        self.collective, self.dtype = collective, inputs[0].dtype
        self.wanted = [None if x is None else wide(x) for x in expected(collective, inputs, op, dim, concat_dim)]
        self.rounds = collective.meaning.reduces and self.dtype.kind in FLOAT_KINDS and op in ("sum", "mean", "prod")
        self.bounds = [np.zeros(())] * collective.nranks
        if self.rounds:
            bound = rounding(inputs, op)
            scattered = collective.kind == "reduce_scatter"
            self.bounds = np.split(bound, collective.nranks, axis=dim) if scattered else [bound] * collective.nranks
            if collective.meaning.prefix and op == "prod":  # that of a prefix may be larger
                self.bounds = [
                    rounding([inputs[i] for i in collective.contributors(r)] or inputs, op) for r in range(len(inputs))
                ]

    def check(self, outputs: Sequence[np.ndarray | None], what: Any = "") -> None:
        """Integers and moved data must be equal, reductions of floats within their rounding; copies equal in bits."""
        for rank, (a, b) in enumerate(zip(outputs, self.wanted, strict=True)):
            where = f"{self.collective}: rank {rank} {what}"
            assert (a is None) == (b is None), where
            if a is None or b is None:
                continue
            assert a.dtype == self.dtype and a.shape == b.shape, (where, a.dtype, a.shape, b.shape)
            right = np.abs(wide(a) - b) <= self.bounds[rank] if self.rounds else wide(a) == b
            assert right.all(), f"{where}: {a[~right][:3]} is not {b[~right][:3]} ({(~right).sum()} of {right.size} are wrong)"
        if self.collective.kind in ("all_reduce", "barrier", "all_gather", "broadcast"):
            assert len({a.tobytes() for a in outputs if a is not None}) == 1, f"{self.collective}: ranks differ in bits {what}"


def check(
    collective: Any,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray | None],
    op: str = "sum",
    dim: int = 0,
    concat_dim: int = 0,
) -> None:
    """Compare one run's outputs with the oracle."""
    Oracle(collective, inputs, op, dim, concat_dim).check(outputs)


def rounding(inputs: Sequence[np.ndarray], op: str) -> np.ndarray:
    """How far any order of combination may be from the exact result (Higham 2002, section 4.2: p rounding errors)."""
    import ml_dtypes

    p = len(inputs)
    size = reduced([np.abs(wide(a)) for a in inputs], op)
    info = ml_dtypes.finfo(inputs[0].dtype)
    unit = float(info.eps) * (4 if inputs[0].dtype.kind == "c" else 1)
    # A subnormal loses up to its last place, which the later factors of a product multiply.
    factor = reduced([np.maximum(np.abs(wide(a)), 1) for a in inputs], op) if op == "prod" else 1
    return (size * unit + float(info.smallest_subnormal) * factor) * (p + 1)


def make_inputs(rng: np.random.Generator, p: int, shape: Sequence[int], dtype: Any) -> list[np.ndarray]:
    """One array for each rank: integers of all sizes, floats of different magnitudes."""
    dtype = np.dtype(dtype)
    out = []
    for _ in range(p):
        if dtype.kind == "b":
            x = rng.integers(0, 2, shape).astype(bool)
        elif dtype.kind in "iu":
            info = np.iinfo(dtype)
            x = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
        else:
            x = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)
            x = (x + 1j * rng.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)
        out.append(x)
    return out


def built(kind: str, p: int, name: str, **options: Any) -> Schedule:
    """`schedules.build`: small schedules are made once in a session, with what they keep (proof, streams, messages)."""
    given = tuple((option, tuple(v) if option == "pairs" else v) for option, v in sorted(options.items()))
    return _built(kind, p, name, given) if p <= 17 else fs.build(kind, p, name, **options)


@cache
def _built(kind: str, p: int, name: str, options: tuple[tuple[str, Any], ...]) -> Schedule:
    return fs.build(kind, p, name, **dict(options))


def host_maps(p: int) -> list[tuple[int, ...]]:
    """The host of each rank: equal hosts in the order of ranks, hosts of other sizes, and ranks in another order."""
    equal = [tuple(np.repeat(np.arange(h), p // h).tolist()) for h in range(1, p + 1) if p % h == 0]
    others = [(*(0,) * (p - 1), 1), tuple(r % 2 for r in range(p)), tuple(r * r % 3 for r in range(p))]
    return [*equal, *(found for found in dict.fromkeys(others) if found not in equal and p > 2)]


def variants(p: int, kinds: Sequence[str] | None = None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(kind, algorithm, options of build) for every algorithm that does p ranks: roots, hosts, chunks, pairs."""
    from funccoll.schedules.collective import KINDS

    for kind in kinds or KINDS:
        for name in fs.algorithms(kind, p):
            takes = find(kind, name, p).options
            roots = sorted({0, p - 1, p // 2}) if KINDS[kind].rooted else [0]
            maps = host_maps(p) if "hosts" in takes else [None]
            chunks = [None, 3] if "chunks" in takes else [None]
            reverses = [False, True] if KINDS[kind].prefix else [False]
            pairs: list[Any] = [()]
            if kind == "permute":
                pairs = [[(r, (r + 1) % p) for r in range(p)], [(r, r + 1) for r in range(p - 1)], []]
            for root in roots:
                for hosts in maps if root == roots[0] else maps[-1:]:
                    for chunk in chunks if root == roots[-1] or chunks == [None] else chunks[:1]:
                        for pair in pairs:
                            for reverse in reverses:
                                given = {"root": root, "hosts": hosts, "chunks": chunk, "pairs": pair, "reverse": reverse}
                                yield kind, name, {k: v for k, v in given.items() if v}
