"""The code of one collective in a plan: one rank's streams, with bytes in place of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...schedules.chunk_layout import ChunkLayout, StridedRange
from ...schedules.streams.instructions import NO_COPY, NO_MAILBOX, MemoryOperand, Opcode
from .planned_collective import PlannedCollective
from .staging import Part
from .transit import Message, Transit, pieces

__all__ = ["SegmentWriter", "Written", "write_collective"]


class Written(NamedTuple):
    """Facts about a collective's code that the rest of its plan depends on."""

    base: int
    """The advance of the communicator's counters."""
    text_words: list[int]
    """The words that hold the offset of the call's description."""
    table_words: list[int]
    """The words that hold the offset of addresses that do not fit into the control line."""
    max_operands: int
    """The most memory operands of one COMBINE."""


def write_collective(code: list[int], messages: list[Message], collective: PlannedCollective, base: int) -> Written:
    """Append a collective's code, and its messages. `base` is the advance of the communicator's counters by the code before."""
    span = collective.span
    writers = [SegmentWriter(code, messages, collective, base + k * span, k) for k in range(len(collective.segments))]
    writers[0].stage_copies()
    for writer, following in zip(writers, [*writers[1:], None], strict=True):
        writer.write(following)
    texts = [word for writer in writers for word in writer.text_words]
    tables = [word for writer in writers for word in writer.table_words]
    return Written(base + len(writers) * span, texts, tables, max(writer.max_operands for writer in writers))


