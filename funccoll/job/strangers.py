"""Connections of processes that have not identified themselves: not many at a time, and none for long.

Any process that reaches a port or a socket's name can connect, any number of times, and send nothing. Without bounds that would
use up this process's descriptors. Then the processes that it waits for could not connect any more.
"""

from __future__ import annotations

import errno
import resource
import selectors
import socket
import time
from collections.abc import Callable

__all__ = ["Strangers"]

_PATIENCE = 10.0  # seconds until a connection that has not identified itself is dropped, even if it has sent something
_FEW = 100  # connections at a time; all of a job's own processes may connect at once
_FEWEST = 4  # if the process may open few files


class Strangers:
    """Connections that a listener has let in, in the order in which they came. They are registered with its selector."""

    def __init__(self, selector: selectors.BaseSelector, processes: int, forget: Callable[[socket.socket], None] | None = None):
        """`processes` of the job may come at once, at several addresses each. `forget` is called with each dropped
        connection."""
        self._selector, self._forget = selector, forget
        self._most, (files, _) = _FEW + 4 * processes, resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:  # most are for what this process itself opens
            self._most = max(_FEWEST, min(self._most, files // 4))
        self._until: dict[socket.socket, float] = {}  # dropped at this time

    def __contains__(self, channel: object) -> bool:
        return channel in self._until

    def accept(self, let_in: Callable[[], socket.socket | None]) -> None:
        """Take what `let_in` accepts, unless it has gone, or been rejected, meanwhile.

        If there are too many, or this process may open no more files, the oldest are dropped.

        Raises: OSError (EMFILE, ENFILE) if it may not, and none of its files is a stranger's.
        """
        while True:
            try:
                channel = let_in()
                break
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return
                if not self._until:
                    raise
                self._drop_oldest()
        if channel is None:
            return
        self._selector.register(channel, selectors.EVENT_READ)
        self._until[channel] = time.monotonic() + _PATIENCE
        if len(self._until) > self._most:
            self._drop_oldest()

    def admit(self, channel: socket.socket) -> None:
        """Keep a connection that has identified itself. It is no longer a stranger's."""
        del self._until[channel]

    def drop(self, channel: socket.socket) -> None:
        """Close a connection."""
        if self._forget is not None:
            self._forget(channel)
        self._until.pop(channel, None)
        self._selector.unregister(channel)
        channel.close()

    def drop_late(self) -> float:
        """Close those that have not identified themselves in time. Returns when to look again (`time.monotonic()`)."""
        now = time.monotonic()
        while self._until and next(iter(self._until.values())) <= now:
            self._drop_oldest()
        return next(iter(self._until.values()), now + _PATIENCE)

    def drop_all(self) -> None:
        """Close all of them."""
        while self._until:
            self._drop_oldest()

    def close(self) -> None:
        """Close all of them with the selector. The selector is left as it is: in a forked child, it is the parent's too."""
        for channel in self._until:
            channel.close()

    def _drop_oldest(self) -> None:
        self.drop(next(iter(self._until)))
