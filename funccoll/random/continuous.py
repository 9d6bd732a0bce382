"""Floats from distributions over the real line: elementwise functions of uniform words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.interpreter import bind
from ..core.types import bfloat16
from ..errors import DTypeError, ShapeError
from ..ops.registry import as_traceable, is_traced
from ..primitives.elementwise import broadcast_shapes, erf_p
from ..transforms.autodiff.custom_rules import custom_vjp
from .keys import bits, shape_of_draw

if TYPE_CHECKING:
    from jaxtyping import Float, UInt64

__all__ = [
    "broadcast_draw",
    "exponential",
    "float_dtypes",
    "gumbel",
    "laplace",
    "normal",
    "truncated_normal",
    "uniform",
    "unit",
]

Shape = int | Sequence[int]

# Binary digits of each float: a multiple of 2^-digits below 1 is not rounded up to 1.
DIGITS = {np.dtype(np.float64): 53, np.dtype(np.float32): 24, np.dtype(np.float16): 11, bfloat16: 8}


def unit(words: Any, dtype: np.dtype, digits: int) -> Any:
    """Return words as floats in [0, 1). Every value is a multiple of 2^-digits."""
    return (words >> np.uint64(64 - digits)).astype(dtype) * np.asarray(2.0**-digits, dtype)


def float_dtypes(dtype: Any) -> tuple[np.dtype, np.dtype]:
    """Return (dtype to compute in, dtype of the result)."""
    asked = np.dtype(dtype)
    if asked not in DIGITS:
        raise DTypeError(f"random: dtype must be a real float, not {asked}.")
    return (np.dtype(np.float64) if asked == np.float64 else np.dtype(np.float32)), asked


def broadcast_draw(name: str, shape: Shape | None, **parameters: Any) -> tuple[int, ...]:
    """Return the shape of a draw: the shape you ask for, or that of the parameters. Parameters must broadcast to it."""
    if shape is None:
        return broadcast_shapes(f"random.{name}", [tuple(p.shape) for p in parameters.values()])
    asked = shape_of_draw(shape)
    for what, p in parameters.items():
        if p.ndim > len(asked) or any(n not in (1, wanted) for n, wanted in zip(p.shape[::-1], asked[::-1], strict=False)):
            raise ShapeError(
                f"random.{name}: {what} of shape {tuple(p.shape)} does not broadcast to the shape {asked} that is drawn."
            )
    return asked


def uniform(
    key: UInt64[Any, "2"], shape: Shape = (), dtype: Any = np.float32, minval: Any = 0.0, maxval: Any = 1.0
) -> Float[Any, "..."]:
    """Draw uniform floats in [minval, maxval).

    Args:
        key: A key, from `fc.random.key` or `split`.
        shape: The shape of the result.
        dtype: The dtype of the result, a real float.
        minval: The least value, a scalar or an array that broadcasts to `shape`.
        maxval: The limit, greater than every value. It has the same form.

    Returns:
        An array of `shape` and `dtype`.

    Raises:
        DTypeError: If `dtype` is not a real float.

    Example:
        >>> print(fc.random.uniform(fc.random.key(0), (3,)).round(4))
        [0.0115 0.2415 0.1114]
    """
    compute, asked = float_dtypes(dtype)
    u = unit(bits(key, shape), compute, DIGITS[asked])
    if type(minval) is float and type(maxval) is float and (minval, maxval) == (0.0, 1.0):
        return u.astype(asked)
    low, high = as_traceable(minval).astype(compute), as_traceable(maxval).astype(compute)
    out, low, high = ((u * (high - low) + low).astype(asked), low.astype(asked), high.astype(asked))
    return np.where(out < high, out, low)  # the sum can round up to maxval


def normal(key: UInt64[Any, "2"], shape: Shape = (), dtype: Any = np.float32) -> Float[Any, "..."]:
    """Draw floats from the standard normal distribution.

    Source: Box and Muller, 1958.

    Args:
        key: A key, from `fc.random.key` or `split`.
        shape: The shape of the result.
        dtype: The dtype of the result, a real float.

    Returns:
        An array of `shape` and `dtype`.

    Raises:
        DTypeError: If `dtype` is not a real float.

    Example:
        >>> print(fc.random.normal(fc.random.key(0), (3,)).round(4))
        [-0.1401 -0.7435 -0.0839]
    """
    compute, asked = float_dtypes(dtype)
    words = bits(key, (2, *shape_of_draw(shape)))
    digits = DIGITS[compute]
    radius = np.sqrt(-2 * np.log(1 - unit(words[0], compute, digits)))  # 1 - u is in (0, 1]
    angle = np.asarray(2 * math.pi, compute) * unit(words[1], compute, digits)
    return (radius * np.cos(angle)).astype(asked)


def _waits(words: Any) -> Any:
    """Return words as exponential float64: -log(1 - u), and u is 0 with probability 2^-53. The lowest bit is unused."""
    return -np.log1p(-unit(words, np.dtype(np.float64), 53))


def exponential(key: UInt64[Any, "2"], shape: Shape = (), dtype: Any = np.float32) -> Float[Any, "..."]:
    """Draw floats from the exponential distribution of rate 1. Divide them by another rate to get that one.

    They are computed by inversion, in float64.

    Args:
        key: A key, from `fc.random.key` or `split`.
        shape: The shape of the result.
        dtype: The dtype of the result, a real float.

    Returns:
        An array of `shape` and `dtype`.

    Raises:
        DTypeError: If `dtype` is not a real float.

    Example:
        >>> print(fc.random.exponential(fc.random.key(0), (3,)).round(4))
        [0.0116 0.2765 0.1181]
    """
    return _waits(bits(key, shape)).astype(float_dtypes(dtype)[1])


def laplace(key: UInt64[Any, "2"], shape: Shape = (), dtype: Any = np.float32) -> Float[Any, "..."]:
    """Draw floats from the Laplace distribution of mean 0 and scale 1.

    They are exponential floats with a random sign, computed in float64.

    Args:
        key: A key, from `fc.random.key` or `split`.
        shape: The shape of the result.
        dtype: The dtype of the result, a real float.

    Returns:
        An array of `shape` and `dtype`.

    Raises:
        DTypeError: If `dtype` is not a real float.

    Example:
        >>> print(fc.random.laplace(fc.random.key(0), (3,)).round(4))
        [-0.0116  0.2765 -0.1181]
    """
    words = bits(key, shape)
    waits = _waits(words)
    return np.where((words & np.uint64(1)) == 0, waits, -waits).astype(float_dtypes(dtype)[1])


def gumbel(key: UInt64[Any, "2"], shape: Shape = (), dtype: Any = np.float32) -> Float[Any, "..."]:
    """Draw floats from the standard Gumbel distribution.

    They are -log of exponential floats, computed in float64, and at most 37.

    Args:
        key: A key, from `fc.random.key` or `split`.
        shape: The shape of the result.
        dtype: The dtype of the result, a real float.

    Returns:
        An array of `shape` and `dtype`.

    Raises:
        DTypeError: If `dtype` is not a real float.

    Example:
        >>> print(fc.random.gumbel(fc.random.key(0), (3,)).round(4))
        [4.4555 1.2856 2.1359]
    """
    # Half of the smallest step in place of 0 keeps the logarithm finite.
    waits = _waits(bits(key, shape))
    return -np.log(np.where(waits > 0, waits, 2.0**-54)).astype(float_dtypes(dtype)[1])


def truncated_normal(
    key: UInt64[Any, "2"], lower: Any, upper: Any, shape: Shape | None = None, dtype: Any = np.float32
) -> Float[Any, "..."]:
    """Draw floats from the standard normal distribution, limited to those between `lower` and `upper`.

    They are computed by inversion in float64, in the tail with less mass, so bounds may lie far out. If both lie beyond 37, on
    one side, all values are the bound nearer to 0. The bounds have gradients.

    Source: Wichura's AS 241, 1988, for the quantiles.

    Args:
        key: A key, from `fc.random.key` or `split`.
        lower: The least value. It may be infinite.
        upper: The greatest value. It may be infinite.
        shape: The shape of the result. Both bounds must broadcast to it. None takes the bounds' shape.
        dtype: The dtype of the result, a real float.

    Returns:
        An array of `dtype`. If traced bounds have lower >= upper, its values are one of them.

    Raises:
        ShapeError: If the bounds are known and not lower < upper, or do not broadcast to `shape`.
        DTypeError: If `dtype` is not a real float.

    Example:
        >>> print(fc.random.truncated_normal(fc.random.key(0), -1.0, 1.0, (3,)).round(4))
        [-0.9679 -0.4578 -0.7234]
    """
    low, high = (as_traceable(x).astype(np.float64) for x in (lower, upper))
    asked = float_dtypes(dtype)[1]
    shape = broadcast_draw("truncated_normal", shape, lower=low, upper=high)
    if not is_traced(low) and not is_traced(high) and not np.all(low < high):
        raise ShapeError(f"random.truncated_normal: lower={lower!r} must be less than upper={upper!r}.")
    flip = low > 0  # in the lower tail a probability keeps its digits
    near = np.where(flip, -low, high)
    a, b = _normal_cdf(np.where(flip, -high, low)), _normal_cdf(near)
    p = a + (b - a) * unit(bits(key, shape), np.dtype(np.float64), 53)
    x = np.where(b > 0, _normal_quantile(p), near)
    x = np.where(flip, -x, x)
    return np.maximum(np.minimum(x, high), low).astype(asked)


def _density(x: Any) -> Any:
    return np.exp(-0.5 * np.square(x)) * (1 / math.sqrt(2 * math.pi))


@custom_vjp
def _normal_cdf(x: Any) -> Any:
    """Return Φ(x) in float64, with a small relative error also in the lower tail.

    The tail takes 20 steps of Laplace's continued fraction.
    """
    far = np.maximum(-x, 4.0)
    finite = np.where(np.isinf(far), 4.0, far)  # inf / inf is NaN
    fraction = reduce(lambda below, k: finite + k / below, range(20, 0, -1), finite)
    near = 0.5 * (1 + bind(erf_p, np.maximum(x, -4.0) * math.sqrt(0.5)))
    return np.where(x < -4, np.where(np.isinf(far), 0.0, _density(far) / fraction), near)


_normal_cdf.defvjp(lambda x: (_normal_cdf(x), x), lambda x, ct: (ct * _density(x),))

# Coefficients of Wichura's rational functions, the highest power first: numerators and denominators.
# fmt: off
_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457, 13731.693765509461125,
     1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852545925, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867, 5394.1960214247511077,
     687.1870074920579083, 42.313330701600911252, 1.0),
)
# fmt: on
# fmt: off
_MIDDLE = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258, 3.64784832476320460504,
     5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
     0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)
# fmt: on
# fmt: off
_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.026532189526576123093,
     0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
     0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769, 1.0),
)
# fmt: on


def _quotient(x: Any, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Any:
    above, below = (reduce(lambda sum, c: sum * x + c, each[1:], each[0]) for each in coefficients)
    return above / below


@custom_vjp
def _normal_quantile(p: Any) -> Any:
    """Return the x with Φ(x) = p, in float64, to 16 digits: -inf at 0 and inf at 1. Source: Wichura's AS 241, 1988."""
    q = p - 0.5
    tail = np.where(q < 0, p, 1 - p)
    r = np.sqrt(-np.log(np.where(tail > 0, tail, 0.5)))
    far = np.where(r <= 5, _quotient(r - 1.6, _MIDDLE), _quotient(r - 5, _TAIL))
    far = np.where(tail > 0, far, np.inf)
    return np.where(np.abs(q) <= 0.425, q * _quotient(0.180625 - q * q, _CENTRE), np.where(q < 0, -far, far))


def _quantile_forward(p: Any) -> tuple[Any, Any]:
    x = _normal_quantile(p)
    return x, x


_normal_quantile.defvjp(_quantile_forward, lambda x, ct: (ct / _density(x),))
