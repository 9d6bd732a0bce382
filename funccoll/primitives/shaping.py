"""Primitives that move elements without computing: reshape, transpose, broadcast, concatenate, pad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType, wide_dtype
from ..errors import DTypeError, ShapeError
from .batch_rules import batch_dims, repeated
from .tangent_rules import linear, linear_together

__all__ = ["broadcast_to_p", "concatenate_p", "fit", "pad_p", "reshape", "reshape_p", "sum_over", "transpose_p"]


def sum_over(x: Any, dims: tuple[int, ...] | int | None, keepdims: bool = False) -> Any:
    """Sum over dimensions, in the dtype of `x`. Rules use it, because NumPy adds a concrete bfloat16 array in 16 bits."""
    total = np.sum(x, axis=dims, dtype=wide_dtype(x.dtype), keepdims=keepdims)
    return total if total.dtype == x.dtype else total.astype(x.dtype)


def fit(ct: Any, like: Any) -> Any:
    """Return a cotangent in the shape and dtype of the operand: sums over broadcast dimensions, the real part for reals."""
    shape, dtype = tuple(like.shape), like.dtype
    if ct.dtype.kind == "c" and dtype.kind != "c":
        ct = np.real(ct)
    if tuple(ct.shape) != shape:
        lead = len(ct.shape) - len(shape)
        axes = tuple(range(lead)) + tuple(lead + d for d, n in enumerate(shape) if n == 1 and ct.shape[lead + d] != 1)
        ct = np.sum(ct, axis=axes, dtype=wide_dtype(ct.dtype))
        if tuple(ct.shape) != shape:
            ct = np.reshape(ct, shape)
    return ct if ct.dtype == dtype else ct.astype(dtype)


def _batch_reshape(primitive: Primitive, values: Sequence[Any], batched: Any, size: int, *, shape: tuple[int, ...]) -> Any:
    return reshape(values[0], (size, *shape))


def _infer_reshape(x: ArrayType, *, shape: tuple[int, ...]) -> list[ArrayType]:
    if math.prod(shape) != x.size:
        raise ShapeError(f"reshape: {x.size} elements of shape {x.shape} do not fill shape {shape}.")
    return [ArrayType(shape, x.dtype)]


reshape_p = Primitive(
    "reshape",
    _infer_reshape,
    lambda x, *, shape: np.reshape(x, shape),
    lambda cts, inputs, outs, *, shape: [partial(np.reshape, cts[0], tuple(inputs[0].shape))],
    jvp=linear("reshape"),
    batch=_batch_reshape,
    view=True,
)


def _infer_transpose(x: ArrayType, *, permutation: tuple[int, ...]) -> list[ArrayType]:
    if sorted(permutation) != list(range(x.ndim)):
        raise ShapeError(f"transpose: {permutation} is not a permutation of the {x.ndim} dimensions of {x.shape}.")
    return [ArrayType(tuple(x.shape[d] for d in permutation), x.dtype)]


def _transpose_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, permutation: tuple) -> list[Any]:
    return [partial(np.transpose, cts[0], tuple(map(int, np.argsort(permutation))))]


def _batch_transpose(primitive: Primitive, values: Sequence[Any], batched: Any, size: int, *, permutation: tuple) -> Any:
    return np.transpose(values[0], (0, *(d + 1 for d in permutation)))


transpose_p = Primitive(
    "transpose",
    _infer_transpose,
    lambda x, *, permutation: np.transpose(x, permutation),
    _transpose_vjp,
    jvp=linear("transpose"),
    batch=_batch_transpose,
    view=True,
)


def _infer_broadcast(x: ArrayType, *, shape: tuple[int, ...]) -> list[ArrayType]:
    aligned = (1,) * (len(shape) - x.ndim) + x.shape
    if x.ndim > len(shape) or any(a not in (1, n) for a, n in zip(aligned, shape, strict=True)):
        raise ShapeError(f"broadcast_to: shape {x.shape} cannot be broadcast to {shape}.")
    return [ArrayType(shape, x.dtype)]


def _batch_broadcast(primitive: Primitive, values: Sequence[Any], batched: Any, size: int, *, shape: tuple[int, ...]) -> Any:
    x = values[0]
    return np.broadcast_to(reshape(x, (size, *(1,) * (len(shape) + 1 - x.ndim), *x.shape[1:])), (size, *shape))


broadcast_to_p = Primitive(
    "broadcast_to",
    _infer_broadcast,
    lambda x, *, shape: np.broadcast_to(x, shape),
    lambda cts, inputs, outs, *, shape: [partial(fit, cts[0], inputs[0])],
    jvp=linear("broadcast_to"),
    batch=_batch_broadcast,
    view=True,
)


def _infer_concatenate(*xs: ArrayType, dim: int) -> list[ArrayType]:
    first = xs[0]
    for x in xs[1:]:
        if x.dtype != first.dtype:
            raise DTypeError(f"concatenate: dtypes {first.dtype} and {x.dtype} differ.")
        same = x.ndim == first.ndim and all(
            a == b for d, (a, b) in enumerate(zip(x.shape, first.shape, strict=True)) if d != dim
        )
        if not same:
            raise ShapeError(
                f"concatenate along dimension {dim}: shapes {', '.join(str(t.shape) for t in xs)} differ in another dimension."
            )
    total = sum(x.shape[dim] for x in xs)
    return [ArrayType((*first.shape[:dim], total, *first.shape[dim + 1 :]), first.dtype)]


def _concatenate_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, dim: int) -> list[Any]:
    pieces, start = [], 0
    for x in inputs:
        stop = start + x.shape[dim]
        index = (slice(None),) * dim + (slice(start, stop),)
        pieces.append(lambda index=index: cts[0][index])
        start = stop
    return pieces


concatenate_p = Primitive(
    "concatenate",
    _infer_concatenate,
    lambda *xs, dim: np.concatenate(xs, axis=dim),
    _concatenate_vjp,
    jvp=linear_together("concatenate"),
    batch=batch_dims("dim"),
)


def _infer_pad(x: ArrayType, value: ArrayType, *, widths: tuple[tuple[int, int], ...]) -> list[ArrayType]:
    return [ArrayType(tuple(low + n + high for n, (low, high) in zip(x.shape, widths, strict=True)), x.dtype)]


def _pad(x: np.ndarray, value: np.ndarray, *, widths: tuple[tuple[int, int], ...]) -> np.ndarray:
    out = np.empty([low + n + high for n, (low, high) in zip(x.shape, widths, strict=True)], x.dtype)
    out[...] = value
    out[_inside(x.shape, widths)] = x
    return out


def _inside(shape: Sequence[int], widths: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(low, low + n) for n, (low, _) in zip(shape, widths, strict=True))


def _pad_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, widths: tuple) -> list[Any]:
    x, value = inputs

    def outside() -> Any:
        inner = sum_over(cts[0][_inside(x.shape, widths)], None)
        return fit(sum_over(cts[0], None) - inner, value)

    return [lambda: cts[0][_inside(x.shape, widths)], outside]


def _batch_pad(
    primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, widths: tuple[tuple[int, int], ...]
) -> Any:
    x, value = values
    x = x if batched[0] else repeated(x, size)
    wide = ((0, 0), *widths)
    if not batched[1]:
        return bind(primitive, x, value, widths=wide)
    inside = np.pad(np.ones(x.shape[1:], np.bool_), widths)
    padded = bind(primitive, x, np.zeros((), x.dtype), widths=wide)
    return np.where(inside, padded, np.reshape(value.astype(x.dtype), (size, *(1,) * len(widths))))


pad_p = Primitive("pad", _infer_pad, _pad, _pad_vjp, jvp=linear_together("pad"), batch=_batch_pad)


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """Return `x` in another shape, or unchanged if it has it already."""
    shape = tuple(map(int, shape))
    return x if tuple(x.shape) == shape else bind(reshape_p, x, shape=shape)
