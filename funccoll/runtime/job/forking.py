"""Forks of a rank: the parent goes on when the child has taken what it needs of the memory that ranks share."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

__all__ = ["ForkHandshake"]

_NO_SWITCH = 0.05  # seconds; not longer, because the forking thread, too, waits so long for one that has the GIL


class ForkHandshake:
    """A pipe on which a forked child tells its parent that it is ready. One fork at a time; children may come of any thread.

    While the parent waits no other Python thread of it runs, as none runs during the fork itself: it could change what
    the child is about to copy. Between the fork and the wait one is unlikely to run. Signals that come meanwhile are
    handled after the fork: Python prints and drops what a handler raises among the hooks of a fork.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pipe: tuple[int, int, int] | None = None  # (thread, reader, writer)
        self._interval = 0.0
        self._read = ctypes.PyDLL(None, use_errno=True).read  # PyDLL: keeps the GIL
        self._handlers: list[tuple[int, Any]] = []  # of the signals that wait for the end of the fork
        self._came: list[int] = []  # those that came to this process
        self._process = os.getpid()

    def hook(self, before: Callable[[], None], in_child: Callable[[], None]) -> None:
        """Have every fork call `before`, which calls `begin`, and in the child `in_child`, which calls `ready`."""
        # The last hooks raise the signals that came once more. They are C alone, which runs no handlers, so that Python
        # runs them when it is back in the code that forked.
        again = functools.partial(max, self._came, key=ctypes.pythonapi.PyErr_SetInterruptEx, default=None)
        os.register_at_fork(before=before, after_in_parent=self.wait, after_in_child=in_child)
        for last in (again, self._came.clear):
            os.register_at_fork(after_in_parent=last, after_in_child=last)

    def begin(self) -> None:
        """Prepare, before the fork."""
        self._lock.acquire()  # before there is a pipe: another fork's child would inherit it
        try:
            reader, writer = os.pipe()
        except BaseException:
            self._lock.release()
            raise
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_NO_SWITCH)
        self._pipe = threading.get_ident(), reader, writer
        if threading.current_thread() is threading.main_thread():  # which runs the handlers
            self._defer()

    def wait(self) -> None:
        """Wait in the parent, until the child is ready or has ended. A fork that failed has no child: then at once."""
        if self._pipe is not None and self._pipe[0] == threading.get_ident():  # else `begin` had no descriptors left
            _, reader, writer = self._pipe
            os.close(writer)
            word = ctypes.create_string_buffer(1)
            while self._read(reader, word, 1) < 0 and ctypes.get_errno() == errno.EINTR:
                pass
            os.close(reader)
            self._end()

    def ready(self) -> None:
        """Tell the parent, in the child."""
        self._drop_inherited()
        if self._pipe is not None:
            for end in self._pipe[1:]:
                with suppress(OSError):
                    os.close(end)
            self._end()
        self._lock = threading.RLock()

    def _defer(self) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers.append((number, handler))
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._drop_inherited()
        self._came.append(number)

    def _drop_inherited(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._came.clear()

    def _restore(self) -> None:
        try:
            while self._handlers:
                signal.signal(*self._handlers[-1])
                self._handlers.pop()
        finally:  # a handler that is back may raise while others are not
            if self._handlers:
                self._restore()

    def _end(self) -> None:
        self._pipe = None
        sys.setswitchinterval(self._interval)
        self._lock.release()
        self._restore()
