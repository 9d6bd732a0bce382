"""Convolution as three products of examples x, kernel w and result y. Each is linear in two of them, and gives the third.

x is (examples, *sizes, channels), w is (*window, channels / groups, outputs), and y is (examples, *positions, outputs), for
any number of spatial dimensions. y comes from x and w, the gradient in x from y and w, the gradient in w from x and y. So the
derivatives of each product are the other two, to any order.

Windows become the rows of a matrix (im2col). A block has a few examples at a time, so it stays in the cache, and takes one
product of matrices. The gradient in x adds a product for each place in the window. Source: Chellapilla, Puri and Simard,
"High performance convolutional neural networks for document processing", 2006.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType, bfloat16
from ..errors import DTypeError, ShapeError
from .batch_rules import batch_each

__all__ = [
    "Pairs",
    "accumulated",
    "conv_input_p",
    "conv_kernel_p",
    "conv_p",
    "padded_sizes",
    "part_inside",
    "positions",
    "seen_from",
]

Pairs = tuple[tuple[int, int], ...]

_BLOCK_BYTES = 1 << 18  # of windows as rows: half of a second-level cache, measured from 2^17 to 2^20
_SHORT_RUN = 16  # adjacent elements of a window: below this it is faster to copy the transposed matrix


def positions(
    sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], padding: Pairs, dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return the number of positions of a window along each dimension; 0 or less if it exceeds the padded input."""
    each = zip(sizes, window, strides, padding, dilation, strict=True)
    return tuple((low + n + high - (k - 1) * d - 1) // s + 1 for n, k, s, (low, high), d in each)


def _infer_conv(
    x: ArrayType, w: ArrayType, *, strides: tuple[int, ...], padding: Pairs, dilation: tuple[int, ...], groups: int
) -> list[ArrayType]:
    _check_dtypes(x, w)
    sizes, window = x.shape[1:-1], w.shape[:-2]
    if len(sizes) != len(window):
        raise ShapeError(
            f"conv: x of shape {x.shape} has {len(sizes)} spatial dimension(s), and the kernel of shape {w.shape} has "
            f"{len(window)}: x is (examples, *sizes, channels), the kernel (*window, channels / groups, outputs)."
        )
    channels, outputs = x.shape[-1], w.shape[-1]
    if channels % groups or outputs % groups:
        raise ShapeError(
            f"conv: groups={groups} must divide the {channels} channels of x and the {outputs} outputs of the kernel."
        )
    if w.shape[-2] != channels // groups:
        raise ShapeError(
            f"conv: x of shape {x.shape} has {channels} channels, in {groups} group(s) of {channels // groups}, and the kernel "
            f"of shape {w.shape} takes {w.shape[-2]}: it must be (*window, {channels // groups}, outputs)."
        )
    found = positions(sizes, window, strides, padding, dilation)
    if 0 in window or min(found, default=1) < 1:
        raise ShapeError(
            f"conv: a window of {window} with dilation {dilation} does not fit into {sizes} with padding {padding}. "
            'Use a smaller window, of 1 or more, or padding="SAME".'
        )
    return [ArrayType((x.shape[0], *found, outputs), x.dtype)]


def _check_dtypes(a: ArrayType, b: ArrayType) -> None:
    if a.dtype != b.dtype or a.dtype == np.bool_:
        raise DTypeError(f"conv: operands of dtypes {a.dtype} and {b.dtype}; they must be equal here, and numbers.")


def _infer_input(y: ArrayType, w: ArrayType, *, sizes: tuple[int, ...], groups: int, **params: Any) -> list[ArrayType]:
    _check_dtypes(y, w)
    return [ArrayType((y.shape[0], *sizes, w.shape[-2] * groups), y.dtype)]


def _infer_kernel(x: ArrayType, y: ArrayType, *, window: tuple[int, ...], groups: int, **params: Any) -> list[ArrayType]:
    _check_dtypes(x, y)
    return [ArrayType((*window, x.shape[-1] // groups, y.shape[-1]), x.dtype)]


# ---------------------------------------------------------------- in NumPy


def accumulated(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the computation. 16-bit floats are rounded once, at the end."""
    return np.dtype(np.float32) if dtype in (np.float16, bfloat16) else dtype


def _blocks(examples: int, nbytes: int) -> Iterator[slice]:
    """Yield slices of examples, as many at a time as their windows fill a block."""
    step = max(1, _BLOCK_BYTES // max(nbytes, 1))
    return (slice(start, min(start + step, examples)) for start in range(0, examples, step))


def _columns(
    x: np.ndarray, window: Sequence[int], found: Sequence[int], strides: Sequence[int], padding: Pairs, dilation: Sequence[int]
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield (examples, their windows as rows of a matrix) for each block. The matrix is valid until the next one."""
    examples, *sizes, channels = x.shape
    dtype, row = accumulated(x.dtype), math.prod(window) * channels
    side = row // window[0] if len(window) and dilation[-1] == 1 else channels
    padded = memory = None
    for block in _blocks(examples, math.prod(found) * row * dtype.itemsize):
        count = block.stop - block.start
        part = x[block]
        if any(map(any, padding)):
            if padded is None:
                padded = np.zeros((count, *padded_sizes(sizes, padding), channels), dtype)
            padded[:count][part_inside(sizes, padding)] = part
            part = padded[:count]
        by = part.strides
        view = np.lib.stride_tricks.as_strided(
            part,
            (count, *found, *window, channels),
            (
                by[0],
                *(s * b for s, b in zip(strides, by[1:-1], strict=True)),
                *(d * b for d, b in zip(dilation, by[1:-1], strict=True)),
                by[-1],
            ),
            writeable=False,
        )
        if side < _SHORT_RUN:
            spatial = 1 + len(found)
            view = np.moveaxis(view, range(spatial), range(-spatial, 0))
        memory = np.empty(view.size, dtype) if memory is None else memory
        copy = memory[: view.size].reshape(view.shape)
        np.copyto(copy, view)
        rows = count * math.prod(found)
        yield block, copy.reshape(row, rows).T if side < _SHORT_RUN else copy.reshape(rows, row)


def padded_sizes(sizes: Sequence[int], padding: Pairs) -> tuple[int, ...]:
    """Return the sizes with their padding."""
    return tuple(low + n + high for n, (low, high) in zip(sizes, padding, strict=True))


def part_inside(sizes: Sequence[int], padding: Pairs) -> tuple[slice, ...]:
    """Return the index of the examples in padded ones."""
    return (slice(None), *(slice(low, low + n) for n, (low, _) in zip(sizes, padding, strict=True)))


def seen_from(place: Sequence[int], found: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of the elements of padded examples that windows have at one of their places."""
    each = zip(place, found, strides, dilation, strict=True)
    return (slice(None), *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, n, s, d in each))


def _matrix(x: np.ndarray) -> np.ndarray:
    """Return an array with all dimensions but the last merged, in the dtype of the computation."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(accumulated(x.dtype), copy=False)


def _by_group(groups: int, *arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield each group's part of arrays, along the last dimension."""
    each = [a.shape[-1] // groups for a in arrays]
    return (tuple(a[..., g * n : (g + 1) * n] for a, n in zip(arrays, each, strict=True)) for g in range(groups))


def _conv(x: np.ndarray, w: np.ndarray, *, groups: int, **params: Any) -> np.ndarray:
    window = w.shape[:-2]
    found = positions(x.shape[1:-1], window, **params)
    out = np.empty((x.shape[0], *found, w.shape[-1]), x.dtype)
    for part, kernel, result in _by_group(groups, x, w, out):
        matrix = _matrix(kernel)
        for block, columns in _columns(part, window, found, **params):
            if groups == 1 and matrix.dtype == out.dtype:
                np.matmul(columns, matrix, out=_matrix(result[block]))
            else:
                result[block] = np.matmul(columns, matrix).reshape(result[block].shape)
    return out


def _conv_kernel(x: np.ndarray, y: np.ndarray, *, window: tuple[int, ...], groups: int, **params: Any) -> np.ndarray:
    out = np.empty((*window, x.shape[-1] // groups, y.shape[-1]), x.dtype)
    for part, ct, result in _by_group(groups, x, y, out):
        total = np.zeros((math.prod(result.shape[:-1]), result.shape[-1]), accumulated(x.dtype))
        for block, columns in _columns(part, window, y.shape[1:-1], **params):
            total += np.matmul(columns.T, _matrix(ct[block]))
        result[...] = total.reshape(result.shape)
    return out


def _conv_input(
    y: np.ndarray,
    w: np.ndarray,
    *,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    padding: Pairs,
    dilation: tuple[int, ...],
    groups: int,
) -> np.ndarray:
    window, found, dtype = w.shape[:-2], y.shape[1:-1], accumulated(y.dtype)
    out = np.empty((y.shape[0], *sizes, w.shape[-2] * groups), y.dtype)
    for ct, kernel, result in _by_group(groups, y, w, out):
        kernel = kernel.astype(dtype, copy=False)
        for block in _blocks(len(y), math.prod(found) * sum(kernel.shape[-2:]) * dtype.itemsize):
            rows = _matrix(ct[block])
            padded = np.zeros((block.stop - block.start, *padded_sizes(sizes, padding), kernel.shape[-2]), dtype)
            for place in itertools.product(*map(range, window)):
                seen = padded[seen_from(place, found, strides, dilation)]
                seen += np.matmul(rows, kernel[place].T).reshape(seen.shape)
            result[block] = padded[part_inside(sizes, padding)]
    return out


# ---------------------------------------------------------------- gradients and batches

Values = Sequence[Any]


def _conv_vjp(cts: Values, inputs: Values, outs: Values, **params: Any) -> list[Any]:
    (x, w), (y,) = inputs, cts
    return [
        partial(bind, conv_input_p, y, w, sizes=tuple(x.shape[1:-1]), **params),
        partial(bind, conv_kernel_p, x, y, window=tuple(w.shape[:-2]), **params),
    ]


def _conv_input_vjp(cts: Values, inputs: Values, outs: Values, *, sizes: tuple[int, ...], **params: Any) -> list[Any]:
    (y, w), (x,) = inputs, cts
    return [partial(bind, conv_p, x, w, **params), partial(bind, conv_kernel_p, x, y, window=tuple(w.shape[:-2]), **params)]


def _conv_kernel_vjp(cts: Values, inputs: Values, outs: Values, *, window: tuple[int, ...], **params: Any) -> list[Any]:
    (x, y), (w,) = inputs, cts
    return [partial(bind, conv_input_p, y, w, sizes=tuple(x.shape[1:-1]), **params), partial(bind, conv_p, x, w, **params)]


_OPERANDS = {"conv": "xwy", "conv_input_gradient": "ywx", "conv_kernel_gradient": "xyw"}
"""The two operands and the result of each primitive."""


def _batch(primitive: Primitive, values: Values, batched: Sequence[bool], size: int, *, groups: int, **params: Any) -> Any:
    """Merge the batch into the dimension that the arrays with the batch share.

    That dimension is examples (x and y), channels (x and w) or outputs (w and y). If all three have the batch, its elements
    are groups, each with its own channels and outputs.
    """
    if not size:  # without elements, the numbers of channels and outputs are unknown
        return batch_each(primitive, values, batched, size, groups=groups, **params)
    names = _OPERANDS[primitive.name]
    have = {name for name, b in zip(names, batched, strict=False) if b} | {names[2]}
    shared = {"xy": 0, "wx": -2, "wy": -1}.get("".join(sorted(have)))

    def place(name: str) -> tuple[int, int]:
        """Return (dimension, number of parts; the batch goes into each)."""
        if shared is None:
            return -1, 1
        if shared == 0:
            return 0, 1
        return (-2, 1) if (name, shared) == ("w", -2) else (-1, groups)

    merged = [_merge(v, *place(name)) if b else v for v, b, name in zip(values, batched, names, strict=False)]
    out = bind(primitive, *merged, groups=groups * size if shared is None else groups, **params)
    return _split(out, *place(names[2]), size)


def _merge(value: Any, dim: int, parts: int) -> Any:
    """Return (batch, ..., parts * n, ...) as (..., parts * batch * n, ...)."""
    size, *shape = value.shape
    dim %= len(shape)
    value = np.reshape(value, (size, *shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]))
    return np.reshape(np.moveaxis(value, 0, dim + 1), (*shape[:dim], shape[dim] * size, *shape[dim + 1 :]))


def _split(value: Any, dim: int, parts: int, size: int) -> Any:
    """The inverse of `_merge`."""
    shape = tuple(value.shape)
    dim %= len(shape)
    one = shape[dim] // (parts * size)
    value = np.moveaxis(np.reshape(value, (*shape[:dim], parts, size, one, *shape[dim + 1 :])), dim + 1, 0)
    return np.reshape(value, (size, *shape[:dim], parts * one, *shape[dim + 1 :]))


conv_p = Primitive("conv", _infer_conv, _conv, _conv_vjp, batch=_batch, blas=True)
conv_input_p = Primitive("conv_input_gradient", _infer_input, _conv_input, _conv_input_vjp, batch=_batch, blas=True)
conv_kernel_p = Primitive("conv_kernel_gradient", _infer_kernel, _conv_kernel, _conv_kernel_vjp, batch=_batch, blas=True)
