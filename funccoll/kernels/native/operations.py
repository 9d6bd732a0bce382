"""Elementwise primitives as instructions: a table from their names to functions of vectors, with their costs.

Operands have the kinds in which the primitive computes: the caller has converted them. Results are those of NumPy to the last
bit, but for `FUNCTIONS`. Integer division is missing: it takes 160 instructions, and division by 0 is
undefined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from . import angles, elementary, powers, quotients
from .ir_text import Value

__all__ = ["FUNCTIONS", "OPERATIONS", "UNSIGNED", "KernelOperation", "converted"]

_FLOATS = frozenset({"float", "double"})
_INTEGERS = frozenset({"i32", "i64"})
_NUMBERS = _FLOATS | _INTEGERS
_BOOLS = frozenset({"i1"})


@dataclass(frozen=True)
class KernelOperation:
    """The instructions of a primitive.

    - `emit`: takes a vector for each operand, and returns the result.
    - `kinds`: the kinds of operands that it takes.
    - `cost`: about how many simple instructions it takes for each vector.
    """

    emit: Callable[..., Value]
    kinds: frozenset[str] = field(default=_FLOATS)
    cost: int = 1


def _maximum(x: Value, y: Value) -> Value:
    """Return the greater; NaN if one is NaN."""
    keeps = x >= y
    return (keeps | x.compare("uno", x) if x.is_float else keeps).choose(x, y)


def _minimum(x: Value, y: Value) -> Value:
    keeps = x <= y
    return (keeps | x.compare("uno", x) if x.is_float else keeps).choose(x, y)


def _ignoring_nan(relation: str) -> Callable[[Value, Value], Value]:
    """Return fmax or fmin: the other one if one is NaN."""
    return lambda x, y: (x.compare(relation, y) | y.compare("uno", y)).choose(x, y)


def _absolute(x: Value) -> Value:
    return x.abs() if x.is_float else (x < 0).choose(-x, x)


def _sign(x: Value) -> Value:
    signed = (x > 0).choose(x.like(1), (x < 0).choose(x.like(-1), 0))
    return x.compare("uno", x).choose(x, signed) if x.is_float else signed


def _compared(of_floats: str, of_integers: str) -> KernelOperation:
    return KernelOperation(lambda x, y: x.compare(of_floats if x.is_float else of_integers, y), _NUMBERS)


def _intrinsic(name: str) -> KernelOperation:
    return KernelOperation(lambda x: x.call(name))


def _signbit(x: Value) -> Value:
    return x.bits() < 0


def _heaviside(x: Value, y: Value) -> Value:
    step = (x < 0.0).choose(x.like(0.0), (x > 0.0).choose(x.like(1.0), y))
    return x.compare("uno", x).choose(x, step)


_WIDTHS = {"i32": 32, "i64": 64}


def _left_shift(x: Value, count: Value) -> Value:
    """Return bits shifted up. LLVM's results of counts that are negative or too large are undefined; NumPy's are 0."""
    width = _WIDTHS[x.kind]
    valid = count.compare("ult", width)
    return valid.choose(x.shifted("shl", count & (width - 1)), 0)


def _right_shift(x: Value, count: Value) -> Value:
    """Return bits shifted down, with the sign."""
    width = _WIDTHS[x.kind]
    return x.shifted("ashr", count.compare("ult", width).choose(count & (width - 1), width - 1))


def _right_shift_unsigned(x: Value, count: Value) -> Value:
    width = _WIDTHS[x.kind]
    valid = count.compare("ult", width)
    return valid.choose(x.shifted("lshr", count & (width - 1)), 0)


def _double_of_unsigned(x: Value) -> Value:
    """Return numbers without sign as float64, rounded once. Few processors convert 64 bits."""
    if x.kind == "i32":
        return ((x.convert("zext", "i64")) | _TWO_52).as_floats() - 2.0**52
    low = ((x & 0xFFFFFFFF) | _TWO_52).as_floats() - 2.0**52
    high = (x.shifted("lshr", x.like(32)) | _TWO_52).as_floats() - 2.0**52
    return high.fma(2.0**32, low)


_TWO_52 = 0x433 << 52
"""The bits of 2^52: its last 52 bits take an integer."""


def _float_of_unsigned(x: Value) -> Value:
    """Return numbers without sign as float32. The last 11 bits become one, so that float64 rounds nothing."""
    if x.kind == "i64":
        last = (x & 0x7FF).compare("ne", 0).choose(x.like(0x800), 0)
        large = x.compare("ugt", (1 << 53) - 1)
        x = large.choose((x & -0x800) | last, x)
    return _double_of_unsigned(x).convert("fptrunc", "float")


_DEGREES = KernelOperation(lambda x: x * _of_kind(x, 180.0, math.pi))
_RADIANS = KernelOperation(lambda x: x * _of_kind(x, math.pi, 180.0))


def _of_kind(x: Value, top: float, bottom: float) -> float:
    """Return a quotient of constants as NumPy computes it: in the kind of x."""
    dtype = np.float32 if x.kind == "float" else np.float64
    return float(dtype(top) / dtype(bottom))


FUNCTIONS: dict[str, tuple[Callable[..., Value], int]] = {
    **{
        name: (elementary.FUNCTIONS[name], cost)
        for name, cost in {"exp": 14, "expm1": 18, "log": 18, "log1p": 20, "tanh": 20, "erf": 24, "sin": 25, "cos": 25}.items()
    },
    "expit": (elementary.sigmoid, 20),
    "exp2": (powers.exp2, 30),
    "log2": (powers.log2, 45),
    "log10": (powers.log10, 45),
    "power": (powers.power, 90),
    "general_root": (powers.power, 90),
    "float_power": (powers.power, 140),
    "cbrt": (powers.cbrt, 90),
    "hypot": (powers.hypot, 40),
    "logaddexp": (powers.logaddexp, 38),
    "logaddexp2": (powers.logaddexp2, 55),
    "sinh": (powers.sinh, 80),
    "cosh": (powers.cosh, 40),
    "arcsinh": (powers.arcsinh, 110),
    "arccosh": (powers.arccosh, 100),
    "arctanh": (powers.arctanh, 50),
    "tan": (angles.tan, 70),
    "arctan": (angles.arctan, 50),
    "arctan2": (angles.arctan2, 65),
    "arcsin": (angles.arcsin, 50),
    "arccos": (angles.arccos, 50),
}
"""Primitives whose results are not NumPy's to the last bit -> (function, cost)."""


