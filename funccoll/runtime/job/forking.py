"""Forks of a rank: the parent goes on when the child has taken what it needs of the memory that ranks share."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from contextlib import suppress

__all__ = ["ForkHandshake"]

_NO_SWITCH = 0.05  # seconds; not longer, because the forking thread, too, waits so long for one that has the GIL


class ForkHandshake:
    """A pipe on which a forked child tells its parent that it is ready. One fork at a time; children may come of any thread.

    While the parent waits no other Python thread of it runs, as none runs during the fork itself: it could change what
    the child is about to copy. Between the fork and the wait one is unlikely to run.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # (thread, reader, writer); more than one only when a signal handler forks in the middle of a fork
        self._pipes: list[tuple[int, int, int]] = []
        self._interval = 0.0
        self._read = ctypes.PyDLL(None, use_errno=True).read  # PyDLL: keeps the GIL

    def begin(self) -> None:
        """Prepare, before the fork."""
        self._lock.acquire()  # before there is a pipe: another fork's child would inherit it
        try:
            reader, writer = os.pipe()
        except BaseException:
            self._lock.release()
            raise
        if not self._pipes:
            self._interval = sys.getswitchinterval()
            sys.setswitchinterval(_NO_SWITCH)
        self._pipes.append((threading.get_ident(), reader, writer))

    def wait(self) -> None:
        """Wait in the parent, until the child is ready or has ended. A fork that failed has no child: then at once."""
        if self._pipes and self._pipes[-1][0] == threading.get_ident():  # else `begin` had no descriptors left
            _, reader, writer = self._pipes.pop()
            os.close(writer)
            word = ctypes.create_string_buffer(1)
            while self._read(reader, word, 1) < 0 and ctypes.get_errno() == errno.EINTR:
                pass
            os.close(reader)
            self._end()

    def ready(self) -> None:
        """Tell the parent, in the child."""
        if self._pipes:
            for _, *ends in self._pipes:
                for end in ends:
                    with suppress(OSError):
                        os.close(end)
            self._pipes.clear()
            self._end()
        self._lock = threading.RLock()

    def _end(self) -> None:
        if not self._pipes:
            sys.setswitchinterval(self._interval)
        self._lock.release()
