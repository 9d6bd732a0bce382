"""The fast path of a collective group: by the C extension, or in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import get_ident
from typing import Any

import numpy as np

from ...core.c_extension import extension
from .results import UNSHARED_REFCOUNT

__all__ = ["TUPLE_HEAD", "PlanFastPath"]

TUPLE_HEAD = tuple.__basicsize__
"""Bytes from a tuple's address to its items. The items are addresses of objects."""


def _word(address: int) -> Any:
    """A view of the int64 at an address."""
    return memoryview((ctypes.c_int64 * 1).from_address(address)).cast("B").cast("q")


_NOBODY = memoryview(b"\0" * 8).cast("q")
"""Stands in for the thread that may call when each call must take the slow path."""


class PythonPlanFastPath:
    """The Python version of `PlanFastPath` in `_native.c`, used without the extension."""

    is_complete = False
    """True if the last call has done all that others wait for, even if an exception has left it since."""

    def bind(
        self,
        kernel: Callable[[], int],
        context: int,
        words: tuple[int, int, int],
        owner: int,
        busy: bytearray,
        communicators: tuple[int, ...],
        kept: list[tuple[np.ndarray, ...]],
        others: Callable[[], tuple[np.ndarray, ...]],
        nargs: int,
        nresults: int,
    ) -> None:
        """Set what a call uses. `context` and `owner` are addresses; their memory must live as long as this object."""
        self._plain, self._busy, self._others, self._nargs, self._number = kernel, busy, others, nargs, communicators[0]
        self._is_one = len(communicators) == 1
        self._kept = kept if UNSHARED_REFCOUNT is not None else []  # the kernel sees which are in use
        self._thread, self._arguments, self._taken = map(_word, (owner, *(context + 8 * word for word in words[:2])))
        self.is_fast = True

    @property
    def is_fast(self) -> bool:
        """False while a profile is recorded: then the kernel is another one."""
        return self._owner is not _NOBODY

    @is_fast.setter
    def is_fast(self, value: bool) -> None:
        self._owner = self._thread if value and self._is_one else _NOBODY

    def __call__(self, *arrays: Any) -> tuple[np.ndarray, ...]:
        """This rank's results."""
        return self.packed(arrays) if len(arrays) == self._nargs else self.fallback(arrays)

    def packed(self, arrays: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
        """The same from a tuple of the right length."""
        number, busy = self._number, self._busy
        if self._owner[0] != get_ident() or busy[number]:
            return self.fallback(arrays)
        self.is_complete = False
        began, results, kept = False, (), self._kept
        busy[number] = 1
        try:
            if kept:  # the one that was used longest ago
                results = kept.pop(0)
                kept.append(results)
            else:
                results = self._others()
            self._arguments[0], self._taken[0] = id(arrays) + TUPLE_HEAD, id(results) + TUPLE_HEAD
            began = True
            if self._plain():
                results = self.finish(arrays, results)
            self.is_complete = True
            return (*results,)  # a new tuple: the pool must see that its arrays are in use
        except BaseException as error:
            if began:
                self.interrupted(arrays, results, error)
            raise
        finally:
            busy[number] = 0

    def fallback(self, arrays: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
        """See `SharedMemoryExecutable`."""
        raise NotImplementedError

    finish: Callable[..., tuple[np.ndarray, ...]]
    interrupted: Callable[..., None]


PlanFastPath: Any = PythonPlanFastPath if extension is None else extension.PlanFastPath
