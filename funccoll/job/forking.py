"""Forks of a rank. The parent continues when the child has taken what it needs of the memory that ranks share."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from .deferred_signals import Deferral

__all__ = ["ForkHandshake"]

_NO_SWITCH = 0.05  # seconds; not longer, because the forking thread, too, waits so long for one that has the GIL
_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: keeps the GIL


class ForkHandshake:
    """A pipe on which a forked child reports to its parent that it is ready. One fork runs at a time; children may come from
    any thread.

    While the parent waits, no other Python thread of it runs, as during the fork itself: it could change what the child is
    about to copy. Signals that come meanwhile are handled after the fork.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pipe: tuple[int, int, int] | None = None  # (thread, reader, writer)
        self._interval = 0.0
        self._deferral = Deferral()

    def hook(self, before: Callable[[], None], in_parent: Callable[[], None], in_child: Callable[[], None]) -> None:
        """Make every fork call `before` (it calls `begin`), `in_parent` (`wait`), and in the child `in_child` (`ready`)."""
        os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
        for last in self._deferral.last_hooks:
            os.register_at_fork(after_in_parent=last, after_in_child=last)

    def begin(self) -> None:
        """Prepare, before the fork."""
        raised = None
        while True:
            try:
                if _is_main():
                    self._deferral.begin()
                break
            except BaseException as error:  # of a handler that is not deferred yet
                raised = error
        self._open()
        if raised is not None:
            raise raised

    def wait(self) -> None:
        """Wait in the parent, until the child is ready or has ended. A failed fork has no child, and returns at once."""
        if self._pipe is not None and self._pipe[0] == threading.get_ident():  # else `begin` had no descriptors left
            _, reader, writer = self._pipe
            _libc.close(writer)
            word = ctypes.create_string_buffer(1)
            while _libc.read(reader, word, 1) < 0 and ctypes.get_errno() == errno.EINTR:
                pass
            _libc.close(reader)
            self._close()
        if _is_main():
            self._deferral.end()

    def ready(self) -> None:
        """Report to the parent, in the child."""
        self._deferral.drop_inherited()
        if self._pipe is not None:
            for end in self._pipe[1:]:
                with suppress(OSError):
                    os.close(end)
            self._close()
        self._lock = threading.RLock()
        self._deferral.end()
        self._deferral.end_interrupted()

    def _open(self) -> None:
        self._lock.acquire()  # before there is a pipe: another fork's child would inherit it
        try:
            reader, writer = os.pipe()
        except BaseException:
            self._lock.release()
            raise
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_NO_SWITCH)
        self._pipe = threading.get_ident(), reader, writer
        if len(sys._current_frames()) > 2:  # more than this thread and the failure detector's
            # A thread that waits for the GIL asks for it within the old interval. It gets it here, and not in the middle of the
            # fork. When this thread has it again, they all wait for the new interval.
            _libc.usleep(int(min(self._interval, _NO_SWITCH) * 1e6))

    def _close(self) -> None:
        self._pipe = None
        sys.setswitchinterval(self._interval)
        self._lock.release()


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident
