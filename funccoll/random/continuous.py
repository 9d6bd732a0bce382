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
    """Words as floats in [0, 1), every value a multiple of 2^-digits."""
    return (words >> np.uint64(64 - digits)).astype(dtype) * np.asarray(2.0**-digits, dtype)


def float_dtypes(dtype: Any) -> tuple[np.dtype, np.dtype]:
    """(dtype to compute in, dtype of the result)."""
    asked = np.dtype(dtype)
    if asked not in DIGITS:
        raise DTypeError(f"random: dtype must be a real float, not {asked}.")
    return (np.dtype(np.float64) if asked == np.float64 else np.dtype(np.float32)), asked


def broadcast_draw(name: str, shape: Shape | None, **parameters: Any) -> tuple[int, ...]:
    """The shape of a draw: what is asked for, or that of the parameters, which must broadcast to it."""
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
    """Uniform floats in [minval, maxval), of `shape` and `dtype`."""
    compute, asked = float_dtypes(dtype)
    u = unit(bits(key, shape), compute, DIGITS[asked])
    if type(minval) is float and type(maxval) is float and (minval, maxval) == (0.0, 1.0):
        return u.astype(asked)
    low, high = as_traceable(minval).astype(compute), as_traceable(maxval).astype(compute)
    out, low, high = ((u * (high - low) + low).astype(asked), low.astype(asked), high.astype(asked))
    return np.where(out < high, out, low)  # the sum can round up to maxval


def normal(key: UInt64[Any, "2"], shape: Shape = (), dtype: Any = np.float32) -> Float[Any, "..."]:
    """Standard normal floats of `shape` and `dtype`. Source: Box and Muller, 1958."""
    compute, asked = float_dtypes(dtype)
    words = bits(key, (2, *shape_of_draw(shape)))
    digits = DIGITS[compute]
    radius = np.sqrt(-2 * np.log(1 - unit(words[0], compute, digits)))  # 1 - u is in (0, 1]
    angle = np.asarray(2 * math.pi, compute) * unit(words[1], compute, digits)
    return (radius * np.cos(angle)).astype(asked)


def _waits(words: Any) -> Any:
    """Words as exponential float64, the lowest bit unused: -log(1 - u), where u is 0 with probability 2^-53."""
    return -np.log1p(-unit(words, np.dtype(np.float64), 53))


def exponential(key: UInt64[Any, "2"], shape: Shape = (), dtype: Any = np.float32) -> Float[Any, "..."]:
    """Exponential floats of rate 1, of `shape` and `dtype`; divide them by a rate for another. By inversion, in float64."""
    return _waits(bits(key, shape)).astype(float_dtypes(dtype)[1])


def laplace(key: UInt64[Any, "2"], shape: Shape = (), dtype: Any = np.float32) -> Float[Any, "..."]:
    """Laplace floats of mean 0 and scale 1, of `shape` and `dtype`: exponential ones with a random sign. In float64."""
    words = bits(key, shape)
    waits = _waits(words)
    return np.where((words & np.uint64(1)) == 0, waits, -waits).astype(float_dtypes(dtype)[1])


def gumbel(key: UInt64[Any, "2"], shape: Shape = (), dtype: Any = np.float32) -> Float[Any, "..."]:
    """Standard Gumbel floats of `shape` and `dtype`, -log of exponential ones. In float64; at most 37."""
    # At 0 half of the smallest step: so the logarithm is finite.
    waits = _waits(bits(key, shape))
    return -np.log(np.where(waits > 0, waits, 2.0**-54)).astype(float_dtypes(dtype)[1])


def truncated_normal(
    key: UInt64[Any, "2"], lower: Any, upper: Any, shape: Shape | None = None, dtype: Any = np.float32
) -> Float[Any, "..."]:
    """Standard normal floats between `lower` and `upper`, of `dtype`; `shape` defaults to theirs, which must broadcast to it.

    By inversion in float64, in the tail that holds less: so bounds may lie far out, up to 37, beyond which all values are the
    bound that is nearer to 0. Bounds may be infinite, and have gradients; where lower >= upper (an error where both are known)
    the result is one of them.
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
    """Φ(x) of float64, with a small relative error also in the lower tail, by 20 steps of Laplace's continued fraction."""
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
    """The x with Φ(x) = p, of float64, to 16 digits; -inf at 0 and inf at 1. Source: Wichura's AS 241, 1988."""
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
