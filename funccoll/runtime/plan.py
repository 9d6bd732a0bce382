"""Plans: one rank's streams as code for the stream interpreter, with bytes in place of chunks.

A plan knows shapes and dtypes, not addresses: these are looked up in every call, when its enter lines are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from ..kernels.cpu import combine_address
from ..kernels.source import ADVANCE, CHECK, COPY, DONE, END, ENTER, LINE_BYTES, LOOK, TAKE, WAIT
from ..kernels.source import COMBINE as FOLD
from ..schedules.layout import Blocks, Layout, Piece
from ..schedules.schedule import Schedule
from ..schedules.streams import COMBINE, Streams

__all__ = ["Communicator", "Lines", "Plan", "Slots"]

_BUFFERS = 3
_PAST_CACHES = 64 << 20
"""Bytes of all ranks' arrays from which on results go past the caches: measured, all_reduce of 64 MiB takes half the time
so, and of 16 MiB the same."""


@dataclass(frozen=True)
class Lines:
    """Where a communicator's lines lie in the heap: of each rank one for each channel. The first begins with the rank's
    counter and goes on with what it publishes when it enters a call; the others hold the other channels' counters."""

    start: int
    nranks: int
    channels: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all lines."""
        return self.nranks * self.channels * LINE_BYTES

    def enter(self, rank: int) -> int:
        """A rank's first line."""
        return self.counter(rank * self.channels)

    def table(self, rank: int) -> int:
        """Where the addresses of one array are: in the rank's first line, behind what every call publishes there."""
        return self.enter(rank) + 32

    def counter(self, stream: int) -> int:
        """A stream's counter."""
        return self.start + stream * LINE_BYTES


@dataclass(frozen=True)
class Slots:
    """The places of one collective in the table of addresses: of each array and rank its input, output and scratch."""

    first: int
    nranks: int

    @property
    def stride(self) -> int:
        """Places from one array to the next."""
        return self.nranks * _BUFFERS

    def of(self, rank: int, buffer: int = 0, array: int = 0) -> int:
        """A rank's buffer of an array: 0 input, 1 output, 2 scratch."""
        return self.first + array * self.stride + rank * _BUFFERS + buffer


@dataclass(frozen=True)
class Communicator:
    """The ranks of one group along some axes of a mesh, of which this process is one, and where their lines are."""

    number: int
    """Its place in the table of bases."""
    members: tuple[int, ...]
    """World ranks, in axis order."""
    rank: int
    """This process's place among them."""
    lines: Lines


@dataclass
class Plan:
    """Code for several collectives in a row; `spans` says by how much each communicator's counters have advanced then."""

    before: list[int] = field(default_factory=list)
    code: list[int] = field(default_factory=list)
    slots: int = 0
    spans: dict[int, int] = field(default_factory=dict)
    places: int = 0
    """The most places that one combine names."""
    starts: list[int] = field(default_factory=list)
    """Where each collective's code begins, counted from the first one's."""

    def add(
        self, schedule: Schedule, arrays: Sequence[tuple[Layout, np.dtype]], op: str, group: Communicator, digest: int,
        table: int | None = None,
    ) -> Slots:  # fmt: skip
        """Append a collective of several arrays, which begins once for all; returns where their addresses must be.

        `digest` is a hash of what is called, the same on all ranks; a peer that shows another one runs something else.
        `table` is this rank's own room in the heap where it publishes the addresses of more than one array.
        """
        slots = Slots(self.slots, schedule.nranks)
        self.slots += len(arrays) * slots.stride
        self.starts.append(len(self.code))
        streams = schedule.streams().verify()
        before = self.spans.get(group.number, 0)
        self.spans[group.number] = before + streams.span
        table = group.lines.table(group.rank) if table is None else table
        _Writer(self, streams, arrays, op, group, (digest, table), slots, before).write()
        return slots

    def take(self, number: int, slot: int, nbytes: int, staging: int) -> None:
        """Before all collectives, take the address of argument `number`, or result ~number, into a slot.

        An argument that is not in the heap is copied to `staging`, once there is such room (-1: none yet).
        """
        self.before += (TAKE, number, slot, nbytes, staging)

    def collective(self, pc: int) -> int:
        """The number of the collective to which the word at `pc` belongs."""
        return max(0, bisect_right(self.starts, pc - len(self.before)) - 1)

    def finish(self) -> np.ndarray:
        """The code, int64."""
        advance = [word for number, span in self.spans.items() for word in (ADVANCE, number, span)]
        return np.array([*self.before, *self.code, *advance, END], np.int64)


