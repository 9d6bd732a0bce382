"""scatter: each device gets its own block, along a dimension, of the root's value.

Cost: at least ⌈log₂ p⌉α + n(p−1)/p β (Chan et al. 2007), with n the bytes of the root's value. On one host every device
reads its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.types import ArrayType
from ..primitives.combining import Shards
from ..primitives.operand_rules import blocks_of, communicate, require_divisible, resized, together
from .record import Lowering, collective

__all__ = ["scatter_p"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], root: int, dim: int, size: int) -> ArrayType:
    require_divisible("scatter", x, dim, axes, size)
    return ArrayType(resized(x, dim, 1, size), x.dtype, x.varying)


def _reference(shards: Shards, *, root: int, dim: int, size: int, **_: Any) -> list[Any]:
    return blocks_of(shards[root], dim, size)


def _vjp(cts: Sequence[Any], inputs: Any, outs: Any, **params: Any) -> list[Any]:
    return together(cts, lambda present: communicate("gather", *present, **params))


def _lower(*, root: int, dim: int) -> Lowering:
    return Lowering("scatter", root=root, cut_dim=dim)


scatter_p = collective(
    "scatter", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, gives_own_block=True, dims=("dim",)
)
