"""NumPy's reductions that leave out NaN. A slice of NaNs alone gives NaN, without NumPy's warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.types import is_inexact
from ..primitives.elementwise import root_p
from .reductions import flag
from .registry import as_traceable, implements, refuse_out

__all__: list[str] = []


def _both(where: Any, numbers: Any) -> Any:
    """Return the condition of `where=` and of being a number."""
    return numbers if where is None or where is np._NoValue or where is True else np.logical_and(numbers, where)


def _accumulation(function: Callable[..., Any], neutral: int) -> Callable[..., Any]:
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
        a = as_traceable(a)
        if is_inexact(a.dtype):
            a = np.where(np.isnan(a), np.asarray(neutral, a.dtype), a)
        return function(a, axis=axis, dtype=dtype, keepdims=flag(keepdims), initial=initial, where=where)

    return implementation


implements(np.nansum)(_accumulation(np.sum, 0))
implements(np.nanprod)(_accumulation(np.prod, 1))


def _extremum(function: Callable[..., Any], worst: float) -> Callable[..., Any]:
    def implementation(
        a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, initial: Any = None, where: Any = None
    ) -> Any:
        refuse_out(out)
        a, keep = as_traceable(a), flag(keepdims)
        if not is_inexact(a.dtype):
            return function(a, axis=axis, keepdims=keep, initial=initial, where=where)
        missing = np.isnan(a)
        best = function(
            np.where(missing, np.asarray(worst, a.dtype), a), axis=axis, keepdims=keep, initial=initial, where=where
        )
        if initial is not None and initial is not np._NoValue:
            return best
        return np.where(np.all(missing, axis=axis, keepdims=keep), np.asarray(np.nan, a.dtype), best)

    return implementation


implements(np.nanmax)(_extremum(np.max, -np.inf))
implements(np.nanmin)(_extremum(np.min, np.inf))


def _position(function: Callable[..., Any], worst: float) -> Callable[..., Any]:
    def implementation(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
        """A slice of NaNs alone gives 0. NumPy raises an error."""
        refuse_out(out)
        a = as_traceable(a)
        numbers = np.where(np.isnan(a), np.asarray(worst, a.dtype), a) if is_inexact(a.dtype) else a
        return function(numbers, axis=axis, keepdims=flag(keepdims))

    return implementation


implements(np.nanargmax)(_position(np.argmax, -np.inf))
implements(np.nanargmin)(_position(np.argmin, np.inf))


@implements(np.nanmean)
def nanmean(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = None) -> Any:
    """np.nanmean."""
    refuse_out(out)
    a, keep = as_traceable(a), flag(keepdims)
    if not is_inexact(a.dtype):
        return np.mean(a, axis=axis, dtype=dtype, keepdims=keep, where=where)
    numbers = ~np.isnan(a)
    count = np.sum(numbers, axis=axis, keepdims=keep, where=where)
    total = np.sum(np.where(numbers, a, np.zeros((), a.dtype)), axis=axis, dtype=dtype, keepdims=keep, where=where)
    return total / count.astype(total.dtype)


@implements(np.nanvar)
def nanvar(
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
    """np.nanvar: NaN if there are no more numbers than ddof."""
    refuse_out(out)
    a, keep = as_traceable(a), flag(keepdims)
    ddof = ddof if correction is None or correction is np._NoValue else correction
    mean = None if mean is np._NoValue else mean
    if not is_inexact(a.dtype):
        return np.var(a, axis=axis, dtype=dtype, ddof=ddof, keepdims=keep, where=where, mean=mean)
    a = a if dtype is None else a.astype(dtype)
    chosen = _both(where, ~np.isnan(a))
    centre = nanmean(a, axis=axis, keepdims=True, where=where) if mean is None else mean
    centred = np.where(chosen, np.where(chosen, a, np.zeros((), a.dtype)) - centre, np.zeros((), a.dtype))
    squares = np.real(centred * np.conj(centred)) if a.dtype.kind == "c" else centred * centred
    freedom = np.sum(np.broadcast_to(chosen, a.shape), axis=axis, keepdims=keep) - ddof
    total = np.sum(squares, axis=axis, keepdims=keep)
    variance = np.where(freedom > 0, total / np.maximum(freedom, 1).astype(total.dtype), np.asarray(np.nan, total.dtype))
    return variance if dtype is None else variance.astype(dtype)


@implements(np.nanstd)
def nanstd(
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
    """np.nanstd: the square root of np.nanvar."""
    return bind(root_p, nanvar(a, axis, dtype, out, ddof, keepdims, where=where, mean=mean, correction=correction))
