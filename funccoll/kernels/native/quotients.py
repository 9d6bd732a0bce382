"""Remainders and whole quotients of floats, exactly as NumPy's.

A remainder takes one fused multiply-add if the quotient is small. Otherwise C's `fmod` has it, lane by lane. Its result is
exact, so it is the same everywhere.
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
    kernel.support(f"llvm.fabs.{suffix}", f"declare {x.kind} @llvm.fabs.{suffix}({x.kind})")
    large = (quotient.abs() >= _LARGEST[x.kind]) & (below > 0.0) & finite
    (rest,) = by_lanes(large, f"funccoll_fmod_{x.kind}", _lane(x.kind), [x, y, quotient], [rest])
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
