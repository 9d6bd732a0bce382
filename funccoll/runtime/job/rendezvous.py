"""Rendezvous: the processes of a job on one host find each other, and get one piece of memory that they share.

Rank 0 listens on a Unix socket in the abstract namespace (not a file, so nothing can be left behind), named by the
user and the run; every other rank connects and says hello. When all are there, each gets the shared memory as a file
descriptor. The sockets stay open: `watch` sees on them which rank has died. Packets (SOCK_SEQPACKET) keep messages whole:
one JSON object each.

Other processes can connect too: another user's, an old run's, one that says nothing. They are dropped.
"""

from __future__ import annotations

import functools
import hashlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...errors import RendezvousError
from .packets import receive, same_user, send

__all__ = ["JobSpec", "JoinedJob", "installation", "meet", "seconds_of"]

PROTOCOL = 2
HELLO_TIMEOUT = 10.0  # seconds until a connection that has not said hello is dropped
GRACE = 2.0  # seconds after a mismatch in which more processes may connect, to be told of it
_LISTS = ", ".join


@functools.lru_cache(maxsize=1)
def installation() -> dict[str, str]:
    """Everything by which two installations can differ in what they compute, with the folder, for errors.

    A version is not enough: two checkouts can have the same one, and then make plans that do not fit together.
    """
    from importlib.metadata import version  # here: it imports forty modules

    folder, sources = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        sources.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return {
        "funccoll": __version__, "protocol": str(PROTOCOL), "sources": sources.hexdigest()[:12], "folder": str(folder),
        "NumPy": version("numpy"), "Numba": version("numba"),
    }  # fmt: skip


def _text(installed: Mapping[str, Any]) -> str:
    return (
        f"funccoll {installed.get('funccoll')} of {installed.get('folder')} (sources {installed.get('sources')}, protocol "
        f"{installed.get('protocol')}) with NumPy {installed.get('NumPy')} and Numba {installed.get('Numba')}"
    )


@dataclass(frozen=True)
class JobSpec:
    """This process in its job: number `rank` of `world`. All processes with the same `run` belong together."""

    rank: int
    world: int
    run: str

    @property
    def address(self) -> bytes:
        """The name of the socket. One of a Unix socket has at most 107 bytes, so long run ids are hashed."""
        run = self.run.encode()
        run = run if len(run) <= 64 else hashlib.sha256(run).hexdigest().encode()
        return b"\0funccoll-%d-%s" % (os.getuid(), run)


@dataclass(frozen=True)
class JoinedJob:
    """A job that all processes have joined: sockets by rank (rank 0's to each, theirs to it), and shared memory if any."""

    job: JobSpec
    sockets: dict[int, socket.socket]
    memory: int | None


def seconds_of(environment: Mapping[str, str], name: str, default: float) -> float:
    """The seconds in an environment variable. Raises RendezvousError when it says something else."""
    text = environment.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise RendezvousError(f"{name}={text!r} must be seconds, more than 0; leave it unset for {default:g}.")
    return seconds


def meet(job: JobSpec, timeout: float, arena: int, create: Callable[[int], int] | None) -> JoinedJob:
    """Meet all processes of the job.

    `arena` is the most bytes of address space per rank that this process can map; rank 0 calls `create` with the
    smallest of them all, and it returns the file descriptor of the memory. Without `create` nothing is shared.

    Raises: RendezvousError when some have not connected after `timeout` seconds, or were not started as one job; it
    names them, on every rank that connected.
    """
    if job.rank == 0:
        return _Coordinator(job, timeout).run(arena, create)
    return _join(job, timeout, arena, 0 if create is None else 1)


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    more = f" and {len(numbers) - 16} more" if len(numbers) > 16 else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:16]))}{more}"


# ---------------------------------------------------------------- rank 0


