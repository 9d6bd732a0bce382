"""NumPy reductions over the dimensions of traced arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.interpreter import Traced, bind
from ..core.types import bfloat16, check_dtype, is_inexact
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..primitives.elementwise import root_p, stop_gradient_p
from ..primitives.reductions import REDUCTIONS, argmax_p, argmin_p, cumsum_p, reduced
from .elementwise import astype
from .registry import as_traceable, dims, implements, is_traced, normalize_dim, refuse_out

__all__ = ["flag", "mean", "std", "sum_dtype", "var"]


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype to sum in. By NumPy's rule small integers and booleans accumulate in the platform's 64-bit integer."""
    if dtype.kind in "bi":
        return np.dtype(np.int64)
    return np.dtype(np.uint64) if dtype.kind == "u" else dtype


def _given(value: Any) -> bool:
    """Return False for NumPy's own marks of an argument that was left out."""
    return value is not None and value is not np._NoValue


def _chosen(a: Any, where: Any, neutral: Any) -> Any:
    """Replace what `where=` leaves out by a value that does not change the reduction."""
    if not _given(where) or where is True:
        return a
    return np.where(where, a, neutral if is_traced(neutral) else np.asarray(neutral, a.dtype))


def _accumulation(name: str) -> Callable[..., Any]:
    neutral = 0 if name == "sum" else 1

    def implementation(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        keepdims: Any = False,
        initial: Any = None,
        where: Any = None,
    ) -> Any:
        refuse_out(out)
        a = _chosen(as_traceable(a), where, neutral)
        target = sum_dtype(a.dtype) if dtype is None else check_dtype(np.dtype(dtype))
        result = bind(REDUCTIONS[name], a, dims=dims(axis, a.ndim), dtype=target, keepdims=flag(keepdims))
        if not _given(initial):
            return result
        initial = _initial(initial, target)
        return result + initial if name == "sum" else result * initial

    return implementation


def _initial(value: Any, dtype: np.dtype) -> Any:
    """Return a reduction's `initial` in the dtype of its result, as NumPy takes it."""
    return astype(value, dtype) if isinstance(value, Traced) else np.asarray(value, dtype)


def flag(keepdims: Any) -> bool:
    """Return the argument keepdims. NumPy's own callers may leave it at its mark for none."""
    return keepdims is not np._NoValue and bool(keepdims)


implements(np.sum)(_accumulation("sum"))
implements(np.prod)(_accumulation("prod"))


def _extremum(name: str, combine: np.ufunc) -> Callable[..., Any]:
    def implementation(
        a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, initial: Any = None, where: Any = None
    ) -> Any:
        refuse_out(out)
        a = as_traceable(a)
        over = dims(axis, a.ndim)
        if _given(where) and not _given(initial):
            raise UnsupportedError(f"np.{name}(..., where=...) needs initial=, the value where nothing is chosen.")
        if _given(initial):
            initial = _initial(initial, a.dtype)
            a = _chosen(a, where, initial)
            if any(a.shape[d] == 0 for d in over):  # an empty maximum is `initial`
                return np.full_like(a, initial, shape=reduced(a.shape, over, flag(keepdims)))
        result = bind(REDUCTIONS[name], a, dims=over, dtype=a.dtype, keepdims=flag(keepdims))
        return combine(result, initial) if _given(initial) else result

    return implementation


implements(np.max, np.amax)(_extremum("max", np.maximum))
implements(np.min, np.amin)(_extremum("min", np.minimum))


def _logical(name: str) -> Callable[..., Any]:
    def implementation(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = None) -> Any:
        refuse_out(out)
        a = as_traceable(a)
        a = _chosen(a if a.dtype == np.bool_ else a != 0, where, name == "all") if _given(where) else a
        return bind(REDUCTIONS[name], a, dims=dims(axis, a.ndim), dtype=np.dtype(np.bool_), keepdims=flag(keepdims))

    return implementation


implements(np.any)(_logical("any"))
implements(np.all)(_logical("all"))


def _count(a: Any, axis: Any, where: Any = None, keepdims: bool = False) -> Any:
    """Return the number of elements of each mean. It is an array if `where=` chooses them."""
    if _given(where) and where is not True:
        return np.sum(np.broadcast_to(as_traceable(where), a.shape), axis=axis, keepdims=keepdims)
    return math.prod(a.shape[d] for d in dims(axis, a.ndim))


def _quotient(total: Any, count: Any, accumulate: np.dtype) -> Any:
    return total / (count.astype(accumulate) if hasattr(count, "dtype") else np.asarray(count, accumulate))


def _mean_dtypes(dtype: np.dtype, asked: Any) -> tuple[np.dtype, np.dtype]:
    """Return (dtype to accumulate in, dtype of the result). 16-bit floats accumulate in float32, as in NumPy."""
    if asked is not None:
        dtype = check_dtype(np.dtype(asked))
        if not is_inexact(dtype):
            raise DTypeError(f"a mean, variance or deviation in dtype {dtype} would lose its fraction: choose a float.")
    if not is_inexact(dtype):
        return np.dtype(np.float64), np.dtype(np.float64)
    return (np.dtype(np.float32) if dtype in (np.dtype(np.float16), bfloat16) else dtype), dtype


