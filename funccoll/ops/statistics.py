"""NumPy's statistics of traced arrays: quantiles, histograms, covariances."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.dtype_promotion import note_widening
from ..core.interpreter import Traced
from ..core.types import is_inexact
from ..errors import DTypeError, ShapeError, UnsupportedError
from .elementwise import astype, result_dtype, scalar_type
from .indexing import at, take
from .reductions import flag
from .registry import as_traceable, dims, has_traced, implements, refuse_out

__all__ = ["rows_of"]


def rows_of(a: Any, axis: Any, name: str) -> tuple[Any, tuple[int, ...]]:
    """Return the elements of each result as one last dimension, and the result's shape with keepdims."""
    if a.dtype.kind == "c":
        raise DTypeError(f"{name} is not defined for complex numbers: they have no order. Use np.abs(x).")
    over = dims(axis, a.ndim)
    rest = [d for d in range(a.ndim) if d not in over]
    count = int(np.prod([a.shape[d] for d in over], dtype=np.int64))
    if not count:
        raise ShapeError(f"{name} over dimension(s) {over} of shape {tuple(a.shape)}: there are no elements.")
    rows = np.reshape(np.transpose(a, (*rest, *over)), (*(a.shape[d] for d in rest), count))
    return rows, tuple(1 if d in over else n for d, n in enumerate(a.shape))


# The place of a quantile among n sorted elements, counted from 0, with a fraction. Source: Hyndman and Fan, 1996.
_CONTINUOUS = {
    "interpolated_inverted_cdf": (0.0, 1.0),
    "hazen": (0.5, 0.5),
    "weibull": (0.0, 0.0),
    "median_unbiased": (1 / 3, 1 / 3),
    "normal_unbiased": (3 / 8, 3 / 8),
}
_WHOLE = {"lower": np.floor, "higher": np.ceil, "nearest": np.round}


def _place(n: Any, q: Any, method: str) -> Any:
    if method == "linear":
        return (n - 1) * q
    if method in _WHOLE:
        return _WHOLE[method]((n - 1) * q).astype(np.int64)
    if method in ("inverted_cdf", "averaged_inverted_cdf"):
        return n * q - 1 if method.startswith("averaged") else np.ceil(n * q - 1).astype(np.int64)
    if method == "closest_observation":
        below = np.floor(n * q - 1.5)
        return np.where((n * q - 1.5 == below) & (below % 2 == 1), below, below + 1).astype(np.int64)
    if method == "midpoint":
        return 0.5 * (np.floor((n - 1) * q) + np.ceil((n - 1) * q))
    if method in _CONTINUOUS:
        alpha, beta = _CONTINUOUS[method]
        return n * q + (alpha + q * (1 - alpha - beta)) - 1
    raise UnsupportedError(
        f"method={method!r} is not one of linear, midpoint, {', '.join([*_WHOLE, *_CONTINUOUS])}, inverted_cdf, "
        "averaged_inverted_cdf and closest_observation."
    )


def _quantile(a: Any, q: Any, axis: Any, method: str, keepdims: bool, weak: bool, skip_nan: bool, name: str) -> Any:
    """Return quantiles along `axis`. With `skip_nan` they are of the numbers in each row, which stand before its NaNs."""
    rows, kept = rows_of(a, axis, name)
    ordered = np.sort(rows, axis=-1)
    size, wanted = rows.shape[-1], np.ravel(q)
    inexact = is_inexact(a.dtype)
    n = np.sum(~np.isnan(rows), axis=-1, keepdims=True) if skip_nan and inexact else size
    # NumPy's number of elements is a Python integer, so it does not widen q.
    place = _place(n.astype(wanted.dtype) if np.ndim(n) and is_inexact(wanted.dtype) else n, wanted, method)
    if np.ndim(n):
        place = np.broadcast_to(place, (*rows.shape[:-1], wanted.size))

    def element(index: Any) -> Any:
        index = np.clip(index, 0, np.maximum(n - 1, 0))
        return np.take_along_axis(ordered, index, axis=-1) if np.ndim(index) > 1 else take(ordered, index, axis=-1)

    if place.dtype.kind in "iu":
        result = element(place)
    else:
        if not weak:
            note_widening((a, wanted), result_dtype(a, place))
        whole = np.floor(place)
        # Outside, both elements are the same one. The fraction is NumPy's there too: it decides the sign of a zero.
        fraction = place - np.where(place >= n - 1, -1.0, np.maximum(whole, 0.0))
        if method == "midpoint":
            fraction = np.where(place % 1 == 0, 0.0, 0.5)
        elif method == "averaged_inverted_cdf":
            fraction = np.where(fraction == 0, 0.5, 1.0)
        whole, dtype = whole.astype(np.int64), a.dtype if weak and inexact else place.dtype
        low, high = element(whole), element(whole + 1)
        gap = high - low
        # Two forms, as in NumPy: at either end the result is that element to the bit.
        upper = high - gap * (1 - fraction).astype(dtype)
        result = np.where(fraction >= 0.5, upper, low + gap * fraction.astype(dtype))
    if inexact:
        last = ordered[..., -1:] if not skip_nan else np.where(n == 0, ordered[..., -1:], np.zeros((), a.dtype))
        result = np.where(np.isnan(last), np.asarray(np.nan, a.dtype), result)
    result = np.moveaxis(result, -1, 0)
    return np.reshape(result, np.shape(q) + (kept if keepdims else tuple(rows.shape[:-1])))


