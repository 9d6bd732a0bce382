"""Arrays made of traced values: what NumPy dispatches by its first arguments or by `like=`, and `fc.full`, which it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import Traced
from ..core.types import is_inexact
from ..errors import ShapeError, UnsupportedError
from .elementwise import astype, result_dtype, scalar_type
from .registry import as_operand, as_traceable, implements, is_traced, normalize_dim

__all__ = ["full"]


def full(shape: Any, fill_value: Any, dtype: Any = None) -> Any:
    """Make an array with one value everywhere, which may be traced. NumPy cannot dispatch `np.full(shape, traced)`.

    Args:
        shape: The shape, an integer or a tuple of them.
        fill_value: A scalar or an array, traced or not, that broadcasts to `shape`.
        dtype: The dtype of the result, by default that of `fill_value`.

    Returns:
        An array of this shape. It is a NumPy array if `fill_value` is not traced.

    Example:
        >>> print(fc.grad(lambda x: np.sum(fc.full((2, 3), x)))(1.0))
        6.0
    """
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if not is_traced(fill_value):
        fill_value = as_operand(fill_value)
        return np.full(shape, fill_value, dtype)
    return np.broadcast_to(fill_value if dtype is None else astype(fill_value, dtype), shape)


implements(np.full)(lambda shape, fill_value, dtype=None, order="C", *, device=None: full(shape, fill_value, dtype))


@implements(np.array)
def array(
    object: Any, dtype: Any = None, *, copy: Any = True, order: str = "K", subok: bool = False, ndmin: int = 0, ndmax: int = 0
) -> Any:
    """np.array with `like=`: of a traced array, or of nested lists that hold some."""
    value = as_traceable(object)
    value = value if dtype is None else value.astype(dtype)
    return np.reshape(value, (1,) * (ndmin - value.ndim) + tuple(value.shape)) if value.ndim < ndmin else value


implements(np.asarray)(lambda a, dtype=None, order=None, *, device=None, copy=None: array(a, dtype))
implements(np.asanyarray)(lambda a, dtype=None, order=None, *, device=None, copy=None: array(a, dtype))
implements(np.ascontiguousarray)(lambda a, dtype=None: array(a, dtype, ndmin=1))
# With like= and without traced values the result is NumPy's own array, a constant of the program.
for _make in (np.zeros, np.ones, np.empty, np.eye, np.identity, np.arange, np.tri):
    implements(_make)(lambda *args, _make=_make, **kwargs: (np.zeros if _make is np.empty else _make)(*args, **kwargs))


@implements(np.linspace)
def linspace(
    start: Any,
    stop: Any,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: Any = None,
    axis: int = 0,
    *,
    device: Any = None,
) -> Any:
    """np.linspace between traced ends."""
    if isinstance(num, Traced):
        raise UnsupportedError("np.linspace with a traced number of points has a shape that depends on values.")
    if num < 0:
        raise ShapeError(f"np.linspace: {num} points; there must be at least 0.")
    intervals = num - 1 if endpoint else num
    start, stop = (x * 1.0 for x in map(as_operand, (start, stop)))
    wide = result_dtype(start, stop)
    if not is_inexact(wide) or all(scalar_type(x) for x in (start, stop)):
        wide = np.result_type(wide, np.float64)
    start, stop = (x.astype(wide) if hasattr(x, "dtype") else np.asarray(x, wide) for x in (start, stop))
    gap = stop - start
    numbers = np.arange(num, dtype=np.real(np.zeros((), wide)).dtype).reshape((-1,) + (1,) * gap.ndim)
    step = gap / intervals if intervals > 0 else np.full_like(gap, np.nan)
    if intervals > 0:
        # NumPy's rule: multiples of a step, or parts of the gap if a step would underflow to 0.
        points = np.where(step == 0, numbers / intervals * gap, numbers * step)
    else:
        points = numbers * gap
    points = points + start
    if endpoint and num > 1:
        points = np.concatenate([points[:-1], np.broadcast_to(stop, gap.shape)[None]])
    target = wide if dtype is None else np.dtype(dtype)
    points = np.floor(points) if target.kind in "iu" else points
    points = np.moveaxis(points, 0, normalize_dim(axis, points.ndim)).astype(target)
    return (points, step) if retstep else points


@implements(np.logspace)
def logspace(
    start: Any, stop: Any, num: int = 50, endpoint: bool = True, base: Any = 10.0, dtype: Any = None, axis: int = 0
) -> Any:
    """np.logspace: base to the power of np.linspace."""
    points = np.power(base, np.linspace(start, stop, num, endpoint=endpoint, axis=axis))
    return points if dtype is None else points.astype(dtype)


@implements(np.meshgrid)
def meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Any:
    """np.meshgrid."""
    if indexing not in ("xy", "ij"):
        raise UnsupportedError(f"np.meshgrid(indexing={indexing!r}): it is 'xy' or 'ij'.")
    arrays = [as_traceable(x) for x in xi]
    order = list(range(len(arrays)))
    if indexing == "xy" and len(arrays) > 1:
        order[:2] = 1, 0
    grids = [np.reshape(x, [-1 if d == e else 1 for e in range(len(arrays))]) for x, d in zip(arrays, order, strict=True)]
    return tuple(grids if sparse else np.broadcast_arrays(*grids))


@implements(np.diag)
def diag(v: Any, k: int = 0) -> Any:
    """np.diag: a diagonal of a matrix, or a matrix with a diagonal."""
    if v.ndim == 2:
        return np.diagonal(v, k)
    if v.ndim != 1:
        raise ShapeError(f"np.diag takes 1 or 2 dimensions, not shape {tuple(v.shape)}.")
    n, below, right = v.shape[0], max(-k, 0), max(k, 0)
    if not n:
        return np.zeros((abs(k), abs(k)), v.dtype)
    # Each row but the last has its element and n zeros after it. Reshaped, the elements are on the diagonal.
    rows = np.pad(v[:, None], ((0, 0), (0, n)))
    square = np.reshape(np.reshape(rows, (-1,))[: n * n], (n, n))
    return np.pad(square, ((below, right), (right, below)))


@implements(np.diagflat)
def diagflat(v: Any, k: int = 0) -> Any:
    """np.diagflat."""
    return np.diag(np.ravel(as_traceable(v)), k)


@implements(np.vander)
def vander(x: Any, N: int | None = None, increasing: bool = False) -> Any:
    """np.vander: the powers of x, by running products as in NumPy."""
    n = x.shape[0] if N is None else N
    ones = np.ones((x.shape[0], min(n, 1)), np.result_type(x.dtype, np.int64))
    rest = np.broadcast_to(x[:, None], (x.shape[0], max(n - 1, 0))).astype(ones.dtype)
    powers = np.concatenate([ones, np.multiply.accumulate(rest, axis=1)], axis=1)
    return powers if increasing else np.flip(powers, 1)


def _of_shape(function: Any) -> Any:
    """Trace a function of an array's shape alone. It is NumPy's own, of an array that takes no memory."""
    return lambda arr, *args, **kwargs: function(np.broadcast_to(np.empty((), np.bool_), arr.shape), *args, **kwargs)


for _indices in (np.tril_indices_from, np.triu_indices_from, np.diag_indices_from):
    implements(_indices)(_of_shape(_indices))


@implements(np.ix_)
def ix_(*args: Any) -> Sequence[Any]:
    """np.ix_ of integers."""
    arrays = [as_traceable(a) for a in args]
    for a in arrays:
        if a.ndim != 1 or a.dtype == np.bool_:
            raise ShapeError(f"np.ix_ takes integers in one dimension, not {a.dtype} of shape {tuple(a.shape)}.")
    return tuple(np.reshape(a, [-1 if d == e else 1 for e in range(len(arrays))]) for d, a in enumerate(arrays))
