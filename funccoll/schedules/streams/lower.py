"""Lowering: from moves in program order to one instruction stream per rank and channel, with the waits they need.

Between hosts no rank sees another one's counter. There a copy is two instructions: a SEND of the rank that has its source, and
a RECEIVE of the rank that gets it. A POST before those of one round begins them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ScheduleError
from ..moves import Batch
from ..runs import expand, part_steps
from .happens_before import concat_ranges, transitively_reduced
from .instructions import Opcode
from .streams import Streams

if TYPE_CHECKING:
    from ..schedule import Schedule

__all__ = ["lower"]

_COMPACT = 1 << 22
"""Pairs that are gathered before they are merged."""


def lower(schedule: Schedule, hosts: Sequence[int] = ()) -> Streams:
    """Lower a schedule to streams. `hosts` has the host of each rank, and is empty for one host.

    Waits come from the hazards between moves in program order (read after write, write after read, write after write). They
    also come from the rule that a rank's places belong to the execution from its ENTER to its LEAVE: ENTER counts as their
    first writer, and LEAVE comes after every access by others. Implied waits are dropped.
    """
    if hosts:
        from ..split_hosts import split_hosts  # imported here because few schedules need it

        schedule = split_hosts(schedule, hosts)
    hazards = _Hazards(schedule, hosts)
    host = np.asarray(hosts)
    for batch in schedule.batches:
        if hosts and host[batch.dst[0, 0] % schedule.nranks] != host[batch.src[0, 0] % schedule.nranks]:
            hazards.exchange(batch)
        else:
            hazards.add(batch)
    hazards.forget()
    return _reduced(_assemble(schedule, hazards, tuple(hosts)))


@dataclass
class _Pairs:
    """The largest value of each key. Keys are added in arrays, and merged when many are pending."""

    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    waiting: int = 0

    def add(self, key: np.ndarray, value: np.ndarray) -> None:
        self.keys.append(key)
        self.values.append(value)
        self.waiting += len(key)
        if self.waiting > _COMPACT:
            self.waiting = 0
            self.merge()

    def merge(self) -> tuple[np.ndarray, np.ndarray]:
        if not self.keys:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        key, value = np.concatenate(self.keys), np.concatenate(self.values)
        base = int(value.max(initial=0)) + 1
        key, value = np.divmod(np.sort(key * base + value), base)
        last = np.append(key[1:] != key[:-1], True) if len(key) else slice(None)
        self.keys, self.values = [key[last]], [value[last]]
        return self.keys[0], self.values[0]


@dataclass(frozen=True, slots=True)
class _Lowered:
    """Instructions: each one's stream and number there, its places and runs, its move; and (row, event) of waits."""

    opcode: Opcode
    stream: np.ndarray
    index: np.ndarray
    dst: np.ndarray
    src: np.ndarray
    count: np.ndarray | int
    part: np.ndarray | int
    part_step: np.ndarray | int
    move: np.ndarray | int
    row: np.ndarray
    event: np.ndarray


def _stream(batch: Batch, channels: int) -> np.ndarray:
    """Return the stream of each row."""
    return batch.by.astype(np.int64) * channels + batch.channel


