"""Remainders and whole quotients of floats, exactly as NumPy's.

A remainder takes one fused multiply-add if the quotient is small. Otherwise C's `fmod` has it, lane by lane. GPUs lack it, and
divide whole numbers in steps. The result is exact, so it is the same everywhere.
"""

from __future__ import annotations

from .elementary import by_lanes
from .ir_text import Value

__all__ = ["floor_divide", "fmod", "remainder"]

_LARGEST = {"float": 2.0**22, "double": 2.0**51}
"""Quotients up to here are whole within 1."""
_INFINITY = float("inf")


def _lane(kind: str) -> str:
    """Return a function that changes the remainder of one lane if its quotient is large."""
    suffix = "f32" if kind == "float" else "f64"
    limit = f"0x{'4150' if kind == 'float' else '4320'}000000000000"
    return f"""\
define internal void @funccoll_fmod_{kind}(ptr %top, ptr %bottom, ptr %quotient, ptr %to) nounwind {{
  %q = load {kind}, ptr %quotient
  %a = load {kind}, ptr %top
  %b = load {kind}, ptr %bottom
  %size = call {kind} @llvm.fabs.{suffix}({kind} %q)
  %large = fcmp oge {kind} %size, {limit}
  %divides = fcmp one {kind} %b, 0.0
  %change = and i1 %large, %divides
  br i1 %change, label %slow, label %exit
slow:
  %r = frem {kind} %a, %b
  store {kind} %r, ptr %to
  br label %exit
exit:
  ret void
}}"""


def _lane_in_steps(kind: str) -> str:
    """Return a function that does the same without C's `fmod`. It takes finite numbers with a large quotient.

    With x = m 2^e and y = n 2^f, whole m and n, the remainder is (m 2^(e - f) mod n) 2^f. Powers are multiplied in steps.
    """
    word, bits, step = ("i32", 23, 40) if kind == "float" else ("i64", 52, 11)
    wide, unwide = ("zext i32 {} to i64", "trunc i64 {} to i32") if kind == "float" else ("add i64 {}, 0", "add i64 {}, 0")
    lines = [f"define internal void @funccoll_fmod_{kind}(ptr %top, ptr %bottom, ptr %quotient, ptr %to) nounwind {{"]
    for name, place in (("x", "top"), ("y", "bottom")):
        lines += [
            f"  %{name}.word = load {word}, ptr %{place}",
            f"  %{name}.bits = {wide.format(f'%{name}.word')}",
            f"  %{name}.size = and i64 %{name}.bits, {(1 << (8 * (4 if kind == 'float' else 8) - 1)) - 1}",
            f"  %{name}.field = lshr i64 %{name}.size, {bits}",
            f"  %{name}.low = and i64 %{name}.size, {(1 << bits) - 1}",
            f"  %{name}.tiny = icmp eq i64 %{name}.field, 0",
            f"  %{name}.lead = select i1 %{name}.tiny, i64 0, i64 {1 << bits}",
            f"  %{name}.m = or i64 %{name}.low, %{name}.lead",
            f"  %{name}.e = select i1 %{name}.tiny, i64 1, i64 %{name}.field",
        ]
    # 2^(f - bias - bits), which is subnormal for small f
    return "\n".join(
        [
            *lines,
            "  %first = urem i64 %x.m, %y.m\n  %distance = sub i64 %x.e, %y.e\n  br label %next",
            "next:\n  %left = phi i64 [ %distance, %0 ], [ %less, %turn ]\n  %r = phi i64 [ %first, %0 ], [ %rest, %turn ]",
            "  %more = icmp sgt i64 %left, 0\n  br i1 %more, label %turn, label %done",
            f"turn:\n  %short = icmp slt i64 %left, {step}\n  %by = select i1 %short, i64 %left, i64 {step}",
            "  %shifted = shl i64 %r, %by\n  %rest = urem i64 %shifted, %y.m\n  %less = sub i64 %left, %by\n  br label %next",
            f"done:\n  %number = uitofp i64 %r to {kind}",
            f"  %normal = icmp sgt i64 %y.e, {bits}\n  %above = sub i64 %y.e, {bits}\n  %above.bits = shl i64 %above, {bits}",
            "  %below = sub i64 %y.e, 1\n  %below.bits = shl i64 1, %below",
            f"  %unit.bits = select i1 %normal, i64 %above.bits, i64 %below.bits\n  %unit.word = {unwide.format('%unit.bits')}",
            f"  %unit = bitcast {word} %unit.word to {kind}\n  %size = fmul {kind} %number, %unit",
            f"  %size.word = bitcast {kind} %size to {word}",
            f"  %sign = and {word} %x.word, {-(1 << (31 if kind == 'float' else 63))}",
            f"  %signed = or {word} %size.word, %sign\n  store {word} %signed, ptr %to\n  ret void\n}}",
        ]
    )


def fmod(x: Value, y: Value) -> Value:
    """Return the remainder of x / y with the sign of x."""
    kernel, suffix = x.kernel, "f32" if x.kind == "float" else "f64"
    quotient = x / y
    size, below = x.abs(), y.abs()
    rest = quotient.call("trunc").abs().fma(-below, size)
    rest = (rest < 0.0).choose(rest + below, rest)  # the quotient was rounded up
    finite = size < _INFINITY
    rest = (finite & below.compare("oeq", _INFINITY)).choose(size, rest)
    rest = (finite & (below > 0.0) | x.compare("uno", y)).choose(rest, x.like(float("nan"))).with_sign_of(x)
    if not kernel.unrolls:
        kernel.support(f"llvm.fabs.{suffix}", f"declare {x.kind} @llvm.fabs.{suffix}({x.kind})")
    large = (quotient.abs() >= _LARGEST[x.kind]) & (below > 0.0) & finite
    text = _lane_in_steps(x.kind) if kernel.unrolls else _lane(x.kind)
    (rest,) = by_lanes(large, f"funccoll_fmod_{x.kind}", text, [x, y, quotient], [rest])
    return rest


def _quotient_and_remainder(x: Value, y: Value) -> tuple[Value, Value]:
    """Return (floor(x / y), the remainder with the sign of y), by the steps of NumPy's `npy_divmod`."""
    rest, quotient = fmod(x, y), x / y
    whole = (x - rest) / y
    turned = rest.compare("une", 0.0) & ((y < 0.0) ^ (rest < 0.0))
    whole = turned.choose(whole - 1.0, whole)
    exact = rest.compare("oeq", 0.0)
    rest = turned.choose(rest + y, exact.choose(rest.like(0.0).with_sign_of(y), rest))
    down = whole.call("floor")
    down = (whole - down > 0.5).choose(down + 1.0, down)
    down = whole.compare("une", 0.0).choose(down, whole.like(0.0).with_sign_of(quotient))
    zero = y.compare("oeq", 0.0)
    return zero.choose(quotient, down), rest


def floor_divide(x: Value, y: Value) -> Value:
    """Return floor(x / y)."""
    return _quotient_and_remainder(x, y)[0]


def remainder(x: Value, y: Value) -> Value:
    """Return the remainder of x / y with the sign of y."""
    return _quotient_and_remainder(x, y)[1]
