"""Checks and helpers for the rules of collectives: types, references and transposes.

A gradient rule looks up other collectives by name. They are each other's transposes, so they cannot import each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import BatchRule, JvpRule, Primitive, primitive_named
from ..core.partition_spec import axes_in_words
from ..core.types import ArrayType, is_inexact
from ..errors import DTypeError, ShapeError
from .batch_rules import shifted

__all__ = [
    "batch_operands",
    "blocks_of",
    "check_op",
    "communicate",
    "linear_each",
    "own_block",
    "require_divisible",
    "resized",
    "together",
]


# ---------------------------------------------------------------- types


def require_divisible(name: str, x: ArrayType, dim: int, axes: Sequence[str], size: int) -> None:
    """Raise ShapeError unless the dimension exists and splits into `size` blocks."""
    if not 0 <= dim < x.ndim:
        raise ShapeError(f"{name}: dimension {dim} does not exist in an operand of shape {x.shape}.")
    if x.shape[dim] % size:
        raise ShapeError(
            f"{name} over {axes_in_words(axes)} (size {size}): dimension {dim} of shape {x.shape} has size "
            f"{x.shape[dim]}, which {size} does not divide. Pad it to {-(-x.shape[dim] // size) * size}."
        )


def resized(x: ArrayType, dim: int, numerator: int, denominator: int) -> tuple[int, ...]:
    """Return the shape with one dimension multiplied by a fraction."""
    return (*x.shape[:dim], x.shape[dim] * numerator // denominator, *x.shape[dim + 1 :])


def check_op(name: str, x: ArrayType, op: str) -> None:
    """Raise DTypeError if the dtype lacks the reduction."""
    kind = "f" if is_inexact(x.dtype) and x.dtype.kind != "c" else x.dtype.kind
    if op in ("max", "min") and kind == "c":
        raise DTypeError(f"{name} {op!r} of {x}: complex numbers have no order. Reduce np.abs(x), or parts.")
    if op in ("and", "or", "xor") and kind not in "iub":
        raise DTypeError(f"{name} {op!r} of {x}: bitwise operations need integers or booleans.")
    if op in ("sum", "prod", "mean") and kind == "b":
        raise DTypeError(f'{name} {op!r} of booleans: use op="or"/"and", or x.astype(np.int32) to count.')
    if op == "mean" and kind in "iu":
        raise DTypeError(f'{name} "mean" of {x}: integers have no exact mean. Use x.astype(np.float32).')


# ---------------------------------------------------------------- references


def own_block(x: Any, index: int, *, dim: int, stack: bool, size: int) -> Any:
    """Return block `index` of `size` along `dim` (the index itself if stacked), as a view."""
    if stack:
        return x[(slice(None),) * dim + (index,)]
    step = x.shape[dim] // size
    return x[(slice(None),) * dim + (slice(index * step, (index + 1) * step),)]


def blocks_of(x: Any, dim: int, size: int) -> list[Any]:
    """Return all blocks along `dim`, as views."""
    return [own_block(x, i, dim=dim, stack=False, size=size) for i in range(size)]


# ---------------------------------------------------------------- derivatives


def together(cts: Sequence[Any], transpose: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Transpose the operands that have a cotangent as one operation. The others stay None."""
    present = [i for i, ct in enumerate(cts) if ct is not None]
    out: list[Any] = [None] * len(cts)
    if present:
        for i, value in zip(present, transpose([cts[i] for i in present]), strict=True):
            out[i] = value
    return out


def linear_each(name: str) -> JvpRule:
    """Return the forward derivative of a collective that is linear in each operand: itself, of the operands with a tangent."""

    def jvp(tangents: Sequence[Any], inputs: Any, outs: Any, **params: Any) -> list[Any]:
        return together(tangents, lambda present: bind(primitive_named(name), *present, **params))

    return jvp


# ---------------------------------------------------------------- batches


def batch_operands(*dims: str) -> BatchRule:
    """Return the rule of a collective whose parameters `dims` are dimensions. It communicates unbatched operands once."""

    def batch(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], length: int, /, **params: Any) -> Any:
        whole = [x if b else np.expand_dims(x, 0) for x, b in zip(values, batched, strict=True)]
        outs = bind(primitive, *whole, **params | {name: shifted(params[name]) for name in dims})
        if not primitive.multiple:
            return outs
        return [y if b else np.broadcast_to(y, (length, *y.shape[1:])) for y, b in zip(outs, batched, strict=True)]

    return batch


# ---------------------------------------------------------------- other collectives


def communicate(name: str, *values: Any, **params: Any) -> Any:
    """Bind another collective than the user's, with a schedule that the compiler chooses."""
    return bind(primitive_named(name), *values, **(params | {"algorithm": None}))
