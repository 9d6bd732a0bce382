"""Elementary functions of float32 and float64 vectors, as polynomials with explicit fused multiply-adds.

Each has one result for each input, on every processor. They are right for NaN, infinities, zeros of both signs, subnormal
numbers, and results that overflow or underflow. Bounds of their errors are in `ULP`, and tests measure them.

A branch costs more than what it saves, because lanes differ. So each function computes all its cases, and chooses by lanes.
Only large angles are reduced lane by lane, by the method of Payne and Hanek (1983).

The coefficients are weighted minimax fits, rounded one after the other, from the lowest power on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .ir_text import Value, bits_of_double

__all__ = [
    "FUNCTIONS",
    "ULP",
    "by_lanes",
    "clamp",
    "cos",
    "erf",
    "exp",
    "exp_parts",
    "expm1",
    "exponent_number",
    "format_of",
    "fraction_and_exponent",
    "log",
    "log1p",
    "nearest",
    "polynomial",
    "reciprocal",
    "reduced_angle",
    "scaled",
    "sigmoid",
    "sin",
    "sine_and_cosine",
    "sqrt",
    "sum_of_log",
    "tanh",
    "with_log_specials",
]


@dataclass(frozen=True)
class _Format:
    """Constants of the functions for one kind of floats.

    - `mantissa`, `bias`: bits of the mantissa, and the bias of the exponent.
    - `ln2`: ln 2 in two parts. The product of the first with any exponent is exact.
    - `exp_range`: the range of arguments outside of which exp is 0 or infinite.
    - `expm1_low`: an argument below which expm1 is -1.
    - `tanh_near`: an argument below which TANH is used.
    - `tanh_one`: an argument above which tanh is 1.
    - `exp`: exp(r) = 1 + r + r² EXP(r), |r| <= ln 2 / 2.
    - `log`: for float32, log(1 + f) = f - f²/2 + f³ LOG(f), |f| <= 1/3. For float64, log(1 + f) = 2s + s z LOG(z) with
      s = f / (2 + f) and z = s².
    - `tanh`: tanh(x) = x + x³ TANH(x²), |x| < `tanh_near`.
    """

    mantissa: int
    bias: int
    ln2: tuple[str, str]
    exp_range: tuple[float, float]
    expm1_low: float
    tanh_near: float
    tanh_one: float
    exp: tuple[str, ...]
    log: tuple[str, ...]
    tanh: tuple[str, ...]

    @property
    def least_normal(self) -> float:
        """The least normal number."""
        return 2.0 ** (1 - self.bias)

    @property
    def identity_below(self) -> float:
        """A number below which x and functions like sin(x) are equal."""
        return 2.0 ** -(self.mantissa + 2)

    @property
    def round(self) -> float:
        """A number whose sum with a small one is an integer in the last bits."""
        return 1.5 * 2.0**self.mantissa

    @property
    def round_bits(self) -> int:
        """The bits of `round`."""
        return ((self.bias + self.mantissa) << self.mantissa) + (1 << (self.mantissa - 1))

    @property
    def one_bits(self) -> int:
        """The bits of 1."""
        return self.bias << self.mantissa

    @property
    def two_thirds_bits(self) -> int:
        """The bits of 2/3, rounded up."""
        return ((self.bias - 1) << self.mantissa) + -(-(1 << self.mantissa) // 3)


# fmt: off
_FORMATS = {
    "float": _Format(
        mantissa=23, bias=127, ln2=("0x1.62e400p-1", "0x1.7f7d1cp-20"), exp_range=(-104.0, 89.0),
        expm1_low=-20.0, tanh_near=0.65, tanh_one=10.0,
        exp=("0x1.fffffcp-2", "0x1.555490p-3", "0x1.5558a8p-5", "0x1.123b10p-7", "0x1.6a58e8p-10"),
        log=(
            "0x1.555504p-2", "-0x1.fffefep-3", "0x1.99d12ep-3", "-0x1.559bb0p-3", "0x1.1ec76ap-3", "-0x1.f34570p-4",
            "0x1.1eb14ap-3", "-0x1.079f0cp-3",
        ),
        tanh=("-0x1.555524p-2", "0x1.1103f0p-3", "-0x1.b7cfbap-5", "0x1.4f5da0p-6", "-0x1.696b9cp-8"),
    ),
    "double": _Format(
        mantissa=52, bias=1023, ln2=("0x1.62e42fefa3800p-1", "0x1.ef35793c76730p-45"), exp_range=(-746.0, 710.0),
        expm1_low=-50.0, tanh_near=0.7, tanh_one=20.0,
        exp=(
            "0x1p-1", "0x1.555555555555bp-3", "0x1.5555555555539p-5", "0x1.111111110edaep-7", "0x1.6c16c16c2341ep-10",
            "0x1.a01a01b315dbep-13", "0x1.a01a0164f1f07p-16", "0x1.71ddf0f9c599dp-19", "0x1.27e56670bf57ap-22",
            "0x1.af6aa4f18b3a2p-26", "0x1.1ea0e4291f46ap-29",
        ),
        log=(
            "0x1.555555555554fp-1", "0x1.999999999c17cp-2", "0x1.24924921e40fap-2", "0x1.c71c7490022cbp-3",
            "0x1.745c4ac94f7f3p-3", "0x1.3b35c3797b7efp-3", "0x1.0dcb6306ded0cp-3", "0x1.1b830f925733fp-3",
        ),
        tanh=(
            "-0x1.5555555555529p-2", "0x1.111111110e0a7p-3", "-0x1.ba1ba1b7cc956p-5", "0x1.664f481166096p-6",
            "-0x1.226e2896adb7ap-7", "0x1.d6d1f931dcee0p-9", "-0x1.7d8c952908facp-10", "0x1.3495bdbcf3c2dp-11",
            "-0x1.ec7e1298a2ce0p-13", "0x1.719ffdf538c99p-14", "-0x1.c6203b6bd7fd5p-16", "0x1.4227bd2bedb71p-18",
        ),
    ),
}
# fmt: on
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_INFINITY, _NAN = float("inf"), float("nan")

# fmt: off
# erf(x) = x + x ERF(x²), |x| < 0.9277; 1 - exp(-x - x ERF_TAIL(x)) up to ERF_ONE
_ERF = {
    "float": (
        "0x1.06eba8p-3", "-0x1.812742p-2", "0x1.ce2deep-4", "-0x1.b80d1ep-6", "0x1.54be64p-8", "-0x1.aa0342p-11",
        "0x1.5c4738p-14",
    ),
    "double": (
        "0x1.06eba8214db69p-3", "-0x1.812746b0379dfp-2", "0x1.ce2f21a04252bp-4", "-0x1.b82ce312642f0p-6",
        "0x1.565bcd07fe9c5p-8", "-0x1.c02db2aaf0388p-11", "0x1.f9a2f9fa7cf00p-14", "-0x1.f4ce722651cd7p-17",
        "0x1.b9ac6721f5984p-20", "-0x1.5d30e30a776e8p-23", "0x1.dfe2d356ae3f5p-27", "-0x1.c84fa5a2266f8p-31",
    ),
}
_ERF_TAIL = {
    "float": ("0x1.0732fcp-3", "0x1.457c7ep-1", "0x1.af2b0ap-4", "-0x1.7711b6p-6", "0x1.a57d7ep-9", "-0x1.c0f380p-13"),
    "double": (
        "0x1.06eba61075e7dp-3", "0x1.45f30a426c385p-1", "0x1.a4f4bbf33659ap-4", "-0x1.396a136e4aaf9p-6",
        "-0x1.ac0dff633703cp-13", "0x1.b8ec92c0de069p-10", "-0x1.27a2a77f49474p-11", "-0x1.3cf8e12773d1cp-17",
        "0x1.a661e3d1da7fbp-14", "-0x1.eb530006f43b0p-15", "0x1.65aeb90afcbacp-16", "-0x1.7cdcf76da9cb2p-18",
        "0x1.3375c8d4b94f0p-20", "-0x1.7775a9c202016p-23", "0x1.5191978cbad53p-26", "-0x1.a67bdc73dde7cp-30",
        "0x1.48eeb271b645ap-34", "-0x1.dfcf58f9e0d3ap-40",
    ),
}
_ERF_ONE = {"float": 4.0, "double": 6.0}
# sin(r) = r + r³ SIN(r²); cos(r) = 1 + r² COS(r²), for float64 1 - r²/2 + r⁴ COS(r²); |r| <= π/4
_SIN = {
    "float": ("-0x1.555556p-3", "0x1.111170p-7", "-0x1.a0543ap-13", "0x1.7ab978p-19"),
    "double": (
        "-0x1.5555555555549p-3", "0x1.111111110f859p-7", "-0x1.a01a019c0f6d9p-13", "0x1.71de3576cbcd8p-19",
        "-0x1.ae5e65f96129cp-26", "0x1.5d9304d52b190p-33",
    ),
}
_COS = {
    "float": ("-0x1p-1", "0x1.55554ap-5", "-0x1.6c0c26p-10", "0x1.99e71cp-16"),
    "double": (
        "0x1.555555555554cp-5", "-0x1.6c16c16c151aap-10", "0x1.a01a019cb71d4p-16", "-0x1.27e4f80e57739p-22",
        "0x1.1ee9ef28d83edp-29", "-0x1.8fb063f689f88p-37",
    ),
}
# fmt: on
_HALF_PI = {
    "float": ("0x1.921fb6p+0", "-0x1.777a5cp-25", "-0x1.ee59dap-50"),
    "double": ("0x1.921fb54442d18p+0", "0x1.1a62633145c07p-54", "-0x1.f1976b7ed8fbcp-110"),
}
_SMALL_ANGLE = {"float": 3e4, "double": 1e9}
"""Up to here three parts of π/2 suffice for the reduction."""


def format_of(x: Value) -> _Format:
    """Return the constants for a vector's kind."""
    return _FORMATS[x.kind]


