"""Rank 0's side of the rendezvous. It listens as long as the job runs, because two jobs may be started under one name.

A process that comes to a complete job gets an answer that says so. If two processes come as one rank, shortly after each other,
both jobs end: it is unknown which processes belong together. Other processes can connect too: another user's, an old run's, or
a silent one. They are dropped.
"""

from __future__ import annotations

import os
import platform
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .. import config
from ..core import machine_profile
from ..errors import RendezvousError
from .handshake import (
    REMEDY,
    JobSpec,
    describe_installation,
    installation,
    is_handshake,
    make_handshake,
    own_command,
    receive_answer,
    refuse_stranger,
    same_compute,
    same_installation,
)
from .missing_ranks import absence, numbered
from .packets import peer, receive, same_user, send
from .reports import EndedRanks
from .strangers import Strangers

__all__ = ["GRACE", "Coordinator"]

GRACE = 2.0
"""Seconds after a mismatch for more processes to connect and learn of it, and for a lost rank to come again."""
_PATIENCE = 1.0  # seconds for the process that has the name of this rank 0's socket to accept a connection, or release it


class Coordinator:
    """Rank 0's side: the ranks that have connected so far, and later those that come too late."""

    def __init__(self, job: JobSpec, timeout: float, ended: EndedRanks | None = None):
        self.job, self.timeout, self.ended = job, timeout, ended
        mine = machine_profile.current()
        self.profile = None if mine is None else mine.to_json()  # all ranks choose algorithms by it
        self.deadline = time.monotonic() + timeout
        self.listener: socket.socket | None = None
        self.processes = {0: _process(os.getpid(), own_command())}  # by rank, for errors
        self.expected = job.world  # the most processes that come
        self.selector = selectors.DefaultSelector()
        self.strangers = Strangers(self.selector, job.world, self._forget)  # connected, no handshake yet
        self.arrived: dict[int, socket.socket] = {}
        self.refused: list[socket.socket] = []  # connected with another version or size of the job
        self.handshakes: dict[int, dict[str, Any]] = {}  # of ranks that have arrived
        self.problem = ""
        self.lost: dict[int, float] = {}  # ranks that have gone after their handshake, and until when they may come again

    def run(self, arena: int, create: Callable[[int], int] | None) -> tuple[dict[int, socket.socket], int | None]:
        """Let all ranks join, and return their sockets, and the memory if any. `arena` and `create` are `meet`'s."""
        try:
            self.listener = self._listen(arena)
            self.selector.register(self.listener, selectors.EVENT_READ)
            if self.ended is not None:
                self.ended.register(self.selector)
            self._collect(self.listener)
            if self.ended is not None:
                self.ended.unregister(self.selector)
            if self.problem:
                raise RendezvousError(self.problem)
            self.strangers.drop_all()  # they keep files open
            memory = create(min([arena, *(handshake["arena"] for handshake in self.handshakes.values())])) if create else None
            answer, descriptors = self._answer(), [] if memory is None else [memory]
            for channel in self.arrived.values():
                self.selector.unregister(channel)  # they belong to the failure detector from now on
            told = [send(channel, answer, descriptors) for channel in self.arrived.values()]
            if self.arrived and not any(told):  # the failure detector reports a single ended rank
                for descriptor in descriptors:
                    os.close(descriptor)
                raise RendezvousError(
                    f"rank 0 could not tell {numbered(self.arrived)} to begin: they ended before the job could begin, or what "
                    "they must know is longer than a message. Look for an error of theirs above."
                )
            self.deadline = time.monotonic() + self.timeout
            return self.arrived, memory
        except BaseException as error:
            ours = isinstance(error, RendezvousError)
            text = str(error).partition("\n  at ")[0] if ours else f"rank 0 could not start the job: {error!r}"
            for channel in (*self.arrived.values(), *self.refused):
                send(channel, {"error": text})
                channel.close()
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        """The answer to a rank when all have joined."""
        return {"go": self.job.world, "profile": self.profile}

    def fileno(self) -> int:
        """The descriptor that is readable if `answer` has something to do."""
        return self.selector.fileno()

    def answer(self, left: Callable[[int], Any]) -> str:
        """Answer processes that come to the complete job: they are late. `left` has the ranks that have left the job.

        Returns the reason why the job must end; "" if it goes on.
        """
        clash = ""
        self.strangers.drop_late()
        for key, _ in self.selector.select(0):
            channel: Any = key.fileobj
            if channel is self.listener:
                try:
                    self._accept(channel)
                except OSError:  # no descriptors are left, and it would be readable forever
                    self.selector.unregister(channel)
            elif channel in self.strangers:
                clash = self._refuse(channel, left) or clash
        return clash

    def close(self) -> None:
        """Stop listening."""
        if self.listener is not None:
            self.listener.close()
        self.strangers.close()
        self.selector.close()

    def _listen(self, arena: int) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        patience = time.monotonic() + min(_PATIENCE, self.timeout)
        while True:
            try:
                listener.bind(self.job.address)
                break
            except OSError as error:
                try:
                    if self._ask_rank_0(arena):
                        patience = time.monotonic() + min(_PATIENCE, self.timeout)
                except RendezvousError:
                    listener.close()
                    raise
                if time.monotonic() > min(patience, self.deadline):
                    listener.close()
                    raise RendezvousError(
                        f"another process is already rank 0 of run {self.job.run!r}, or has taken its socket's name "
                        f"({error.strerror}). Start every process of a job with a rank of its own. {REMEDY}"
                    ) from None
                time.sleep(0.02)  # the rank 0 of a job that just ended may be closing its socket
        listener.listen(1024)
        listener.setblocking(False)
        return listener

    def _ask_rank_0(self, arena: int) -> bool:
        """Read from the process that is rank 0 already. Returns whether it has ended instead. Raises RendezvousError."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel, suppress(OSError):
            channel.settimeout(_PATIENCE)
            channel.connect(self.job.address)
            channel.settimeout(self.timeout + 5.0)
            refuse_stranger(self.job, channel)
            if send(channel, make_handshake(self.job, arena)):
                receive_answer(self.job, channel, 0)
                return True
        return False

    def _missing(self) -> set[int]:
        return set(range(1, self.job.world)) - set(self.arrived)

    def _check_missing(self, now: float) -> None:
        """Raise RendezvousError if a missing rank will not come."""
        missing = self._missing()
        ended = self.ended.causes(missing & self.ended.ranks()) if self.ended is not None else set()
        ended |= {rank for rank in missing if now >= self.lost.get(rank, now + 1)}
        if ended:
            raise RendezvousError(absence(f"{numbered(ended)} ended before the job could begin", self.job, None))
        if now >= self.deadline:
            raise RendezvousError(absence(f"{numbered(missing)} of {self.job.world} did not come", self.job, self.timeout))

    def _collect(self, listener: socket.socket) -> None:
        while self._missing() and len(self.arrived) + len(self.refused) + 1 < self.expected:
            now = time.monotonic()
            if now >= self.deadline and self.problem:
                return
            lost = [] if self.problem else self.lost.values()
            if not self.problem:
                self._check_missing(now)
            for key, _ in self._select(max(min(self.deadline, self.strangers.drop_late(), *lost) - now, 0)):
                channel: Any = key.fileobj
                if isinstance(key.data, EndedRanks):
                    key.data.ranks()  # these are looked at above
                elif channel is listener:
                    self._accept(listener)
                elif channel in self.strangers:
                    self._admit(channel)
                elif channel.fileno() >= 0:  # a dropped one no longer has any
                    self._gone(channel)

    def _select(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for sockets that can be read, at most this long."""
        return self.selector.select(seconds)

    def _accept(self, listener: socket.socket) -> None:
        self.strangers.accept(lambda: self._let_in(listener))

    def _let_in(self, listener: socket.socket) -> socket.socket | None:
        """The next process that has connected; None for one of another user."""
        channel, _ = listener.accept()
        if not same_user(channel):
            channel.close()
            return None
        channel.setblocking(False)
        return channel

    def _forget(self, channel: socket.socket) -> None:
        """Forget a connection that is about to be closed."""

    def _gone(self, channel: socket.socket) -> None:
        """Free the place of a rank that closed its socket, or sent more than its handshake."""
        until = time.monotonic() + GRACE
        self.lost |= {rank: until for rank, c in self.arrived.items() if c is channel}
        self.arrived = {rank: c for rank, c in self.arrived.items() if c is not channel}
        self.refused = [c for c in self.refused if c is not channel]
        self.strangers.drop(channel)

    def _hear(self, channel: socket.socket) -> dict[str, Any] | None:
        """The handshake of a process. One that says something else is dropped."""
        try:
            handshake = self._next_message(channel)
        except BlockingIOError:
            return None
        except OSError:
            handshake = None
        if handshake is None or not is_handshake(handshake) or handshake.get("run") != self.job.run:
            self.strangers.drop(channel)
            return None
        return handshake

    def _next_message(self, channel: socket.socket) -> dict[str, Any] | None:
        """The next message of a connected process; None at the end. Raises BlockingIOError if there is none yet."""
        message, descriptors = receive(channel)
        for descriptor in descriptors:
            os.close(descriptor)
        return message

    def _name(self, channel: socket.socket, handshake: dict[str, Any]) -> str:
        """The process that sent a handshake, in words."""
        return _process(peer(channel)[0], handshake.get("command"))

    def _admit(self, channel: socket.socket) -> None:
        handshake = self._hear(channel)
        if handshake is None:
            return
        rank, who = handshake["rank"], self._name(channel, handshake)
        problem = self._mismatch(rank, handshake["world"], handshake)
        if not problem and rank not in self._missing():
            problem, self.expected = self._clash(rank, who), 2 * self.job.world
        if problem:
            self.problem = self.problem or problem
            self.deadline = min(self.deadline, time.monotonic() + GRACE)
            self.refused.append(channel)
        else:
            self.arrived[rank], self.handshakes[rank], self.processes[rank] = channel, handshake, who
            self.lost.pop(rank, None)
        self.strangers.admit(channel)

    def _refuse(self, channel: socket.socket, left: Callable[[int], Any]) -> str:
        handshake = self._hear(channel)
        if handshake is None:
            return ""
        rank, clash = handshake["rank"], ""
        mismatch = self._mismatch(rank, handshake["world"], handshake)
        # After a rank has left, the next job's may come a little early: without an answer it tries again.
        if mismatch or rank not in self.processes or not left(rank):
            if not mismatch and rank in self.processes and time.monotonic() < self.deadline:
                clash = self._clash(rank, self._name(channel, handshake))
            running = f"run {self.job.run!r} is a job of {self.job.world} processes that runs already: its rank 0 is "
            send(channel, {"error": clash or f"{running}{self.processes[0]}. {REMEDY}"})
        self.strangers.drop(channel)
        return clash

    def _clash(self, rank: int, who: str) -> str:
        return (
            f"two processes came as rank {rank} of run {self.job.run!r}: {self.processes[rank]} and {who}. Two jobs "
            f"were started under one name, and it cannot be known which processes belong together, so both end. {REMEDY}"
        )

    def _mismatch(self, rank: Any, world: Any, handshake: dict[str, Any]) -> str:
        ours = installation()
        mine, theirs = platform.node(), handshake.get("host", platform.node())
        places = ("", "") if theirs == mine else (f" on {theirs}", f" on {mine}")
        if not same_installation(ours, handshake):
            remedy = "start them in one environment" if theirs == mine else "install the same versions on both hosts"
            return (
                f"rank {rank}{places[0]} runs {describe_installation(handshake)}, and rank 0{places[1]} runs "
                f"{describe_installation(ours)}. All must run the same: {remedy}."
            )
        if not same_compute(ours, handshake):
            return (
                f"rank {rank}{places[0]} computes with {handshake.get('compute')}, and rank 0{places[1]} with "
                f"{ours['compute']}. Their results differ in the last bits. Set {config.FUSE}=0 on all ranks, or give all "
                "ranks fused kernels (`funccoll doctor` reports what they need)."
            )
        if not 0 <= rank < world:
            return f"rank {rank} is not one of {world} processes, which are numbered from 0."
        if world != self.job.world:
            return (
                f"rank {rank} was started as one of {world} processes and rank 0 as one of {self.job.world}, both "
                f"in run {self.job.run!r}. Start all with the same number, and each job with a run id of its own."
            )
        return ""


def _process(pid: int, command: Any) -> str:
    return f"process {pid} ({command})"
