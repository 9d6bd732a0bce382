"""The stream interpreter for a CPU: processes that share memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit, types

from . import memory, source
from .variants import variant

__all__ = ["interpreter"]

_OPERATIONS = (
    "load", "load_acquire", "store", "store_release", "pause", "yield_core", "nap", "copy", "call", "type_of", "data_of",
    "is_contiguous",
)  # fmt: skip


@functools.lru_cache(maxsize=1)
def interpreter() -> Callable[..., int]:
    """`source.interpret`, compiled; loaded from Numba's cache where it has been compiled before."""
    template = variant(source.interpret, "interpret_cpu", **{name: getattr(memory, name) for name in _OPERATIONS})
    return njit(types.int64(types.int64), cache=True, nogil=True)(template)
