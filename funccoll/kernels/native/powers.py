"""Powers, logarithms to other bases, roots, and hyperbolic functions, from the functions of `elementary`.

Float32 is computed in float64, and rounded once: these functions are rare, and so one form of each suffices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from .elementary import (
    clamp,
    exp,
    exp_parts,
    expm1,
    exponent_number,
    format_of,
    fraction_and_exponent,
    log,
    log1p,
    nearest,
    polynomial,
    scaled,
    sum_of_log,
    with_log_specials,
)
from .ir_text import Value

__all__ = [
    "LOG_ADD_ULP",
    "ULP",
    "arccosh",
    "arcsinh",
    "arctanh",
    "cbrt",
    "cosh",
    "exp2",
    "hypot",
    "in_double",
    "log2",
    "log10",
    "logaddexp",
    "logaddexp2",
    "power",
    "sinh",
]

_INFINITY, _NAN = float("inf"), float("nan")
_LN2 = float.fromhex("0x1.62e42fefa39efp-1")
_LOG2_E = float.fromhex("0x1.71547652b82fep+0"), float.fromhex("0x1.777d0ffda0d24p-56")
_LOG10_E = float.fromhex("0x1.bcb7b1526e50ep-2"), float.fromhex("0x1.95355baaafad3p-57")
_LOG10_2 = float.fromhex("0x1.34413509f7000p-2"), float.fromhex("0x1.3fde623e2566bp-43")
"""The product of the first part and any exponent is exact."""
_TWO_THIRDS = float.fromhex("0x1.5555555555555p-1"), float.fromhex("0x1.5555555555555p-55")
# log(1 + f) = 2s + 2/3 s z + s z² LOG(z) with s = f / (2 + f) and z = s²
_LOG = (
    "0x1.9999999999967p-2", "0x1.2492492498e18p-2", "0x1.c71c71bc6819ep-3", "0x1.745d1bc784d91p-3", "0x1.3b12984c9c536p-3",
    "0x1.113a18019cfb1p-3", "0x1.dad0b9353ff20p-4", "0x1.017bebbbc88b0p-3",
)  # fmt: skip

ULP = {
    "arccosh": 2.2,
    "arcsinh": 1.9,
    "arctanh": 2.0,
    "cbrt": 0.7,
    "cosh": 1.6,
    "exp2": 1.1,
    "hypot": 0.8,
    "log2": 1.05,
    "log10": 1.2,
    "power": 1.25,
    "sinh": 2.2,
}
"""Function -> a bound of its error for float64, in units in the last place. Float32 has 0.51.

Of `logaddexp`, the unit is that of the greater operand or of 0.7, and the bound is `LOG_ADD_ULP`."""
LOG_ADD_ULP = 3.0


def in_double(function: Callable[..., Value]) -> Callable[..., Value]:
    """Return a function that computes float32 in float64."""

    @functools.wraps(function)
    def wider(*operands: Value) -> Value:
        if operands[0].kind == "double":
            return function(*operands)
        return function(*(x.convert("fpext", "double") for x in operands)).convert("fptrunc", "float")

    return wider


@in_double
def exp2(x: Value) -> Value:
    """Return 2^x, exactly for integers."""
    bounded = clamp(x, -1080.0, 1030.0)
    n, exponent = nearest(bounded, 1.0, 2)
    r = (bounded - n) * _LN2
    return scaled((r * r).fma(polynomial(r, format_of(x).exp), r) + 1.0, exponent)


def _log_of_base(x: Value, factor: tuple[float, float], of_two: tuple[float, float]) -> Value:
    """Return log(x) times a factor. `of_two`: the logarithm of 2 to this base."""
    f, exponent = fraction_and_exponent(x)
    whole, rest = sum_of_log(f, exponent.like(0))
    high = whole * factor[0]
    low = whole.fma(factor[0], -high) + rest.fma(factor[0], whole * factor[1])
    k = exponent_number(exponent, x)
    part = k * of_two[0]  # exact
    total = part + high
    return with_log_specials(x, total + (k.fma(of_two[1], high - (total - part)) + low))


@in_double
def log2(x: Value) -> Value:
    """Return the logarithm to base 2, exactly for powers of 2."""
    return _log_of_base(x, _LOG2_E, (1.0, 0.0))


@in_double
def log10(x: Value) -> Value:
    """Return the logarithm to base 10."""
    return _log_of_base(x, _LOG10_E, _LOG10_2)


def power(x: Value, y: Value) -> Value:
    """Return x^y, with the special values of C's `pow`."""
    if x.kind == "float":
        return _power(x.convert("fpext", "double"), y.convert("fpext", "double"), wide=False).convert("fptrunc", "float")
    return _power(x, y, wide=True)


