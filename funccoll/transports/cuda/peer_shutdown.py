"""The end of a job whose GPUs map each other's memory, so that no GPU reads memory that is gone.

A rank's launches end when its peers have *left* its segment. Peers still read its counters then, to see that it has left as
well, so its memory must outlast their launches. In CUDA, freeing exported memory before all importers have closed it is
undefined. So every rank waits for its GPU, and then for its peers to have done the same. It unmaps their memory, waits until
they have unmapped its own, and only then frees that, or ends.

A dead rank reaches neither phase, and no rank waits for it. After a failure ranks wait for each other for a moment. Memory that
peers may still map then stays allocated until this process ends. Without a failure they wait as long as collectives do.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

from ...job.membership import Membership

__all__ = ["EndsWithPeers", "PeerShutdown", "shutdown_of"]

logger = logging.getLogger("funccoll")

_GRACE_S = 2.0
"""Seconds that ranks wait for each other after a failure, in all."""
_POLL_S = 0.001
_SLOWEST_POLL_S = 0.02
_IDLE, _UNMAPPED = 1, 2
"""Phases: this rank's GPU has finished all launches with peers; it maps no memory of theirs."""


class EndsWithPeers(Protocol):
    """Something that uses memory of peers, and has memory that peers use."""

    def settle(self) -> None:
        """Wait for all that was launched."""
        ...

    def unmap(self) -> None:
        """Unmap the peers' memory."""
        ...

    def free(self) -> None:
        """Free the memory that peers had mapped."""
        ...


def shutdown_of(world: Membership) -> PeerShutdown:
    """The shutdown of a job. It runs before this process leaves the job."""

    def make() -> PeerShutdown:
        made = PeerShutdown()
        world.at_leave.callback(made.run, world)
        return made

    return world.once("memory of peers' GPUs", make)


class PeerShutdown:
    """The end of all that a process maps of its peers in a job: of all meshes at once, because a rank may have made more."""

    def __init__(self) -> None:
        self._parts: list[EndsWithPeers] = []
        self._end: float | None = None
        self._errors: list[Exception] = []

    def add(self, part: EndsWithPeers) -> None:
        """End it with the others."""
        self._parts.append(part)

    def run(self, world: Membership) -> None:
        """End all of it, before this process leaves the job.

        Raises the first error of a GPU, after everything else is done.
        """
        self._all(part.settle for part in self._parts)
        if self._errors:  # peers' launches may need what this GPU has not done
            world.watch.report("".join(traceback.format_exception(self._errors[0])))
        self._met(world, _IDLE, "still use its GPU's memory")
        self._all(part.unmap for part in self._parts)
        if self._met(world, _UNMAPPED, "still map its GPU's memory"):
            self._all(part.free for part in self._parts)
        self._parts.clear()
        if self._errors:
            raise self._errors[0]

    def _all(self, actions: Iterable[Callable[[], None]]) -> None:
        for action in actions:
            try:
                action()
            except Exception as error:  # a failed GPU rejects everything
                self._errors.append(error)

    def _met(self, world: Membership, phase: int, do: str) -> bool:
        """Wait until the peers of this host have come to a phase, too. Returns whether all live ones have."""
        watch, pause, began = world.watch, _POLL_S, time.monotonic()
        watch.arrive(phase)
        peers = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
        while missing := [rank for rank in peers if not watch.has_arrived(rank, phase)]:
            failure, now = watch.failure(), time.monotonic()
            if failure is not None:
                self._end = self._end or now + _GRACE_S
                if failure.kind == "died" and missing == [failure.rank]:
                    return True  # its process is gone, with all that it had mapped
            if now > (self._end or began + world.timeout):
                if failure is None:
                    logger.warning(
                        "rank %d leaves the job while ranks %s may %s: they have not left in %.0f s. What they run from now on "
                        "may fail. Let all ranks end together, or give them more time by fc.init(timeout=).",
                        world.rank,
                        missing,
                        do,
                        world.timeout,
                    )
                return False
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_POLL_S)
        return True
