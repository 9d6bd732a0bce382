"""Combines of a CPU: every destination := left fold of the sources, for each op and dtype, compiled when first used.

The sources are read once and the destinations written once, in blocks that stay in the first-level cache. Partial sums are in
registers, or in a block of the wide type.
"""
# ruff: noqa: F821  (the template's free names are set by `variant`)
# pyright: reportUndefinedVariable=false

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from .conversions import conversions
from .intrinsics import array_at, fence, intrinsic, non_temporal_copy
from .kernel_context import ACCUMULATOR_BYTES, BLOCK_BYTES
from .reductions import Machine, meanings
from .variants import variant

__all__ = ["CPU", "template"]

_SIGNATURE = types.void(*[types.int64] * 7)


def _fold(dsts: Any, ndst: Any, srcs: Any, nsrc: Any, count: Any, divisor: Any, accumulator: Any) -> None:
    """Fold the sources into the destinations.

    `dsts` and `srcs` are addresses of int64 arrays of addresses, one or more and two or more. `count` is in elements.
    `accumulator` is the address of ACCUMULATOR_BYTES bytes for incomplete sums.

    A negative count asks for non-temporal stores, because the results are larger than the caches. A divisor other than 0
    divides the result: a mean, in the combine that completes the sum.
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


# ---------------------------------------------------------------- the machine


@njit
def _times(a: Any, b: Any) -> Any:
    return a * b


@njit
def _plus(a: Any, b: Any) -> Any:
    return a + b


@njit
def _minus(a: Any, b: Any) -> Any:
    return a - b


CPU = Machine(njit(error_model="numpy"), *conversions(intrinsic, types), _times, _plus, _minus)


def template(op: str, dtype: np.dtype) -> tuple[Any, Any]:
    """The combine for an op and a dtype, to be compiled, and its signature."""
    names = meanings(op, dtype, CPU)
    return variant(_fold, f"fold_{op}_{dtype.name}", BLOCK=BLOCK_BYTES // dtype.itemsize, **names), _SIGNATURE