def polynomial(x: Value, coefficients: Sequence[str]) -> Value:
    """Return the sum of c[k] x^k, by Horner's rule."""
    *lower, last = map(float.fromhex, coefficients)
    result = x.kernel.constant(x.kind, last)
    for c in reversed(lower):
        result = result.fma(x, c)
    return result


def _power_of_two(exponent: Value, like: Value) -> Value:
    """Return 2^n for the bits of n + bias that `nearest` gives, if it is a normal number."""
    return (exponent << format_of(like).mantissa).as_floats()


def clamp(x: Value, low: float, high: float) -> Value:
    """Return x between two bounds; NaN stays NaN."""
    x = (x < low).choose(x.like(low), x)
    return (x > high).choose(x.like(high), x)


def nearest(x: Value, factor: float, biases: int = 0) -> tuple[Value, Value]:
    """Return the integers nearest to x * factor, as floats and as bits, for |x * factor| < 2^(mantissa - 1).

    The bits are those of the integers, plus so many times the bias of exponents, plus a constant whose lower bits are 0: as
    many as an exponent has, and one more.
    """
    form = format_of(x)
    zero = form.round + biases * form.bias
    shifted = x.fma(factor, zero)
    return shifted - zero, shifted.bits()


def exp_parts(x: Value, biases: int) -> tuple[Value, Value]:
    """Return (p, the bits of n with so many biases) with e^x = p 2^n, n integers."""
    n, exponent = nearest(x, _LOG2_E, biases)
    high, low = map(float.fromhex, format_of(x).ln2)
    r = n.fma(-low, n.fma(-high, x))
    return (r * r).fma(polynomial(r, format_of(x).exp), r) + 1.0, exponent


