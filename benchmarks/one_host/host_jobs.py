"""Contenders as jobs of long-lived processes, which execute one command at a time while all others sleep."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.one_host.host_cases import Case
from benchmarks.one_host.host_contender import Turn, slowest
from benchmarks.rank import rank_words

RANK = "benchmarks.one_host.host_rank"
PATIENCE = 300.0
"""Seconds until a rank that does not answer counts as hung."""
DYING = 10.0
"""The same after another rank has failed: the others may wait for that one for ever."""

Start = Callable[[list[str]], "subprocess.Popen[Any]"]
"""Starts the program of the ranks."""


class JobError(Exception):
    """A rank failed; its traceback is the message."""


class Job:
    """The ranks of one contender. A context manager: afterwards they have ended."""

    def __init__(
        self,
        name: str,
        ranks: int,
        launcher: Sequence[str] | Start,
        words: Sequence[str] = (),
        python: str = sys.executable,
        rank: Sequence[str] = tuple(rank_words(RANK)),
    ):
        self.name, self.ranks = name, ranks
        self.connections: list[Connection] = []
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
            address = f"{folder}/door"
            door.bind(address)
            door.listen(ranks)
            door.settimeout(PATIENCE)
            program = [python, *rank, address, *words]
            self.process = launcher(program) if callable(launcher) else _start([*launcher, *program])
            try:
                found = {}
                for _ in range(ranks):
                    connection = self._accept(door)
                    found[connection.recv()] = connection
                self.connections = [found[rank] for rank in range(ranks)]
            except BaseException:
                self.close()
                raise
        self.versions: dict[str, str] = self.all("hello")[0]

    def _accept(self, door: socket.socket) -> Connection:
        door.settimeout(1.0)
        for _ in range(int(PATIENCE)):
            try:
                return Connection(door.accept()[0].detach())
            except TimeoutError:
                if self.process.poll() is not None:
                    break
        raise JobError(f"{self.name}: its ranks did not start; they may have said why above")

    def all(self, *command: Any) -> list[Any]:
        """Send a command to all ranks, and return their answers by rank."""
        for connection in self.connections:
            connection.send(command)
        answers: dict[Connection, tuple[bool, Any]] = {}
        while len(answers) < self.ranks:
            failed = any(not fine for fine, _ in answers.values())
            waiting = [c for c in self.connections if c not in answers]
            ready = wait(waiting, DYING if failed else PATIENCE)
            for connection in ready or waiting:
                assert isinstance(connection, Connection)
                rank = self.connections.index(connection)
                try:
                    answers[connection] = connection.recv() if ready else (False, f"rank {rank} does not answer")
                except (EOFError, ConnectionError):
                    answers[connection] = False, f"rank {rank} is gone"
        for fine, answer in answers.values():
            if not fine:  # the first answer
                raise JobError(f"{self.name}: {command}: {answer}")
        return [answers[connection][1] for connection in self.connections]

    def prepare(self, case: Case) -> list[str]:
        """Names of the ways in which this contender executes a case, each of them verified."""
        return self.all("prepare", case)[0]

    def measure(self, way: str, times: int) -> Turn:
        """A turn of `times` executions, on the slowest rank."""
        return slowest(self.all("measure", way, times))

    def close(self) -> None:
        """Close the connections, and wait until all processes have ended."""
        for connection in self.connections:
            connection.close()
        try:
            self.process.wait(20 if self.connections else 0)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=one_thread())


def one_thread() -> dict[str, str]:
    """The environment with one BLAS thread, because BLAS reads the results."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def funccoll_run(ranks: int, bound: bool = True, extension: bool = True, checkout: str = "") -> list[str]:
    """The launcher's words before a command; ranks are bound to cores, of which several share one when there are too few.

    extension: with the C extension of the call, where it was built. checkout: the folder of another funccoll than this one.
    """
    settings = [] if extension else ["FUNCCOLL_NATIVE=0"]
    settings += [f"PYTHONPATH={checkout}"] if checkout else []
    over = ranks > cores()
    bind = ["--bind-to", "core:overload-allowed" if over else "core"]
    if not bound or (over and checkout):  # which may be too old for it
        bind = []
    # With -P Python does not look for funccoll in the current directory first.
    return ["env", *settings, sys.executable, "-P", "-m", "funccoll", "run", "-n", str(ranks), *bind, "--"]


def mpirun(ranks: int, yields: bool, before: Sequence[str] = ()) -> list[str]:
    """The words of mpirun before a command; ranks are bound to cores, of which several share one when there are too few.

    before: words that choose one of several MPIs (`peers.open_mpis`).
    """
    over = ranks > cores()
    bind = "core:overload-allowed" if over else "core"
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    more = ["--oversubscribe"] if over else []
    words = ["-n", str(ranks), "--bind-to", bind, *more, *root, "--mca", "mpi_yield_when_idle", str(int(yields))]
    return [*before, "mpirun", *words]