@dataclass
class SegmentWriter:
    """Writes the code of one segment."""

    code: list[int]
    messages: list[Message]
    collective: PlannedCollective
    base: int
    segment: int = 0
    """The number of the segment."""
    known: set[int] = field(default_factory=set)
    checked: set[int] = field(default_factory=set)
    text_words: list[int] = field(default_factory=list)
    table_words: list[int] = field(default_factory=list)
    max_operands: int = 0

    def __post_init__(self) -> None:
        communicator = self.collective.communicator
        self.transit = Transit(self.code, self.messages, self.collective.streams, communicator.rank, communicator.number)
        self.number, self.rank, self.members = communicator.number, communicator.rank, communicator.members
        self.control = communicator.control
        self.layouts, (self.parts, _) = self.collective.segments[self.segment], self.collective.staged[self.segment]
        self.staging = self.segment % 2 * self.collective.segment_bytes  # the offset of its copies in the staging buffer

    def emit(self, opcode: Opcode, **values: object) -> None:
        """An instruction."""
        self.code += opcode.encode(**values)

    def emit_value(self, opcode: Opcode, value: int, **values: object) -> None:
        """An instruction that compares or sets a value of the communicator's counters."""
        self.code += opcode.encode(communicator=self.number, value=self.base + value, **values)

    def write(self, following: SegmentWriter | None) -> None:
        """Write the whole segment. The next segment is copied as soon as peers can read this one."""
        s, rank = self.collective.streams, self.rank
        assert s.schedule.channels == 1, "one stream for each rank"
        begin, end = int(s.start[rank]), int(s.start[rank + 1])
        self.known.add(rank)
        awaited = self.collective.awaited
        for i in range(begin, end):
            if s.wait_ptr[i] < s.wait_ptr[i + 1]:
                self.transit.before_wait()
            for w in range(int(s.wait_ptr[i]), int(s.wait_ptr[i + 1])):
                peer = int(s.wait_stream[w])
                if awaited is not None and (i == end - 1 or (peer, int(s.wait_value[w])) not in awaited):
                    continue
                counter, member = self.control.counter(peer), self.members[peer]
                self.emit_value(Opcode.WAIT, int(s.wait_value[w]), counter=counter, rank=member, mailbox=NO_MAILBOX)
                if peer not in self.checked and self.collective.target.publishes:
                    # This rank must be in the same call as a peer that it waits for, even if it touches none of the peer's
                    # buffers.
                    self.checked.add(peer)
                    self.emit_value(Opcode.CHECK, 0, line=self.control.line(peer), hash=self.collective.hash, rank=member)
            if i == begin:
                self.stage_addresses()
                if self.collective.target.publishes:
                    self.enter(self.collective.hash)
            elif s.opcode[i] == Opcode.COMBINE:
                self.combine(i)
            elif s.opcode[i] == Opcode.POST:
                self.post(i)
            done = s.span if i == end - 1 else i - begin + 1
            if (awaited is None or (rank, done) in awaited) and self.transit.may_signal(done, i == end - 1):
                self.emit_value(Opcode.SIGNAL, done, counter=self.control.counter(rank))
            if i == begin and following is not None:
                following.stage_copies()

    # ------------------------------------------------------------ addresses

    def enter(self, hash: int) -> None:
        """Publish that this rank has entered the call with this hash."""
        table = self.control.table(self.rank)
        if self.collective.overflow_bytes:
            self.table_words.append(len(self.code) + Opcode.ENTER.offset("table"))
            table = 0
        self.text_words.append(len(self.code) + Opcode.ENTER.offset("text"))
        line = self.control.line(self.rank)
        published = {"record": self.control.record(self.rank), "text": 0, "table": table, **self.published(self.rank)}
        self.emit_value(Opcode.ENTER, 0, line=line, hash=hash, **published)

    def read_peer(self, peer: int) -> None:
        """Read where a peer's arrays are, before the first instruction that reads or writes them."""
        line, hash, member = self.control.line(peer), self.collective.hash, self.members[peer]
        self.emit_value(Opcode.READ_PEER, 0, line=line, hash=hash, rank=member, **self.published(peer))

    def published(self, rank: int) -> dict[str, int]:
        """The slots that a rank publishes for this segment's arrays."""
        numbers = list(self.layouts) or [0]
        first, c = numbers[0], self.collective
        narrays = numbers[-1] - first + 1 if self.layouts else 0
        return {"narrays": narrays, "width": c.slot_width, "slot": c.slot(rank, 0, first), "stride": c.slot_stride}

    def stage_copies(self) -> None:
        """Copy what peers read of private arguments."""
        for number, parts in self.parts.items():
            for part in parts:
                if part.copy != NO_COPY:
                    self.stage(number, part, self.collective.unused_slot, part.nbytes)

    def stage_addresses(self) -> None:
        """Store where each chunk of this segment is."""
        for number, parts in self.parts.items():
            for part in parts:
                self.stage(number, part, self.collective.slot(self.rank, part.chunk, number), 0)

    def stage(self, number: int, part: Part, slot: int, nbytes: int) -> None:
        """Store where a part of an array is, for peers, and copy `nbytes` bytes of it."""
        buffer = self.collective.output_slot(self.rank, number) if part.in_output else self.collective.staging_slot
        copy = part.copy if part.copy == NO_COPY or part.in_output else part.copy + self.staging
        argument = self.collective.argument_slot(number)
        self.emit(
            Opcode.STAGE, argument_slot=argument, slot=slot, start=part.start, copy=copy, buffer_slot=buffer, nbytes=nbytes
        )

    # ------------------------------------------------------------ data

    def combine(self, i: int) -> None:
        """Instruction i of the streams: a COMBINE or COPY for each range that its places have in common, of each array."""
        c, s = self.collective, self.collective.streams
        p = s.schedule.nranks
        dsts, srcs = s.operands(i)
        for place in (*dsts, *srcs):
            peer = place % p
            if peer not in self.known and c.target.publishes:
                self.known.add(peer)
                self.read_peer(peer)
        self.max_operands = max(self.max_operands, len(dsts) + len(srcs) + 1)
        sign = -1 if c.target.has_non_temporal and c.exceeds_caches else 1
        op = c.call.op
        divisor = p if op == "mean" and len(srcs) > 1 and s.completes[i] else 0
        root, is_alone = s.schedule.collective.root, s.schedule.collective.folds_one(self.rank)
        for number in self.layouts:
            dtype, begin = c.call.operands[number].dtype, len(self.code)
            may_skip = c.shares_argument and self.rank != root
            if may_skip:
                self.emit(Opcode.SKIP_SHARED, slot=c.scratch_slot(root, number), words=0)
            for length, rows, starts in aligned(self.transit.cut(self.runs(i, number), dtype.itemsize)):
                places = [self.place(number, slot, at * dtype.itemsize, step * dtype.itemsize) for slot, at, step in starts]
                destinations, sources = places[: len(dsts)], places[len(dsts) :]
                self.transit.before(destinations, sources, rows, length * dtype.itemsize)
                if is_alone and len(sources) == 1 and op in ("max", "min"):  # a single NaN becomes the canonical one, too
                    sources = sources * 2
                if len(sources) > 1:
                    self.emit(
                        Opcode.COMBINE,
                        function=c.target.combine(op, dtype),
                        count=sign * length,
                        itemsize=dtype.itemsize,
                        divisor=divisor,
                        rows=rows,
                        destinations=destinations,
                        sources=sources,
                    )
                else:
                    nbytes = sign * length * dtype.itemsize
                    self.emit(Opcode.COPY, nbytes=nbytes, rows=rows, source=sources, destinations=destinations)
            if may_skip:
                Opcode.SKIP_SHARED.write(self.code, begin, "words", len(self.code) - begin)

    def place(self, number: int, slot: int, start: int, step: int) -> MemoryOperand:
        """Rows of an array, in bytes behind the address in a slot."""
        return MemoryOperand(slot, start, step)

    def post(self, i: int) -> None:
        """Instruction i of the streams, a POST, and the messages that follow it."""
        s = self.collective.streams
        first = int(s.start[self.rank])
        found = [(m, turn, j - first + 1) for j in s.posted(i) for m, turn in self.messages_of(j)]
        self.transit.post(found)

    def messages_of(self, i: int) -> Iterator[tuple[Message, int]]:
        """The messages of a SEND or RECEIVE, with their turns, for each array and each range that both ends have in common."""
        s, hash = self.collective.streams, self.collective.hash ^ self.collective.communicator.tag
        p, sends = s.schedule.nranks, bool(s.opcode[i] == Opcode.SEND)
        to, source = int(s.dst[s.dst_ptr[i]]), int(s.src[s.src_ptr[i]])
        peer = self.members[(to if sends else source) % p]
        most = self.collective.communicator.piece_bytes
        for number, layout in self.layouts.items():
            itemsize = layout.itemsize
            for length, rows, starts in aligned(self.runs(i, number)):
                slot, at, step = starts[1 if sends else 0]
                for begin, nbytes, turn in pieces(length * itemsize, rows, most):
                    yield Message(sends, slot, at * itemsize + begin, nbytes, rows, step * itemsize, peer, hash), turn
        if s.schedule.kind == "barrier":
            yield Message(sends, self.collective.slot(self.rank), 0, 0, 1, 0, peer, hash), 0

    def runs(self, i: int, number: int) -> list[list[tuple[int, StridedRange]]]:
        """The ranges of an array at the destinations of instruction i of the streams, and at its sources, by slot."""
        s, layout = self.collective.streams, self.layouts[number]
        found = []
        for row, rank in (divmod(place, s.schedule.nranks) for places in s.operands(i) for place in places):
            ranges = self.ranges(layout, row, int(s.count[i]), int(s.part[i]), int(s.part_step[i]))
            found.append([(self.collective.slot(rank, buffer, number), strided) for buffer, strided in ranges])
        return found

    def ranges(self, layout: ChunkLayout, row: int, count: int, part: int, step: int) -> list[tuple[int, StridedRange]]:
        """The ranges of a run of chunks, each with the number of its buffer, in order. Contiguous neighbours are joined."""
        found: list[tuple[int, StridedRange]] = []
        for i in range(count):
            for buffer, strided in self.chunk(layout, row + i, part + i * step):
                if strided.rows > 1 and strided.stride == strided.length:
                    strided = StridedRange(strided.start, 1, 0, strided.rows * strided.length)
                before, last = found[-1] if found else (None, strided)
                if before == buffer and last.rows == strided.rows == 1 and last.start + last.length == strided.start:
                    found[-1] = buffer, last._replace(length=last.length + strided.length)
                else:
                    found.append((buffer, strided))
        return found

    def chunk(self, layout: ChunkLayout, row: int, part: int) -> Iterator[tuple[int, StridedRange]]:
        """The ranges of one chunk, each with the number of its buffer."""
        c, inputs = self.collective.schedule.collective, self.collective.input_slots
        low, high = layout.parts[part]
        scratch = row - c.input_chunks - c.output_chunks
        if scratch >= 0:
            if high > low:
                yield inputs + 1, StridedRange(scratch * layout.capacity, 1, 0, high - low)
            return
        is_input, block = row < c.input_chunks, int(c.blocks_of_rows[row])
        ranges = (layout.input if is_input else layout.output).ranges(block, low, high)
        if is_input and self.collective.shared is not None:
            if ranges and not layout.input.is_strided:
                ranges = [ranges[0]._replace(start=0)]
            yield from ((row, strided) for strided in ranges)
        else:
            yield from ((0 if is_input else inputs, strided) for strided in ranges)


