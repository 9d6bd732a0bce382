"""Checks and helpers that the rules of collectives share: for types, references and transposes.

A gradient rule looks up the other collectives by name, for they are each other's transposes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import DTypeError, ShapeError, VaryingError
from ...ir import Primitive, bind, primitive_named
from ...types import ArrayType, is_inexact

__all__ = [
    "blocks_of", "check_op", "collective", "communicate", "own_block", "require_divisible", "resized", "together",
]  # fmt: skip


def collective(name: str, one: Callable[..., ArrayType], reference: Any, vjp: Any) -> Primitive:
    """A record whose type rule takes one operand at a time."""
    return Primitive(name, _rule(name, one), reference, vjp, multiple=True, kind="collective")


# ---------------------------------------------------------------- types


def _require_varying(name: str, x: ArrayType, axes: Sequence[str]) -> None:
    missing = [a for a in axes if a not in x.varying]
    if missing:
        over = repr(missing[0]) if len(missing) == 1 else repr(tuple(missing))
        split = f"take each device's own block with fc.own_slice(x, {over}), " if name in ("scatter", "reduce_scatter") else ""
        raise VaryingError(
            f"{name} over axis {over}: the operand {x} does not vary over it, it is equal on all those devices, so "
            f"this would combine copies of one value. Drop the collective, {split}or say fc.pvary(x, {over}) first if "
            "copies are what you mean."
        )


def require_divisible(name: str, x: ArrayType, dim: int, axes: Sequence[str], size: int) -> None:
    """Raise ShapeError unless the dimension exists and can be cut into `size` blocks."""
    if not 0 <= dim < x.ndim:
        raise ShapeError(f"{name}: dimension {dim} does not exist in an operand of shape {x.shape}.")
    if x.shape[dim] % size:
        raise ShapeError(
            f"{name} over {tuple(axes)!r} (size {size}): dimension {dim} of shape {x.shape} has size "
            f"{x.shape[dim]}, which {size} does not divide. Pad it to {-(-x.shape[dim] // size) * size}."
        )


def resized(x: ArrayType, dim: int, numerator: int, denominator: int) -> tuple[int, ...]:
    """The shape with one dimension multiplied by a fraction."""
    return (*x.shape[:dim], x.shape[dim] * numerator // denominator, *x.shape[dim + 1 :])


def check_op(name: str, x: ArrayType, op: str) -> None:
    """Raise DTypeError for a reduction that the dtype lacks."""
    kind = "f" if is_inexact(x.dtype) and x.dtype.kind != "c" else x.dtype.kind
    if op in ("max", "min") and kind == "c":
        raise DTypeError(f"{name} {op!r} of {x}: complex numbers have no order. Reduce np.abs(x), or parts.")
    if op in ("and", "or", "xor") and kind not in "iub":
        raise DTypeError(f"{name} {op!r} of {x}: bitwise operations need integers or booleans.")
    if op in ("sum", "prod", "mean") and kind == "b":
        raise DTypeError(f'{name} {op!r} of booleans: use op="or"/"and", or x.astype(np.int32) to count.')
    if op == "mean" and kind in "iu":
        raise DTypeError(f'{name} "mean" of {x}: integers have no exact mean. Use x.astype(np.float32).')


def _rule(name: str, one: Callable[..., ArrayType]) -> Callable[..., list[ArrayType]]:
    def infer(*xs: ArrayType, axes: tuple[str, ...], algorithm: str | None, **params: Any) -> list[ArrayType]:
        for x in xs:
            _require_varying(name, x, axes)
        return [one(x, axes=axes, **params) for x in xs]

    return infer


# ---------------------------------------------------------------- references


def own_block(x: Any, index: int, *, dim: int, stack: bool, size: int) -> Any:
    """Block `index` of `size` along `dim` (the index itself when stacked): a view."""
    if stack:
        return x[(slice(None),) * dim + (index,)]
    step = x.shape[dim] // size
    return x[(slice(None),) * dim + (slice(index * step, (index + 1) * step),)]


def blocks_of(x: Any, dim: int, size: int) -> list[Any]:
    """All blocks along `dim`: views."""
    return [own_block(x, i, dim=dim, stack=False, size=size) for i in range(size)]


# ---------------------------------------------------------------- transposes


def together(cts: Sequence[Any], transpose: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Transpose the operands that have a cotangent as one operation; the others stay None."""
    present = [i for i, ct in enumerate(cts) if ct is not None]
    out: list[Any] = [None] * len(cts)
    if present:
        for i, value in zip(present, transpose([cts[i] for i in present]), strict=True):
            out[i] = value
    return out


def communicate(name: str, *values: Any, **params: Any) -> Any:
    """Bind another collective than the user's: its schedule is the compiler's choice, whatever the user's own is."""
    return bind(primitive_named(name), *values, **(params | {"algorithm": None}))
