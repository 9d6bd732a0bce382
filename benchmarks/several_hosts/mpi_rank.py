"""One rank of `benchmarks/several_hosts/mpi.py`: `rank.py benchmarks.several_hosts.mpi_rank ADDRESS`, started by mpirun.

It has both contenders in one process: they use the same cores, the same MPI and the same connections.
"""

from __future__ import annotations

import os
import sys

import funccoll as fc
from benchmarks.one_host.host_cases import Case
from benchmarks.one_host.host_contender import Turn
from benchmarks.one_host.host_ours import Ours
from benchmarks.one_host.host_rank import Player, serve
from benchmarks.one_host.peers import Mpi


class BothPlayers:
    """The commands of `host_rank.Player`, each for the contender that it names."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[fc.rank() % len(cores)]})  # mpirun would bind the first rank of every host to one core
        self.contender = Ours()
        self.players = {"ours": Player(self.contender), "mpi": Player(Mpi())}

    def hello(self) -> dict[str, str]:
        """The versions of what is measured."""
        return {name: version for player in self.players.values() for name, version in player.hello().items()}

    def prepare(self, contender: str, case: Case) -> list[str]:
        """Prepare a case and verify each way to execute it; return their names."""
        return [way for way in self.players[contender].prepare(case) if way != "numpy"]  # no memory is shared: it is "python"

    def measure(self, contender: str, way: str, times: int) -> Turn:
        """A turn of one contender on this rank."""
        return self.players[contender].measure(way, times)


if __name__ == "__main__":
    serve(sys.argv[1], BothPlayers())