def aligned(runs: Sequence[list[tuple[int, StridedRange]]]) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
    """Ranges that all places have in common: (elements, rows, [(slot, first element, from row to row) of each place])."""
    rest = [run[::-1] for run in runs]  # the next range is the last
    while all(rest):
        heads = [run[-1][1] for run in rest]
        lengths = {strided.length for strided in heads if strided.rows > 1}
        length = lengths.pop() if len(lengths) == 1 else 0
        rows = min(strided.rows if strided.rows > 1 else strided.length // length for strided in heads) if length else 0
        if rows < 2:
            rows, length = 1, min(strided.length for strided in heads)
        steps = [strided.stride if strided.rows > 1 else length for strided in heads]
        yield length, rows, [(run[-1][0], run[-1][1].start, step) for run, step in zip(rest, steps, strict=True)]
        for run, strided in zip(rest, heads, strict=True):
            slot, _ = run.pop()
            run += [(slot, left) for left in _without(strided, rows, length)]


def _without(strided: StridedRange, rows: int, length: int) -> list[StridedRange]:
    """The rest of a range without its first `rows` rows of `length` elements, the next range last."""
    if strided.rows == 1:
        left = strided.length - rows * length
        return [StridedRange(strided.start + rows * length, 1, 0, left)] if left else []
    if length == strided.length:
        left = strided.rows - rows
        return [StridedRange(strided.start + rows * strided.stride, left, strided.stride, length)] if left else []
    first = StridedRange(strided.start + length, 1, 0, strided.length - length)
    return [StridedRange(strided.start + strided.stride, strided.rows - 1, strided.stride, strided.length), first]
