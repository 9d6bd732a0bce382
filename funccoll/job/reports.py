"""Reports of ranks to the command or notebook that started them: joined, left, and the exception that ends one.

A rank that waits for the others asks it which of them have ended, and is notified when one does.

The launcher has a datagram socket in the abstract namespace, named by the user and the run. A rank finds the name in its
environment. Ranks on other hosts cannot reach it: they write their reports to their stderr, and the launcher reads that.
Standard library only.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .. import config

__all__ = ["MARK", "STDERR", "EndedRanks", "Mailbox", "report"]

STDERR = "stderr"
"""The value of the variable for reports in lines on stderr, each after MARK."""
MARK = b"funccoll-report: "
_LONGEST_LINE = 4000  # bytes: a pipe keeps such a line whole
_LONGEST = 64 * 1024  # bytes of a report
_PATIENCE = 2.0  # seconds that a rank waits for room in the launcher's queue
_CREDENTIALS = struct.Struct("3i")


class Mailbox:
    """The launcher's end."""

    def __init__(self, run: str):
        self.name = f"funccoll-{os.getuid()}-{run}-launcher"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{self.name}")

    def fileno(self) -> int:
        """The descriptor that is readable if there are reports."""
        return self._socket.fileno()

    def receive(self) -> list[dict[str, Any]]:
        """The reports that have come, each with its `sender`. Reports of other users, and what is not a report, are dropped."""
        found = []
        while True:
            try:
                data, ancillary, _, sender = self._socket.recvmsg(_LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:  # no more
                return found
            users = [
                _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[1]
                for level, kind, content in ancillary
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
            ]
            with suppress(ValueError, RecursionError):
                message = json.loads(data)
                if users == [os.getuid()] and isinstance(message, dict) and isinstance(message.get("rank"), int):
                    found.append({**message, "sender": sender})

    def tell_ended(self, ranks: Mapping[int, bool], receiver: bytes) -> None:
        """Send the ended ranks to a rank that waits for others, and for each whether it followed another."""
        with suppress(OSError):
            self._socket.sendto(json.dumps(sorted(ranks.items())).encode(), receiver)

    def close(self) -> None:
        """Stop receiving."""
        self._socket.close()


def report(environment: Mapping[str, str], rank: int, kind: str, **fields: Any) -> bool:
    """Send a report of this rank. Returns False if no launcher listens."""
    name = config.REPORTS.read(environment)
    if not name:
        return False
    data = _packed(environment, rank, kind, **fields)
    if name == STDERR:
        with suppress(OSError):
            return len(data) < _LONGEST_LINE and os.write(2, MARK + data + b"\n") > 0
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(_PATIENCE)
        channel.sendto(data[:_LONGEST], f"\0{name}")
        return True
    return False


def _packed(environment: Mapping[str, str], rank: int, kind: str, **fields: Any) -> bytes:
    return json.dumps({"rank": rank, "kind": kind, "run": environment.get(config.RUN_ID), **fields}).encode()


class EndedRanks:
    """The ended ranks, as the launcher reports them to a rank that waits; none if no launcher listens.

    A context manager. After the block the launcher reports no more.
    """

    def __init__(self, environment: Mapping[str, str], rank: int):
        self._ranks: dict[int, bool] = {}
        self._socket: socket.socket | None = None
        name = config.REPORTS.read(environment)
        if not name or name == STDERR:
            return
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            channel.settimeout(_PATIENCE)
            channel.bind("")  # the kernel chooses a name
            channel.connect(f"\0{name}")  # no other process can send to it then
            channel.send(_packed(environment, rank, "waiting"))
            channel.setblocking(False)
        except OSError:
            channel.close()
        else:
            self._socket = channel

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let a selector notice when `ranks` has something new."""
        if self._socket is not None:
            selector.register(self._socket, selectors.EVENT_READ, self)

    def unregister(self, selector: selectors.BaseSelector) -> None:
        """Undo `register`."""
        if self._socket is not None:
            selector.unregister(self._socket)

    def ranks(self) -> set[int]:
        """Return those that have ended so far."""
        with suppress(OSError, ValueError):
            while self._socket is not None:
                self._ranks.update(json.loads(self._socket.recv(_LONGEST)))
        return set(self._ranks)

    def causes(self, ranks: set[int]) -> set[int]:
        """The ranks of these that did not end because of another; all of them if each did."""
        return {rank for rank in ranks if not self._ranks.get(rank)} or ranks

    def __enter__(self) -> EndedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
