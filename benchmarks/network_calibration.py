"""Predictions for several hosts against measured times: `funccoll tune` in a job, judged on cases that its fit has not seen.

Hosts are network namespaces (tests/network_hosts.py) with links that are unlimited, or of 1 Gbit/s. In one job every algorithm
is timed that `funccoll tune` times there, then all others, and sizes between. The profile is made of the first, and predicts
the others. For every collective and held-out size, the algorithm that `select` picks with that profile is compared with the
best measured one: in the presets' order of combination, which a profile does not change, and with FUNCCOLL_TUNED_BITS=1.

Writes benchmarks/results/network_calibration.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calibration import between, errors, rounded
from measure import machine
from mpi import BURST, LINKS, counts_of, settings

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import mpi_vendors
import network_hosts
from network_hosts import NetworkHosts

import funccoll as fc
from funccoll import machine_profile
from funccoll.calibration.network_tuning import HostsPlan, combined, measure_hosts
from funccoll.calibration.timed_cases import ON_HOSTS, QUICK_SIZES, SIZES, Case, cases
from funccoll.machine_profile import BITS, MeasuredTimes
from funccoll.schedules import Topology, algorithms, build, select

RESULTS = Path(__file__).parent / "results" / "network_calibration.json"
LAYOUTS = ("2 x 1", "2 x 2")
GOALS = {"median error": 0.25, "within 10 % of the best": 0.9}
NEAR = 1.1
PATIENCE = 3600.0


def held_out(plan: HostsPlan, sizes: tuple[int, ...]) -> list[Case]:
    """Every algorithm on sizes between those of the plan, and those that it lacks on its own sizes."""
    ranks, two_levels = len(plan.hosts), plan.each > 1
    known: dict[str, tuple[str, ...]] = {}
    for kind in ON_HOSTS:
        known[kind] = tuple(name for name in algorithms(kind) if two_levels or name != "hierarchical")
    others = {kind: tuple(n for n in names if n not in ON_HOSTS[kind]) for kind, names in known.items()}
    return cases(ranks, between(sizes), known) + cases(ranks, sizes, others)


def run_rank(path: str, quick: bool) -> None:
    """One rank of the job: time all cases; rank 0 writes (hosts, cases of the fit, times, load)."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[fc.rank() % len(cores)]})  # mpirun would bind the first rank of every host to one core
    sizes = QUICK_SIZES if quick else SIZES[:-1]
    plan = HostsPlan(sizes)
    fitted, plan.across = list(plan.across), [*plan.across, *held_out(plan, sizes)]
    turns, seconds = (3, 0.001) if quick else (5, 0.002)
    times, load = measure_hosts(plan, turns, seconds, lambda: None)
    if fc.rank() == 0:
        with open(path, "wb") as file:
            pickle.dump((plan.hosts, fitted, times, load), file)


def measured(vendor: str, layout: str, link: str, quick: bool) -> Any:
    """What the ranks of a job have measured."""
    with tempfile.TemporaryDirectory() as name, NetworkHosts(len(counts_of(layout))) as hosts:
        if LINKS[link]:
            hosts.rate(LINKS[link], BURST)
        path, counts = str(Path(name, "times")), counts_of(layout)
        command = [sys.executable, __file__, "--rank", path, *(["--quick"] if quick else [])]
        job = hosts.mpirun(vendor, counts, command, settings(counts), stdout=sys.stderr, stderr=None)
        if code := job.wait(PATIENCE):
            raise subprocess.CalledProcessError(code, command)
        return pickle.loads(Path(path).read_bytes())


def part_of(times: MeasuredTimes, chosen: set[Case]) -> MeasuredTimes | None:
    """The times of these cases."""
    kept = [i for i, n in enumerate(times.nbytes) if Case(times.kind, times.algorithm, n) in chosen]
    fields = {name: tuple(getattr(times, name)[i] for i in kept) for name in ("nbytes", "seconds", "low", "high")}
    return MeasuredTimes(**{**asdict(times), **fields}) if kept else None


