"""Eager collectives: small arrays travel in cells of the control block, and no rank waits for those that read them.

A rank copies its input into its cell of the call, publishes that, and combines what it reads in the cells of others. It leaves
without waiting: the cell keeps the input until all ranks have reached a later call, in which the rank wants to use it again.
So the root of a broadcast can be many calls ahead of the others, no argument has to be staged, and an array of few bytes
crosses between cores in the one cache line that also tells of it. MPI libraries send small messages in this way (Buntinas,
Mercier and Gropp, "Design and evaluation of Nemesis", 2006).

A schedule qualifies when each rank does nothing but to write its own output from inputs (`Streams.reads_only_inputs`).

A rank that has left cannot be told that a peer runs something else. So the first call of a plan waits until all ranks have
entered it, which finds what is wrong in the program. And each rank publishes its history, a hash of all its eager collectives
over the communicator: to read a cell is to compare, ordinary calls compare theirs, and a rank that wants to use a cell again
compares with what all others have had in it. So ranks that differ later are found some calls after that at the latest.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.frame import CELL_HEAD_BYTES
from ...schedules.chunk_layout import ChunkLayout
from ...schedules.schedule import Schedule
from ...schedules.streams.instructions import NO_CELL, MemoryOperand, Opcode
from .control_block import CELLS, CellRing, Communicator
from .plan_writer import EAGER_SPAN, PlannedCollective, SegmentWriter, Written
from .staging import shared_chunks

__all__ = ["ring_of", "write_eagerly"]

_ALIGNMENT = 16
"""Bytes at a multiple of which each array begins in a cell: no element crosses a cache line."""


def ring_of(schedule: Schedule, layouts: Sequence[ChunkLayout], communicator: Communicator) -> CellRing | None:
    """The cells for a collective of these arrays; None for one that is not eager. All ranks find the same."""
    if schedule.kind == "barrier" or communicator.hosts or len(communicator.members) == 1:
        return None
    *_, nbytes = _offsets(layouts)
    most = None if layouts[0].collective.meaning.rooted else len(CELLS)
    rings = [ring for ring in communicator.control.rings[:most] if nbytes <= ring.capacity]
    return rings[0] if rings and schedule.streams().verify().reads_only_inputs else None


def _offsets(layouts: Sequence[ChunkLayout]) -> list[int]:
    """The first byte of each array among those in a cell, and the byte behind the last."""
    offsets = [0]
    for layout in layouts:
        offsets.append(offsets[-1] + -(-layout.input.size * layout.itemsize // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def write_eagerly(code: list[int], collective: PlannedCollective, base: int) -> Written:
    """Append the code of an eager collective; see `write_collective`."""
    assert collective.ring is not None
    (segment,) = collective.segments
    writer = _EagerWriter(code, [], collective, segment, base, 0)
    writer.write_in(collective.ring)
    return Written(base + EAGER_SPAN, writer.text_words, [], writer.max_operands)


class _EagerWriter(SegmentWriter):
    """Writes the code of an eager collective: one segment."""

    def write_in(self, ring: CellRing) -> None:
        """Write everything."""
        self.ring, self.offsets = ring, _offsets(self.collective.layouts)
        control, hash = self.control, self.collective.hash
        peers = [rank for rank in range(len(self.members)) if rank != self.rank]
        self.find_cell(self.rank)
        # The call that used this cell last began at least this many counts ago (see FIND_CELL). All must have left it.
        left = 1 + EAGER_SPAN - EAGER_SPAN * ring.cells
        reserve = len(self.code)
        self.emit_value(Opcode.RESERVE, left, words=0)
        for peer in peers:
            self.find_cell(peer)
            self.emit_value(Opcode.WAIT, left, counter=control.counter(peer), rank=self.members[peer], cell=NO_CELL)
            self.emit_value(Opcode.VERIFY, 1, cell=self.cell(peer), own=self.cell(self.rank), rank=self.members[peer])
        self.emit(Opcode.RAISE_FLOOR, communicator=self.number, line=control.line(0), ranks=len(self.members))
        Opcode.RESERVE.write(self.code, reserve, "words", len(self.code) - reserve)

        if shared_chunks(self.collective.streams, self.rank):
            for number, layout in enumerate(self.collective.layouts):
                nbytes = layout.input.size * layout.itemsize
                if nbytes:
                    source = [MemoryOperand(self.slots.argument(self.rank, number), 0, 0)]
                    self.emit(Opcode.COPY, nbytes=nbytes, rows=1, source=source, destinations=[self.held(self.rank, number)])
        self.text_words.append(len(self.code) + Opcode.PUBLISH.offset("text"))
        record = control.record(self.rank)
        self.emit_value(Opcode.PUBLISH, 1, hash=hash, text=0, slot=self.cell(self.rank), record=record)
        self.enter()
        self.signal(1)
        streams, self.known = self.collective.streams, {self.rank}
        for i in range(int(streams.start[self.rank]), int(streams.start[self.rank + 1])):
            if streams.opcode[i] == Opcode.COMBINE:
                self.combine(i)
        once = len(self.code)
        unread = [peer for peer in peers if peer not in self.known]
        if unread:
            self.emit(Opcode.ONCE, done=0, words=0)
            for peer in unread:
                self.read_peer(peer)
            Opcode.ONCE.write(self.code, once, "words", len(self.code) - once)
        self.signal(EAGER_SPAN)

    def signal(self, done: int) -> None:
        """Move this rank's counter."""
        self.emit_value(Opcode.SIGNAL, done, counter=self.control.counter(self.rank))

    def published(self, rank: int) -> dict[str, int]:
        """No addresses: peers read none."""
        return {"narrays": 0, "width": self.slots.width, "slot": self.slots.of(rank), "stride": self.slots.stride}

    def read_peer(self, peer: int) -> None:
        """Wait until a peer has published its cell."""
        self.find_cell(peer)
        counter = self.control.counter(peer)
        self.emit_value(Opcode.WAIT, 1, counter=counter, rank=self.members[peer], cell=self.cell(peer))

    def place(self, number: int, slot: int, start: int, step: int) -> MemoryOperand:
        """Rows of an array: in a peer's cell, or where this rank has its own."""
        rank = self.slots.rank_of(slot)
        return MemoryOperand(slot, start, step) if rank in (None, self.rank) else self.held(rank, number, start, step)

    # ------------------------------------------------------------ cells

    def cell(self, rank: int) -> int:
        """The slot of a rank's cell, in the place of scratch, which there is none."""
        return self.slots.scratch(rank, 0)

    def find_cell(self, rank: int) -> None:
        """Store where a rank's cell of this call is."""
        ring = self.ring
        place = {"ring": ring.of(rank), "cells": ring.cells, "cell_bytes": ring.cell_bytes}
        self.emit_value(Opcode.FIND_CELL, 0, slot=self.cell(rank), **place)

    def held(self, rank: int, number: int, start: int = 0, step: int = 0) -> MemoryOperand:
        """Rows of an array in a rank's cell."""
        return MemoryOperand(self.cell(rank), CELL_HEAD_BYTES + self.offsets[number] + start, step)
