"""Launch plans: the code of all blocks of one kernel launch, in which several virtual devices of one GPU communicate.

Each device is some blocks, its *channels*. A channel executes the proved streams of its device on one segment of all arrays,
with counters of its own, so channels need not wait for each other. All addresses stand in one table, because all blocks have
one address space: nothing is published, and nothing compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.cuda import Combine
from ...runtime.collective_call import CollectiveCall
from ...schedules.chunk_layout import ChunkLayout, in_segments
from ...schedules.streams.instructions import Opcode
from ..plans.control_block import Communicator, ControlBlock
from ..plans.plan_writer import write_collective
from ..plans.planned_collective import PlannedCollective, Target, layouts_of

__all__ = ["LaunchPlan", "build_launch_plan", "cut_in_channels"]


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """The code of all blocks of a launch, and what it needs.

    Block `device * channels + channel` is one of a device. Arrays are numbered over all collectives.
    """

    codes: tuple[np.ndarray, ...]
    """By block: int64 words, see `schedules.streams.instructions`."""
    combines: tuple[Combine, ...]
    """The combines that the code names by their numbers."""
    inputs: np.ndarray
    outputs: np.ndarray
    """By array and device, the slots of the table of addresses that hold an array's address, in a row for all channels."""
    scratch: Mapping[int, int]
    """By slot, the bytes of memory of its own that its address is of."""
    slots: int
    control_bytes: int
    max_operands: int

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.codes)


def build_launch_plan(
    calls: Sequence[CollectiveCall], groups: Sequence[Sequence[int]], channels: int
) -> LaunchPlan:
    """The plan of a launch of collectives over these groups of devices, each device in one group.

    It depends on nothing else, and allocates nothing.
    """
    ndevices, combines = sum(map(len, groups)), dict[Combine, int]()
    target = Target(lambda op, dtype: combines.setdefault((op, dtype), len(combines)), publishes=False, has_non_temporal=False)
    codes: dict[int, list[int]] = {block: [] for block in range(ndevices * channels)}
    bases = dict.fromkeys(codes, 0)
    control = [[ControlBlock((g * channels + c) * _control_bytes(groups), len(groups[g])) for c in range(channels)]
               for g in range(len(groups))]  # fmt: skip
    narrays = sum(len(call.operands) for call in calls)
    inputs, outputs = (np.zeros((narrays, ndevices, channels), np.int64) for _ in range(2))
    scratch: dict[int, int] = {}
    next_slot, first_array, most = 0, 0, 0
    for call in calls:
        segments = cut_in_channels(call, channels)
        for g, members in enumerate(groups):
            for c in range(channels):
                first = next_slot
                for r, device in enumerate(members):
                    block = device * channels + c
                    communicator = Communicator(0, tuple(members), r, control[g][c])
                    planned = PlannedCollective(call, communicator, first, [segments[c]], target=target)
                    written = write_collective(codes[block], [], planned, bases[block])
                    bases[block], most, next_slot = written.base, max(most, written.max_operands), first + planned.slot_count
                    for i, operand in enumerate(call.operands):
                        inputs[first_array + i, device, c] = planned.slot(r, 0, i)
                        outputs[first_array + i, device, c] = planned.output_slot(r, i)
                        capacity = segments[c][i].capacity if i in segments[c] else 0
                        nbytes = capacity * call.schedule.scratch_chunks * operand.dtype.itemsize
                        if nbytes:
                            scratch[planned.scratch_slot(r, i)] = nbytes
        first_array += len(call.operands)
    for block, code in codes.items():
        code += Opcode.ADVANCE.encode(communicator=0, span=bases[block])
        code += Opcode.END.encode()
    return LaunchPlan(
        tuple(np.array(code, np.int64) for code in codes.values()), tuple(combines), inputs, outputs, scratch, next_slot,
        len(groups) * channels * _control_bytes(groups), most,
    )  # fmt: skip


def _control_bytes(groups: Sequence[Sequence[int]]) -> int:
    return ControlBlock(0, max(map(len, groups))).nbytes


def cut_in_channels(call: CollectiveCall, channels: int) -> list[dict[int, ChunkLayout]]:
    """The layouts of each channel's segment of the arrays."""
    layouts = layouts_of(call.schedule, call.operands)
    if channels == 1 or not any(math.prod(operand.shape) for operand in call.operands):
        return [dict(enumerate(layouts)), *[{}] * (channels - 1)]
    return in_segments(layouts, channels)