def exp(x: Value) -> Value:
    """Return e^x.

    What vanishes is chosen, not computed: a product that underflows takes a processor 150 cycles, and masks of -inf are common.
    """
    low, high = format_of(x).exp_range
    vanishes = x < low
    bounded = vanishes.choose(x.like(0.0), (x > high).choose(x.like(high), x))
    return vanishes.choose(x.like(0.0), scaled(*exp_parts(bounded, 2)))


def scaled(x: Value, exponent: Value) -> Value:
    """Return x 2^n for the bits of n with two biases.

    It takes two steps: the ends of the range are not normal numbers, and only the second step rounds.
    """
    half = exponent >> 1
    return x * _power_of_two(half, x) * _power_of_two(exponent - half, x)


def _exp_of_small(x: Value) -> Value:
    """Return e^x for |x| < 87."""
    power, exponent = exp_parts(x, 1)
    return power * _power_of_two(exponent, x)


def expm1(x: Value) -> Value:
    """Return e^x - 1, accurate near 0."""
    form = format_of(x)
    bounded = clamp(x, form.expm1_low, form.exp_range[1])
    n, exponent = nearest(bounded, _LOG2_E, 1)
    ln2_high, ln2_low = map(float.fromhex, form.ln2)
    high = n.fma(-ln2_high, bounded)  # exact
    r = n.fma(-ln2_low, high)
    rest = n.fma(-ln2_low, high - r)
    tail = (r * r).fma(polynomial(r, form.exp), rest)  # e^r - 1 = r + tail
    scale = _power_of_two(exponent - 1, x)  # half of it: the largest power is not a float
    offset = scale - 0.5
    total = scale.fma(r, offset)
    lost = scale.fma(r, offset - total)
    result = (total + scale.fma(tail, lost)) * 2.0
    return (x.abs() < form.identity_below).choose(x, result)


