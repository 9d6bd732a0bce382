"""Elementary functions of float32 vectors, as polynomials with explicit fused multiply-adds.

Each has one result for each input, on every processor. They are right for NaN, infinities, zeros of both signs, subnormal
numbers, and results that overflow or underflow. Bounds of their errors are in `ULP`, and tests measure them.

A branch costs more than what it saves, because lanes differ. So each function computes all its cases, and chooses by lanes.
Only large angles are reduced lane by lane, by the method of Payne and Hanek (1983).

The coefficients are weighted minimax fits, rounded to float32 one after the other, from the lowest power on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from .ir_text import KernelText, Value, bits_of_double

__all__ = ["FUNCTIONS", "ULP", "cos", "erf", "exp", "expm1", "log", "log1p", "reciprocal", "sigmoid", "sin", "sqrt", "tanh"]

_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e400p-1"), float.fromhex("0x1.7f7d1cp-20")
"""ln 2 in two parts. The product of the first with any exponent is exact."""
_LOG2_E = float.fromhex("0x1.715476p+0")
_ROUND = 1.5 * 2.0**23
"""A number whose sum with a small one is an integer in the last bits."""
_HIDDEN = 0x4B400000
"""Its bits."""
_INFINITY, _NAN = float("inf"), float("nan")
_LEAST_NORMAL = 2.0**-126

# exp(r) = 1 + r + r² EXP(r), |r| <= ln 2 / 2
_EXP = "0x1.fffffcp-2", "0x1.555490p-3", "0x1.5558a8p-5", "0x1.123b10p-7", "0x1.6a58e8p-10"
# log(1 + f) = f + f² LOG(f), |f| <= 1/3
_LOG = (
    "-0x1p-1", "0x1.555504p-2", "-0x1.fffefep-3", "0x1.99d12ep-3", "-0x1.559bb0p-3", "0x1.1ec76ap-3", "-0x1.f34570p-4",
    "0x1.1eb14ap-3", "-0x1.079f0cp-3",
)  # fmt: skip
# tanh(x) = x + x³ TANH(x²), |x| < 0.625
_TANH = "-0x1.555554p-2", "0x1.11107ap-3", "-0x1.b9f194p-5", "0x1.63a66ap-6", "-0x1.0c670ap-7", "0x1.1a4f84p-9"
# erf(x) = x + x ERF(x²), |x| < 0.9277; 1 - exp(-x - x ERF_TAIL(x)) up to 4
_ERF = (
    "0x1.06eba8p-3", "-0x1.812742p-2", "0x1.ce2deep-4", "-0x1.b80d1ep-6", "0x1.54be64p-8", "-0x1.aa0342p-11", "0x1.5c4738p-14",
)  # fmt: skip
_ERF_TAIL = "0x1.0732fcp-3", "0x1.457c7ep-1", "0x1.af2b0ap-4", "-0x1.7711b6p-6", "0x1.a57d7ep-9", "-0x1.c0f380p-13"
# sin(r) = r + r³ SIN(r²), cos(r) = 1 + r² COS(r²), |r| <= π/4
_SIN = "-0x1.555556p-3", "0x1.111170p-7", "-0x1.a0543ap-13", "0x1.7ab978p-19"
_COS = "-0x1p-1", "0x1.55554ap-5", "-0x1.6c0c26p-10", "0x1.99e71cp-16"
_HALF_PI = float.fromhex("0x1.921fb6p+0"), float.fromhex("-0x1.777a5cp-25"), float.fromhex("-0x1.ee59dap-50")
_SMALL_ANGLE = 3e4
"""Up to here three parts of π/2 suffice for the reduction."""


def _polynomial(x: Value, coefficients: Sequence[str]) -> Value:
    """Return the sum of c[k] x^k, by Horner's rule."""
    *lower, last = map(float.fromhex, coefficients)
    result = x.kernel.constant(x.kind, last)
    for c in reversed(lower):
        result = result.fma(x, c)
    return result


def _power_of_two(n: Value) -> Value:
    """Return 2^n for integers with -127 < n < 128."""
    return ((n + 127) << 23).as_floats()