@dataclass
class _Writer:
    plan: Plan
    streams: Streams
    arrays: Sequence[tuple[Layout, np.dtype]]
    op: str
    group: Communicator
    entry: tuple[int, int]
    slots: Slots
    before: int
    known: set[int] = field(default_factory=set)
    checked: set[int] = field(default_factory=set)

    def write(self) -> None:
        s, rank, lines, number = self.streams, self.group.rank, self.group.lines, self.group.number
        assert s.schedule.channels == 1, "one stream for each rank"
        begin, end = int(s.start[rank]), int(s.start[rank + 1])
        self.known.add(rank)
        for i in range(begin, end):
            for w in range(int(s.wait_ptr[i]), int(s.wait_ptr[i + 1])):
                stream = int(s.wait_stream[w])
                value = self.before + int(s.wait_value[w])
                self.emit(WAIT, lines.counter(stream), number, value, self.group.members[stream])
                if stream not in self.checked:
                    # Whoever is waited for must be in the same call, also when nothing of it is touched.
                    self.checked.add(stream)
                    entry = (self.before, self.entry[0], self.group.members[stream])
                    self.emit(CHECK, lines.enter(stream), number, *entry)
            if i == begin:
                self.emit(ENTER, lines.enter(rank), number, self.before, *self.entry, *self.places(rank))
            elif s.opcode[i] == COMBINE:
                self.instruction(i)
            done = s.span if i == end - 1 else i - begin + 1
            self.emit(DONE, lines.counter(rank), number, self.before + done)

    def emit(self, *words: int) -> None:
        self.plan.code += words

    def instruction(self, i: int) -> None:
        s, p = self.streams, self.streams.schedule.nranks
        dsts = s.dst[s.dst_ptr[i] : s.dst_ptr[i + 1]].tolist()
        srcs = s.src[s.src_ptr[i] : s.src_ptr[i + 1]].tolist()
        for place in (*dsts, *srcs):
            if place % p not in self.known:
                self.known.add(place % p)
                peer = place % p
                line, member = self.group.lines.enter(peer), self.group.members[peer]
                self.emit(LOOK, line, self.group.number, self.before, self.entry[0], member, *self.places(peer))
        self.plan.places = max(self.plan.places, len(dsts) + len(srcs) + 1)
        m, k, sign = len(dsts), len(srcs), -1 if self.streams_past else 1
        for number, (layout, dtype) in enumerate(self.arrays):
            runs = []
            for place in (*dsts, *srcs):
                row, rank = divmod(place, p)
                pieces = self.pieces(layout, row, int(s.count[i]), int(s.part[i]), int(s.part_step[i]))
                runs.append([(self.slots.of(rank, buffer, number), piece) for buffer, piece in pieces])
            for length, rows, at in _aligned(runs):
                places = [(slot, start * dtype.itemsize, stride * dtype.itemsize) for slot, start, stride in at]
                if k == 1 and p == 1 and self.op in ("max", "min"):  # also alone they give the one canonical NaN
                    again = (*places, places[-1])
                    self.emit(FOLD, combine_address(self.op, dtype), sign * length, 0, rows, m, 2, *chain(*again))
                elif k > 1:
                    divisor = p if self.op == "mean" and self.completes[s.move[i]] else 0
                    self.emit(FOLD, combine_address(self.op, dtype), sign * length, divisor, rows, m, k, *chain(*places))
                else:
                    self.emit(COPY, sign * length * dtype.itemsize, rows, m, *chain(*places[m:], *places[:m]))

    def places(self, rank: int) -> tuple[int, int, int]:
        """How many arrays there are, where a rank's buffers of the first are, and how far the next ones' are from there."""
        return len(self.arrays), self.slots.of(rank), self.slots.stride

    @cached_property
    def streams_past(self) -> bool:
        """Whether what all ranks read and write is more than caches hold."""
        sizes = [(layout.input.size + layout.output.size) * dtype.itemsize for layout, dtype in self.arrays]
        return self.slots.nranks * sum(sizes) > _PAST_CACHES

    @cached_property
    def completes(self) -> np.ndarray:
        """For each row of the schedule's moves, whether it completes a sum."""
        return self.streams.schedule.prove().completes

    def pieces(self, layout: Layout, row: int, count: int, part: int, step: int) -> list[tuple[int, Piece]]:
        """Ranges with their buffers, in order; contiguous neighbours are joined."""
        found: list[tuple[int, Piece]] = []
        for i in range(count):
            for buffer, piece in self.chunk(layout, row + i, part + i * step):
                if piece.rows > 1 and piece.stride == piece.length:
                    piece = Piece(piece.start, 1, 0, piece.rows * piece.length)
                before, last = found[-1] if found else (None, piece)
                if before == buffer and last.rows == piece.rows == 1 and last.start + last.length == piece.start:
                    found[-1] = buffer, last._replace(length=last.length + piece.length)
                else:
                    found.append((buffer, piece))
        return found

    def chunk(self, layout: Layout, row: int, part: int) -> Iterator[tuple[int, Piece]]:
        c = self.streams.schedule.collective
        low, high = int(layout.bounds[part]), int(layout.bounds[part + 1])
        slot = row - c.input_chunks - c.output_chunks
        if slot >= 0:
            if high > low:
                yield 2, Piece(slot * layout.capacity, 1, 0, high - low)
            return
        buffer = int(row >= c.input_chunks)
        blocks: Blocks = (layout.input, layout.output)[buffer]
        for piece in blocks.pieces(int(c.blocks_of_rows[row]), low, high):
            yield buffer, piece


