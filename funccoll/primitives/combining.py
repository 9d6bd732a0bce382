"""Combination of shards: the binary operations of reductions, and their left fold.

NaN wins in max and min, and -0 < +0. Every NaN of a fold's result is the canonical one of its dtype, in both parts of a complex
number. So the bits depend neither on the order of two operands nor on the machine's rule for payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.types import is_inexact

__all__ = ["OPS", "OPS_OF_COPIES", "Shards", "fold", "identity_of"]

Shards = Sequence[np.ndarray]


def _fix_zeros(best: Callable[..., Any], a: Any, b: Any) -> Any:
    """Compute max/min, bitwise commutative up to NaNs: NaN wins, -0 < +0."""
    out = best(a, b)
    if not is_inexact(out.dtype) or bool(np.all(out)):
        return out
    zeros = (a == 0) & (b == 0)
    signed = a + b if best is np.maximum else -((-a) + (-b))
    return np.where(zeros, signed, out)


def _complex_product(a: Any, b: Any) -> Any:
    """Compute a·b, bitwise commutative. NumPy fuses one multiplication with the addition, so its a·b and b·a may differ."""
    out = np.empty(np.shape(a), a.dtype)
    out.real = a.real * b.real - a.imag * b.imag
    out.imag = a.real * b.imag + b.real * a.imag
    return out


OPS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "max": partial(_fix_zeros, np.maximum),
    "min": partial(_fix_zeros, np.minimum),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
"""Reduction name -> the binary combine."""

OPS_OF_COPIES = ("mean", "max", "min", "and", "or")
"""The reductions that return a value if all devices contribute that value (the mean except for its rounding)."""


def identity_of(op: str, dtype: np.dtype) -> np.ndarray:
    """Return the value that changes nothing when it is combined: a scalar of the dtype."""
    if op == "and":
        return np.asarray(np.invert(np.zeros((), dtype)))
    if op not in ("max", "min"):
        return np.asarray(op == "prod", dtype)
    if is_inexact(dtype):
        return np.asarray(-np.inf if op == "max" else np.inf, dtype)
    if dtype.kind == "b":
        return np.asarray(op == "min")
    limits = np.iinfo(dtype)
    return np.asarray(limits.min if op == "max" else limits.max, dtype)


_ROUNDING = ("sum", "mean", "prod")
"""The reductions with rounded results, also in 16-bit floats. The others choose or count bits."""

_BLOCK = 1 << 16
"""Elements combined at a time. A block of the accumulator stays in the second-level cache."""


def _canonical(x: Any) -> Any:
    """Replace every NaN of `x` by the canonical one, in place."""
    x = np.asarray(x)
    if is_inexact(x.dtype):
        for part in (x.real, x.imag) if x.dtype.kind == "c" else (x,):
            least = np.minimum.reduce(part, axis=None, initial=0)  # one pass, without a temporary array: NaN if there is one
            if least != least:
                np.copyto(part, np.asarray(np.nan, part.dtype), where=np.isnan(part))
    return x


def fold(shards: Shards, op: str, count: int = 0) -> np.ndarray:
    """Return the left fold of `op` over shards of one shape, as a new array. "mean" divides by `count` (0: their number) at
    the end.

    This is one combine. float16 and bfloat16 are added and multiplied in float32, and rounded once. A NaN becomes the
    canonical one. A single shard is copied; max and min make its NaNs canonical, because they do not count shards.
    """
    first, count = shards[0], count or len(shards)
    combine: Any = _complex_product if op == "prod" and first.dtype.kind == "c" else OPS[op]
    if len(shards) == 1:
        total = np.array(first)
        return _canonical(total) if op in ("max", "min") else total
    if first.dtype.itemsize == 2 and op in _ROUNDING and is_inexact(first.dtype):
        return _fold_halves(shards, op, count)
    if first.size <= _BLOCK or not isinstance(combine, np.ufunc) or not all(s.flags.c_contiguous for s in shards):
        total = combine(first, shards[1])
        in_place = isinstance(combine, np.ufunc) and first.ndim
        for shard in shards[2:]:
            total = combine(total, shard, out=total) if in_place else combine(total, shard)
        return _canonical(total / np.asarray(count, first.dtype) if op == "mean" else total)
    total = np.empty(first.shape, first.dtype)
    flat, flats = total.reshape(-1), [s.reshape(-1) for s in shards]
    for start in range(0, flat.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        out = combine(flats[0][part], flats[1][part], out=flat[part])
        for shard in flats[2:]:
            combine(out, shard[part], out=out)
        _canonical(np.divide(out, np.asarray(count, out.dtype), out=out) if op == "mean" else out)
    return total


def _fold_halves(shards: Shards, op: str, count: int) -> np.ndarray:
    """Fold float16 or bfloat16: accumulate in float32, round at the end."""
    first = shards[0]
    if first.size <= _BLOCK:
        return _wide(shards, op, count).astype(first.dtype)
    total = np.empty(first.shape, first.dtype)
    flat, flats = total.reshape(-1), [s.reshape(-1) for s in shards]
    for start in range(0, flat.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        flat[part] = _wide([s[part] for s in flats], op, count)
    return total


def _wide(shards: Shards, op: str, count: int) -> np.ndarray:
    """Return the fold in float32."""
    combine = OPS[op]
    total = np.array(shards[0], np.float32)
    for shard in shards[1:]:
        combine(total, shard.astype(np.float32), out=total)
    return _canonical(np.divide(total, np.float32(count), out=total) if op == "mean" else total)
