"""Rendezvous: the processes of a job on one host find each other, and get one piece of shared memory.

Rank 0 listens on a Unix socket in the abstract namespace (not a file, so nothing can be left behind). The user and the run name
it. Every other rank connects and sends its handshake. When all are there, each gets the shared memory as a file descriptor. The
sockets stay open, and the failure detector sees on them which rank has died. Packets (SOCK_SEQPACKET) keep messages whole: one
JSON object each.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..config import Variable
from ..errors import RendezvousError
from .coordinator import GRACE, Coordinator
from .handshake import JobSpec, make_handshake, receive_answer, refuse_other_user, refuse_stranger
from .missing_ranks import absence, numbered
from .packets import send
from .reports import EndedRanks

__all__ = ["JoinedJob", "meet", "positive_number"]


@dataclass(frozen=True)
class JoinedJob:
    """A job that all processes have joined: sockets by rank (rank 0's to each, theirs to it), and its host's memory if any.

    Rank 0's `coordinator` keeps listening. `profile` is its machine profile in plain values, if it has one. `hosts` has the
    host of each rank, numbered in the order of first appearance. `connected`: whether the ranks know each other, so that rank 0
    introduces none. `sharing`: the number of processes on this machine; its hosts may be containers.
    """

    job: JobSpec
    sockets: dict[int, socket.socket]
    memory: int | None
    hosts: tuple[int, ...]
    coordinator: Coordinator | None = None
    profile: dict[str, Any] | None = None
    connected: bool = False
    sharing: int = 1

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this process's host. They share its memory."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.job.rank])

    @property
    def local_rank(self) -> int:
        """This process's number among them."""
        return self.local_ranks.index(self.job.rank)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the sockets if the block raises. The others then see that this rank has ended."""
        try:
            yield
        except BaseException:
            for channel in self.sockets.values():
                channel.close()
            if self.coordinator is not None:
                self.coordinator.close()
            raise


def positive_number(variable: Variable, unit: str) -> float:
    """The number in an environment variable. Raises RendezvousError if it has something else."""
    text = variable.read()
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number > 0:
        raise RendezvousError(f"{variable}={text!r} must be {unit}, more than 0; leave it unset for {variable.default}.")
    return number


def meet(job: JobSpec, timeout: float, arena: int, create: Callable[[int], int] | None) -> JoinedJob:
    """Meet all processes of the job.

    `arena` is the most bytes of address space per rank that this process can map. Rank 0 calls `create` with the smallest arena
    of all, and it returns the file descriptor of the memory. Without `create` nothing is shared.

    Raises: RendezvousError if some have not connected after `timeout` seconds, or were not started as one job. It names them,
    on every rank that connected.
    """
    with EndedRanks(os.environ if job.gives_grace else {}, job.rank) as ended:
        if job.rank == 0:
            coordinator = Coordinator(job, timeout, ended)
            return JoinedJob(job, *coordinator.run(arena, create), (0,) * job.world, coordinator, coordinator.profile)
        return _join(job, timeout, arena, 0 if create is None else 1, ended)


def _join(job: JobSpec, timeout: float, arena: int, descriptors: int, ended: EndedRanks) -> JoinedJob:
    handshake = make_handshake(job, arena)
    deadline, pause = time.monotonic() + timeout, 0.001
    what, lost = "did not come", None  # the time at which rank 0 was lost, after it had answered
    while time.monotonic() < deadline and (lost is None or time.monotonic() < lost + GRACE):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        joined = None
        try:
            # Rank 0, which began before we connected, gives up first: it knows which ranks are missing.
            channel.settimeout(timeout + 5.0)
            channel.connect(job.address)
            refuse_stranger(job, channel)
            if send(channel, handshake):
                what, lost = "was there but did not answer", None
                answer = receive_answer(job, channel, descriptors)
                if answer is not None:
                    channel.setblocking(False)
                    memory = answer.descriptors[0] if answer.descriptors else None
                    joined = JoinedJob(job, {0: channel}, memory, (0,) * job.world, profile=answer.profile)
                lost = time.monotonic()
        except OSError:
            pass  # rank 0 does not listen yet, or no longer: try again
        finally:
            if joined is None:
                channel.close()
        if joined is not None:
            return joined
        if ranks := ended.ranks():  # rank 0 cannot say so, or has ended itself
            raise RendezvousError(absence(f"{numbered(ended.causes(ranks))} ended before the job could begin", job, None))
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    refuse_other_user(job)
    place = f", this is rank {job.rank} of {job.world}"
    if lost is not None:
        raise RendezvousError(absence("rank 0 was there, and ended before the job could begin", job, None, place))
    raise RendezvousError(absence(f"rank 0 {what}", job, timeout, place))
