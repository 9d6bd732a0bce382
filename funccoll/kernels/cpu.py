"""The kernels of a CPU, ready to run: the stream interpreter, and combines. Importing it imports no Numba."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import stream_interpreter
from .builtin_functions import METH_NOARGS, MethodDefinition, define, new_function
from .kernel_context import CONTEXT
from .object_cache import address_of, builtin_of
from .variants import variant

__all__ = ["combine_address", "interpreter"]

_OPERATIONS = (
    "load",
    "load_acquire",
    "store",
    "store_release",
    "pause",
    "yield_core",
    "nap",
    "monotonic_ns",
    "copy",
    "call",
    "type_of",
    "data_of",
    "dtype_of",
    "size_of",
    "is_contiguous",
    "references_to",
    "non_temporal_copy",
    "fence",
    "begin_message",
    "test_message",
)
assert CONTEXT.ignored == CONTEXT.status + 16, "builtin_of expects it there"
_CLOCKS = ("thread_ns",)
"""Operations that only the recording variant has."""


def interpreter(context: int, records: bool = False) -> Callable[[], int]:
    """`stream_interpreter.interpret` for the context at this address, as a builtin function. It returns the status.

    It writes the status to the context, too. `records` chooses the variant that writes a row for each instruction.
    """
    return new_function(_interpreter(records), context)


@functools.lru_cache(maxsize=2)
def _interpreter(records: bool) -> MethodDefinition:
    name = "interpret_cpu_recording" if records else "interpret_cpu"

    def build() -> tuple[Any, Any]:
        from numba import types

        from . import direct_reads, intrinsics

        names = {operation: getattr(intrinsics, operation) for operation in (*_OPERATIONS, *(_CLOCKS if records else ()))}
        names |= {operation: getattr(direct_reads, operation) for operation in direct_reads.__all__}
        parts = {"HAS_MESSAGES": True, "HAS_DIRECT_READS": True, "HAS_MAILBOXES": True, "HAS_SHARED_BUFFERS": True}
        made = variant(stream_interpreter.interpret, name, RECORDS=records, **parts, **names)
        return made, types.int64(types.int64)

    address = builtin_of(name, build, CONTEXT.status)
    return define(name, address, METH_NOARGS, "Run a plan from the PC in its context; returns the status.")


@functools.cache
def combine_address(op: str, dtype: np.dtype) -> int:
    """The address of a combine: `void(dsts, ndst, srcs, nsrc, count, divisor, accumulator)`, called by `intrinsics.call`."""

    def build() -> tuple[Any, Any]:
        from .cpu_fold import template

        return template(op, dtype)

    return address_of(f"fold_{op}_{dtype.name}", build)
