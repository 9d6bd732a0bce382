"""Plans of one rank's blocks in a launch between processes whose GPUs read and write each other's segments.

Everything of a rank that peers touch lies in its segment: copies of the chunks of its inputs that they read, outputs that they
read or write, and scratch. Its blocks copy the chunks there before they enter, and the outputs back after they have left. They
read and write everything else in place. Each rank computes the offsets of all ranks, so nothing is published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.cuda import Combine
from ...runtime.collective_call import CollectiveCall
from ...schedules.chunk_layout import ChunkLayout, StridedRange
from ...schedules.schedule import Schedule
from ...schedules.streams.instructions import MemoryOperand, Opcode
from ..plans.control_block import Communicator, ControlBlock
from ..plans.plan_writer import write_collective
from ..plans.planned_collective import PlannedCollective, Target
from ..plans.staging import shared_chunks
from .launch_plan import cut_in_channels

__all__ = ["PeerCounters", "PeerPlan", "build_peer_plan"]

_ALIGNMENT = 256


@dataclass(frozen=True)
class PeerCounters(ControlBlock):
    """The addresses of the counters of a group's ranks, by rank. The counters have memory of their own, not offsets in a
    heap."""

    addresses: tuple[int, ...] = ()

    def counter(self, stream: int) -> int:
        """The address of a rank's counter."""
        return self.addresses[stream]


@dataclass(frozen=True, eq=False)
class PeerPlan:
    """The code of one rank's blocks, one for each channel, and what it needs."""

    codes: tuple[np.ndarray, ...]
    combines: tuple[Combine, ...]
    """The combines that the code names by their numbers."""
    places: Mapping[int, tuple[int, int]]
    """By slot of the table of addresses, the rank of the group in whose segment its address is, and the offset there."""
    inputs: np.ndarray
    outputs: np.ndarray
    """By array and channel, the slots that hold the addresses of this rank's own arrays."""
    slots: int
    segment_bytes: int
    """Bytes of the segment of any rank."""
    max_operands: int


@dataclass(frozen=True)
class _Touched:
    """The offsets in a rank's segment of what peers touch: inputs and outputs by array, scratch by array and channel."""

    inputs: dict[int, int]
    outputs: dict[int, int]
    scratch: dict[tuple[int, int], int]
    nbytes: int


def build_peer_plan(call: CollectiveCall, rank: int, counters: Sequence[Sequence[int]], members: Sequence[int]) -> PeerPlan:
    """The plan of `rank` of a group with these `members`, by their ranks in the job. It depends on nothing else.

    `counters` has for each channel the address of every rank's counter, as this rank reads it.
    """
    schedule, nranks, channels = call.schedule, call.schedule.nranks, len(counters)
    segments = cut_in_channels(call, channels)
    scratch = {
        (i, c): layout.capacity * schedule.scratch_chunks * layout.itemsize
        for c, segment in enumerate(segments)
        for i, layout in segment.items()
    }
    chunks = [shared_chunks(schedule.streams().verify(), r) for r in range(nranks)]
    touched = [_touched(call, r, bool(chunks[r]), scratch) for r in range(nranks)]
    combines = dict[Combine, int]()
    target = Target(lambda op, dtype: combines.setdefault((op, dtype), len(combines)), publishes=False, has_non_temporal=False)
    narrays, mine = len(call.operands), touched[rank]
    inputs, outputs = (np.zeros((narrays, channels), np.int64) for _ in range(2))
    places, codes, next_slot, most = dict[int, tuple[int, int]](), list[np.ndarray](), 0, 0
    for c, segment in enumerate(segments):
        communicator = Communicator(0, tuple(members), rank, PeerCounters(0, nranks, addresses=tuple(counters[c])))
        planned = PlannedCollective(call, communicator, next_slot, [segment], target=target)
        copies, results = (next_slot + planned.slot_count + k * narrays for k in range(2))
        next_slot += planned.slot_count + 2 * narrays
        for r, found in enumerate(touched):
            if r != rank:  # this rank reads its own chunks where they are
                places |= {planned.slot(r, 0, i): (r, at) for i, at in found.inputs.items()}
            places |= {planned.output_slot(r, i): (r, at) for i, at in found.outputs.items()}
            places |= {planned.scratch_slot(r, i): (r, at) for (i, channel), at in found.scratch.items() if channel == c}
        places |= {copies + i: (rank, at) for i, at in mine.inputs.items()}
        code: list[int] = []
        for i in range(narrays):
            inputs[i, c] = planned.slot(rank, 0, i)
            outputs[i, c] = results + i if i in mine.outputs else planned.output_slot(rank, i)
        for i, layout in segment.items():
            _copy(code, _ranges(layout, sorted(chunks[rank])), layout.itemsize, int(inputs[i, c]), copies + i)
        written = write_collective(code, [], planned, 0)
        for i in mine.outputs:
            if i in segment:
                kind, layout = schedule.collective, segment[i]
                rows = range(kind.input_chunks, kind.input_chunks + kind.output_chunks)
                _copy(code, _ranges(layout, rows), layout.itemsize, planned.output_slot(rank, i), results + i)
        code += Opcode.ADVANCE.encode(communicator=0, span=written.base)
        code += Opcode.END.encode()
        codes.append(np.array(code, np.int64))
        most = max(most, written.max_operands)
    return PeerPlan(
        tuple(codes), tuple(combines), places, inputs, outputs, next_slot, max(found.nbytes for found in touched), most
    )


