"""Primitives that reduce dimensions of one device's array (collectives reduce over devices)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.ir import Primitive
from ..core.types import ArrayType, bfloat16, wide_dtype
from ..errors import DTypeError, ShapeError
from .batch_rules import batch_dims
from .shaping import fit, sum_over
from .tangent_rules import linear

__all__ = ["REDUCTIONS", "argmax_p", "argmin_p", "cumsum_p", "product_of_others", "reduced"]


def reduced(shape: Sequence[int], dims: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    """Return `shape` without the reduced `dims`."""
    if keepdims:
        return tuple(1 if d in dims else n for d, n in enumerate(shape))
    return tuple(n for d, n in enumerate(shape) if d not in dims)


def _infer(x: ArrayType, *, dims: tuple[int, ...], dtype: np.dtype, keepdims: bool) -> list[ArrayType]:
    return [ArrayType(reduced(x.shape, dims, keepdims), dtype)]


def _infer_nonempty(x: ArrayType, *, dims: tuple[int, ...], dtype: np.dtype, keepdims: bool) -> list[ArrayType]:
    if any(x.shape[d] == 0 for d in dims):
        raise ShapeError(f"max/min over dimension(s) {dims} of shape {x.shape}: an empty maximum has no value.")
    if dtype.kind == "c":
        raise DTypeError("max and min are not defined for complex numbers: they have no order. Reduce np.abs(x).")
    return _infer(x, dims=dims, dtype=dtype, keepdims=keepdims)


def _expand(x: Any, shape: Sequence[int], dims: tuple[int, ...]) -> Any:
    """Return a reduced value with the reduced dimensions as 1, so that it broadcasts against the operand."""
    return np.reshape(x, reduced(shape, dims, True))


def _sum_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, dims, dtype, keepdims) -> list[Any]:
    (x,) = inputs

    def pull() -> Any:
        return fit(np.broadcast_to(_expand(cts[0], x.shape, dims), tuple(x.shape)), x)

    return [pull]


def _winners(x: Any, out: Any, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """Return (1 for each extremum, 0 elsewhere; their number along `dims`). NaNs are equal here."""
    best = _expand(out, x.shape, dims)
    hit = ((x == best) | (np.isnan(x) & np.isnan(best))).astype(x.dtype)
    return hit, sum_over(hit, dims, True)


def _extremum_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, dims, dtype, keepdims) -> list[Any]:
    (x,) = inputs

    def pull() -> Any:
        hit, count = _winners(x, outs[0], dims)
        return _expand(cts[0], x.shape, dims) * hit / count

    return [pull]


def _extremum_jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, dims, dtype, keepdims) -> list[Any]:
    hit, count = _winners(inputs[0], outs[0], dims)
    return [sum_over(tangents[0] * hit / count, dims, keepdims)]


def product_of_others(x: Any, dim: int) -> Any:
    """Return, for each element, the product of all others along `dim`. It is correct with zeros, and differentiable again.

    It takes two exclusive scans by doubling, ⌈log₂ n⌉ steps each (Hillis and Steele, 1986).
    """
    n = x.shape[dim]
    ahead = (slice(None),) * dim

    def shifted(y: Any, k: int) -> Any:
        ones = np.ones((*y.shape[:dim], min(k, n), *y.shape[dim + 1 :]), y.dtype)
        return np.concatenate([ones, y[(*ahead, slice(0, max(n - k, 0)))]], axis=dim)

    def exclusive(y: Any) -> Any:
        y, k = shifted(y, 1), 1
        while k < n:
            y, k = y * shifted(y, k), 2 * k
        return y

    return exclusive(x) * np.flip(exclusive(np.flip(x, dim)), dim)


def _others(x: Any, dims: tuple[int, ...]) -> Any:
    """Return, for each element, the product of all others along `dims`."""
    rest = [d for d in range(x.ndim) if d not in dims]
    order = (*rest, *dims)
    flat = np.reshape(np.transpose(x, order), (*(x.shape[d] for d in rest), -1 if x.size else 0))
    others = np.reshape(product_of_others(flat, len(rest)), tuple(x.shape[d] for d in order))
    return np.transpose(others, tuple(map(int, np.argsort(order))))


def _prod_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, dims, dtype, keepdims) -> list[Any]:
    (x,) = inputs
    return [lambda: fit(_expand(cts[0], x.shape, dims) * _others(x, dims), x)]


def _prod_jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, dims, dtype, keepdims) -> list[Any]:
    return [sum_over((tangents[0] * _others(inputs[0], dims)).astype(dtype), dims, keepdims)]


def _reference(ufunc: np.ufunc) -> Callable[..., Any]:
    def reference(x: np.ndarray, *, dims: tuple[int, ...], dtype: np.dtype, keepdims: bool) -> Any:
        # bfloat16 has 8 bits, so a sum of many ones would stop at 256. It accumulates in float32, as float16 does.
        wide = np.dtype(np.float32) if dtype == bfloat16 else dtype
        out = ufunc.reduce(x, axis=dims, dtype=wide, keepdims=keepdims)
        return out if wide == dtype else out.astype(dtype)

    return reference


_BATCH = batch_dims("dims")

REDUCTIONS: dict[str, Primitive] = {
    "sum": Primitive("reduce_sum", _infer, _reference(np.add), _sum_vjp, linear("reduce_sum"), _BATCH),
    "prod": Primitive("reduce_prod", _infer, _reference(np.multiply), _prod_vjp, _prod_jvp, _BATCH),
    "max": Primitive("reduce_max", _infer_nonempty, _reference(np.maximum), _extremum_vjp, _extremum_jvp, _BATCH),
    "min": Primitive("reduce_min", _infer_nonempty, _reference(np.minimum), _extremum_vjp, _extremum_jvp, _BATCH),
    "any": Primitive("reduce_or", _infer, _reference(np.logical_or), batch=_BATCH),
    "all": Primitive("reduce_and", _infer, _reference(np.logical_and), batch=_BATCH),
}


def _infer_arg(x: ArrayType, *, dim: int, keepdims: bool) -> list[ArrayType]:
    if x.shape[dim] == 0:
        raise ShapeError(f"argmax/argmin over dimension {dim} of shape {x.shape}: an empty one has no position.")
    return [ArrayType(reduced(x.shape, (dim,), keepdims), np.dtype(np.int64))]


def _position(name: str, function: Callable[..., Any]) -> Primitive:
    reference = lambda x, *, dim, keepdims: function(x, axis=dim, keepdims=keepdims)
    return Primitive(name, _infer_arg, reference, batch=batch_dims("dim"))


argmax_p, argmin_p = _position("argmax", np.argmax), _position("argmin", np.argmin)


def _cumsum(x: np.ndarray, *, dim: int, dtype: np.dtype) -> np.ndarray:
    if dtype == bfloat16:  # as for sums
        return np.cumsum(x, axis=dim, dtype=np.float32).astype(dtype)
    return np.cumsum(x, axis=dim, dtype=dtype)


def _cumsum_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, dim, dtype) -> list[Any]:
    def pull() -> Any:
        wide = wide_dtype(cts[0].dtype)
        return fit(np.flip(np.cumsum(np.flip(cts[0], dim), axis=dim, dtype=wide), dim), inputs[0])

    return [pull]


cumsum_p = Primitive(
    "cumsum",
    lambda x, *, dim, dtype: [ArrayType(x.shape, dtype)],
    _cumsum,
    _cumsum_vjp,
    linear("cumsum"),
    batch_dims("dim"),
)
