"""Elements of combines: the steps of a left fold for each op and dtype, written once for all machines.

float16 and bfloat16 are added in float32 and rounded once. A NaN is stored as the canonical one, because the compiler's choice
of instructions decides which operand's payload survives an addition. The bits are those of `primitives.combining.fold`. So the
code is never fastmath, which would reorder. If a product meets a sum, it uses the machine's `times`, `plus` and `minus`, which
must not be contracted.
"""
# ruff: noqa: F821  (the templates' free names are set by `variant`)
# pyright: reportUndefinedVariable=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..core.types import bfloat16
from .variants import variant

__all__ = ["Machine", "conversions_of", "meanings"]


class Machine(NamedTuple):
    """Functions that a kind of machine compiles, and that Numba does not have for all of them."""

    compile: Callable[[Any], Any]
    """Compiles a function of elements."""
    half_to_float: Any
    float_to_half: Any
    """float16, as its bits, to float32 and back, to nearest even."""
    bits_of: Any
    from_bits: Any
    """The bits of a float32, and the float32 of bits."""
    times: Any
    plus: Any
    minus: Any
    """Of two real floats, each rounded on its own."""


# ---------------------------------------------------------------- steps


def _sum(a: Any, b: Any) -> Any:
    return a + b


def _prod(a: Any, b: Any) -> Any:
    return a * b


def _complex_prod(a: Any, b: Any) -> Any:
    real = minus(times(a.real, b.real), times(a.imag, b.imag))
    return complex(real, plus(times(a.real, b.imag), times(b.real, a.imag)))


def _and(a: Any, b: Any) -> Any:
    return a & b


def _or(a: Any, b: Any) -> Any:
    return a | b


def _xor(a: Any, b: Any) -> Any:
    return a ^ b


def _max(a: Any, b: Any) -> Any:
    return a if a > b else b


def _min(a: Any, b: Any) -> Any:
    return a if a < b else b


def _float_max(a: Any, b: Any) -> Any:
    best = a if a > b else b
    best = a + b if (a == 0) & (b == 0) else best  # -0 < +0
    return best if (a == a) & (b == b) else WIDE(np.nan)


def _float_min(a: Any, b: Any) -> Any:
    best = a if a < b else b
    best = -((-a) + (-b)) if (a == 0) & (b == 0) else best
    return best if (a == a) & (b == b) else WIDE(np.nan)


def _divide(x: Any, divisor: Any) -> Any:
    return WIDE(x / divisor)  # also of integers, which are never divided: a total has one type


def _complex_divide(x: Any, divisor: Any) -> Any:
    """Divide as NumPy does by a complex number with imaginary part 0."""
    one = divisor / divisor
    zero, scale = divisor - divisor, one / divisor
    real, imag = plus(x.real, times(x.imag, zero)), minus(x.imag, times(x.real, zero))
    return complex(times(real, scale), times(imag, scale))


def _accumulate(total: Any, element: Any) -> Any:
    return WIDE(step(total, widen(element)))  # Numba's sum of two int8 is an int64


def _same(x: Any) -> Any:
    return x


def _canonical(x: Any) -> Any:
    return x if x == x else REAL(np.nan)


def _complex_canonical(x: Any) -> Any:
    return complex(x.real if x.real == x.real else REAL(np.nan), x.imag if x.imag == x.imag else REAL(np.nan))


# ---------------------------------------------------------------- 16-bit floats, as their bits


def _brain_to_float(bits: Any) -> Any:
    return from_bits(np.uint32(bits) << np.uint32(16))


def _canonical_half(value: Any) -> Any:
    """float32 to float16, to nearest even, with the canonical NaN."""
    return float_to_half(value) if value == value else np.uint16(0x7E00)


def _canonical_brain(value: Any) -> Any:
    """float32 to bfloat16, to nearest even, with the canonical NaN."""
    bits = bits_of(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded if value == value else np.uint32(0x7FC0))


# ---------------------------------------------------------------- for an op and a dtype

_STEPS = {"sum": _sum, "mean": _sum, "prod": _prod, "max": _max, "min": _min, "and": _and, "or": _or, "xor": _xor}


def meanings(op: str, dtype: np.dtype, machine: Machine) -> dict[str, Any]:
    """The free names of a template that folds: dtypes, and functions of elements as the machine compiles them."""
    wide: Any = np.uint8 if dtype == np.bool_ else dtype.type
    stored, widen, narrow, step, divide = wide, _same, _same, _STEPS[op], _divide
    if dtype.itemsize == 2 and dtype.kind not in "iu":
        wide, stored = np.float32, np.uint16
        widen, narrow = (_brain_to_float, _canonical_brain) if dtype == bfloat16 else (machine.half_to_float, _canonical_half)
    if dtype.kind == "c":
        step, divide, narrow = _complex_prod if op == "prod" else step, _complex_divide, _complex_canonical
    elif dtype == wide and dtype.kind == "f" and op not in ("max", "min"):
        narrow = _canonical
    elif np.dtype(wide).kind == "f" and op in ("max", "min"):
        step = _float_max if op == "max" else _float_min
    real = np.empty(0, wide).real.dtype.type
    names = {
        "WIDE": wide,
        "REAL": real,
        "times": machine.times,
        "plus": machine.plus,
        "minus": machine.minus,
        "float_to_half": machine.float_to_half,
        "bits_of": machine.bits_of,
        "from_bits": machine.from_bits,
    }
    each = {"step": step, "widen": widen, "narrow": narrow, "divide": divide}
    made = {
        role: f if f is machine.half_to_float else machine.compile(variant(f, f"{role}_{op}_{dtype.name}", **names))
        for role, f in each.items()
    }
    accumulate = machine.compile(variant(_accumulate, f"accumulate_{op}_{dtype.name}", **names, **made))
    return {"WIDE": wide, "REAL": real, "STORED": stored, "ITEMSIZE": dtype.itemsize, "accumulate": accumulate, **made}


def conversions_of(dtype: np.dtype, machine: Machine) -> tuple[Any, Any, Any, Any]:
    """For elements of a real float: the types for storage and computation, and the functions between the two."""
    names = {"float_to_half": machine.float_to_half, "bits_of": machine.bits_of, "from_bits": machine.from_bits}
    if dtype.itemsize > 2:
        same = machine.compile(variant(_same, f"same_{dtype.name}"))
        return dtype.type, dtype.type, same, same
    widen, narrow = (_brain_to_float, _canonical_brain) if dtype == bfloat16 else (machine.half_to_float, _canonical_half)
    if widen is not machine.half_to_float:
        widen = machine.compile(variant(widen, f"widen_{dtype.name}", **names))
    return np.uint16, np.float32, widen, machine.compile(variant(narrow, f"narrow_{dtype.name}", **names))
