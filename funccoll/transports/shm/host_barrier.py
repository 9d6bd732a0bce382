"""Entries: barriers of the host before collectives that run elsewhere, as on GPUs, and the errors of failures there."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import FunccollError
from ...runtime.collective_call import CollectiveCall
from .diagnosis import Diagnosis, job_is_over
from .shared_memory_executable import SharedMemoryExecutable

__all__ = ["Entry"]


class Entry:
    """A barrier of the ranks that are about to run one collective elsewhere. They compare what it is.

    It raises what that collective would raise on the host, in the same words.
    """

    def __init__(self, call: CollectiveCall, executable: SharedMemoryExecutable):
        self._call = call
        self.executable = executable
        """The barrier as a collective."""

    def __call__(self) -> tuple[()]:
        """Wait until all ranks are about to run the collective."""
        self.executable()
        return ()

    @property
    def count(self) -> int:
        """A number that grows when this rank has passed the barrier, even if an exception came then."""
        return int(self.executable.registry.bases[self.executable.communicators[0].number])

    @property
    def members(self) -> Sequence[int]:
        """The ranks of the job that run the collective together, in its order."""
        return self.executable.communicators[0].members

    def failed(self, peer: int, waited_s: float | None) -> FunccollError:
        """The error of the collective after it has ended in the middle.

        It waited this long for `peer`. With None, the failure word stopped it.
        """
        executable, watch = self.executable, self.executable.world.watch
        diagnosis = Diagnosis(executable.registry, self._call, executable.communicators[0], peer)
        failure = watch.failure(self.members)
        if failure is not None:
            return diagnosis.after(failure, waits=waited_s is not None)
        return self.over() if waited_s is None else diagnosis.timed_out(waited_s)

    def over(self) -> FunccollError:
        """The error of a call after the collectives of the job have ended."""
        return job_is_over(self.executable.registry.broken, self._call.source)

    def abandon(self, error: BaseException, memory: object) -> None:
        """Leave the collective in the middle because of an error. No collective runs any more, on any rank.

        `memory` is kept for good, because peers may still use it.
        """
        self.executable.registry.abandon(error, memory, self._call.kind)