def _clamp(x: Value, low: float, high: float) -> Value:
    """Return x between two bounds; NaN stays NaN."""
    x = (x < low).choose(x.like(low), x)
    return (x > high).choose(x.like(high), x)


def _nearest(x: Value, factor: float) -> tuple[Value, Value]:
    """Return the integers nearest to x * factor, as floats and as integers. For |x * factor| < 2^22."""
    shifted = x.fma(factor, _ROUND)
    return shifted - _ROUND, shifted.bits() - _HIDDEN


def _exp_parts(x: Value) -> tuple[Value, Value]:
    """Return (p, n) with e^x = p 2^n, n integers."""
    n, exponent = _nearest(x, _LOG2_E)
    r = n.fma(-_LN2_LOW, n.fma(-_LN2_HIGH, x))
    return (r * r).fma(_polynomial(r, _EXP), r) + 1.0, exponent


def exp(x: Value) -> Value:
    """Return e^x."""
    power, exponent = _exp_parts(_clamp(x, -104.0, 89.0))  # beyond, the result is 0 or infinity
    half = exponent >> 1  # in two steps: 2^128 and 2^-150 are not normal numbers, and only the second step rounds
    return power * _power_of_two(half) * _power_of_two(exponent - half)


def _exp_of_small(x: Value) -> Value:
    """Return e^x for |x| < 87."""
    power, exponent = _exp_parts(x)
    return power * _power_of_two(exponent)


def expm1(x: Value) -> Value:
    """Return e^x - 1, accurate near 0."""
    bounded = _clamp(x, -20.0, 89.0)
    n, exponent = _nearest(bounded, _LOG2_E)
    high = n.fma(-_LN2_HIGH, bounded)  # exact
    r = n.fma(-_LN2_LOW, high)
    rest = n.fma(-_LN2_LOW, high - r)
    tail = (r * r).fma(_polynomial(r, _EXP), rest)  # e^r - 1 = r + tail
    scale = _power_of_two(exponent - 1)  # half of it: 2^128 is not a float
    offset = scale - 0.5
    total = scale.fma(r, offset)
    lost = scale.fma(r, offset - total)
    result = (total + scale.fma(tail, lost)) * 2.0
    return (x.abs() < 2.0**-25).choose(x, result)


def _log(f: Value, k: Value) -> Value:
    """Return log(1 + f) + k ln 2, for |f| <= 1/3 and floats k that are integers. If k is not 0, |k ln 2| is more than |f|."""
    whole = k * _LN2_HIGH  # exact
    total = whole + f
    lost = f - (total - whole)
    return total + (f * f).fma(_polynomial(f, _LOG), k.fma(_LN2_LOW, lost))


def log(x: Value) -> Value:
    """Return the natural logarithm."""
    tiny = x < _LEAST_NORMAL
    scaled = tiny.choose(x * 2.0**23, x)
    bits = scaled.bits()
    exponent = (bits - 0x3F2AAAAB) & -0x800000  # of 2^k: scaled / 2^k is in [2/3, 4/3)
    f = (bits - exponent).as_floats() - 1.0
    k = exponent.convert("sitofp", "float") * 2.0**-23 + tiny.choose(x.like(-23.0), 0.0)
    result = _log(f, k)
    result = (x < _INFINITY).choose(result, x)  # infinity and NaN are their own logarithms
    result = x.compare("olt", 0.0).choose(x.like(_NAN), result)
    return x.compare("oeq", 0.0).choose(x.like(-_INFINITY), result)


def log1p(x: Value) -> Value:
    """Return log(1 + x), accurate near 0."""
    exponent = ((x + 1.0).bits() - 0x3F2AAAAB) & -0x800000
    scaled = (x.bits() - exponent).as_floats()  # x / 2^k
    four = (0x40800000 - exponent).as_floats()  # 4 / 2^k, which is a normal number for all k
    f = scaled + four.fma(0.25, -1.0)
    result = _log(f, exponent.convert("sitofp", "float") * 2.0**-23)
    result = (x < _INFINITY).choose(result, x)
    result = (x < -1.0).choose(x.like(_NAN), result)
    result = x.compare("oeq", -1.0).choose(x.like(-_INFINITY), result)
    return (x.abs() < 2.0**-25).choose(x, result)


