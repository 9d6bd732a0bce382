"""Functions of scipy.special in a form that can be traced.

SciPy's own convert their arguments to NumPy arrays. Its ufuncs (gammaln, psi, expit, ...) and `zeta` can be traced as they are.
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
    """Compute the n-th derivative of the digamma function, elementwise.

    Args:
        n: An integer of at least 0, known while tracing.
        x: An array.

    Returns:
        An array with the shape of `x`.

    Raises:
        ShapeError: If `n` is negative.

    Example:
        >>> print(np.round(fc.special.polygamma(1, 1.0), 4))  # π²/6
        1.6449
    """
    n, x = operator.index(n), as_floats(x)
    if n < 0:
        raise ShapeError(f"polygamma: n={n} must be at least 0.")
    if n == 0:
        return scipy_ufunc("psi")(x)
    return (-1.0) ** (n + 1) * math.factorial(n) * scipy_ufunc("_zeta")(float(n + 1), x)


def multigammaln(a: Any, d: int) -> Any:
    """Compute the logarithm of the multivariate gamma function, elementwise.

    Args:
        a: An array with elements greater than (d - 1) / 2.
        d: The dimension, an integer known while tracing.

    Returns:
        An array with the shape of `a`.

    Example:
        >>> print(np.round(fc.special.multigammaln(2.0, 1), 4))  # log Γ(2)
        0.0
    """
    a, d = as_floats(a), operator.index(d)
    terms = np.expand_dims(a, -1) - np.arange(d, dtype=a.dtype) / 2
    return d * (d - 1) / 4 * math.log(math.pi) + np.sum(scipy_ufunc("gammaln")(terms), axis=-1)


def logsumexp(a: Any, axis: int | tuple[int, ...] | None = None, b: Any = None, keepdims: bool = False) -> Any:
    """Compute log(sum(b * exp(a))) without overflow.

    Args:
        a: An array.
        axis: The dimension, or dimensions, to sum over; None sums over all.
        b: Factors that broadcast with `a`; None is ones.
        keepdims: True keeps the summed dimensions with size 1.

    Returns:
        An array without the summed dimensions. It is NaN if the sum is negative.

    Example:
        >>> print(np.round(fc.special.logsumexp(np.array([1000.0, 1000.0])), 4))
        1000.6931
    """
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
    """Compute exp(x) / sum(exp(x)) without overflow.

    Args:
        x: An array.
        axis: The dimension, or dimensions, to sum over; None sums over all.

    Returns:
        An array with the shape of `x`.

    Example:
        >>> print(fc.special.softmax(np.zeros(4)))
        [0.25 0.25 0.25 0.25]
    """
    return nn.softmax(x, axis)


def log_softmax(x: Any, axis: int | tuple[int, ...] | None = None) -> Any:
    """Compute log(softmax(x)) without overflow.

    Args:
        x: An array.
        axis: The dimension, or dimensions, to sum over; None sums over all.

    Returns:
        An array with the shape of `x`.

    Example:
        >>> print(fc.special.log_softmax(np.zeros(1)))
        [0.]
    """
    return nn.log_softmax(x, axis)


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(globals(), {})
