"""Timing in the ranks of a job. Each case is compiled, and repeated in native calls."""

from __future__ import annotations

import math
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...collectives import functions as collectives
from ...compiler.compile_spmd import compile_spmd
from ...compiler.jit import jit
from ...compiler.placement import from_local
from ...core.mesh import Mesh
from ...core.partition_spec import P
from ...job import host
from ...job.job_context import make_mesh, rank, world_size
from .timed_cases import ITEM, Case

__all__ = ["mesh_of_hosts", "time_cases", "time_on"]

_LEAST = 3
"""The fewest repetitions in a turn."""
_PATIENCE = 12
"""The most turns for each one that counts."""
_SHARED = 16
"""How many times longer turns are with more ranks than cores. These share the cores by time slices, which last milliseconds."""
_AXIS = "ranks"
_HOSTS = "hosts"
_BODIES: dict[str, Callable[[Any, str], Any]] = {
    "all_reduce": lambda x, name: collectives.all_reduce(x, _AXIS, algorithm=name),
    "all_gather": lambda x, name: collectives.all_gather(x, _AXIS, algorithm=name),
    "reduce_scatter": lambda x, name: collectives.reduce_scatter(x, _AXIS, algorithm=name),
    "all_to_all": lambda x, name: collectives.all_to_all(x, _AXIS, split_dim=0, concat_dim=0, algorithm=name),
    "broadcast": lambda x, name: collectives.broadcast(x, _AXIS, algorithm=name),
}
_Latest = Callable[..., tuple[float, float]]


def time_cases(cases: Sequence[Case], turns: int, turn_seconds: float, progress: str = "") -> tuple[list[list[float]], int]:
    """Time every case over all ranks of this rank's job (`time_on`). Rank 0 writes a byte to `progress` after each case."""
    told = -1
    if progress and rank() == 0:
        with suppress(OSError):  # without a progress bar the times are the same
            told = os.open(progress, os.O_WRONLY | os.O_CLOEXEC)
    try:
        mesh = make_mesh({_AXIS: world_size()}, device="cpu")
        return time_on(mesh, cases, turns, turn_seconds, (lambda: os.write(told, b".")) if told >= 0 else lambda: None)
    finally:
        if told >= 0:
            os.close(told)


def mesh_of_hosts(hosts: int) -> Mesh:
    """Return a mesh of this job whose cases run inside each of its equal hosts at the same time."""
    return make_mesh({_HOSTS: hosts, _AXIS: world_size() // hosts}, device="cpu")


def time_on(
    mesh: Mesh, cases: Sequence[Case], turns: int, turn_seconds: float, told: Callable[[], object]
) -> tuple[list[list[float]], int]:
    """Time every case on a mesh. Return (seconds of one execution in each turn of each case, number of disturbed cases).

    A turn begins together on all ranks. It repeats the collective for about `turn_seconds` in one native call, and takes the
    time of the slowest rank. If each rank has its own core, a turn is disturbed when another process took a core, or when a
    rank slept because others want its core. The kernel counts such switches. Disturbed turns do not count, unless a case has
    no others after `_PATIENCE` times as many turns. Every rank calls `told` after each case.
    """
    every = mesh.axis_names
    slowest = jit(lambda t: collectives.all_reduce(t, every, op="max"), mesh=mesh, in_specs=P(every), out_specs=P())

    def latest(seconds: float, switches: float = 0.0) -> tuple[float, float]:
        mine = from_local(np.array([seconds, switches]), mesh, P(every))
        found = np.asarray(slowest(mine))
        return float(found[0]), float(found[1])

    alone = max(Counter(mesh.hosts or (0,) * mesh.size).values()) <= host.cores()
    turn_seconds *= 1 if alone else _SHARED
    alone = alone and not mesh.hosts_along(_AXIS)  # a rank that waits for the network lets others run
    found, disturbed = [], 0
    for case in cases:
        repeat = _repetition(case, mesh)
        times = _calibrate(repeat, latest, turn_seconds)
        clean: list[float] = []
        others: list[float] = []
        for _ in range(turns * _PATIENCE):
            seconds, switches = _turn(repeat, latest, times)
            (others if alone and switches else clean).append(seconds)
            if len(clean) == turns:
                break
        found.append(clean or others[:turns])
        disturbed += not clean
        told()
    return found, disturbed


def _repetition(case: Case, mesh: Mesh) -> Callable[[int], Any]:
    """Return a function that executes the case a number of times. Argument and result lie in shared memory.

    Each rank has its own result, as in programs that go on to compute.
    """
    body, elements = _BODIES[case.kind], case.nbytes // ITEM
    if case.kind == "all_gather":
        elements //= mesh.shape[_AXIS]
    types = [((elements,), np.dtype(np.float32))]
    group: Any = compile_spmd(lambda x: [body(x, case.algorithm)], types, mesh, f"funccoll tune {case}").run
    x = from_local(np.ones(elements, np.float32), mesh, P(mesh.axis_names))
    return lambda times: group.repeat(times, x.local)


def _turn(repeat: Callable[[int], Any], latest: _Latest, times: int) -> tuple[float, float]:
    """Return (seconds of one repetition on the slowest rank, switches to other processes on the rank with most)."""
    latest(0.0)  # all ranks begin together
    switches, start = _switches(), time.perf_counter()
    repeat(times)
    seconds = time.perf_counter() - start
    return latest(seconds / times, _switches() - switches)


def _switches() -> int:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nivcsw + usage.ru_nvcsw


def _calibrate(repeat: Callable[[int], Any], latest: _Latest, turn_seconds: float) -> int:
    """Return the number of repetitions of a turn, the same on all ranks."""
    times, best = 1, math.inf
    for seconds in (turn_seconds / 8, turn_seconds / 2, turn_seconds):
        best = min(best, _turn(repeat, latest, times)[0])
        times = max(_LEAST, int(seconds / max(best, 1e-8)))
    return times
