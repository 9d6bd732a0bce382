"""Plans: one rank's streams as code for the stream interpreter, with bytes in place of chunks.

A plan knows shapes and dtypes, not addresses: these are looked up in every call, when its enter lines are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from ...kernels.cpu import combine_address
from ...kernels.stream_interpreter import ADVANCE, CHECK, COPY, DONE, END, ENTER, LINE_BYTES, LOOK, STAGE, TAKE, WAIT
from ...kernels.stream_interpreter import COMBINE as FOLD
from ...schedules.chunk_layout import ChunkLayout, StridedRange
from ...schedules.schedule import Schedule
from ...schedules.streams.streams import COMBINE, Streams
from .staging import Part, is_strided, shared_chunks, staged

__all__ = ["Communicator", "ControlBlock", "Plan", "Slots"]

_LINE_HEAD = 32
"""Bytes of a line that every call publishes: counter, number, hash, where its addresses are."""
_PAST_CACHES = 64 << 20
"""Bytes of all ranks' arrays from which on results go past the caches: measured, all_reduce of 64 MiB takes half the time
so, and of 16 MiB the same."""


@dataclass(frozen=True)
class ControlBlock:
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
        """Where the addresses of a call's arrays are, when they fit: in the rank's first line, behind its head."""
        return self.enter(rank) + _LINE_HEAD

    @property
    def table_bytes(self) -> int:
        """How much room there is."""
        return LINE_BYTES - _LINE_HEAD

    def counter(self, stream: int) -> int:
        """A stream's counter."""
        return self.start + stream * LINE_BYTES


@dataclass(frozen=True)
class Slots:
    """Where one collective's addresses are in the table: of each array and rank its input, output and scratch.

    Where inputs are staged, each chunk of one has its own slot; and this rank has one more for where each array is, and two
    for the room that chunks are copied to, and for what nobody reads.
    """

    first: int
    nranks: int
    arrays: int
    inputs: int = 1
    """Slots of one input."""
    staged: bool = False

    @property
    def width(self) -> int:
        """Slots of one array and rank."""
        return self.inputs + 2

    @property
    def stride(self) -> int:
        """Slots from one array to the next."""
        return self.nranks * self.width

    @property
    def count(self) -> int:
        """All slots."""
        return self.arrays * self.stride + (self.arrays + 2 if self.staged else 0)

    def of(self, rank: int, number: int = 0, array: int = 0) -> int:
        """One of a rank's slots for an array; the first is the input's, or its first chunk's."""
        return self.first + array * self.stride + rank * self.width + number

    def output(self, rank: int, array: int) -> int:
        """A rank's output."""
        return self.of(rank, self.inputs, array)

    def scratch(self, rank: int, array: int) -> int:
        """A rank's scratch."""
        return self.of(rank, self.inputs + 1, array)

    def taken(self, rank: int, array: int) -> int:
        """Where the address of this rank's array goes."""
        return self.first + self.arrays * self.stride + array if self.staged else self.of(rank, 0, array)

    @property
    def room(self) -> int:
        """The address of the room for copies; nobody reads the next slot."""
        return self.first + self.arrays * (self.stride + 1)


@dataclass(frozen=True)
class Communicator:
    """The ranks of one group along some axes of a mesh, of which this process is one, and where their lines are."""

    number: int
    """Its place in the table of bases."""
    members: tuple[int, ...]
    """World ranks, in axis order."""
    rank: int
    """This process's place among them."""
    lines: ControlBlock


