"""The collectives that are timed: which kinds, algorithms and sizes, on which numbers of ranks."""

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
"""Bytes of an element: all is float32."""
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
"""Collective -> the algorithms that are timed: those that may be chosen on one host, and one that waits for others in every
round, because without it nothing tells what such a wait takes."""

ON_HOSTS = {
    "all_reduce": ("two_shot", "ring", "recursive_doubling", "hierarchical"),
    "all_gather": ("direct", "circulant", "hierarchical"),
    "reduce_scatter": ("direct", "circulant"),
    "all_to_all": ("direct",),
}
"""Collective -> the algorithms that are timed on several hosts: with few messages, with few bytes, and on two levels.

A broadcast is none of them: its root waits for no rank, so that repetitions overlap."""

_FEW = 4
"""Cores up to which more ranks than cores are measured."""


class Case(NamedTuple):
    """One algorithm on one size: `nbytes` of the larger of one rank's input and output."""

    kind: str
    algorithm: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind} {self.algorithm}"


def cases(nranks: int, sizes: tuple[int, ...], algorithms: dict[str, tuple[str, ...]] = ALGORITHMS) -> list[Case]:
    """Every algorithm on every size; sizes are rounded down to what ranks can have equal parts of."""
    unit = ITEM * nranks
    whole = sorted({max(unit, n // unit * unit) for n in sizes})
    return [Case(kind, name, n) for kind, names in algorithms.items() for name in names for n in whole]


def default_ranks(cores: int) -> list[int]:
    """The numbers of ranks that are measured: powers of two up to the cores, and twice the cores where these are few.

    More ranks than cores take turns on them, which costs other times.
    """
    return sorted({2} | {1 << i for i in range(1, 5) if 1 << i <= cores} | ({2 * cores} if cores <= _FEW else set()))


def fitting_sizes(sizes: tuple[int, ...], nranks: int, memory: int) -> tuple[int, ...]:
    """The sizes whose inputs and outputs, of all ranks, take at most a quarter of `memory` bytes."""
    return tuple(n for n in sizes if 8 * n * nranks <= memory)
