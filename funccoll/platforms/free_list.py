"""The free list: memory of NumPy arrays that compiled programs freed, kept for the next arrays of the same sizes.

Fresh memory costs a page fault for every 4 KiB, more than most operations take to fill it. NumPy asks the handler of the
current context for an array's memory, and returns it when the array is deallocated (NEP 49). Compiled programs run in a context
whose handler keeps what comes back (`_free_list.c`). So a block is free only when NumPy itself would have freed it. Results,
views, arguments of callbacks and frames of exceptions keep their memory as long as they refer to it.

A process has one list for all its programs, because a step is often several programs, and the limit is one number.
"""

from __future__ import annotations

from ..core.c_extension import extension

__all__ = ["LIMIT", "kept", "trim", "use"]

LIMIT = 256 << 20
"""Bytes that the list keeps at most: what steps of small models use, and little enough for each of eight ranks of a host."""


def use(limit: int = LIMIT) -> None:
    """Take the memory of arrays from the free list in the current context. Without the C extension this does nothing."""
    if extension is not None:
        extension.use_free_list(limit)


def kept() -> tuple[int, int]:
    """Return the bytes and the blocks of the list."""
    return (0, 0) if extension is None else extension.free_list_size()


def trim() -> None:
    """Return the list's memory to the system."""
    if extension is not None:
        extension.trim_free_list()
