"""Primitives that reduce each leading part of a dimension: running products, maxima and minima (`cumsum` is a reduction)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType, bfloat16
from ..errors import DTypeError
from .batch_rules import shifted
from .indexing import scatter_p
from .shaping import fit

__all__ = ["ACCUMULATIONS"]


def _cumprod_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, dim: int, dtype: np.dtype) -> list[Any]:
    """Return the cotangent, correct with zeros and differentiable again.

    The whole cotangent g of a partial product is a linear recurrence from the end, g[i] = ct[i] + x[i + 1] g[i + 1]. Doubling
    solves it in ⌈log₂ n⌉ steps. An element's cotangent is g times the product of those before it.
    """
    (x,) = inputs
    n, ahead = x.shape[dim], (slice(None),) * dim

    def moved(y: Any, k: int, fill: int) -> Any:
        """Move `y` by k places, to the front if k is positive."""
        filler = np.full((*y.shape[:dim], min(abs(k), n), *y.shape[dim + 1 :]), fill, y.dtype)
        kept = y[(*ahead, slice(max(k, 0), max(n + min(k, 0), 0)))]
        return np.concatenate([kept, filler] if k > 0 else [filler, kept], axis=dim)

    def pull() -> Any:
        whole, factor, k = cts[0], moved(x.astype(dtype), 1, 0), 1
        while k < n:
            whole, factor, k = whole + factor * moved(whole, k, 0), factor * moved(factor, k, 0), 2 * k
        return fit(whole * moved(outs[0], -1, 1), x)

    return [pull]


def _running_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, dim: int, dtype: np.dtype) -> list[Any]:
    """Give the cotangent to the first element with the running maximum or minimum: to the places where it changes."""
    (x,), (out,) = inputs, outs

    def pull() -> Any:
        shape, n = tuple(x.shape), x.shape[dim]
        if not x.size:
            return cts[0]

        def along(d: int, numbers: np.ndarray) -> np.ndarray:
            return numbers.reshape([-1 if e == d else 1 for e in range(len(shape))])

        ahead = (slice(None),) * dim
        before, after = out[(*ahead, slice(0, n - 1))], out[(*ahead, slice(1, n))]
        changed = (before != after) & ~(np.isnan(before) & np.isnan(after))
        start = np.zeros((*shape[:dim], 1, *shape[dim + 1 :]), np.int64)
        owner = np.concatenate([start, np.where(changed, along(dim, np.arange(1, n)), 0)], axis=dim)
        owner = bind(ACCUMULATIONS[np.maximum], owner, dim=dim, dtype=np.dtype(np.int64))
        index = [owner if d == dim else along(d, np.arange(m)) for d, m in enumerate(shape)]
        return bind(scatter_p, cts[0], *index, shape=shape, recipe=(("array",),) * len(shape))

    return [pull]


def _reference(ufunc: np.ufunc) -> Callable[..., Any]:
    def reference(x: np.ndarray, *, dim: int, dtype: np.dtype) -> Any:
        if dtype == bfloat16:  # in float32, as for sums
            return ufunc.accumulate(x.astype(np.float32), axis=dim).astype(dtype)
        return ufunc.accumulate(x, axis=dim, dtype=dtype)

    return reference


def _infer(x: ArrayType, *, dim: int, dtype: np.dtype) -> list[ArrayType]:
    return [ArrayType(x.shape, dtype)]


def _infer_ordered(x: ArrayType, *, dim: int, dtype: np.dtype) -> list[ArrayType]:
    if dtype.kind == "c":
        raise DTypeError("max and min are not defined for complex numbers: they have no order. Accumulate np.abs(x).")
    return _infer(x, dim=dim, dtype=dtype)


def _batch(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, dim: int, **params: Any) -> Any:
    return bind(primitive, values[0], dim=shifted(dim), **params)


ACCUMULATIONS: dict[np.ufunc, Primitive] = {
    np.multiply: Primitive("cumprod", _infer, _reference(np.multiply), _cumprod_vjp, batch=_batch),
    np.maximum: Primitive("cummax", _infer_ordered, _reference(np.maximum), _running_vjp, batch=_batch),
    np.minimum: Primitive("cummin", _infer_ordered, _reference(np.minimum), _running_vjp, batch=_batch),
}