def tanh(x: Value) -> Value:
    """Return the hyperbolic tangent."""
    a, s = x.abs(), x * x
    small = (x * s).fma(_polynomial(s, _TANH), x)
    bounded = (a > 10.0).choose(a.like(10.0), a)  # there the result is 1
    large = 1.0 - 2.0 / (_exp_of_small(bounded + bounded) + 1.0)
    return (a < 0.625).choose(small, large).with_sign_of(x)


def erf(x: Value) -> Value:
    """Return the error function."""
    a = x.abs()
    a = (a > 4.0).choose(a.like(4.0), a)  # there the result is 1
    s = a * a
    small = x.fma(_polynomial(s, _ERF), x)
    large = 1.0 - _exp_of_small(-a.fma(_polynomial(a, _ERF_TAIL), a))
    return (a < 0.9277).choose(small, large).with_sign_of(x)


def sigmoid(x: Value) -> Value:
    """Return 1 / (1 + e^-x)."""
    e = exp(-x.abs())
    return (x < 0.0).choose(e, 1.0) / (e + 1.0)


def sqrt(x: Value) -> Value:
    """Return the square root, correctly rounded."""
    return x.call("sqrt")


def reciprocal(x: Value) -> Value:
    """Return 1 / x, correctly rounded."""
    return 1.0 / x


def sin(x: Value) -> Value:
    """Return the sine of an angle in radians."""
    result = _sine(x, 0)
    return x.compare("oeq", 0.0).choose(x, result)


def cos(x: Value) -> Value:
    """Return the cosine of an angle in radians."""
    return _sine(x, 1)


def _sine(x: Value, quarters: int) -> Value:
    """Return sin(x + quarters π/2)."""
    r, quadrant = _reduced_angle(x)
    quadrant = quadrant + quarters
    s = r * r
    sine = (r * s).fma(_polynomial(s, _SIN), r)
    cosine = s.fma(_polynomial(s, _COS), 1.0)
    result = (quadrant & 1).compare("eq", 0).choose(sine, cosine)
    return (result.bits() ^ ((quadrant & 2) << 30)).as_floats()


def _reduced_angle(x: Value) -> tuple[Value, Value]:
    """Return (r, q) with x = r + q π/2, |r| <= π/4; q modulo 4."""
    kernel = x.kernel
    n, quadrant = _nearest(x, float.fromhex("0x1.45f306p-1"))
    r = x
    for part in _HALF_PI:
        r = n.fma(-part, r)
    return _large_angles(kernel, x, r, quadrant)


def _large_angles(kernel: KernelText, x: Value, r: Value, quadrant: Value) -> tuple[Value, Value]:
    """Replace the reduction of angles above `_SMALL_ANGLE`, which are rare, by that of `_REDUCE`, lane by lane."""
    kernel.support("funccoll_two_over_pi", _REDUCE)
    large = x.abs() > _SMALL_ANGLE
    some = kernel.new_name()
    kernel.support("llvm.vector.reduce.or", f"declare i1 @llvm.vector.reduce.or.v{kernel.lanes}i1(<{kernel.lanes} x i1>)")
    kernel.line(f"  {some} = call i1 @llvm.vector.reduce.or.v{kernel.lanes}i1({large!r})")
    xs, rs, qs = kernel.stack("float"), kernel.stack("float"), kernel.stack("i32")
    before, slow, loop, after = (kernel.new_name()[1:] for _ in range(4))
    kernel.line(f"  br label %{before}\n{before}:\n  br i1 {some}, label %{slow}, label %{after}")
    kernel.line(f"{slow}:")
    for value, place in ((x, xs), (r, rs), (quadrant, qs)):
        kernel.store(value, place)
    k, following, more = (kernel.new_name() for _ in range(3))
    places = [kernel.new_name() for _ in range(3)]
    kernel.line(f"  br label %{loop}\n{loop}:\n  {k} = phi i64 [ 0, %{slow} ], [ {following}, %{loop} ]")
    for name, kind, place in zip(places, ("float", "float", "i32"), (xs, rs, qs), strict=True):
        kernel.line(f"  {name} = getelementptr {kind}, ptr {place}, i64 {k}")
    kernel.line(f"  call void @funccoll_reduce_angle(ptr {places[0]}, ptr {places[1]}, ptr {places[2]})")
    kernel.line(f"  {following} = add i64 {k}, 1\n  {more} = icmp slt i64 {following}, {kernel.lanes}")
    done = kernel.new_name()[1:]
    kernel.line(f"  br i1 {more}, label %{loop}, label %{done}\n{done}:")
    slow_r, slow_q = kernel.load("float", rs), kernel.load("i32", qs)
    kernel.line(f"  br label %{after}\n{after}:")
    results = [
        kernel.emit(fast.kind, f"phi {fast.type} [ {fast.name}, %{before} ], [ {late.name}, %{done} ]")
        for fast, late in ((r, slow_r), (quadrant, slow_q))
    ]
    return results[0], results[1]