def _exponent_bits(x: Value) -> Value:
    """Return the bits of an exponent k, in their place: x / 2^k is in [2/3, 4/3)."""
    form = format_of(x)
    return (x.bits() - form.two_thirds_bits) & -(1 << form.mantissa)


def exponent_number(exponent: Value, like: Value) -> Value:
    """Return the bits of an exponent as a float of one kind. Few processors convert integers of 64 bits."""
    form = format_of(like)
    return ((exponent >> form.mantissa) + form.round_bits).as_floats() - form.round


def sum_of_log(f: Value, exponent: Value, rest: Value | None = None) -> tuple[Value, Value]:
    """Return log(1 + f + rest) + k ln 2 as a sum of two, for |f| <= 1/3 and the bits of k. `rest` is an error of f.

    |k ln 2| is more than |f| unless k is 0.
    """
    form = format_of(f)
    high, low = map(float.fromhex, form.ln2)
    k = exponent_number(exponent, f)
    whole = k * high  # exact
    total = whole + f
    lost = k.fma(low, f - (total - whole))
    if rest is not None:
        lost = rest.fma(1.0 - f, lost)
    square = f * f
    if f.kind == "float":
        lost = f.fma(f, -square).fma(-0.5, lost)
        return total, square.fma(-0.5, (square * f).fma(polynomial(f, form.log), lost))
    s, half = f / (f + 2.0), square * 0.5  # as fdlibm: the polynomial above would have 20 terms
    z = s * s
    return total, s.fma(z.fma(polynomial(z, form.log), half), -half) + lost


def log(x: Value) -> Value:
    """Return the natural logarithm."""
    large, small = sum_of_log(*fraction_and_exponent(x))
    return with_log_specials(x, large + small)


def fraction_and_exponent(x: Value) -> tuple[Value, Value]:
    """Return (f, the bits of k) with x = (1 + f) 2^k, |f| <= 1/3, for positive numbers."""
    form = format_of(x)
    tiny = x < form.least_normal
    normal = tiny.choose(x * 2.0**form.mantissa, x)
    exponent = _exponent_bits(normal)
    f = (normal.bits() - exponent).as_floats() - 1.0
    return f, exponent - tiny.choose(exponent.like(form.mantissa << form.mantissa), exponent.like(0))


