"""One rank of one contender: `python host_rank.py CONTENDER ADDRESS`, started by a launcher, obeys `host_jobs.Job`.

Between commands it sleeps in a read of its socket, so that the others have the machine.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from host_cases import Case, inputs, outputs

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


class Player:
    """Obeys the commands."""

    def __init__(self, contender: Contender):
        self.contender = contender
        self.runs: dict[str, Run] = {}

    def hello(self) -> dict[str, str]:
        """The versions of what is measured."""
        return self.contender.versions()

    def prepare(self, case: Case) -> list[str]:
        """Make a case ready and verify each way to execute it; returns their names."""
        me, everyone = self.contender.rank, self.contender.ranks
        self.runs = {}  # the last case's memory
        expected = outputs(case, me, everyone)
        self.runs = self.contender.prepare(case, inputs(case, me, everyone))
        names = [name for name in self.runs if name != "empty"]
        for name in names:
            self.contender.reset()
            self.contender.barrier()
            results = self.runs[name](1)
            self.contender.barrier()  # in the limit, others write what is ours
            for mine, right in zip(results, expected, strict=True):
                if not np.array_equal(mine, right):
                    raise AssertionError(f"{case}, {name}, rank {me}: the result is {mine}, and should be {right}")
            self.contender.barrier()  # nobody overwrites what another still looks at
        return names

    def measure(self, name: str, times: int) -> tuple[float, float]:
        """Seconds of one execution, and how much of them was subtracted as `empty`."""
        run = self.runs[name]
        run(2)  # the others have been here: caches are theirs
        self.contender.barrier()
        start = time.perf_counter()
        run(times)
        took = (time.perf_counter() - start) / times
        if name != "native" or "empty" not in self.runs:
            return took, 0.0
        times = min(times, 2000)
        start = time.perf_counter()
        self.runs["empty"](times)
        empty = (time.perf_counter() - start) / times
        return took - empty, empty


def contender(name: str, *arguments: str) -> Contender:
    """The contender of this name; only what it needs is imported."""
    if name == "mpi":
        from peers import Mpi

        return Mpi()
    if name == "gloo":
        from peers import Gloo

        return Gloo(*arguments)
    if name == "limit":
        from host_limit import Limit

        return Limit(*arguments)
    from host_ours import Ours

    return Ours()


def main(address: str, *words: str) -> None:
    """Obey until the parent hangs up."""
    player = Player(contender(*words))
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    connection = Connection(line.detach())
    connection.send(player.contender.rank)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has hung up
        while True:
            name, *arguments = connection.recv()
            answer: tuple[bool, Any]
            try:
                answer = True, getattr(player, name)(*arguments)
            except Exception:
                answer = False, traceback.format_exc()
            connection.send(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
