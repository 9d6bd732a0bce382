"""Primitives that order elements along one dimension: sort, partition, their positions, and the search in sorted arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType
from ..errors import DTypeError, ShapeError
from .batch_rules import batch_each, shifted

__all__ = ["argpartition_p", "argsort_p", "partition_p", "searchsorted_p", "sort_p"]


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


sort_p = Primitive("sort", _infer_same, lambda x, *, dim: np.sort(x, axis=dim), _reordered_vjp, batch=_batch)
argsort_p = Primitive("argsort", _infer_positions, lambda x, *, dim, kind: np.argsort(x, axis=dim, kind=kind), batch=_batch)
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
