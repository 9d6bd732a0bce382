"""Memory that all processes of a job share, and NumPy arrays in it.

The memory is one file (`memory_file`) with an arena for each rank. An arena is mostly address space. Its rank commits memory as
it needs it (`posix_fallocate`), so running out raises MemoryError there, and never a SIGBUS somewhere else. Only its own rank
allocates in an arena; all ranks read and write.

An array's memory goes back to its arena when its last view is gone. A weak reference notices that. Views keep the array alive
because its base, the mapping, is not an array: NumPy follows bases only as far as they are arrays. The mapping itself lives as
long as an array in it. Callbacks of weak references are C functions (`uninterrupted`): a signal may come at any time.

The file is mapped twice. What users get of a block, and what ranks acquire, lies in the read-only mapping (`SharedMapping`).

A block of 128 KiB or more can be a *shared buffer*. Its owner *publishes* it, and other ranks *acquire* it as read-only arrays
of its memory. A rank has *released* it when the last view of its array is gone. The owner keeps it until all of them have.
Behind each such block is a *tail* with a word for each rank, written only by that rank: how often it has released the block.
The owner compares it with how often it has published the block.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import repeat, starmap
from typing import Any

import numpy as np

from ...arrays.shared_mapping import SharedMapping
from ...core.c_extension import extension
from ...core.display import size_text
from ...errors import DTypeError, FunccollError, RendezvousError, ShapeError
from ...job.host import available_memory
from .arena import LARGE, SHAREABLE, Arena, block_size, tail_size
from .forked_copies import joined, make_private
from .leases import Acquired, BlockKind, Lease, Publication, SharedBuffer
from .memory_file import CONTROL, exclusive, mapped
from .uninterrupted import one_step

__all__ = ["Heap"]

_COMMIT_TIMEOUT = 600.0  # seconds that a rank waits while others get memory
_RECLAIM = 64 << 20  # bytes of free blocks from which on they are joined before the arena grows
_KINDS = 4096  # (shape, dtype) pairs remembered
_ONE = np.ones(1, np.int64)
_NOTHING = repeat(None)
_FEW = 16


class Heap:
    """This process's mapping of the shared memory, and the allocator of its own arena.

    Several threads may call `array`. Lists of freed blocks are only appended to and popped from, and each is a single step for
    Python's threads: an array can die anywhere, even inside the allocator.

    Attributes: `base`, the mapping's address in this process; `size`, its bytes; `rank`, this process's in the job; `arena`,
    bytes of address space per rank; `control`, (offset, bytes) of the control region; `nranks`, the processes that share it.
    """

    def __init__(self, descriptor: int, local_rank: int, nranks: int, rank: int | None = None):
        """Map the memory of `descriptor`. The heap owns it from now on.

        This process is number `local_rank` of the `nranks` that share the memory. Errors call it `rank`, if that is given.
        """
        self.rank = local_rank if rank is None else rank
        self.size = os.fstat(descriptor).st_size
        self.arena = (self.size - CONTROL) // nranks
        self.control = (0, CONTROL)
        self._descriptor, self._pid = descriptor, os.getpid()
        self._mapping: SharedMapping | None = mapped(descriptor, self.size)
        self._reading: mmap.mmap | None = self._mapping.reading
        for mapping in (self._mapping, self._reading):
            mapping.madvise(mmap.MADV_DONTDUMP)
        everything = np.ndarray((1,), np.uint8, self._mapping)
        self.base: int = everything.__array_interface__["data"][0]
        self.reading_base: int = np.ndarray((1,), np.uint8, self._reading).__array_interface__["data"][0]
        self._mapping.shift = self.reading_base - self.base
        if extension is not None:
            extension.guard_memory(self.reading_base, self.size)
        self._pointer = _fast_pointer if _fast_pointer(everything) == self.base else _slow_pointer
        start = CONTROL + local_rank * self.arena
        self._lock: Any = threading.RLock()  # the mapping knows its owner; nothing is entered twice
        self._process_lock: Any = threading.RLock()
        exclude = partial(self.exclusive, _COMMIT_TIMEOUT)
        self._blocks = Arena(self._mapping, descriptor, start, start + self.arena, f"rank {self.rank}'s", exclude)
        self._kinds: dict[tuple[Any, Any], BlockKind] = {}  # by (shape, dtype)
        self._sizes: dict[int, BlockKind] = {}  # by block size
        self._leases: dict[int, Lease] = {}  # by offset; those of blocks that were freed, too
        self._has_lost = False  # an exception may have lost a block on its way
        self.nranks, self._local_rank = nranks, local_rank
        self._shared: dict[int, SharedBuffer] = {}  # by offset
        self._words = memoryview(self._mapping).cast("B").cast("q")
        self._zeros = memoryview(bytes(8 * nranks)).cast("q")
        self._published_since = 0  # how many blocks were published since all were looked at
        self._acquired: dict[int, Acquired] = {}  # by id; also some of arrays that are gone
        self._most_acquired = _FEW
        self._kept_alive: list[Any] = []

    # ------------------------------------------------------------ arrays

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A new C-contiguous array in this rank's arena. Its values are undefined, as `np.empty`'s.

        It begins at a multiple of 128 bytes, of a page from 32 MiB on.

        Raises: MemoryError when the host, the container or the arena has not enough memory.
        """
        try:
            try:
                kind = self._kinds[shape, dtype]
                offset = kind.free.pop().offset
                free: Callable[..., object] = kind.free.append
            except (KeyError, IndexError, TypeError, AttributeError):  # the last block of a lease that was being made
                kind = self._kind(shape, dtype)
                offset, free = self._block(kind)
            array = np.ndarray(shape, dtype, self._mapping, offset)
            lease = Lease(array, free)
            lease.offset, lease.kind = offset, kind
            self._leases[offset] = lease
            return array
        except BaseException:
            self._has_lost = True
            raise

    # ------------------------------------------------------------ blocks that several ranks have

    def shareable(self, array: Any) -> np.ndarray | None:
        """This rank's block, if an array is all of it and nothing can write into it through the array; else None."""
        if type(array) is not np.ndarray or (offset := self.offset_of(array)) < 0 or array.nbytes < SHAREABLE:
            return None
        lease = self._leases.get(offset)
        block = None if lease is None else lease()
        if block is None or block.nbytes != array.nbytes:
            return None
        is_view = array.base is block and not array.flags.writeable
        return block if array is block or is_view or self._pointer(array) != self.base + offset else None

    def publish(self, block: np.ndarray, times: np.ndarray, published: list[Publication] | None = None) -> int:
        """Keep a block of this rank's until each (local) rank has released it as often as it acquires it: `times`.

        From now on nothing writes into it. Returns its offset. In the same step `published` gets what `unpublish` needs.
        """
        block.flags.writeable = False
        offset = self.offset_of(block)
        self._refuse_nested()
        with self._lock:
            if self._published_since >= len(self._shared):
                self._settle()
            self._published_since += 4  # so that a job which keeps many blocks looks at four for each that it publishes
            shared = self._shared.get(offset)
            if shared is None:
                tail = (offset + block_size(block.nbytes)) // 8
                self._words[tail : tail + self.nranks] = self._zeros
                shared = self._shared[offset] = SharedBuffer(block, np.zeros(self.nranks, np.int64), tail)
            noted = [] if published is None else [(published.append, (shared, times))]
            one_step((np.add, shared.counts, times, shared.counts), *noted)()
        return offset

    def unpublish(self, published: list[Publication]) -> None:
        """Undo publications that no other rank knows. Call it again if an exception has left it: each is undone once."""
        with self._lock:
            while published:
                shared, times = published[-1]
                one_step((np.subtract, shared.counts, times, shared.counts), (published.pop,))()

    def acquire(self, offset: int, shape: tuple[int, ...], dtype: Any, noted: Iterator[object] = _NOTHING) -> np.ndarray:
        """The read-only array of a shared buffer. It is released when its last view is gone.

        An item of `noted` is taken in the same step from which on the array will be released. C functions make that iterator.
        """
        self._open()
        array = np.ndarray((math.prod(shape),), dtype, self._reading, offset)
        released: list[Any] = []  # the arguments of what the callback calls: nothing yet
        acquired = Acquired(array, partial(next, starmap(np.add, released)))
        acquired.offset, acquired.size = offset, array.nbytes
        tail = offset + block_size(array.nbytes)
        word = np.ndarray((1,), np.int64, self._mapping, tail + 8 * self._local_rank)
        self._acquired[id(acquired)] = acquired
        next(zip(map(released.append, ((word, _ONE, word),)), noted, strict=False))  # see `one_step`
        if len(self._acquired) > self._most_acquired:
            for key, each in list(self._acquired.items()):
                if each() is None:
                    self._acquired.pop(key, None)
            self._most_acquired = 2 * len(self._acquired) + _FEW
        return array.reshape(shape)

    def _settle(self) -> None:
        """Drop shared buffers that all ranks have released."""
        self._published_since = 0
        for offset, shared in list(self._shared.items()):
            if not any(self._kept(shared)):
                del self._shared[offset]

    def _kept(self, shared: SharedBuffer) -> list[bool]:
        """By rank, True if it has not released a buffer."""
        released = self._words[shared.tail : shared.tail + self.nranks].tolist()
        return [given != got for given, got in zip(released, shared.counts.tolist(), strict=True)]

    def offset_of(self, array: np.ndarray) -> int:
        """Offset of the array's first byte in the heap; -1 for an array that is not C-contiguous, or not in it."""
        if not array.flags.c_contiguous:
            return -1
        address = self._pointer(array)
        for base in (self.base, self.reading_base):
            if base <= address and address + array.nbytes <= base + self.size:
                return address - base
        return -1

    def view(self, offset: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """The array at an offset, in any rank's arena. It keeps the mapping alive, but not the block: its owner may reuse
        that."""
        return np.ndarray(tuple(shape), dtype, self._open(), offset)

    def exclusive(self, timeout: float) -> AbstractContextManager[None]:
        """Exclude other processes and threads. See `memory_file.exclusive`."""
        return exclusive(self._descriptor, self._process_lock, timeout)

    def stats(self) -> dict[str, Any]:
        """Statistics of this rank's arena: live arrays, and bytes of address space, committed, freed with their pages.

        "shared" has, by rank, the bytes of blocks that this rank has published for it, and that it has not released.
        """
        free = self._free() + self._blocks.cached_bytes
        used, committed = self._blocks.used, self._blocks.committed
        shared = {rank: nbytes for rank, (nbytes, _) in self._kept_by().items()}
        arrays = len(self._live())
        return {"arrays": arrays, "arena": self.arena, "used": used, "committed": committed, "free": free, "shared": shared}

    def _kept_by(self) -> dict[int, tuple[int, int]]:
        """By rank, the bytes and the number of blocks that it has not released."""
        kept: dict[int, tuple[int, int]] = {}
        for shared in list(self._shared.values()):
            for rank in np.flatnonzero(self._kept(shared)).tolist():
                nbytes, number = kept.get(rank, (0, 0))
                kept[rank] = nbytes + shared.block.nbytes, number + 1
        return kept

    def _live(self) -> list[Lease]:
        """The leases of arrays that are alive."""
        return [lease for lease in list(self._leases.values()) if lease() is not None]

    def close(self) -> None:
        """Leave the heap. Arrays that are alive stay valid: the mapping goes when the last of them goes."""
        if self._mapping is None:
            return
        self._mapping = self._reading = None
        self._words = self._zeros
        self._blocks.close()
        for table in (self._leases, self._kinds, self._sizes, self._shared):
            table.clear()
        os.close(self._descriptor)

    def before_fork(self) -> None:
        """Keep what was acquired, until `after_fork` or `disown`: a child that drops some before must not release it."""
        self._kept_alive = [each() for each in list(self._acquired.values())]

    def after_fork(self) -> None:
        """Keep it no longer."""
        self._kept_alive = []

    def disown(self, most: int | None) -> None:
        """Stop allocating and freeing, in a forked child: the arena stays the parent's.

        The parent may change or free an array at any time. So the child gets copies of all pages with live blocks, at the same
        addresses; none if `most` is None.

        Raises: MemoryError if these are more than `most` bytes, or more than the memory there is.
        """
        blocks = [(lease.offset, lease.offset + lease.kind.size) for lease in self._live()]
        blocks += [(each.offset, each.offset + each.size) for each in list(self._acquired.values()) if each() is not None]
        ranges = joined(blocks)
        # No callback runs any more: the parent still has what dies here.
        self._blocks.close()
        self._leases.clear()
        self._acquired.clear()
        self._kinds.clear()
        self._kept_alive = []
        if most is None or not ranges:
            return
        total, most = sum(end - start for start, end in ranges), min(most, available_memory())
        if total > most:
            raise MemoryError(
                f"rank {self.rank} was forked while it has arrays of {size_text(total)} in the memory that ranks share. A "
                f"child must not see them change, and at most {size_text(most)} can be copied. So this child ends. Start "
                "it by the spawn or forkserver method, fork before the arrays are made, or set FUNCCOLL_FORK_MIB to more."
            )
        assert self._mapping is not None
        make_private(memoryview(self._mapping), ranges, (self.base, self.reading_base))

    def _open(self) -> mmap.mmap:
        if self._mapping is None:
            raise RendezvousError("this heap is closed: the process has left its job (fc.finalize)")
        if os.getpid() != self._pid:
            raise RendezvousError(
                f"this process was forked from rank {self.rank}, and must not allocate in its shared memory: start it with "
                "the spawn method, or use only NumPy in it."
            )
        return self._mapping

    def _block(self, kind: BlockKind) -> tuple[int, Callable[..., object]]:
        """The offset of a free block, and what frees it: a C function."""
        if (found := self._freed(kind)) is not None:
            return found
        self._refuse_nested()
        with self._lock:
            if self._shared:
                self._settle()
                found = self._freed(kind)
            if found is None:
                if self._blocks.needs(kind.size) and self._free() > max(_RECLAIM, available_memory() // 8):
                    self._reclaim()  # not earlier: pages that are soon reused cost 0.3 ms per MiB
                try:
                    found = self._allocate(kind)
                except MemoryError:
                    self._reclaim()
                    try:
                        found = self._allocate(kind)
                    except MemoryError as error:
                        raise MemoryError(f"{error}{self._keepers()}") from None
        return found

    def _freed(self, kind: BlockKind) -> tuple[int, Callable[..., object]] | None:
        with suppress(IndexError, AttributeError):
            return kind.free.pop().offset, kind.free.append
        with suppress(IndexError):
            return kind.fresh.pop(), kind.free.append
        return None

    def _allocate(self, kind: BlockKind) -> tuple[int, Callable[..., object]]:
        if kind.size >= LARGE:
            pages = self._blocks.allocate_large(kind.size)
            return pages.offset, one_step((self._blocks.cached.append, pages))
        found = self._blocks.allocate(kind.size)
        kind.fresh.extend(found[1:])
        return found[0], kind.free.append

    def _keepers(self) -> str:
        """The end of an error about missing memory: the ranks that keep most of what this one shares; "" without any."""
        kept = sorted(self._kept_by().items(), key=lambda each: -each[1][0])
        if not kept:
            return ""
        ranks = [f"rank {r} keeps {size_text(nbytes)} in {n} result{'s' * (n > 1)}" for r, (nbytes, n) in kept[:3]]
        more = f", and {len(kept) - 3} more ranks keep some" if len(kept) > 3 else ""
        return (
            f" Of that {', '.join(ranks)}{more}, in blocks of rank {self.rank}'s that ranks share: drop them there, or "
            "keep copies (y.local.copy())."
        )

    def _refuse_nested(self) -> None:
        if self._lock._is_owned():
            raise FunccollError(
                "an array was made in shared memory in the middle of making another one, by the same thread: from a signal "
                "handler or a destructor. Only set a flag there, and make it in the code that runs the steps."
            )

    def _free(self) -> int:
        return sum(kind.size * (len(kind.free) + len(kind.fresh)) for kind in list(self._sizes.values()))

    def _reclaim(self) -> None:
        """Join free blocks of all sizes, and give their pages back to the system."""
        self._find_lost()
        taken: list[tuple[int, int]] = []
        for kind in list(self._sizes.values()):
            while (found := self._freed(kind)) is not None:
                taken.append((found[0], kind.size))
                self._leases.pop(found[0], None)
        for offset, size in self._blocks.reclaim(taken):
            self._sizes[size].fresh.append(offset)

    def _find_lost(self) -> None:
        """Find blocks that exceptions have lost, of a signal handler for example: no list has them, and no array.

        Not if another thread may have just taken one out of a list, or the code that a signal handler has interrupted.
        """
        if not self._has_lost:
            return
        frames, enabled = None, gc.isenabled()
        gc.disable()  # finalizers free and make arrays
        try:
            kinds = list(self._sizes.values())
            lists = [(list, each) for kind in kinds for each in (kind.free, kind.fresh)]
            frames, leases, *found = one_step((sys._current_frames,), (dict.copy, self._leases), *map(tuple, lists))()
            if _calls_of(Heap.array.__code__, frames.values()) > 1:
                return
            blocks = [(lease.offset, lease.kind.size) for lease in leases.values() if lease() is not None]
            for kind, free, fresh in zip(kinds, found[::2], found[1::2], strict=True):
                blocks += [(lease.offset, kind.size) for lease in free if hasattr(lease, "offset")]
                blocks += [(offset, kind.size) for offset in fresh]
            self._blocks.find(self._blocks.lost(blocks))
            self._has_lost = False
        finally:
            del frames
            if enabled:
                gc.enable()

    def _kind(self, shape: Any, dtype: Any) -> BlockKind:
        self._open()
        if np.dtype(dtype).hasobject:
            raise DTypeError(f"arrays of {np.dtype(dtype)} cannot be shared: they hold pointers, which mean nothing elsewhere.")
        if min(map(operator.index, shape), default=0) < 0:
            raise ShapeError(f"no array has the shape {tuple(shape)}: sizes are 0 or more.")
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        size = block_size(nbytes) + tail_size(nbytes, self.nranks)
        self._refuse_nested()
        with self._lock:
            if size not in self._sizes:
                self._sizes[size] = BlockKind(size)
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
            kind = self._sizes[size]
            if isinstance(shape, tuple):
                self._kinds[shape, dtype] = kind
            return kind


def _fast_pointer(array: np.ndarray) -> int:
    """An array's address, read from its place in NumPy's ABI, behind the object's head. It takes 0.3 µs, `__array_interface__`
    1.9."""
    return ctypes.c_size_t.from_address(id(array) + object.__basicsize__).value


def _slow_pointer(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _calls_of(code: Any, frames: Any) -> int:
    """How often a function is being called, in these frames and their callers."""
    count = 0
    for frame in frames:
        while frame is not None:
            count += frame.f_code is code
            frame = frame.f_back
    return count
