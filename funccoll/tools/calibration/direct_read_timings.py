"""Timing of direct reads of private arguments against staging, in the ranks of a job: the sizes that they speed up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...collectives import functions as collectives
from ...compiler.jit import jit
from ...core.machine_profile import DIRECT_READS, DirectReads
from ...core.partition_spec import P
from ...job.job_context import current, init, make_mesh, world_size
from .timed_cases import ITEM

__all__ = ["least_bytes", "time_direct_reads"]

_SIZES = tuple(1 << i for i in range(14, 22))
"""Bytes of a read: 16 KiB to 2 MiB."""
_TURN_BYTES = 1 << 20
_AXIS = "ranks"
_Pair = tuple[list[Any], np.ndarray]
_BODIES: tuple[Callable[[Any], Any], ...] = (
    lambda x: collectives.all_to_all(x, _AXIS, split_dim=0, concat_dim=0),
    lambda x: collectives.reduce_scatter(x, _AXIS),
)
"""For collectives that copy, and for those that combine."""


def time_direct_reads(turns: int) -> DirectReads:
    """Return this host's bounds, measured by all ranks of this job; the usual bounds if ranks cannot read each other."""
    init()
    access: Any = getattr(current(), "transport").access  # noqa: B009  (of a job on one host)
    if access.bounds is None:
        return DIRECT_READS
    before = access.bounds
    try:
        pairs = [[_pair(body, nbytes, access) for nbytes in _SIZES] for body in _BODIES]
    finally:
        access.bounds = before
    mesh = make_mesh({_AXIS: world_size()}, device="cpu")
    slowest = jit(lambda t: collectives.all_reduce(t, _AXIS, op="max"), mesh=mesh, in_specs=P(_AXIS), out_specs=P())
    (meet,) = slowest.lower(np.zeros(2 * world_size())).compile().group_calls
    # Each turn has all sizes. If cores of the machine change places, all sizes see that.
    found = [[[_turn(pair, turn, meet) for pair in some] for some in pairs] for turn in range(turns + 1)]
    copied, combined = np.median(np.array(found[1:]), axis=0).tolist()  # the first turn does not count
    return DirectReads(least_bytes(_SIZES, copied), least_bytes(_SIZES, combined))


def least_bytes(sizes: Sequence[int], gains: Sequence[float]) -> int:
    """Return the size from which on direct reads gain most; 0 if they never do. `gains` are times relative to staging."""
    found = {size: sum(map(math.log, gains[i:])) for i, size in enumerate(sizes)}
    best = max(found, key=lambda size: found[size])
    return best if found[best] > 0 else 0


def _pair(body: Callable[[Any], Any], nbytes: int, access: Any) -> _Pair:
    """Return the same collective twice, with staging and with direct reads of `nbytes` each, and an argument."""
    x, groups = np.ones(world_size() * nbytes // ITEM, np.float32), []
    for access.bounds in (None, DirectReads(1, 1)):
        mesh = make_mesh({_AXIS: world_size()}, device="cpu")
        step = jit(body, mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS))
        groups += step.lower(np.ones(world_size() * x.size, np.float32)).compile().group_calls
    return groups, x


def _turn(pair: _Pair, turn: int, meet: Callable[..., Any]) -> float:
    """Return the time with staging over that with direct reads, on the slowest rank."""
    (groups, x), times = pair, np.zeros(2)
    for i in (0, 1) if turn % 2 else (1, 0):
        for _ in range(max(2, _TURN_BYTES // x.nbytes)):
            x.fill(turn)  # as if its owner has just written it: no other core's caches hold it
            meet(times)
            start = time.perf_counter()
            groups[i](x)
            times[i] += time.perf_counter() - start
    (found,) = meet(times)
    return float(found[0] / found[1])
