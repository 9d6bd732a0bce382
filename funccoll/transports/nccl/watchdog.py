"""The watchdog over work that is enqueued on a GPU: a thread that notices when it will never complete.

NCCL's calls return after enqueueing. If a peer dies, or does not come, the GPU waits forever. While something is enqueued, this
thread asks the GPU whether it is done, NCCL for errors, and the job whether a peer has failed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import CollectiveTimeout, FunccollError, at_source
from ...job.membership import Membership
from .gpu_arrays import GpuEvent, NcclGpu

if TYPE_CHECKING:
    from ..shm.diagnosis import Diagnosis

__all__ = ["Enqueued", "Watchdog"]

_IN_PROGRESS = 7  # ncclInProgress
_POLL = 0.01  # seconds between two looks
_GRACE = 0.5  # seconds after a peer's failure for collectives to complete if it had done its part


@dataclass(eq=False)
class Enqueued:
    """A call whose collectives are in a stream, or are being put there."""

    diagnosis: Diagnosis
    communicators: Sequence[Any]
    begin: GpuEvent
    """Before the first of them."""
    end: GpuEvent | None = None
    """After the last one; None while they are being enqueued, which may take as long as a peer does."""
    reached: float | None = None
    """The time at which the stream was found to have come to `begin`."""
    failed: float | None = None
    """The time at which a peer was found to have failed."""


class Watchdog:
    """The watchdog of one process. Its thread begins with the first call."""

    def __init__(self, world: Membership, gpu: NcclGpu, lock: Any, fail: Callable[[FunccollError], None]):
        """`lock` is held by a thread that calls NCCL. `fail` ends all collectives, once, with an error."""
        self._world, self._gpu, self._lock, self._fail = world, gpu, lock, fail
        self._enqueued: deque[Enqueued] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False

    def watch(self, call: Enqueued) -> None:
        """Watch a call that is about to be enqueued, until its `end` is done."""
        with self._changed:
            self._enqueued.append(call)
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._run, name="funccoll-nccl", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self) -> bool:
        """Return True if all enqueued work is complete, or has failed; False if no call ends for the job's timeout."""
        with self._changed:
            while self._enqueued and not self._ended:
                if not self._changed.wait(self._world.timeout):
                    return False
        return True

    def end(self) -> None:
        """Stop watching."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        began = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._enqueued)
                if self._ended:
                    return
                first = self._enqueued[0]  # streams are in order, so the others come later
            try:
                if not began:
                    began = True
                    self._gpu.begin_watch()
                if first.end is not None and first.end.done:
                    with self._changed:
                        self._enqueued.popleft()
                        self._changed.notify_all()
                    continue
                error = self._fault(first)
            except Exception as cause:  # the GPU itself has failed, for example by one of your kernels
                error = FunccollError(
                    f"the GPU failed in {first.diagnosis.name}: {cause}. The cause may be an earlier kernel, even of another "
                    "library: CUDA_LAUNCH_BLOCKING=1 shows which. Start the job anew.",
                    first.diagnosis.call.source,
                )
                error.__cause__ = cause
            if error is not None:
                try:
                    self._fail(error)
                finally:
                    self.end()
                return
            time.sleep(_POLL)

    def _fault(self, call: Enqueued) -> FunccollError | None:
        """The error of a call that will never complete; None while it may."""
        now, world, diagnosis = time.monotonic(), self._world, call.diagnosis
        with at_source(diagnosis.call.source):
            failure = world.watch.failure(diagnosis.communicator.members)
            if failure is not None:
                call.failed = call.failed or now
                if now - call.failed > _GRACE:
                    return diagnosis.after(failure, waits=False)
            elif (reported := self._reported(call)) is not None:
                # A peer's end is in the job a moment after NCCL has noticed it, and says more.
                call.failed = call.failed or now
                if now - call.failed > _GRACE:
                    return FunccollError(f"NCCL failed in {diagnosis.name}: {reported}\n{diagnosis.table}")
            if call.reached is None and call.begin.done:
                call.reached = now
            if call.reached is not None and now - call.reached > world.timeout:
                return CollectiveTimeout(
                    f"rank {world.rank} waited {now - call.reached:.1f} s for its GPU to finish {diagnosis.name}, which all of "
                    "these ranks have entered. fc.init(timeout=) or FUNCCOLL_TIMEOUT sets the seconds.\n" + diagnosis.table
                )
        return None

    def _reported(self, call: Enqueued) -> Exception | None:
        """The error that NCCL has found in a communicator of a call; None also while another thread calls NCCL."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            for communicator in call.communicators:
                try:
                    communicator.check_async_error()
                except KeyError as error:  # CuPy's NcclError has no name for this status
                    if error.args != (_IN_PROGRESS,):
                        return RuntimeError(f"ncclResult_t {error.args[0]}")
        except Exception as error:
            return error
        finally:
            self._lock.release()
        return None
