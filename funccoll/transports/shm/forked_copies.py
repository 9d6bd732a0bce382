"""Private copies of shared memory for a forked child."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

from ...core.display import size_text
from .arena import PAGE

__all__ = ["joined", "make_private"]

_JOIN = 64 << 10  # a forked child copies live blocks together if they are nearer to each other than this
_FIXED = 0x10  # MAP_FIXED, <sys/mman.h>
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED


def joined(blocks: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Ranges of pages, (start, end), that hold these blocks."""
    ranges: list[list[int]] = []
    for start, end in sorted(blocks):
        if ranges and start < ranges[-1][1] + _JOIN:
            ranges[-1][1] = max(ranges[-1][1], end)
        else:
            ranges.append([start // PAGE * PAGE, end])
    return ranges


def _c_function(name: str, *arguments: Any) -> Any:
    """A function of the C library that returns an address.

    Look this up before a fork: another thread may hold the dynamic linker's lock at the fork, and in the child it stays locked.
    """
    function = ctypes.CDLL(None, use_errno=True)[name]
    function.argtypes, function.restype = arguments, ctypes.c_void_p
    return function


_mmap = _c_function("mmap", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def make_private(memory: memoryview, ranges: Sequence[Sequence[int]], bases: tuple[int, int]) -> None:
    """Map private copies of some pages in their place, at both addresses: the writable one and the read-only one."""
    sizes = [-(-(end - start) // PAGE) * PAGE for start, end in ranges]
    descriptor, place = os.memfd_create("funccoll", os.MFD_CLOEXEC), 0
    try:
        os.posix_fallocate(descriptor, 0, sum(sizes))
        with mmap.mmap(descriptor, sum(sizes)) as copies:
            for (start, _), size in zip(ranges, sizes, strict=True):
                copies[place : place + size] = memory[start : start + size]
                for base, protection in zip(bases, (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ), strict=True):
                    if _mmap(base + start, size, protection, mmap.MAP_PRIVATE | _FIXED, descriptor, place) == _FAILED:
                        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                place += size
    except OSError as error:
        raise MemoryError(f"a forked child cannot copy {size_text(sum(sizes))} of arrays: {error.strerror}.") from None
    finally:
        os.close(descriptor)
