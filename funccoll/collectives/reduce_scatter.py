"""reduce_scatter: each device gets its own block, along a dimension, of the reduction of all devices' values.

Cost: at least ⌈log₂ p⌉α + n(p−1)/p β + n(p−1)/p γ (Chan et al. 2007), with n the bytes of one device's input; it is the
transpose of all_gather. On one host each device reads its block of all values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.types import ArrayType
from ..errors import VaryingError
from ..primitives.combining import Shards
from ..primitives.operand_rules import (
    blocks_of,
    check_op,
    communicate,
    linear_each,
    require_divisible,
    resized,
    together,
)
from ..primitives.varying import spread
from .record import Combine, Lowering, collective, in_axis_order

__all__ = ["reduce_scatter_p"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], dim: int, op: str, size: int) -> ArrayType:
    check_op("reduce_scatter", x, op)
    require_divisible("reduce_scatter", x, dim, axes, size)
    return ArrayType(resized(x, dim, 1, size), x.dtype, x.varying)


def _reference(shards: Shards, *, dim: int, op: str, size: int, combine: Combine = in_axis_order, **_: Any) -> list[Any]:
    contributions = zip(*(blocks_of(s, dim, size) for s in shards), strict=True)
    return [combine(i, blocks, op) for i, blocks in enumerate(contributions)]


def _require_linear(op: str, axes: Sequence[str]) -> None:
    if op not in ("sum", "mean"):
        raise VaryingError(
            f'reduce_scatter with op="{op}" has no gradient. Use all_reduce(x, {axes!r}, op="{op}"), which has '
            "one, and take your own block of its result."
        )


def _vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, dim, op, algorithm, **along: Any) -> list[Any]:
    _require_linear(op, along["axes"])
    gathered = together(cts, lambda present: communicate("all_gather", *present, dim=dim, stack=False, **along))
    return spread(gathered, op=op, **along)


def _jvp(tangents: Sequence[Any], inputs: Any, outs: Any, **params: Any) -> list[Any]:
    _require_linear(params["op"], params["axes"])
    return [*linear_each("reduce_scatter")(tangents, inputs, outs, **params)]


def _lower(*, dim: int, op: str) -> Lowering:
    return Lowering("reduce_scatter", op=op, cut_dim=dim)


reduce_scatter_p = collective(
    "reduce_scatter",
    infer=_infer,
    reference=_reference,
    vjp=_vjp,
    lower=_lower,
    gives_own_block=True,
    jvp=_jvp,
    dims=("dim",),
)
