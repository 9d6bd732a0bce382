"""What this machine gives a job: cores, memory, and the kernel features that the runtime needs.

Standard library only: the launcher reads it before anything else is imported.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__all__ = [
    "PEER_FAILURE_EXIT_CODE", "bindings", "cgroup_limits", "cores", "dying_with_parent", "memory_limit", "thread_variables",
]  # fmt: skip

PEER_FAILURE_EXIT_CODE = os.EX_UNAVAILABLE
"""The exit code (69) of a process that ends with a PeerFailure: another one is the cause."""

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_CGROUPS = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def cgroup_limits(controller: str, v1: str, v2: str) -> Iterator[str]:
    """The texts of a limit's files in this process's control group and those above it, of cgroup v1 or v2.

    `controller` is v1's folder ("memory"); `v1` and `v2` are the names of the file.
    """
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root, name = (_CGROUPS / controller, v1) if names else (_CGROUPS, v2)
        # Inside a container the path may be the host's, which is not there: its own group is then at the root.
        for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
            if folder == root.parent:
                break
            try:
                yield (folder / name).read_text().strip()
            except OSError:
                continue


def memory_limit() -> int | None:
    """The lowest memory limit of this process's control groups in bytes, or None when there is none."""
    texts = cgroup_limits("memory", "memory.limit_in_bytes", "memory.max")
    limits = [int(t) for t in texts if t.isdigit()]
    return min((limit for limit in limits if limit < 2**60), default=None)


def cores() -> int:
    """How many cores this process may use: its affinity, or less where a control group limits the time.

    Logical ones: two hyperthreads count as two.
    """
    usable = len(os.sched_getaffinity(0))
    for text in cgroup_limits("cpu", "cpu.cfs_quota_us", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and int(quota) > 0:  # "max" and -1 are no limit; v1 has its period, 0.1 s, in another file
            usable = min(usable, math.ceil(int(quota) / int(period or 100_000)))
    return max(1, usable)


def thread_variables(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """The variables that give NumPy's BLAS `threads` threads in each process, without those that the user set.

    When OMP_NUM_THREADS is set nothing is: the others would override it.
    """
    if _THREADS[0] in environment:
        return {}
    return {name: str(threads) for name in _THREADS if name not in environment}


def bindings(n: int) -> list[set[int]]:
    """The logical CPUs of each of `n` processes that are bound to one core each.

    A core is bound with all its hyperthreads while there are enough cores; otherwise hyperthreads count as cores.

    Raises: ValueError when this process may not use as many.
    """
    usable = os.sched_getaffinity(0)
    whole = list(dict.fromkeys(tuple(sorted(_siblings(cpu) & usable)) for cpu in sorted(usable)))
    if n <= len(whole):
        return [set(cpus) for cpus in whole[:n]]
    if n <= len(usable):
        return [{cpu} for cpu in sorted(usable)[:n]]
    raise ValueError(f"{n} processes cannot be bound to {len(usable)} cores, one each")


def _siblings(cpu: int) -> set[int]:
    """The hyperthreads of a logical CPU's core, itself among them."""
    try:
        text = (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return {cpu}
    found = {cpu}
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def dying_with_parent(parent: int) -> Callable[[], None]:
    """A function for the child: when process `parent`, its parent, ends in whatever way, the kernel kills the child.

    More exactly, when the *thread* that started it ends.
    """
    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(128 + signal.SIGKILL)

    return bind
