"""Steps of optimizers on a CPU: all leaves of one dtype in one call. Each element is read once and written once.

The rules are those of `primitives.optimizers`, compiled for one element. They are never fastmath, and LLVM contracts a product
with a sum only on request.
"""
# ruff: noqa: F821  (the templates' free names are set by `variant`)
# pyright: reportUndefinedVariable=false

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ..primitives.optimizers import RULES
from .cpu_fold import CPU
from .intrinsics import array_at, copy, data_of, is_contiguous, load, square_root, type_of
from .reductions import conversions_of
from .variants import variant

__all__ = ["template"]

_SIGNATURE = types.int64(*[types.int64] * 6)
_ITEMS = tuple.__basicsize__
"""The offset of a tuple's items."""

_BLOCK_BYTES = 1 << 13
"""Bytes copied at a time if a result is not in its operand's memory. The arrays of a block stay in the first-level cache."""


def _step(operands: Any, results: Any, array_type: Any, leaves: Any, sizes: Any, scalars: Any) -> Any:
    """Write a step's results. Returns 0. If something is not a C-contiguous array, returns 1 before anything is written.

    `operands` and `results` are addresses of tuples of arrays, in the primitive's order. `array_type` is the address of their
    type. `sizes` has the number of elements of each leaf (int64), `scalars` the rule's scalars (float64). A result may be its
    operand.
    """
    for k in range((2 + MOMENTS) * leaves):
        thing = load(operands + ITEMS + 8 * k)
        if type_of(thing) != array_type or not is_contiguous(thing):
            return 1
    for k in range((1 + MOMENTS) * leaves):
        thing = load(results + ITEMS + 8 * k)
        if type_of(thing) != array_type or not is_contiguous(thing):
            return 1
    size = array_at(sizes, leaves, np.int64)
    s = array_at(scalars, SCALARS, np.float64)
    for leaf in range(leaves):
        g = data_of(load(operands + ITEMS + 8 * ((1 + MOMENTS) * leaves + leaf)))
        start, stop = 0, BLOCK
        while start < size[leaf]:
            n = min(stop, size[leaf]) - start
            at = start * ITEMSIZE
            for k in range(1 + MOMENTS):
                to = data_of(load(results + ITEMS + 8 * (k * leaves + leaf))) + at
                source = data_of(load(operands + ITEMS + 8 * (k * leaves + leaf))) + at
                if to != source:
                    copy(to, source, n * ITEMSIZE)
            block(results + ITEMS + 8 * leaf, 8 * leaves, at, g + at, n, s)
            start, stop = stop, stop + BLOCK
    return 0


def _block_0(result: Any, stride: Any, at: Any, gradient: Any, n: Any, s: Any) -> Any:
    p = array_at(data_of(load(result)) + at, n, STORED)
    g = array_at(gradient, n, STORED)
    s0, s1 = REAL(s[0]), REAL(s[1])
    for i in range(n):
        x = widen(p[i])
        (u,) = rule(DECAY, x, widen(g[i]), s0, s1)
        p[i] = narrow(x + u)


def _block_1(result: Any, stride: Any, at: Any, gradient: Any, n: Any, s: Any) -> Any:
    p = array_at(data_of(load(result)) + at, n, STORED)
    m = array_at(data_of(load(result + stride)) + at, n, STORED)
    g = array_at(gradient, n, STORED)
    s0, s1, s2, s3 = REAL(s[0]), REAL(s[1]), REAL(s[2]), REAL(s[3])
    for i in range(n):
        x = widen(p[i])
        u, first = rule(DECAY, x, widen(g[i]), widen(m[i]), s0, s1, s2, s3)
        p[i], m[i] = narrow(x + u), narrow(first)


def _block_2(result: Any, stride: Any, at: Any, gradient: Any, n: Any, s: Any) -> Any:
    p = array_at(data_of(load(result)) + at, n, STORED)
    m = array_at(data_of(load(result + stride)) + at, n, STORED)
    v = array_at(data_of(load(result + 2 * stride)) + at, n, STORED)
    g = array_at(gradient, n, STORED)
    s0, s1, s2, s3, s4, s5, s6 = REAL(s[0]), REAL(s[1]), REAL(s[2]), REAL(s[3]), REAL(s[4]), REAL(s[5]), REAL(s[6])
    for i in range(n):
        x = widen(p[i])
        u, first, second = rule(DECAY, x, widen(g[i]), widen(m[i]), widen(v[i]), s0, s1, s2, s3, s4, s5, s6)
        p[i], m[i], v[i] = narrow(x + u), narrow(first), narrow(second)


def _block_3(result: Any, stride: Any, at: Any, gradient: Any, n: Any, s: Any) -> Any:
    p = array_at(data_of(load(result)) + at, n, STORED)
    m = array_at(data_of(load(result + stride)) + at, n, STORED)
    v = array_at(data_of(load(result + 2 * stride)) + at, n, STORED)
    w = array_at(data_of(load(result + 3 * stride)) + at, n, STORED)
    g = array_at(gradient, n, STORED)
    s0, s1, s2, s3, s4, s5, s6 = REAL(s[0]), REAL(s[1]), REAL(s[2]), REAL(s[3]), REAL(s[4]), REAL(s[5]), REAL(s[6])
    for i in range(n):
        x = widen(p[i])
        u, first, second, third = rule(DECAY, x, widen(g[i]), widen(m[i]), widen(v[i]), widen(w[i]), s0, s1, s2, s3, s4, s5, s6)
        p[i], m[i], v[i], w[i] = narrow(x + u), narrow(first), narrow(second), narrow(third)


@njit
def _maximum(a: Any, b: Any) -> Any:
    return a if (a >= b) | (a != a) else b


_BLOCKS = (_block_0, _block_1, _block_2, _block_3)


def template(rule: str, decay: int, dtype: np.dtype) -> tuple[Any, Any]:
    """The step of a rule with this kind of decay on leaves of a dtype, to be compiled, and its signature."""
    function, moments, scalars = RULES[rule]
    name = f"{rule}_{decay}_{dtype.name}"
    stored, real, widen, narrow = conversions_of(dtype, CPU)
    names = {"MOMENTS": moments, "SCALARS": scalars, "DECAY": decay, "ITEMS": _ITEMS, "ITEMSIZE": dtype.itemsize}
    names |= {"BLOCK": _BLOCK_BYTES // dtype.itemsize, "STORED": stored, "REAL": real, "widen": widen, "narrow": narrow}
    compiled = njit(error_model="numpy")(variant(function, f"rule_{name}", sqrt=square_root, maximum=_maximum))
    block = njit(error_model="numpy")(variant(_BLOCKS[moments], f"block_{name}", rule=compiled, **names))
    return variant(_step, f"step_{name}", block=block, **names), _SIGNATURE
