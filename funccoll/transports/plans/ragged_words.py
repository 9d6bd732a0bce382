"""The words of a plan that hold the sizes of a ragged collective's blocks: they are written anew before each call.

A plan is written for the largest blocks, which do not overlap. So its hazards and waits are those of every call. A call moves a
part of each block: it changes the offsets and lengths of COPY and COMBINE, and of messages. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...collectives.pair_blocks import PairBlocks
from ...schedules.streams.instructions import Instruction, Opcode, disassemble
from .planned_collective import PlannedCollective
from .transit import Message

__all__ = ["RaggedWords"]

_MEMORY_WORDS = 3
_STARTS, _PLACES, _SIZES = range(3)


class _Place(NamedTuple):
    """A memory operand: the index of its block's beginning among the values of a call, None for scratch, and of its size."""

    begin: int | None
    size: int
    within: int
    """Bytes from the block's beginning on."""


class RaggedWords:
    """The words of one rank's plan of a ragged collective, and of its table of messages, that follow the blocks of a call."""

    def __init__(self, code: Sequence[int], messages: Sequence[Message], collective: PlannedCollective):
        self._collective = collective
        (operand,) = collective.call.operands
        (layout,) = collective.segments[0].values()
        assert layout.collective.parts == 1, "a ragged collective moves whole blocks"
        self._nranks, self._itemsize = collective.schedule.nranks, operand.dtype.itemsize
        self._most = layout.capacity * operand.dtype.itemsize
        self.row_bytes = int(np.prod(operand.shape[1:], dtype=np.int64)) * operand.dtype.itemsize
        offsets, lengths = _Columns(3), _Columns(5)
        for instruction in disassemble(code):
            if instruction.opcode in (Opcode.COPY, Opcode.COMBINE):
                self._note(instruction, offsets, lengths)
        self._code = offsets.arrays(), lengths.arrays()
        offsets, lengths = _Columns(3), _Columns(5)
        for number, message in enumerate(messages):
            place = self._place(message.slot, message.offset)
            if place.begin is not None:
                offsets.add(number, place.begin, place.within)
            lengths.add(number, place.size, place.within, message.nbytes, 1)
        self._messages = offsets.arrays(), lengths.arrays()

    def write(self, code: np.ndarray, messages: np.ndarray | None, blocks: PairBlocks) -> None:
        """Write the blocks of a call into a plan's code, and into the rows of its messages (`MessageTable.rows`)."""
        values = np.concatenate([blocks.starts.ravel(), blocks.places.ravel(), blocks.sizes.ravel()]) * self.row_bytes
        offsets, lengths = self._code
        code[offsets[0]] = _offsets(values, *offsets[1:])
        code[lengths[0]] = _lengths(values, *lengths[1:])
        if messages is not None:
            offsets, lengths = self._messages
            messages[offsets[0], 2] = _offsets(values, *offsets[1:])
            messages[lengths[0], 3] = _lengths(values, *lengths[1:])

    def places(self, code: np.ndarray, messages: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return what `write` does, as tables for C: rows of (address of a word, begin, within) for offsets, and of (address,
        size, within, most, unit) for lengths. Begins and sizes are places among starts, places and sizes of all pairs."""
        (offsets, lengths), tables = self._code, []
        for columns in (offsets, lengths):
            tables.append([np.stack([code.ctypes.data + code.itemsize * columns[0], *columns[1:]], axis=1)])
        if messages is not None:
            for number, columns in enumerate(self._messages):
                begin, step = messages.ctypes.data + (2 + number) * messages.itemsize, messages.strides[0]
                tables[number].append(np.stack([begin + step * columns[0], *columns[1:]], axis=1))
        offsets, lengths = (np.ascontiguousarray(np.concatenate(parts), np.int64) for parts in tables)
        return offsets, lengths

    def _note(self, instruction: Instruction, offsets: _Columns, lengths: _Columns) -> None:
        opcode, size = instruction.opcode, None
        word = instruction.pc + opcode.words
        for memory in (memory for operands in instruction.memory.values() for memory in operands):
            place = self._place(memory.slot, memory.offset)
            if place.begin is not None:
                offsets.add(word + 1, place.begin, place.within)
            if size is None or size.begin is None:
                size = place
            word += _MEMORY_WORDS
        assert size is not None
        assert instruction.operands["rows"] == 1, "blocks of rows are contiguous"
        name, unit = ("nbytes", 1) if opcode == Opcode.COPY else ("count", self._itemsize)
        length = instruction.operands[name]
        sign = -1 if length < 0 else 1  # a negative length asks for non-temporal stores
        lengths.add(instruction.pc + opcode.offset(name), size.size, size.within, abs(length) * unit, sign * unit)

    def _place(self, slot: int, offset: int) -> _Place:
        """The block of a memory operand."""
        c, p = self._collective, self._nranks
        kind, me = c.schedule.collective, c.communicator.rank
        rank, buffer = divmod(slot - c.first_slot, c.slot_width)
        block, within = divmod(offset, self._most)
        if buffer == 0:
            source, to = rank, block if kind.input_blocks > 1 else me
        elif buffer == 1:
            source, to = block if kind.output_blocks > 1 else me, rank
        else:  # contributions of ranks of other hosts, which are combined here
            assert kind.meaning.combines, "only a reduction has scratch"
            source, to = me, me
        pair = source * p + to
        begin = {0: _STARTS * p * p + pair, 1: _PLACES * p * p + pair}.get(buffer)
        return _Place(begin, _SIZES * p * p + pair, within)


class _Columns:
    """Rows of integers, gathered one by one."""

    def __init__(self, width: int):
        self._width, self._rows = width, list[tuple[int, ...]]()

    def add(self, *row: int) -> None:
        self._rows.append(row)

    def arrays(self) -> list[np.ndarray]:
        return [*np.array(self._rows, np.int64).reshape(-1, self._width).T]


def _offsets(values: np.ndarray, begins: np.ndarray, within: np.ndarray) -> np.ndarray:
    return values[begins] + within


def _lengths(values: np.ndarray, sizes: np.ndarray, within: np.ndarray, most: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return np.clip(values[sizes] - within, 0, most) // unit
