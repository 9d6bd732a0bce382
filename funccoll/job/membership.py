"""Membership in a job: all that depends on its ranks, from when this process joins them until it leaves."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ..core.mesh import Mesh, number_hosts
from ..runtime.transport import JobTransport
from .failure_detector import FailureDetector
from .rendezvous import JoinedJob

__all__ = ["Membership"]


class Membership:
    """This process's membership in a job: number `rank` of `world`. It owns what depends on the ranks, and ends it.

    The process's own state is in `job.world`.

    Attributes:
        epoch: How many memberships this process had before. Ranks only connect to those of their epoch.
        ranks: The members.
        hosts: The host of each, numbered in the order of first appearance.
        watch: The detection of their failures.
        transport: The memory that ranks of a host share, and the communicators of all groups.
        timeout: Seconds that a collective waits for the others.
        fork_bytes: The most that is copied for a forked child.
    """

    def __init__(
        self, epoch: int, joined: JoinedJob, watch: FailureDetector, transport: JobTransport, timeout: float, fork_bytes: int
    ):
        job, self.hosts = joined.job, joined.hosts
        self.epoch, self.rank, self.world, self.ranks = epoch, job.rank, job.world, range(job.world)
        self.watch, self.transport, self.timeout, self.fork_bytes = watch, transport, timeout, fork_bytes
        self.processes_here = max(self.hosts.count(self.hosts[self.rank]), job.local, joined.sharing)
        """Processes of the job on this machine."""
        self.mesh_numbers = itertools.count(1)
        self.at_leave = ExitStack()
        """Functions to call before this process leaves the job, the last one first."""
        self._owned: dict[str, Any] = {}
        transport.join(self)

    @functools.cached_property
    def process_mesh(self) -> Mesh:
        """The processes along one axis: always the same mesh, so collectives are compiled for it once."""
        transport, hosts = self.transport.for_mesh(0), number_hosts(self.hosts)
        return Mesh({"process": self.world}, self.ranks, self.rank, transport, hosts=hosts)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what a library has once in a membership, under its own name. It is made at first use, and dropped at the
        end."""
        if name not in self._owned:
            self._owned[name] = make()
        return self._owned[name]

    def leave(self) -> None:
        """End all of it: the others see a clean exit."""
        try:
            self.at_leave.close()
        finally:
            self.transport.end("this process has left the job of this mesh (fc.finalize). Make a new mesh and compile anew.")
            self.watch.leave()
            self.transport.close()
            self._owned.clear()

    def disown(self, executes: bool) -> None:
        """Leave all of it to the parent, in a forked child that may be about to execute another program.

        What libraries own stays as it is. The parent releases it.
        """
        self.transport.end(
            f"this process was forked from rank {self.rank} and is not a rank of its own: call compiled functions of a "
            "job's mesh in the parent."
        )
        self.watch.disown()
        self.transport.disown(None if executes else self.fork_bytes)
