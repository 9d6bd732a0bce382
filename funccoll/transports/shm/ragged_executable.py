"""Ragged collectives between processes: a plan for the largest blocks, of which each call moves what its table says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...collectives.pair_blocks import READINGS
from ...collectives.record import CollectivePrimitive
from ...runtime.collective_call import CollectiveCall, bind_arguments
from ...runtime.transport import CollectiveExecutable
from ..plans.ragged_words import RaggedWords
from .communicators import Communicators
from .ragged_call import IS_WRITTEN, RaggedCall, gaps_of, new_state, set_gaps, state_table
from .shared_memory_executable import SharedMemoryExecutable

__all__ = ["RaggedExecutable"]


class RaggedExecutable(RaggedCall, CollectiveExecutable):
    """One ragged collective. Call it with this rank's operand and the table of sizes to get this rank's result.

    A wrong table raises ShapeError on all ranks of the group before anything is published. Other errors are those of
    `SharedMemoryExecutable`.
    """

    is_native = False
    is_recorded = runs_in_background = True

    def __init__(self, registry: Communicators, number: int, call: CollectiveCall):
        assert call.table is not None
        bound, inputs, self.outputs = bind_arguments([call])
        self._call, self.inputs = call, (*inputs, call.table)
        self._moves = SharedMemoryExecutable(registry, number, bound, inputs, self.outputs)
        plan, shape = self._moves.plan, call.table.type.shape
        self._words = RaggedWords(plan.code.tolist(), plan.messages, plan.collectives[0])
        (operand,), communicator = call.operands, self._moves.communicators[0]
        nranks, self._table_words = call.schedule.nranks, math.prod(shape)
        self._state = new_state(nranks, self._table_words)
        self._places = self._words.places(*self._moves.words)
        assert isinstance(call.definition, CollectivePrimitive)
        assert call.definition.pairs is not None
        rows, result_rows = operand.shape[0], operand.out_shape[0]
        self.bind(
            self._moves,
            self._state.ctypes.data,
            *(value for table in self._places for value in (table.ctypes.data, len(table))),
            (nranks, communicator.rank, rows, result_rows, self._words.row_bytes, self._table_words),
            READINGS.index(call.definition.pairs[len(shape)]),
            call.schedule.collective.meaning.combines,
            plan.collectives[0].exceeds_caches,
        )

    @property
    def agreement(self) -> SharedMemoryExecutable:
        """See `CollectiveExecutable`."""
        return self._moves

    def fallback(self, arrays: tuple[Any, ...]) -> tuple[np.ndarray]:
        """Return the rows that this rank receives, with zeros between them and at the end, by Python alone."""
        self._moves.forget_last_call()  # a wrong table raises before the next one begins
        operand, given = arrays
        table, state = np.asarray(given), self._state
        written = state_table(state, self._table_words)
        if not state[IS_WRITTEN] or not np.array_equal(table.ravel(), written):
            blocks = self._call.blocks(table)
            self._moves.require_turn()  # else it may run, and its words belong to that call
            state[IS_WRITTEN] = 0
            self._words.write(*self._moves.words, blocks)
            me, (shape,) = self._moves.communicators[0].rank, self._call.operands
            set_gaps(state, blocks.places[:, me].tolist(), blocks.sizes[:, me].tolist(), shape.out_shape[0])
            written[:] = table.ravel()
            state[IS_WRITTEN] = 1
        gaps = gaps_of(state)
        (result,) = self._moves(operand)
        if gaps:
            is_writeable, result.flags.writeable = result.flags.writeable, True  # small results are read-only to all others
            for begin, end in gaps:
                result[begin:end] = 0
            result.flags.writeable = is_writeable
        return (result,)
