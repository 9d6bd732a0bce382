"""Arenas: each rank's part of the shared memory. They are reserved as address space, and pages are committed as needed."""

from __future__ import annotations

import functools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from ...core.display import size_text
from ...errors import system_reason
from ...job.host import address_space_limits, available_memory
from .uninterrupted import one_step

__all__ = ["ALIGNMENT", "LARGE", "LARGEST", "PAGE", "SHAREABLE", "Arena", "Pages", "block_size", "tail_size"]

PAGE = 4096
ALIGNMENT = 128
"""Two cache lines. Processors fetch lines in pairs, and one rank may write a block while another reads the next."""
LARGE = 32 << 20
"""Bytes from which on a freed block gives its pages back. Smaller blocks are only reused."""

LARGEST = 64 << 30
"""Bytes of an arena's address space if nothing limits it."""
SHAREABLE = 1 << 17
"""Bytes of an array from which on its block has a tail."""

_SMALL = 1 << 20  # blocks up to here have two sizes per power of two, larger ones eight
_CACHED_LARGE = 8  # free large blocks that keep their pages: fresh ones cost 0.3 ms per MiB
_RUN = 256 << 10  # bytes of small blocks that are made together from pages that were given back
_RESERVE = 64 << 20  # bytes of the machine's memory to leave free: without any, processes are killed
_GROWTH = 2 << 20, 64 << 20  # an arena grows by a quarter of itself, within these bounds


