"""The error about ranks that do not come to the rendezvous: what announced them, and the remedy."""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterable

from .handshake import JobSpec
from .tcp import host_addresses

__all__ = ["absence", "numbered"]


def absence(what: str, job: JobSpec, seconds: float | None, place: str = "") -> str:
    """Describe ranks that have not done `what` within some seconds, or, with None, will not.

    It quotes what this process believed: a job that does not exist mostly comes from leftover variables. `place` says more
    about this process.
    """
    late = "" if seconds is None else f" within {seconds:g} s"
    remedy = "; if they only start slowly, set FUNCCOLL_RENDEZVOUS_TIMEOUT to more seconds" if late else ""
    return f"{what}{late} (run {job.run!r}{place}{_belief(job)}). Look for an error of theirs above{remedy}.{_other_host(job)}"


def _belief(job: JobSpec) -> str:
    if not job.variables:
        return f", because {job.launcher}'s group has {job.world} processes" if job.launcher else ""
    shell = ", for example in an interactive Slurm shell" if "SLURM_" in job.variables else ""
    alone = "" if job.launcher == "funccoll run" else f"; unset them to run alone{shell}"
    return f", because of {job.variables}{alone}"


def _other_host(job: JobSpec) -> str:
    """A sentence about MASTER_ADDR if it is another host."""
    name = job.main_host
    if not name or job.brings_mpi or name in (platform.node(), "localhost"):
        return ""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:  # no address, so not this host's
        addresses = set()
    if any(address.startswith("127.") for address in addresses) or addresses & set(host_addresses()):
        return ""
    return f" MASTER_ADDR={name} is another host: a job on several hosts needs mpirun."


def numbered(ranks: Iterable[int]) -> str:
    """Ranks in words, the first 16 of many."""
    numbers = sorted(ranks)
    more = f" and {len(numbers) - 16} more" if len(numbers) > 16 else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:16]))}{more}"
