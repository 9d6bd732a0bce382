"""ragged_all_gather: every device gets the rows of all devices, one block after the other, as many as a table says.

Cost: at least ⌈log₂ p⌉α, and the bytes of all rows but a device's own. Each device reads the blocks where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.types import ArrayType
from ..ops.indexing import getitem
from ..primitives.combining import Shards
from ..primitives.varying import axis_index_p, pvary
from .pair_blocks import PairBlocks, check_operands, of_sources, received
from .record import Lowering, ragged_collective

__all__ = ["ragged_all_gather_p"]


def _infer(
    x: ArrayType, table: ArrayType, *, axes: tuple[str, ...], size: int, rows: int, algorithm: str | None
) -> list[ArrayType]:
    check_operands("ragged_all_gather", x, table, axes, [(size,)], rows)
    return [ArrayType((rows, *x.shape[1:]), x.dtype, x.varying - set(axes))]


def _reference(shards: Shards, blocks: PairBlocks, *, rows: int, **_: Any) -> list[Any]:
    return received(blocks, shards, rows)[:1]


def _vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Any, *, axes: tuple[str, ...], **_: Any) -> list[Any]:
    """Each device takes its own rows of the cotangent, which is equal on all of them. Nothing is sent."""
    (ct,), (x, table) = cts, inputs
    place = bind(axis_index_p, axes=axes)
    begin, size = getitem(np.cumsum(table) - table, place), getitem(table, place)
    own = np.arange(x.shape[0])
    rows = np.take(pvary(ct, axes), np.minimum(own + begin, max(ct.shape[0] - 1, 0)), axis=0)
    counts = np.reshape(own < size, (-1, *(1,) * (ct.ndim - 1)))
    return [np.where(counts, rows, np.zeros((), ct.dtype)), None]


def _lower(*, rows: int) -> Lowering:
    return Lowering("all_gather")


ragged_all_gather_p = ragged_collective(
    "ragged_all_gather", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, pairs={1: of_sources}
)
