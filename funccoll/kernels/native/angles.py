"""The tangent and the inverse trigonometric functions. As in `powers`, float32 is computed in float64."""

from __future__ import annotations

import math

from .elementary import polynomial, reduced_angle, sine_and_cosine
from .ir_text import Value
from .powers import in_double

__all__ = ["ULP", "arccos", "arcsin", "arctan", "arctan2", "tan"]

# fmt: off
# arctan(t) = t + t³ ARCTAN(t²), |t| <= tan(π/8)
_ARCTAN = (
    "-0x1.555555555553dp-2", "0x1.9999999995880p-3", "-0x1.24924922ae70ap-3", "0x1.c71c70e6ad046p-4", "-0x1.745cf8f294f9ap-4",
    "0x1.3b111ae0c51dfp-4", "-0x1.10ebce3c875d0p-4", "0x1.df109e511f3ccp-5", "-0x1.9cd8f39e49f73p-5", "0x1.37e5ddf929a92p-5",
    "-0x1.258e89d919a7bp-6",
)
# arcsin(t) = t + t³ ARCSIN(t²), |t| <= 1/2
_ARCSIN = (
    "0x1.5555555555577p-3", "0x1.333333332dff0p-4", "0x1.6db6db72237b9p-5", "0x1.f1c71a8e21a64p-6", "0x1.6e8bdfa515fdbp-6",
    "0x1.1c49e27d5413cp-6", "0x1.ca20d82123958p-7", "0x1.757b15a61b850p-7", "0x1.61765829919d5p-7", "0x1.e29926694f485p-9",
    "0x1.649e2819821c6p-6", "-0x1.5964a791ed9efp-6", "0x1.0bb55dd6e3552p-5",
)
# fmt: on
_TAN_OF_EIGHTH = math.sqrt(2) - 1
_PI = math.pi, float.fromhex("0x1.1a62633145c07p-53")
_INFINITY = float("inf")

ULP = {"arccos": 0.7, "arcsin": 0.7, "arctan": 0.7, "arctan2": 0.8, "tan": 2.3}
"""Function -> a bound of its error for float64, in units in the last place. Float32 has 0.51."""


@in_double
def tan(x: Value) -> Value:
    """Return the tangent of an angle in radians."""
    r, rest, quadrant = reduced_angle(x)
    sine, cosine = sine_and_cosine(r, rest)
    odd = (quadrant & 1).compare("ne", 0)
    result = odd.choose(-cosine, sine) / odd.choose(sine, cosine)
    return x.compare("oeq", 0.0).choose(x, result)


def _arctan_of_ratio(short: Value, long: Value) -> tuple[Value, Value]:
    """Return arctan(short / long) as a sum of two, for 0 <= short <= long."""
    turned = short > long * _TAN_OF_EIGHTH
    difference, total = short - long, short + long
    lost, lost_total = short - (difference + long), short - (total - long)
    top, bottom = turned.choose(difference, short), turned.choose(total, long)
    t = top / bottom
    zero = t.like(0.0)
    rest = t.fma(-bottom, top) + turned.choose(t.fma(-lost_total, lost), zero)
    t_low = rest / bottom
    s = t * t
    curve = (t * s).fma(polynomial(s, _ARCTAN), t_low)
    first = turned.choose(t.like(_PI[0] / 4), zero)
    whole = first + t
    return whole, curve + ((t - (whole - first)) + turned.choose(t.like(_PI[1] / 4), zero))


@in_double
def arctan2(y: Value, x: Value) -> Value:
    """Return the angle of (x, y), as C's `atan2` does."""
    a, b = x.abs(), y.abs()
    infinite = a.compare("oeq", _INFINITY) & b.compare("oeq", _INFINITY)
    a, b = infinite.choose(x.like(1.0), a), infinite.choose(x.like(1.0), b)
    steep = b > a
    long, short = steep.choose(b, a), steep.choose(a, b)
    scale = (long > 2.0**1000).choose(x.like(2.0**-60), (long < 2.0**-900).choose(x.like(2.0**120), 1.0))
    long, short = long * scale, short * scale
    flat = long.compare("oeq", _INFINITY) | long.compare("oeq", 0.0)
    high, low = _arctan_of_ratio(flat.choose(x.like(0.0), short), flat.choose(x.like(1.0), long))
    high, low = _subtracted(steep, 0.5, high, low)
    high, low = _subtracted(x.bits() < 0, 1.0, high, low)
    return x.compare("uno", y).choose(x + y, (high + low).with_sign_of(y))


def _subtracted(chosen: Value, halves: float, high: Value, low: Value) -> tuple[Value, Value]:
    """Return a part of π minus high + low where `chosen` holds. The part is at least as large."""
    part = _PI[0] * halves
    total = part - high
    rest = ((part - total) - high) - low + _PI[1] * halves
    return chosen.choose(total, high), chosen.choose(rest, low)


@in_double
def arctan(x: Value) -> Value:
    """Return the inverse of tan, from -π/2 to π/2."""
    a = x.abs()
    steep = a > 1.0
    infinite = a.compare("oeq", _INFINITY)
    one = x.like(1.0)
    short = infinite.choose(x.like(0.0), steep.choose(one, a))
    long = infinite.choose(one, steep.choose(a, one))
    high, low = _subtracted(steep, 0.5, *_arctan_of_ratio(short, long))
    return (a < 2.0**-30).choose(x, (high + low).with_sign_of(x))


def _arcsin_parts(x: Value) -> tuple[Value, Value, Value]:
    """Return (t, rest, far): arcsin(|x|) is t + rest, or where `far` holds π/2 - 2 (t + rest)."""
    a = x.abs()
    far = a > 0.5
    square = far.choose((1.0 - a) * 0.5, a * a)
    root = square.call("sqrt")
    off = (root > 0.0).choose(root.fma(-root, square) / (root + root), root)
    t = far.choose(root, a)
    return t, (t * square).fma(polynomial(square, _ARCSIN), far.choose(off, 0.0)), far


@in_double
def arcsin(x: Value) -> Value:
    """Return the inverse of sin, from -π/2 to π/2."""
    t, rest, far = _arcsin_parts(x)
    high, low = _subtracted(far, 0.5, far.choose(t + t, t), far.choose(rest + rest, rest))
    result = (high + low).with_sign_of(x)
    return (x.abs() < 2.0**-30).choose(x, result)


@in_double
def arccos(x: Value) -> Value:
    """Return the inverse of cos, from 0 to π."""
    t, rest, far = _arcsin_parts(x)
    negative = x < 0.0
    high, low = far.choose(t + t, negative.choose(-t, t)), far.choose(rest + rest, negative.choose(-rest, rest))
    high, low = _subtracted(~far, 0.5, high, low)
    high, low = _subtracted(far & negative, 1.0, high, low)
    return high + low
