"""Conversions of 16-bit floats, as their bits, to float32 and back, and of float32 to its bits, for any target of Numba."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

__all__ = ["Conversions", "conversions"]


class Conversions(NamedTuple):
    """Functions that compiled code calls."""

    half_to_float: Any
    float_to_half: Any
    """float16, as its bits, to float32 and back, to nearest even; a NaN keeps its sign and what fits of its payload."""
    bits_of: Any
    from_bits: Any
    """The bits of a float32, and the float32 of bits."""


def conversions(intrinsic: Any, types: Any) -> Conversions:
    """The conversions of a target, by its decorator of intrinsics and its types."""
    half, single = ir.HalfType(), ir.FloatType()

    def of(result: Any, operand: Any, convert: Any) -> Any:
        def conversion(typingctx: Any, value: Any) -> Any:
            return result(operand), lambda context, builder, signature, args: convert(builder, args[0])

        return intrinsic(conversion)

    return Conversions(
        of(types.float32, types.uint16, lambda builder, bits: builder.fpext(builder.bitcast(bits, half), single)),
        of(types.uint16, types.float32, lambda builder, x: builder.bitcast(builder.fptrunc(x, half), ir.IntType(16))),
        of(types.uint32, types.float32, lambda builder, x: builder.bitcast(x, ir.IntType(32))),
        of(types.float32, types.uint32, lambda builder, bits: builder.bitcast(bits, single)),
    )
