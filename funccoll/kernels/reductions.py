"""Combines: every destination := left fold of the sources, for each op and dtype, compiled when first used.

The sources are read once and the destinations written once, in blocks that stay in the first-level cache. Partial
sums are registers, or a block of the wide type: float16 and bfloat16 are added in float32 and rounded once. A NaN is
stored as the canonical one: which operand's payload survives an addition depends on the instructions that LLVM chooses. The
bits are those of `primitives.combining.fold`. Never fastmath: it would reorder.
"""
# ruff: noqa: F821  (the templates' free names are set by `variant`)
# pyright: reportUndefinedVariable=false

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from ..types import bfloat16
from .frame import ACCUMULATOR_BYTES, BLOCK_BYTES
from .intrinsics import array_at, fence, intrinsic, non_temporal_copy
from .variants import variant

__all__ = ["template"]

_SIGNATURE = types.void(*[types.int64] * 7)


def _fold(dsts: Any, ndst: Any, srcs: Any, nsrc: Any, count: Any, divisor: Any, accumulator: Any) -> None:
    """Fold the sources into the destinations.

    `dsts` and `srcs` are addresses of int64 arrays of addresses, of 1 or more and of 2 or more; `count` is in elements;
    `accumulator` is the address of ACCUMULATOR_BYTES bytes for sums that are not complete.

    A negative count asks for non-temporal stores: the results are larger than the caches. A divisor other than 0 divides
    the result: a mean, in the combine that completes the sum.
    """
    to = array_at(dsts, ndst, np.int64)
    frm = array_at(srcs, nsrc, np.int64)
    total = array_at(accumulator, BLOCK, WIDE)
    non_temporal, count = count < 0, abs(count)
    by = REAL(divisor)
    for start in range(0, count, BLOCK):
        n = min(BLOCK, count - start)
        at = start * ITEMSIZE
        place = accumulator + ACCUMULATOR_BYTES - BLOCK_BYTES if non_temporal else to[0] + at
        out = array_at(place, n, STORED)
        a = array_at(frm[0] + at, n, STORED)
        b = array_at(frm[1] + at, n, STORED)
        if nsrc == 2 and divisor == 0:
            for i in range(n):
                out[i] = narrow(step(widen(a[i]), widen(b[i])))
        elif nsrc == 2:
            for i in range(n):
                out[i] = narrow(divide(step(widen(a[i]), widen(b[i])), by))
        else:
            for i in range(n):
                total[i] = step(widen(a[i]), widen(b[i]))
            for j in range(2, nsrc - 1):
                c = array_at(frm[j] + at, n, STORED)
                for i in range(n):
                    total[i] = step(total[i], widen(c[i]))
            d = array_at(frm[nsrc - 1] + at, n, STORED)
            if divisor == 0:
                for i in range(n):
                    out[i] = narrow(step(total[i], widen(d[i])))
            else:
                for i in range(n):
                    out[i] = narrow(divide(step(total[i], widen(d[i])), by))
        if non_temporal:
            for j in range(ndst):
                non_temporal_copy(to[j] + at, place, n * ITEMSIZE)
            continue
        for j in range(1, ndst):
            copy = array_at(to[j] + at, n, STORED)
            for i in range(n):
                copy[i] = out[i]
    if non_temporal:
        fence()


# ---------------------------------------------------------------- steps


@njit
def _sum(a: Any, b: Any) -> Any:
    return a + b


@njit
def _prod(a: Any, b: Any) -> Any:
    return a * b


@njit
def _complex_prod(a: Any, b: Any) -> Any:
    return complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + b.real * a.imag)


@njit
def _and(a: Any, b: Any) -> Any:
    return a & b


@njit
def _or(a: Any, b: Any) -> Any:
    return a | b


@njit
def _xor(a: Any, b: Any) -> Any:
    return a ^ b


@njit
def _max(a: Any, b: Any) -> Any:
    return a if a > b else b


@njit
def _min(a: Any, b: Any) -> Any:
    return a if a < b else b


