"""Gamma variates, and distributions made of them. None has a gradient in its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.interpreter import bind
from ..errors import ShapeError
from ..ops.registry import as_traceable, is_traced
from ..primitives.randomness import log_gamma_p
from .continuous import broadcast_draw, float_dtypes
from .keys import shape_of_draw, split, usable

if TYPE_CHECKING:
    from jaxtyping import Float, UInt64

__all__ = ["beta", "dirichlet", "gamma", "loggamma"]

Shape = int | Sequence[int]


def gamma(key: UInt64[Any, "2"], a: Any, shape: Shape | None = None, dtype: Any = np.float32) -> Float[Any, "..."]:
    """Draw floats from the gamma distribution of shape parameter `a` and scale 1.

    They are exact, by rejection in float64. A gradient in `a` raises an error.

    Source: Marsaglia and Tsang, 2000.

    Args:
        key: A key, from `fc.random.key` or `split`.
        a: The shape parameter, positive. If a traced one is not positive, the result is NaN, or 0 for 0.
        shape: The shape of the result. `a` must broadcast to it. None takes the shape of `a`.
        dtype: The dtype of the result, a real float.

    Returns:
        An array of `dtype`.

    Raises:
        ShapeError: If `a` is known and not positive, or does not broadcast to `shape`.
        DTypeError: If `dtype` is not a real float.

    Example:
        >>> print(fc.random.gamma(fc.random.key(0), 2.0, (3,)).round(4))
        [2.1372 0.9632 1.5482]
    """
    return np.exp(_log_gamma(key, "gamma", shape, a=a)).astype(float_dtypes(dtype)[1])


def loggamma(key: UInt64[Any, "2"], a: Any, shape: Shape | None = None, dtype: Any = np.float32) -> Float[Any, "..."]:
    """Draw logarithms of gamma variates. For small `a` the variates of `gamma` themselves are too small for a float.

    Args:
        key: A key, from `fc.random.key` or `split`.
        a: The shape parameter, as in `gamma`.
        shape: The shape of the result. `a` must broadcast to it. None takes the shape of `a`.
        dtype: The dtype of the result, a real float.

    Returns:
        An array of `dtype`.

    Raises:
        ShapeError: If `a` is known and not positive, or does not broadcast to `shape`.
        DTypeError: If `dtype` is not a real float.

    Example:
        >>> print(fc.random.loggamma(fc.random.key(0), 1e-4, (2,)).round(1))
        [-20265.2 -40604.5]
    """
    return _log_gamma(key, "loggamma", shape, a=a).astype(float_dtypes(dtype)[1])


def beta(key: UInt64[Any, "2"], a: Any, b: Any, shape: Shape | None = None, dtype: Any = np.float32) -> Float[Any, "..."]:
    """Draw floats from the beta distribution of parameters `a` and `b`.

    Each is the part of one gamma variate in the sum of two: see `gamma`.

    Args:
        key: A key, from `fc.random.key` or `split`.
        a: The first parameter, positive.
        b: The second parameter, positive.
        shape: The shape of the result. Both parameters must broadcast to it. None takes their common shape.
        dtype: The dtype of the result, a real float.

    Returns:
        An array of `dtype`.

    Raises:
        ShapeError: If a parameter is known and not positive, or does not broadcast to `shape`.
        DTypeError: If `dtype` is not a real float.

    Example:
        >>> print(fc.random.beta(fc.random.key(0), 2.0, 3.0, (3,)).round(4))
        [0.5015 0.3651 0.5146]
    """
    first, second = split(key)
    a, b = as_traceable(a), as_traceable(b)
    shape = broadcast_draw("beta", shape, a=a, b=b)
    x, y = _log_gamma(first, "beta", shape, a=a), _log_gamma(second, "beta", shape, b=b)
    return np.exp(x - np.logaddexp(x, y)).astype(float_dtypes(dtype)[1])


def dirichlet(
    key: UInt64[Any, "2"], alpha: Float[Any, "*s n"], shape: Shape | None = None, dtype: Any = np.float32
) -> Float[Any, "... n"]:
    """Draw vectors of n floats that sum to 1, from the Dirichlet distribution.

    They are gamma variates divided by their sum: see `gamma`.

    Args:
        key: A key, from `fc.random.key` or `split`.
        alpha: The parameters, positive, of shape (..., n).
        shape: The leading dimensions of the result. Those of `alpha` must broadcast to them, and None takes those.
        dtype: The dtype of the result, a real float.

    Returns:
        An array of `dtype`, with the vectors along its last dimension.

    Raises:
        ShapeError: If a parameter is known and not positive, or shapes do not fit.
        DTypeError: If `dtype` is not a real float.

    Example:
        >>> print(fc.random.dirichlet(fc.random.key(0), np.ones(3)).round(4))
        [0.5328 0.1446 0.3226]
    """
    alpha = as_traceable(alpha)
    if not alpha.ndim or not alpha.shape[-1]:
        raise ShapeError(f"random.dirichlet: alpha has shape {tuple(alpha.shape)}; it needs a last dimension of 1 or more.")
    lead = tuple(alpha.shape[:-1]) if shape is None else shape_of_draw(shape)
    logs = _log_gamma(key, "dirichlet", (*lead, alpha.shape[-1]), alpha=alpha)
    powers = np.exp(logs - np.max(logs, axis=-1, keepdims=True))
    return (powers / np.sum(powers, axis=-1, keepdims=True)).astype(float_dtypes(dtype)[1])


def _log_gamma(key: Any, name: str, shape: Shape | None, **parameter: Any) -> Any:
    ((what, a),) = parameter.items()
    a = as_traceable(a)
    if not is_traced(a) and not np.all(a > 0):
        raise ShapeError(f"random.{name}: {what}={a} must be greater than 0.")
    found = broadcast_draw(name, shape, **{what: a})
    return bind(log_gamma_p, usable(key), np.broadcast_to(a.astype(np.float64), found))
