"""The left fold of `primitives.combining` on arrays of a GPU, for NCCL's rounds of messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.types import is_inexact
from ...primitives.combining import fold
from ..array_library import NUMPY, ArrayLibrary

__all__ = ["array_fold"]

_UFUNCS = {"sum": "add", "mean": "add", "prod": "multiply", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}


def array_fold(library: ArrayLibrary) -> Callable[[str, Sequence[Any], int], Any]:
    """Return (op, sources, ranks of a mean) -> the left fold of arrays of this library: a new array with NumPy's bits.

    Float16 and bfloat16 are added and multiplied in float32, and rounded once. Every NaN becomes the canonical one.
    """
    if library is NUMPY:
        return lambda op, sources, count: fold(sources, op, count)
    namespace = library.namespace
    return lambda op, sources, count: _fold(namespace, op, sources, count)


def _fold(cupy: Any, op: str, sources: Sequence[Any], count: int) -> Any:
    dtype = sources[0].dtype
    if len(sources) == 1 and op not in ("max", "min"):
        return sources[0].copy()
    wide = np.dtype(np.float32) if dtype.itemsize == 2 and is_inexact(dtype) else dtype
    total, *rest = (x.astype(wide, copy=len(sources) == 1) for x in sources)
    for x in rest:
        total = _combined(cupy, op, total, x)
    if op == "mean":
        total = cupy.true_divide(total, wide.type(count))
    return _canonical(cupy, total).astype(dtype, copy=False)


def _combined(cupy: Any, op: str, a: Any, b: Any) -> Any:
    if op == "prod" and a.dtype.kind == "c":
        out = cupy.empty(a.shape, a.dtype)
        out.real[...] = a.real * b.real - a.imag * b.imag
        out.imag[...] = a.real * b.imag + b.real * a.imag
        return out
    if op not in ("max", "min"):
        return getattr(cupy, _UFUNCS[op])(a, b)
    best = (cupy.maximum if op == "max" else cupy.minimum)(a, b)
    if not is_inexact(a.dtype):
        return best
    zeros = cupy.logical_and(cupy.equal(a, a.dtype.type(0)), cupy.equal(b, a.dtype.type(0)))
    signed = cupy.add(a, b) if op == "max" else cupy.negative(cupy.add(cupy.negative(a), cupy.negative(b)))
    return cupy.where(zeros, signed, best)


def _canonical(cupy: Any, x: Any) -> Any:
    """Replace every NaN of `x`, a new array, by the canonical one."""
    if is_inexact(x.dtype):
        for part in (x.real, x.imag) if x.dtype.kind == "c" else (x,):
            part[...] = cupy.where(cupy.isnan(part), part.dtype.type(np.nan), part)
    return x
