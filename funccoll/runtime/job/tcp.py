"""Connections between hosts: a port on all addresses of this host, callers that know the job's secret, and finding each other.

Both sides prove that they know the secret, by HMACs of two nonces, and the rank that answers is part of what it proves: on
another host the same address may be another process, also one of this job.
"""

from __future__ import annotations

import ctypes
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .packets import FramedSocket, receive, send

__all__ = ["Address", "Door", "call", "host_addresses"]

Address = tuple[str, int]
"""The numeric address of a host, and a port."""

_FRAME = 4096  # bytes of the largest frame of a caller that has not proved that it knows the secret
_UP, _LOOPBACK = 1, 8  # <net/if.h>
_ADDRESS_IN = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}  # offset and bytes in a struct sockaddr, by family
_PAUSE = 0.02  # seconds until addresses that refused are called again
_LOOK = 0.1  # seconds between two looks at other things while addresses are silent
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10),
)  # fmt: skip
"""The kernel notices a link that is down, or a host that is gone, within about 3 s, whatever Python is doing; and the send
buffer has room for tracebacks, because nothing waits for a peer to read."""


class _InterfaceAddress(ctypes.Structure):
    """struct ifaddrs, <ifaddrs.h>: an address of a network interface, in a linked list."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)), ("name", ctypes.c_char_p), ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p), ("netmask", ctypes.c_void_p), ("other", ctypes.c_void_p), ("data", ctypes.c_void_p),
]  # fmt: skip


def host_addresses() -> list[str]:
    """This host's IPv4 and IPv6 addresses, those of loopback last; without link-local ones, which need an interface's name."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: list[tuple[bool, str]] = []
    try:
        entry = first
        while entry:
            each = entry.contents
            entry = each.next
            if not each.address or not each.flags & _UP:
                continue
            family = ctypes.c_uint16.from_address(each.address).value
            if family in _ADDRESS_IN:
                offset, nbytes = _ADDRESS_IN[family]
                text = socket.inet_ntop(family, ctypes.string_at(each.address + offset, nbytes))
                if not text.startswith("fe80:"):
                    found.append((bool(each.flags & _LOOPBACK), text))
    finally:
        libc.freeifaddrs(first)
    return [text for _, text in sorted(dict.fromkeys(found), key=lambda one: one[0])]  # stable


def _prove(secret: bytes, side: str, rank: int, *nonces: str) -> str:
    return hmac.new(secret, " ".join((side, str(rank), *nonces)).encode(), "sha256").hexdigest()


class Door:
    """A port on which rank `rank` is called by others that know `secret`."""

    def __init__(self, rank: int, secret: bytes):
        self.rank, self.secret = rank, secret
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self.listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
        self.listener.setblocking(False)
        port = self.listener.getsockname()[1]
        self.addresses: list[Address] = [(host, port) for host in host_addresses() if dual or ":" not in host]
        self._nonces: dict[FramedSocket, tuple[str, str]] = {}  # of callers that have not proved anything yet

    def accept(self) -> FramedSocket:
        """The next caller; it has yet to prove that it knows the secret. Raises OSError when it has gone."""
        accepted, _ = self.listener.accept()
        caller = FramedSocket(fileno=accepted.detach())
        try:
            prepare(caller)
        except OSError:
            caller.close()
            raise
        caller.longest = _FRAME
        self._nonces[caller] = "", ""
        return caller

    def hear(self, caller: FramedSocket) -> dict[str, Any] | None:
        """The next message of a caller; {} while it proves that it knows the secret, None when it does not, or has gone.

        Raises: BlockingIOError when there is none yet.
        """
        message, _ = receive(caller)
        if message is None or caller not in self._nonces:
            return message
        theirs, mine = self._nonces[caller]
        if not mine:
            theirs, mine = str(message.get("nonce")), secrets.token_hex(32)
            self._nonces[caller] = theirs, mine
            proof = _prove(self.secret, "answers", self.rank, theirs, mine)
            return {} if send(caller, {"nonce": mine, "proof": proof}) else None
        if not hmac.compare_digest(str(message.get("proof")), _prove(self.secret, "calls", self.rank, theirs, mine)):
            return None
        self.forget(caller)
        caller.longest = FramedSocket.longest
        return {}

    def forget(self, caller: FramedSocket) -> None:
        """Forget a caller that has proved what it knows, or is gone."""
        self._nonces.pop(caller, None)

    def close(self) -> None:
        """Let in no more callers."""
        self.listener.close()
        self._nonces.clear()


def prepare(channel: socket.socket) -> None:
    """Set the options of a connection between hosts. It does not block from then on."""
    channel.setblocking(False)
    for option in _KEEPALIVE:
        channel.setsockopt(*option)


def call(
    rank: int, addresses: Sequence[Address], secret: bytes, deadline: float, check: Callable[[], None] = lambda: None
) -> FramedSocket | None:
    """A connection to a rank, at whichever of its addresses answers first with the proof that it is that rank.

    None when none has at `deadline` (`time.monotonic()`). `check` is called now and then; what it raises ends the call.
    """
    while True:
        check()
        found = _call_once(rank, addresses, secret, deadline, check)
        if found is not None or time.monotonic() >= deadline:
            return found
        time.sleep(_PAUSE)


def _call_once(
    rank: int, addresses: Sequence[Address], secret: bytes, deadline: float, check: Callable[[], None]
) -> FramedSocket | None:
    nonces: dict[FramedSocket, str] = {}  # of calls that are connected
    winner: FramedSocket | None = None
    with selectors.DefaultSelector() as selector:
        try:
            for host, port in addresses:
                with suppress(OSError):  # also where this host's kernel has no IPv6, which the other's has
                    channel = FramedSocket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
                    selector.register(channel, selectors.EVENT_WRITE)
                    prepare(channel)
                    channel.longest = _FRAME
                    channel.connect_ex((host, port))  # what went wrong is told when it is ready
            while winner is None and selector.get_map() and time.monotonic() < deadline:
                ready = selector.select(min(deadline - time.monotonic(), _LOOK))
                if not ready:
                    check()
                for key, _ in ready:
                    channel: Any = key.fileobj
                    if channel not in nonces:
                        nonces[channel] = secrets.token_hex(32)
                        alive = not channel.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                        alive = alive and send(channel, {"nonce": nonces[channel]})
                        selector.modify(channel, selectors.EVENT_READ)
                    else:
                        alive = _has_answered(rank, channel, secret, nonces[channel])
                        if alive:
                            winner = channel
                            break
                        if alive is None:
                            continue
                    if not alive:
                        selector.unregister(channel)
                        channel.close()
        finally:
            for key in list(selector.get_map().values()):
                other: Any = key.fileobj
                if other is not winner:
                    other.close()
    return winner


def _has_answered(rank: int, channel: FramedSocket, secret: bytes, mine: str) -> bool | None:
    """True when a rank has proved that it is the one, and been told the same of the caller; None when it goes on."""
    try:
        message, _ = receive(channel)
    except BlockingIOError:
        return None
    except OSError:
        return False
    theirs = str(message.get("nonce")) if message else ""
    proof = str(message.get("proof")) if message else ""
    if not hmac.compare_digest(proof, _prove(secret, "answers", rank, mine, theirs)):
        return False
    channel.longest = FramedSocket.longest
    return send(channel, {"proof": _prove(secret, "calls", rank, mine, theirs)})
