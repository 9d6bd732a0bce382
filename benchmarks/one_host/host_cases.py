"""Cases of `benchmarks/one_host/host.py`: collectives and sizes, inputs and expected outputs.

Every rank and every contender works on these. The size of a case is, as in nccl-tests, the larger of one rank's input
and output, in bytes; all is float32. Where each rank must have one part for every other, the smallest size is 4 B for
each rank. The values are small integers, whose sums are exact: results must be equal bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
STEP = "32 all_reduces"
"""A step with 32 all_reduces of the case's size each."""
STEP_CALLS = 32
ITEM = 4
SIZES = tuple(4**i for i in range(1, 14))
"""4 B to 64 MiB in powers of 4."""


class Case(NamedTuple):
    """One collective on one size."""

    kind: str
    nbytes: int


def cases(ranks: int, sizes: tuple[int, ...] = SIZES, collectives: tuple[str, ...] = COLLECTIVES) -> list[Case]:
    """Every collective on every size that it can have among `ranks` ranks."""
    found = []
    for kind in collectives:
        least = ITEM if kind in ("all_reduce", "broadcast") else ITEM * ranks
        found += [Case(kind, n) for n in sorted({max(n, least) for n in sizes})]
    return found


def inputs(case: Case, rank: int, ranks: int) -> list[np.ndarray]:
    """Inputs of a rank: one array, or those of the step."""
    count = case.nbytes // ITEM // (ranks if case.kind == "all_gather" else 1)
    return [_values(_pattern(rank + ranks * i), 0, count) for i in range(_arrays(case))]


def output_count(case: Case, ranks: int) -> int:
    """Number of elements of each rank's output."""
    return case.nbytes // ITEM // (ranks if case.kind == "reduce_scatter" else 1)


def outputs(case: Case, rank: int, ranks: int) -> list[np.ndarray]:
    """Expected outputs of a rank."""
    count = case.nbytes // ITEM
    part = count // ranks
    given = [_pattern(r) for r in range(ranks)]
    if case.kind == "all_gather":
        return [np.concatenate([_values(pattern, 0, part) for pattern in given])]
    if case.kind == "all_to_all":
        return [np.concatenate([_values(pattern, rank * part, part) for pattern in given])]
    if case.kind == "broadcast":
        return [_values(given[0], 0, count)]
    sums = [sum(_pattern(r + ranks * i) for r in range(ranks)) for i in range(_arrays(case))]
    if case.kind == "reduce_scatter":
        return [_values(sums[0], rank * part, part)]
    return [_values(pattern, 0, count) for pattern in sums]


def _arrays(case: Case) -> int:
    return STEP_CALLS if case.kind == STEP else 1


def _pattern(seed: int) -> np.ndarray:
    """A pattern that differs for every seed and at every shift, since 1021 is prime."""
    return (np.arange(1021) + 7 * seed) % 1021


def _values(pattern: np.ndarray, start: int, count: int) -> np.ndarray:
    """The pattern repeated for ever, from `start` on."""
    return np.resize(np.roll(pattern, -start).astype(np.float32), count)
