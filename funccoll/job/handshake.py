"""The handshake: the rank and job of a process, and its installation. Rank 0 answers it."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import config
from .._version import __version__
from ..errors import RendezvousError
from ..kernels.native.machine_code import compute_mode
from ..platforms import blas
from ..user_lines import PACKAGE
from .packets import peer, receive, same_user

__all__ = [
    "REMEDY",
    "Answer",
    "JobSpec",
    "check_compute",
    "describe_installation",
    "installation",
    "is_handshake",
    "make_handshake",
    "own_command",
    "receive_answer",
    "refuse_other_user",
    "refuse_stranger",
    "same_compute",
    "same_installation",
]

PROTOCOL = 4
REMEDY = "Give each job a name of its own: another MASTER_PORT, or another FUNCCOLL_RUN_ID."
_COMMAND = 200  # characters of a process's command in errors
_LONGEST = 8192  # characters of a word in a handshake: errors quote them, and must fit into a message


@functools.lru_cache(maxsize=1)
def installation() -> dict[str, str]:
    """Everything in which two installations can differ in what they compute, with the folder, for errors.

    A version is not enough: two checkouts can have the same one, and still make plans that do not fit together.
    """
    from importlib.metadata import version  # here: it imports forty modules

    folder, sources = Path(PACKAGE), hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        sources.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return {
        "funccoll": __version__,
        "protocol": str(PROTOCOL),
        "sources": sources.hexdigest()[:12],
        "folder": str(folder),
        "NumPy": version("numpy"),
        "Numba": version("numba"),
        "threads": str(blas.threads()),
        "compute": compute_mode(),
    }


def describe_installation(installed: Mapping[str, Any]) -> str:
    """An installation in words."""
    return (
        f"funccoll {installed.get('funccoll')} of {installed.get('folder')} (sources {installed.get('sources')}, protocol "
        f"{installed.get('protocol')}) with NumPy {installed.get('NumPy')}, Numba {installed.get('Numba')} and "
        f"{config.BLAS_THREADS}={installed.get('threads')}"
    )


def same_installation(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two installations make the same plans. Their folders and modes of compute may differ."""
    return all(other.get(key) == value for key, value in one.items() if key not in ("folder", "compute"))


def same_compute(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if both installations compute in fused kernels, or both by NumPy, for whatever reasons."""
    kinds = {str(installed.get("compute")).partition(" (")[0] for installed in (one, other)}
    return len(kinds) == 1


def check_compute() -> None:
    """Raise a RendezvousError if this process computes in another way than when it joined its job, as all ranks agreed."""
    agreed, now = installation(), {"compute": compute_mode()}
    if not same_compute(agreed, now):
        raise RendezvousError(
            f"this process computes with {now['compute']}, and it joined its job with {agreed['compute']}: {config.FUSE} has "
            "changed since. Ranks agree on it when they join. Set it before funccoll.init, on all ranks."
        )


@dataclass(frozen=True)
class JobSpec:
    """This process in its job: number `rank` of `world`. All processes with the same `run` belong together."""

    rank: int
    world: int
    run: str
    local: int = 0
    """Processes on this host, as the launcher reports; 0 if it does not."""
    launcher: str = ""
    """Its command."""
    brings_mpi: bool = False
    """True when it starts programs of MPI."""
    gives_grace: bool = False
    """True when it lets the others end by themselves after a failure."""
    variables: str = ""
    """The variables that say so, with their values, in words."""
    main_host: str = ""
    """MASTER_ADDR, if torch's variables have it."""

    @property
    def across_hosts(self) -> bool:
        """True if the launcher says that not all processes are on this host."""
        return 0 < self.local < self.world

    @property
    def address(self) -> bytes:
        """The name of the socket. A Unix socket's name has at most 107 bytes, so long run ids are hashed."""
        run = self.run.encode()
        run = run if len(run) <= 64 else hashlib.sha256(run).hexdigest().encode()
        return b"\0funccoll-%d-%s" % (os.geteuid(), run)


def own_command() -> str:
    """This process's command."""
    return shlex.join(sys.orig_argv)[:_COMMAND]


def make_handshake(job: JobSpec, arena: int) -> dict[str, Any]:
    """This process, for rank 0."""
    numbers = {"rank": job.rank, "world": job.world, "arena": arena}
    return {**installation(), **numbers, "run": job.run, "command": own_command()}


def is_handshake(message: Mapping[str, Any]) -> bool:
    """True if a message has the form of a handshake."""
    numbers = [message.get(name) for name in ("rank", "world", "arena")]
    words = [message.get(name, "") for name in (*installation(), "command", "host")]
    return (
        all(type(number) is int and -1 << 31 <= number < 1 << 62 for number in numbers)
        and all(isinstance(word, str) and len(word) <= _LONGEST for word in words)
        and bool(message.get("funccoll"))
    )


def refuse_stranger(job: JobSpec, channel: socket.socket) -> None:
    """Raise RendezvousError if another user's process listens on the socket of the job's rank 0."""
    if not same_user(channel):
        process, user = peer(channel)
        raise RendezvousError(
            f"process {process} of user {user} has taken the name of the socket by which run {job.run!r} would meet; any user "
            "of a machine can take such a name. Set FUNCCOLL_RUN_ID, for all processes of the job, to a text that others "
            "cannot guess."
        )


def refuse_other_user(job: JobSpec) -> None:
    """Raise RendezvousError if a process of another user waits for this run's ranks. Its socket's name has that user's
    number."""
    name = re.escape(job.address[1:].split(b"-", 2)[2])
    try:
        sockets = Path("/proc/net/unix").read_bytes()
    except OSError:
        return
    users = {int(user) for user in re.findall(rb" @funccoll-(\d+)-" + name + rb"$", sockets, re.MULTILINE)}
    if others := users - {os.geteuid()}:
        raise RendezvousError(
            f"rank 0 of run {job.run!r} waits as user {min(others)}, and this process, rank {job.rank}, runs as user "
            f"{os.geteuid()}. Start all processes of a job as one user."
        )


@dataclass(frozen=True)
class Answer:
    """Rank 0's answer when all ranks have joined: its descriptors, and its machine profile in plain values, if any.

    In a job on several hosts it also has the addresses at which each rank listens, by its number as text.
    """

    descriptors: list[int]
    profile: dict[str, Any] | None
    addresses: dict[str, Any] = field(default_factory=dict)


def receive_answer(job: JobSpec, channel: socket.socket, expected: int) -> Answer | None:
    """Rank 0's answer when all ranks have joined; None if it has ended, or answers another process.

    `expected` is the number of descriptors. Raises: RendezvousError if rank 0 rejects this process.
    """
    message, descriptors = receive(channel)
    if message is not None and "error" in message:
        raise RendezvousError(str(message["error"]))
    if message is not None and message.get("go") == job.world and len(descriptors) == expected:
        return Answer(descriptors, message.get("profile"), message.get("addresses", {}))
    for descriptor in descriptors:
        os.close(descriptor)
    return None
