"""Progress engines: each runs the started calls of one thread, in the order of their starts.

While calls are in flight, the thread's right to call its collectives belongs to the engine. A plain call waits until all of
them have ended. So all ranks see one order: that of the program.

Two threads can run a call. A thread that waits for a call runs what is queued before it, if the engine's own thread does not.
The engine's own thread begins at once if a core is likely to be idle, as between hosts. Otherwise it begins after a moment in
which the caller did not come to wait, so that peers do not depend on that. It ends when it has been idle for a while.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import FunccollError
from ...job.calling_thread import works_for
from ...runtime.work import Work

if TYPE_CHECKING:
    from .communicators import Communicators

__all__ = ["ProgressEngine", "ProgressThread"]

_GRACE = 0.01
"""Seconds for which an engine without an idle core leaves a call to the thread that will wait for it."""
_IDLE = 1.0
"""Seconds after which an idle engine's thread ends."""
_GLANCE = 0.5
"""Seconds after which a waiting thread looks again whether the engine's thread is alive."""
_LONGEST_END = 2.0
"""Seconds in which a call that cannot complete ends after the job's collectives have ended."""


class ProgressThread(threading.Thread):
    """The thread of a progress engine. It works for the thread of this name, and calls nothing of its own."""

    def __init__(self, run: Callable[[], None], caller: str):
        super().__init__(target=run, name="funccoll-progress", daemon=True)
        self.caller = caller


