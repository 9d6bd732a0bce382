"""reduce_scatter: each device gets its own block, along a dimension, of the reduction of all devices' values.

Cost: at least ⌈log₂ p⌉α + n(p−1)/p β + n(p−1)/p γ (Chan et al. 2007), with n the bytes of one device's input; it is the
transpose of all_gather. On one host each device reads its block of all values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import VaryingError
from ...types import ArrayType
from ..combining import Shards, fold
from .local import spread
from .rules import blocks_of, check_op, collective, communicate, require_divisible, resized, together

__all__ = ["reduce_scatter_p"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], dim: int, op: str, size: int) -> ArrayType:
    check_op("reduce_scatter", x, op)
    require_divisible("reduce_scatter", x, dim, axes, size)
    return ArrayType(resized(x, dim, 1, size), x.dtype, x.varying)


def _reference(shards: Shards, *, dim: int, op: str, size: int, **_: Any) -> list[Any]:
    return [fold(blocks, op) for blocks in zip(*(blocks_of(s, dim, size) for s in shards), strict=True)]


def _vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, axes, dim, op, size, **_: Any) -> list[Any]:
    if op not in ("sum", "mean"):
        raise VaryingError(
            f'reduce_scatter with op="{op}" has no gradient here. Use all_reduce(x, {axes!r}, op="{op}"), which has '
            "one, and take your own block of its result."
        )
    back = {"axes": axes, "dim": dim, "stack": False, "size": size}
    gathered = together(cts, lambda present: communicate("all_gather", *present, **back))
    return spread(gathered, axes, op, size)


reduce_scatter_p = collective("reduce_scatter", _infer, _reference, _vjp)
