"""NumPy's ufuncs through CuPy: the same dtypes, and the same values up to roundings.

If CuPy's loop is NumPy's, its ufunc is called directly. If CuPy takes another loop, operands are first converted to the
dtypes of NumPy's. If CuPy has no loop, or computes something else, other ufuncs compose the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.types import bfloat16, dtype_name, is_inexact
from ...errors import DTypeError
from ...primitives.elementwise import resolve

__all__ = ["compute_ufunc", "is_half", "wide"]

Note = Callable[[Any], None]
Loop = tuple[tuple[np.dtype, ...], np.dtype]


def is_half(dtype: np.dtype) -> bool:
    """True for float16 and bfloat16."""
    return dtype in (np.float16, bfloat16)


def wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the computation: float32 for 16-bit floats, whose results are rounded once."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


def compute_ufunc(
    cupy: Any, ufunc: np.ufunc, dtypes: Sequence[np.dtype], note_exponents: Callable[[], Note]
) -> Callable[..., Any]:
    """Return the function of a ufunc for operands of these dtypes. It takes `out=`.

    `note_exponents` makes the check that exponents of integer powers are not negative.
    """
    function = getattr(cupy, ufunc.__name__)
    *inputs, result = resolve(ufunc, tuple(dtypes))
    composed = _composition(cupy, ufunc, inputs, note_exponents)
    if composed is not None:
        return _converting(composed, list(map(wide, inputs)), result)
    loops = _loops(function)
    if _computes(loops, dtypes, inputs, result):
        return function
    if _computes(loops, inputs, inputs, result):
        return _converting(function, inputs, result, passes_out=True)
    wider = list(map(wide, inputs))
    if _computes(loops, wider, wider, wide(result)):
        return _converting(function, wider, result)
    shown = ", ".join(map(dtype_name, dtypes))
    raise DTypeError(f"np.{ufunc.__name__} of ({shown}) cannot be computed through CuPy {cupy.__version__}.")


def _loops(function: Any) -> list[Loop]:
    """Return the loops of CuPy's ufunc in order, without those of dtypes that funccoll lacks."""
    found: list[Loop] = []
    for text in function.types:
        left, right = text.split("->")
        if "V" not in left:
            found.append((tuple(map(_dtype, left)), _dtype(right)))
    return found


def _dtype(char: str) -> np.dtype:
    return bfloat16 if char == "E" else np.dtype(char)


def _computes(loops: Sequence[Loop], dtypes: Sequence[np.dtype], numpy: Sequence[np.dtype], result: np.dtype) -> bool:
    """True if CuPy's loop for these dtypes has the right result dtype, and computes as precisely as NumPy's.

    CuPy takes the first loop to which the operands can be cast.
    """
    for inputs, output in loops:
        if all(np.can_cast(have, take) for have, take in zip(dtypes, inputs, strict=True)):
            alike = all(a == b or not is_inexact(a) for a, b in zip(inputs, numpy, strict=True))
            return output == result and (alike or not is_inexact(result))
    return False


def _converting(
    function: Callable[..., Any], dtypes: Sequence[np.dtype], result: np.dtype, passes_out: bool = False
) -> Callable[..., Any]:
    """Return a function that converts any operands to `dtypes`. With `passes_out` it takes `out=` itself."""

    def compute(*operands: Any, out: Any = None) -> Any:
        converted = [x if x.dtype == d else x.astype(d) for x, d in zip(operands, dtypes, strict=True)]
        if passes_out:
            return function(*converted, out=out)
        value = function(*converted)
        if out is not None:
            out[...] = value
            return out
        return value if value.dtype == result else value.astype(result)

    return compute


def _composition(
    cupy: Any, ufunc: np.ufunc, inputs: Sequence[np.dtype], note_exponents: Callable[[], Note]
) -> Callable[..., Any] | None:
    """Return the function of a ufunc that CuPy lacks or computes in another way; None for all others."""
    dtype = inputs[0]
    if is_inexact(dtype) and dtype.kind != "c":
        if ufunc is np.remainder:
            return lambda x, y: _remainder(cupy, x, y)
        if ufunc is np.floor_divide:
            return lambda x, y: _floor_divide(cupy, x, y)
    if ufunc is np.fmod and dtype.kind in "iu" and dtype.itemsize == 8:
        return lambda x, y: _fmod(cupy, x, y)
    if ufunc is np.power and dtype.kind == "i":
        return _power(cupy, note_exponents())
    if dtype.kind == "c" and ufunc in (np.logical_and, np.logical_or, np.logical_xor, np.logical_not):
        logical = getattr(cupy, ufunc.__name__)
        return lambda *operands: logical(*(cupy.not_equal(x, x.dtype.type(0)) for x in operands))
    return None


def _remainder(cupy: Any, x: Any, y: Any) -> Any:
    """Return the exact remainder of a division that rounds down. CuPy's is x - floor(x / y) * y, with two roundings."""
    left = cupy.fmod(x, y)
    zero = left.dtype.type(0)
    moved = cupy.where(cupy.not_equal(cupy.less(left, zero), cupy.less(y, zero)), cupy.add(left, y), left)
    return cupy.where(cupy.equal(left, zero), cupy.copysign(left, y), moved)


def _floor_divide(cupy: Any, x: Any, y: Any) -> Any:
    """Return the quotient that belongs to `_remainder`, as in NumPy. CuPy's floor(x / y) may be one too large."""
    left, ratio = cupy.fmod(x, y), cupy.divide(x, y)
    zero, one = left.dtype.type(0), left.dtype.type(1)
    whole = cupy.divide(cupy.subtract(x, left), y)  # a whole number, except for its rounding
    below = cupy.not_equal(cupy.less(left, zero), cupy.less(y, zero))
    whole = cupy.where(cupy.logical_and(below, cupy.not_equal(left, zero)), cupy.subtract(whole, one), whole)
    signed = cupy.where(cupy.equal(whole, zero), cupy.copysign(zero, ratio), cupy.rint(whole))
    return cupy.where(cupy.equal(y, zero), ratio, signed)


def _fmod(cupy: Any, x: Any, y: Any) -> Any:
    """Return C's remainder of 64-bit integers. CuPy computes it in float64, which cannot hold them all."""
    left = cupy.remainder(x, y)
    if left.dtype.kind == "u":
        return left
    zero = left.dtype.type(0)
    opposite = cupy.not_equal(cupy.less(x, zero), cupy.less(y, zero))
    return cupy.where(cupy.logical_and(opposite, cupy.not_equal(left, zero)), cupy.subtract(left, y), left)


def _power(cupy: Any, note: Note) -> Callable[..., Any]:
    """Return powers of signed integers. For a negative exponent CuPy's kernel gives 0, and NumPy raises."""

    def power(x: Any, y: Any) -> Any:
        if isinstance(y, np.generic):
            np.power(x.dtype.type(1), y)  # raises
        else:
            note(cupy.invert(y))
        return cupy.power(x, y)

    return power
