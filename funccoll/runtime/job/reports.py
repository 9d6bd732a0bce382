"""Reports of ranks to the command or notebook that started them: joined, left, and the exception that ends one.

The launcher has a datagram socket in the abstract namespace, named by the user and the run; a rank finds the name in its
environment. Ranks on other hosts cannot reach it: they write their reports to their stderr, which the launcher reads. Standard
library only.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ["MARK", "STDERR", "VARIABLE", "Mailbox", "report"]

VARIABLE = "FUNCCOLL_REPORTS"
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
        """The descriptor that is readable when there are reports."""
        return self._socket.fileno()

    def receive(self) -> list[dict[str, Any]]:
        """The reports that have come. Those of other users, and what is not a report, are dropped."""
        found = []
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
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
                    found.append(message)

    def close(self) -> None:
        """Receive no longer."""
        self._socket.close()


def report(environment: Mapping[str, str], rank: int, kind: str, **fields: Any) -> bool:
    """Send a report of this rank; False where no launcher listens."""
    name = environment.get(VARIABLE)
    if not name:
        return False
    data = json.dumps({"rank": rank, "kind": kind, "run": environment.get("FUNCCOLL_RUN_ID"), **fields}).encode()
    if name == STDERR:
        with suppress(OSError):
            return len(data) < _LONGEST_LINE and os.write(2, MARK + data + b"\n") > 0
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(_PATIENCE)
        channel.sendto(data[:_LONGEST], f"\0{name}")
        return True
    return False
