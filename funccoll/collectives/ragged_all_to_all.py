"""ragged_all_to_all: every device sends rows of its operand to each device, as many as a table says.

Cost: at least ⌈log₂ p⌉α, and the bytes of the largest sum that one device sends or receives. Each device reads the rows where
they are (Bruck's algorithm would move padding).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.types import ArrayType
from ..primitives.combining import Shards
from .pair_blocks import PairBlocks, as_stated, check_operands, in_order, received
from .record import Lowering, ragged_collective

__all__ = ["ragged_all_to_all_p"]


def _infer(
    x: ArrayType, table: ArrayType, *, axes: tuple[str, ...], size: int, rows: int, algorithm: str | None
) -> list[ArrayType]:
    check_operands("ragged_all_to_all", x, table, axes, [(size, size), (size, 4, size)], rows)
    return [ArrayType((rows, *x.shape[1:]), x.dtype, x.varying)]


def _reference(shards: Shards, blocks: PairBlocks, *, rows: int, **_: Any) -> list[Any]:
    return received(blocks, shards, rows)


def _transposed(table: Any) -> Any:
    """The table of the gradient: what each rank has received goes back to where it came from.

    (rank, what, peer): what a peer has stated about a pair, the rank states now. Inputs and outputs change places.
    """
    if len(table.shape) == 2:
        return np.transpose(table)
    starts, sent, places, expected = (table[:, what] for what in range(4))
    return np.stack([np.transpose(places), expected, np.transpose(starts), sent], axis=1)


def _vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Any, *, rows: int, **along: Any) -> list[Any]:
    (ct,), (x, table) = cts, inputs
    back = bind(ragged_all_to_all_p, ct, _transposed(table), rows=x.shape[0], **along)
    return [back[0], None]


def _lower(*, rows: int) -> Lowering:
    return Lowering("all_to_all")


ragged_all_to_all_p = ragged_collective(
    "ragged_all_to_all", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, pairs={2: in_order, 3: as_stated}
)
