"""What a contender of `benchmarks/host.py` is, and how its calls are repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from host_cases import Case

Run = Callable[[int], Sequence[np.ndarray]]
"""Executes the collective so many times, one after the other; the results of the last time."""


class Contender(Protocol):
    """What can execute the cases: `rank` of `ranks`."""

    rank: int
    ranks: int

    def versions(self) -> dict[str, str]:
        """Of what is measured, by name."""
        ...

    def barrier(self) -> None:
        """Of all ranks."""
        ...

    def prepare(self, case: Case, arrays: list[np.ndarray]) -> dict[str, Run]:
        """Ways to execute a case, by name: `native`, `python` and `numpy` (what the tables compare), or a limit's.

        `empty`, if it is there, takes what `native` spends outside of the library that is measured: it is subtracted.
        """
        ...

    def reset(self) -> None:
        """Put the values in anew, where the library overwrites them."""
        ...


def read(array: np.ndarray) -> None:
    """Read a result: every word of it, as fast as NumPy can. Small ones are copied, which is the cheapest."""
    if array.nbytes <= 4096:
        array.tobytes()
    else:
        np.dot(array, array)


def reading(call: Callable[[], np.ndarray]) -> Run:
    """`call` so many times; each time its result is read, and let go."""

    def run(times: int) -> list[np.ndarray]:
        for _ in range(times - 1):
            read(call())
        array = call()
        read(array)
        return [array]

    return run


def repeated(call: Callable[[], Sequence[np.ndarray]]) -> Run:
    """`call` so many times, and nothing is read: what reading costs is the same for all, and more than the call."""

    def run(times: int) -> Sequence[np.ndarray]:
        for _ in range(times):
            arrays = call()
        return arrays

    return run