@implements(np.mean)
def mean(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = None) -> Any:
    """np.mean."""
    refuse_out(out)
    a = as_traceable(a)
    accumulate, target = _mean_dtypes(a.dtype, dtype)
    total = np.sum(a, axis=axis, dtype=accumulate, keepdims=flag(keepdims), where=where)
    return astype(_quotient(total, _count(a, axis, where, flag(keepdims)), accumulate), target)


@implements(np.var)
def var(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: float = 0,
    keepdims: Any = False,
    *,
    where: Any = None,
    mean: Any = None,
    correction: Any = None,
) -> Any:
    """np.var: mean of |a - mean(a)|², divided by n - ddof."""
    refuse_out(out)
    a = as_traceable(a)
    ddof = correction if _given(correction) else ddof
    accumulate, target = _mean_dtypes(a.dtype, dtype)
    a = astype(a, accumulate)
    centred = a - (mean if _given(mean) else np.mean(a, axis=axis, keepdims=True, where=where))
    squares = np.square(centred) if a.dtype.kind != "c" else np.square(np.real(centred)) + np.square(np.imag(centred))
    if a.dtype.kind == "c":
        accumulate = squares.dtype
        target = accumulate if dtype is None else np.dtype(dtype)
    total = np.sum(squares, axis=axis, keepdims=flag(keepdims), where=where)
    freedom = np.maximum(_count(a, axis, where, flag(keepdims)) - ddof, 0)
    return astype(_quotient(total, freedom, accumulate), target)


@implements(np.std)
def std(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: float = 0,
    keepdims: Any = False,
    *,
    where: Any = None,
    mean: Any = None,
    correction: Any = None,
) -> Any:
    """np.std: the square root of np.var."""
    variance = var(a, axis, dtype, out, ddof, keepdims, where=where, mean=mean, correction=correction)
    if _given(mean) or _given(where) or (correction if _given(correction) else ddof) or _count(as_traceable(a), axis) != 1:
        return bind(root_p, variance)
    return np.sqrt(bind(stop_gradient_p, variance))  # one element has the deviation 0, whatever it is


def _position(primitive: Any) -> Callable[..., Any]:
    def implementation(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
        refuse_out(out)
        a = as_traceable(a)
        if axis is None:
            result = bind(primitive, np.ravel(a), dim=0, keepdims=False)
            return np.reshape(result, (1,) * a.ndim) if flag(keepdims) else result
        return bind(primitive, a, dim=normalize_dim(axis, a.ndim), keepdims=flag(keepdims))

    return implementation


implements(np.argmax)(_position(argmax_p))
implements(np.argmin)(_position(argmin_p))


@implements(np.cumsum)
def cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """np.cumsum."""
    refuse_out(out)
    a = as_traceable(a)
    if axis is None:
        a, axis = np.ravel(a), 0
    target = sum_dtype(a.dtype) if dtype is None else check_dtype(np.dtype(dtype))
    return bind(cumsum_p, a, dim=normalize_dim(axis, a.ndim), dtype=target)


@implements(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """np.count_nonzero."""
    return np.sum(a != 0, axis=axis, keepdims=keepdims)


@implements(np.ptp)
def ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    """np.ptp: max - min."""
    refuse_out(out)
    return np.max(a, axis=axis, keepdims=flag(keepdims)) - np.min(a, axis=axis, keepdims=flag(keepdims))


@implements(np.average)
def average(a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = False) -> Any:
    """np.average. Weights have the array's shape, or are one for each element along `axis`."""
    a = as_traceable(a)
    if weights is None:
        result = np.mean(a, axis=axis, keepdims=flag(keepdims))
        return (result, np.full_like(result, _count(a, axis))) if returned else result
    weights = as_traceable(weights)
    if weights.shape != a.shape:
        if axis is None:
            raise ShapeError(f"np.average: weights of shape {weights.shape} for an array of shape {a.shape} need an axis.")
        given = np.lib.array_utils.normalize_axis_tuple(axis, a.ndim)
        if tuple(weights.shape) != tuple(a.shape[d] for d in given):
            raise ShapeError(f"np.average: weights of shape {weights.shape} do not fit axis {axis} of shape {a.shape}.")
        weights = np.transpose(weights, tuple(map(int, np.argsort(given))))
        weights = np.reshape(weights, [n if d in given else 1 for d, n in enumerate(a.shape)])
    weights = np.broadcast_to(weights, a.shape)
    total = np.sum(a * weights, axis=axis, keepdims=flag(keepdims))
    weight = np.sum(weights, axis=axis, keepdims=flag(keepdims), dtype=total.dtype)
    return (total / weight, weight) if returned else total / weight
