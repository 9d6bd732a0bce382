"""NumPy's elementwise functions beside the ufuncs, comparisons of whole arrays, interpolation, products."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..errors import ShapeError, UnsupportedError
from ..primitives.elementwise import stop_gradient_p
from .elementwise import unify
from .indexing import take
from .registry import as_operand, as_traceable, implements, refuse_out

__all__: list[str] = []


@implements(np.angle)
def angle(z: Any, deg: bool = False) -> Any:
    """np.angle."""
    radians = np.arctan2(np.imag(z), np.real(z)) if np.iscomplexobj(z) else np.arctan2(0, z)
    return radians * (180 / np.pi) if deg else radians


@implements(np.sinc)
def sinc(x: Any) -> Any:
    """np.sinc: sin(πx) / πx, and 1 at 0. Near 0 its derivatives are those of its series, without cancellation."""
    x = np.pi * as_traceable(x)
    zero, near, one = x == 0, np.abs(x) < 0.5, np.ones((), x.dtype)
    constant = bind(stop_gradient_p, np.where(zero, one, x))
    value = np.where(zero, one, np.sin(constant) / constant)
    square = np.square(np.where(near, x, np.zeros((), x.dtype)))
    series = functools.reduce(lambda total, factor: total * square + factor, _SINC[1:], _SINC[0])
    far = np.where(near, one, x)
    return np.where(near, value + (series - bind(stop_gradient_p, series)), np.sin(far) / far)


_SINC = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in reversed(range(8)))
"""The factors of sin(x) / x = 1 - x² / 3! + x⁴ / 5! - ..., the last first: up to 0.5 the rest is less than 1e-19."""


@implements(np.fix)
def fix(x: Any, out: Any = None) -> Any:
    """np.fix: towards zero."""
    refuse_out(out)
    return np.trunc(x)


@implements(np.real_if_close)
def real_if_close(a: Any, tol: float = 100) -> Any:
    """np.real_if_close: a complex array stays complex, because its values are not known while tracing."""
    return as_traceable(a)


implements(np.iscomplex)(lambda x: np.imag(x) != 0)
implements(np.isreal)(lambda x: np.imag(x) == 0)


def _infinite(sign: int, name: str) -> Any:
    def implementation(x: Any, out: Any = None) -> Any:
        refuse_out(out)
        if x.dtype.kind == "c":
            raise UnsupportedError(f"{name} is not defined for complex numbers. Use np.isinf(x).")
        return np.isinf(x) & (np.signbit(x) == (sign < 0))

    return implementation


implements(np.isposinf)(_infinite(1, "np.isposinf"))
implements(np.isneginf)(_infinite(-1, "np.isneginf"))


@implements(np.allclose)
def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """np.allclose, as a traced boolean."""
    return np.all(np.isclose(as_traceable(a), as_traceable(b), rtol, atol, equal_nan))


def _same(x: Any, y: Any, equal_nan: bool = False) -> Any:
    same = np.equal(x, y)
    return np.all(same | (np.isnan(x) & np.isnan(y)) if equal_nan else same)


@implements(np.array_equal)
def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    """np.array_equal, as a traced boolean. It is False if the shapes differ."""
    a1, a2 = as_traceable(a1), as_traceable(a2)
    return _same(a1, a2, equal_nan) if a1.shape == a2.shape else np.zeros((), bool)


@implements(np.array_equiv)
def array_equiv(a1: Any, a2: Any) -> Any:
    """np.array_equiv, as a traced boolean. It is False if the shapes do not broadcast."""
    a1, a2 = as_traceable(a1), as_traceable(a2)
    try:
        np.broadcast_shapes(a1.shape, a2.shape)
    except ValueError:
        return np.zeros((), bool)
    return _same(a1, a2)


# ---------------------------------------------------------------- interpolation, polynomials, convolution


@implements(np.interp)
def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
    """np.interp between points whose coordinates increase. Gradients flow to x, to xp and to fp."""
    x, xp, fp = map(as_traceable, (x, xp, fp))
    if xp.ndim != 1 or fp.shape != xp.shape or not xp.shape[0]:
        shapes = f"{tuple(xp.shape)} and {tuple(fp.shape)}"
        raise ShapeError(f"np.interp: the points have shapes {shapes}; both must be (n,), with n at least 1.")
    x, xp = x.astype(np.float64), xp.astype(np.float64)
    fp = fp.astype(np.complex128 if fp.dtype.kind == "c" else np.float64)
    if period is not None:
        period, left, right = abs(period), None, None
        x, xp = x % period, xp % period
        order = np.argsort(xp)
        xp, fp = take(xp, order), take(fp, order)
        xp = np.concatenate([xp[-1:] - period, xp, xp[:1] + period])
        fp = np.concatenate([fp[-1:], fp, fp[:1]])
    left, right = fp[0] if left is None else left, fp[-1] if right is None else right
    n = xp.shape[0]
    if n == 1:
        inner = np.broadcast_to(fp[0], x.shape)
    else:
        place = np.clip(np.searchsorted(xp, x, "right") - 1, 0, n - 2)
        low, start = take(xp, place), take(fp, place)
        inner = (take(fp, place + 1) - start) / (take(xp, place + 1) - low) * (x - low) + start
        inner = np.where(x == xp[-1], fp[-1], inner)
    result = np.where(x < xp[0], left, np.where(x > xp[-1], right, inner))
    return np.where(np.isnan(x), x, result)


@implements(np.polyval)
def polyval(p: Any, x: Any) -> Any:
    """np.polyval: Horner's rule."""
    p, x = as_traceable(p), as_traceable(x)
    y = np.zeros_like(x)
    for coefficient in p:
        y = y * x + coefficient
    return y


