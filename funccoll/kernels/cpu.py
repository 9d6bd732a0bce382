"""The kernels of a CPU, ready to run: the stream interpreter, and combines. Importing it imports no Numba."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import stream_interpreter as source
from .object_cache import address_of
from .variants import variant

__all__ = ["combine_address", "interpreter"]

_OPERATIONS = (
    "load", "load_acquire", "store", "store_release", "pause", "yield_core", "nap", "copy", "call", "type_of", "data_of",
    "is_contiguous", "references_to", "stream", "fence",
)  # fmt: skip


def interpreter(frame: int) -> Callable[[], object]:
    """`source.interpret` for the frame at this address. It puts what it returns into the frame, and lets go of the GIL."""
    run = _interpreter()
    # Made once: ctypes would convert integers in every call.
    status, ignored, given = (ctypes.c_void_p(frame + 8 * at) for at in (source.STATUS, source.IGNORED, 0))
    return functools.partial(run, status, ignored, given)


@functools.lru_cache(maxsize=1)
def _interpreter() -> Any:
    def build() -> tuple[Any, Any]:
        from numba import types

        from . import intrinsics as memory

        names = {name: getattr(memory, name) for name in _OPERATIONS}
        return variant(source.interpret, "interpret_cpu", **names), types.int64(types.int64)

    return ctypes.CFUNCTYPE(ctypes.c_int)(address_of("interpret_cpu", build))


@functools.cache
def combine_address(op: str, dtype: np.dtype) -> int:
    """Where the machine code of a combine is: `void(dsts, ndst, srcs, nsrc, count, divisor, room)`, called by `memory.call`."""

    def build() -> tuple[Any, Any]:
        from .reductions import template

        return template(op, dtype)

    return address_of(f"fold_{op}_{dtype.name}", build)
