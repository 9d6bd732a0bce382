"""Schedules in GOAL, the input language of LogGOPSim.

Grammar (src/LogGOPSim/txt2bin.re): `num_ranks N`, then for each rank `rank R { ... }` with the lines
`label: send 8b to 1 tag 0`, `label: recv 8b from 1 tag 0`, `label: calc 5` (nanoseconds), and `label requires label`. Both
labels of the last one are defined before.

Sources: Hoefler, Schneider and Lumsdaine, "LogGOPSim: Simulating Large-Scale Applications in the LogGOPS Model", LSAP 2010;
https://github.com/spcl/LogGOPSim.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...errors import ScheduleError
from ..collective import chunk_bounds
from ..model.cost import chunk_bytes
from .access_order import AccessOrder

if TYPE_CHECKING:
    from ..schedule import Schedule

__all__ = ["to_goal"]


class _Operation(NamedTuple):
    """An operation of a rank, with the places that it reads and writes."""

    text: str
    reads: list[int]
    writes: list[int]


def to_goal(schedule: Schedule, nbytes: int, gamma: float) -> str:
    """Return the schedule in GOAL; see `Schedule.to_goal`."""
    chunk_bytes(schedule.collective, nbytes)
    if not isinstance(gamma, (int, float)) or isinstance(gamma, bool) or not 0 <= gamma < math.inf:
        raise ScheduleError(f"gamma={gamma!r} must be a number of seconds per byte, finite and at least 0.")
    blocks = schedule.collective.block_divisor
    if nbytes % blocks:
        raise ScheduleError(
            f"nbytes={nbytes:,}: {schedule.collective} cuts them into {blocks} blocks, so they must be a multiple of {blocks}."
        )
    lines = [f"num_ranks {schedule.nranks}", ""]
    sizes = np.diff(chunk_bounds(int(nbytes) // blocks, schedule.collective.parts, 1)).tolist()
    for rank, operations in enumerate(_operations(schedule, sizes, gamma)):
        order: AccessOrder[int] = AccessOrder()
        lines.append(f"rank {rank} {{")
        for number, operation in enumerate(operations, 1):
            lines.append(f"l{number}: {operation.text}")
            lines += [f"l{number} requires l{b}" for b in order.add(number, operation.reads, operation.writes)]
        lines += ["}", ""]
    return "\n".join(lines)


def _operations(schedule: Schedule, sizes: list[int], gamma: float) -> list[list[_Operation]]:
    """Return the operations of each rank, in an order that keeps what its places hold."""
    m = schedule.messages().verify()
    p, carries = schedule.nranks, schedule.collective.meaning.carries_data
    out: list[list[_Operation]] = [[] for _ in range(p)]
    tags: Counter[tuple[int, int]] = Counter()

    def bytes_of(i: int) -> int:
        return sum(sizes[m.part[i] + k * m.part_step[i]] for k in range(m.count[i])) if carries else 0

    def chunks(i: int, places: list[int]) -> list[int]:
        return [place + k * p for place in places for k in range(m.count[i])]

    for sends, combines in m.rounds():
        for i in sends:
            to, at = m.operands(i)
            src, dst = at[0] % p, to[0] % p
            size = max(1, bytes_of(i))  # LogGOPSim subtracts one byte from every size: none may be 0
            tag = tags[src, dst]
            tags[src, dst] += 1
            out[src].append(_Operation(f"send {size}b to {dst} tag {tag}", chunks(i, at), []))
            out[dst].append(_Operation(f"recv {size}b from {src} tag {tag}", [], chunks(i, to)))
        for i in combines:
            to, at = m.operands(i)
            time = round((len(at) - 1) * bytes_of(i) * gamma * 1e9)
            out[m.stream[i] // m.schedule.channels].append(_Operation(f"calc {time}", chunks(i, at), chunks(i, to)))
    return out