@functools.lru_cache(maxsize=1024)
def block_size(nbytes: int) -> int:
    """Bytes of the block that holds `nbytes`. It is a multiple of ALIGNMENT with few values, so that blocks can be reused."""
    power = 1 << (max(nbytes, ALIGNMENT) - 1).bit_length()
    step = max(ALIGNMENT, power >> (2 if power <= _SMALL else 4))
    return -(-max(nbytes, ALIGNMENT) // step) * step


def tail_size(nbytes: int, nranks: int) -> int:
    """Bytes behind the block of an array of `nbytes`. They count how often each of `nranks` ranks has released it.

    The tail fills whole pages, because those of large blocks are given back to the system.
    """
    return 0 if nbytes < SHAREABLE else -(-8 * nranks // PAGE) * PAGE


class Pages:
    """The pages of a large block. They go back to the system when nothing refers to them any more."""

    __slots__ = ("__weakref__", "offset", "size")

    def __init__(self, offset: int, size: int):
        self.offset, self.size = offset, size


class Arena:
    """The allocator of new blocks and of freed large ones. Offsets count from the beginning of the mapping.

    The caller lets one thread at a time allocate. Blocks may be freed at any time, even during an allocation: that only appends
    to lists and pops from them, and each is a single step for Python's threads.

    Attributes: `cached`, the pages of the last few large blocks that were freed.

    `owner` begins the sentences of errors: "rank 2's". In `exclusive` no other process gets memory. All processes see the same
    free bytes, and must not all take them.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        descriptor: int,
        start: int,
        end: int,
        owner: str,
        exclusive: Callable[[], AbstractContextManager[None]],
    ):
        self._mapping: mmap.mmap | None = mapping
        self._descriptor, self.owner, self._exclusive = descriptor, owner, exclusive
        self._start, self._end = start, end
        self._top = self._end_committed = start
        self.cached: deque[Pages] = deque(maxlen=_CACHED_LARGE)
        self._returns: dict[int, weakref.ref[Pages]] = {}  # by offset; their callbacks give the pages back
        self._holes: list[tuple[int, int]] = []  # address space without pages: (offset, bytes)
        self._fragments: list[tuple[int, int]] = []  # free parts of pages, of no block: (offset, bytes)

    @property
    def used(self) -> int:
        """Bytes of address space that were allocated, without the holes."""
        return self._top - self._start - sum(size for _, size in self._holes[:])

    @property
    def committed(self) -> int:
        """Bytes that have pages."""
        return self._end_committed - self._start - sum(size for _, size in self._holes[:])

    @property
    def cached_bytes(self) -> int:
        """Bytes of free large blocks that keep their pages."""
        return sum(pages.size for pages in self.cached.copy())

    def allocate_large(self, size: int) -> Pages:
        """A block of `size` bytes, LARGE or more. Raises MemoryError."""
        found = self._find_cached(size)
        if found is None:
            (offset,) = self.allocate(size)
            found = Pages(offset, size)
            assert self._mapping is not None
            free = (self._mapping.madvise, mmap.MADV_REMOVE, offset, size), (self._holes.append, (offset, size))
            self._returns[offset] = weakref.ref(found, one_step(*free))
        return found

    def allocate(self, size: int) -> range:
        """Offsets of new blocks of `size` bytes, with pages: one, or several small ones. Raises MemoryError."""
        offset, nbytes = self._find_hole(-(-size // PAGE) * PAGE, size if size >= LARGE else _RUN)
        if nbytes:
            found = range(offset, offset + nbytes - size + 1, size)
            self._keep_fragment(found[-1] + size, offset + nbytes)
            return found
        align = PAGE if size >= LARGE else ALIGNMENT
        offset = -(-self._top // align) * align
        if offset + size > self._end:
            raise MemoryError(
                f"no address space is left for {size_text(size)} in {self.owner} arena of "
                f"{size_text(self._end - self._start)}, of which {size_text(self.committed)} are in use{self._limit()}."
            )
        self._grow(offset + size)
        self._keep_fragment(self._top, offset)
        self._top = offset + size
        return range(offset, offset + 1)

    def _limit(self) -> str:
        """The end of a sentence that names the limit on the arena's size; "" if nothing has limited it."""
        if self._end - self._start >= LARGEST:
            return ""
        limits = " and ".join(address_space_limits()) or "`ulimit -v` or `ulimit -f` of another rank"
        return f": {limits} limits it for all ranks"

    def _keep_fragment(self, start: int, end: int) -> None:
        if start < end:
            self._fragments.append((start, end - start))

    def reclaim(self, blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Give the pages of free blocks back to the system, neighbours joined. `blocks` are (offset, bytes).

        Returns the blocks that do not fill a page with their neighbours. They stay as they are.
        """
        self.cached.clear()
        free = [(offset, size, True) for offset, size in blocks]
        free += [(offset, size, False) for offset, size in self._fragments]
        free.sort()
        self._fragments, kept, i = [], [], 0
        while i < len(free):
            start, end, j = free[i][0], free[i][0], i
            while j < len(free) and free[j][0] == end:
                end += free[j][1]
                j += 1
            first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
            if first < last and self._mapping is not None:
                self._mapping.madvise(mmap.MADV_REMOVE, first, last - first)
                self._holes.append((first, last - first))
                self._keep_fragment(start, first)
                self._keep_fragment(last, end)
            else:
                kept += [(offset, size) for offset, size, is_block in free[i:j] if is_block]
                self._fragments += [(offset, size) for offset, size, is_block in free[i:j] if not is_block]
            i = j
        return kept

    def needs(self, size: int) -> bool:
        """True if a block of `size` bytes needs more memory than the arena has."""
        return self._top + size > self._end_committed

    def _grow(self, end: int) -> None:
        """Commit the arena's memory up to `end`, and a little more."""
        if end <= self._end_committed:
            return
        least, most = _GROWTH
        step = min(max((self._end_committed - self._start) // 4, least), most)
        target = min(-(-max(end, self._end_committed + step) // PAGE) * PAGE, self._end)
        self._commit(self._end_committed, target - self._end_committed)
        self._end_committed = target

    def _commit(self, offset: int, nbytes: int) -> None:
        """Give pages to a range. If memory is short, cached blocks give theirs back first."""
        with self._exclusive():
            if nbytes + _RESERVE > available_memory():
                self.cached.clear()
            free = max(available_memory() - _RESERVE, 0)
            reason = f"{size_text(free)} are available"
            if nbytes <= free:
                try:
                    return os.posix_fallocate(self._descriptor, offset, nbytes)
                except OSError as error:
                    reason = system_reason(error)
        raise MemoryError(
            f"{self.owner} arena cannot get {size_text(nbytes)} more of shared memory: {reason}. It has "
            f"{size_text(self.committed)}."
        )

    def close(self) -> None:
        """Leave all pages as they are, and drop the mapping."""
        self._returns.clear()
        self._mapping = None

    def lost(self, blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The parts of the arena in none of these blocks and not free, as (offset, bytes)."""
        pages = [(found.offset, found.size) for ref in list(self._returns.values()) if (found := ref()) is not None]
        found, end = [], self._start
        for offset, size in sorted([*blocks, *pages, *self._holes, *self._fragments, (self._top, 0)]):
            if offset > end:
                found.append((end, offset - end))
            end = max(end, offset + size)
        return found

    def find(self, lost: Iterable[tuple[int, int]]) -> None:
        """Use lost parts again."""
        self._fragments.extend(lost)

    def _find_cached(self, size: int) -> Pages | None:
        for pages in reversed(self.cached.copy()):
            if pages.size == size:
                try:
                    self.cached.remove(pages)
                except ValueError:
                    continue  # another thread was first
                return pages
        return None

    def _find_hole(self, least: int, most: int) -> tuple[int, int]:
        """(offset, bytes) of a place without pages, at least `least` and at most the larger bound. Its pages are committed.

        The first place that is large enough, neighbours joined; (0, 0) if there is none.
        """
        holes: list[tuple[int, int]] = []
        while self._holes:
            holes.append(self._holes.pop())
        holes.sort()
        joined: list[tuple[int, int]] = []
        for offset, length in holes:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        fits = next((hole for hole in joined if hole[1] >= least), None)
        self._holes.extend(hole for hole in joined if hole is not fits)
        if fits is None:
            return 0, 0
        offset, nbytes = fits[0], min(fits[1], max(least, most))
        try:
            self._commit(offset, nbytes)
        except BaseException:
            self._holes.append(fits)
            raise
        if fits[1] > nbytes:
            self._holes.append((offset + nbytes, fits[1] - nbytes))
        return offset, nbytes
