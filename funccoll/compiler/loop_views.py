"""Arrays of a loop, views of them, and calls of kernels that read and write views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..kernels.native.group import FusedGroup
from ..kernels.native.loop import LoopPlace, StoredNumber
from ..kernels.native.products import MatrixProduct
from ..kernels.native.strided_copies import StridedCopy

__all__ = ["ArrayView", "KernelCall", "LoopArray", "c_strides"]


@dataclass(eq=False)
class LoopArray:
    """An array of the loop: an operand's, a result's, or a temporary one.

    - `invariant`: it is the same in all iterations.
    - `place`: its beginning. A temporary array gets it when all calls are known.
    """

    size: int
    invariant: bool
    place: LoopPlace | None = None


@dataclass(frozen=True, eq=False)
class ArrayView:
    """Elements of an array of the loop. Offset and distances are in elements."""

    memory: LoopArray
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def contiguous(self) -> bool:
        """True if the elements are in C order, without gaps."""
        distance = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != distance:
                return False
            distance *= n
        return True

    @property
    def whole(self) -> bool:
        """True if this is all of its array, in C order."""
        return self.contiguous and not self.offset and math.prod(self.shape) * self.dtype.itemsize == self.memory.size

    def reshaped(self, shape: Sequence[int]) -> ArrayView:
        """Return a contiguous view in another shape."""
        return replace(self, shape=tuple(shape), strides=c_strides(shape))

    def of(self, change: Callable[[np.ndarray], Any]) -> ArrayView:
        """Return the part that a view of NumPy has of these elements."""
        size = self.dtype.itemsize
        probe = np.lib.stride_tricks.as_strided(np.empty(1, self.dtype), self.shape, [s * size for s in self.strides])
        found = change(probe)
        start = (found.__array_interface__["data"][0] - probe.__array_interface__["data"][0]) // size
        return replace(self, shape=found.shape, strides=tuple(s // size for s in found.strides), offset=self.offset + start)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the distances along the dimensions of an array in C order."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


@dataclass(eq=False)
class KernelCall:
    """A call: what it reads, and what it writes."""

    kernel: FusedGroup | MatrixProduct | StridedCopy | StoredNumber
    reads: list[ArrayView]
    writes: list[ArrayView]
    aliases: frozenset[tuple[int, int]] = field(default=frozenset())
    """Pairs (write, read) that may be in one place."""
