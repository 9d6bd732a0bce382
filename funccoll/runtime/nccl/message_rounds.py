"""Rounds of messages over NCCL: what a schedule's proof is about, where NCCL has no such collective or another is forced.

Bytes are sent and received in one NCCL group per round; in between this rank combines, as the schedule says. The values, the
order and the NaNs are those of the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...schedules.chunk_layout import ChunkLayout, Index, joined
from ...schedules.messages.messages import Messages, Transfers
from ...schedules.schedule import Schedule
from ..plans.flat_operand import FlatOperand
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

    def __init__(self, nccl: Any, schedule: Schedule, flat: FlatOperand, op: str, rank: int, fold: Fold):
        self.nccl, self.flat, self.op, self.rank, self.fold = nccl, flat, op, rank, fold
        self.collective = schedule.collective
        assert self.collective.channels == 1
        self.has_output = bool(self.collective.has_output(rank))
        messages = schedule.messages().verify()
        # The blocks are contiguous, so the chunks of input and output are as well.
        self._layout = ChunkLayout.of(self.collective, (flat.input_size,), flat.dtype.itemsize)
        self._scratch = messages.places.scratch_chunks * self._layout.capacity
        self.rounds = self._rounds_of(messages)

    def _rounds_of(self, messages: Messages) -> list[_Round]:
        rounds = [_Round([], [], []) for _ in range(messages.nrounds + 1)]
        if not self.flat.elements:
            return rounds
        sides: list[tuple[Transfers, str]] = [(messages.sends, "sends"), (messages.receives, "receives")]
        for side, name in sides:
            for i in np.flatnonzero(side.rank == self.rank).tolist():
                ranges = self._ranges(side.place[i], side.count[i], side.part[i], side.part_step[i])
                getattr(rounds[side.round[i]], name).extend(_Message(int(side.peer[i]), found) for found in ranges)
        c = messages.combines
        complete = _completes(messages) if self.op == "mean" else np.zeros(len(c), bool)
        for i in np.flatnonzero(c.rank == self.rank).tolist():
            run = c.count[i], c.part[i], c.part_step[i]
            sources = [self._ranges(code, *run) for code in c.src[c.src_ptr[i] : c.src_ptr[i + 1]]]
            destinations = [self._ranges(code, *run) for code in c.dst[c.dst_ptr[i] : c.dst_ptr[i + 1]]]
            op = "sum" if self.op == "mean" and not complete[i] else self.op
            pieces = zip(zip(*sources, strict=True), zip(*destinations, strict=True), strict=True)
            rounds[c.round[i]].combines.extend(_Combine(op, tuple(src), tuple(dst)) for src, dst in pieces)
        return rounds

    def _ranges(self, code: int, count: int, part: int, step: int) -> list[_Range]:
        """The elements of a run of chunks, as ranges: one where the run is contiguous in scratch, too, else one per chunk.

        Both ends of a message, and all operands of a combine, are cut alike.
        """
        row, layout = int(code) // self.collective.nranks, self._layout
        parts = [int(part) + i * int(step) for i in range(int(count))]
        chunks: list[Index] = [layout.index(row + i, p) for i, p in enumerate(parts)]
        if all(high - low == layout.capacity for low, high in (layout.parts[p] for p in parts[:-1])):
            chunks = [joined(chunks)]
        assert all(isinstance(chunk, slice) for chunk in chunks), "the chunks of a contiguous block are contiguous"
        return [(chunk.start, chunk.stop) for chunk in chunks if isinstance(chunk, slice) and chunk.stop > chunk.start]

    def run(self, communicator: Any, source: Any, gpu: NcclGpu) -> Any:
        """This rank's output; a rank that gets none has zeros. `communicator` is None where the group has one rank."""
        shape, dtype = (self.flat.output_size,), self.flat.dtype
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
        if self.op in ("max", "min") and self.collective.nranks == 1:  # a fold of one has the canonical NaN, too
            output = self.fold(self.op, [output], 1)
        return self.flat.shaped_output(output)

    def _exchange(self, messages: _Round, communicator: Any, memory: _Memory, stream: int) -> None:
        itemsize, byte = self.flat.dtype.itemsize, self.nccl.NCCL_UINT8
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
        """The elements from `begin` to before `end`, which are of one array."""
        number = self._of(begin)
        return self.arrays[number][begin - self.begins[number] : end - self.begins[number]]


def _completes(messages: Messages) -> np.ndarray:
    """By row of the combines: True where the contributions of all ranks come together, so that a mean is divided there."""
    collective, c = messages.schedule.collective, messages.combines
    p = collective.nranks
    ranks = np.zeros(messages.places.size, np.int64)  # contributions in what each place holds
    ranks[: collective.input_chunks * p] = 1
    sent, into = messages.matched()  # in the order of rounds, as the combines are
    found = np.zeros(len(c), bool)
    for number in range(messages.nrounds + 1):
        low, high = np.searchsorted(messages.sends.round[sent], [number, number + 1])
        for i, j in zip(sent[low:high].tolist(), into[low:high].tolist(), strict=True):
            chunks = p * np.arange(int(messages.sends.count[i]))
            ranks[messages.receives.place[j] + chunks] = ranks[messages.sends.place[i] + chunks]
        for i in range(*np.searchsorted(c.round, [number, number + 1]).tolist()):
            chunks = p * np.arange(int(c.count[i]))
            sources = c.src[c.src_ptr[i] : c.src_ptr[i + 1]]
            total = sum(ranks[code + chunks] for code in sources)
            for code in c.dst[c.dst_ptr[i] : c.dst_ptr[i + 1]]:
                ranks[code + chunks] = total
            whole = np.asarray(total == p)
            assert whole.all() or not whole.any(), "the chunks of a run hold contributions of equal numbers"
            found[i] = len(sources) > 1 and bool(whole.all())
    return found
