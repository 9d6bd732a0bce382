"""ragged_reduce_scatter: each device gets its own rows of the reduction of all devices' values, as many as a table says.

Cost: at least ⌈log₂ p⌉α, and the bytes of all rows but a device's own. Each device reads its rows of all values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import primitive_named
from ..core.types import ArrayType
from ..errors import VaryingError
from ..primitives.combining import Shards
from ..primitives.operand_rules import check_op
from ..primitives.varying import spread
from .pair_blocks import PairBlocks, check_operands, of_results
from .record import Combine, Lowering, in_axis_order, ragged_collective

__all__ = ["ragged_reduce_scatter_p"]


def _infer(
    x: ArrayType, table: ArrayType, *, axes: tuple[str, ...], size: int, rows: int, op: str, algorithm: str | None
) -> list[ArrayType]:
    check_operands("ragged_reduce_scatter", x, table, axes, [(size,), (size, size)], rows)
    check_op("ragged_reduce_scatter", x, op)
    return [ArrayType((rows, *x.shape[1:]), x.dtype, x.varying)]


def _reference(
    shards: Shards, blocks: PairBlocks, *, rows: int, op: str, combine: Combine = in_axis_order, **_: Any
) -> list[Any]:
    results = []
    for to in range(len(shards)):
        start, size = int(blocks.starts[0, to]), int(blocks.sizes[0, to])
        result = np.zeros((rows, *shards[0].shape[1:]), shards[0].dtype)
        result[:size] = combine(to, [shard[start : start + size] for shard in shards], op)
        results.append(result)
    return results


def _require_linear(op: str) -> None:
    if op not in ("sum", "mean"):
        raise VaryingError(
            f'ragged_reduce_scatter with op="{op}" has no gradient. Use fc.all_reduce(x, axis, op="{op}"), which has one, and '
            "take your own rows of its result."
        )


def _vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Any, *, rows: int, op: str, **along: Any) -> list[Any]:
    _require_linear(op)
    (ct,), (x, table) = cts, inputs
    sizes = table if len(table.shape) == 1 else table[0]
    gathered = bind(primitive_named("ragged_all_gather"), ct, sizes, rows=x.shape[0], **along)
    return [*spread(gathered, along["axes"], op, along["size"]), None]


def _lower(*, rows: int, op: str) -> Lowering:
    return Lowering("reduce_scatter", op=op)


ragged_reduce_scatter_p = ragged_collective(
    "ragged_reduce_scatter",
    infer=_infer,
    reference=_reference,
    vjp=_vjp,
    lower=_lower,
    pairs={1: of_results, 2: of_results},
    require_linear=_require_linear,
)
