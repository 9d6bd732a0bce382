"""Planned collectives: a call as one rank executes it, with its slots in the table of addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...kernels.cpu import combine_address
from ...runtime.collective_call import CollectiveCall, Operand
from ...schedules.chunk_layout import ChunkLayout, cut_as_one
from ...schedules.schedule import Schedule
from ...schedules.streams.streams import Streams
from .control_block import Communicator
from .staging import Part, staged_parts

__all__ = ["CPU", "EAGER_SPAN", "PlannedCollective", "Target", "exceeds_caches", "layouts_of"]

EAGER_SPAN = 2
"""The advance of a rank's counter in an eager collective: 1 after it has published its mailbox, 2 after it has its results."""
NON_TEMPORAL = 1.5
"""Bytes of all ranks' arrays, relative to those of the caches, from which on results are written with non-temporal stores.
Measured with 32 MiB of cache and two ranks, if each result is read and replaces the one before: with 48 or 64 MiB of arrays
every collective is up to 1.7 times faster, with 32 MiB only all_reduce, and with 16 MiB most take up to twice as long."""


class Target(NamedTuple):
    """The machine for which a plan is written."""

    combine: Callable[[str, np.dtype], int]
    """The `function` of a COMBINE for an op and a dtype."""
    publishes: bool = True
    """True if ranks are processes. They publish the addresses of their arrays and the call that they run, and compare the
    calls."""
    has_non_temporal: bool = True


CPU = Target(combine_address)


def layouts_of(schedule: Schedule, operands: Sequence[Operand]) -> list[ChunkLayout]:
    """The layouts of a collective's arrays."""
    kind = schedule.collective
    layouts = [operand.layout(kind) for operand in operands]
    if len(layouts) > 1 and kind.input_blocks == kind.output_blocks == 1 and schedule.prove().left_fold:
        layouts = cut_as_one(layouts)
    return layouts


def exceeds_caches(operands: Sequence[Operand], communicator: Communicator) -> bool:
    """True if all ranks of this host together read and write more than the caches hold.

    Then results are written with non-temporal stores, and sharing pays even if they are made anew. In the caches, a write to
    what others have read costs more than it saves, because their copies of each line go first.
    """
    nbytes = sum(operand.nbytes + operand.out_nbytes for operand in operands)
    return len(communicator.neighbours) * nbytes >= NON_TEMPORAL * communicator.cache_bytes


@dataclass(frozen=True)
class PlannedCollective:
    """A call of one rank, with everything that its code depends on.

    Its slots in the table of addresses follow `first_slot`: for each array and rank the input, the output and scratch. If
    inputs are staged, each chunk of an input has its own slot. This rank then has one more slot for the address of each array,
    and two for the staging buffer and for unused addresses.
    """

    call: CollectiveCall
    communicator: Communicator
    first_slot: int
    segments: Sequence[Mapping[int, ChunkLayout]]
    """The layouts of a range of every chunk, by the number of each array that has a part of it. One layout serves all arrays if
    arguments are copied whole."""
    shared: Mapping[int, int] | None = None
    """The chunks of staged inputs that peers read (see `shared_chunks`); None if inputs are not staged."""
    reads_directly: bool = False
    """True if peers read private arguments themselves. Then nothing is staged."""
    is_eager: bool = False
    """True if it uses mailboxes. See `eager`."""
    one_result: Streams | None = None
    """The streams with one result for all ranks, in OWNER's memory. See `shared_results`."""
    shares_argument: bool = False
    """True if the root of a broadcast may share its argument. Then its slot of scratch has the address, else the heap's
    slot."""
    target: Target = CPU
    awaited: frozenset[tuple[int, int]] | None = None
    """For a launch, which ranks enter and leave together: the values that ranks wait for meanwhile, as (rank, value). See
    `launch_plan`. None if ranks enter and leave one by one."""

    @property
    def schedule(self) -> Schedule:
        """The schedule to execute."""
        return self.call.schedule if self.one_result is None else self.one_result.schedule

    @cached_property
    def hash(self) -> int:
        """A hash of the call, the same on all ranks. A peer with another hash runs something else."""
        return self.call.hash(self.segments, self.shares_argument or self.one_result is not None)

    @property
    def span(self) -> int:
        """The advance of a rank's counter in it, or in each of its segments."""
        return EAGER_SPAN if self.is_eager else self.streams.span

    @cached_property
    def streams(self) -> Streams:
        """The verified streams."""
        if self.one_result is not None:
            return self.one_result
        return self.schedule.streams(self.communicator.hosts).verify()

    @cached_property
    def exceeds_caches(self) -> bool:
        """See `exceeds_caches`."""
        return exceeds_caches(self.call.operands, self.communicator)

    @cached_property
    def staged(self) -> list[tuple[Mapping[int, Sequence[Part]], int]]:
        """The staged parts of each segment, by array, and the bytes of a buffer for their copies."""
        return [({}, 0) if self.shared is None else staged_parts(segment, self.shared) for segment in self.segments]

    @cached_property
    def segment_bytes(self) -> int:
        """Bytes of the staging buffer for one segment."""
        return max(nbytes for _, nbytes in self.staged)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffer: two segments overlap."""
        return self.segment_bytes * min(2, len(self.segments))

    @property
    def overflow_bytes(self) -> int:
        """Bytes of the addresses that a rank publishes, if its control line is too small for them; else 0."""
        published = 8 * self.slot_width * self.arrays if not self.is_eager else 0
        return published if published > self.communicator.control.table_bytes else 0

    # ------------------------------------------------------------ slots

    @property
    def arrays(self) -> int:
        """The number of operands."""
        return len(self.call.operands)

    @cached_property
    def input_slots(self) -> int:
        """Slots of one input."""
        return 1 if self.shared is None else self.schedule.collective.input_chunks

    @cached_property
    def slot_width(self) -> int:
        """Slots of one array and rank."""
        return self.input_slots + 2

    @cached_property
    def slot_stride(self) -> int:
        """Slots from one array to the next."""
        return self.schedule.nranks * self.slot_width

    @property
    def slot_count(self) -> int:
        """All slots."""
        return self.arrays * self.slot_stride + (0 if self.shared is None else self.arrays + 2)

    def slot(self, rank: int, number: int = 0, array: int = 0) -> int:
        """One of a rank's slots for an array. The first is the input's, or its first chunk's."""
        return self.first_slot + array * self.slot_stride + rank * self.slot_width + number

    def rank_of(self, slot: int) -> int | None:
        """The rank to which a slot belongs; None for this rank's extra slots, and for another collective's."""
        array, place = divmod(slot - self.first_slot, self.slot_stride)
        return place // self.slot_width if 0 <= array < self.arrays else None

    def output_slot(self, rank: int, array: int) -> int:
        """The slot of a rank's output."""
        return self.slot(rank, self.input_slots, array)

    def scratch_slot(self, rank: int, array: int) -> int:
        """The slot of a rank's scratch."""
        return self.slot(rank, self.input_slots + 1, array)

    def argument_slot(self, array: int) -> int:
        """The slot of this rank's argument, as it is bound."""
        rank = self.communicator.rank
        return self.slot(rank, 0, array) if self.shared is None else self.staging_slot - self.arrays + array

    @property
    def staging_slot(self) -> int:
        """The slot of the staging buffer."""
        return self.first_slot + self.arrays * (self.slot_stride + 1)

    @property
    def unused_slot(self) -> int:
        """A slot for addresses that nothing reads."""
        return self.staging_slot + 1