def with_log_specials(x: Value, result: Value) -> Value:
    """Return a logarithm of x: `result` for positive numbers, and what it is for others."""
    result = (x < _INFINITY).choose(result, x)  # infinity and NaN are their own logarithms
    result = (x < 0.0).choose(x.like(_NAN), result)
    return x.compare("oeq", 0.0).choose(x.like(-_INFINITY), result)


def log1p(x: Value) -> Value:
    """Return log(1 + x), accurate near 0."""
    form = format_of(x)
    exponent = _exponent_bits(x + 1.0)
    scaled = (x.bits() - exponent).as_floats()  # x / 2^k
    four = (form.one_bits + (2 << form.mantissa) - exponent).as_floats()  # 4 / 2^k, which is a normal number for all k
    offset = four.fma(0.25, -1.0)
    f = scaled + offset
    large, small = sum_of_log(f, exponent, scaled - (f - offset))
    result = (x < _INFINITY).choose(large + small, x)
    result = (x < -1.0).choose(x.like(_NAN), result)
    result = x.compare("oeq", -1.0).choose(x.like(-_INFINITY), result)
    return (x.abs() < form.identity_below).choose(x, result)


def tanh(x: Value) -> Value:
    """Return the hyperbolic tangent."""
    form, a, s = format_of(x), x.abs(), x * x
    small = (x * s).fma(polynomial(s, form.tanh), x)
    bounded = (a > form.tanh_one).choose(a.like(form.tanh_one), a)
    n, exponent = nearest(bounded, 2 * _LOG2_E, 1)
    r = n.fma(-math.log(2) / 2, bounded)  # as exact as needed: with n grows what e^2x is above 1
    power = polynomial(r, ["0x1p0", "0x1p1", *((float.fromhex(c) * 2 ** (k + 2)).hex() for k, c in enumerate(form.exp))])
    large = 1.0 - 2.0 / power.fma(_power_of_two(exponent, x), 1.0)
    return (a < form.tanh_near).choose(small, large).with_sign_of(x)


def erf(x: Value) -> Value:
    """Return the error function."""
    a, one = x.abs(), _ERF_ONE[x.kind]
    a = (a > one).choose(a.like(one), a)  # there the result is 1
    s = a * a
    small = x.fma(polynomial(s, _ERF[x.kind]), x)
    tail = polynomial(a, _ERF_TAIL[x.kind])
    power = a.fma(tail, a)
    lost = a.fma(tail, a - power)  # of the rounding
    term = _exp_of_small(-power)
    large = 1.0 - term.fma(-lost, term)
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
    r, rest, quadrant = reduced_angle(x)
    quadrant = quadrant + quarters
    sine, cosine = sine_and_cosine(r, rest)
    result = (quadrant & 1).compare("eq", 0).choose(sine, cosine)
    return (result.bits() ^ ((quadrant & 2) << (30 if x.kind == "float" else 62))).as_floats()


def sine_and_cosine(r: Value, rest: Value | None) -> tuple[Value, Value]:
    """Return sin(r + rest) and cos(r + rest) for |r| <= π/4."""
    s = r * r
    if rest is None:
        return (r * s).fma(polynomial(s, _SIN["float"]), r), s.fma(polynomial(s, _COS["float"]), 1.0)
    half = s * 0.5
    sine = r + (r * s).fma(polynomial(s, _SIN["double"]), (1.0 - half) * rest)
    whole = 1.0 - half
    lost = (1.0 - whole) - half
    return sine, whole + (s * s).fma(polynomial(s, _COS["double"]), r.fma(-rest, lost))


