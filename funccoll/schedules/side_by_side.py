"""Schedules of disjoint groups as one schedule of all their ranks, for groups of different sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .moves import Batch
from .schedule import Schedule

__all__ = ["side_by_side"]


@functools.lru_cache(maxsize=256)
def side_by_side(parts: tuple[Schedule, ...], groups: tuple[tuple[int, ...], ...]) -> Schedule:
    """Return the proved schedule in which each group of ranks runs its own schedule, all at the same time.

    Blocks are cut into the least common multiple of the parts' chunks, so that every part finds its chunks as runs of them.

    Args:
        parts: The schedule of each group, of one kind, root and direction, with one channel. Ranks count in the group.
        groups: The ranks of each group, in the order of its schedule. Each rank is in one.

    Raises:
        ScheduleError: If the groups are not a partition of the ranks, or the kind has blocks for single ranks.
    """
    chunks = math.lcm(*(part.collective.chunks for part in parts))
    first = parts[0].collective
    collective = replace(first, nranks=sum(map(len, groups)), chunks=chunks, groups=groups).check()
    factors = [chunks // part.collective.chunks for part in parts]
    scratch = max(part.scratch_chunks * factor for part, factor in zip(parts, factors, strict=True))
    batches = [
        _among(part, group, factor, collective.nranks) for part, group, factor in zip(parts, groups, factors, strict=True)
    ]
    rounds = sorted((batch for of_part in batches for batch in of_part), key=lambda batch: batch.round)
    name = " and ".join(dict.fromkeys(part.algorithm for part in parts))
    schedule = Schedule(collective, name, tuple(rounds), scratch)
    schedule.prove()
    return schedule


def _among(part: Schedule, group: Sequence[int], factor: int, nranks: int) -> list[Batch]:
    """Return a part's batches among the ranks of its group. Input and output have one block each, so rows only scale."""
    ranks, size = np.array(group, np.int64), part.nranks

    def places(codes: np.ndarray) -> np.ndarray:
        row, rank = np.divmod(codes.astype(np.int64), size)
        return (row * factor * nranks + ranks[rank]).astype(np.int32)

    return [
        replace(
            batch,
            dst=places(batch.dst),
            src=places(batch.src),
            count=(batch.count * factor).astype(batch.count.dtype),
            by=ranks[batch.by].astype(batch.by.dtype),
        )
        for batch in part.batches
    ]
