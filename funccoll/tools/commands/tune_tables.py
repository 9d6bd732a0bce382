"""A machine profile as tables, for `funccoll tune`."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...core.display import seconds_text, size_text
from ...core.machine_profile import DirectReads, HostParameters, MachineProfile, MeasuredTimes, NetworkParameters
from ...schedules.model.cost import cost
from ...schedules.model.topology import Topology
from ..calibration.fit_network import built_on

__all__ = ["print_profile"]

_COLUMNS = 7
"""The most algorithms of a table, which has 80 columns."""


def print_profile(profile: MachineProfile, as_json: bool) -> None:
    """Print a profile as tables, or as one line of JSON."""
    if as_json:
        print(json.dumps(profile.to_json()))
        return
    console = Console(highlight=False)
    others = profile.load.get("others_during")
    busy = "" if others is None else f", beside other processes that kept {others:g} processors busy"
    console.print(Text(f"{profile.host['name']}: {profile.host['cpu']}, {profile.host['cores']} cores"))
    console.print(Text(f"measured {profile.date}{busy}\n"))
    if profile.parameters:
        console.print(Text("Parameters of the cost model", style="bold"), _parameters_table(profile.parameters))
    console.print(_direct_reads_text(profile.direct_reads))
    if profile.network:
        console.print(Text("\nParameters of the network", style="bold"), _network_table(profile.network))
    for ranks, hosts in dict.fromkeys((m.ranks, m.hosts) for m in sorted(profile.measured, key=lambda m: len(m.hosts))):
        some = [m for m in profile.measured if (m.ranks, m.hosts) == (ranks, hosts)]
        where = f"{ranks} ranks{f' on {_hosts_text(hosts)}' if hosts else ''}"
        console.print(Text(f"\nMeasured times, {where}", style="bold"))
        for at in range(0, len(some), _COLUMNS):
            console.print(_times_table(some[at : at + _COLUMNS], _machine(profile, ranks, hosts)))


def _direct_reads_text(found: DirectReads) -> str:
    copied, combined = (f"from {size_text(n)} on" if n else "never" for n in (found.copied, found.combined))
    return f"Ranks read each other's NumPy arguments directly {copied} if they copy, {combined} if they combine."


def _hosts_text(hosts: tuple[int, ...]) -> str:
    counts = list(Counter(hosts).values())
    return f"{len(counts)} hosts ({' + '.join(map(str, counts))})" if len(counts) <= 8 else f"{len(counts)} hosts"


def _machine(profile: MachineProfile, ranks: int, hosts: tuple[int, ...]) -> Topology:
    """Return the machine that the profile describes."""
    network = profile.network_for(hosts) if hosts else None
    if network is None:
        return Topology.measured_host(ranks, profile.parameters_for(ranks))
    return Topology.measured_hosts(hosts, profile.parameters_for(max(Counter(hosts).values())), network)


def _parameters_table(parameters: Sequence[HostParameters]) -> Table:
    table = _table("ranks", "start", "α, a wait", "β, bytes", "γ, reductions", "beyond the caches")
    for p in parameters:
        table.add_row(
            str(p.ranks),
            seconds_text(p.start),
            seconds_text(p.alpha),
            _rate(p.beta),
            _rate(p.gamma),
            "\n".join(f"{size_text(1024 * round(held / 1024))}: +{excess:.0%}" for held, excess in p.caches),
        )
    return table


def _network_table(network: Sequence[NetworkParameters]) -> Table:
    table = _table("hosts", "ranks on one", "start", "α, a message", "β, its bytes")
    for n in network:
        table.add_row(str(n.hosts), str(n.ranks_per_host), seconds_text(n.start), seconds_text(n.alpha), _rate(n.beta))
    return table


def _table(*heads: str) -> Table:
    table = Table.grid(padding=(0, 2))
    for head in heads:
        table.add_column(head, justify="right")
    table.add_row(*(Text(head, style="dim") for head in heads))
    return table


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.3g} GB/s" if seconds_per_byte else "no time"


def _times_table(times: Sequence[MeasuredTimes], machine: Topology) -> Table:
    """Return a row for each size, a column for each algorithm, and below them the median error of the model's times."""
    table = Table.grid(padding=(0, 1))  # all of it in 80 columns
    table.add_column(justify="right")
    for _ in times:
        table.add_column(justify="right")
    table.add_row("", *(Text(m.kind.replace("_", "_\n", 1), style="dim") for m in times))
    table.add_row("", *(Text(m.algorithm.replace("recursive_", "recursive_\n"), style="dim") for m in times))
    for n in sorted({n for m in times for n in m.nbytes}):
        found = [m.at(n) if n in m.nbytes else None for m in times]
        table.add_row(size_text(n), *("" if t is None else seconds_text(t) for t in found))
    table.add_row("error", *(f"{_typical_error(m, machine):.0%}" for m in times))
    return table


def _typical_error(times: MeasuredTimes, machine: Topology) -> float:
    schedule = built_on(times.kind, times.algorithm, times.hosts or (0,) * times.ranks)
    pairs = zip(times.nbytes, times.seconds, strict=True)
    return statistics.median(abs(cost(schedule, machine, n).seconds / t - 1) for n, t in pairs)