def reduced_angle(x: Value) -> tuple[Value, Value | None, Value]:
    """Return (r, rest, q) with x = r + rest + q π/2, |r| <= π/4; q modulo 4. Float32 has no rest."""
    n, quadrant = nearest(x, float.fromhex("0x1.45f306p-1") if x.kind == "float" else 2 / math.pi)
    first, second, third = map(float.fromhex, _HALF_PI[x.kind])
    r = n.fma(-first, x)  # exact
    if x.kind == "float":
        r, quadrant = _large_angles(x, [n.fma(-third, n.fma(-second, r)), quadrant])
        return r, None, quadrant
    part = n * second
    total = r - part
    taken = r - total
    lost = (r - (total + taken)) + (taken - part)  # r - part is total + lost
    rest = n.fma(-third, lost - n.fma(second, -part))
    r = total + rest
    r, rest, quadrant = _large_angles(x, [r, rest - (r - total), quadrant])
    return r, rest, quadrant


def _large_angles(x: Value, reduced: Sequence[Value]) -> list[Value]:
    """Replace the reduction of angles above `_SMALL_ANGLE`, which are rare, by that of Payne and Hanek, lane by lane."""
    text = _REDUCE if x.kind == "float" else _REDUCE_DOUBLE
    if x.kind == "double":
        x.kernel.support("llvm.fma.f64", "declare double @llvm.fma.f64(double, double, double)")
        x.kernel.support("llvm.ctlz.i192", "declare i192 @llvm.ctlz.i192(i192, i1)")
    return by_lanes(x.abs() > _SMALL_ANGLE[x.kind], f"funccoll_reduce_{x.kind}", text, [x], reduced)


def by_lanes(chosen: Value, function: str, text: str, given: Sequence[Value], results: Sequence[Value]) -> list[Value]:
    """Return `results`, which a function changes lane by lane if `chosen` holds in any lane.

    The function takes pointers to an element of each of `given` and of `results`. It leaves the results as they are in lanes
    that need no change. `text` defines it.
    """
    kernel = chosen.kernel
    kernel.support(function, text)
    if kernel.unrolls:
        return _by_branches(chosen, function, given, results)
    some = kernel.new_name()
    kernel.support("llvm.vector.reduce.or", f"declare i1 @llvm.vector.reduce.or.v{kernel.lanes}i1(<{kernel.lanes} x i1>)")
    kernel.line(f"  {some} = call i1 @llvm.vector.reduce.or.v{kernel.lanes}i1({chosen!r})")
    values = [*given, *results]
    stacks = [kernel.stack(v.kind) for v in values]
    before, slow, loop, done, after = (kernel.new_name()[1:] for _ in range(5))
    kernel.line(f"  br label %{before}\n{before}:\n  br i1 {some}, label %{slow}, label %{after}")
    kernel.line(f"{slow}:")
    for value, place in zip(values, stacks, strict=True):
        kernel.store(value, place)
    k, following, more = (kernel.new_name() for _ in range(3))
    places = [kernel.new_name() for _ in values]
    kernel.line(f"  br label %{loop}\n{loop}:\n  {k} = phi i64 [ 0, %{slow} ], [ {following}, %{loop} ]")
    for name, value, place in zip(places, values, stacks, strict=True):
        kernel.line(f"  {name} = getelementptr {value.kind}, ptr {place}, i64 {k}")
    kernel.line(f"  call void @{function}({', '.join(f'ptr {name}' for name in places)})")
    kernel.line(f"  {following} = add i64 {k}, 1\n  {more} = icmp slt i64 {following}, {kernel.lanes}")
    kernel.line(f"  br i1 {more}, label %{loop}, label %{done}\n{done}:")
    changed = [kernel.load(v.kind, place) for v, place in zip(results, stacks[len(given) :], strict=True)]
    kernel.line(f"  br label %{after}\n{after}:")
    return [
        kernel.emit(fast.kind, f"phi {fast.type} [ {fast.name}, %{before} ], [ {late.name}, %{done} ]")
        for fast, late in zip(results, changed, strict=True)
    ]


