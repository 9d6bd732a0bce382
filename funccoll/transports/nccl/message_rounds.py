"""Rounds of messages over NCCL. They run the proved schedule if NCCL has no such collective, or if you name an algorithm.

Bytes are sent and received in one NCCL group per round. In between this rank combines, as the schedule says. The values, the
order and the NaNs are those of the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...runtime.collective_call import Operand
from ...schedules.chunk_layout import ChunkLayout, Index, joined
from ...schedules.schedule import Schedule
from ...schedules.streams.instructions import Opcode
from ...schedules.streams.streams import Streams
from .gpu_arrays import NcclGpu

__all__ = ["Fold", "MessageRounds"]

Fold = Callable[[str, Sequence[Any], int], Any]
"""(op, sources, ranks of a mean) -> the left fold of the sources, a new array. A mean divides by the ranks at the end."""

_Range = tuple[int, int]
"""Begin and end, in elements, in a rank's memory: its flat input, output and scratch in a row."""


class _Message(NamedTuple):
    peer: int
    range: _Range


class _Combine(NamedTuple):
    op: str
    sources: tuple[_Range, ...]
    destinations: tuple[_Range, ...]


class _Round(NamedTuple):
    sends: list[_Message]
    receives: list[_Message]
    combines: list[_Combine]


class MessageRounds:
    """One operand of a collective as this rank executes its messages."""

    def __init__(self, nccl: Any, schedule: Schedule, operand: Operand, op: str, rank: int, fold: Fold):
        self.nccl, self.operand, self.op, self.rank, self.fold = nccl, operand, op, rank, fold
        self.collective = schedule.collective
        self.layout = operand.layout(self.collective)
        assert self.collective.channels == 1
        self.has_output = bool(self.collective.has_output(rank))
        streams = schedule.messages().verify()
        # In flat memory the blocks are contiguous, so the chunks of input and output are as well.
        self._flat = ChunkLayout.of(self.collective, (operand.size,), operand.dtype.itemsize)
        self._scratch = streams.schedule.scratch_chunks * self._flat.capacity
        self.rounds = self._rounds_of(streams) if operand.size else []

    def _rounds_of(self, streams: Streams) -> list[_Round]:
        """This rank's stream, cut at its POSTs: the messages of each, and the combines after them."""
        rounds, p = [_Round([], [], [])], self.collective.nranks
        for i in range(*streams.start[self.rank : self.rank + 2].tolist()):
            run = int(streams.count[i]), int(streams.part[i]), int(streams.part_step[i])
            dst, src = streams.operands(i)
            match streams.opcode[i]:
                case Opcode.POST:
                    rounds.append(_Round([], [], []))
                case Opcode.SEND:
                    rounds[-1].sends.extend(_Message(dst[0] % p, found) for found in self._ranges(src[0], *run))
                case Opcode.RECEIVE:
                    rounds[-1].receives.extend(_Message(src[0] % p, found) for found in self._ranges(dst[0], *run))
                case Opcode.COMBINE:
                    op = "sum" if self.op == "mean" and not streams.completes[i] else self.op
                    sides = (zip(*(self._ranges(place, *run) for place in places), strict=True) for places in (src, dst))
                    rounds[-1].combines.extend(_Combine(op, *pieces) for pieces in zip(*sides, strict=True))
        return rounds

    def _ranges(self, code: int, count: int, part: int, step: int) -> list[_Range]:
        """The elements of a run of chunks, as ranges: one if the run is contiguous in scratch, too, else one per chunk.

        Both ends of a message, and all operands of a combine, are cut alike.
        """
        row, layout = code // self.collective.nranks, self._flat
        parts = [part + i * step for i in range(count)]
        chunks: list[Index] = [layout.index(row + i, p) for i, p in enumerate(parts)]
        if all(high - low == layout.capacity for low, high in (layout.parts[p] for p in parts[:-1])):
            chunks = [joined(chunks)]
        assert all(isinstance(chunk, slice) for chunk in chunks), "the chunks of a contiguous block are contiguous"
        return [(chunk.start, chunk.stop) for chunk in chunks if isinstance(chunk, slice) and chunk.stop > chunk.start]

    def run(self, communicator: Any, source: Any, gpu: NcclGpu) -> Any:
        """This rank's output. A rank that gets none has zeros. `communicator` is None if the group has one rank."""
        shape, dtype = (self._flat.output.size,), self.operand.dtype
        output = (gpu.allocate if self.has_output else gpu.zeros)(shape, dtype)
        memory = _Memory(gpu, source, output, gpu.allocate((self._scratch,), dtype))
        for messages in self.rounds:
            if messages.sends or messages.receives:
                self._exchange(messages, communicator, memory, gpu.stream())
            for op, sources, destinations in messages.combines:
                values = [memory.view(*where) for where in sources]
                value = self.fold(op, values, self.collective.nranks) if len(values) > 1 else values[0]
                for where in destinations:
                    memory.view(*where)[...] = value
        if self.op in ("max", "min") and self.collective.folds_one(self.rank):  # it has the canonical NaN, too
            output = self.fold(self.op, [output], 1)
        return self.layout.output.shaped(output, self.operand.out_shape)

    def _exchange(self, messages: _Round, communicator: Any, memory: _Memory, stream: int) -> None:
        itemsize, byte = self.layout.itemsize, self.nccl.NCCL_UINT8
        self.nccl.groupStart()
        try:
            for peer, (begin, end) in messages.sends:
                communicator.send(memory.address(begin), (end - begin) * itemsize, byte, peer, stream)
            for peer, (begin, end) in messages.receives:
                communicator.recv(memory.address(begin), (end - begin) * itemsize, byte, peer, stream)
        finally:
            self.nccl.groupEnd()


class _Memory:
    """A rank's flat input, output and scratch, addressed as if they followed each other. The input is only read."""

    def __init__(self, gpu: NcclGpu, *arrays: Any):
        self.arrays = arrays
        self.begins = np.cumsum([0, *(a.shape[0] for a in arrays[:-1])]).tolist()
        self.addresses = [gpu.address(a) for a in arrays]
        self.itemsize = arrays[0].dtype.itemsize

    def _of(self, element: int) -> int:
        return max(i for i, begin in enumerate(self.begins) if begin <= element)

    def address(self, element: int) -> int:
        """The address of an element."""
        number = self._of(element)
        return self.addresses[number] + (element - self.begins[number]) * self.itemsize

    def view(self, begin: int, end: int) -> Any:
        """The elements from `begin` to before `end`, all of one array."""
        number = self._of(begin)
        return self.arrays[number][begin - self.begins[number] : end - self.begins[number]]