@dataclass
class Plan:
    """Code for several collectives in a row; `spans` says by how much each communicator's counters have advanced then."""

    before: list[int] = field(default_factory=list)
    code: list[int] = field(default_factory=list)
    slots: int = 0
    spans: dict[int, int] = field(default_factory=dict)
    widest: int = 0
    """The most places that one combine names."""
    starts: list[int] = field(default_factory=list)
    """Where each collective's code begins, counted from the first one's."""

    def add(
        self, schedule: Schedule, layouts: Sequence[ChunkLayout], dtypes: Sequence[np.dtype], op: str, group: Communicator,
        digest: int, room: Callable[[int], int], pieces: Sequence[Mapping[int, ChunkLayout]] = (),
    ) -> tuple[Slots, int]:  # fmt: skip
        """Append a collective of several arrays, which begins once for all.

        `digest` is a hash of what is called, the same on all ranks; a peer that shows another one runs something else.
        `room` gives bytes of this rank's own in the heap, to publish there more addresses than a line holds. `pieces`: what
        each piece has of which arrays, when inputs are staged. Returns where addresses must be, and how much room, at the
        address in `slots.room`, copies of private inputs need.
        """
        streams = schedule.streams().verify()
        inputs = schedule.collective.input_chunks if pieces else 1
        slots = Slots(self.slots, schedule.nranks, len(dtypes), inputs, bool(pieces))
        self.slots += slots.count
        self.starts.append(len(self.code))
        published = 8 * slots.width * len(dtypes)
        table = group.lines.table(group.rank) if published <= group.lines.table_bytes else room(published)
        shared = shared_chunks(streams, group.rank) if pieces else {}
        nbytes = sum((layout.input.size + layout.output.size) * layout.itemsize for layout in layouts)
        past, copies = schedule.nranks * nbytes > _PAST_CACHES, [staged(piece, shared) for piece in pieces]
        half, writers = max((used for _, used in copies), default=0), []
        for k, piece in enumerate(pieces or [dict(enumerate(layouts))]):
            before = self.spans.get(group.number, 0)
            self.spans[group.number] = before + streams.span
            parts = copies[k][0] if pieces else {}
            arrays = [_Array(i, layout, dtypes[i], parts.get(i, [])) for i, layout in piece.items()]
            entry = (digest, table)
            writers.append(_Writer(self, streams, arrays, op, group, entry, slots, before, past, k % 2 * half))
        writers[0].stage_copies()
        for writer, following in zip(writers, [*writers[1:], None], strict=True):
            writer.write(following)
        return slots, half * min(2, len(writers))

    def take(self, number: int, slot: int, nbytes: int, staging: int = -1) -> None:
        """Before all collectives, take the address of argument `number`, or result ~number, into a slot.

        An argument outside of the heap is copied to `staging`, once there is such room (-1: none yet), or staged (-2).
        """
        self.before += (TAKE, number, slot, nbytes, staging)

    def collective(self, pc: int) -> int:
        """The number of the collective to which the word at `pc` belongs."""
        return max(0, bisect_right(self.starts, pc - len(self.before)) - 1)

    def finish(self) -> np.ndarray:
        """The code, int64."""
        advance = [word for number, span in self.spans.items() for word in (ADVANCE, number, span)]
        return np.array([*self.before, *self.code, *advance, END], np.int64)


class _Array(NamedTuple):
    """An array of a piece: its number, and what the piece has of it."""

    number: int
    layout: ChunkLayout
    dtype: np.dtype
    parts: list[Part]


