"""Results that all ranks of a host share: one array in the memory of its *owner*, not one in each rank's.

Every rank gets the same from a broadcast, an all_gather or an all_reduce, and Arrays are immutable. If all ranks see the same
memory, one array is enough. The result of a broadcast is the root's argument. An all_gather or an all_reduce with one result is
a collective with a root, the owner. All ranks work in it, and none leaves before the result is complete. p times less is
written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ..errors import ScheduleError
from .collective import Collective
from .moves import Move, encode
from .schedule import Schedule
from .streams.instructions import Opcode
from .streams.streams import Streams

__all__ = ["OWNER", "check_completion", "copies_root", "with_one_result"]

OWNER = 0
"""The rank that has the result of `with_one_result`."""
_DIRECT = {"all_gather": ("direct",), "all_reduce": ("two_shot", "one_shot")}
"""The algorithms whose results may be shared: those for memory that all ranks see. Any other was asked for by name."""
_MOST_RANKS = 64
"""The most ranks, because all of them wait for each other. More would need a tree."""


def copies_root(schedule: Schedule) -> bool:
    """Return True for a broadcast in which each rank only copies from the root's input, to the same place."""
    c, p = schedule.collective, schedule.nranks
    if (
        schedule.kind != "broadcast"
        or c.groups
        or not 1 < p <= _MOST_RANKS
        or not schedule.streams().verify().reads_only_inputs
    ):
        return False
    streams = schedule.streams()
    copy = np.diff(streams.src_ptr)[streams.opcode == Opcode.COMBINE]
    instruction = np.repeat(np.arange(len(streams)), np.diff(streams.dst_ptr))
    source = streams.src[streams.src_ptr[instruction]]
    same_chunk = streams.dst // p - c.input_chunks == source // p
    return bool((copy == 1).all() and (source % p == c.root).all() and same_chunk.all())


def with_one_result(schedule: Schedule) -> Streams | None:
    """Return the verified streams of the same collective with one result, which OWNER has. None if each rank needs its own.

    It has the same bits: reductions are left folds in rank order in both. Raises ScheduleError if the streams are wrong.
    """
    kind, p = schedule.kind, schedule.nranks
    direct = schedule.algorithm in _DIRECT.get(kind, ()) and schedule.channels == 1 and 1 < p <= _MOST_RANKS
    if not direct or schedule.collective.groups or (schedule.collective.meaning.reduces and not schedule.prove().left_fold):
        return None
    return _streams(kind, p)


@functools.lru_cache(maxsize=64)
def _streams(kind: str, p: int) -> Streams:
    schedule = _TO_OWNER[kind](p)
    if schedule.collective.meaning.reduces and not schedule.prove().left_fold:
        raise ScheduleError(f"the shared result of {kind} is not combined in the order of ranks.")
    streams = _all_wait(schedule.streams()).verify()
    check_completion(streams)
    return streams


def _gathered(p: int) -> Schedule:
    """Build moves in which every rank writes its own block to the owner."""
    r = np.arange(p)
    return _schedule(Collective("gather", p, OWNER), Move((OWNER, "output", r), (r, "input", 0), by=r))


def _reduced(p: int) -> Schedule:
    """Build moves in which rank r combines the chunks r of all ranks, in their order, and writes the result to the owner."""
    r = np.arange(p)
    combine = Move((OWNER, "output", r), [(i, "input", r) for i in range(p)], by=r)
    return _schedule(Collective("reduce", p, OWNER, chunks=p), combine)


_TO_OWNER: Mapping[str, Callable[[int], Schedule]] = {"all_gather": _gathered, "all_reduce": _reduced}


def _schedule(collective: Collective, move: Move) -> Schedule:
    batch = encode(move, collective, 0, None)
    assert batch is not None
    return Schedule(collective, "shared", (batch,), 0, None)


def _all_wait(streams: Streams) -> Streams:
    """Return the same streams, but each rank leaves only after all others have done their work."""
    p, n = streams.schedule.nranks, len(streams)
    leaves = streams.start[1:] - 1
    done = np.diff(streams.start) - 1  # the counter of a rank with only LEAVE left
    waiter = np.repeat(np.arange(n), np.diff(streams.wait_ptr))
    others = np.array([(leaves[r], q, done[q]) for r in range(p) for q in range(p) if q != r]).reshape(-1, 3).T
    kept = ~np.isin(waiter, leaves)  # the waits of LEAVE are implied
    at = np.concatenate([waiter[kept], others[0]])
    order = np.argsort(at, kind="stable")
    stream = np.concatenate([streams.wait_stream[kept], others[1]])[order].astype(streams.wait_stream.dtype)
    value = np.concatenate([streams.wait_value[kept], others[2]])[order].astype(streams.wait_value.dtype)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=n))]).astype(streams.wait_ptr.dtype)
    return replace(streams, wait_ptr=ptr, wait_stream=stream, wait_value=value)


def check_completion(streams: Streams) -> None:
    """Raise ScheduleError if a rank can leave before all outputs are written."""
    graph = streams.graph()
    work = np.flatnonzero(streams.opcode == Opcode.COMBINE)
    leaves = np.flatnonzero(streams.opcode == Opcode.LEAVE)
    node, of = np.repeat(leaves, len(work)), np.tile(work, len(leaves))
    stream = streams.stream[of]
    known = graph.knows(node, stream, of - streams.start[stream] + 1)
    if not known.all():
        at = int(np.argmin(known))
        raise ScheduleError(
            f"{streams.schedule.collective} with a shared result: {streams.describe(int(node[at]))} does not wait for "
            f"{streams.describe(int(of[at]))}: its rank would read a result that is not complete."
        )
