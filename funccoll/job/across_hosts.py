"""Rendezvous of a job on several hosts: all ranks connect over TCP, then those of each host over its Unix socket, to share its
memory.

An `AddressExchange` (MPI's) gives the ranks rank 0's addresses and a secret. With the secret they prove that they belong to the
job. They connect to rank 0's coordinator as on one host. It sends each the addresses of all others, and in jobs up to FULL_MESH
ranks each two connect. Then they find out which of them share a host, in steps that all take together (`_CommonSteps`). In such
a step each rank learns of an error of any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Protocol

from ..core.host_identity import boot_id
from ..errors import RendezvousError
from .coordinator import Coordinator
from .failure_detector import FULL_MESH
from .handshake import Answer, JobSpec, make_handshake, receive_answer
from .missing_ranks import absence
from .packets import FramedSocket, receive, send
from .rendezvous import JoinedJob
from .strangers import Strangers
from .tcp import Address, ListeningSocket, call

__all__ = ["AddressExchange", "join_across_hosts"]

_SHARE_TIMEOUT = 10.0  # seconds until a rank stops waiting for those of its host, which were there a moment ago
_PLACE = "\n  at "  # before the user's line, at the end of an error
_PROGRESS = 0.002  # seconds between two looks at an exchange that is being sent


class AddressExchange(Protocol):
    """The way in which ranks exchange words before they are connected."""

    def send(self, payload: bytes) -> None:
        """Begin to send rank 0's words to all others."""
        ...

    def is_sent(self) -> bool:
        """Continue to send. Returns True if nothing is left to do."""
        ...

    def receive(self, seconds: float) -> bytes | None:
        """Rank 0's words; None if none have come in that time."""
        ...

    def host_leader(self, check: Callable[[], None]) -> int:
        """The lowest rank of this process's host. All ranks call it at the same time.

        `check` raises RendezvousError if another rank has failed, or it is too late. It is called now and then.
        """
        ...

    def note(self) -> str:
        """A word of this rank's for all ranks, after `host_leader`."""
        ...

    def take_notes(self, notes: Sequence[str]) -> None:
        """Take the words of all ranks, in their order."""
        ...