@njit
def _float_max(a: Any, b: Any) -> Any:
    best = a if a > b else b
    best = a + b if (a == 0) & (b == 0) else best  # -0 < +0
    return best if (a == a) & (b == b) else WIDE(np.nan)


@njit
def _float_min(a: Any, b: Any) -> Any:
    best = a if a < b else b
    best = -((-a) + (-b)) if (a == 0) & (b == 0) else best
    return best if (a == a) & (b == b) else WIDE(np.nan)


@njit(error_model="numpy")
def _divide(x: Any, divisor: Any) -> Any:
    return x / divisor


@njit(error_model="numpy")
def _complex_divide(x: Any, divisor: Any) -> Any:
    """Divide as NumPy does by a complex number with imaginary part 0."""
    one = divisor / divisor
    zero, scale = divisor - divisor, one / divisor
    return complex((x.real + x.imag * zero) * scale, (x.imag - x.real * zero) * scale)


@njit
def _same(x: Any) -> Any:
    return x


@njit
def _canonical(x: Any) -> Any:
    return x if x == x else REAL(np.nan)


@njit
def _complex_canonical(x: Any) -> Any:
    return complex(x.real if x.real == x.real else REAL(np.nan), x.imag if x.imag == x.imag else REAL(np.nan))


# ---------------------------------------------------------------- 16-bit floats, as their bits


@intrinsic
def _half_to_float(typingctx: Any, bits: Any) -> Any:
    """float16 to float32 (one instruction with F16C)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _float_to_half(typingctx: Any, value: Any) -> Any:
    """float32 to float16, to nearest even; a NaN keeps its sign and what fits of its payload."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def _bits_of(typingctx: Any, value: Any) -> Any:
    """The bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _from_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 of these bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@njit
def _brain_to_float(bits: Any) -> Any:
    return _from_bits(np.uint32(bits) << np.uint32(16))


@njit
def _canonical_half(value: Any) -> Any:
    """float32 to float16, to nearest even, with the canonical NaN."""
    return _float_to_half(value) if value == value else np.uint16(0x7E00)


@njit
def _canonical_brain(value: Any) -> Any:
    """float32 to bfloat16, to nearest even, with the canonical NaN."""
    bits = _bits_of(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded if value == value else np.uint32(0x7FC0))


# ---------------------------------------------------------------- compiled

_STEPS = {"sum": _sum, "mean": _sum, "prod": _prod, "max": _max, "min": _min, "and": _and, "or": _or, "xor": _xor}


def template(op: str, dtype: np.dtype) -> tuple[Any, Any]:
    """The combine for an op and a dtype, to be compiled, and its signature."""
    wide: Any = np.uint8 if dtype == np.bool_ else dtype.type
    stored, widen, narrow, step, divide = wide, _same, _same, _STEPS[op], _divide
    if dtype.itemsize == 2 and dtype.kind not in "iu":
        wide, stored = np.float32, np.uint16
        brain = dtype == bfloat16
        widen, narrow = (_brain_to_float, _canonical_brain) if brain else (_half_to_float, _canonical_half)
    real = np.empty(0, wide).real.dtype.type
    if dtype.kind == "c":
        divide = _complex_divide
        step = _complex_prod if op == "prod" else step
        narrow = njit(variant(_complex_canonical.py_func, f"canonical_{dtype}", REAL=real))
    elif dtype == wide and dtype.kind == "f" and op not in ("max", "min"):
        narrow = njit(variant(_canonical.py_func, f"canonical_{dtype}", REAL=real))
    elif np.dtype(wide).kind == "f" and op in ("max", "min"):
        extremum = _float_max if op == "max" else _float_min
        step = njit(variant(extremum.py_func, f"{op}_{np.dtype(wide)}", WIDE=wide))
    made = variant(
        _fold, f"fold_{op}_{dtype.name}", WIDE=wide, REAL=real, STORED=stored,
        ITEMSIZE=dtype.itemsize, BLOCK=BLOCK_BYTES // dtype.itemsize,
        step=step, widen=widen, narrow=narrow, divide=divide,
    )  # fmt: skip
    return made, _SIGNATURE
