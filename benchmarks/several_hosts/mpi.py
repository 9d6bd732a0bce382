"""Processes of several hosts against MPI's own collectives: `python -m benchmarks.several_hosts.mpi`.

Hosts are network namespaces of this machine (network_hosts.py), joined by a bridge; their links are unlimited, or of
1 Gbit/s. In each rank, our jitted steps and mpi4py's calls take turns: same process, same cores, same MPI and connections.
The tables *native* and *python* and all that is subtracted are those of `benchmarks/one_host/host.py`.

2 hosts with a process each decide the goals; 2 x 2 and 4 x 1 are reported, on fewer sizes and rounds, with
mpi_yield_when_idle where there are more ranks than cores. Writes benchmarks/results/mpi.json and its table in docs/benchmarks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import ROUNDS, machine, spread, summary
from benchmarks.one_host import host_start
from benchmarks.one_host.host import Bench, write
from benchmarks.one_host.host_cases import COLLECTIVES, Case, cases
from benchmarks.one_host.host_contender import Turn, slowest
from benchmarks.one_host.host_jobs import Job, cores, one_thread
from benchmarks.one_host.host_ratios import rounded
from benchmarks.rank import rank_words
from benchmarks.result_tables import refresh
from benchmarks.several_hosts.mpi_goals import DECIDES, goals, means, where

ROOT = Path(__file__).parents[2]

from tests.support.ranks import mpi_vendors, network_hosts
from tests.support.ranks.network_hosts import NetworkHosts

RESULTS = ROOT / "benchmarks" / "results" / "mpi.json"
SIZES = tuple(4**i for i in range(3, 14))
"""64 B to 64 MiB in powers of 4."""
FEW_SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
LINKS = {"unlimited": 0, "1 Gbit/s": 1000}
"""Megabits per second of each link, in each direction."""
BURST = 1 << 17
"""Bytes that a limited link may send in one go: a millisecond's. With less, it is slower when the kernel is busy."""
TURN_SECONDS = 0.012
_SLOW, _FEW_ROUNDS = 0.1, 5
"""Seconds of one execution from which a case has fewer rounds: on a slow link, 64 MiB take a second."""


class Side:
    """One contender of a job whose ranks have both, as `host.Bench` takes it."""

    def __init__(self, job: Job, name: str):
        self.job, self.name = job, name

    def prepare(self, case: Case) -> list[str]:
        """See `Job.prepare`."""
        return self.job.all("prepare", self.name, case)[0]

    def measure(self, way: str, times: int) -> Turn:
        """See `Job.measure`."""
        return slowest(self.job.all("measure", self.name, way, times))


class NetworkBench(Bench):
    """Both contenders, on one layout of hosts, one link and one MPI."""

    def __init__(self, stack: ExitStack, options: argparse.Namespace, vendor: str, layout: str, link: str):
        self.options, self.turn = options, TURN_SECONDS / 4 if options.quick else TURN_SECONDS
        self.about = {"vendor": vendor, "layout": layout, "link": link}
        counts = counts_of(layout)
        self.ranks = sum(counts)
        hosts = stack.enter_context(NetworkHosts(len(counts)))
        if LINKS[link]:
            hosts.rate(LINKS[link], BURST)
        start = lambda program: hosts.mpirun(vendor, counts, program, settings(counts), stdout=sys.stderr, stderr=None)
        job = stack.enter_context(Job(vendor, self.ranks, start, rank=rank_words("benchmarks.several_hosts.mpi_rank")))
        self.jobs = {"ours": Side(job, "ours"), "mpi": Side(job, "mpi")}
        self.versions = job.versions

    @property
    def is_deciding(self) -> bool:
        """True for the layout that decides the goals."""
        return self.about["layout"] == DECIDES

    def cases(self) -> list[Case]:
        """The cases of this layout."""
        sizes = self.options.sizes or (SIZES if self.is_deciding and not self.options.quick else FEW_SIZES)
        return cases(self.ranks, sizes, self.options.collectives)

    def rows(self, case: Case) -> Iterator[dict[str, Any]]:
        """See `Bench`."""
        for row in super().rows(case):
            yield {**self.about, **row}

    def rounds(self, seconds: float) -> int:
        """See `Bench`."""
        few = seconds > _SLOW or not self.is_deciding
        return min(self.options.rounds, _FEW_ROUNDS) if few else self.options.rounds

    def repetitions(self, seconds: float) -> int:
        """See `Bench`. What is slow, the network, has no caches to be warmed."""
        return 1


def counts_of(layout: str) -> list[int]:
    """Processes of each host in a layout, hosts x processes."""
    hosts, processes = map(int, layout.split(" x "))
    return [processes] * hosts


def settings(counts: Sequence[int]) -> dict[str, str]:
    """The ranks' environment: Open MPI yields where there are more ranks than cores."""
    return {"OMPI_MCA_mpi_yield_when_idle": str(int(sum(counts) > cores()))}


