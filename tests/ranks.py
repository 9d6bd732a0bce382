"""Real processes that play the ranks of a job, talked to line by line."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
from funccoll.runtime.job import world
def say(*words):
    print(*words, flush=True)
def hear():
    return sys.stdin.readline().strip()
def sure(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("never")
        time.sleep(0.001)
"""
JOIN = PRELUDE + "w = world.init()\nrank = w.rank\nsay('in')\n"
PATIENCE = 20.0


class Ranks:
    """Processes that each run a script, by rank. A context manager: afterwards none of them is left.

    Errors that a script does not catch are on its stderr, which `end` returns.
    """

    def __init__(self, script, ranks, world=None, run=None, **environment):
        self.run = run or secrets.token_hex(8)
        self.world = world or len(ranks)
        self.environment = {"FUNCCOLL_RENDEZVOUS_TIMEOUT": "15", **environment}
        self.processes, self.printed, self.errors, self.readers = {}, {}, {}, {}
        for rank in ranks:
            self.start(rank, script)

    def start(self, rank, script, name=None, **environment):
        """One more process, known here as `name` when it is not to be known as its rank."""
        variables = {
            **os.environ, "FUNCCOLL_RANK": str(rank), "FUNCCOLL_WORLD_SIZE": str(self.world), "FUNCCOLL_RUN_ID": self.run,
            **self.environment, **environment,
        }  # fmt: skip
        name = rank if name is None else name
        self.processes[name] = process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script], env=variables, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.printed[name], self.errors[name] = queue.SimpleQueue(), []
        self.readers[name] = [
            threading.Thread(target=_read, args=(process.stdout, self.printed[name].put)),
            threading.Thread(target=_read, args=(process.stderr, self.errors[name].append)),
        ]
        for reader in self.readers[name]:
            reader.start()

    def line(self, rank):
        """The next line that a rank prints."""
        try:
            return self.printed[rank].get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"{rank} printed nothing; its stderr:\n{chr(10).join(self.errors[rank])}") from None

    def lines(self):
        """The next line of each."""
        return {rank: self.line(rank) for rank in self.processes}

    def tell(self, rank, text=""):
        self.processes[rank].stdin.write(text + "\n")

    def kill(self, rank, how=signal.SIGKILL):
        """The time at which the signal was sent."""
        now = time.time()
        self.processes[rank].send_signal(how)
        return now

    def end(self, rank):
        """(exit code, the other lines that it printed, its stderr)."""
        process = self.processes[rank]
        code = process.wait(PATIENCE)
        for reader in self.readers[rank]:
            reader.join(PATIENCE)
        del self.processes[rank]
        for file in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                file.close()
        printed = self.printed[rank]
        return code, [printed.get() for _ in range(printed.qsize())][:-1], "\n".join(filter(None, self.errors[rank]))

    def end_well(self):
        for rank in list(self.processes):
            code, _, err = self.end(rank)
            assert (code, err) == (0, ""), f"{rank}: exit code {code}\n{err}"

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in self.processes.values():
            process.kill()
        for rank in list(self.processes):
            self.end(rank)


def _read(file, take):
    for line in file:
        take(line.rstrip("\n"))
    take("")


def address(run, generation=0):
    """The name of a job's socket."""
    return f"\0funccoll-{os.getuid()}-{run}-{generation}"


def listening(run):
    """The job's sockets that still wait for ranks."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if f"@funccoll-{os.getuid()}-{run}" in line and line.split()[3] == "00010000"]


def left_behind(run):
    """What a job could leave: its sockets, and names in /dev/shm."""
    sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if run in line]
    return [*sockets, *(name for name in os.listdir("/dev/shm") if "funccoll" in name)]
