"""Connections between hosts: a port on all addresses of this host, callers that know the job's secret, and mutual discovery.

Both sides prove that they know the secret, by HMACs of two nonces. The proof includes the rank that answers: on another host
the same address may be another process, even one of this job. Until then each side takes the other for a stranger. It reads a
fixed number of bytes, of a fixed form, and compares them. Nothing from a stranger is parsed.

    the caller: _MAGIC, its nonce        the listener: its nonce, its proof         the caller: its proof
"""

from __future__ import annotations

import ctypes
import errno
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from .packets import FramedSocket, receive

__all__ = ["Address", "ListeningSocket", "call", "host_addresses"]

Address = tuple[str, int]
"""The numeric address of a host, and a port."""

_MAGIC = b"funccoll"  # the first bytes of a caller
_NONCE, _PROOF = 32, 32  # bytes
_UP, _LOOPBACK = 1, 8  # <net/if.h>
_ADDRESS_IN = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}  # offset and bytes in a struct sockaddr, by family
_PAUSE = 0.02  # seconds until addresses that rejected a call are called again
_ATTEMPT = 10.0  # seconds until all are called again: the right one may have dropped this caller, and a wrong one be silent
_LOOK = 0.1  # seconds between two looks at other things while addresses are silent
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10),
)
"""The kernel notices a link that is down, or a host that is gone, within about 3 s, whatever Python is doing. The send buffer
has room for tracebacks, because no rank waits for a peer to read."""


class _InterfaceAddress(ctypes.Structure):
    """struct ifaddrs, <ifaddrs.h>: an address of a network interface, in a linked list."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def host_addresses() -> list[str]:
    """This host's IPv4 and IPv6 addresses, those of loopback last. Link-local ones are left out: they need an interface's
    name."""
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


def _prove(secret: bytes, side: bytes, rank: int, *nonces: bytes) -> bytes:
    return hmac.digest(secret, b" ".join((side, b"%d" % rank, *nonces)), "sha256")


class ListeningSocket:
    """A port for rank `rank`. Callers must know `secret`."""

    def __init__(self, rank: int, secret: bytes):
        self.rank, self.secret = rank, secret
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self.listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
        self.listener.setblocking(False)
        port = self.listener.getsockname()[1]
        self.addresses: list[Address] = [(host, port) for host in host_addresses() if dual or ":" not in host]
        self._expected: dict[socket.socket, bytes] = {}  # the proof of each caller that has not given it; b"" before its nonce

    def accept(self) -> FramedSocket:
        """The next caller. It has yet to prove that it knows the secret. Raises OSError if it has gone."""
        accepted, _ = self.listener.accept()
        caller = FramedSocket(fileno=accepted.detach())
        try:
            prepare(caller)
        except OSError:
            caller.close()
            raise
        self._expected[caller] = b""
        return caller

    def hear(self, caller: FramedSocket) -> dict[str, Any] | None:
        """The next message of a caller; {} while it proves that it knows the secret, None if it does not, or has gone.

        Raises: BlockingIOError if there is none yet.
        """
        if caller not in self._expected:
            return receive(caller)[0]
        try:
            known = self._prove_each_other(caller)
        except BlockingIOError:
            raise
        except Exception:  # whatever a stranger has brought about ends its connection, and not the job
            known = False
        return {} if known else None

    def _prove_each_other(self, caller: FramedSocket) -> bool:
        """Take the next step with a caller. Returns False if it does not know the secret, or has gone."""
        expected = self._expected[caller]
        if expected:
            proof = caller.receive_bytes(_PROOF)
            if proof is None or not hmac.compare_digest(proof, expected):
                return False
            self.forget(caller)
            return True
        theirs = caller.receive_bytes(len(_MAGIC) + _NONCE, _MAGIC)
        if theirs is None:
            return False
        theirs, mine = theirs[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        self._expected[caller] = _prove(self.secret, b"calls", self.rank, theirs, mine)
        return caller.send_bytes(mine + _prove(self.secret, b"answers", self.rank, theirs, mine))

    def forget(self, caller: socket.socket) -> None:
        """Forget a caller that has proved itself, or is gone."""
        self._expected.pop(caller, None)

    def close(self) -> None:
        """Let in no more callers."""
        self.listener.close()
        self._expected.clear()


def prepare(channel: socket.socket) -> None:
    """Set the options of a connection between hosts. It does not block from then on."""
    channel.setblocking(False)
    for option in _KEEPALIVE:
        channel.setsockopt(*option)


def call(
    rank: int, addresses: Sequence[Address], secret: bytes, deadline: float, check: Callable[[], None] = lambda: None
) -> FramedSocket | None:
    """A connection to a rank, at the first of its addresses that answers with the proof that it is that rank.

    None if none has at `deadline` (`time.monotonic()`). `check` is called now and then, and what it raises ends the call.
    """
    while True:
        check()
        found = _call_once(rank, addresses, secret, min(deadline, time.monotonic() + _ATTEMPT), check)
        if found is not None or time.monotonic() >= deadline:
            return found
        time.sleep(_PAUSE)


def _call_once(
    rank: int, addresses: Sequence[Address], secret: bytes, deadline: float, check: Callable[[], None]
) -> FramedSocket | None:
    nonces: dict[FramedSocket, bytes] = {}  # of calls that are connected
    winner: FramedSocket | None = None
    with selectors.DefaultSelector() as selector:
        try:
            for host, port in addresses:
                try:
                    channel = FramedSocket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
                    selector.register(channel, selectors.EVENT_WRITE)
                    prepare(channel)
                    channel.connect_ex((host, port))  # what went wrong is reported when it is ready
                except OSError as error:  # also if this host's kernel has no IPv6, and the other's has
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        raise
            while winner is None and selector.get_map() and time.monotonic() < deadline:
                ready = selector.select(min(deadline - time.monotonic(), _LOOK))
                if not ready:
                    check()
                for key, _ in ready:
                    channel: Any = key.fileobj
                    if channel not in nonces:
                        nonces[channel] = secrets.token_bytes(_NONCE)
                        alive = not channel.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                        alive = alive and channel.send_bytes(_MAGIC + nonces[channel])
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


def _has_answered(rank: int, channel: FramedSocket, secret: bytes, mine: bytes) -> bool | None:
    """True if a rank has proved that it is the one, and has the proof of the caller; None while that goes on."""
    try:
        answer = channel.receive_bytes(_NONCE + _PROOF)
    except BlockingIOError:
        return None
    except OSError:
        return False
    if answer is None:
        return False
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _prove(secret, b"answers", rank, mine, theirs)):
        return False
    return channel.send_bytes(_prove(secret, b"calls", rank, mine, theirs))
