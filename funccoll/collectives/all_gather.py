"""all_gather: every device gets all devices' values, concatenated in axis order along a dimension or stacked as a new one.

Cost: at least ⌈log₂ p⌉α + n(p−1)/p β (Chan et al. 2007), with n the bytes of the result. On one host each device reads the
others' blocks in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import primitive_named
from ..core.types import ArrayType
from ..errors import ShapeError
from ..primitives.combining import Shards
from ..primitives.operand_rules import communicate, resized, together
from .record import Lowering, collective

__all__ = ["all_gather_p"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], dim: int, stack: bool, size: int) -> ArrayType:
    if not 0 <= dim < x.ndim + stack:
        raise ShapeError(f"all_gather: dimension {dim} does not exist in an operand of shape {x.shape}.")
    shape = (*x.shape[:dim], size, *x.shape[dim:]) if stack else resized(x, dim, size, 1)
    return ArrayType(shape, x.dtype, x.varying - set(axes))


def _reference(shards: Shards, *, dim: int, stack: bool, **_: Any) -> list[Any]:
    return [(np.stack if stack else np.concatenate)(shards, axis=dim)]


def _vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, algorithm: Any, dim: int, stack: bool, **along: Any) -> list[Any]:
    if "groups" in along:  # each device of a group has a cotangent of its own
        summed = together(cts, lambda present: communicate("reduce_scatter", *present, dim=dim, op="sum", **along))
        return [ct if ct is None or not stack else np.squeeze(ct, dim) for ct in summed]
    return [None if ct is None else bind(primitive_named("own_slice"), ct, dim=dim, stack=stack, **along) for ct in cts]


def _lower(*, dim: int, stack: bool) -> Lowering:
    return Lowering("all_gather", concat_dim=dim, stack=stack)


all_gather_p = collective("all_gather", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, dims=("dim",))
