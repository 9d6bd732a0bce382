"""Cores, memory and address space that this machine and its control groups give a job, and the way to bind a child to its
parent.

It uses the standard library only, because the launcher reads it before anything else is imported.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import resource
import signal
from collections.abc import Callable, Container, Iterator
from pathlib import Path

__all__ = [
    "PEER_FAILURE_EXIT_CODE",
    "address_space_limits",
    "available_memory",
    "bindings",
    "cache_bytes",
    "cores",
    "dying_with_parent",
    "memory_limit",
    "thread_variables",
]

PEER_FAILURE_EXIT_CODE = os.EX_UNAVAILABLE
"""The exit code (69) of a process that ends with a PeerFailure: another process is the cause."""

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def _control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's control group and those above it, each with whether it is of cgroup v1."""
    for entry in _text(_OWN_CGROUPS).splitlines():
        _, names, path = entry.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = _CGROUPS / controller if names else _CGROUPS
        # Inside a container the path may be the host's, and not exist. Then its own group is at the root.
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group == root.parent:
                break
            yield group, bool(names)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, what it leaves) of each control group that limits memory, in bytes. File caches count as left."""
    for group, first in _control_groups("memory"):
        limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
        most = _text(group / limit)
        if most.isdigit() and int(most) < 2**60:
            caches = re.findall(r"^inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
            yield int(most), int(most) - int(_text(group / used) or 0) + sum(map(int, caches))


def memory_limit() -> int | None:
    """The lowest memory limit of this process's control groups in bytes, or None without one."""
    return min((limit for limit, _ in _memory_limits()), default=None)


def available_memory() -> int:
    """Bytes that can still be committed on this host and in this process's control groups, as far as they say."""
    host = re.search(r"^MemAvailable: *(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE)
    free = int(host[1]) * 1024 if host else 1 << 62
    return max(min([free, *(left for _, left in _memory_limits())]), 0)


def address_space_limits() -> dict[str, int]:
    """The limits on the bytes that this process may map, and that its files may have, by the option of `ulimit`."""
    kinds = {"`ulimit -v`": resource.RLIMIT_AS, "`ulimit -f`": resource.RLIMIT_FSIZE}
    found = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: limit for name, limit in found.items() if limit != resource.RLIM_INFINITY}


def cores() -> int:
    """Number of cores that this process may use: its affinity, or less if a control group limits the time.

    Logical cores: two hyperthreads count as two.
    """
    usable = len(os.sched_getaffinity(0))
    for group, first in _control_groups("cpu"):
        quota, _, period = _text(group / ("cpu.cfs_quota_us" if first else "cpu.max")).partition(" ")
        if quota.isdigit() and int(quota) > 0:  # "max" and -1 are not limits; v1 has its period, 0.1 s, in another file
            usable = min(usable, math.ceil(int(quota) / int(period or 100_000)))
    return max(1, usable)


def _text(path: Path) -> str:
    """A file's text; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def thread_variables(environment: Container[str], threads: int) -> dict[str, str]:
    """The variables that give NumPy's BLAS `threads` threads in each process, without those that you have set.

    Empty if OMP_NUM_THREADS is set: the others would override it.
    """
    if _THREADS[0] in environment:
        return {}
    return {name: str(threads) for name in _THREADS if name not in environment}


def bindings(n: int, overload: bool = False) -> list[set[int]]:
    """The logical CPUs of each of `n` processes bound to one core each.

    A core is bound with all its hyperthreads while there are enough cores. Otherwise hyperthreads count as cores. With
    `overload`, more processes than these take turns on them, the same number on each if possible.

    Raises: ValueError if this process may use fewer CPUs, without `overload`.
    """
    usable = os.sched_getaffinity(0)
    whole = list(dict.fromkeys(tuple(sorted(_siblings(cpu) & usable)) for cpu in sorted(usable)))
    if n <= len(whole):
        return [set(cpus) for cpus in whole[:n]]
    if n <= len(usable):
        return [{cpu} for cpu in sorted(usable)[:n]]
    if overload:
        cpus = sorted(usable)
        return [{cpus[i % len(cpus)]} for i in range(n)]
    raise ValueError(
        f"{n} processes cannot be bound to {len(usable)} cores, one each; leave out --bind-to core, start fewer, or let "
        "several share a core: --bind-to core:overload-allowed"
    )


def _siblings(cpu: int) -> set[int]:
    """The hyperthreads of a logical CPU's core, itself among them."""
    found = {cpu}
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", _text(_CPUS / f"cpu{cpu}/topology/thread_siblings_list")):
        found |= set(range(int(first), int(last or first) + 1))
    return found


@functools.lru_cache(maxsize=1)
def cache_bytes(processes: int) -> int | None:
    """Bytes of the last-level caches that this number of processes can fill; None if the system does not report them.

    A processor may have several such caches, each for some of its cores.
    """
    found: dict[str, int] = {}
    for folder in _CPUS.glob("cpu[0-9]*/cache"):
        last = max(folder.glob("index*"), default=folder)
        if size := re.fullmatch(r"(\d+)K", _text(last / "size")):
            found[_text(last / "shared_cpu_list")] = int(size[1]) << 10
    return sum(sorted(found.values())[-processes:]) or None


def dying_with_parent(parent: int) -> Callable[[], None]:
    """Return a function for the child to call. The kernel then kills the child when its parent, process `parent`, ends.

    More exactly, when the *thread* that started the child ends.
    """
    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(128 + signal.SIGKILL)

    return bind
