"""Ragged collectives between processes: a plan for the largest blocks, of which each call moves what its table says."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.collective_call import CollectiveCall, bind_arguments
from ...runtime.transport import CollectiveExecutable
from ..plans.ragged_words import RaggedWords
from .communicators import Communicators
from .shared_memory_executable import SharedMemoryExecutable

__all__ = ["RaggedExecutable"]


class RaggedExecutable(CollectiveExecutable):
    """One ragged collective. Call it with this rank's operand and the table of sizes to get this rank's result.

    A wrong table raises ShapeError on all ranks of the group before anything is published. Other errors are those of
    `SharedMemoryExecutable`.
    """

    is_native = False
    is_recorded = True

    def __init__(self, registry: Communicators, number: int, call: CollectiveCall):
        assert call.table is not None
        bound, inputs, self.outputs = bind_arguments([call])
        self._call, self.inputs = call, (*inputs, call.table)
        self._moves = SharedMemoryExecutable(registry, number, bound, inputs, self.outputs)
        plan = self._moves.plan
        self._words = RaggedWords(plan.code.tolist(), plan.messages, plan.collectives[0])
        self._written = b""
        """The table whose blocks the words have."""
        self._gaps: list[slice] = []

    @property
    def agreement(self) -> SharedMemoryExecutable:
        """See `CollectiveExecutable`."""
        return self._moves

    def __call__(self, *copies: Any) -> tuple[np.ndarray]:
        """Return the rows that this rank receives, with zeros between them and at the end."""
        self._moves.forget_last_call()  # a wrong table raises before the next one begins
        operand, table = copies
        told = np.asarray(table).tobytes()
        if told == self._written:
            (result,) = self._moves(operand)
        else:
            blocks = self._call.blocks(np.asarray(table))
            self._moves.require_turn()  # else it may run, and its words belong to that call
            self._written = b""
            self._words.write(*self._moves.words, blocks)
            me = self._moves.communicators[0].rank
            self._gaps = _gaps(blocks.places[:, me].tolist(), blocks.sizes[:, me].tolist(), self._call.operands[0].out_shape[0])
            self._written = told
            (result,) = self._moves(operand)
        if self._gaps:
            is_writeable, result.flags.writeable = result.flags.writeable, True  # small results are read-only to all others
            for gap in self._gaps:
                result[gap] = 0
            result.flags.writeable = is_writeable
        return (result,)


def _gaps(places: list[int], sizes: list[int], rows: int) -> list[slice]:
    """Return the rows of a result that no rank has sent."""
    gaps, end = [], 0
    for place, size in sorted(zip(places, sizes, strict=True)):
        if size:
            gaps.append(slice(end, place))
            end = max(end, place + size)
    gaps.append(slice(end, rows))
    return [gap for gap in gaps if gap.start < gap.stop]
