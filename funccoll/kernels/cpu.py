"""The stream interpreter for a CPU: processes that share memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit, types

from . import memory, source
from .variants import variant

__all__ = ["interpreter"]

_SIGNATURE = types.int64(
    types.int64, types.int64[::1], types.int64[::1], types.int64[::1], types.int64, types.int64[::1], types.int64
)


@functools.lru_cache(maxsize=1)
def interpreter() -> Callable[..., int]:
    """`source.interpret`, compiled; loaded from Numba's cache where it has been compiled before."""
    names = ("load_acquire", "store_release", "pause", "yield_core", "nap", "copy", "call")
    template = variant(source.interpret, "interpret_cpu", **{name: getattr(memory, name) for name in names})
    return njit(_SIGNATURE, cache=True)(template)
