"""The local primitives of collectives. They depend on the device or on the type, and move nothing.

pvary marks a value as varying. own_slice cuts a device's own block out of a value that all devices have. axis_index is the
device's position.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind, current_interpreter
from ..core.ir import Primitive
from ..core.partition_spec import axes_in_words
from ..core.types import ArrayType
from ..errors import ShapeError, VaryingError
from .operand_rules import batch_operands, communicate, own_block, require_divisible, resized
from .tangent_rules import linear

__all__ = ["axis_index_p", "axis_size", "own_slice_p", "pvary", "pvary_p", "spread", "summed"]


def axis_size(axes: Sequence[str]) -> int:
    """Return the number of devices along `axes` in the current mesh."""
    return math.prod(current_interpreter().axis_sizes[a] for a in axes)


# ---------------------------------------------------------------- pvary


def pvary(x: Any, axes: Sequence[str]) -> Any:
    """Return `x`, marked as varying over `axes` as well."""
    return bind(pvary_p, x, axes=tuple(axes))


def spread(cts: Sequence[Any], axes: Sequence[str], op: str, size: int, groups: Any = ()) -> list[Any]:
    """Apply pvary to each cotangent, divided by p for a mean. In groups the cotangents vary already."""

    def one(ct: Any) -> Any:
        part = ct / np.asarray(size, ct.dtype) if op == "mean" else ct
        return part if groups else pvary(part, axes)

    return [None if ct is None else one(ct) for ct in cts]


def _infer_pvary(x: ArrayType, *, axes: tuple[str, ...]) -> list[ArrayType]:
    if x.varying & set(axes):
        raise VaryingError(f"pvary over {axes_in_words(axes)}: the operand {x} varies over it already. Use it as it is.")
    return [x.vary(x.varying | set(axes))]


def summed(ct: Any, axes: Collection[str]) -> Any:
    """Sum devices' cotangents of a value that is equal on all of them: the transpose of pvary."""
    along = tuple(a for a in current_interpreter().axis_sizes if a in axes)
    return communicate("all_reduce", ct, axes=along, op="sum", size=axis_size(along))[0] if along else ct


def _pvary_vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, axes: tuple[str, ...]) -> list[Any]:
    return [lambda: summed(cts[0], axes)]


pvary_p = Primitive(
    "pvary", _infer_pvary, lambda x, *, axes: x, _pvary_vjp, linear("pvary"), batch_operands(), kind="local", view=True
)


# ---------------------------------------------------------------- own_slice


def _infer_own_slice(x: ArrayType, *, axes: tuple[str, ...], dim: int, stack: bool, size: int) -> list[ArrayType]:
    if x.varying & set(axes):
        raise VaryingError(
            f"own_slice over {axes_in_words(axes)}: the operand {x} varies over it, and own_slice cuts a value that is equal "
            "on all those devices. Use fc.scatter for the blocks of one device's value, or fc.all_to_all to exchange blocks."
        )
    require_divisible("own_slice", x, dim, axes, size)
    shape = (*x.shape[:dim], *x.shape[dim + 1 :]) if stack else resized(x, dim, 1, size)
    if stack and x.shape[dim] != size:
        raise ShapeError(f"own_slice: dimension {dim} of shape {x.shape} must have size {size} to be unstacked.")
    return [ArrayType(shape, x.dtype, x.varying | set(axes))]


def _own_slice_vjp(cts: Sequence[Any], inputs: Any, outs: Any, **params: Any) -> list[Any]:
    return [lambda: communicate("all_gather", cts[0], **params)[0]]


own_slice_p = Primitive(
    "own_slice",
    _infer_own_slice,
    own_block,
    _own_slice_vjp,
    linear("own_slice"),
    batch_operands("dim"),
    kind="local",
    view=True,
)


# ---------------------------------------------------------------- axis_index


def _infer_axis_index(*, axes: tuple[str, ...]) -> list[ArrayType]:
    return [ArrayType((), np.dtype(np.int32), frozenset(axes))]


axis_index_p = Primitive("axis_index", _infer_axis_index, lambda index: index, kind="local")