class _TcpCoordinator(Coordinator):
    """Rank 0's side between hosts: processes that connect prove that they know the secret."""

    def __init__(self, job: JobSpec, timeout: float, listening: ListeningSocket, exchange: AddressExchange):
        super().__init__(job, timeout)
        self.listening, self.exchange = listening, exchange

    def _listen(self, arena: int) -> socket.socket:
        return self.listening.listener

    def _select(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        return self.selector.select(seconds if self.exchange.is_sent() else min(seconds, _PROGRESS))

    def _let_in(self, listener: socket.socket) -> socket.socket:
        return self.listening.accept()

    def _next_message(self, channel: socket.socket) -> dict[str, Any] | None:
        assert isinstance(channel, FramedSocket)
        return _next_message(self.listening, channel)

    def _name(self, channel: socket.socket, handshake: dict[str, Any]) -> str:
        return f"process {handshake.get('process')} of host {handshake.get('host')} ({handshake.get('command')})"

    def _forget(self, channel: socket.socket) -> None:
        self.listening.forget(channel)

    def _answer(self) -> dict[str, Any]:
        called = self.handshakes if self.job.world <= FULL_MESH else {}  # of many ranks they would be too long for a message
        return {**super()._answer(), "addresses": {rank: handshake.get("addresses") for rank, handshake in called.items()}}


def _next_message(listening: ListeningSocket, caller: FramedSocket) -> dict[str, Any] | None:
    """The next message of a caller that has proved itself; None at the end, or if it does not know the secret.

    Raises: BlockingIOError if there is none yet.
    """
    try:
        message = listening.hear(caller)
    except BlockingIOError:
        raise
    except OSError:  # its host is gone
        return None
    if message == {}:  # it has proved a part of what it must
        raise BlockingIOError
    return message


class _CommonSteps:
    """Steps that all ranks take together, through rank 0: each gives a value, and gets the values of all."""

    def __init__(self, job: JobSpec, sockets: dict[int, FramedSocket], deadline: float):
        self.job, self.sockets, self.deadline = job, sockets, deadline
        self._values: dict[int, Any] = {}  # ranks that rank 0 has received from in the current step

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks. Raises RendezvousError if one of them has had an error, has ended, or is late."""
        if self.job.rank:
            send(self.sockets[0], {"value": value})
            message = self._hear(0)
            if "values" not in message:
                raise RendezvousError(str(message.get("error", _ended(0))))
            return message["values"]
        values, self._values = {0: value, **self._values}, {}
        with selectors.DefaultSelector() as selector:
            for rank, channel in self.sockets.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(values) < self.job.world:
                ready = selector.select(self.deadline - time.monotonic())
                if not ready:
                    missing = min(set(range(self.job.world)) - set(values))
                    self.fail(f"rank {missing} came, and was not ready in time. It may be stopped, or its host overloaded.")
                for key, _ in ready:
                    message = self._hear(key.data)
                    if "value" not in message:
                        self.fail(str(message.get("error", _ended(key.data))))
                    values[key.data] = message["value"]
        gathered = [values[rank] for rank in range(self.job.world)]
        for channel in self.sockets.values():
            send(channel, {"values": gathered})
        return gathered

    def _hear(self, rank: int) -> dict[str, Any]:
        """A rank's message; {} if it has ended, and if nothing comes."""
        channel = self.sockets[rank]
        channel.settimeout(max(self.deadline - time.monotonic(), 0.1) + (5.0 if self.job.rank else 0.0))  # rank 0 is first
        try:
            message, _ = receive(channel)
        except OSError:
            message = None
        channel.setblocking(False)
        return message or {}

    def news(self) -> str:
        """The error that another rank has reported, or that one has ended; "" if there is none."""
        for rank in [0] if self.job.rank else set(self.sockets) - set(self._values):
            try:
                message = receive(self.sockets[rank])[0] or {}
            except BlockingIOError:
                continue
            except OSError:
                message = {}
            if "value" not in message:
                return str(message.get("error", _ended(rank)))
            self._values[rank] = message["value"]
        return ""

    def check(self) -> None:
        """Look at the others during a step. Raises RendezvousError if one of them has had an error, or has ended."""
        if text := self.news():
            raise RendezvousError(text)

    def check_in_time(self) -> None:
        """Look at the others, and the time. Raises RendezvousError."""
        self.check()
        if time.monotonic() > self.deadline:
            raise RendezvousError(
                f"rank {self.job.rank} on {platform.node()}: all ranks came, and not all were ready in time. One may be "
                "stopped, or its host overloaded."
            )

    def fail(self, text: str) -> None:
        """End the step for all ranks. Raises RendezvousError."""
        self.tell(text)
        raise RendezvousError(text)

    def tell(self, text: str) -> None:
        """Send an error to rank 0, or as rank 0 to all."""
        for channel in [self.sockets[0]] if self.job.rank else self.sockets.values():
            send(channel, {"error": text})


def _ended(rank: int) -> str:
    return f"rank {rank} ended before the job could begin. Look for an error of its own above."


def join_across_hosts(
    job: JobSpec, timeout: float, exchange: AddressExchange, share: Callable[[JobSpec, float], JoinedJob]
) -> JoinedJob:
    """Meet all processes of a job on several hosts. `share` meets those of one host, as a job of their own.

    Raises: RendezvousError if some have not come after `timeout` seconds, or do not fit. It names them.
    """
    with ExitStack() as stack:
        listening, sockets, answer = (_gather if job.rank == 0 else _join)(job, timeout, exchange)
        stack.callback(listening.close)
        stack.callback(lambda: [channel.close() for channel in sockets.values()])
        steps = _CommonSteps(job, sockets, time.monotonic() + timeout)
        try:
            if job.rank and job.world <= FULL_MESH:
                _connect_all(steps, listening, answer.addresses)
            steps.all_gather("connected")  # from here on all are there for what MPI does with all
            gathered = steps.all_gather([exchange.host_leader(steps.check_in_time), exchange.note()])
            leaders = [leader for leader, _ in gathered]
            exchange.take_notes([note for _, note in gathered])
            here = _share_memory(steps, leaders, listening.secret, timeout, share)
            stack.callback(lambda: None if here.memory is None else os.close(here.memory))
            machines = steps.all_gather(boot_id() or f"of rank {job.rank}")  # unknown: none is known to share it
        except Exception as error:
            ours = isinstance(error, RendezvousError)
            steps.tell(str(error).partition(_PLACE)[0] if ours else f"rank {job.rank} could not start the job: {error!r}")
            raise
        stack.pop_all()
        listening.close()
        numbers = {leader: number for number, leader in enumerate(dict.fromkeys(leaders))}
        hosts = tuple(numbers[leader] for leader in leaders)
        sharing = machines.count(machines[job.rank])
        return JoinedJob(job, dict(sockets), here.memory, hosts, profile=answer.profile, connected=True, sharing=sharing)


_Joined = tuple[ListeningSocket, dict[int, FramedSocket], Answer]


def _gather(job: JobSpec, timeout: float, exchange: AddressExchange) -> _Joined:
    """Rank 0's side: let all others come."""
    listening = ListeningSocket(0, secrets.token_bytes(32))
    coordinator = _TcpCoordinator(job, timeout, listening, exchange)
    try:
        exchange.send(json.dumps([listening.secret.hex(), listening.addresses, job.run]).encode())
        sockets, _ = coordinator.run(0, None)
    finally:
        coordinator.close()  # it no longer listens: no other process has the secret
    found = {rank: channel for rank, channel in sockets.items() if isinstance(channel, FramedSocket)}
    return listening, found, Answer([], coordinator.profile)


def _join(job: JobSpec, timeout: float, exchange: AddressExchange) -> _Joined:
    """Another rank's side: connect to rank 0."""
    who = f"(run {job.run!r}, this is rank {job.rank} of {job.world} on {platform.node()})"
    payload = exchange.receive(timeout)
    if payload is None:
        place = f", this is rank {job.rank} of {job.world} on {platform.node()}"
        raise RendezvousError(absence("rank 0 did not come", job, timeout, place))
    words, addresses, run = json.loads(payload)
    job = replace(job, run=run)  # MPICH's launcher gives each host another name of the run
    secret = bytes.fromhex(words)
    handshake = make_handshake(job, 0)  # it reads all sources, and rank 0 does not wait long for ranks that have connected
    with ExitStack() as stack:
        listening = ListeningSocket(job.rank, secret)
        stack.callback(listening.close)
        channel = call(0, addresses, secret, time.monotonic() + timeout)
        if channel is None:
            places = ", ".join(f"{host} port {port}" for host, port in addresses)
            raise RendezvousError(
                f"rank 0 was there but could not be reached within {timeout:g} s {who}. It listens at {places}: "
                f"look for an error of its own above, or let all hosts of a job connect to each other by TCP."
            )
        stack.callback(channel.close)
        send(channel, {**handshake, "addresses": listening.addresses, "process": os.getpid(), "host": platform.node()})
        channel.settimeout(timeout + 5.0)  # rank 0, which began before, gives up first: it knows which ranks are missing
        try:
            answer = receive_answer(job, channel, 0)
        except OSError:
            answer = None
        if answer is None:
            raise RendezvousError(
                f"rank 0 was there, and ended before the job could begin {who}. Look for an error of its own above."
            )
        channel.setblocking(False)
        stack.pop_all()
        return listening, {0: channel}, answer


def _connect_all(steps: _CommonSteps, listening: ListeningSocket, addresses: dict[str, list[Address]]) -> None:
    """Call all lower ranks, which listen for this one or will, and accept all higher ones. Raises RendezvousError."""
    mine, sockets = steps.job.rank, steps.sockets
    for rank in range(1, mine):
        channel = call(rank, addresses[str(rank)], listening.secret, steps.deadline, steps.check)
        if channel is None:
            places = ", ".join(f"{host} port {port}" for host, port in addresses[str(rank)])
            raise RendezvousError(
                f"rank {mine} on {platform.node()} could not reach rank {rank} at {places}: let all hosts of a job connect to "
                "each other by TCP."
            )
        sockets[rank] = channel
        send(channel, {"rank": mine})
    with selectors.DefaultSelector() as selector:
        strangers = Strangers(selector, steps.job.world, listening.forget)
        selector.register(listening.listener, selectors.EVENT_READ)
        selector.register(sockets[0], selectors.EVENT_READ)  # rank 0 reports an error
        while len(sockets) < steps.job.world - 1 and (now := time.monotonic()) < steps.deadline:
            for key, _ in selector.select(min(steps.deadline, strangers.drop_late()) - now):
                channel: Any = key.fileobj
                if channel is sockets[0]:
                    strangers.drop_all()
                    return
                if channel is listening.listener:
                    strangers.accept(listening.accept)
                elif channel in strangers:
                    with suppress(BlockingIOError):
                        message = _next_message(listening, channel)
                        if message and message.get("rank") in range(mine + 1, steps.job.world):
                            strangers.admit(channel)
                            selector.unregister(channel)
                            sockets[message["rank"]] = channel
                        else:
                            strangers.drop(channel)
        strangers.drop_all()


def _share_memory(
    steps: _CommonSteps, leaders: Sequence[int], secret: bytes, timeout: float, share: Callable[[JobSpec, float], JoinedJob]
) -> JoinedJob:
    """Meet the ranks of this host, and close what only that step needed. Raises RendezvousError."""
    rank, leader = steps.job.rank, leaders[steps.job.rank]
    ranks = [mate for mate, other in enumerate(leaders) if other == leader]
    run = hashlib.sha256(secret + b"%d" % leader).hexdigest()
    try:
        here = share(JobSpec(ranks.index(rank), len(ranks), run), min(timeout, _SHARE_TIMEOUT))
    except RendezvousError as error:
        text = f"among ranks {ranks}, which share the host {platform.node()}: {str(error).partition(_PLACE)[0]}"
        raise RendezvousError(steps.news() or text) from None
    for channel in here.sockets.values():
        channel.close()
    if here.coordinator is not None:
        here.coordinator.close()
    return here
