"""gather: the root gets all devices' values, concatenated in axis order along a dimension; the others get zeros.

Cost: at least ⌈log₂ p⌉α + n(p−1)/p β (Chan et al. 2007), with n the bytes of the root's result; it is the transpose of
scatter. On one host the root reads all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.types import ArrayType
from ..errors import ShapeError
from ..primitives.combining import Shards
from ..primitives.operand_rules import communicate, resized, together
from .record import Lowering, collective

__all__ = ["gather_p"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], root: int, dim: int, size: int) -> ArrayType:
    if not 0 <= dim < x.ndim:
        raise ShapeError(f"gather: dimension {dim} does not exist in an operand of shape {x.shape}.")
    return ArrayType(resized(x, dim, size, 1), x.dtype, x.varying)


def _reference(shards: Shards, *, root: int, dim: int, **_: Any) -> list[Any]:
    whole = np.concatenate(shards, axis=dim)
    return [whole if i == root else np.zeros_like(whole) for i in range(len(shards))]


def _vjp(cts: Sequence[Any], inputs: Any, outs: Any, **params: Any) -> list[Any]:
    return together(cts, lambda present: communicate("scatter", *present, **params))


def _lower(*, root: int, dim: int) -> Lowering:
    return Lowering("gather", root=root, concat_dim=dim)


gather_p = collective("gather", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, dims=("dim",))
