"""Pooling along one dimension: the maximum or the sum of each window. Several dimensions are pooled one after the other.

If several elements are the maximum, the first one gets the gradient. That holds in several dimensions, too, if the last is
pooled first. A window may reach into the padding, which has no elements. Each window has at least one element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType, is_inexact
from ..errors import DTypeError, ShapeError
from .batch_rules import repeated
from .convolution import accumulated
from .elementwise import where_p

__all__ = [
    "window_max_p",
    "window_max_put_p",
    "window_max_take_p",
    "window_places",
    "window_spread_p",
    "window_sum_p",
]

Pair = tuple[int, int]


def _infer_windows(x: ArrayType, *, dim: int, window: int, stride: int, padding: Pair) -> list[ArrayType]:
    padded = sum(padding) + x.shape[dim]
    if not 1 <= window <= padded or max(padding) >= window or not x.shape[dim]:
        raise ShapeError(
            f"pooling dimension {dim} of shape {x.shape}: a window of {window} does not fit. It needs at most the {padded} "
            f"elements of the input with its padding {padding}, and more than the padding on either side, so that each window "
            "has an element of the input."
        )
    return [ArrayType((*x.shape[:dim], _found(x.shape[dim], window, stride, padding), *x.shape[dim + 1 :]), x.dtype)]


def _infer_max(x: ArrayType, **params: Any) -> list[ArrayType]:
    if x.dtype.kind == "c":
        raise DTypeError("max_pool is not defined for complex numbers: they have no order. Pool np.abs(x).")
    return _infer_windows(x, **params)


def _found(size: int, window: int, stride: int, padding: Pair) -> int:
    return (size + sum(padding) - window) // stride + 1


def window_places(size: int, dim: int, window: int, stride: int, padding: Pair) -> Iterator[tuple[Any, Any]]:
    """Yield (index of windows, index of their elements) for each place in the window, without the padding."""
    found, before = _found(size, window, stride, padding), (slice(None),) * dim
    for k in range(window):
        offset = k - padding[0]
        first = max(0, -(offset // stride))
        last = min(found, (size - 1 - offset) // stride + 1)
        if first < last:
            start = first * stride + offset
            yield (*before, slice(first, last)), (*before, slice(start, start + (last - first - 1) * stride + 1, stride))


def _window_max(x: np.ndarray, *, dim: int, **params: Any) -> np.ndarray:
    shape = (*x.shape[:dim], _found(x.shape[dim], **params), *x.shape[dim + 1 :])
    places = window_places(x.shape[dim], dim, **params)
    if any(params["padding"]):
        least = -np.inf if is_inexact(x.dtype) else False if x.dtype == np.bool_ else np.iinfo(x.dtype).min
        out = np.full(shape, least, x.dtype)
    else:
        out = np.array(x[next(places)[1]])
    for windows, elements in places:
        np.maximum(out[windows], x[elements], out=out[windows])
    return out


def _hits(x: np.ndarray, out: np.ndarray, dim: int, **params: Any) -> Iterator[tuple[Any, Any, np.ndarray]]:
    """Yield (index of windows, of elements, mask of their windows' first maximum) for each place in the window."""
    free = np.ones(out.shape, np.bool_)
    has_nan = is_inexact(x.dtype) and bool(np.isnan(out).any())
    for windows, elements in window_places(x.shape[dim], dim, **params):
        hit = x[elements] == out[windows]
        if has_nan:
            hit |= np.isnan(x[elements])
        hit &= free[windows]
        free[windows] ^= hit
        yield windows, elements, hit


def _window_max_put(x: np.ndarray, out: np.ndarray, ct: np.ndarray, *, dim: int, **params: Any) -> np.ndarray:
    put = np.zeros(x.shape, accumulated(ct.dtype))
    zero, disjoint = np.zeros((), ct.dtype), params["stride"] >= params["window"]
    for windows, elements, hit in _hits(x, out, dim, **params):
        chosen = where_p.reference(hit, np.ascontiguousarray(ct[windows]), zero)
        put[elements] = chosen if disjoint else put[elements] + chosen
    return put.astype(ct.dtype, copy=False)


def _window_max_take(x: np.ndarray, out: np.ndarray, values: np.ndarray, *, dim: int, **params: Any) -> np.ndarray:
    taken = np.zeros(out.shape, values.dtype)
    zero = np.zeros((), values.dtype)
    for windows, elements, hit in _hits(x, out, dim, **params):
        taken[windows] += np.where(hit, values[elements], zero)
    return taken


def _window_sum(x: np.ndarray, *, dim: int, **params: Any) -> np.ndarray:
    shape = (*x.shape[:dim], _found(x.shape[dim], **params), *x.shape[dim + 1 :])
    out = np.zeros(shape, accumulated(x.dtype))
    for windows, elements in window_places(x.shape[dim], dim, **params):
        out[windows] += x[elements]
    return out.astype(x.dtype, copy=False)


def _window_spread(y: np.ndarray, *, dim: int, length: int, **params: Any) -> np.ndarray:
    out = np.zeros((*y.shape[:dim], length, *y.shape[dim + 1 :]), accumulated(y.dtype))
    for windows, elements in window_places(length, dim, **params):
        out[elements] += y[windows]
    return out.astype(y.dtype, copy=False)


Values = Sequence[Any]


def _window_max_vjp(cts: Values, inputs: Values, outs: Values, **params: Any) -> list[Any]:
    return [partial(bind, window_max_put_p, inputs[0], outs[0], cts[0], **params)]


def _put_vjp(cts: Values, inputs: Values, outs: Values, **params: Any) -> list[Any]:
    x, out, _ = inputs
    return [None, None, partial(bind, window_max_take_p, x, out, cts[0], **params)]


def _take_vjp(cts: Values, inputs: Values, outs: Values, **params: Any) -> list[Any]:
    x, out, _ = inputs
    return [None, None, partial(bind, window_max_put_p, x, out, cts[0], **params)]


def _batch(primitive: Primitive, values: Values, batched: Sequence[bool], size: int, *, dim: int, **params: Any) -> Any:
    operands = (x if b else repeated(x, size) for x, b in zip(values, batched, strict=True))
    return bind(primitive, *operands, dim=dim + 1, **params)


window_max_p = Primitive("window_max", _infer_max, _window_max, _window_max_vjp, batch=_batch)
window_max_put_p = Primitive(
    "window_max_put", lambda x, out, ct, **params: [ArrayType(x.shape, ct.dtype)], _window_max_put, _put_vjp, batch=_batch
)
window_max_take_p = Primitive(
    "window_max_take", lambda x, out, v, **params: [ArrayType(out.shape, v.dtype)], _window_max_take, _take_vjp, batch=_batch
)
window_sum_p = Primitive(
    "window_sum",
    _infer_windows,
    _window_sum,
    lambda cts, inputs, outs, *, dim, **params: [
        partial(bind, window_spread_p, cts[0], dim=dim, length=inputs[0].shape[dim], **params)
    ],
    batch=_batch,
)
window_spread_p = Primitive(
    "window_spread",
    lambda y, *, dim, length, **params: [ArrayType((*y.shape[:dim], length, *y.shape[dim + 1 :]), y.dtype)],
    _window_spread,
    lambda cts, inputs, outs, *, length, **params: [partial(bind, window_sum_p, cts[0], **params)],
    batch=_batch,
)
