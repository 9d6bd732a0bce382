"""Runs of consecutive chunks, as columns: cut into single chunks, and as sequences of the parts of a block."""

from __future__ import annotations

import numpy as np

from .moves import Batch

__all__ = ["chunks_of_runs", "expand", "part_steps"]


def chunks_of_runs(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (run, number within its run) of every chunk of runs of `count` chunks, run after run."""
    run = np.repeat(np.arange(len(count)), count)
    return run, np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)


def expand(batch: Batch, nranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the runs of a batch into single chunks. Returns (destinations, sources, row in the batch)."""
    if (batch.count == 1).all():
        return batch.dst, batch.src, np.arange(len(batch))
    row, within = chunks_of_runs(batch.count)
    step = (within * nranks).astype(batch.dst.dtype)[:, None]
    return batch.dst[row] + step, batch.src[row] + step, row


def part_steps(part: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return the part of each run's first chunk, the step to the next one's, and True if all runs are such sequences.

    `part` has the parts of all chunks of the runs.
    """
    step = np.zeros(len(count), part.dtype)
    if len(part) == len(count):
        return part, step, True
    run, within = chunks_of_runs(count)
    first = part[within == 0]
    step[count > 1] = part[within == 1] - first[count > 1]
    return first, step, bool((first[run] + within * step[run] == part).all())
