"""Predictions for several hosts against measured times: `funccoll tune` in a job, judged on cases that its fit has not seen.

Hosts are network namespaces (network_hosts.py) with links that are unlimited, or of 1 Gbit/s. In one job every algorithm
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

import funccoll as fc
from benchmarks.cost_model.calibration import between, errors, rounded
from benchmarks.measure import machine
from benchmarks.rank import rank_words
from benchmarks.result_tables import refresh
from benchmarks.several_hosts.mpi import BURST, LINKS, counts_of, settings
from funccoll.config import TUNED_BITS
from funccoll.core import machine_profile
from funccoll.core.machine_profile import MeasuredTimes
from funccoll.schedules import Schedule, Topology, algorithms, build, select
from funccoll.schedules.split_hosts import split_hosts
from funccoll.tools.calibration.network_tuning import HostsPlan, combined, measure_hosts
from funccoll.tools.calibration.timed_cases import ON_HOSTS, QUICK_SIZES, SIZES, Case, cases
from tests.support.ranks import mpi_vendors, network_hosts
from tests.support.ranks.network_hosts import NetworkHosts

RESULTS = Path(__file__).parents[1] / "results" / "network_calibration.json"
LAYOUTS = ("2 x 1", "2 x 2")
GOALS = {"median error": 0.25, "within 10 % of the best": 0.9}
NEAR = 1.1
PATIENCE = 3600.0


def schedule_of(kind: str, name: str, hosts: tuple[int, ...]) -> Schedule:
    """The schedule of an algorithm on these hosts."""
    return build(kind, len(hosts), name, hosts=hosts if name == "hierarchical" else None)


def different(kind: str, hosts: tuple[int, ...]) -> dict[str, str]:
    """Algorithms, and of each the first one that makes the same moves: on few ranks many are one schedule."""
    first: dict[Any, str] = {}
    found = {}
    for name in (*ON_HOSTS[kind], *algorithms(kind)):
        if name != "hierarchical" or len(set(hosts)) < len(hosts):
            batches = split_hosts(schedule_of(kind, name, hosts), hosts).batches
            moves = tuple((b.dst.tobytes(), b.src.tobytes(), b.count.tobytes()) for b in batches)
            found[name] = first.setdefault(moves, name)
    return found


def held_out(plan: HostsPlan, sizes: tuple[int, ...]) -> list[Case]:
    """Every algorithm on sizes between those of the plan, and those that it lacks on its own sizes."""
    ranks, known = len(plan.hosts), {kind: tuple(dict.fromkeys(different(kind, plan.hosts).values())) for kind in ON_HOSTS}
    others = {kind: tuple(n for n in names if n not in ON_HOSTS[kind]) for kind, names in known.items()}
    return cases(ranks, between(sizes), known) + cases(ranks, sizes, others)


def run_rank(path: str, quick: bool) -> None:
    """One rank of the job: time all cases; rank 0 writes (hosts, cases of the fit, times, load)."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[fc.rank() % len(cores)]})  # mpirun would bind the first rank of every host to one core
    sizes = QUICK_SIZES if quick else SIZES[:-1]
    plan = HostsPlan(sizes)
    fitted, plan.across = list(plan.across), [*plan.across, *held_out(plan, sizes)]
    turns, seconds = (3, 0.001) if quick else (9, 0.004)
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
        words = rank_words("benchmarks.cost_model.network_calibration")
        command = [sys.executable, *words, "--rank", path, *(["--quick"] if quick else [])]
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
        schedule = schedule_of(case.kind, case.algorithm, hosts)
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
        "parameters": [asdict(p) for p in (*profile.parameters, *profile.network)],
        "errors": table,
        "choices": {bits: choices(tuned, found, set(fitted), bits) for bits in ("0", "1")},
        "cases": rows,
    }


def choices(topology: Topology, found: dict[Case, float], fitted: set[Case], bits: str) -> dict[str, Any]:
    """How often `select` picks an algorithm whose measured time is near the best, on sizes that the fit has not seen."""
    by_size: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for case, seconds in found.items():
        by_size[case.kind, case.nbytes][case.algorithm] = seconds
    seen, rows = {(case.kind, case.nbytes) for case in fitted}, []
    same = {kind: different(kind, tuple(topology.host_of.tolist())) for kind in ON_HOSTS}
    os.environ[TUNED_BITS] = bits
    for (kind, nbytes), times in by_size.items():
        if (kind, nbytes) in seen:
            continue
        picked, best = same[kind][select(kind, topology, nbytes).algorithm], min(times, key=times.__getitem__)
        rows.append({"kind": kind, "nbytes": nbytes, "picked": picked, "best": best, "ratio": times[picked] / times[best]})
    del os.environ[TUNED_BITS]
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
                met = {
                    "median error": error["median"] <= GOALS["median error"],
                    "within 10 % of the best": near["1"] >= GOALS["within 10 % of the best"],
                }
                results.append({"vendor": vendor, "layout": layout, "link": link, "met": met, **result})
                print(
                    f"{vendor}, {layout}, {link}: median error {error['median']:.0%} (worst {error['worst']:.0%}), presets' "
                    f"{result['errors']['presets']['all held out']['median']:.0%}; picked within 10 % of the best: "
                    f"{near['0']:.0%}, with other bits {near['1']:.0%}",
                    flush=True,
                )
    about["load_after"] = os.getloadavg()
    whole = {"machine": about, "seconds": round(time.monotonic() - begin), "goals": GOALS, "results": results}
    path = options.out or RESULTS
    text = json.dumps(rounded(whole | {"results": [{k: v for k, v in r.items() if k != "cases"} for r in results]}), indent=1)
    lines = ",\n".join(
        f"  {json.dumps(rounded({'layout': r['layout'], 'link': r['link'], **c}))}" for r in results for c in r["cases"]
    )
    path.write_text(f'{text[:-2]},\n "cases": [\n{lines}\n ]\n}}\n')
    if path == RESULTS:
        refresh()
    print(f"written: {path}, after {whole['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
