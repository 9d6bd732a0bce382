"""The memory of CuPy's fake: allocations of a GPU, pools of them, and the allocator of each thread, as in CuPy 14.2.

It is memory of the host, which later arrays get again as those of a GPU do. A pool that is dropped never frees the blocks that
are free in it, and a block that is in use is freed with its array.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.fakes import fake_cupy

_UNIT = 512
_buffers: list[np.ndarray] = []
"""All memory, for good: what was enqueued may write it after its end."""
_free_blocks: dict[int, Block] = {}
"""Blocks that are free in a pool, which has a reference of its own to each: as those of a `std::set` they outlive it."""
total_bytes = 1 << 40
"""Of the GPU."""
made: list[weakref.ref[Memory]] = []
"""Memory that is allocated, or was."""


class Memory:
    """As in cupy.cuda: memory of cudaMalloc's, freed with the object."""

    device_id = 0

    def __init__(self, size: int):
        if size > fake_cupy.free_bytes:
            raise fake_cupy.OutOfMemoryError(f"Out of memory allocating {size:,} bytes (allocated so far: 0 bytes).")
        self.size, self.ptr = size, 0
        if size:
            _buffers.append(np.empty(size + _UNIT, np.uint8))
            self.ptr = -(-_buffers[-1].ctypes.data // _UNIT) * _UNIT
        made.append(weakref.ref(self))
        if size and fake_cupy.recorder is not None and hasattr(fake_cupy.recorder, "blocks"):
            fake_cupy.recorder.blocks.append(made[-1])


def allocated_bytes() -> int:
    """Bytes of the GPU that are allocated."""
    return sum(memory.size for found in made if (memory := found()) is not None)


class UnownedMemory:
    """As in cupy.cuda. Without a device it asks the driver for it."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1):
        if device_id < 0 and not ptr:
            raise RuntimeError("UnownedMemory requires explicit device ID for a null pointer.")
        self.ptr, self.size, self.device_id, self._owner = ptr, size, max(device_id, 0), owner


class MemoryPointer:
    """As in cupy.cuda."""

    def __init__(self, mem: Any, offset: int):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class Block:
    """A chunk of a pool, of the arena of a stream."""

    def __init__(self, mem: Any, arena: dict[int, Block]):
        self.mem, self.size, self.arena = mem, mem.size, arena


class PooledMemory:
    """As in cupy.cuda: it goes back to its pool, while there is one."""

    device_id = 0

    def __init__(self, block: Block, pool: weakref.ref[MemoryPool]):
        self._block, self._pool, self.size, self.ptr = block, pool, block.size, block.mem.ptr

    def __del__(self) -> None:
        if self._pool() is not None:
            _free_blocks[id(self._block)] = self._block
            self._block.arena[id(self._block)] = self._block


class MemoryPool:
    """As in cupy.cuda, of blocks that are never split."""

    def __init__(self, allocator: Callable[[int], Any] | None = None):
        self._allocator = allocator or (lambda size: MemoryPointer(Memory(size), 0))
        self._arenas: defaultdict[int, dict[int, Block]] = defaultdict(dict)
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()

    def malloc(self, size: int) -> MemoryPointer:
        from tests.support.fakes import fake_cuda

        if not size:
            return MemoryPointer(Memory(0), 0)
        size = math.ceil(size / _UNIT) * _UNIT
        arena = self._arenas[fake_cuda.get_current_stream().ptr]
        for block in sorted(arena.values(), key=lambda block: block.size):
            if block.size >= size and arena.pop(id(block), None) is not None:  # and another thread may take it
                del _free_blocks[id(block)]
                break
        else:
            block = Block(self._allocator(size).mem, arena)
            self._blocks.add(block)
        return MemoryPointer(PooledMemory(block, weakref.ref(self)), 0)

    def free_all_blocks(self, stream: Any = None) -> None:
        for arena in self._arenas.values():
            for key in list(arena):
                if arena.pop(key, None) is not None:
                    del _free_blocks[key]

    def total_bytes(self) -> int:
        return sum(block.size for block in list(self._blocks))

    def free_bytes(self) -> int:
        return sum(block.size for arena in self._arenas.values() for block in arena.values())

    def used_bytes(self) -> int:
        return self.total_bytes() - self.free_bytes()


_default = MemoryPool()
_allocators = threading.local()


def get_default_memory_pool() -> MemoryPool:
    return _default


def allocate(nbytes: int) -> MemoryPointer:
    """Memory of this thread's allocator."""
    return (getattr(_allocators, "current", None) or _default.malloc)(nbytes)


class using_allocator:
    """As in cupy.cuda: of this thread."""

    def __init__(self, allocator: Any = None):
        assert callable(allocator)
        self._allocator = allocator

    def __enter__(self) -> None:
        self._previous = getattr(_allocators, "current", None)
        _allocators.current = self._allocator

    def __exit__(self, *exc: Any) -> None:
        _allocators.current = self._previous