def started(hosts: NetworkHosts, vendor: str, role: str) -> float:
    """Seconds from mpirun to the first collective's result on the last rank, on 2 hosts."""
    begin, counts = time.monotonic(), counts_of(DECIDES)
    variables = {**settings(counts), "PYTHONDONTWRITEBYTECODE": ""}  # as it is with users: not all modules compiled anew
    job = hosts.mpirun(vendor, counts, [sys.executable, host_start.__file__, role], variables)
    out, err = job.communicate(timeout=network_hosts.PATIENCE)
    return host_start.last(subprocess.CompletedProcess(role, job.returncode, out, err), sum(counts)) - begin


def starts(vendor: str, rounds: int) -> dict[str, Any]:
    """Alternating starts of a funccoll script and a bare mpi4py script; the first of each is left out."""
    times: dict[str, list[float]] = {role: [] for role in host_start.ROLES}
    with NetworkHosts(2) as hosts:
        for number in range(rounds + 1):
            for role in times if number % 2 else reversed(times):
                took = started(hosts, vendor, role)
                if number:
                    times[role].append(took)
    extra = [ours - mpi for ours, mpi in zip(times["ours"], times["mpi"], strict=True)]
    summaries = {role: summary(taken) for role, taken in times.items()}
    return {"vendor": vendor, **summaries, "extra_s": spread(extra), "rounds": rounds}


def show(row: dict[str, Any]) -> str:
    """One printed line of a row."""
    return (
        f"{row['vendor']:<8} {row['layout']} {row['link']:<9} {row['table']:<6} {where(row):<24} "
        f"{row['ours']['median_us']:>11.1f} µs  MPI {row['mpi']['median_us']:>11.1f} µs {row['mpi']['ratio']['median']:6.2f}×"
    )


def parse(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="funccoll on several hosts against MPI's own collectives")
    parser.add_argument("--quick", action="store_true", help="few sizes, 3 rounds: to see that it works")
    parser.add_argument("--vendors", default=",".join(mpi_vendors.VENDORS))
    parser.add_argument("--layouts", default="2x1,2x2,4x1", help="hosts x processes of each")
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--sizes", default="", help="bytes (default 64 B to 64 MiB in powers of 4)")
    parser.add_argument("--without-start", action="store_true", help="leave out the times from mpirun to the first collective")
    parser.add_argument("--out", type=Path, default=None, help=f"the results; {RESULTS.name} and the pages if left out")
    options = parser.parse_args(words)
    for name in ("vendors", "links", "collectives"):
        setattr(options, name, tuple(getattr(options, name).split(",")))
    options.layouts = [layout.replace("x", " x ") for layout in options.layouts.split(",")]
    options.sizes = tuple(map(int, filter(None, options.sizes.split(","))))
    options.rounds = 3 if options.quick else ROUNDS
    if options.quick and options.out is None:
        parser.error("--quick needs --out: the committed results are of full runs")
    return options


def main(words: list[str] | None = None) -> None:
    """Measure everything, write the results, refresh the pages."""
    options, about, begin = parse(words), machine(), time.monotonic()
    if why_not := network_hosts.why_not():
        sys.exit(why_not)
    missing = {vendor: why for vendor in options.vendors if (why := mpi_vendors.why_not(vendor))}
    for name, why in missing.items():
        print(f"without {name}: {why}", flush=True)
    os.environ.update(one_thread())
    rows: list[dict[str, Any]] = []
    began: list[dict[str, Any]] = []
    for vendor in (vendor for vendor in options.vendors if vendor not in missing):
        for layout in options.layouts:
            for link in options.links:
                with ExitStack() as stack:
                    bench = NetworkBench(stack, options, vendor, layout, link)
                    about["versions"].update(bench.versions)
                    for case in bench.cases():
                        for row in bench.rows(case):
                            rows.append(rounded(row))
                            print(show(row), flush=True)
        if not options.without_start:
            began.append(rounded(starts(vendor, options.rounds)))
            print(f"{vendor}: mpirun to the first collective takes {began[-1]['extra_s']['median']:.2f} s more", flush=True)
    about["load_after"] = os.getloadavg()
    results = {
        "machine": about,
        "rounds": options.rounds,
        "turn_seconds": TURN_SECONDS,
        "quick": options.quick,
        "missing": missing,
        "seconds": round(time.monotonic() - begin),
        "goals": rounded(goals(rows, began)),
        "means": rounded(means(rows)),
        "starts": began,
        "cases": rows,
    }
    path = options.out or RESULTS
    write(path, results)
    for g in results["goals"]:
        verdict = {None: "not measured", True: "met", False: "MISSED"}[g["met"]] + ("" if g["asked"] else " (not asked)")
        reached = "" if g["reached"] is None else f": {g['reached']:.4g} {g['unit']} ({g['at']})"
        print(f"{verdict:<18} {g['vendor']}, {g['layout']}, {g['goal']}{reached}, wanted {g['wanted']}")
    if options.out is None:
        refresh()
    print(f"written: {path}, after {results['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
