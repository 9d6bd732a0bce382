"""Records of a heap about its blocks: the array in each, the ranks that share it, and the free blocks."""

from __future__ import annotations

import weakref

import numpy as np

__all__ = ["Acquired", "BlockKind", "Lease", "Publication", "SharedBuffer"]


class BlockKind:
    """Blocks of one size. `free` holds the leases of freed blocks, `fresh` the offsets of blocks never used."""

    __slots__ = ("free", "fresh", "size")

    def __init__(self, size: int):
        self.size = size
        self.free: list[Lease] = []
        self.fresh: list[int] = []


class Lease(weakref.ref):
    """The weak reference to an array, with the block that it occupies."""

    __slots__ = ("kind", "offset")

    kind: BlockKind
    offset: int


class Acquired(weakref.ref):
    """The weak reference to an array of a shared buffer. Its callback counts that this rank has released it."""

    __slots__ = ("offset", "size")

    offset: int
    size: int


class SharedBuffer:
    """A shared buffer: how often it was published for each rank, and the index of the words that count releases."""

    __slots__ = ("block", "counts", "tail")

    def __init__(self, block: np.ndarray, counts: np.ndarray, tail: int):
        self.block, self.counts, self.tail = block, counts, tail


Publication = tuple[SharedBuffer, np.ndarray]
"""A shared buffer, and how often each rank was to acquire it."""
