"""The timed collectives: kinds, algorithms, sizes, numbers of ranks."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ALGORITHMS",
    "ITEM",
    "ON_HOSTS",
    "QUICK_SIZES",
    "SIZES",
    "Case",
    "cases",
    "default_ranks",
    "fitting_sizes",
]

ITEM = 4
"""Bytes of an element: everything is float32."""
SIZES = tuple(4**i for i in range(4, 13))
"""256 B to 16 MiB in powers of 4."""
QUICK_SIZES = (1 << 10, 64 << 10, 1 << 20)
ALGORITHMS = {
    "all_reduce": ("two_shot", "one_shot", "ring"),
    "all_gather": ("direct",),
    "reduce_scatter": ("direct",),
    "all_to_all": ("direct",),
    "broadcast": ("flat",),
}
"""Collective -> its timed algorithms: those that may be chosen on one host, and one that waits for other ranks in every
round. Without that one, nothing shows the time of such a wait."""

ON_HOSTS = {
    "all_reduce": ("two_shot", "ring", "recursive_doubling", "hierarchical"),
    "all_gather": ("direct", "circulant", "hierarchical"),
    "reduce_scatter": ("direct", "circulant"),
    "all_to_all": ("direct",),
}
"""Collective -> its timed algorithms on several hosts: with few messages, with few bytes, and on two levels.

A broadcast is not among them. Its root waits for no rank, so repetitions overlap."""

_FEW = 4
"""The most cores with which more ranks than cores are measured."""


class Case(NamedTuple):
    """One algorithm on one size: `nbytes` of the larger of one rank's input and output."""

    kind: str
    algorithm: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind} {self.algorithm}"


def cases(nranks: int, sizes: tuple[int, ...], algorithms: dict[str, tuple[str, ...]] = ALGORITHMS) -> list[Case]:
    """Return every algorithm with every size. Sizes are rounded down so that ranks have equal parts."""
    unit = ITEM * nranks
    whole = sorted({max(unit, n // unit * unit) for n in sizes})
    return [Case(kind, name, n) for kind, names in algorithms.items() for name in names for n in whole]


def default_ranks(cores: int) -> list[int]:
    """Return the numbers of ranks to measure: powers of two up to the cores, and twice the cores if these are few.

    More ranks than cores share the cores by time slices, which takes other times.
    """
    return sorted({2} | {1 << i for i in range(1, 5) if 1 << i <= cores} | ({2 * cores} if cores <= _FEW else set()))


def fitting_sizes(sizes: tuple[int, ...], nranks: int, memory: int) -> tuple[int, ...]:
    """Return the sizes whose inputs and outputs, on all ranks, take at most a quarter of `memory` bytes."""
    return tuple(n for n in sizes if 8 * n * nranks <= memory)
