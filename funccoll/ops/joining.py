"""NumPy functions that join, split, turn and extend traced arrays, beside those in `shaping`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ShapeError, UnsupportedError
from .elementwise import unify
from .registry import as_operand, as_traceable, has_traced, implements, normalize_dim

__all__: list[str] = []


@implements(np.append)
def append(arr: Any, values: Any, axis: int | None = None) -> Any:
    """np.append."""
    arr, values = as_traceable(arr), as_traceable(values)
    return np.concatenate([np.ravel(arr), np.ravel(values)]) if axis is None else np.concatenate([arr, values], axis=axis)


@implements(np.column_stack)
def column_stack(tup: Sequence[Any]) -> Any:
    """np.column_stack."""
    columns = [as_traceable(a) for a in tup]
    return np.concatenate([a if a.ndim > 1 else np.reshape(a, (-1, 1)) for a in columns], axis=1)


@implements(np.dstack)
def dstack(tup: Sequence[Any]) -> Any:
    """np.dstack."""
    return np.concatenate([np.atleast_3d(as_traceable(a)) for a in tup], axis=2)


@implements(np.atleast_3d)
def atleast_3d(*arys: Any) -> Any:
    """np.atleast_3d: one dimension becomes the second of three, two become the first two."""
    shapes = {0: lambda s: (1, 1, 1), 1: lambda s: (1, *s, 1), 2: lambda s: (*s, 1)}
    out = [np.reshape(a, shapes.get(a.ndim, lambda s: s)(tuple(a.shape))) for a in map(as_traceable, arys)]
    return out[0] if len(out) == 1 else tuple(out)


@implements(np.block)
def block(arrays: Any) -> Any:
    """np.block: the innermost lists are joined along the last dimension, the outermost along the first."""

    def depth(x: Any) -> int:
        return 1 + max(map(depth, x)) if isinstance(x, list) else 0

    def leaves(x: Any) -> list[Any]:
        return [leaf for item in x for leaf in leaves(item)] if isinstance(x, list) else [as_traceable(x)]

    levels = depth(arrays)
    ndim = max(levels, *(a.ndim for a in leaves(arrays)))

    def joined(x: Any, level: int) -> Any:
        if not isinstance(x, list):
            x = as_traceable(x)
            return np.reshape(x, (1,) * (ndim - x.ndim) + tuple(x.shape))
        return np.concatenate([joined(item, level - 1) for item in x], axis=ndim - level)

    return joined(arrays, levels)


def _split_along(dim_of: Any, name: str, least: int) -> Any:
    def implementation(ary: Any, indices_or_sections: Any) -> Any:
        if ary.ndim < least:
            raise ShapeError(f"{name} needs at least {least} dimension(s), not shape {tuple(ary.shape)}.")
        return np.split(ary, indices_or_sections, axis=dim_of(ary))

    return implementation


implements(np.hsplit)(_split_along(lambda a: min(a.ndim - 1, 1), "np.hsplit", 1))
implements(np.vsplit)(_split_along(lambda a: 0, "np.vsplit", 2))
implements(np.dsplit)(_split_along(lambda a: 2, "np.dsplit", 3))
if hasattr(np, "unstack"):  # NumPy 2.1
    implements(np.unstack)(lambda x, /, *, axis=0: tuple(np.moveaxis(x, axis, 0)))


@implements(np.fliplr)
def fliplr(m: Any) -> Any:
    """np.fliplr."""
    if m.ndim < 2:
        raise ShapeError(f"np.fliplr needs at least 2 dimensions, not shape {tuple(m.shape)}.")
    return np.flip(m, 1)


@implements(np.flipud)
def flipud(m: Any) -> Any:
    """np.flipud."""
    return np.flip(m, 0)


@implements(np.rot90)
def rot90(m: Any, k: int = 1, axes: Sequence[int] = (0, 1)) -> Any:
    """np.rot90."""
    first, second = (normalize_dim(d, m.ndim) for d in axes)
    if first == second:
        raise ShapeError(f"np.rot90: axes {tuple(axes)} are one dimension of shape {tuple(m.shape)}.")
    turned = np.swapaxes(m, first, second)
    return {
        0: lambda: m,
        1: lambda: np.flip(turned, first),
        2: lambda: np.flip(m, (first, second)),
        3: lambda: np.flip(turned, second),
    }[k % 4]()


@implements(np.rollaxis)
def rollaxis(a: Any, axis: int, start: int = 0) -> Any:
    """np.rollaxis."""
    axis, start = normalize_dim(axis, a.ndim), start + a.ndim if start < 0 else start
    if not 0 <= start <= a.ndim:
        raise ShapeError(f"np.rollaxis: start {start} is not between 0 and {a.ndim}.")
    return np.moveaxis(a, axis, start - (axis < start))


@implements(np.resize)
def resize(a: Any, new_shape: Any) -> Any:
    """np.resize: the elements, repeated as often as the shape needs."""
    shape = (new_shape,) if isinstance(new_shape, (int, np.integer)) else tuple(new_shape)
    flat = np.ravel(as_traceable(a))
    if not flat.size:
        return np.zeros(shape, flat.dtype)
    return np.reshape(np.take(flat, np.arange(int(np.prod(shape))) % flat.size), shape)


def _known(places: Any, name: str) -> Any:
    if has_traced(places):
        raise UnsupportedError(f"{name} at traced places has a shape or an order that depends on values; give numbers.")
    return places


@implements(np.insert)
def insert(arr: Any, obj: Any, values: Any, axis: int | None = None) -> Any:
    """np.insert at places that are known while tracing."""
    obj, arr = _known(obj, "np.insert"), as_traceable(arr)
    values = as_traceable(values).astype(arr.dtype)
    if axis is None:
        arr, axis = np.ravel(arr), 0
    dim = normalize_dim(axis, arr.ndim)
    n = arr.shape[dim]
    if not isinstance(obj, slice) and not np.ndim(obj):
        values = np.reshape(values, (1,) * (arr.ndim - values.ndim) + tuple(values.shape))
        values = np.moveaxis(values, 0, dim)  # NumPy's rule for one place
        count = values.shape[dim]
    else:
        count = len(np.arange(n)[obj]) if isinstance(obj, slice) else int(np.size(obj))
    order = np.insert(np.arange(n), obj, np.arange(n, n + count))
    values = np.broadcast_to(values, (*arr.shape[:dim], count, *arr.shape[dim + 1 :]))
    return np.take(np.concatenate([arr, values], axis=dim), order, axis=dim)


@implements(np.delete)
def delete(arr: Any, obj: Any, axis: int | None = None) -> Any:
    """np.delete at places that are known while tracing."""
    obj, arr = _known(obj, "np.delete"), as_traceable(arr)
    if axis is None:
        arr, axis = np.ravel(arr), 0
    dim = normalize_dim(axis, arr.ndim)
    return np.take(arr, np.delete(np.arange(arr.shape[dim]), obj), axis=dim)


# ---------------------------------------------------------------- choices


@implements(np.select)
def select(condlist: Sequence[Any], choicelist: Sequence[Any], default: Any = 0) -> Any:
    """np.select: the choice of the first condition that holds."""
    if len(condlist) != len(choicelist) or not len(condlist):
        raise ShapeError(f"np.select: {len(condlist)} conditions and {len(choicelist)} choices.")
    *choices, result = unify(*map(as_operand, [*choicelist, default]))
    for condition, choice in zip(reversed([*condlist]), reversed(choices), strict=True):
        result = np.where(as_traceable(condition), choice, result)
    return result


@implements(np.piecewise)
def piecewise(x: Any, condlist: Any, funclist: Sequence[Any], *args: Any, **kw: Any) -> Any:
    """np.piecewise: every function is computed on all of x, and chosen from. The last condition that holds counts."""
    x = as_traceable(x)
    conditions = [*condlist] if isinstance(condlist, (list, tuple)) or np.ndim(condlist) > x.ndim else [condlist]
    if len(funclist) not in (len(conditions), len(conditions) + 1):
        raise ShapeError(f"np.piecewise: {len(conditions)} conditions and {len(funclist)} functions.")
    evaluate = lambda f: as_traceable(f(x, *args, **kw) if callable(f) else f).astype(x.dtype)
    result = evaluate(funclist[-1]) if len(funclist) > len(conditions) else np.zeros((), x.dtype)
    for condition, function in zip(conditions, funclist, strict=False):
        result = np.where(condition, evaluate(function), result)
    return np.broadcast_to(result, x.shape)


@implements(np.choose)
def choose(a: Any, choices: Any, out: Any = None, mode: str = "raise") -> Any:
    """np.choose: each element of `a` is the number of the choice to take."""
    number, *arrays = np.broadcast_arrays(as_traceable(a), *unify(*map(as_operand, choices)))
    return np.take_along_axis(np.stack(arrays), _in_mode(number, len(arrays), mode)[None], axis=0)[0]


def _in_mode(number: Any, n: int, mode: str) -> Any:
    return {"raise": lambda: number, "wrap": lambda: np.remainder(number, n), "clip": lambda: np.clip(number, 0, n - 1)}[mode]()