class _Coordinator:
    """Rank 0's side: the ranks that have connected so far."""

    def __init__(self, job: JobSpec, timeout: float):
        self.job, self.timeout = job, timeout
        self.deadline = time.monotonic() + timeout
        self.selector = selectors.DefaultSelector()
        self.unidentified: dict[socket.socket, float] = {}  # connected, no hello yet; dropped at this time
        self.arrived: dict[int, socket.socket] = {}
        self.refused: list[socket.socket] = []  # connected with another version or size of the job
        self.arenas: dict[int, int] = {}
        self.problem = ""

    def run(self, arena: int, create: Callable[[int], int] | None) -> JoinedJob:
        listener = self._listen()
        try:
            self.selector.register(listener, selectors.EVENT_READ)
            self._collect(listener)
            if self.problem:
                raise RendezvousError(self.problem)
            memory = create(min(arena, *self.arenas.values())) if create else None
            for channel in self.arrived.values():
                send(channel, {"go": self.job.world}, [] if memory is None else [memory])
            return JoinedJob(self.job, self.arrived, memory)
        except BaseException as error:
            ours = isinstance(error, RendezvousError)
            text = str(error).partition("\n  at ")[0] if ours else f"rank 0 could not start the job: {error!r}"
            for channel in (*self.arrived.values(), *self.refused):
                send(channel, {"error": text})
                channel.close()
            raise
        finally:
            listener.close()
            self.selector.close()
            for channel in self.unidentified:
                channel.close()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        patience = time.monotonic() + min(1.0, self.timeout)
        while True:
            try:
                listener.bind(self.job.address)
                break
            except OSError as error:
                if time.monotonic() > patience:
                    listener.close()
                    raise RendezvousError(
                        f"another process is already rank 0 of run {self.job.run!r} ({error.strerror}). Start every "
                        "process of a job with a rank of its own, and every job with a FUNCCOLL_RUN_ID of its own."
                    ) from None
                time.sleep(0.02)  # the rank 0 of a job that just ended may be closing its socket
        listener.listen(1024)
        listener.setblocking(False)
        return listener

    def _missing(self) -> set[int]:
        return set(range(1, self.job.world)) - set(self.arrived)

    def _collect(self, listener: socket.socket) -> None:
        while self._missing() and len(self.arrived) + len(self.refused) + 1 < self.job.world:
            now = time.monotonic()
            if now >= self.deadline:
                if self.problem:
                    return
                raise RendezvousError(
                    f"{_ranks(self._missing())} of {self.job.world} did not come within {self.timeout:g} s (run "
                    f"{self.job.run!r}). Look for an error of theirs above; if they only start slowly, set "
                    "FUNCCOLL_RENDEZVOUS_TIMEOUT to more seconds."
                )
            for key, _ in self.selector.select(min(self.deadline, *self.unidentified.values(), now + HELLO_TIMEOUT) - now):
                channel: Any = key.fileobj
                if channel is listener:
                    self._accept(listener)
                elif channel in self.unidentified:
                    self._hello(channel)
                else:
                    self._gone(channel)
            for channel in [c for c, until in self.unidentified.items() if until <= time.monotonic()]:
                self._drop(channel)

    def _accept(self, listener: socket.socket) -> None:
        try:
            channel, _ = listener.accept()
        except OSError:
            return  # the other side has closed it
        if not same_user(channel):
            channel.close()
            return
        channel.setblocking(False)
        self.unidentified[channel] = time.monotonic() + HELLO_TIMEOUT
        self.selector.register(channel, selectors.EVENT_READ)

    def _drop(self, channel: socket.socket) -> None:
        self.unidentified.pop(channel, None)
        self.selector.unregister(channel)
        channel.close()

    def _gone(self, channel: socket.socket) -> None:
        """Free the place of a rank that closed its socket, or sent more than its hello."""
        self.arrived = {rank: c for rank, c in self.arrived.items() if c is not channel}
        self.refused = [c for c in self.refused if c is not channel]
        self._drop(channel)

    def _hello(self, channel: socket.socket) -> None:
        try:
            hello, descriptors = receive(channel)
        except BlockingIOError:
            return
        for descriptor in descriptors:
            os.close(descriptor)
        rank, world, arena = numbers = [(hello or {}).get(key, "") for key in ("rank", "world", "arena")]
        complete = all(isinstance(n, int) for n in numbers) and hello and hello.get("funccoll")
        if not hello or not complete or hello.get("run") != self.job.run:
            self._drop(channel)
            return
        problem = self._mismatch(rank, world, hello)
        if problem:
            self.problem = self.problem or problem
            self.deadline = min(self.deadline, time.monotonic() + GRACE)
            self.refused.append(channel)
        elif rank not in self._missing():  # a duplicate, or not a rank of the job
            send(channel, {"error": f"another process is already rank {rank} of run {self.job.run!r}."})
            self._drop(channel)
            return
        else:
            self.arrived[rank], self.arenas[rank] = channel, arena
        del self.unidentified[channel]

    def _mismatch(self, rank: Any, world: Any, hello: dict[str, Any]) -> str:
        ours = installation()
        if any(hello.get(key) != value for key, value in ours.items() if key != "folder"):
            return (
                f"rank {rank} runs {_text(hello)}, and rank 0 runs {_text(ours)}. All must run the same: start them in one "
                "environment."
            )
        if world != self.job.world:
            return (
                f"rank {rank} was started as one of {world} processes and rank 0 as one of {self.job.world}, both "
                f"in run {self.job.run!r}. Start all with the same number, and each job with a run id of its own."
            )
        return ""


# ---------------------------------------------------------------- the other ranks


def _join(job: JobSpec, timeout: float, arena: int, descriptors: int) -> JoinedJob:
    hello = {**installation(), "run": job.run, "rank": job.rank, "world": job.world, "arena": arena}
    deadline, pause = time.monotonic() + timeout, 0.001
    what, lost = "did not come", None  # the time at which rank 0 was lost, after it had answered
    while time.monotonic() < deadline and (lost is None or time.monotonic() < lost + GRACE):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        joined = None
        try:
            # Rank 0, which began before we connected, gives up first: it knows which ranks are missing.
            channel.settimeout(timeout + 5.0)
            channel.connect(job.address)
            if same_user(channel) and send(channel, hello):
                what, lost = "was there but did not answer", None
                joined = _answer(job, channel, descriptors)
                lost = time.monotonic()
        except OSError:
            pass  # rank 0 does not listen yet, or no longer: try again
        finally:
            if joined is None:
                channel.close()
        if joined is not None:
            return joined
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    what = f"{what} within {timeout:g} s" if lost is None else "was there, and ended before the job could begin"
    raise RendezvousError(
        f"rank 0 {what} (run {job.run!r}, this is rank {job.rank} of {job.world}). Look for an error of its own above; if it "
        "only starts slowly, set FUNCCOLL_RENDEZVOUS_TIMEOUT to more seconds."
    )


def _answer(job: JobSpec, channel: socket.socket, expected: int) -> JoinedJob | None:
    message, descriptors = receive(channel)
    if message is not None and "error" in message:
        raise RendezvousError(str(message["error"]))
    if message is not None and message.get("go") == job.world and len(descriptors) == expected:
        channel.setblocking(False)
        return JoinedJob(job, {0: channel}, descriptors[0] if descriptors else None)
    for descriptor in descriptors:
        os.close(descriptor)
    return None
