"""Messages between processes of one host: a JSON object in a packet of a Unix socket, with file descriptors where needed."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["peer", "receive", "same_user", "send"]

PACKET = 128 * 1024  # bytes of the largest message


def send(channel: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> bool:
    """Send one message without waiting; False when the other side is gone or does not read."""
    data = json.dumps(message, ensure_ascii=False).encode(errors="backslashreplace")
    try:
        socket.send_fds(channel, [data], list(descriptors), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """(the next message, its descriptors); (None, []) at the end, and for anything that is not a message.

    Raises: BlockingIOError or TimeoutError, as the socket is set, when there is none yet.
    """
    flags = socket.MSG_CMSG_CLOEXEC
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, PACKET, 8, flags)
    except ConnectionResetError:
        # The other side closed with a message of ours unread. What it sent before can still be read, after this error.
        try:
            data, descriptors, _, _ = socket.recv_fds(channel, PACKET, 8, flags)
        except ConnectionResetError:
            return None, []
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        for descriptor in descriptors:
            os.close(descriptor)
        return None, []
    return message, descriptors


def peer(channel: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end."""
    pid, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, user


def same_user(channel: socket.socket) -> bool:
    """True when the process at the other end is this user's."""
    return peer(channel)[1] == os.getuid()