def _two_over_pi(bits: int) -> int:
    """Return floor(2^bits * 2/π), by Machin's formula."""
    guard = 64
    one = 1 << (bits + guard)

    def arctan_of_inverse(n: int) -> int:
        power = total = one // n
        k, sign = 3, -1
        while power:
            power //= n * n
            total += sign * (power // k)
            k, sign = k + 2, -sign
        return total

    pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
    return (one * 2 * (one >> guard)) // pi


_REDUCE = f"""\
define internal void @funccoll_reduce_angle(ptr %from, ptr %to, ptr %into) nounwind {{
  %x = load float, ptr %from
  %word = bitcast float %x to i32
  %size = and i32 %word, 2147483647
  %large = icmp sgt i32 %size, {int.from_bytes(struct.pack("<f", _SMALL_ANGLE), "little")}
  br i1 %large, label %reduce, label %exit
reduce:
  %finite = icmp slt i32 %size, {0x7F800000}
  %field = lshr i32 %size, 23
  ; x = m 2^(e - 24) with 15 <= e <= 128; bits of 2/pi above 2^(24 - e) give whole turns only
  %e = sub i32 %field, 126
  %low = and i32 %size, 8388607
  %m = or i32 %low, 8388608
  %down = sub i32 152, %e
  %down.wide = zext i32 %down to i256
  %shifted = lshr i256 {_two_over_pi(248)}, %down.wide
  %window = trunc i256 %shifted to i128
  %m.wide = zext i32 %m to i128
  %product = mul i128 %m.wide, %window
  ; the product in quarters of a turn, modulo 2^8: 120 bits of fraction
  %half = add i128 %product, {1 << 119}
  %turns = lshr i128 %half, 120
  %q = trunc i128 %turns to i32
  %up = shl i128 %product, 8
  %top = ashr i128 %up, 64
  %fraction = trunc i128 %top to i64
  %number = sitofp i64 %fraction to double
  %angle = fmul double %number, {bits_of_double(math.pi / 2 * 2.0**-64)}
  %r = fptrunc double %angle to float
  %negative = icmp slt i32 %word, 0
  %minus.r = fneg float %r
  %minus.q = sub i32 0, %q
  %signed.r = select i1 %negative, float %minus.r, float %r
  %signed.q = select i1 %negative, i32 %minus.q, i32 %q
  %result = select i1 %finite, float %signed.r, float 0x7FF8000000000000
  store float %result, ptr %to
  store i32 %signed.q, ptr %into
  br label %exit
exit:
  ret void
}}"""


ULP = {
    "cos": 1.5,
    "erf": 1.0,
    "exp": 1.01,
    "expm1": 1.1,
    "log": 0.75,
    "log1p": 1.44,
    "reciprocal": 0.5,
    "sigmoid": 2.5,
    "sin": 1.5,
    "sqrt": 0.5,
    "tanh": 1.3,
}
"""Bounds of the errors, in units in the last place of the exact result."""

FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    function.__name__: function for function in (cos, erf, exp, expm1, log, log1p, reciprocal, sigmoid, sin, sqrt, tanh)
}
"""Every elementary function, by name."""
