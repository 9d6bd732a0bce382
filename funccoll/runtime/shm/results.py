"""Where the results of collectives go: new arrays in the heap, or small ones that nobody holds any more."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from sys import getrefcount

import numpy as np

__all__ = ["UNSHARED_REFCOUNT", "ResultPool"]

_POOLED = 1 << 16
"""ResultPool of up to so many bytes are used again as they are, when nobody holds them any more."""
_KEPT = 3
# What `getrefcount` says, called by `map`, of an array that only a tuple holds: Python's versions count differently.
_ALONE = max(map(getrefcount, (np.empty(0),)))


def _alone() -> int | None:
    alone = (np.empty(0),)
    references = ctypes.c_uint32.from_address(id(alone[0]))
    count = references.value
    again = [alone[0], alone[0]]
    return count if references.value == count + len(again) else None


UNSHARED_REFCOUNT = _alone()
"""How many references an array has, as the kernel reads it, that only a tuple holds; None where Python counts otherwise."""


class ResultPool:
    """The arrays that the results of a call go to, as a tuple.

    Small ones that nobody holds any more are used again, all of a call together: 20 µs less for 32 of them. Whether somebody
    does is seen by the kernel when it takes them; if so, it has to be given `others`.
    """

    def __init__(self, make: Sequence[Callable[[], np.ndarray]], nbytes: int):
        self.make = make
        self.pooled = bool(make) and nbytes <= _POOLED
        self.kept: list[tuple[np.ndarray, ...]] = []

    def __call__(self) -> tuple[np.ndarray, ...]:
        """Arrays for one call: those that have rested longest."""
        if self.kept and UNSHARED_REFCOUNT is not None:
            arrays = self.kept.pop(0)
            self.kept.append(arrays)
            return arrays
        return self.others()

    def others(self) -> tuple[np.ndarray, ...]:
        """Arrays that surely nobody holds."""
        kept = self.kept
        for arrays in kept:
            if max(map(getrefcount, arrays)) == _ALONE:  # views hold their array, too
                return arrays
        if not self.pooled:
            return tuple([one() for one in self.make])
        if len(self.kept) < _KEPT:
            arrays = tuple([one() for one in self.make])
        else:  # some of the oldest are still held: a loss that is kept of every step, say
            oldest = self.kept.pop(0)
            free = [count == _ALONE for count in map(getrefcount, oldest)]
            arrays = tuple([a if f else one() for a, f, one in zip(oldest, free, self.make, strict=True)])
        self.kept.append(arrays)
        return arrays
