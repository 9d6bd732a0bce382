"""Primitives that order elements along one dimension: sort, partition, their positions, and the search in sorted arrays.

NumPy sorts numbers by vector instructions, but has none for a stable argsort, which takes six times as long. So `stable_order`
sorts keys of 64 bits. And the places of the k largest come from a partition, not from the order of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType, bfloat16, wide_dtype
from ..errors import DTypeError, ShapeError
from .batch_rules import batch_each, shifted

__all__ = ["argpartition_p", "argsort_p", "partition_p", "searchsorted_p", "sort_p", "stable_order", "top_k_p"]


def _infer_same(x: ArrayType, *, dim: int, **params: Any) -> list[ArrayType]:
    return [x]


def _infer_positions(x: ArrayType, *, dim: int, **params: Any) -> list[ArrayType]:
    return [ArrayType(x.shape, np.dtype(np.int64))]


def _batch(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, dim: int, **params: Any) -> Any:
    return bind(primitive, values[0], dim=shifted(dim), **params)


def _order(x: Any, dim: int) -> Any:
    return bind(argsort_p, x, dim=dim, kind="stable")


def _reordered_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, dim: int, **params: Any) -> list[Any]:
    """Give each element the cotangent of its place. Equal elements may get each other's."""

    def pull() -> Any:
        sorted_cts = np.take_along_axis(cts[0], _order(outs[0], dim), dim)
        return np.take_along_axis(sorted_cts, _order(_order(inputs[0], dim), dim), dim)

    return [pull]


_KEYED = {*map(np.dtype, (np.int32, np.uint32, np.float16, np.float32)), bfloat16}
"""Numbers that leave room for a position in a key. NumPy sorts shorter integers by digits, which is fast."""


def stable_order(x: np.ndarray, dim: int) -> np.ndarray:
    """Return the positions that sort along a dimension. Equal elements keep their order, and NaN comes last."""
    if x.dtype not in _KEYED or x.shape[dim] > 1 << 32:
        return np.argsort(x, axis=dim, kind="stable")
    if x.dtype.kind in "iu":
        words = x.astype(np.int64) - (np.int64(1) << 31 if x.dtype.kind == "u" else 0)
    else:
        floats = x.astype(np.float32)  # the order is the same
        floats += np.float32(0)  # -0 becomes 0
        signed = floats.view(np.int32)
        words = np.where(signed < 0, signed ^ np.int32(0x7FFFFFFF), signed)  # negative numbers fall as their bits rise
        words = np.where(np.isnan(floats), np.int32(0x7FFFFFFF), words).astype(np.int64)
    words <<= 32
    words |= np.arange(x.shape[dim]).reshape(-1, *(1,) * (x.ndim - 1 - dim))
    words.sort(axis=dim)
    words &= 0xFFFFFFFF
    return words


def _argsort(x: np.ndarray, *, dim: int, kind: str | None) -> np.ndarray:
    return stable_order(x, dim) if kind in ("stable", "mergesort") else np.argsort(x, axis=dim, kind=kind)  # type: ignore[arg-type]


def _infer_top_k(x: ArrayType, *, k: int) -> list[ArrayType]:
    return [ArrayType((*x.shape[:-1], k), np.dtype(np.int64))]


def _top_k(x: np.ndarray, *, k: int) -> np.ndarray:
    """Return the positions of the k largest along the last dimension; the first of equal elements first."""
    *lead, n = x.shape
    if not k or not x.size:
        return np.empty((*lead, k), np.int64)
    rows = x.reshape(-1, n).astype(wide_dtype(x.dtype), copy=False)  # NumPy has vector instructions for float32
    chosen = np.broadcast_to(np.arange(n), rows.shape) if k == n or x.dtype.kind == "c" else _largest(rows, k)
    values = np.take_along_axis(rows, chosen, 1)
    order = chosen.shape[1] - 1 - stable_order(values[:, ::-1], 1)[:, ::-1]  # reversed twice, equal elements keep their order
    return np.take_along_axis(chosen, order[:, :k], 1).reshape(*lead, k)


def _largest(rows: np.ndarray, k: int) -> np.ndarray:
    """Return the positions of the k largest elements of each row, as they lie: of the equal ones the first."""
    count, n = rows.shape
    upper = np.partition(rows, n - k, axis=1)[:, n - k :]
    least, has_nan = upper[:, :1], bool(np.isnan(upper).any())  # NaN counts as the largest
    found = np.flatnonzero(rows >= least)
    if found.size == count * k and not has_nan:  # often no other element equals the smallest of them
        places = found.reshape(count, k) - n * np.arange(count)[:, None]
        if (places[:, 0] >= 0).all() and (places[:, -1] < n).all():
            return places
    nan, least_is_nan = np.isnan(rows), np.isnan(least)
    above = (rows > least) | (nan & ~least_is_nan)
    equal = (rows == least) | (nan & least_is_nan)
    missing = k - above.sum(axis=1, keepdims=True)
    chosen = above | (equal & (np.cumsum(equal, axis=1) <= missing))
    return np.flatnonzero(chosen).reshape(count, k) - n * np.arange(count)[:, None]


def _batch_last(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, **params: Any) -> Any:
    return bind(primitive, values[0], **params)  # the last dimension stays the last


top_k_p = Primitive("top_k_indices", _infer_top_k, _top_k, batch=_batch_last)
sort_p = Primitive("sort", _infer_same, lambda x, *, dim: np.sort(x, axis=dim), _reordered_vjp, batch=_batch)
argsort_p = Primitive("argsort", _infer_positions, _argsort, batch=_batch)
partition_p = Primitive(
    "partition", _infer_same, lambda x, *, dim, kth: np.partition(x, kth, axis=dim), _reordered_vjp, batch=_batch
)
argpartition_p = Primitive(
    "argpartition", _infer_positions, lambda x, *, dim, kth: np.argpartition(x, kth, axis=dim), batch=_batch
)


def _infer_search(ordered: ArrayType, values: ArrayType, *, side: str) -> list[ArrayType]:
    if ordered.ndim != 1:
        raise ShapeError(f"searchsorted: the sorted array has shape {ordered.shape}; it must have one dimension.")
    if ordered.dtype != values.dtype:
        raise DTypeError(f"searchsorted: dtypes {ordered.dtype} and {values.dtype} differ.")
    return [ArrayType(values.shape, np.dtype(np.int64))]


def _batch_search(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, side: str) -> Any:
    if batched[0]:
        return batch_each(primitive, values, batched, size, side=side)
    return bind(primitive, *values, side=side)  # of any shape


searchsorted_p = Primitive(
    "searchsorted",
    _infer_search,
    lambda ordered, values, *, side: np.asarray(np.searchsorted(ordered, values, side)),
    batch=_batch_search,
)
