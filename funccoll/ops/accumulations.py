"""NumPy's running reductions, the methods of ufuncs (`accumulate`, `outer`, `reduce`), and differences between neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.types import check_dtype
from ..errors import ShapeError, UnsupportedError
from ..primitives.accumulations import ACCUMULATIONS
from ..primitives.elementwise import stop_gradient_p
from .elementwise import UFUNC_METHODS, astype
from .reductions import sum_dtype
from .registry import as_operand, as_traceable, implements, normalize_dim, refuse_out

__all__: list[str] = []


def _accumulate(ufunc: np.ufunc, a: Any, axis: int, dtype: Any) -> Any:
    """`ufunc.accumulate` of a traced array."""
    if ufunc is np.add:
        return np.cumsum(a, axis=axis, dtype=dtype)
    if ufunc not in ACCUMULATIONS:
        raise UnsupportedError(
            f"np.{ufunc.__name__}.accumulate cannot be traced by funccoll; np.add, np.multiply, np.maximum and np.minimum can."
        )
    target = a.dtype if ufunc is not np.multiply else sum_dtype(a.dtype)
    if dtype is not None:
        target = check_dtype(np.dtype(dtype))
        a = astype(a, target)
    return bind(ACCUMULATIONS[ufunc], a, dim=normalize_dim(axis, a.ndim), dtype=target)


def _accumulate_method(ufunc: np.ufunc, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    def call(array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        return _accumulate(ufunc, as_traceable(array), axis, dtype)

    return call(*inputs, **kwargs)


def _outer_method(ufunc: np.ufunc, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    a, b = map(as_operand, inputs)
    if np.ndim(b):
        a = np.reshape(as_traceable(a), np.shape(a) + (1,) * np.ndim(b))
    return ufunc(a, b, **kwargs)


def _log_sum_exp(x: Any, axis: Any, keepdims: bool = False) -> Any:
    """Compute `np.logaddexp.reduce`. The largest element is taken out of the logarithm, so that no exponential overflows."""
    highest = np.max(x, axis=axis, keepdims=True)
    highest = bind(stop_gradient_p, np.where(np.isfinite(highest), highest, np.zeros((), x.dtype)))
    total = np.sum(np.exp(x - highest), axis=axis, keepdims=True)
    nothing = total == 0  # only if all are -inf: the gradient of log(0) would be NaN
    out = np.where(nothing, -np.inf, np.log(np.where(nothing, 1.0, total)) + highest)
    return out if keepdims else np.squeeze(out, axis=axis)


def _reduce_method(ufunc: np.ufunc, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    functions: dict[np.ufunc, Callable[..., Any]] = {
        np.add: np.sum,
        np.multiply: np.prod,
        np.maximum: np.max,
        np.minimum: np.min,
        np.fmax: np.nanmax,
        np.fmin: np.nanmin,
        np.logical_and: np.all,
        np.logical_or: np.any,
        np.logaddexp: _log_sum_exp,
    }
    if ufunc not in functions:
        raise UnsupportedError(f"np.{ufunc.__name__}.reduce cannot be traced by funccoll.")
    kwargs = {k: v for k, v in kwargs.items() if v is not None or k == "axis"}  # axis=None means all axes
    return functions[ufunc](inputs[0], **{"axis": 0, **kwargs})


UFUNC_METHODS.update(accumulate=_accumulate_method, outer=_outer_method, reduce=_reduce_method)


@implements(np.cumprod)
def cumprod(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    """np.cumprod."""
    refuse_out(out)
    a = as_traceable(a)
    return _accumulate(np.multiply, *((np.ravel(a), 0) if axis is None else (a, axis)), dtype)


def _cumulative(ufunc: np.ufunc) -> Any:
    def implementation(
        x: Any, /, *, axis: int | None = None, dtype: Any = None, out: Any = None, include_initial: bool = False
    ) -> Any:
        x = as_traceable(x)
        if axis is None:
            if x.ndim != 1:
                raise ShapeError(f"a cumulative result of shape {x.shape} needs an axis.")
            axis = 0
        result = _accumulate(ufunc, x, axis, dtype)
        if not include_initial:
            return result
        dim = normalize_dim(axis, x.ndim)
        first = np.full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), ufunc.identity, result.dtype)
        return np.concatenate([first, result], axis=dim)

    return implementation


if hasattr(np, "cumulative_sum"):  # NumPy 2.1
    implements(np.cumulative_sum)(_cumulative(np.add))
    implements(np.cumulative_prod)(_cumulative(np.multiply))


@implements(np.nancumsum)
def nancumsum(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    """np.nancumsum: NaN counts as 0."""
    return np.cumsum(np.where(np.isnan(a), np.zeros((), a.dtype), a), axis=axis, dtype=dtype)


@implements(np.nancumprod)
def nancumprod(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    """np.nancumprod: NaN counts as 1."""
    return np.cumprod(np.where(np.isnan(a), np.ones((), a.dtype), a), axis=axis, dtype=dtype)


# ---------------------------------------------------------------- differences


def part(a: Any, dim: int, start: int | None, stop: int | None = None, step: int | None = None) -> Any:
    """Return a slice of one dimension."""
    return a[(slice(None),) * dim + (slice(start, stop, step),)]


@implements(np.diff)
def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = np._NoValue, append: Any = np._NoValue) -> Any:
    """np.diff."""
    if n < 0:
        raise ShapeError(f"np.diff: the order is {n}; it must be at least 0.")
    a = as_traceable(a)
    if not n:
        return a
    dim = normalize_dim(axis, a.ndim)

    def edge(value: Any) -> list[Any]:
        if value is np._NoValue:
            return []
        value = as_traceable(value)
        return [value if value.ndim else np.broadcast_to(value, (*a.shape[:dim], 1, *a.shape[dim + 1 :]))]

    pieces = [*edge(prepend), a, *edge(append)]
    a = np.concatenate(pieces, axis=dim) if len(pieces) > 1 else a
    subtract = np.not_equal if a.dtype == np.bool_ else np.subtract
    for _ in range(n):
        a = subtract(part(a, dim, 1), part(a, dim, None, -1))
    return a


@implements(np.ediff1d)
def ediff1d(ary: Any, to_end: Any = None, to_begin: Any = None) -> Any:
    """np.ediff1d."""
    ary = as_traceable(ary)
    if ary.dtype.kind == "b":
        raise TypeError("truth values have no differences; use np.diff, or x[1:] != x[:-1]")
    inner = np.diff(np.ravel(ary))
    edges = [None if e is None else np.ravel(as_traceable(e)).astype(inner.dtype) for e in (to_begin, to_end)]
    return np.concatenate([e for e in (edges[0], inner, edges[1]) if e is not None])


@implements(np.unwrap)
def unwrap(p: Any, discont: Any = None, axis: int = -1, *, period: Any = 2 * np.pi) -> Any:
    """np.unwrap: steps of more than half a period become steps of less."""
    p = as_traceable(p)
    dim = normalize_dim(axis, p.ndim)
    step = np.diff(p, axis=dim)
    exact = np.result_type(p, period).kind in "iu"
    half, ambiguous = (period // 2, period % 2 == 0) if exact else (period / 2, True)
    folded = np.mod(step + half, period) - half
    if ambiguous:
        folded = np.where((folded == -half) & (step > 0), half, folded)
    limit = period / 2 if discont is None else discont
    correction = np.where(np.abs(step) < limit, 0, folded - step)
    return np.concatenate([part(p, dim, None, 1), part(p, dim, 1) + np.cumsum(correction, axis=dim)], axis=dim)


def _spacings(f: Any, varargs: Sequence[Any], axes: Sequence[int]) -> list[Any]:
    """Return a number, or the differences of coordinates, for each axis."""
    given = [as_operand(v) for v in varargs] or [1.0]
    if len(given) == 1 and not np.ndim(given[0]):
        return given * len(axes)
    if len(given) != len(axes):
        raise ShapeError(f"np.gradient: {len(given)} spacings for {len(axes)} axes.")
    for spacing, axis in zip(given, axes, strict=True):
        if np.ndim(spacing) and np.shape(spacing) != (f.shape[axis],):
            raise ShapeError(f"np.gradient: coordinates of shape {np.shape(spacing)} for dimension {axis} of shape {f.shape}.")
    return [np.diff(s) if np.ndim(s) else s for s in given]


@implements(np.gradient)
def gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """np.gradient: central differences inside, one-sided ones of first or second order at the edges."""
    f = as_traceable(f)
    f = f if f.dtype.kind in "fc" else f.astype(np.float64)
    axes = range(f.ndim) if axis is None else np.lib.array_utils.normalize_axis_tuple(axis, f.ndim)
    if edge_order not in (1, 2):
        raise UnsupportedError("np.gradient: edge_order is 1 or 2.")
    results = []
    for dim, h in zip(axes, _spacings(f, varargs, axes), strict=True):
        if f.shape[dim] < edge_order + 1:
            raise ShapeError(f"np.gradient: dimension {dim} of shape {f.shape} needs at least {edge_order + 1} elements.")
        results.append(_gradient(f, h, dim, edge_order))
    return results[0] if len(results) == 1 else tuple(results)


def _gradient(f: Any, h: Any, dim: int, edge_order: int) -> Any:
    at = lambda i: part(f, dim, i, i + 1 or None)
    if not np.ndim(h):
        inner = (part(f, dim, 2) - part(f, dim, None, -2)) / (2.0 * h)
        first, last = (h, h), (h, h)
    else:
        shape = [-1 if d == dim else 1 for d in range(f.ndim)]
        left, right = np.reshape(h[:-1], shape), np.reshape(h[1:], shape)
        a, b, c = -right / (left * (left + right)), (right - left) / (left * right), left / (right * (left + right))
        inner = a * part(f, dim, None, -2) + b * part(f, dim, 1, -1) + c * part(f, dim, 2)
        first, last = (h[0], h[min(1, h.shape[0] - 1)]), (h[max(-2, -h.shape[0])], h[-1])
    if edge_order == 1:
        low, high = (at(1) - at(0)) / first[0], (at(-1) - at(-2)) / last[1]
    elif not np.ndim(h):
        low = -1.5 / h * at(0) + 2.0 / h * at(1) + -0.5 / h * at(2)
        high = 0.5 / h * at(-3) + -2.0 / h * at(-2) + 1.5 / h * at(-1)
    else:
        p, q = first
        low = -(2.0 * p + q) / (p * (p + q)) * at(0) + (p + q) / (p * q) * at(1) + -p / (q * (p + q)) * at(2)
        p, q = last
        high = q / (p * (p + q)) * at(-3) + -(q + p) / (p * q) * at(-2) + (2.0 * q + p) / (q * (p + q)) * at(-1)
    return np.concatenate([low, inner, high], axis=dim).astype(f.dtype)


@implements(np.trapezoid)
def trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    """np.trapezoid."""
    y = as_traceable(y)
    dim = normalize_dim(axis, y.ndim)
    d = as_operand(dx)
    if x is not None:
        x = as_traceable(x)
        d = np.reshape(np.diff(x), [-1 if e == dim else 1 for e in range(y.ndim)]) if x.ndim == 1 else np.diff(x, axis=axis)
    return np.sum(d * (part(y, dim, 1) + part(y, dim, None, -1)) / 2.0, axis=dim)