def _aligned(runs: Sequence[list[tuple[int, Piece]]]) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
    """Ranges that all places have in common: (elements, rows, [(slot, first element, from row to row) of each place])."""
    rest = [run[::-1] for run in runs]  # the next piece is the last
    while all(rest):
        heads = [run[-1][1] for run in rest]
        lengths = {piece.length for piece in heads if piece.rows > 1}
        length = lengths.pop() if len(lengths) == 1 else 0
        rows = min(piece.rows if piece.rows > 1 else piece.length // length for piece in heads) if length else 0
        if rows < 2:
            rows, length = 1, min(piece.length for piece in heads)
        steps = [piece.stride if piece.rows > 1 else length for piece in heads]
        yield length, rows, [(run[-1][0], run[-1][1].start, step) for run, step in zip(rest, steps, strict=True)]
        for run, piece in zip(rest, heads, strict=True):
            slot, _ = run.pop()
            run += [(slot, left) for left in _without(piece, rows, length)]


def _without(piece: Piece, rows: int, length: int) -> list[Piece]:
    """What is left of a piece without its first `rows` rows of `length` elements, the next part last."""
    if piece.rows == 1:
        left = piece.length - rows * length
        return [Piece(piece.start + rows * length, 1, 0, left)] if left else []
    if length == piece.length:
        left = piece.rows - rows
        return [Piece(piece.start + rows * piece.stride, left, piece.stride, length)] if left else []
    first = Piece(piece.start + length, 1, 0, piece.length - length)
    return [Piece(piece.start + piece.stride, piece.rows - 1, piece.stride, piece.length), first]
