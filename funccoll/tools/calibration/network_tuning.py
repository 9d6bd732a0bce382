"""Measurement of a running job's hosts: collectives inside and across them, and the profile made of both."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...core.machine_profile import (
    DIRECT_READS,
    HostParameters,
    MachineProfile,
    MeasuredTimes,
    NetworkParameters,
    this_host,
)
from ...core.mesh import number_hosts
from ...errors import CalibrationError
from ...job.job_context import init, make_mesh
from ...schedules.host_map import levels_of
from .fit_network import fit_network
from .fit_parameters import fit
from .rank_timings import mesh_of_hosts, time_on
from .timed_cases import ON_HOSTS, cases
from .tuning import PASSES, four_digits, measured_times, samples_of

__all__ = ["HostsPlan", "combined", "measure_hosts"]


class HostsPlan:
    """The cases of a job on several hosts: `across` all ranks, and `inside` each host if hosts are equal.

    Every rank makes it. Raise CalibrationError for a job on one host.
    """

    def __init__(self, sizes: tuple[int, ...]):
        world = init()
        self.hosts = () if world is None else number_hosts(world.hosts)
        if not self.hosts:
            raise CalibrationError("all processes of this job are on one host: `funccoll tune` without a job measures that.")
        levels = levels_of(self.hosts)
        self.ranks_per_host = levels[1] if levels else 1
        two_levels = len(set(self.hosts)) < len(self.hosts)
        across = {k: tuple(n for n in names if two_levels or n != "hierarchical") for k, names in ON_HOSTS.items()}
        self.across = cases(len(self.hosts), sizes, across)
        self.inside = cases(self.ranks_per_host, sizes) if self.ranks_per_host > 1 else []

    def __len__(self) -> int:
        return PASSES * (len(self.across) + len(self.inside))


def measure_hosts(
    plan: HostsPlan, turns: int, turn_seconds: float, told: Callable[[], object]
) -> tuple[list[MeasuredTimes], dict[str, float]]:
    """Time the plan's cases in this job, and return (times, load). Every rank calls it, and gets the same times.

    `told` is called after each case. The load is the share of the cases inside hosts in which others disturbed every turn.
    """
    meshes = [(make_mesh({"ranks": len(plan.hosts)}, device="cpu"), plan.across)]
    if plan.inside:
        meshes.append((mesh_of_hosts(len(plan.hosts) // plan.ranks_per_host), plan.inside))
    found: list[list[list[float]]] = [[[] for _ in some] for _, some in meshes]
    disturbed = 0
    for number in range(PASSES):
        for (mesh, some), times in zip(meshes, found, strict=True):
            order = random.Random(number).sample(range(len(some)), len(some))
            taken, badly = time_on(mesh, [some[i] for i in order], turns, turn_seconds, told)
            disturbed += badly
            for i, seconds in zip(order, taken, strict=True):
                times[i] += seconds
    across = measured_times(len(plan.hosts), plan.across, found[0])
    inside = measured_times(plan.ranks_per_host, plan.inside, found[1]) if plan.inside else []
    load = {"disturbed_cases": round(disturbed / max(1, PASSES * len(plan.inside)), 3)}
    return [*inside, *(replace(m, hosts=plan.hosts) for m in across)], load


def combined(
    times: Sequence[MeasuredTimes], hosts: tuple[int, ...], load: dict[str, float], before: MachineProfile | None
) -> MachineProfile:
    """Return the profile of these times, with an earlier profile's values for other numbers of ranks and hosts.

    Inside hosts the parameters are fitted to the times there. Without such times they are the earlier profile's, or else
    typical ones.
    """
    parameters = {p.ranks: p for p in (before.parameters if before else ())}
    for ranks in sorted({m.ranks for m in times if not m.hosts}):
        found = fit(samples_of([m for m in times if not m.hosts], ranks), ranks).parameters
        caches = tuple((float(round(held)), four_digits(excess)) for held, excess in found.caches)
        start, alpha, beta, gamma = (four_digits(t) for t in (found.start, found.alpha, found.beta, found.gamma))
        parameters[ranks] = HostParameters(ranks, start, alpha, beta, gamma, caches)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    load = load | dict(zip(("load_1", "load_5", "load_15"), (round(x, 2) for x in os.getloadavg()), strict=True))
    known = tuple(parameters[ranks] for ranks in sorted(parameters))
    direct_reads = before.direct_reads if before else DIRECT_READS
    profile = MachineProfile(this_host(), now, load, known, tuple(times), direct_reads=direct_reads)
    inside = profile.parameters_for(max(map(hosts.count, set(hosts))))
    network = fit_network(samples_of([m for m in times if m.hosts], len(hosts)), hosts, inside).parameters
    network = replace(network, **{n: four_digits(getattr(network, n)) for n in ("start", "alpha", "beta")})
    measured = network.hosts, network.ranks_per_host
    others = [n for n in (before.network if before else ()) if (n.hosts, n.ranks_per_host) != measured]
    fresh = {(m.ranks, m.hosts) for m in times}
    kept = [m for m in (before.measured if before else ()) if (m.ranks, m.hosts) not in fresh]
    by_size: list[NetworkParameters] = sorted([*others, network], key=lambda n: (n.hosts, n.ranks_per_host))
    return replace(profile, measured=(*kept, *times), network=tuple(by_size))