OPERATIONS: dict[str, KernelOperation] = {
    "add": KernelOperation(lambda x, y: x + y, _NUMBERS),
    "subtract": KernelOperation(lambda x, y: x - y, _NUMBERS),
    "multiply": KernelOperation(lambda x, y: x * y, _NUMBERS),
    "divide": KernelOperation(lambda x, y: x / y, cost=4),
    "reciprocal": KernelOperation(elementary.reciprocal, cost=4),
    "negative": KernelOperation(lambda x: -x, _NUMBERS),
    "positive": KernelOperation(lambda x: x, _NUMBERS, 0),
    "stop_gradient": KernelOperation(lambda x: x, _NUMBERS | _BOOLS, 0),
    "absolute": KernelOperation(_absolute, _NUMBERS),
    "fabs": KernelOperation(_absolute),
    "square": KernelOperation(lambda x: x * x, _NUMBERS),
    "sign": KernelOperation(_sign, _NUMBERS, 3),
    "copysign": KernelOperation(lambda x, y: x.with_sign_of(y)),
    "maximum": KernelOperation(_maximum, _NUMBERS, 2),
    "minimum": KernelOperation(_minimum, _NUMBERS, 2),
    "fmax": KernelOperation(_ignoring_nan("oge"), cost=2),
    "fmin": KernelOperation(_ignoring_nan("ole"), cost=2),
    "sqrt": KernelOperation(elementary.sqrt, cost=4),
    "root": KernelOperation(elementary.sqrt, cost=4),
    "divisor": KernelOperation(lambda x: x.compare("oeq", 0.0).choose(x.like(float("inf")), x), cost=2),
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "trunc": _intrinsic("trunc"),
    "rint": _intrinsic("roundeven"),
    "equal": _compared("oeq", "eq"),
    "not_equal": _compared("une", "ne"),
    "less": _compared("olt", "slt"),
    "less_equal": _compared("ole", "sle"),
    "greater": _compared("ogt", "sgt"),
    "greater_equal": _compared("oge", "sge"),
    "isnan": KernelOperation(lambda x: x.compare("uno", x)),
    "isinf": KernelOperation(lambda x: x.abs().compare("oeq", float("inf"))),
    "isfinite": KernelOperation(lambda x: x.abs().compare("olt", float("inf"))),
    "signbit": KernelOperation(_signbit),
    "logical_and": KernelOperation(lambda x, y: x & y, _BOOLS),
    "logical_or": KernelOperation(lambda x, y: x | y, _BOOLS),
    "logical_xor": KernelOperation(lambda x, y: x ^ y, _BOOLS),
    "logical_not": KernelOperation(lambda x: ~x, _BOOLS),
    "bitwise_and": KernelOperation(lambda x, y: x & y, _INTEGERS | _BOOLS),
    "bitwise_or": KernelOperation(lambda x, y: x | y, _INTEGERS | _BOOLS),
    "bitwise_xor": KernelOperation(lambda x, y: x ^ y, _INTEGERS | _BOOLS),
    "invert": KernelOperation(lambda x: ~x, _INTEGERS | _BOOLS),
    "left_shift": KernelOperation(_left_shift, _INTEGERS, 3),
    "right_shift": KernelOperation(_right_shift, _INTEGERS, 3),
    "floor_divide": KernelOperation(quotients.floor_divide, cost=30),
    "remainder": KernelOperation(quotients.remainder, cost=30),
    "fmod": KernelOperation(quotients.fmod, cost=15),
    "heaviside": KernelOperation(_heaviside, cost=4),
    "degrees": _DEGREES,
    "rad2deg": _DEGREES,
    "radians": _RADIANS,
    "deg2rad": _RADIANS,
    "where": KernelOperation(lambda predicate, x, y: predicate.choose(x, y), _NUMBERS | _BOOLS),
    "less_unsigned": _compared("olt", "ult"),
    "less_equal_unsigned": _compared("ole", "ule"),
    "greater_unsigned": _compared("ogt", "ugt"),
    "greater_equal_unsigned": _compared("oge", "uge"),
    "maximum_unsigned": KernelOperation(lambda x, y: x.compare("uge", y).choose(x, y), _INTEGERS, 2),
    "minimum_unsigned": KernelOperation(lambda x, y: x.compare("ule", y).choose(x, y), _INTEGERS, 2),
    "right_shift_unsigned": KernelOperation(_right_shift_unsigned, _INTEGERS, 3),
    "float_of_unsigned": KernelOperation(_float_of_unsigned, _INTEGERS, 10),
    "double_of_unsigned": KernelOperation(_double_of_unsigned, _INTEGERS, 7),
    "i64_of_unsigned": KernelOperation(lambda x: x.convert("zext", "i64"), frozenset({"i32"})),
    **{name: KernelOperation(function, cost=cost) for name, (function, cost) in FUNCTIONS.items()},
}
"""Name of a primitive -> its instructions."""


