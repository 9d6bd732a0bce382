"""Schedules in GOAL, the input language of LogGOPSim.

Grammar (src/LogGOPSim/txt2bin.re): `num_ranks N`, then for each rank `rank R { ... }` with the lines
`label: send 8b to 1 tag 0`, `label: recv 8b from 1 tag 0`, `label: calc 5` (nanoseconds), and `label requires label`, of
which both are defined before.
Sources: Hoefler, Schneider and Lumsdaine, "LogGOPSim: Simulating Large-Scale Applications in the LogGOPS Model", LSAP 2010;
https://github.com/spcl/LogGOPSim.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
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
    """The schedule in GOAL; see `Schedule.to_goal`."""
    chunk_bytes(schedule.collective, nbytes)
    if not isinstance(gamma, (int, float)) or isinstance(gamma, bool) or not 0 <= gamma < math.inf:
        raise ScheduleError(f"gamma={gamma!r} must be a number of seconds per byte, finite and at least 0.")
    blocks = schedule.collective.block_divisor
    if nbytes % blocks:
        raise ScheduleError(
            f"nbytes={nbytes:,}: {schedule.collective} cuts them into {blocks} blocks, of which they must be a multiple."
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
    """The operations of each rank, in an order that keeps what its places hold."""
    m = schedule.messages().verify()
    p, carries = schedule.nranks, schedule.collective.meaning.carries_data
    out: list[list[_Operation]] = [[] for _ in range(p)]
    tags: Counter[tuple[int, int]] = Counter()

    def bytes_of(count: int, part: int, step: int) -> int:
        return sum(sizes[part + i * step] for i in range(count)) if carries else 0

    def run(place: int, count: int) -> list[int]:
        return [place + i * p for i in range(count)]

    def messages(t: int) -> Iterator[tuple[int, int]]:
        low, high = np.searchsorted(rounds, [t, t + 1])
        return zip(s[low:high].tolist(), r[low:high].tolist(), strict=True)

    s, r = m.matched()
    rounds = m.sends.round[s]
    for t in range(m.nrounds + 1):
        for i, j in messages(t):
            x, y = m.sends, m.receives
            src, dst, count = int(x.rank[i]), int(y.rank[j]), int(x.count[i])
            # LogGOPSim subtracts one byte from every size, so there are no empty messages.
            size = max(1, bytes_of(count, int(x.part[i]), int(x.part_step[i])))
            tag = tags[src, dst]
            tags[src, dst] += 1
            out[src].append(_Operation(f"send {size}b to {dst} tag {tag}", run(int(x.place[i]), count), []))
            out[dst].append(_Operation(f"recv {size}b from {src} tag {tag}", [], run(int(y.place[j]), count)))
        c = m.combines
        here = np.flatnonzero(c.round == t)
        for i in here[np.argsort(c.step[here], kind="stable")].tolist():
            count = int(c.count[i])
            reads = [x for place in c.src[c.src_ptr[i] : c.src_ptr[i + 1]].tolist() for x in run(place, count)]
            writes = [x for place in c.dst[c.dst_ptr[i] : c.dst_ptr[i + 1]].tolist() for x in run(place, count)]
            reduced = (int(c.src_ptr[i + 1] - c.src_ptr[i]) - 1) * bytes_of(count, int(c.part[i]), int(c.part_step[i]))
            out[int(c.rank[i])].append(_Operation(f"calc {round(reduced * gamma * 1e9)}", reads, writes))
    return out