class ProgressEngine:
    """Runs the started calls of the thread with identifier `thread`.

    - `has_core`: the engine's own thread begins at once.
    - `own_thread`: it may have a thread of its own; False if the message-passing library allows one thread only.
    """

    def __init__(self, registry: Communicators, thread: int, has_core: bool, own_thread: bool):
        self.thread, self.driver = thread, 0
        """The thread whose calls it runs, and the one that runs a call now; 0 if none does."""
        self._registry, self._has_core, self._own_thread = registry, has_core, own_thread
        self._queue: deque[tuple[Work, Callable[..., Any], contextvars.Context]] = deque()
        self._changed = threading.Condition()
        self._progress: ProgressThread | None = None
        self._process, self._name, self._closed = os.getpid(), threading.current_thread().name, False
        self._failure: BaseException | None = None
        """The exception of a call that nothing has raised yet. No later call may run before the caller knows of it."""

    @property
    def is_forked(self) -> bool:
        """True in a forked child of the process whose calls it runs: its lock may be held by a thread that is not there."""
        return os.getpid() != self._process

    @property
    def is_active(self) -> bool:
        """True while calls are in flight."""
        return bool(self._queue)

    def start(self, work: Work, function: Callable[..., Any]) -> None:
        """Run `function` of the work's operands after all earlier calls. Raises what one of these did, if nothing has yet."""
        self._raise_failure()
        context = contextvars.copy_context()
        with self._changed:
            if not self._queue:
                self._registry.pause(self.thread)
            self._queue.append((work, function, context))
            work.run_by(self)
            if self._own_thread and self._progress is None:
                self._progress = ProgressThread(self._run, self._name)
                self._progress.start()
            self._changed.notify_all()

    def wait(self, work: Work, timeout: float | None) -> None:
        """See `Runner`."""
        self._wait_until_ended(work, timeout)
        if self._failure is not None and work.exception() is self._failure:
            self._failure = None  # the caller raises it
        if not self._queue and threading.get_ident() == self.thread:
            self._registry.resume(self.thread)

    def _wait_until_ended(self, work: Work, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        # A call that has ended is in the queue until its failure is noted.
        while not work.test() or (self._queue and self._queue[0][0] is work):
            if self.is_forked:
                raise FunccollError(f"{work.where} is in flight in the process that forked this one. Wait for it there.")
            if self.driver == threading.get_ident():
                raise FunccollError(f"{work.where} is waited for in the middle of itself, by a signal handler or a destructor.")
            mine = threading.get_ident() == self.thread
            if not (mine or self._own_thread):
                raise FunccollError(
                    f"{work.where} is waited for in another thread than the one that started it, and MPI was initialized for "
                    "calls of one thread only. Wait in the thread that started it, or initialize MPI with MPI_THREAD_MULTIPLE."
                )
            if not (mine and (timeout is None or not self._own_thread) and self._run_next()):
                with self._changed:
                    if not work.test():
                        left = _GLANCE if end is None else min(_GLANCE, end - time.monotonic())
                        if left <= 0:
                            raise TimeoutError(f"{work.where} has not ended after {timeout:g} s. It goes on: wait again.")
                        self._changed.wait(left)

    def drain(self) -> None:
        """Wait until all calls have ended. Raises what one of them did, if nothing has yet."""
        self._wait_for_all()
        self._raise_failure()

    def _wait_for_all(self) -> None:
        while True:
            with self._changed:
                last = self._queue[-1][0] if self._queue else None
            if last is None:
                return
            self._wait_until_ended(last, None)

    def _end_all(self, error: BaseException) -> None:
        """Abandon the calls, and wait until the one that runs has noticed: the program's memory is used again then."""
        self.abandon(error)
        with self._changed:
            self._changed.wait_for(lambda: not self.driver, _LONGEST_END)

    def end_started(self, error: BaseException) -> None:
        """Wait until all calls have ended, because an exception leaves the program that started them. Raises nothing of theirs.

        Peers run them as well. An interrupt, also of this wait, abandons them.
        """
        try:
            if isinstance(error, Exception):
                self._wait_for_all()
            else:
                self._end_all(error)
        except BaseException as interrupt:
            self._end_all(interrupt)
            raise
        finally:
            self._failure = None  # the exception of the program comes first
            if threading.get_ident() == self.thread and not self._queue:
                self._registry.resume(self.thread)

    def abandon(self, error: BaseException) -> None:
        """End the calls in flight, because an exception leaves the program that started them. Later collectives raise."""
        with self._changed:
            queued = [work for work, _, _ in self._queue]
        if queued:
            self._registry.abandon(error, queued, queued[0].where)

    def close(self, error: FunccollError) -> None:
        """End the engine's thread, and the calls that are still in flight with an error."""
        with self._changed:
            self._closed, progress = True, self._progress
            self._changed.notify_all()
        if progress is not None:
            progress.join(_LONGEST_END if self.driver else None)
        with self._changed:
            while self._queue:
                self._queue.popleft()[0].fail(error)
            self._changed.notify_all()

    # ------------------------------------------------------------ running

    def _run(self) -> None:
        """Run calls until there has been none for a while: the engine's own thread."""
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._queue or self._closed, _IDLE) or self._closed:
                    self._progress = None
                    return
                if not self._has_core:
                    first = self._queue[0][0]
                    self._changed.wait_for(lambda: self._closed or not self._queue or self._queue[0][0] is not first, _GRACE)
                elif self.driver:
                    self._changed.wait(_GLANCE)
            self._run_next()

    def _run_next(self) -> bool:
        """Run the first call, unless another thread does, or there is none. Returns False then."""
        with self._changed:
            if self.driver or not self._queue:
                return False
            self.driver = threading.get_ident()
            work, function, context = self._queue[0]
        try:
            with works_for(self.thread):
                context.run(work.run, function)
        finally:
            with self._changed:
                if self._queue and self._queue[0][0] is work:  # else the engine was closed
                    self._queue.popleft()
                if not work.test():  # an interrupt before it began
                    work.fail(FunccollError(f"{work.where} was interrupted before it began."))
                if (failure := work.exception()) is not None:
                    if isinstance(failure, Exception):  # an interrupt is raised here
                        self._failure = failure
                    while self._queue:  # peers do not run what follows in a program that has failed here
                        self._queue.popleft()[0].fail(failure)
                self.driver = 0
                self._changed.notify_all()
        return True

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