@dataclass
class _Writer:
    """Writes the code of one piece."""

    plan: Plan
    streams: Streams
    arrays: Sequence[_Array]
    op: str
    group: Communicator
    entry: tuple[int, int]
    slots: Slots
    before: int
    past: bool
    """Whether what all ranks read and write is more than caches hold."""
    room: int
    """Where this piece's copies begin in the room."""
    known: set[int] = field(default_factory=set)
    checked: set[int] = field(default_factory=set)

    def write(self, following: _Writer | None) -> None:
        """All of it; as soon as others can read this piece, the following one is copied."""
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
                self.stage_places()
                self.emit(ENTER, lines.enter(rank), number, self.before, *self.entry, *self.table(rank))
            elif s.opcode[i] == COMBINE:
                self.instruction(i)
            done = s.span if i == end - 1 else i - begin + 1
            self.emit(DONE, lines.counter(rank), number, self.before + done)
            if i == begin and following is not None:
                following.stage_copies()

    def emit(self, *words: int) -> None:
        self.plan.code += words

    def stage_copies(self) -> None:
        """Copy what others read of private arrays."""
        for number, _, _, parts in self.arrays:
            for part in parts:
                if part.copy >= 0:
                    self.stage(number, part, self.slots.room + 1, part.nbytes)

    def stage_places(self) -> None:
        """Say where all is."""
        for number, _, _, parts in self.arrays:
            for part in parts:
                self.stage(number, part, self.slots.of(self.group.rank, part.chunk, number), 0)

    def stage(self, number: int, part: Part, to: int, nbytes: int) -> None:
        taken, output = self.slots.taken(self.group.rank, number), self.slots.output(self.group.rank, number)
        at, room = (part.copy, output) if part.in_output else (part.copy + self.room * (part.copy >= 0), self.slots.room)
        self.emit(STAGE, taken, to, part.start, at, room, nbytes)

    def instruction(self, i: int) -> None:
        s, p = self.streams, self.streams.schedule.nranks
        dsts = s.dst[s.dst_ptr[i] : s.dst_ptr[i + 1]].tolist()
        srcs = s.src[s.src_ptr[i] : s.src_ptr[i + 1]].tolist()
        for place in (*dsts, *srcs):
            if place % p not in self.known:
                self.known.add(place % p)
                peer = place % p
                line, member = self.group.lines.enter(peer), self.group.members[peer]
                self.emit(LOOK, line, self.group.number, self.before, self.entry[0], member, *self.table(peer))
        self.plan.widest = max(self.plan.widest, len(dsts) + len(srcs) + 1)
        m, k, sign = len(dsts), len(srcs), -1 if self.past else 1
        for number, layout, dtype, _ in self.arrays:
            runs = []
            for place in (*dsts, *srcs):
                row, rank = divmod(place, p)
                pieces = self.pieces(layout, row, int(s.count[i]), int(s.part[i]), int(s.part_step[i]))
                runs.append([(self.slots.of(rank, at, number), piece) for at, piece in pieces])
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

    def table(self, rank: int) -> tuple[int, int, int, int]:
        """How many arrays there are, how many slots each has, the first one's first, how far the next one's is from there."""
        first, last = (self.arrays[0].number, self.arrays[-1].number) if self.arrays else (0, -1)
        return last - first + 1, self.slots.width, self.slots.of(rank, 0, first), self.slots.stride

    @cached_property
    def completes(self) -> np.ndarray:
        """For each row of the schedule's moves, whether it completes a sum."""
        return self.streams.schedule.prove().completes

    def pieces(self, layout: ChunkLayout, row: int, count: int, part: int, step: int) -> list[tuple[int, StridedRange]]:
        """Ranges with the places of their buffers, in order; contiguous neighbours are joined."""
        found: list[tuple[int, StridedRange]] = []
        for i in range(count):
            for place, piece in self.chunk(layout, row + i, part + i * step):
                if piece.rows > 1 and piece.stride == piece.length:
                    piece = StridedRange(piece.start, 1, 0, piece.rows * piece.length)
                before, last = found[-1] if found else (None, piece)
                if before == place and last.rows == piece.rows == 1 and last.start + last.length == piece.start:
                    found[-1] = place, last._replace(length=last.length + piece.length)
                else:
                    found.append((place, piece))
        return found

    def chunk(self, layout: ChunkLayout, row: int, part: int) -> Iterator[tuple[int, StridedRange]]:
        c, inputs = self.streams.schedule.collective, self.slots.inputs
        low, high = layout.parts[part]
        slot = row - c.input_chunks - c.output_chunks
        if slot >= 0:
            if high > low:
                yield inputs + 1, StridedRange(slot * layout.capacity, 1, 0, high - low)
            return
        is_input, block = row < c.input_chunks, int(c.blocks_of_rows[row])
        pieces = (layout.input if is_input else layout.output).pieces(block, low, high)
        if is_input and self.slots.staged:
            if pieces and not is_strided(layout):
                pieces = [pieces[0]._replace(start=0)]
            yield from ((row, piece) for piece in pieces)
        else:
            yield from ((0 if is_input else inputs, piece) for piece in pieces)


def _aligned(runs: Sequence[list[tuple[int, StridedRange]]]) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
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


def _without(piece: StridedRange, rows: int, length: int) -> list[StridedRange]:
    """What is left of a piece without its first `rows` rows of `length` elements, the next part last."""
    if piece.rows == 1:
        left = piece.length - rows * length
        return [StridedRange(piece.start + rows * length, 1, 0, left)] if left else []
    if length == piece.length:
        left = piece.rows - rows
        return [StridedRange(piece.start + rows * piece.stride, left, piece.stride, length)] if left else []
    first = StridedRange(piece.start + length, 1, 0, piece.length - length)
    return [StridedRange(piece.start + piece.stride, piece.rows - 1, piece.stride, piece.length), first]
