"""One rank of one contender: `rank.py benchmarks.one_host.host_rank ADDRESS CONTENDER ...`, started by a launcher.

It executes the commands of `host_jobs.Job`, and between them it sleeps in a read of its socket, so that the others have the
machine.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import socket
import statistics
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.one_host.host_cases import Case, inputs, outputs
from benchmarks.one_host.host_contender import Contender, Loop, Run, Turn

CONTENDERS = {
    "ours": ("host_ours", "Ours"),
    "mpi": ("peers", "Mpi"),
    "gloo": ("peers", "Gloo"),
    "limit": ("host_limit", "Limit"),
}
"""Module and class of each contender; a rank imports only its own."""
FEW, MOST = 200, 1000
"""Calls of a turn up to which each is timed, for a clock costs them nothing then; and the most that are timed on their own."""


class Player:
    """The commands, executed by one contender."""

    def __init__(self, contender: Contender):
        self.contender = contender
        self.runs: dict[str, Run] = {}

    def hello(self) -> dict[str, str]:
        """The versions of what is measured."""
        return self.contender.versions()

    def prepare(self, case: Case) -> list[str]:
        """Prepare a case and verify each way to execute it; return their names."""
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
            self.contender.barrier()  # no rank overwrites what another still compares
        return names

    def measure(self, name: str, times: int) -> Turn:
        """A turn of so many executions on this rank; more than a few calls are repeated, some, with a clock around each."""
        run = self.runs[name]
        if times > 1:
            run(2)  # warm up: the caches hold the other contenders' memory
        self.contender.barrier()
        if isinstance(run, Loop) and times <= FEW:
            single = run.durations(times)
            return Turn(sum(single) / times, 0.0, *percentiles(single))
        start = time.perf_counter()
        run(times)
        took = (time.perf_counter() - start) / times
        if isinstance(run, Loop):
            self.contender.barrier()
            return Turn(took, 0.0, *percentiles(run.durations(min(times, MOST))))
        if name != "native" or "empty" not in self.runs:
            return Turn(took, 0.0)
        times = min(times, 2000)
        start = time.perf_counter()
        self.runs["empty"](times)
        empty = (time.perf_counter() - start) / times
        return Turn(took - empty, empty)


def percentiles(durations: list[float]) -> tuple[float, float]:
    """The median, and the 99th percentile: the value that 99 of 100 do not exceed."""
    ordered = sorted(durations)
    return statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1]


def main(address: str, name: str, *arguments: str) -> None:
    """Execute the commands of `Player` by a contender of benchmarks/one_host/host.py."""
    module, kind = CONTENDERS[name]
    serve(address, Player(getattr(importlib.import_module(f"benchmarks.one_host.{module}"), kind)(*arguments)))


def serve(address: str, player: Any) -> None:
    """Execute commands, which name methods of `player`, until the parent closes the connection."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    connection = Connection(line.detach())
    connection.send(player.contender.rank)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed it
        while True:
            command, *words = connection.recv()
            answer: tuple[bool, Any]
            try:
                answer = True, getattr(player, command)(*words)
            except Exception:
                answer = False, traceback.format_exc()
            connection.send(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