def _power(x: Value, y: Value, wide: bool) -> Value:
    """Return x^y. `wide`: with more bits than float64 has, of which a large exponent takes some."""
    a = x.abs()
    size = _power_of_positive(a, y) if wide else exp(y * log(a))
    whole, half = y.call("trunc"), y * 0.5
    integer = whole.compare("oeq", y)
    even = half.call("trunc").compare("oeq", half)
    invalid = (x < 0.0) & (a < _INFINITY) & whole.compare("une", y) | x.compare("uno", y)
    negative = (x.bits() < 0) & integer & ~even
    result = negative.choose(-size, size)
    result = invalid.choose(x.like(_NAN), result)
    one = y.compare("oeq", 0.0) | x.compare("oeq", 1.0) | (a.compare("oeq", 1.0) & y.abs().compare("oeq", _INFINITY))
    return one.choose(x.like(1.0), result)


def _power_of_positive(a: Value, y: Value) -> Value:
    """Return a^y for numbers above 0, with log(a) as a sum of two floats. Other numbers give what their logarithm does."""
    high, low = _wide_log(a)
    high = with_log_specials(a, high)
    product = y * high
    rest = y.fma(high, -product) + y * low
    rest = (product.abs() < 800.0).choose(rest, rest.like(0.0))
    bounded = clamp(product, *format_of(a).exp_range)
    n, exponent = nearest(bounded, _LOG2_E[0], 2)
    ln2_high, ln2_low = map(float.fromhex, format_of(a).ln2)
    exact = n.fma(-ln2_high, bounded)
    r = n.fma(-ln2_low, exact)
    rest = rest + n.fma(-ln2_low, exact - r)
    total = r + 1.0
    curve = (r * r) * polynomial(r, format_of(a).exp)
    return scaled(total + (curve + rest.fma(total + curve, r - (total - 1.0))), exponent)


def _wide_log(x: Value) -> tuple[Value, Value]:
    """Return log(x) as a sum of two floats, with an error of 2^-65 of it, for positive numbers."""
    f, exponent = fraction_and_exponent(x)
    d = f + 2.0
    s = f / d
    s_low = (s.fma(-d, f) - s * (f - (d - 2.0))) / d
    z = s * s
    z_low = s.fma(s, -z) + (s + s) * s_low
    cube = z * _TWO_THIRDS[0]
    cube_low = z.fma(_TWO_THIRDS[0], -cube) + z_low.fma(_TWO_THIRDS[0], z * _TWO_THIRDS[1])
    more = (z * z) * polynomial(z, _LOG)
    p = cube + more
    p_low = cube_low + (more - (p - cube))
    v = s * p
    v_low = s.fma(p, -v) + s.fma(p_low, s_low * p)
    twice = s + s
    total = twice + v
    low = (v - (total - twice)) + (s_low + s_low + v_low)
    k = exponent_number(exponent, x)
    ln2_high, ln2_low = map(float.fromhex, format_of(x).ln2)
    part = k * ln2_high  # exact
    high = part + total
    low = k.fma(ln2_low, (total - (high - part)) + low)
    result = high + low
    return result, low - (result - high)


