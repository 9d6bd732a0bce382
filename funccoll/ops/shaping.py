"""NumPy functions that rearrange traced arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import Traced, bind
from ..errors import ShapeError, UnsupportedError
from ..primitives.shaping import broadcast_to_p, concatenate_p, pad_p, transpose_p
from ..primitives.shaping import reshape as _reshape
from .elementwise import unify
from .registry import as_operand, as_traceable, implements, normalize_dim, refuse_out

__all__: list[str] = []


@implements(np.reshape)
def reshape(a: Any, /, shape: Any = None, order: str = "C", *, copy: Any = None) -> Any:
    """np.reshape in C order, with at most one -1."""
    if order != "C":
        raise UnsupportedError(f"np.reshape(order={order!r}) cannot be traced; transpose first, then reshape.")
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if any(isinstance(n, Traced) for n in shape):
        raise UnsupportedError("np.reshape to a traced size: shapes must be known while tracing.")
    a, shape = as_traceable(a), tuple(map(int, shape))
    if shape.count(-1) > 1 or min(shape, default=0) < -1:
        raise ShapeError(f"np.reshape to {shape}: sizes are at least 0, and one of them may be -1.")
    if -1 in shape:
        known = math.prod(n for n in shape if n != -1)
        if known == 0 or a.size % known:
            raise ShapeError(f"np.reshape: {a.size} elements of shape {a.shape} do not fill shape {shape}.")
        shape = tuple(a.size // known if n == -1 else n for n in shape)
    return _reshape(a, shape)


@implements(np.ravel)
def ravel(a: Any, order: str = "C") -> Any:
    """np.ravel in C order."""
    return reshape(a, (-1,) if a.size else (0,), order)


@implements(np.transpose, np.permute_dims)
def transpose(a: Any, axes: Any = None) -> Any:
    """np.transpose."""
    a = as_traceable(a)
    permutation = tuple(range(a.ndim))[::-1] if axes is None else tuple(normalize_dim(d, a.ndim) for d in axes)
    return a if permutation == tuple(range(a.ndim)) else bind(transpose_p, a, permutation=permutation)


@implements(np.matrix_transpose)
def matrix_transpose(x: Any, /) -> Any:
    """The last two dimensions swapped."""
    return np.swapaxes(x, -1, -2)


@implements(np.swapaxes)
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """np.swapaxes."""
    order = list(range(a.ndim))
    i, j = normalize_dim(axis1, a.ndim), normalize_dim(axis2, a.ndim)
    order[i], order[j] = order[j], order[i]
    return transpose(a, order)


@implements(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> Any:
    """np.moveaxis."""
    sources = np.lib.array_utils.normalize_axis_tuple(source, a.ndim, "source")
    targets = np.lib.array_utils.normalize_axis_tuple(destination, a.ndim, "destination")
    if len(sources) != len(targets):
        raise ShapeError(f"np.moveaxis: {len(sources)} sources and {len(targets)} destinations.")
    order = [d for d in range(a.ndim) if d not in sources]
    for target, moved in sorted(zip(targets, sources, strict=True)):
        order.insert(target, moved)
    return transpose(a, order)


@implements(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> Any:
    """np.expand_dims."""
    axes: tuple[int, ...] = (int(axis),) if isinstance(axis, (int, np.integer)) else tuple(axis)
    new = np.lib.array_utils.normalize_axis_tuple(axes, a.ndim + len(axes))
    rest = iter(a.shape)
    return _reshape(a, [1 if d in new else next(rest) for d in range(a.ndim + len(axes))])


@implements(np.squeeze)
def squeeze(a: Any, axis: Any = None) -> Any:
    """np.squeeze."""
    drop = [d for d, n in enumerate(a.shape) if n == 1]
    if axis is not None:
        asked = np.lib.array_utils.normalize_axis_tuple(axis, a.ndim)
        for d in asked:
            if a.shape[d] != 1:
                raise ShapeError(f"np.squeeze: dimension {d} of shape {a.shape} has size {a.shape[d]}, not 1.")
        drop = list(asked)
    return _reshape(a, [n for d, n in enumerate(a.shape) if d not in drop])


def _at_least(ndim: int) -> Any:
    def implementation(*arrays: Any) -> Any:
        out = [_reshape(a, (1,) * (ndim - a.ndim) + tuple(a.shape)) for a in map(as_traceable, arrays)]
        return out[0] if len(out) == 1 else tuple(out)

    return implementation


implements(np.atleast_1d)(_at_least(1))
implements(np.atleast_2d)(_at_least(2))


@implements(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> Any:
    """np.broadcast_to."""
    shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
    array = as_traceable(array)
    return array if tuple(array.shape) == shape else bind(broadcast_to_p, array, shape=shape)


@implements(np.broadcast_arrays)
def broadcast_arrays(*args: Any, subok: bool = False) -> Any:
    """np.broadcast_arrays."""
    shape = np.broadcast_shapes(*(tuple(np.shape(a)) for a in args))
    return tuple(broadcast_to(a, shape) for a in args)


@implements(np.concatenate)
def concatenate(arrays: Sequence[Any], /, axis: int | None = 0, out: Any = None, *, dtype: Any = None) -> Any:
    """np.concatenate."""
    refuse_out(out)
    operands = unify(*(as_operand(a) for a in arrays)) if dtype is None else [as_traceable(a).astype(dtype) for a in arrays]
    if axis is None:
        operands, axis = [np.ravel(a) for a in operands], 0
    dim = normalize_dim(axis, operands[0].ndim)
    return operands[0] if len(operands) == 1 else bind(concatenate_p, *operands, dim=dim)


@implements(np.stack)
def stack(arrays: Sequence[Any], axis: int = 0, out: Any = None, *, dtype: Any = None) -> Any:
    """np.stack."""
    refuse_out(out)
    arrays = [as_traceable(a) for a in arrays]
    if len({tuple(a.shape) for a in arrays}) != 1:
        raise ShapeError(f"np.stack: shapes {', '.join(str(tuple(a.shape)) for a in arrays)} differ.")
    return concatenate([expand_dims(a, axis) for a in arrays], normalize_dim(axis, arrays[0].ndim + 1), dtype=dtype)


@implements(np.vstack)
def vstack(tup: Sequence[Any], *, dtype: Any = None) -> Any:
    """np.vstack."""
    return concatenate([np.atleast_2d(a) for a in tup], 0, dtype=dtype)


@implements(np.hstack)
def hstack(tup: Sequence[Any], *, dtype: Any = None) -> Any:
    """np.hstack."""
    arrays = [np.atleast_1d(a) for a in tup]
    return concatenate(arrays, 0 if arrays[0].ndim == 1 else 1, dtype=dtype)


def _part(a: Any, dim: int, index: Any) -> Any:
    return a[(slice(None),) * dim + (index,)]


def _split(a: Any, sections: Any, axis: int, even: bool) -> list[Any]:
    dim = normalize_dim(axis, a.ndim)
    n = a.shape[dim]
    if isinstance(sections, (int, np.integer)):
        if sections <= 0:
            raise ShapeError(f"np.split into {sections} parts: there must be at least one.")
        if even and n % sections:
            raise ShapeError(f"np.split: dimension {dim} of size {n} does not divide into {sections} equal parts.")
        extra = n % sections
        cuts = np.cumsum([0, *(n // sections + (i < extra) for i in range(sections))])
    else:
        cuts = [0, *sections, n]
    return [_part(a, dim, slice(int(lo), int(hi))) for lo, hi in itertools.pairwise(cuts)]


implements(np.split)(lambda ary, indices_or_sections, axis=0: _split(ary, indices_or_sections, axis, True))
implements(np.array_split)(lambda ary, indices_or_sections, axis=0: _split(ary, indices_or_sections, axis, False))


@implements(np.flip)
def flip(m: Any, axis: Any = None) -> Any:
    """np.flip."""
    dims = range(m.ndim) if axis is None else np.lib.array_utils.normalize_axis_tuple(axis, m.ndim)
    return m[tuple(slice(None, None, -1) if d in dims else slice(None) for d in range(m.ndim))]


@implements(np.roll)
def roll(a: Any, shift: Any, axis: Any = None) -> Any:
    """np.roll by a distance that is known while tracing."""
    if isinstance(shift, Traced):
        raise UnsupportedError("np.roll by a traced distance; use np.take(x, (np.arange(n) - shift) % n, axis).")
    if axis is None:
        return _reshape(roll(np.ravel(a), shift, 0), a.shape)
    shifts = (shift,) if isinstance(shift, (int, np.integer)) else tuple(shift)
    axes = (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
    if len(shifts) != len(axes):
        shifts = shifts * len(axes) if len(shifts) == 1 else shifts
        axes = axes * len(shifts) if len(axes) == 1 else axes
    for k, d in zip(shifts, axes, strict=True):
        dim = normalize_dim(d, a.ndim)
        n = a.shape[dim]
        k = int(k) % n if n else 0
        if k:
            a = concatenate([_part(a, dim, slice(n - k, n)), _part(a, dim, slice(0, n - k))], dim)
    return a


@implements(np.repeat)
def repeat(a: Any, repeats: Any, axis: int | None = None) -> Any:
    """np.repeat: one count for all elements, or one for each, known while tracing."""
    if isinstance(repeats, Traced):
        raise UnsupportedError("np.repeat with a traced count has a shape that depends on values; use np.take with indices.")
    counts = np.asarray(repeats)
    if counts.dtype.kind not in "iu" or counts.min(initial=0) < 0:
        raise ShapeError(f"np.repeat: the counts are {repeats}; they must be integers of at least 0.")
    if axis is None:
        a, axis = np.ravel(as_traceable(a)), 0
    dim = normalize_dim(axis, a.ndim)
    if counts.size != 1:
        return np.take(a, np.repeat(np.arange(a.shape[dim]), counts), axis=dim)
    count = int(counts.reshape(()))
    wide = np.broadcast_to(expand_dims(a, dim + 1), (*a.shape[: dim + 1], count, *a.shape[dim + 1 :]))
    return _reshape(wide, (*a.shape[:dim], a.shape[dim] * count, *a.shape[dim + 1 :]))


@implements(np.tile)
def tile(A: Any, reps: Any) -> Any:
    """np.tile."""
    reps = (reps,) if isinstance(reps, (int, np.integer)) else tuple(reps)
    ndim = max(A.ndim, len(reps))
    shape = (1,) * (ndim - A.ndim) + tuple(A.shape)
    reps = (1,) * (ndim - len(reps)) + reps
    pairs = list(zip(reps, shape, strict=True))  # so that its gradient is one sum, not one for each copy
    expanded = np.broadcast_to(_reshape(A, [n for _, size in pairs for n in (1, size)]), [n for pair in pairs for n in pair])
    return _reshape(expanded, [count * size for count, size in pairs])


def _widths(pad_width: Any, ndim: int) -> tuple[tuple[int, int], ...]:
    if isinstance(pad_width, dict):  # from dimension to widths; other dimensions keep their size
        given = {normalize_dim(d, ndim): width for d, width in pad_width.items()}
        pad_width = [np.broadcast_to(given.get(d, 0), 2) for d in range(ndim)]
    widths = tuple((int(lo), int(hi)) for lo, hi in np.broadcast_to(np.asarray(pad_width), (ndim, 2)))
    if any(lo < 0 or hi < 0 for lo, hi in widths):
        raise ShapeError(f"np.pad: widths must be at least 0, not {pad_width}.")
    return widths


@implements(np.pad)
def pad(array: Any, pad_width: Any, mode: str = "constant", *, constant_values: Any = 0) -> Any:
    """np.pad: constant (one value), edge, reflect, symmetric, wrap."""
    array = as_traceable(array)
    widths = _widths(pad_width, array.ndim)
    if mode == "constant":
        value = as_traceable(constant_values).astype(array.dtype)
        if value.ndim:
            raise UnsupportedError("np.pad with several constant_values cannot be traced; pad one side at a time.")
        return bind(pad_p, array, value, widths=widths)
    if mode not in ("edge", "reflect", "symmetric", "wrap"):
        raise UnsupportedError(f"np.pad(mode={mode!r}) cannot be traced; use constant, edge, reflect, symmetric or wrap.")
    for dim, (low, high) in enumerate(widths):
        if low or high:
            array = np.take(array, np.pad(np.arange(array.shape[dim]), (low, high), mode=mode), axis=dim)
    return array


def _triangle(keep_lower: bool) -> Any:
    def implementation(m: Any, k: int = 0) -> Any:
        if m.ndim < 2:
            raise ShapeError(f"np.triu/tril needs at least two dimensions, not shape {m.shape}.")
        mask = np.tri(*m.shape[-2:], k=k if keep_lower else k - 1, dtype=bool)
        return np.where(mask if keep_lower else ~mask, m, np.zeros((), m.dtype))

    return implementation


implements(np.tril)(_triangle(True))
implements(np.triu)(_triangle(False))
