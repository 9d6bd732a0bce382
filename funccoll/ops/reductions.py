"""NumPy reductions over the dimensions of traced arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DTypeError
from ..ir import Traced, bind
from ..primitives.reductions import REDUCTIONS, argmax_p, argmin_p, cumsum_p, reduced
from ..types import bfloat16, check_dtype, is_inexact
from .elementwise import astype
from .registry import as_traceable, dims, implements, normalize_dim, refuse_out

__all__ = ["mean", "std", "var"]


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """NumPy's rule: small integers and booleans accumulate in the platform's 64-bit integer."""
    if dtype.kind in "bi":
        return np.dtype(np.int64)
    return np.dtype(np.uint64) if dtype.kind == "u" else dtype


def _accumulation(name: str) -> Callable[..., Any]:
    def implementation(
        a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, initial: Any = None
    ) -> Any:
        refuse_out(out)
        a = as_traceable(a)
        target = _sum_dtype(a.dtype) if dtype is None else check_dtype(np.dtype(dtype))
        result = bind(REDUCTIONS[name], a, dims=dims(axis, a.ndim), dtype=target, keepdims=_flag(keepdims))
        if initial is None or initial is np._NoValue:
            return result
        initial = _initial(initial, target)
        return result + initial if name == "sum" else result * initial

    return implementation


def _initial(value: Any, dtype: np.dtype) -> Any:
    """A reduction's `initial` in the dtype of its result, as NumPy takes it."""
    return astype(value, dtype) if isinstance(value, Traced) else np.asarray(value, dtype)


def _flag(keepdims: Any) -> bool:
    return keepdims is not np._NoValue and bool(keepdims)


implements(np.sum)(_accumulation("sum"))
implements(np.prod)(_accumulation("prod"))


def _extremum(name: str, combine: np.ufunc) -> Callable[..., Any]:
    def implementation(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, initial: Any = None) -> Any:
        refuse_out(out)
        a, over = as_traceable(a), dims(axis, a.ndim)
        given = initial is not None and initial is not np._NoValue
        if given and any(a.shape[d] == 0 for d in over):  # an empty maximum is `initial`
            return np.full_like(a, initial, shape=reduced(a.shape, over, _flag(keepdims)))
        result = bind(REDUCTIONS[name], a, dims=over, dtype=a.dtype, keepdims=_flag(keepdims))
        return combine(result, _initial(initial, a.dtype)) if given else result

    return implementation


implements(np.max, np.amax)(_extremum("max", np.maximum))
implements(np.min, np.amin)(_extremum("min", np.minimum))


def _logical(name: str) -> Callable[..., Any]:
    def implementation(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
        refuse_out(out)
        a = as_traceable(a)
        return bind(REDUCTIONS[name], a, dims=dims(axis, a.ndim), dtype=np.dtype(np.bool_), keepdims=_flag(keepdims))

    return implementation


implements(np.any)(_logical("any"))
implements(np.all)(_logical("all"))


def _count(a: Any, axis: Any) -> int:
    count = 1
    for d in dims(axis, a.ndim):
        count *= a.shape[d]
    return count


def _mean_dtypes(dtype: np.dtype, asked: Any) -> tuple[np.dtype, np.dtype]:
    """(dtype to accumulate in, dtype of the result): 16-bit floats accumulate in float32, as in NumPy."""
    if asked is not None:
        dtype = check_dtype(np.dtype(asked))
        if not is_inexact(dtype):
            raise DTypeError(f"a mean, variance or deviation in dtype {dtype} would lose its fraction: choose a float.")
    if not is_inexact(dtype):
        return np.dtype(np.float64), np.dtype(np.float64)
    return (np.dtype(np.float32) if dtype in (np.dtype(np.float16), bfloat16) else dtype), dtype


@implements(np.mean)
def mean(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    """np.mean."""
    refuse_out(out)
    a = as_traceable(a)
    accumulate, target = _mean_dtypes(a.dtype, dtype)
    total = np.sum(a, axis=axis, dtype=accumulate, keepdims=_flag(keepdims))
    return astype(total / np.asarray(_count(a, axis), accumulate), target)


@implements(np.var)
def var(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: int = 0, keepdims: Any = False) -> Any:
    """np.var: mean of |a - mean(a)|², divided by n - ddof."""
    refuse_out(out)
    a = as_traceable(a)
    accumulate, target = _mean_dtypes(a.dtype, dtype)
    a = astype(a, accumulate)
    centred = a - np.mean(a, axis=axis, keepdims=True)
    squares = np.square(centred) if a.dtype.kind != "c" else np.square(np.real(centred)) + np.square(np.imag(centred))
    if a.dtype.kind == "c":
        accumulate = target = squares.dtype
    total = np.sum(squares, axis=axis, keepdims=_flag(keepdims))
    return astype(total / np.asarray(max(_count(a, axis) - ddof, 0), accumulate), target)


@implements(np.std)
def std(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: int = 0, keepdims: Any = False) -> Any:
    """np.std: the square root of np.var."""
    return np.sqrt(var(a, axis, dtype, out, ddof, keepdims))


def _position(primitive: Any) -> Callable[..., Any]:
    def implementation(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
        refuse_out(out)
        a = as_traceable(a)
        if axis is None:
            result = bind(primitive, np.ravel(a), dim=0, keepdims=False)
            return np.reshape(result, (1,) * a.ndim) if _flag(keepdims) else result
        return bind(primitive, a, dim=normalize_dim(axis, a.ndim), keepdims=_flag(keepdims))

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
    target = _sum_dtype(a.dtype) if dtype is None else check_dtype(np.dtype(dtype))
    return bind(cumsum_p, a, dim=normalize_dim(axis, a.ndim), dtype=target)


@implements(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """np.count_nonzero."""
    return np.sum(a != 0, axis=axis, keepdims=keepdims)


@implements(np.ptp)
def ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    """np.ptp: max - min."""
    refuse_out(out)
    return np.max(a, axis=axis, keepdims=_flag(keepdims)) - np.min(a, axis=axis, keepdims=_flag(keepdims))


@implements(np.average)
def average(a: Any, axis: Any = None, weights: Any = None, *, keepdims: Any = False) -> Any:
    """np.average; weights of the array's shape, or one for each element along `axis`."""
    if weights is None:
        return np.mean(a, axis=axis, keepdims=_flag(keepdims))
    a, weights = as_traceable(a), as_traceable(weights)
    if weights.ndim != a.ndim:
        shape = [1] * a.ndim
        shape[normalize_dim(axis, a.ndim)] = -1
        weights = np.reshape(weights, shape)
    weights = np.broadcast_to(weights, a.shape)
    total = np.sum(a * weights, axis=axis, keepdims=_flag(keepdims))
    return total / np.sum(weights, axis=axis, keepdims=_flag(keepdims))
