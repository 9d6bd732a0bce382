"""One rank of one contender of `ddp.py`: `rank.py benchmarks.training.ddp_rank ADDRESS CONTENDER ...`, by a launcher."""

from __future__ import annotations

import importlib
import itertools
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.one_host.host_rank import serve
from benchmarks.training.ddp_cases import Network

CONTENDERS = {"ours": ("ddp_ours", "Ours"), "alone": ("ddp_ours", "Alone"), "torch": ("ddp_torch", "Torch")}
"""Module and class of each contender; a rank imports only its own."""


class Player:
    """The commands, executed by one contender."""

    def __init__(self, contender: Any):
        self.contender = contender
        self.trainings: dict[str, Any] = {}

    def hello(self) -> dict[str, str]:
        """The versions of what is measured."""
        return self.contender.versions()

    def prepare(self, network: Network, ways: Mapping[str, Any]) -> None:
        """Prepare the training of a network in each of the named ways."""
        self.trainings = {}  # the last network's memory
        self.trainings = self.contender.prepare(network, ways)

    def check(self, name: str, times: int) -> tuple[list[float], list[float]]:
        """(losses of the first steps, sums of squares of the parameters after them)."""
        return self.trainings[name].check(times)

    def measure(self, name: str, times: int) -> tuple[float, float, float]:
        """(the median of the seconds of a step, their mean, processor seconds of this whole command)."""
        training, spent = self.trainings[name], time.process_time()
        training.steps(2)  # warm up: the caches hold the other contenders' memory
        self.contender.barrier()
        ends = [time.perf_counter()]
        for _ in range(times):
            training.steps(1)
            ends.append(time.perf_counter())
        median = statistics.median(b - a for a, b in itertools.pairwise(ends))
        return median, (ends[-1] - ends[0]) / times, time.process_time() - spent

    def parts(self, name: str, times: int) -> dict[str, float]:
        """Median seconds of each part of a step."""
        return self.contender.parts(self.trainings[name], times)


def main(address: str, name: str, *arguments: str) -> None:
    """Execute commands until the parent closes the connection."""
    module, kind = CONTENDERS[name]
    serve(address, Player(getattr(importlib.import_module(f"benchmarks.training.{module}"), kind)(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
