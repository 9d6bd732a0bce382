"""The interface of a contender of `benchmarks/host.py`, and the repetition of its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from host_cases import Case

Run = Callable[[int], Sequence[np.ndarray]]
"""Executes the collective the given number of times in a row, and returns the results of the last one."""


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


def reading(call: Callable[[], np.ndarray]) -> Run:
    """Repeat `call`; each result is read and released."""

    def run(times: int) -> list[np.ndarray]:
        for _ in range(times - 1):
            read(call())
        array = call()
        read(array)
        return [array]

    return run


def repeated(call: Callable[[], Sequence[np.ndarray]]) -> Run:
    """Repeat `call` without reading results: reading costs the same for all contenders, and more than the call."""

    def run(times: int) -> Sequence[np.ndarray]:
        for _ in range(times):
            arrays = call()
        return arrays

    return run