def _windows(a: Any, size: int, mode: str, name: str) -> Any:
    """Return each run of `size` neighbours in a padded array, as rows."""
    if mode not in ("full", "same", "valid"):
        raise UnsupportedError(f"{name}(mode={mode!r}): the modes are 'full', 'same' and 'valid'.")
    before = {"full": size - 1, "same": size // 2, "valid": 0}[mode]
    after = {"full": size - 1, "same": (size - 1) // 2, "valid": 0}[mode]
    a = np.pad(a, (before, after))
    return take(a, np.arange(a.shape[0] - size + 1)[:, None] + np.arange(size))


def _vectors(a: Any, v: Any, name: str) -> list[Any]:
    pair = unify(*(np.ravel(as_traceable(x)) if not np.ndim(x) else as_traceable(x) for x in (a, v)))
    if any(x.ndim != 1 or not x.size for x in pair):
        shapes = f"{np.shape(a)} and {np.shape(v)}"
        raise ShapeError(f"{name} takes arrays of one dimension that are not empty, not shapes {shapes}.")
    return pair


@implements(np.convolve)
def convolve(a: Any, v: Any, mode: str = "full") -> Any:
    """np.convolve: a matrix of windows, min(n, m) wide, times the shorter vector. Infinities reach both ends."""
    a, v = _vectors(a, v, "np.convolve")
    if v.shape[0] > a.shape[0]:
        a, v = v, a
    return _windows(a, v.shape[0], mode, "np.convolve") @ np.flip(v)


@implements(np.correlate)
def correlate(a: Any, v: Any, mode: str = "valid") -> Any:
    """np.correlate: as np.convolve."""
    if not np.ndim(a) or not np.ndim(v):
        raise ShapeError("np.correlate takes vectors, not numbers: multiply them.")
    a, v = _vectors(a, v, "np.correlate")
    v = np.conj(v) if v.dtype.kind == "c" else v
    if v.shape[0] > a.shape[0]:  # NumPy's rule: swap the roles, and reverse the result
        return np.flip(_windows(v, a.shape[0], mode, "np.correlate") @ a)
    return _windows(a, v.shape[0], mode, "np.correlate") @ v


# ---------------------------------------------------------------- products


@implements(np.cross)
def cross(a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Any:
    """np.cross of vectors with three elements."""
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = np.moveaxis(as_traceable(a), axisa, -1), np.moveaxis(as_traceable(b), axisb, -1)
    if a.shape[-1] != 3 or b.shape[-1] != 3:
        raise UnsupportedError(
            f"np.cross of vectors with {a.shape[-1]} and {b.shape[-1]} elements cannot be traced: both need three. In the "
            "plane it is x[0] * y[1] - x[1] * y[0]."
        )
    parts = [a[..., i] * b[..., j] - a[..., j] * b[..., i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return np.stack(parts, axis=axisc)


@implements(np.kron)
def kron(a: Any, b: Any) -> Any:
    """np.kron."""
    a, b = as_traceable(as_operand(a)), as_traceable(as_operand(b))
    ndim = max(a.ndim, b.ndim)
    a, b = (np.reshape(x, (1,) * (ndim - x.ndim) + tuple(x.shape)) for x in (a, b))
    rows = np.reshape(a, [n for size in a.shape for n in (size, 1)])
    columns = np.reshape(b, [n for size in b.shape for n in (1, size)])
    return np.reshape(rows * columns, [n * m for n, m in zip(a.shape, b.shape, strict=True)])