class _Hazards:
    """Walks the moves in program order. For each it notes the instructions that it must wait for.

    An event is one integer, value * streams + stream: that stream has done `value` instructions.
    """

    def __init__(self, schedule: Schedule, hosts: Sequence[int]):
        self.schedule = schedule
        self.collective = schedule.collective
        self.p, self.channels = schedule.nranks, schedule.channels
        self.streams = self.p * self.channels
        size = schedule.places.size
        self.done = np.zeros(self.streams, np.int64)  # instructions of each stream so far
        self.done[:: self.channels] = 1  # ENTER
        enters = 1 * self.streams + np.arange(self.p) * self.channels
        longest = sum((np.bincount(b.by, minlength=self.p) for b in schedule.batches), np.zeros(self.p, np.int64)).max()
        events = np.int32 if (2 + int(longest)) * self.streams < 2**31 and not hosts else np.int64
        self.writer = np.tile(enters.astype(events), schedule.places.rows)
        self.fixed = self.collective.input_chunks * self.p  # places below are inputs, which nothing writes
        self.static = len(self.collective.parts_of_rows) * self.p
        scratch = np.full(size - self.static, -1, np.int32)
        self.part = np.concatenate([np.repeat(self.collective.parts_of_rows, self.p), scratch])
        # The readers of each place since it was written last, as a linked list.
        self.reader = np.full(size - self.fixed, -1, np.int64 if events is np.int64 else np.int32)
        reads = sum(
            int((b.src >= self.fixed).sum()) if (b.count == 1).all() else b.src.shape[1] * int(b.count.sum())
            for b in schedule.batches
        )
        self.read_event = np.empty(reads, events)
        self.read_next = np.empty(reads, self.reader.dtype)
        self.reads = 0
        self.stamp = np.zeros(max(size, self.streams), np.int32)
        self.touched = _Pairs()  # owner * streams + stream -> that stream's last instruction on the owner's places
        self.moves = 0
        self.lowered: list[_Lowered] = []

    def add(self, batch: Batch) -> None:
        """Lower moves inside hosts."""
        stream = _stream(batch, self.channels)
        index = self._number(stream)
        dst, src, row = expand(batch, self.p)
        event = (index + 1) * self.streams + stream
        part, step = self._parts(batch, dst, src)
        waiting = [(row, self.writer[src[:, j]]) for j in range(src.shape[1])]
        for j in range(dst.shape[1]):
            waiting.append((row, self.writer[dst[:, j]]))
            waiting += self._readers(dst[:, j], row)
        waiter, awaited = self._merged(waiting, stream)
        for j in range(src.shape[1]):
            self._read(src[:, j], event[row])
        for j in range(dst.shape[1]):
            self.writer[dst[:, j]] = event[row]
            self.reader[dst[:, j] - self.fixed] = -1
        self._touch(np.concatenate([dst, src], axis=1), row, stream, index)
        run = batch.count, part, step, self._moves(len(batch))
        waits = waiter.astype(np.int32), awaited.astype(self.writer.dtype)
        self.lowered.append(_Lowered(Opcode.COMBINE, stream, index.astype(np.int32), batch.dst, batch.src, *run, *waits))

    def exchange(self, batch: Batch) -> None:
        """Lower the messages of one round: of each rank a POST with all waits, its RECEIVEs, and its SENDs."""
        dst, src, row = expand(batch, self.p)
        part, step = self._parts(batch, dst, src)
        sender, receiver = batch.src[:, 0] % self.p, batch.dst[:, 0] % self.p
        ranks = np.unique(np.concatenate([sender, receiver]))
        posted = self._number(ranks)
        received, sent = self._number(receiver), self._number(sender)
        places, into, out = np.searchsorted(ranks, receiver), src[:, 0], dst[:, 0]
        waiting = [(np.searchsorted(ranks, sender)[row], self.writer[into]), (places[row], self.writer[out])]
        waiting += self._readers(out, places[row])
        waiter, awaited = self._merged(waiting, ranks)
        self._read(into, ((sent + 1) * self.streams + sender)[row])
        self.writer[out] = ((received + 1) * self.streams + receiver)[row]
        self.reader[out - self.fixed] = -1
        none, moves = np.zeros(0, np.int64), self._moves(len(batch))
        nothing = np.zeros((len(ranks), 0), batch.dst.dtype)
        self.lowered.append(_Lowered(Opcode.POST, ranks, posted, nothing, nothing, 1, 0, 0, -1, waiter, awaited))
        for opcode, rank, index in ((Opcode.RECEIVE, receiver, received), (Opcode.SEND, sender, sent)):
            run = batch.count, part, step, moves
            self.lowered.append(_Lowered(opcode, rank, index, batch.dst, batch.src, *run, none, none))

    def _moves(self, rows: int) -> np.ndarray:
        """Return the numbers of the next rows of the schedule's batches."""
        self.moves += rows
        return np.arange(self.moves - rows, self.moves)

    def forget(self) -> None:
        """Drop columns that only the walk needs: gigabytes for thousands of ranks."""
        del self.writer, self.part, self.reader, self.read_event, self.read_next, self.stamp

    def _number(self, stream: np.ndarray) -> np.ndarray:
        """Return the next instruction numbers of these streams. A stream may occur several times."""
        if self._distinct(stream):
            index = self.done[stream]
            self.done[stream] += 1
            return index
        order = np.argsort(stream, kind="stable")
        ordered = stream[order]
        new = np.append(True, ordered[1:] != ordered[:-1])
        begin = np.flatnonzero(new)
        within = np.arange(len(order)) - np.repeat(begin, np.diff(np.append(begin, len(order))))
        index = np.empty(len(stream), np.int64)
        index[order] = self.done[ordered] + within
        np.add.at(self.done, stream, 1)
        return index

    def _distinct(self, keys: np.ndarray) -> bool:
        numbers = np.arange(len(keys), dtype=np.int32)
        self.stamp[keys] = numbers
        return bool((self.stamp[keys] == numbers).all())

    def _parts(self, batch: Batch, dst: np.ndarray, src: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each instruction, the part of its first chunk and the step to the next one."""
        part = self.part[src[:, 0]]
        self.part[dst] = part[:, None]
        first, step, regular = part_steps(part, batch.count)
        if not regular:
            raise ScheduleError(
                "a run of chunks crosses from one block to the next, and blocks have several chunks here, so that its parts "
                "have no constant step. Move single chunks (count=1), or end the run where the block ends.",
                batch.source,
            )
        return first, step

    def _readers(self, places: np.ndarray, row: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        out = []
        entry = self.reader[places - self.fixed]
        while (live := entry >= 0).any():
            entry, row = entry[live], row[live]
            out.append((row, self.read_event[entry]))
            entry = self.read_next[entry]
        return out

    def _read(self, places: np.ndarray, events: np.ndarray) -> None:
        mine = places >= self.fixed
        if not mine.any():
            return
        places, events = places[mine] - self.fixed, events[mine]
        if not self._distinct(places):
            order = np.argsort(places, kind="stable")
            places, events = places[order], events[order]
            again = np.append(False, places[1:] == places[:-1])
        else:
            again = None
        entry = np.arange(self.reads, self.reads + len(places))
        before = self.reader[places]
        if again is not None:
            before[again] = entry[np.flatnonzero(again) - 1]
        self.read_event[entry] = events
        self.read_next[entry] = before
        self.reader[places] = entry  # NumPy keeps the last of several to one place
        self.reads += len(places)

    def _merged(self, waiting: list[tuple[np.ndarray, np.ndarray]], stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, event) of what each row waits for: the latest event of each other stream."""
        row = np.concatenate([r for r, _ in waiting])
        event = np.concatenate([e for _, e in waiting]).astype(np.int64)
        other = event % self.streams
        keep = other != stream[row]
        row, event, other = row[keep], event[keep], other[keep]
        if len(row) > 1:
            order = np.lexsort((event, other, row))
            row, event, other = row[order], event[order], other[order]
            last = np.append((row[1:] != row[:-1]) | (other[1:] != other[:-1]), True)
            row, event = row[last], event[last]
        return row, event

    def _touch(self, places: np.ndarray, row: np.ndarray, stream: np.ndarray, index: np.ndarray) -> None:
        owner = places % self.p
        own = owner * self.channels == stream[row][:, None]
        if own.all():
            return
        i, j = np.nonzero(~own)
        self.touched.add(owner[i, j].astype(np.int64) * self.streams + stream[row[i]], index[row[i]] + 1)


def _assemble(schedule: Schedule, hazards: _Hazards, hosts: tuple[int, ...]) -> Streams:
    channels, streams = hazards.channels, hazards.streams
    length = hazards.done.copy()
    length[::channels] += 1  # LEAVE
    n = int(length.sum())
    references = sum(x.src.size + x.dst.size for x in hazards.lowered)
    small = np.int32 if max(n, schedule.places.size, references) < 2**31 else np.int64
    start = np.concatenate([[0], np.cumsum(length)]).astype(small)
    leaves = start[1::channels] - 1
    enters = start[:-1:channels]

    opcode = np.full(n, Opcode.COMBINE, np.int8)
    opcode[enters], opcode[leaves] = Opcode.ENTER, Opcode.LEAVE
    count, part, step = np.ones(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32)
    move = np.full(n, -1, small)
    sides = {"dst": np.zeros(n + 1, small), "src": np.zeros(n + 1, small)}
    waits = np.zeros(n + 1, small)
    for channel in range(1, channels):  # a rank has not left while another of its channels works
        others = np.arange(channel, streams, channels)
        others = others[hazards.done[others] > 0]
        hazards.touched.add(others // channels * streams + others, hazards.done[others])
    touching, touch_value = hazards.touched.merge()
    owner, touched = np.divmod(touching, streams)
    leave_key = leaves[owner]
    for x in hazards.lowered:
        at = start[x.stream] + x.index
        opcode[at], count[at], part[at], step[at], move[at] = x.opcode, x.count, x.part, x.part_step, x.move
        sides["dst"][at + 1], sides["src"][at + 1] = x.dst.shape[1], x.src.shape[1]
        waits[at + 1] += np.bincount(x.row, minlength=len(at)).astype(small)
    np.add.at(waits, leave_key + 1, 1)
    for column in (*sides.values(), waits):
        np.cumsum(column, out=column)

    dst, src = (np.empty(int(sides[side][-1]), small) for side in ("dst", "src"))
    wait_stream, wait_value = np.empty(int(waits[-1]), np.int32), np.empty(int(waits[-1]), np.int32)
    for x in hazards.lowered:
        at = start[x.stream] + x.index
        for side, column, codes in (("dst", dst, x.dst), ("src", src, x.src)):
            column[sides[side][at][:, None] + np.arange(codes.shape[1])] = codes
        if len(x.row):
            begin = np.flatnonzero(np.append(True, x.row[1:] != x.row[:-1]))
            within = np.arange(len(x.row)) - np.repeat(begin, np.diff(np.append(begin, len(x.row))))
            slot = waits[at[x.row]] + within
            wait_stream[slot], wait_value[slot] = x.event % streams, x.event // streams
    hazards.lowered.clear()
    order = np.argsort(leave_key, kind="stable")
    slots = concat_ranges(waits[leaves].astype(np.int64), (waits[leaves + 1] - waits[leaves]).astype(np.int64))
    wait_stream[slots], wait_value[slots] = touched[order], touch_value[order]
    return Streams(
        schedule,
        start,
        opcode,
        sides["dst"],
        dst,
        sides["src"],
        src,
        count,
        part,
        step,
        waits,
        wait_stream,
        wait_value,
        move,
        int(length.max()),
        hosts,
    )


def _reduced(streams: Streams) -> Streams:
    """Return the same streams without implied waits."""
    graph = streams.graph(messages=False)  # each host's waits must suffice without those that messages imply
    trivial = (np.diff(graph.ptr) == 0) & ~graph.has_previous
    keep = transitively_reduced(graph, trivial)
    ptr = np.concatenate([[0], np.cumsum(keep)])[streams.wait_ptr].astype(streams.wait_ptr.dtype)
    return replace(streams, wait_ptr=ptr, wait_stream=streams.wait_stream[keep], wait_value=streams.wait_value[keep])
