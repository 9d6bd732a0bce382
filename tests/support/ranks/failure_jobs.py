"""Starts jobs of `failure_cases.py`, waits for what their ranks say, and looks for what they leave behind.

A `Server` has imported everything and forks each rank, which then runs to its end (`rank_end.py`) as a script does: a rank
costs tens of milliseconds in place of seconds, so that a hundred deaths are cheap.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support import SUPPORT, python_path

SCRIPT = SUPPORT / "cases/failure_cases.py"
PATIENCE = 300.0
"""Seconds until a test gives up: a watchdog, not an expectation."""


class Server:
    """The process that forks ranks. A context manager."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": python_path()},
        )

    def ask(self, **request: Any) -> Any:
        self.process.stdin.write(json.dumps(request) + "\n")
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0
        self.process.stdout.close()


class Job:
    """`n` ranks that run one case. A context manager: afterwards none of them is left.

    Ranks say things as JSON objects, one a line, in a file of their own; each has `what` and `at`, the monotonic clock's time.
    """

    def __init__(
        self, server: Server, folder: Path, case: str, n: int, environment: dict[str, str] | None = None, **arguments: Any
    ):
        self.server, self.n, self.run = server, n, secrets.token_hex(8)
        self.folder, self.place = folder / self.run, folder / self.run / "place"
        self.place.mkdir(parents=True)  # the ranks' current and temporary directory
        self.codes: dict[int, int] = {}
        self.before = named()
        job = {
            "FUNCCOLL_WORLD_SIZE": str(n),
            "FUNCCOLL_RUN_ID": self.run,
            "FUNCCOLL_RENDEZVOUS_TIMEOUT": "60",
            "TMPDIR": str(self.place),
        }
        self.arguments = {
            "case": case,
            "folder": str(self.folder),
            "arguments": arguments,
            "environment": job | (environment or {}),
        }
        self.pids: dict[int, int] = {}

    def start(self, ranks: Iterable[int] | None = None) -> None:
        for rank in range(self.n) if ranks is None else ranks:
            self.pids[rank] = self.server.ask(do="start", rank=rank, n=self.n, **self.arguments)

    def said(self, rank: int, what: str | None = None) -> list[dict[str, Any]]:
        """What a rank has said so far."""
        path = self.folder / f"{rank}.said"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written
        return [line for line in found if what in (None, line["what"])]

    def hear(self, rank: int, what: str) -> dict[str, Any]:
        """The first thing of a kind that a rank says, now or later."""
        end = time.monotonic() + PATIENCE
        while not (found := self.said(rank, what)):
            assert time.monotonic() < end and self.poll(rank) is None, f"rank {rank} never said {what}: {self.report()}"
            time.sleep(0.002)
        return found[0]

    def let(self, name: str) -> None:
        """Let go on who waits for this (`failure_cases.wait_for`)."""
        (self.folder / name).touch()

    def kill(self, rank: int, how: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], how)

    def until_waiting(self, *ranks: int) -> None:
        """Return when these ranks wait for others: they sleep again and again, and each has since this began."""
        before = {rank: self._sleeps(rank) for rank in ranks}
        self._until(lambda: all(self._sleeps(rank) > before[rank] + 20 for rank in ranks), f"{ranks} do not wait")

    def until_stopped(self, rank: int) -> None:
        self._until(lambda: "State:\tT" in self._status(rank), f"rank {rank} does not stop")

    def _status(self, rank: int) -> str:
        return Path(f"/proc/{self.pids[rank]}/status").read_text()

    def _sleeps(self, rank: int) -> int:
        return int(self._status(rank).partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"{otherwise}: {self.report()}"
            time.sleep(0.005)

    def poll(self, rank: int) -> int | None:
        """A rank's exit code (negative: the signal that killed it), None while it runs."""
        if rank not in self.codes:
            code = self.server.ask(do="poll", pid=self.pids[rank])
            if code is not None:
                self.codes[rank] = code
        return self.codes.get(rank)

    def end(self) -> list[int]:
        """The exit codes, when all have ended by themselves; fails when one does not."""
        end = time.monotonic() + PATIENCE
        while any(self.poll(rank) is None for rank in self.pids):
            assert time.monotonic() < end, f"{[r for r in self.pids if r not in self.codes]} never ended: {self.report()}"
            time.sleep(0.005)
        return [self.codes[rank] for rank in sorted(self.pids)]

    def errors(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text(errors="replace")

    def report(self) -> str:
        return "\n".join(f"rank {r}: {self.codes.get(r)} {self.said(r)}\n{self.errors(r)}" for r in self.pids)

    def left(self) -> list[str]:
        """What is there of an ended job: processes, sockets, shared memory in any process, files."""
        sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if self.run in line]
        memory = {line["inode"] for rank in self.pids for line in self.said(rank, "joined")}
        children = [f"rank {rank} has left a process" for rank, pid in self.pids.items() if in_group(pid)]
        held = [f"process {pid} has its memory" for pid, inode in holders() if inode in memory]
        return [*children, *sockets, *held, *(named() - self.before), *map(str, self.place.iterdir())]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        left = self.left() if all(self.poll(rank) is not None for rank in self.pids) else []
        for pid in self.pids.values():
            with suppress(ProcessLookupError):  # a rank leads a group, in which are its children
                os.killpg(pid, signal.SIGKILL)
        self.end()
        assert left == [], left


@contextmanager
def starter(server: Server, folder: Path) -> Iterator[Callable[..., Job]]:
    """A function that makes jobs and starts them, of which nothing may be left in the end."""
    with ExitStack() as stack:

        def start(*arguments: Any, **options: Any) -> Job:
            job = stack.enter_context(Job(server, folder, *arguments, **options))
            job.start()
            return job

        yield start


def in_group(leader: int) -> bool:
    """Whether a process is left in a group."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def holders() -> list[tuple[int, int]]:
    """(process, inode) of every shared memory of funccoll that a process has mapped or open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for line in (process / "maps").read_text().splitlines():
                if "memfd:funccoll" in line:
                    found.add((int(process.name), int(line.split()[4])))
            for descriptor in (process / "fd").iterdir():
                if "memfd:funccoll" in os.readlink(descriptor):
                    found.add((int(process.name), descriptor.stat().st_ino))
        except OSError:  # ended meanwhile
            continue
    return sorted(found)


def named() -> set[str]:
    """Files with our name where shared memory has names."""
    return {name for name in os.listdir("/dev/shm") if "funccoll" in name}