def judge(hosts: tuple[int, ...], fitted: Sequence[Case], times: list[MeasuredTimes], load: dict[str, float]) -> dict[str, Any]:
    """The errors of predictions, and the choices."""
    own = [part for m in times if (part := part_of(m, set(fitted)) if m.hosts else m)]
    profile = combined(own, hosts, load, None)
    found = {Case(m.kind, m.algorithm, n): s for m in times if m.hosts for n, s in zip(m.nbytes, m.seconds, strict=True)}
    machine_profile.adopt(None)
    presets = Topology.of_hosts(hosts)
    machine_profile.adopt(profile.to_json())
    tuned, rows = Topology.of_hosts(hosts), []
    for case, seconds in found.items():
        schedule = build(case.kind, len(hosts), case.algorithm, hosts=hosts if case.algorithm == "hierarchical" else None)
        predicted = {name: schedule.cost(t, case.nbytes).seconds for name, t in (("tuned", tuned), ("presets", presets))}
        group = "fit" if case in fitted else "sizes" if case.algorithm in ON_HOSTS[case.kind] else "algorithms"
        rows.append({**case._asdict(), "group": group, "measured": seconds, "predicted": predicted})
    groups = {name: [r for r in rows if r["group"] == name] for name in ("fit", "sizes", "algorithms")}
    groups["all held out"] = groups["sizes"] + groups["algorithms"]
    table = {
        model: {name: errors([(r["predicted"][model], r["measured"]) for r in some]) for name, some in groups.items()}
        for model in ("tuned", "presets")
    }
    return {
        "parameters": [asdict(p) for p in (*profile.parameters, *profile.network)], "errors": table,
        "choices": {bits: choices(tuned, found, set(fitted), bits) for bits in ("0", "1")}, "cases": rows,
    }  # fmt: skip


def choices(topology: Topology, found: dict[Case, float], fitted: set[Case], bits: str) -> dict[str, Any]:
    """How often `select` picks an algorithm whose measured time is near the best, on sizes that the fit has not seen."""
    by_size: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for case, seconds in found.items():
        by_size[case.kind, case.nbytes][case.algorithm] = seconds
    seen, rows = {(case.kind, case.nbytes) for case in fitted}, []
    os.environ[BITS] = bits
    for (kind, nbytes), times in by_size.items():
        if (kind, nbytes) in seen:
            continue
        picked, best = select(kind, topology, nbytes).algorithm, min(times, key=times.__getitem__)
        rows.append({"kind": kind, "nbytes": nbytes, "picked": picked, "best": best, "ratio": times[picked] / times[best]})
    del os.environ[BITS]
    near = sum(r["ratio"] <= NEAR for r in rows) / len(rows)
    return {"near": near, "median_ratio": statistics.median(r["ratio"] for r in rows), "single": rows}


def main(words: Sequence[str] | None = None) -> None:
    """Measure, fit, compare, and write the results."""
    parser = argparse.ArgumentParser(description="predictions for several hosts against measured times")
    parser.add_argument("--quick", action="store_true", help="few sizes and turns: to see that it works")
    parser.add_argument("--vendors", nargs="+", default=["openmpi"])
    parser.add_argument("--layouts", nargs="+", default=[name.replace(" ", "") for name in LAYOUTS])
    parser.add_argument("--links", nargs="+", default=list(LINKS))
    parser.add_argument("--out", type=Path, default=None, help=f"the results (default {RESULTS.name})")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.rank:
        return run_rank(options.rank, options.quick)
    if options.quick and options.out is None:
        parser.error("--quick needs --out: the committed results are of full runs")
    for why_not in (network_hosts.why_not(), *map(mpi_vendors.why_not, options.vendors)):
        if why_not:
            sys.exit(f"network_calibration.py: {why_not}")
    about, begin, results = machine(), time.monotonic(), []
    for vendor in options.vendors:
        for layout in (name.replace("x", " x ") for name in options.layouts):
            for link in options.links:
                result = judge(*measured(vendor, layout, link, options.quick))
                error, near = result["errors"]["tuned"]["all held out"], {b: c["near"] for b, c in result["choices"].items()}
                met = {"median error": error["median"] <= GOALS["median error"],
                       "within 10 % of the best": near["1"] >= GOALS["within 10 % of the best"]}  # fmt: skip
                results.append({"vendor": vendor, "layout": layout, "link": link, "met": met, **result})
                print(
                    f"{vendor}, {layout}, {link}: median error {error['median']:.0%} (worst {error['worst']:.0%}), presets' "
                    f"{result['errors']['presets']['all held out']['median']:.0%}; picked within 10 % of the best: "
                    f"{near['0']:.0%}, with other bits {near['1']:.0%}", flush=True,
                )  # fmt: skip
    about["load_after"] = os.getloadavg()
    whole = {"machine": about, "seconds": round(time.monotonic() - begin), "goals": GOALS, "results": results}
    (options.out or RESULTS).write_text(json.dumps(rounded(whole), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