def _quantiles(percent: bool, skip_nan: bool, name: str) -> Any:
    def implementation(
        a: Any,
        q: Any,
        axis: Any = None,
        out: Any = None,
        overwrite_input: bool = False,
        method: str = "linear",
        keepdims: Any = False,
    ) -> Any:
        refuse_out(out)
        a, weak = as_traceable(a), scalar_type(q) in (int, float)
        q = as_traceable(q)
        q = np.true_divide(q, 100) if percent else q
        top = 100 if percent else 1
        if not isinstance(q, Traced) and not (np.all(q >= 0) and np.all(q <= 1)):
            raise ShapeError(f"{name}: q must be between 0 and {top}.")
        return _quantile(a, q, axis, method, flag(keepdims), weak, skip_nan, name)

    return implementation


implements(np.quantile)(_quantiles(False, False, "np.quantile"))
implements(np.percentile)(_quantiles(True, False, "np.percentile"))
implements(np.nanquantile)(_quantiles(False, True, "np.nanquantile"))
implements(np.nanpercentile)(_quantiles(True, True, "np.nanpercentile"))


def _median(skip_nan: bool) -> Any:
    def implementation(a: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False, keepdims: Any = False) -> Any:
        refuse_out(out)
        a = as_traceable(a)
        rows, kept = rows_of(a, axis, "np.median")
        ordered, n = np.sort(rows, axis=-1), rows.shape[-1]
        if skip_nan and is_inexact(a.dtype):
            count = np.sum(~np.isnan(rows), axis=-1, keepdims=True)
            pair = np.concatenate([np.maximum(count - 1, 0) // 2, np.minimum(count // 2, n - 1)], axis=-1)
            result = np.mean(np.take_along_axis(ordered, pair, axis=-1), axis=-1)
        else:
            result = np.mean(ordered[..., (n - 1) // 2 : n // 2 + 1], axis=-1)
            if is_inexact(a.dtype):
                result = np.where(np.isnan(ordered[..., -1]), ordered[..., -1], result)
        return np.reshape(result, kept) if flag(keepdims) else result

    return implementation


implements(np.median)(_median(False))
implements(np.nanmedian)(_median(True))


# ---------------------------------------------------------------- counts


@implements(np.bincount)
def bincount(x: Any, /, weights: Any = None, minlength: int = 0) -> Any:
    """np.bincount with a length that is known: `minlength`. Larger numbers are left out, as in jnp.bincount(length=)."""
    x = as_traceable(x)
    if x.ndim != 1 or x.dtype.kind not in "iub":
        raise ShapeError(f"np.bincount takes integers in one dimension, not {x.dtype} of shape {tuple(x.shape)}.")
    if has_traced(x) and not minlength:
        raise UnsupportedError(
            "np.bincount of a traced array has a length that depends on values. Give it: np.bincount(x, minlength=n), which "
            "leaves out larger numbers."
        )
    n = minlength if has_traced(x) else max(minlength, int(x.max(initial=-1)) + 1)
    what = np.ones((), np.int64) if weights is None else astype(as_traceable(weights), np.float64)
    place = np.where((x >= 0) & (x < n), x, n)
    return at(np.zeros(n + 1, what.dtype))[place].add(what)[:n]


def _edges(a: Any, bins: Any, range: Any) -> Any:
    if np.ndim(bins) == 1:
        return as_traceable(bins)
    if isinstance(bins, (str, Traced)) or np.ndim(bins):
        raise UnsupportedError(f"np.histogram(bins={bins!r}) cannot be traced: give a number of bins, or their edges.")
    a = as_traceable(a)
    low, high = range if range is not None else (np.min(a), np.max(a)) if a.size else (0.0, 1.0)
    wide = np.result_type(*(v if isinstance(v, (int, float)) else v.dtype for v in (low, high)), a.dtype)
    wide = wide if is_inexact(wide) else np.dtype(np.float64)
    same = low == high
    low, high = np.where(same, low - 0.5, low), np.where(same, high + 0.5, high)
    return np.linspace(low, high, int(bins) + 1, dtype=wide)


@implements(np.histogram_bin_edges)
def histogram_bin_edges(a: Any, bins: Any = 10, range: Any = None, weights: Any = None) -> Any:
    """np.histogram_bin_edges for a number of bins, or for edges."""
    return _edges(a, bins, range)


@implements(np.histogram)
def histogram(a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> tuple[Any, Any]:
    """np.histogram for a number of bins, or for edges."""
    edges, a = _edges(a, bins, range), np.ravel(as_traceable(a))
    n = edges.shape[0] - 1
    values = a.astype(edges.dtype) if is_inexact(edges.dtype) else a
    place = np.searchsorted(edges, values, "right") - 1
    place = np.where(values == edges[-1], n - 1, place)  # the last bin includes both edges
    weights = None if weights is None else np.ravel(as_traceable(weights))
    counts = np.bincount(np.where((place >= 0) & (place < n), place, n), weights, minlength=n + 1)[:n]
    if weights is not None:
        counts = counts.astype(weights.dtype)
    return (counts / np.diff(edges).astype(np.float64) / np.sum(counts) if density else counts), edges


# ---------------------------------------------------------------- covariances


@implements(np.cov)
def cov(
    m: Any,
    y: Any = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
    *,
    dtype: Any = None,
) -> Any:
    """np.cov."""
    rows = []
    for given in [m] if y is None else [m, y]:
        given = as_traceable(given)
        if given.ndim > 2:
            raise ShapeError(f"np.cov takes arrays of at most 2 dimensions, not shape {tuple(given.shape)}.")
        x = np.atleast_2d(given)
        as_it_is = rowvar or given.ndim == 1 or (bool(rows) and x.shape[0] == 1)  # NumPy has another rule for y
        rows.append(x if as_it_is else x.T)
    x = np.concatenate(rows) if len(rows) > 1 else rows[0]
    x = astype(x, dtype if dtype is not None else np.result_type(x.dtype, np.float64))
    ddof = (0 if bias else 1) if ddof is None else ddof
    weights = None
    for given in (fweights, aweights):
        if given is not None:
            given = as_traceable(given).astype(np.float64)
            weights = given if weights is None else weights * given
    mean, total = np.average(x, axis=1, weights=weights, returned=True)
    total = total[0]
    if aweights is None or not ddof:
        freedom = total - ddof
    else:
        freedom = total - ddof * np.sum(weights * as_traceable(aweights)) / total
    x = x - mean[:, None]
    product = np.dot(x, np.conj((x if weights is None else x * weights).T))
    return np.squeeze(product * np.true_divide(1, np.maximum(freedom, 0.0) if x.dtype.kind != "c" else freedom))


@implements(np.corrcoef)
def corrcoef(x: Any, y: Any = None, rowvar: bool = True, *, dtype: Any = None) -> Any:
    """np.corrcoef."""
    c = np.cov(x, y, rowvar, dtype=dtype)
    if not c.ndim:
        return c / c
    deviation = np.sqrt(np.real(np.diag(c)))
    c = c / deviation[:, None] / deviation[None, :]
    if c.dtype.kind == "c":
        return np.clip(np.real(c), -1, 1) + 1j * np.clip(np.imag(c), -1, 1)
    return np.clip(c, -1, 1)