def _by_branches(chosen: Value, function: str, given: Sequence[Value], results: Sequence[Value]) -> list[Value]:
    """Return what `by_lanes` does, by a branch for each lane. The function is called for chosen lanes alone."""
    kernel, values = chosen.kernel, [*results]
    places = [kernel.stack(v.kind) for v in (*given, *results)]
    for k in range(kernel.lanes):
        some, before, slow, after = (kernel.new_name() for _ in range(4))
        kernel.line(f"  {some} = extractelement {chosen!r}, i32 {k}\n  br label %{before[1:]}\n{before[1:]}:")
        kernel.line(f"  br i1 {some}, label %{slow[1:]}, label %{after[1:]}\n{slow[1:]}:")
        for value, place in zip((*given, *values), places, strict=True):
            kernel.line(f"  {(one := kernel.new_name())} = extractelement {value!r}, i32 {k}")
            kernel.line(f"  store {value.kind} {one}, ptr {place}")
        kernel.line(f"  call void @{function}({', '.join(f'ptr {place}' for place in places)})")
        changed: list[Value] = []
        for value, place in zip(values, places[len(given) :], strict=True):
            kernel.line(f"  {(one := kernel.new_name())} = load {value.kind}, ptr {place}")
            changed.append(kernel.emit(value.kind, f"insertelement {value!r}, {value.kind} {one}, i32 {k}"))
        kernel.line(f"  br label %{after[1:]}\n{after[1:]}:")
        values = [
            kernel.emit(old.kind, f"phi {old.type} [ {old.name}, %{before[1:]} ], [ {new.name}, %{slow[1:]} ]")
            for old, new in zip(values, changed, strict=True)
        ]
    return values


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
define internal void @funccoll_reduce_float(ptr %from, ptr %to, ptr %into) nounwind {{
  %x = load float, ptr %from
  %word = bitcast float %x to i32
  %size = and i32 %word, 2147483647
  %large = icmp sgt i32 %size, {int.from_bytes(struct.pack("<f", _SMALL_ANGLE["float"]), "little")}
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

_HALF_PI_BITS = [bits_of_double(float.fromhex(part)) for part in _HALF_PI["double"]]
_WORDS = 19
"""Words of 64 bits of 2/π that float64 needs."""


def _words_of_two_over_pi() -> str:
    """Return these words, the lowest first, and 0 above them."""
    number = _two_over_pi(64 * _WORDS)
    words = [(number >> (64 * k)) & ((1 << 64) - 1) for k in range(_WORDS)] + [0] * 8
    return f"[{len(words)} x i64] [{', '.join(f'i64 {w}' for w in words)}]"


_REDUCE_DOUBLE = f"""\
@funccoll_two_over_pi = internal constant {_words_of_two_over_pi()}
define internal void @funccoll_reduce_double(ptr %from, ptr %to, ptr %rest, ptr %into) nounwind {{
  %x = load double, ptr %from
  %word = bitcast double %x to i64
  %size = and i64 %word, {(1 << 63) - 1}
  %large = icmp sgt i64 %size, {int.from_bytes(struct.pack("<d", _SMALL_ANGLE["double"]), "little")}
  br i1 %large, label %reduce, label %exit
reduce:
  %finite = icmp slt i64 %size, {0x7FF << 52}
  %field = lshr i64 %size, 52
  %fraction.bits = and i64 %size, {(1 << 52) - 1}
  %m = or i64 %fraction.bits, {1 << 52}
  ; x = m 2^(field - 1075); the window has 188 bits of fraction of m's factor; bits above it give whole turns only
  %down.any = sub i64 {64 * _WORDS - 188 + 1075}, %field
  %down = select i1 %finite, i64 %down.any, i64 0
  %offset = lshr i64 %down, 3
  %shift = and i64 %down, 7
  %place = getelementptr i8, ptr @funccoll_two_over_pi, i64 %offset
  %loaded = load i256, ptr %place, align 1
  %shift.wide = zext i64 %shift to i256
  %shifted = lshr i256 %loaded, %shift.wide
  %window = trunc i256 %shifted to i192
  %m.wide = zext i64 %m to i192
  %product = mul i192 %m.wide, %window
  ; the product in quarters of a turn, modulo 16
  %half = add i192 %product, {1 << 187}
  %turns = lshr i192 %half, 188
  %q = trunc i192 %turns to i64
  %up = shl i192 %product, 4
  %below = icmp slt i192 %up, 0
  %minus = sub i192 0, %up
  %distance = select i1 %below, i192 %minus, i192 %up
  %zeros.wide = call i192 @llvm.ctlz.i192(i192 %distance, i1 false)
  %normal = shl i192 %distance, %zeros.wide
  %zeros = trunc i192 %zeros.wide to i64
  %high.wide = lshr i192 %normal, 139
  %high.bits = trunc i192 %high.wide to i64
  %low.wide = lshr i192 %normal, 86
  %low.all = trunc i192 %low.wide to i64
  %low.bits = and i64 %low.all, {(1 << 53) - 1}
  %high.number = sitofp i64 %high.bits to double
  %low.number = sitofp i64 %low.bits to double
  %field.of.scale = sub i64 {1023 - 53}, %zeros
  %scale.bits = shl i64 %field.of.scale, 52
  %scale = bitcast i64 %scale.bits to double
  %high = fmul double %high.number, %scale
  %low.part = fmul double %low.number, {bits_of_double(2.0**-53)}
  %low = fmul double %low.part, %scale
  %r.0 = fmul double %high, {_HALF_PI_BITS[0]}
  %minus.r.0 = fneg double %r.0
  %e.0 = call double @llvm.fma.f64(double %high, double {_HALF_PI_BITS[0]}, double %minus.r.0)
  %e.1 = call double @llvm.fma.f64(double %high, double {_HALF_PI_BITS[1]}, double %e.0)
  %e = call double @llvm.fma.f64(double %low, double {_HALF_PI_BITS[0]}, double %e.1)
  %r = fadd double %r.0, %e
  %taken = fsub double %r, %r.0
  %lost = fsub double %e, %taken
  %negative = icmp slt i64 %word, 0
  %flip = xor i1 %negative, %below
  %minus.r = fneg double %r
  %minus.lost = fneg double %lost
  %minus.q = sub i64 0, %q
  %signed.r = select i1 %flip, double %minus.r, double %r
  %signed.lost = select i1 %flip, double %minus.lost, double %lost
  %signed.q = select i1 %negative, i64 %minus.q, i64 %q
  %result = select i1 %finite, double %signed.r, double 0x7FF8000000000000
  store double %result, ptr %to
  store double %signed.lost, ptr %rest
  store i64 %signed.q, ptr %into
  br label %exit
exit:
  ret void
}}"""

ULP = {
    "float": {
        "cos": 1.5,
        "erf": 1.0,
        "exp": 1.01,
        "expm1": 1.1,
        "log": 0.75,
        "log1p": 0.9,
        "reciprocal": 0.5,
        "sigmoid": 2.5,
        "sin": 1.5,
        "sqrt": 0.5,
        "tanh": 1.35,
    },
    "double": {
        "cos": 1.0,
        "erf": 1.1,
        "exp": 1.0,
        "expm1": 1.1,
        "log": 0.9,
        "log1p": 0.9,
        "reciprocal": 0.5,
        "sigmoid": 2.5,
        "sin": 1.0,
        "sqrt": 0.5,
        "tanh": 1.2,
    },
}
"""Kind of floats -> function -> a bound of its error, in units in the last place of the exact result.
"""

FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    function.__name__: function for function in (cos, erf, exp, expm1, log, log1p, reciprocal, sigmoid, sin, sqrt, tanh)
}
"""Every elementary function, by name."""
