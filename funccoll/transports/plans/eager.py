"""Eager collectives: small arrays travel in mailboxes of the control block, and no rank waits for its readers.

A rank copies its input into its mailbox of the call, publishes that, and combines what it reads in the others' mailboxes. It
leaves without waiting. The mailbox keeps the input until all ranks have reached a later call that uses it again. So the root of
a broadcast can be many calls ahead of the others, and no argument has to be staged. An array of few bytes crosses between cores
in the one cache line that also announces it. MPI libraries send small messages in this way (Nemesis' fastboxes: Buntinas,
Mercier and Gropp, "Design and evaluation of Nemesis", 2006).

A schedule qualifies if each rank only writes its own output from inputs (`Streams.reads_only_inputs`). Several independent
collectives in a row, with other ops, dtypes or roots, are one entry and one mailbox.

A rank that has left cannot learn that a peer runs something else. So the first call of a plan waits until all ranks have
entered it, and finds what is wrong in the program. Each rank also publishes its sequence hash, of all its eager collectives
over the communicator. Reading a mailbox compares the hashes, and so do ordinary calls. A rank that reuses a mailbox compares
its hash with those that all others had in it. So ranks that differ later are found a few calls later at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...kernels.kernel_context import MAILBOX
from ...schedules.chunk_layout import ChunkLayout
from ...schedules.schedule import Schedule
from ...schedules.streams.instructions import NO_MAILBOX, MemoryOperand, Opcode
from .control_block import MAILBOXES, Communicator, MailboxRing
from .plan_writer import SegmentWriter, Written
from .planned_collective import EAGER_SPAN, PlannedCollective
from .staging import shared_chunks

__all__ = ["ring_of", "write_eagerly"]


def ring_of(schedules: Sequence[Schedule], layouts: Sequence[ChunkLayout], communicator: Communicator) -> MailboxRing | None:
    """The mailboxes for collectives of these arrays; None if they are not eager. All ranks find the same."""
    if communicator.hosts or len(communicator.members) == 1 or any(schedule.kind == "barrier" for schedule in schedules):
        return None
    *_, nbytes = _offsets(layouts)
    most = None if all(schedule.collective.meaning.rooted for schedule in schedules) else len(MAILBOXES)
    rings = [ring for ring in communicator.control.rings[:most] if nbytes <= ring.capacity]
    return rings[0] if rings and all(schedule.streams().verify().reads_only_inputs for schedule in schedules) else None


def _offsets(layouts: Sequence[ChunkLayout]) -> list[int]:
    """The first byte of each array among those in a mailbox, aligned for its dtype, and the byte behind the last."""
    offsets, end = list[int](), 0
    for layout in layouts:
        offsets.append(-(-end // layout.itemsize) * layout.itemsize)
        end = offsets[-1] + layout.input.size * layout.itemsize
    return [*offsets, end]


def write_eagerly(
    code: list[int], collectives: Sequence[PlannedCollective], ring: MailboxRing, hash: int, base: int
) -> tuple[Written, list[int]]:
    """Append the code of eager collectives that are entered together, as `hash`. See `write_collective`.

    Also returns where the code of each begins.
    """
    offsets = _offsets([layout for collective in collectives for layout in collective.segments[0].values()])
    entry, writers = _SharedMailbox(collectives[0], ring), list[_EagerWriter]()
    for collective in collectives:
        writers.append(_EagerWriter(code, [], collective, base, entry=entry, offsets=offsets))
        offsets = offsets[collective.arrays :]
    first, starts = writers[0], [len(code)]
    first.reserve()
    for writer in writers:
        writer.fill()
    first.publish(hash)
    for writer in writers:
        starts.append(len(code))
        writer.work()
    first.read_others_once()
    first.signal(EAGER_SPAN)
    most = max(writer.max_operands for writer in writers)
    return Written(base + EAGER_SPAN, first.text_words, [], most), [starts[0], *starts[2:]]


@dataclass
class _SharedMailbox:
    """The mailboxes of collectives that are entered together."""

    first: PlannedCollective
    """The first of them. There is no scratch, so its slots of scratch have the addresses of mailboxes."""
    ring: MailboxRing
    read: set[int] = field(default_factory=set)
    """The ranks whose mailboxes have been waited for."""

    def mailbox(self, rank: int) -> int:
        """The slot of a rank's mailbox."""
        return self.first.scratch_slot(rank, 0)


