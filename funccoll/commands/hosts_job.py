"""A job on several hosts, for `funccoll run --hosts`: its mpirun, and what is known of its end."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..runtime.job import host
from ..runtime.job.mpirun import Mpirun, TaggedOutput, find_mpirun, parse_hosts, passed_on
from ..runtime.job.processes import Job, new_run
from ..runtime.job.reports import STDERR, VARIABLE
from .first_failure import first_failure, first_to_report

__all__ = ["AGENT_VARIABLE", "HostsJob"]

AGENT_VARIABLE = "FUNCCOLL_LAUNCHER_AGENT"
_KINDS = ("raised", "waited", "followed")  # of exceptions; others tell of joining and leaving


class HostsJob:
    """A job on hosts "a:4,b:4".

    agent: the command that runs another one on a host, in the place of ssh. passed: further variables of the ranks'
    environment, "NAME" or "NAME=value".

    Raises: ValueError with what is wrong with `hosts`, or why no mpirun can be used.
    """

    def __init__(self, hosts: str, bind_to: str, agent: str, passed: Sequence[str]):
        self.hosts = parse_hosts(hosts)
        self.size = sum(count for _, count in self.hosts)
        self.bind_to, self.agent, self.passed = bind_to, agent, passed
        self.mpirun = _mpirun()
        self.run = new_run()
        self.reports: dict[int, dict[str, Any]] = {}

    def start(self, job: Job, program: Sequence[str], variables: Mapping[str, str], **options: Any) -> None:
        """Start mpirun as the only process of `job`, and print its command. `variables` are further ones of the ranks."""
        threads = host.thread_variables(os.environ, max(1, host.cores() // max(count for _, count in self.hosts)))
        unbuffered = {} if "PYTHONUNBUFFERED" in os.environ else {"PYTHONUNBUFFERED": "1"}
        own = {**threads, **unbuffered, **variables, "FUNCCOLL_RUN_ID": self.run, VARIABLE: STDERR}
        environment = passed_on(os.environ, self.passed) | own
        command = self.mpirun.command(self.hosts, program, environment, self.bind_to, self.agent)
        print(f"funccoll run: {shlex.join(command)}", file=sys.stderr, flush=True)
        buffers = [TaggedOutput(self.mpirun.tag, self._take_report) for _ in range(2)]
        job.start(command, os.environ, buffers, **options)

    def _take_report(self, line: bytes) -> None:
        with suppress(ValueError, RecursionError):
            told = json.loads(line)
            if told["run"] == self.run and told["kind"] in _KINDS and told["rank"] in range(self.size):
                self.reports.setdefault(told["rank"], told)

    def verdict(self, code: int) -> tuple[str, int]:
        """(what became of the job, the exit code), from mpirun's own, which is not 0 and negative for a signal."""
        outcome = f"mpirun exited with code {code}" if code > 0 else f"mpirun was killed by signal {-code}"
        code = code if code > 0 else 128 - code
        if not self.reports:
            return f"{outcome}; what it has printed is above", code
        first = first_to_report(self.reports, self.reports)
        cause, words = first_failure(self.reports, next(iter(self.reports)) if first is None else first, lambda rank: "ended")
        # The codes of several processes may come as one number.
        return f"rank {cause} {words} ({outcome})", 1 if cause in self.reports else code


def _mpirun() -> Mpirun:
    """The mpirun in PATH. Raises ValueError without one whose options are known."""
    found = find_mpirun()
    if found is None:
        raise ValueError(
            "there is no mpirun in PATH. --hosts needs Open MPI or MPICH on every host, and mpi4py "
            "(pip install 'funccoll[mpi]'); for processes of this host write -n"
        )
    if not found.is_known:
        raise ValueError(
            f"{found.path} is neither Open MPI's nor MPICH's: it says {found.vendor!r}. Start the job with it yourself: "
            f"{found.path} ... python train.py"
        )
    return found
