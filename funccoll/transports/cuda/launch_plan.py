"""Launch plans: the code of all blocks of one kernel launch. In it several virtual devices of one GPU communicate.

Each device is some blocks, its *channels*. A channel executes the proved streams of its device on one segment of all arrays. It
has its own counters, so channels need not wait for each other. All addresses are in one table, because all blocks have one
address space: nothing is published, and nothing compared.

Work before a launch on its stream has ended when the first block begins, and work after it begins when the last block has
ended. So all devices have entered, and none waits for others to leave. Of the streams' waits only those between enter and leave
remain. A device signals only what another one awaits.
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
from ...schedules.streams.streams import Streams
from ..plans.control_block import Communicator, ControlBlock
from ..plans.plan_writer import write_collective
from ..plans.planned_collective import PlannedCollective, Target, layouts_of

__all__ = ["LaunchPlan", "build_launch_plan", "cut_in_channels"]


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """The code of all blocks of a launch, and what it needs. Block `device * channels + channel` is one of a device."""

    codes: tuple[np.ndarray, ...]
    """By block: int64 words, see `schedules.streams.instructions`."""
    combines: tuple[Combine, ...]
    """The combines that the code names by their numbers."""
    inputs: np.ndarray
    outputs: np.ndarray
    """By array and device, the slots of the table of addresses that hold an array's address, in a row for all channels."""
    scratch: Mapping[int, int]
    """By slot with memory of its own, the bytes of that memory."""
    slots: int
    control_bytes: int
    max_operands: int
    waits: bool
    """True if blocks wait for each other, and must run at the same time."""
    collectives: tuple[PlannedCollective, ...]
    """By block: its collective, with its slots."""

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.codes)


def build_launch_plan(call: CollectiveCall, groups: Sequence[Sequence[int]], channels: int) -> LaunchPlan:
    """The plan of a launch of a collective over these groups of devices, each device in one group.

    It depends on nothing else, and allocates nothing.
    """
    ndevices, combines, most = sum(map(len, groups)), dict[Combine, int](), 0
    target = Target(lambda op, dtype: combines.setdefault((op, dtype), len(combines)), publishes=False, has_non_temporal=False)
    streams, narrays = call.schedule.streams().verify(), len(call.operands)
    awaited = _awaited(streams)
    codes: dict[int, list[int]] = {block: [] for block in range(ndevices * channels)}
    collectives: dict[int, PlannedCollective] = {}
    inputs, outputs = (np.zeros((narrays, ndevices, channels), np.int64) for _ in range(2))
    scratch, next_slot = dict[int, int](), 0
    segments = cut_in_channels(call, channels)
    for g, members in enumerate(groups):
        for c in range(channels):
            first, control = next_slot, ControlBlock((g * channels + c) * _control_bytes(groups), len(members))
            for r, device in enumerate(members):
                communicator, code = Communicator(0, tuple(members), r, control), codes[device * channels + c]
                planned = PlannedCollective(call, communicator, first, [segments[c]], target=target, awaited=awaited)
                collectives[device * channels + c] = planned
                written = write_collective(code, [], planned, 0)
                if awaited:
                    code += Opcode.ADVANCE.encode(communicator=0, span=written.base)
                code += Opcode.END.encode()
                most, next_slot = max(most, written.max_operands), first + planned.slot_count
                for i, operand in enumerate(call.operands):
                    inputs[i, device, c] = planned.slot(r, 0, i)
                    outputs[i, device, c] = planned.output_slot(r, i)
                    capacity = segments[c][i].capacity if i in segments[c] else 0
                    nbytes = capacity * call.schedule.scratch_chunks * operand.dtype.itemsize
                    if nbytes:
                        scratch[planned.scratch_slot(r, i)] = nbytes
    return LaunchPlan(
        tuple(np.array(code, np.int64) for code in codes.values()),
        tuple(combines),
        inputs,
        outputs,
        scratch,
        next_slot,
        len(groups) * channels * _control_bytes(groups),
        most,
        bool(awaited),
        tuple(collectives[block] for block in codes),
    )


def _awaited(streams: Streams) -> frozenset[tuple[int, int]]:
    """The values of counters, each with its rank, that instructions between enter and leave wait for."""
    leaves = np.zeros(len(streams), bool)
    leaves[streams.start[1:] - 1] = True
    inside = np.repeat(~leaves, np.diff(streams.wait_ptr)) & (streams.wait_value > 1)  # 1 is the enter
    return frozenset(zip(streams.wait_stream[inside].tolist(), streams.wait_value[inside].tolist(), strict=True))


def _control_bytes(groups: Sequence[Sequence[int]]) -> int:
    return ControlBlock(0, max(map(len, groups))).nbytes


def cut_in_channels(call: CollectiveCall, channels: int) -> list[dict[int, ChunkLayout]]:
    """The layouts of each channel's segment of the arrays."""
    layouts = layouts_of(call.schedule, call.operands)
    if channels == 1 or not any(math.prod(operand.shape) for operand in call.operands):
        return [dict(enumerate(layouts)), *[{}] * (channels - 1)]
    return in_segments(layouts, channels)