@dataclass
class _EagerWriter(SegmentWriter):
    """Writes the code of an eager collective, and, as the first of several, of their entry."""

    entry: _SharedMailbox = field(kw_only=True)
    offsets: Sequence[int] = field(kw_only=True)
    """The first byte in a mailbox of each array."""

    def reserve(self) -> None:
        """Find this rank's mailbox, and wait until all ranks have left the call that used it last."""
        ring, mine = self.entry.ring, self.entry.mailbox(self.rank)
        self.find_mailbox(self.rank)
        # That call began at least this many counts ago. See FIND_MAILBOX.
        left = 1 + EAGER_SPAN - EAGER_SPAN * ring.mailboxes
        begin = len(self.code)
        self.emit_value(Opcode.RESERVE, left, words=0)
        for peer in self.peers:
            counter, member = self.control.counter(peer), self.members[peer]
            self.find_mailbox(peer)
            self.emit_value(Opcode.WAIT, left, counter=counter, rank=member, mailbox=NO_MAILBOX)
            self.emit_value(Opcode.VERIFY, 1, mailbox=self.entry.mailbox(peer), own=mine, rank=member)
        self.emit(Opcode.RAISE_LOW_WATER_MARK, communicator=self.number, line=self.control.line(0), ranks=len(self.members))
        Opcode.RESERVE.write(self.code, begin, "words", len(self.code) - begin)

    def fill(self) -> None:
        """Copy what peers read into this rank's mailbox."""
        if shared_chunks(self.collective.streams, self.rank):
            for number, layout in self.layouts.items():
                nbytes = layout.input.size * layout.itemsize
                if nbytes:
                    source = [MemoryOperand(self.collective.argument_slot(number), 0, 0)]
                    self.emit(Opcode.COPY, nbytes=nbytes, rows=1, source=source, destinations=[self.held(self.rank, number)])

    def publish(self, hash: int) -> None:
        """Publish the mailbox, and then the entry."""
        self.text_words.append(len(self.code) + Opcode.PUBLISH.offset("text"))
        record = self.control.record(self.rank)
        self.emit_value(Opcode.PUBLISH, 1, hash=hash, text=0, slot=self.entry.mailbox(self.rank), record=record)
        self.enter(hash)
        self.signal(1)

    def work(self) -> None:
        """Write this rank's output."""
        streams = self.collective.streams
        self.known = {self.rank}
        for i in range(int(streams.start[self.rank]), int(streams.start[self.rank + 1])):
            if streams.opcode[i] == Opcode.COMBINE:
                self.combine(i)

    def read_others_once(self) -> None:
        """In the first call, compare also with ranks from which nothing is read."""
        others = [peer for peer in self.peers if peer not in self.entry.read]
        if others:
            begin = len(self.code)
            self.emit(Opcode.ONCE, done=0, words=0)
            for peer in others:
                self.read_peer(peer)
            Opcode.ONCE.write(self.code, begin, "words", len(self.code) - begin)

    def signal(self, done: int) -> None:
        """Move this rank's counter."""
        self.emit_value(Opcode.SIGNAL, done, counter=self.control.counter(self.rank))

    @property
    def peers(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(len(self.members)) if rank != self.rank]

    def published(self, rank: int) -> dict[str, int]:
        """No addresses: peers read none."""
        c = self.collective
        return {"narrays": 0, "width": c.slot_width, "slot": c.slot(rank), "stride": c.slot_stride}

    def read_peer(self, peer: int) -> None:
        """Wait until a peer has published its mailbox."""
        if peer not in self.entry.read:
            self.entry.read.add(peer)
            self.find_mailbox(peer)
            counter = self.control.counter(peer)
            self.emit_value(Opcode.WAIT, 1, counter=counter, rank=self.members[peer], mailbox=self.entry.mailbox(peer))

    def place(self, number: int, slot: int, start: int, step: int) -> MemoryOperand:
        """Rows of an array: in a peer's mailbox, or in this rank's own array."""
        rank = self.collective.rank_of(slot)
        return MemoryOperand(slot, start, step) if rank in (None, self.rank) else self.held(rank, number, start, step)

    def find_mailbox(self, rank: int) -> None:
        """Store where a rank's mailbox of this call is."""
        ring = self.entry.ring
        place = {"ring": ring.of(rank), "mailboxes": ring.mailboxes, "mailbox_bytes": ring.mailbox_bytes}
        self.emit_value(Opcode.FIND_MAILBOX, 0, slot=self.entry.mailbox(rank), **place)

    def held(self, rank: int, number: int, start: int = 0, step: int = 0) -> MemoryOperand:
        """Rows of an array in a rank's mailbox."""
        return MemoryOperand(self.entry.mailbox(rank), MAILBOX.size + self.offsets[number] + start, step)
