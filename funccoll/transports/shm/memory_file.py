"""The file that is the memory of a job's processes on one host: its creation, its limits, its mapping, and its lock.

It is anonymous (`memfd_create`). Every process maps it whole: [control: 16 MiB][arena of rank 0][arena of rank 1]...
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...arrays.shared_mapping import SharedMapping
from ...core.display import size_text
from ...errors import RendezvousError, system_reason
from ...job.host import address_space_limits
from .arena import LARGEST, PAGE

__all__ = ["CONTROL", "HEADER", "create", "exclusive", "largest_arena", "mapped"]

CONTROL = 16 << 20
"""Bytes of the control region, at offset 0."""
HEADER = 64 << 10
"""Bytes at its beginning that belong to the failure detector. The rest is the runtime's."""

_NAME = "funccoll-heap"
_LEAST = 640 << 20  # bytes of address space that a rank needs: Python with NumPy, LLVM, and a heap
_LEAST_ARENA = 4 << 20  # bytes of an arena that suffice for some computing
_MOST = 1 << 45  # bytes of address space of all arenas: mapped twice they are half of a process's address space
_NORESERVE = 0x4000  # MAP_NORESERVE, which `mmap` names only from Python 3.13 on


def largest_arena(world: int) -> int:
    """The most bytes of address space per rank that this process can map.

    Raises RendezvousError if not even LLVM, which comes next, could be loaded.
    """
    limits = address_space_limits()
    mappings, files = limits.get("`ulimit -v`"), limits.get("`ulimit -f`")
    if mappings is not None and mappings < _LEAST:
        raise RendezvousError(
            f"this process may map only {size_text(mappings)} of memory (`ulimit -v`), and a rank needs {size_text(_LEAST)}: "
            "`ulimit -v unlimited` lifts the limit. Limits on used memory (cgroups) are separate."
        )
    if files is not None and files < (least := CONTROL + world * _LEAST_ARENA):
        raise RendezvousError(
            f"this process may write only {size_text(files)} into a file (`ulimit -f`), also into the memory that ranks share, "
            f"and {world} ranks need {size_text(least)}: `ulimit -f unlimited` lifts the limit."
        )
    # Half of a limit on mappings, and the heap is mapped twice. The rest is for everything else in the process.
    rooms = [room for room in (_MOST, mappings and mappings // 4, files) if room is not None]
    return min([LARGEST, *(max(room - CONTROL, 0) // world // PAGE * PAGE for room in rooms)])


def create(world: int, arena: int) -> int:
    """The file descriptor of new shared memory for `world` ranks with `arena` bytes of address space each."""
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        raise RendezvousError(
            f"rank 0 cannot make the memory that ranks share (memfd_create: {error.strerror}). A sandbox (seccomp) that "
            "forbids it must allow it; Linux has it since 3.17."
        ) from None
    try:
        os.ftruncate(descriptor, CONTROL + world * arena)
        os.posix_fallocate(descriptor, 0, CONTROL)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(f"no shared memory for {world} processes ({size_text(CONTROL)}): {system_reason(error)}") from None
    return descriptor


def mapped(descriptor: int, size: int) -> SharedMapping:
    """The mapping of a file, but for its `shift`.

    Raises RendezvousError, and closes the file, if the process has no address space for it.
    """
    flags, found = mmap.MAP_SHARED | _NORESERVE, None
    try:
        found = SharedMapping(descriptor, size, flags)
        found.reading = mmap.mmap(descriptor, size, flags, mmap.PROT_READ)
        return found
    except OSError as error:
        if found is not None:
            found.close()
        os.close(descriptor)
        if error.errno != errno.ENOMEM:
            raise
        with open("/proc/self/maps") as maps:
            others = sum(_NAME in line and " rw-s " in line for line in maps)
        kept = f" beside those of {others:,} jobs that it has left and whose arrays it keeps" if others else ""
        remedy = "join fewer jobs (fc.init, fc.finalize), or delete their arrays" if others else "lift `ulimit -v`"
        raise RendezvousError(
            f"this process cannot map the job's {size_text(size)} of address space{kept} ({error.strerror}): {remedy}."
        ) from None


@contextmanager
def exclusive(descriptor: int, lock: Any, timeout: float) -> Iterator[None]:
    """Exclude other processes by a lock on the file, and other threads by an RLock of this process.

    Raises RendezvousError if another one stays in it for `timeout` seconds because it was stopped.
    """
    end = time.monotonic() + timeout
    try:
        if not lock.acquire(timeout=timeout):  # all threads of a process share the file's lock
            raise RendezvousError(f"another thread has kept the job's memory locked for {timeout:g} s.")
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise RendezvousError(f"another process has kept the job's memory locked for {timeout:g} s.") from None
                time.sleep(0.001)
        yield
    finally:
        if lock._is_owned():  # also if an interrupt came as it was taken
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_UN)
            finally:
                lock.release()