def _touched(call: CollectiveCall, rank: int, is_read: bool, scratch: Mapping[tuple[int, int], int]) -> _Touched:
    """Place what peers touch of a rank's memory, one buffer behind the other."""
    at, inputs, outputs, scratches = 0, {}, {}, {}

    def next_place(nbytes: int) -> int:
        nonlocal at
        at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return at - -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    is_written = _output_is_shared(call.schedule, rank)
    for i, operand in enumerate(call.operands):
        if is_read:
            inputs[i] = next_place(operand.nbytes)
        if is_written:
            outputs[i] = next_place(operand.out_nbytes)
    for key, nbytes in scratch.items():
        if nbytes:
            scratches[key] = next_place(nbytes)
    return _Touched(inputs, outputs, scratches, at)


def _output_is_shared(schedule: Schedule, rank: int) -> bool:
    """True if peers read or write the output of a rank."""
    streams, c = schedule.streams().verify(), schedule.collective
    for places, pointers in ((streams.src, streams.src_ptr), (streams.dst, streams.dst_ptr)):
        by = streams.stream[np.repeat(np.arange(len(streams)), np.diff(pointers))] // c.channels
        rows, of = np.divmod(places, schedule.nranks)
        is_output = (rows >= c.input_chunks) & (rows < c.input_chunks + c.output_chunks)
        if np.any(is_output & (of == rank) & (by != rank)):
            return True
    return False


def _ranges(layout: ChunkLayout, rows: Iterable[int]) -> Iterator[StridedRange]:
    """The elements of chunks of an input or output, neighbours as one."""
    c, before = layout.collective, None
    for row in rows:
        blocks = layout.input if row < c.input_chunks else layout.output
        for found in blocks.ranges(int(c.blocks_of_rows[row]), *layout.parts[int(c.parts_of_rows[row])]):
            if before is not None and before.rows == found.rows == 1 and before.start + before.length == found.start:
                before = before._replace(length=before.length + found.length)
                continue
            if before is not None:
                yield before
            before = found
    if before is not None:
        yield before


def _copy(code: list[int], ranges: Iterable[StridedRange], itemsize: int, source: int, to: int) -> None:
    """Append copies of the same elements between the arrays of two slots."""
    for start, rows, stride, length in ranges:
        ends = [[MemoryOperand(slot, start * itemsize, stride * itemsize)] for slot in (source, to)]
        code += Opcode.COPY.encode(nbytes=length * itemsize, rows=rows, source=ends[0], destinations=ends[1])
