"""Functions of scipy.special that convert their arguments to NumPy arrays, and so cannot be traced, in a form that can.

SciPy's ufuncs (gammaln, psi, expit, ...) and `zeta` are traced as they are.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from . import nn
from .core.public_names import directory
from .errors import ShapeError
from .ops.decompositions import as_floats
from .primitives.special import scipy_ufunc
from .transforms.autodiff.custom_rules import stop_gradient

__all__ = ["log_softmax", "logsumexp", "multigammaln", "polygamma", "softmax"]


def polygamma(n: int, x: Any) -> Any:
    """The n-th derivative of digamma at x, elementwise; n is an integer known while tracing. Raises ShapeError for n < 0."""
    n, x = operator.index(n), as_floats(x)
    if n < 0:
        raise ShapeError(f"polygamma: n={n} must be at least 0.")
    if n == 0:
        return scipy_ufunc("psi")(x)
    return (-1.0) ** (n + 1) * math.factorial(n) * scipy_ufunc("_zeta")(float(n + 1), x)


def multigammaln(a: Any, d: int) -> Any:
    """The logarithm of the multivariate gamma function of dimension d, elementwise: defined for a > (d - 1) / 2."""
    a, d = as_floats(a), operator.index(d)
    terms = np.expand_dims(a, -1) - np.arange(d, dtype=a.dtype) / 2
    return d * (d - 1) / 4 * math.log(math.pi) + np.sum(scipy_ufunc("gammaln")(terms), axis=-1)


def logsumexp(a: Any, axis: int | tuple[int, ...] | None = None, b: Any = None, keepdims: bool = False) -> Any:
    """log(sum(b * exp(a))) along `axis`, by default of all elements, without overflow; NaN where the sum is negative."""
    if b is None:
        return nn.logsumexp(a, axis, keepdims)
    a, b = np.broadcast_arrays(as_floats(a), as_floats(b))
    top = stop_gradient(np.max(np.where(b == 0, np.asarray(-np.inf, a.dtype), a), axis=axis, keepdims=True))
    top = np.where(np.isfinite(top), top, np.zeros((), a.dtype))
    terms = b * np.exp(a - top)
    total = np.sum(terms, axis=axis, keepdims=True)
    nothing = ~np.any(terms, axis=axis, keepdims=True)  # a logarithm of 0 would have the gradient NaN
    safe = np.where(nothing, np.ones((), total.dtype), total)
    out = np.where(nothing, np.asarray(-np.inf, total.dtype), np.log(safe) + top)
    return out if keepdims else np.squeeze(out, tuple(range(a.ndim)) if axis is None else axis)


def softmax(x: Any, axis: int | tuple[int, ...] | None = None) -> Any:
    """exp(x) / sum(exp(x)) along `axis`, by default of all elements, without overflow."""
    return nn.softmax(x, axis)


def log_softmax(x: Any, axis: int | tuple[int, ...] | None = None) -> Any:
    """log(softmax(x, axis))."""
    return nn.log_softmax(x, axis)


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(globals(), {})
