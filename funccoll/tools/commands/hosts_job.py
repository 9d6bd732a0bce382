"""A job on several hosts for `funccoll run --hosts`: its mpirun, and the reports of its end."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ... import config
from ...job import host
from ...job.mpirun import PREFIX, Mpirun, TaggedOutput, find_mpirun, parse_hosts, passed_on
from ...job.processes import Job, new_run
from ...job.reports import STDERR
from .first_failure import first_failure, first_to_report

__all__ = ["HostsJob"]

_KINDS = ("raised", "waited", "followed")  # of exceptions; other reports are about joining and leaving
_ENDED = {
    "died without a word": "died without a word (it was killed, or crashed)",
    "left the job": "left the job",
    "host does not answer": "was lost with its host, which does not answer any more,",
}
"""Words of a PeerFailure about the rank that is its cause -> words for that rank's end."""
_SSH_FAILED = 255
"""The exit code of ssh if ssh itself fails. Both mpiruns pass it on."""
_HEARD = re.compile(rf"[\w.]*PeerFailure: rank (\d+)(?:'s)? ({'|'.join(_ENDED)})")


class HostsJob:
    """A job on hosts "a:4,b:4".

    `agent` is the command that runs another one on a host, in place of ssh. `passed` are more variables of the ranks'
    environment, "NAME" or "NAME=value".

    Raise ValueError if one of these is wrong, or no mpirun can be used.
    """

    def __init__(self, hosts: str, program: Sequence[str], bind_to: str, agent: str, passed: Sequence[str]):
        if ":" in program:
            raise ValueError(
                "mpirun would end the program's words at ':', and run what follows as another program: join ':' with another "
                "word, such as --separator=:"
            )
        self.hosts, self.program = parse_hosts(hosts), program
        self.size = sum(count for _, count in self.hosts)
        self.bind_to, self.agent, self.run = bind_to, agent, new_run()
        self.passed = passed_on(os.environ, passed)
        self.mpirun = replace(_mpirun(), token=self.run)
        self.reports: dict[int, dict[str, Any]] = {}

    def start(self, job: Job, variables: Mapping[str, str], plain: bool = False, **options: Any) -> None:
        """Start mpirun as the only process of `job`, and print its command.

        `variables` are more variables of the ranks. If `plain` is True, lines of stdout have no prefix.
        """
        threads = host.thread_variables(self.passed, max(1, host.cores() // max(count for _, count in self.hosts)))
        unbuffered = {} if "PYTHONUNBUFFERED" in self.passed else {"PYTHONUNBUFFERED": "1"}
        own = {**threads, **unbuffered, **variables, config.RUN_ID: self.run, config.REPORTS: STDERR}
        command = self.mpirun.command(self.hosts, self.program, self.passed | own, self.bind_to, self.agent)
        print(f"funccoll run: {shlex.join(command)}", file=sys.stderr, flush=True)

        def take_report(line: bytes) -> bool:
            is_report = self._take_report(line)
            if self.reports:
                job.heard_of_failure(0)
            return is_report

        buffers = [TaggedOutput(self.mpirun.tag, take_report, prefix) for prefix in ("" if plain else PREFIX, PREFIX)]
        # SIGPIPE stays ignored, as Python ignores it. MPICH's mpirun writes to its own process on a host after that has
        # ended, and would die of SIGPIPE after all ranks have ended well.
        job.start(command, os.environ, buffers, restore_signals=False, **options)

    def _take_report(self, line: bytes) -> bool:
        """Keep the report of an exception. Return False if the line is not a report."""
        try:
            told = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(told, dict) or not told.keys() >= {"run", "kind", "rank"}:
            return False
        if told["run"] == self.run and told["kind"] in _KINDS and told["rank"] in range(self.size):
            self.reports.setdefault(told["rank"], told)
        return True

    def verdict(self, code: int, was_stopped: bool) -> tuple[str, int]:
        """Return (words for the job's end, the exit code), given mpirun's own code, which is negative for a signal.

        `was_stopped` is True if mpirun had to be stopped because not all ranks ended by themselves.
        """
        outcome = f"mpirun exited with code {code}" if code >= 0 else f"mpirun was killed by signal {-code}"
        outcome = "mpirun had to be stopped" if was_stopped else outcome
        code = 1 if was_stopped else code if code >= 0 else 128 - code
        if not self.reports:
            return f"{outcome}; what it has printed is above{self._unreached() if code == _SSH_FAILED else ''}", code
        first = first_to_report(self.reports, self.reports)
        cause, words = first_failure(self.reports, next(iter(self.reports)) if first is None else first, self._ended)
        # The codes of several processes may come combined into one number.
        return f"rank {cause} {words} ({outcome})", 1 if cause in self.reports else code

    def _unreached(self) -> str:
        """Return commands to try if ssh itself may have failed. MPICH's mpirun does not always print ssh's message."""
        reach = " and ".join(f"`{self.agent or 'ssh'} {name} true`" for name, _ in self.hosts)
        return f" (if a host could not be reached: {reach} must succeed without a password)"

    def _ended(self, rank: int) -> str:
        """Describe the end of a rank that reported no exception, in the words of a rank that knows of it."""
        for told in self.reports.values():
            if told.get("cause") == rank and (found := _HEARD.match(told.get("error", ""))):
                if int(found[1]) == rank:  # otherwise the rank has only followed that one
                    return _ENDED[found[2]]
        return "ended"


def _mpirun() -> Mpirun:
    """Return the mpirun in PATH. Raise ValueError if there is none with known options."""
    found = find_mpirun()
    if found is None:
        raise ValueError(
            "there is no mpirun in PATH. --hosts needs Open MPI or MPICH on every host, and mpi4py "
            "(pip install 'funccoll[mpi]'); for processes of this host write -n"
        )
    if not found.is_known:
        raise ValueError(
            f"{found.path} is neither Open MPI's nor MPICH's: it reports {found.vendor!r}. Start the job with it yourself: "
            f"{found.path} ... python train.py"
        )
    return found
