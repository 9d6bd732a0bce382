"""Gamma variates, and what is made of them. None has a gradient in its parameters."""

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
    """Gamma floats of shape parameter `a` > 0 and scale 1, of `dtype`; `shape` defaults to a's, which must broadcast to it.

    Exact, by rejection, in float64. A parameter that is not positive is an error where it is known, else the result is NaN (0
    for 0). A gradient in `a` is refused. Source: Marsaglia and Tsang, 2000.
    """
    return np.exp(_log_gamma(key, "gamma", shape, a=a)).astype(float_dtypes(dtype)[1])


def loggamma(key: UInt64[Any, "2"], a: Any, shape: Shape | None = None, dtype: Any = np.float32) -> Float[Any, "..."]:
    """Logarithms of what `gamma` gives, which for small `a` are too small for a float."""
    return _log_gamma(key, "loggamma", shape, a=a).astype(float_dtypes(dtype)[1])


def beta(key: UInt64[Any, "2"], a: Any, b: Any, shape: Shape | None = None, dtype: Any = np.float32) -> Float[Any, "..."]:
    """Beta floats of parameters `a` and `b` > 0, of `dtype`; `shape` defaults to theirs, which must broadcast to it.

    The part of one gamma variate in the sum of two: see `gamma`.
    """
    first, second = split(key)
    a, b = as_traceable(a), as_traceable(b)
    shape = broadcast_draw("beta", shape, a=a, b=b)
    x, y = _log_gamma(first, "beta", shape, a=a), _log_gamma(second, "beta", shape, b=b)
    return np.exp(x - np.logaddexp(x, y)).astype(float_dtypes(dtype)[1])


def dirichlet(
    key: UInt64[Any, "2"], alpha: Float[Any, "*s n"], shape: Shape | None = None, dtype: Any = np.float32
) -> Float[Any, "... n"]:
    """Vectors of n floats that sum to 1, with the parameters `alpha` > 0, along the last dimension, of `dtype`.

    `shape` is that of the vectors, and defaults to alpha's leading dimensions, which must broadcast to it. Gamma variates
    divided by their sum: see `gamma`.
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
