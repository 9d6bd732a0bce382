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

    @property
    def agreement(self) -> SharedMemoryExecutable:
        """See `CollectiveExecutable`."""
        return self._moves

    def __call__(self, *copies: Any) -> tuple[np.ndarray]:
        """Return the rows that this rank receives, with zeros between them and at the end."""
        operand, table = copies
        blocks = self._call.blocks(np.asarray(table))
        (result,) = self._moves.with_words(lambda code, messages: self._words.write(code, messages, blocks), operand)
        me = self._moves.communicators[0].rank
        _clear_between(result, blocks.places[:, me].tolist(), blocks.sizes[:, me].tolist())
        return (result,)


def _clear_between(result: np.ndarray, places: list[int], sizes: list[int]) -> None:
    """Set the rows that no rank has sent to zero."""
    gaps, end = [], 0
    for place, size in sorted(zip(places, sizes, strict=True)):
        if size:
            gaps.append((end, place))
            end = max(end, place + size)
    gaps.append((end, len(result)))
    is_read_only, result.flags.writeable = not result.flags.writeable, True  # small results are, for everyone else
    for begin, stop in gaps:
        if begin < stop:
            result[begin:stop] = 0
    result.flags.writeable = not is_read_only
