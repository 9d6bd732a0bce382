"""all_to_all: every device sends its j-th block along one dimension to device j, and concatenates along another one.

Cost: at least ⌈log₂ p⌉α, and at least n(p−1)/p β, but not both at once. p − 1 messages move the fewest bytes; ⌈log₂ p⌉ messages
move ½n⌈log₂ p⌉ (Bruck et al. 1997). On one host each device reads its blocks in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.types import ArrayType
from ..errors import ShapeError
from ..primitives.combining import Shards
from ..primitives.operand_rules import blocks_of, require_divisible, resized, together
from .record import Lowering, collective, pvaried

__all__ = ["all_to_all_p"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], split_dim: int, concat_dim: int, size: int) -> ArrayType:
    require_divisible("all_to_all", x, split_dim, axes, size)
    if not 0 <= concat_dim < x.ndim:
        raise ShapeError(f"all_to_all: concat_dim {concat_dim} does not exist in an operand of shape {x.shape}.")
    split = ArrayType(resized(x, split_dim, 1, size), x.dtype)
    return ArrayType(resized(split, concat_dim, size, 1), x.dtype, x.varying)


def _reference(shards: Shards, *, split_dim: int, concat_dim: int, size: int, **_: Any) -> list[Any]:
    sent = [blocks_of(s, split_dim, size) for s in shards]
    return [np.concatenate([blocks[i] for blocks in sent], axis=concat_dim) for i in range(size)]


def _vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, split_dim, concat_dim, **same: Any) -> list[Any]:
    back = {"split_dim": concat_dim, "concat_dim": split_dim, **same}  # the same collective keeps the user's algorithm
    return together(cts, lambda present: bind(all_to_all_p, *present, **back))


def _lower(*, split_dim: int, concat_dim: int) -> Lowering:
    return Lowering("all_to_all", cut_dim=split_dim, concat_dim=concat_dim)


all_to_all_p = collective(
    "all_to_all",
    infer=_infer,
    reference=_reference,
    vjp=_vjp,
    lower=_lower,
    of_copies=pvaried,
    dims=("split_dim", "concat_dim"),
)
