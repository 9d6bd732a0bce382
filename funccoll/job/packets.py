"""Messages between processes: JSON objects, in packets of Unix sockets, with file descriptors if needed, or in TCP frames."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

__all__ = ["FramedSocket", "peer", "receive", "same_user", "send"]

PACKET = 128 * 1024  # bytes of the largest message
_LENGTH = 4  # bytes before a frame, which say how long it is


class FramedSocket(socket.socket):
    """A TCP socket whose messages are frames, after bytes of a fixed form if it begins with such."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._received, self._unsent, self._sending = bytearray(), b"", threading.Lock()

    def send_frame(self, data: bytes) -> bool:
        """Send without waiting. Bytes without room are sent before the next frame. If there is still no room, that frame is not
        sent."""
        return self.send_bytes(len(data).to_bytes(_LENGTH, "big") + data)

    def send_bytes(self, data: bytes) -> bool:
        """Send these bytes as `send_frame` does a frame."""
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        with self._sending, suppress(OSError):  # a frame's parts must not be mixed with another thread's
            if self._unsent:
                self._unsent = self._unsent[self.send(self._unsent, flags) :]
            if not self._unsent:
                self._unsent = data[self.send(data, flags) :]
                return True
        return False

    def finish(self) -> None:
        """Close it after everything was read: for unread bytes, the kernel would make the other side drop what was sent."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_WR)
            while self.recv(PACKET, socket.MSG_DONTWAIT):
                pass
        self.close()

    def receive_frame(self) -> bytes | None:
        """The next frame; None at the end. It reads no byte of the frame after it, so that polling reports that one."""
        if not self._fill(_LENGTH):
            return None
        length = int.from_bytes(self._received[:_LENGTH], "big")
        if length > PACKET or not self._fill(_LENGTH + length):
            return None
        frame, self._received = bytes(self._received[_LENGTH:]), bytearray()
        return frame

    def receive_bytes(self, length: int, start: bytes = b"") -> bytes | None:
        """The next `length` bytes, and no more; None at the end, and as soon as they do not begin with `start`."""
        while len(self._received) < length:
            if not self._fill(len(self._received) + 1, length) or not start.startswith(bytes(self._received[: len(start)])):
                return None
        data, self._received = bytes(self._received), bytearray()
        return data

    def _fill(self, least: int, most: int = 0) -> bool:
        """Receive until there are `least` bytes, and at most `most`. Returns False at the end."""
        while len(self._received) < least:
            data = self.recv(max(least, most) - len(self._received))
            if not data:
                return False
            self._received += data
        return True


def send(channel: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> bool:
    """Send one message without waiting. Returns False if it is too large, or the other side is gone or does not read."""
    data = json.dumps(message, ensure_ascii=False).encode(errors="backslashreplace")
    if len(data) > PACKET:
        return False
    if isinstance(channel, FramedSocket):
        return channel.send_frame(data)
    try:
        socket.send_fds(channel, [data], list(descriptors), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """(the next message, its descriptors); (None, []) at the end, and for anything that is not a message.

    Raises: BlockingIOError or TimeoutError, as the socket is set, if there is none yet.
    """
    try:
        data, descriptors = _receive_frame(channel) if isinstance(channel, FramedSocket) else _receive_packet(channel)
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


def _receive_frame(channel: FramedSocket) -> tuple[bytes, list[int]]:
    return channel.receive_frame() or b"", []


def _receive_packet(channel: socket.socket) -> tuple[bytes, list[int]]:
    flags = socket.MSG_CMSG_CLOEXEC
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, PACKET, 8, flags)
    except ConnectionResetError:
        # The other side closed with a message of ours unread. What it sent before can still be read, after this error.
        data, descriptors, _, _ = socket.recv_fds(channel, PACKET, 8, flags)
    return data, descriptors


def peer(channel: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end."""
    pid, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, user


def same_user(channel: socket.socket) -> bool:
    """True if the process at the other end is this user's."""
    return peer(channel)[1] == os.geteuid()
