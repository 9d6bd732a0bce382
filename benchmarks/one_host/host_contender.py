"""The interface of a contender of `benchmarks/one_host/host.py`, and the repetition of its calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.one_host.host_cases import Case

Run = Callable[[int], Sequence[np.ndarray]]
"""Executes the collective the given number of times in a row, and returns the results of the last one."""


class Turn(NamedTuple):
    """Seconds of one contender's turn, on the slowest rank."""

    seconds: float
    """Of one execution: the turn's mean, less what is subtracted."""
    subtracted: float
    """Of the same work outside the measured library."""
    median: float = 0.0
    """Of single calls, which are timed where Python calls; 0 elsewhere."""
    p99: float = 0.0
    """Their 99th percentile; of fewer than 100 calls the longest."""


def slowest(turns: Iterable[Sequence[float]]) -> Turn:
    """The turn of all ranks together: each figure is that of the rank where it is the largest."""
    means, singles = zip(*((turn[:2], turn[2:]) for turn in turns), strict=True)
    return Turn(*max(means), *map(max, zip(*singles, strict=True)))


class Contender(Protocol):
    """A library that executes the cases, as `rank` of `ranks`."""

    rank: int
    ranks: int

    def versions(self) -> dict[str, str]:
        """Versions of the measured libraries, by name."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def prepare(self, case: Case, arrays: list[np.ndarray]) -> dict[str, Run]:
        """Return ways to execute a case, by name: `native`, `python` and `numpy` (which the tables compare), or a limit's.

        `empty`, where it exists, takes the time that `native` spends outside the measured library: it is subtracted.
        """
        ...

    def reset(self) -> None:
        """Restore the inputs, where the library overwrites them."""
        ...


def read(array: np.ndarray) -> None:
    """Read a result: every word of it, as fast as NumPy can. Small ones are copied, which is the cheapest."""
    if array.nbytes <= 4096:
        array.tobytes()
    else:
        np.dot(array, array)


class Loop:
    """A user's loop around a call, written out: `loop` makes one call for each item that it is given. It is a `Run`.

    A loop keeps each result until the next one has taken its place, and reads it, as users do.
    """

    def __init__(self, loop: Callable[[Iterable[Any]], Sequence[np.ndarray]]):
        self.loop = loop

    def __call__(self, times: int) -> Sequence[np.ndarray]:
        """The results of the last call."""
        return self.loop(range(times))

    def durations(self, times: int) -> list[float]:
        """Seconds of each call, with the 0.1 µs of the loop and the clock."""
        stamps = [0] * times
        # Stores the time when the loop asks for the next item: no code of the loop's own, whoever measures.
        self.loop(map(stamps.__setitem__, range(times), iter(time.perf_counter_ns, None)))
        stamps.append(time.perf_counter_ns())
        return [(after - before) / 1e9 for before, after in itertools.pairwise(stamps)]