_SIGNLESS = (
    "add", "subtract", "multiply", "negative", "positive", "square", "stop_gradient", "equal", "not_equal", "bitwise_and",
    "bitwise_or", "bitwise_xor", "invert", "left_shift", "where",
)  # fmt: skip
UNSIGNED = {
    **{name: name for name in _SIGNLESS},
    **{name.removesuffix("_unsigned"): name for name in OPERATIONS if name.endswith("_unsigned") and "_of_" not in name},
}
"""Name of a primitive -> its operation for numbers without sign, whose kinds are those of numbers with sign."""


def converted(x: Value, kind: str) -> Value:
    """Return a vector in another kind, as `astype` does.

    NaN and floats out of range become the least integer, as x86's instructions have it, and so NumPy there.
    """
    if x.kind == kind:
        return x
    if kind == "i1":
        return x.compare("une" if x.is_float else "ne", 0)
    if x.kind == "i1":
        zero, one = x.kernel.constant(kind, 0), x.kernel.constant(kind, 1)
        return x.choose(one, zero)
    if x.is_float and kind in _FLOATS:
        return x.convert("fptrunc" if kind == "float" else "fpext", kind)
    if kind in _FLOATS:
        return x.convert("sitofp", kind)
    if not x.is_float:
        return x.convert("trunc" if kind == "i32" else "sext", kind)
    bits = _WIDTHS[kind]
    valid = (x >= -(2.0 ** (bits - 1))) & (x < 2.0 ** (bits - 1))  # LLVM's results of others are undefined
    whole = valid.choose(x, 0.0).convert("fptosi", kind)
    return valid.choose(whole, -(1 << (bits - 1)))
