"""The arrays for the results of collectives: new ones in the heap, or small ones that are no longer in use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from sys import getrefcount

import numpy as np

from ...compiler.passes.buffers import SMALL_RESULT_BYTES
from ...runtime.collective_call import Operand
from .heap import Heap

__all__ = ["UNSHARED_REFCOUNT", "ResultPool", "new_result"]

_POOLED = 1 << 18
"""Bytes of a call's results up to which free arrays are reused, if all are small. Large ones are not: compute writes into them,
and they become other values."""
_MAX_KEPT = 3
# The count of `getrefcount`, called by `map`, for an array that only a tuple holds: Python's versions count differently.
_UNSHARED = max(map(getrefcount, (np.empty(0),)))


def _unshared_refcount() -> int | None:
    unshared = (np.empty(0),)
    references = ctypes.c_uint32.from_address(id(unshared[0]))
    count = references.value
    again = [unshared[0], unshared[0]]
    return count if references.value == count + len(again) else None


UNSHARED_REFCOUNT = _unshared_refcount()
"""The reference count of an array that only a tuple holds, as the kernel reads it; None if Python counts otherwise."""


class ResultPool:
    """The arrays for a call's results, as a tuple.

    Small arrays that are no longer in use are reused, all of a call together. That saves 1 µs for each. The kernel reads their
    reference counts when it binds them. If one is in use, the call must be given `others`.
    """

    def __init__(self, make: Sequence[Callable[[], np.ndarray]], sizes: Sequence[int]):
        """`sizes` are the bytes of the arrays that `make` makes."""
        self.make = make
        self.pooled = bool(make) and sum(sizes) <= _POOLED and max(sizes) <= SMALL_RESULT_BYTES
        self.kept: list[tuple[np.ndarray, ...]] = []

    def others(self) -> tuple[np.ndarray, ...]:
        """Arrays that are surely not in use."""
        kept = self.kept
        for arrays in kept:
            if max(map(getrefcount, arrays)) == _UNSHARED:  # views hold their array, too
                return arrays
        if not self.pooled:
            return tuple([one() for one in self.make])
        if len(self.kept) < _MAX_KEPT:
            arrays = tuple([one() for one in self.make])
        else:  # some of the oldest are in use: every step's loss is kept, say
            oldest = self.kept.pop(0)
            free = [count == _UNSHARED for count in map(getrefcount, oldest)]
            arrays = tuple([a if f else one() for a, f, one in zip(oldest, free, self.make, strict=True)])
        self.kept.append(arrays)
        return arrays


def new_result(heap: Heap, operand: Operand, zeros: bool = False) -> np.ndarray:
    """A new array that only kernels write. It is read-only, and so are its views. Compute may write into a large one later."""
    array = heap.array(operand.out_shape, operand.dtype)
    if zeros:
        array[...] = 0
    array.flags.writeable = not zeros and array.nbytes > SMALL_RESULT_BYTES
    return array