@in_double
def cbrt(x: Value) -> Value:
    """Return the cube root."""
    a = x.abs()
    tiny = a < format_of(x).least_normal
    normal = tiny.choose(a * 2.0**54, a)
    y = exp(log(normal) * (1 / 3))
    square = y * y
    lost = y.fma(y, -square)
    off = y.fma(-square, normal) - lost * y  # one step of Newton's
    y = y + off / (square * 3.0)
    y = tiny.choose(y * 2.0**-18, y)
    finite = (a > 0.0) & (a < _INFINITY)
    return finite.choose(y.with_sign_of(x), x)


@in_double
def hypot(x: Value, y: Value) -> Value:
    """Return the length of (x, y)."""
    a, b = x.abs(), y.abs()
    long = (a > b).choose(a, b)
    short = (a > b).choose(b, a)
    one = x.like(1.0)
    scale = (long > 2.0**500).choose(x.like(2.0**-600), (long < 2.0**-450).choose(x.like(2.0**600), one))
    back = (long > 2.0**500).choose(x.like(2.0**600), (long < 2.0**-450).choose(x.like(2.0**-600), one))
    u, v = long * scale, short * scale
    square = u * u
    lost = v.fma(v, u.fma(u, -square))
    total = square + lost
    root = total.call("sqrt")
    off = root.fma(-root, square) + lost
    root = (total > 0.0).choose(root + off / (root + root), root)
    infinite = a.compare("oeq", _INFINITY) | b.compare("oeq", _INFINITY)
    result = infinite.choose(x.like(_INFINITY), root * back)
    return (x.compare("uno", y) & ~infinite).choose(x.like(_NAN), result)


def _log_add(x: Value, y: Value, of_two: float, grow: Callable[[Value], Value], log_of: Callable[[Value], Value]) -> Value:
    gap = x - y
    top = (gap > 0.0).choose(x, y)
    result = top + log_of(grow(-gap.abs()))
    return x.compare("oeq", y).choose(x + of_two, gap.compare("uno", gap).choose(gap, result))


def logaddexp(x: Value, y: Value) -> Value:
    """Return log(e^x + e^y)."""
    return _log_add(x, y, math.log(2), exp, log1p)


def logaddexp2(x: Value, y: Value) -> Value:
    """Return the logarithm to base 2 of 2^x + 2^y."""
    return _log_add(x, y, 1.0, exp2, lambda t: log1p(t) * _LOG2_E[0])


def _half_exp(x: Value) -> Value:
    """Return e^x / 2."""
    result, exponent = exp_parts(clamp(x, -746.0, 711.0), 2)
    return scaled(result, exponent - 1)


@in_double
def sinh(x: Value) -> Value:
    """Return the hyperbolic sine."""
    a = x.abs()
    e = expm1((a > 30.0).choose(a.like(30.0), a))
    small = (e + e / (e + 1.0)) * 0.5
    return (a > 22.0).choose(_half_exp(a), small).with_sign_of(x)


@in_double
def cosh(x: Value) -> Value:
    """Return the hyperbolic cosine."""
    half = _half_exp(x.abs())
    return half + 0.25 / half


@in_double
def arcsinh(x: Value) -> Value:
    """Return the inverse of sinh."""
    a = x.abs()
    square = a * a
    small = log1p(a + square / ((square + 1.0).call("sqrt") + 1.0))
    return (a > 2.0**28).choose(log(a) + _LN2, small).with_sign_of(x)


@in_double
def arccosh(x: Value) -> Value:
    """Return the inverse of cosh."""
    t = x - 1.0
    small = log1p(t + t.fma(t, t + t).call("sqrt"))
    result = (x > 2.0**28).choose(log(x) + _LN2, small)
    return (x < 1.0).choose(x.like(_NAN), result)


@in_double
def arctanh(x: Value) -> Value:
    """Return the inverse of tanh."""
    a = x.abs()
    return (log1p((a + a) / (1.0 - a)) * 0.5).with_sign_of(x)
