"""The cost model against measured times: `funccoll tune`'s measurement and fit, judged on cases that the fit has not seen.

In one run every algorithm is timed that `funccoll tune` times, and more: all_reduce on sizes between those of the fit, and by
algorithms that the fit does not contain. The model is fitted to the first, and predicts the others. For comparison the presets
(no calibration), and fits of simpler models.

Writes benchmarks/results/calibration.json: for each number of ranks the parameters, the median and the worst relative error of
each group of held-out cases, and every case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.result_tables import refresh
from funccoll.core.display import seconds_text, size_text, text_table
from funccoll.schedules import Topology, build
from funccoll.tools.calibration.fit_parameters import Sample, fit, of_messages
from funccoll.tools.calibration.timed_cases import ALGORITHMS, QUICK_SIZES, SIZES, Case, cases
from funccoll.tools.calibration.tuning import measure, samples_of

RESULTS = Path(__file__).parents[1] / "results" / "calibration.json"
HELD_OUT = ("bidirectional_ring", "recursive_doubling", "rabenseifner", "circulant", "double_binary_tree")
"""Algorithms of all_reduce that no fit contains."""
TURNS, TURN_SECONDS = 7, 0.001
MODELS: dict[str, dict[str, Any]] = {
    "messages": {"topology": of_messages, "start": False, "levels": 0},
    "messages, start, caches": {"topology": of_messages},
    "memory, no caches": {"levels": 0},
    "memory, one cache": {"levels": 1},
    "memory, two caches": {},
}
"""Models and how they are fitted: the textbooks' messages, and shared memory. The last one is that of `funccoll tune`."""


def between(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes half-way between neighbours, on a logarithmic scale."""
    return tuple(round((a * b) ** 0.5) for a, b in pairwise(sizes))


def plan(ranks: int, sizes: tuple[int, ...]) -> dict[str, list[Case]]:
    """Groups of cases: `fit`, and those that are held out."""
    return {
        "fit": cases(ranks, sizes),
        "sizes": cases(ranks, between(sizes), {"all_reduce": ALGORITHMS["all_reduce"]}),
        "algorithms": cases(ranks, sizes, {"all_reduce": HELD_OUT}),
        "sizes and algorithms": cases(ranks, between(sizes), {"all_reduce": HELD_OUT}),
    }


def errors(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Relative errors of (predicted, measured) times: |predicted / measured - 1|, and the ratios' range."""
    off = [abs(p / m - 1) for p, m in pairs]
    ratios = [p / m for p, m in pairs]
    return {"median": statistics.median(off), "worst": max(off), "least_ratio": min(ratios), "greatest_ratio": max(ratios)}


def judge(
    ranks: int, groups: dict[str, list[Case]], found: list[Sample], spread: dict[Case, tuple[float, float]]
) -> dict[str, Any]:
    """Fit every model to the cases of the fit, and compare its predictions of all cases with their times."""
    measured = {Case(*s[:3]): s.seconds for s in found}
    own = [Sample(*case, measured[case]) for case in groups["fit"]]
    topologies = {"presets": Topology("one_host", 1, ranks, *[Topology.ethernet(1).host] * 2, 1 / 10e9)}
    fits = {name: fit(own, ranks, **how) for name, how in MODELS.items()}
    for name, how in MODELS.items():
        topologies[name] = how.get("topology", Topology.measured_host)(ranks, fits[name].parameters)
    rows = []
    for group, some in groups.items():
        for case in some:
            schedule = build(case.kind, ranks, case.algorithm)
            predicted = {name: schedule.cost(topology, case.nbytes).seconds for name, topology in topologies.items()}
            low, high = spread[case]
            rows.append(
                {"group": group, **case._asdict(), "measured": measured[case], "low": low, "high": high, "predicted": predicted}
            )
    table = {
        name: {g: errors([(r["predicted"][name], r["measured"]) for r in rows if r["group"] == g]) for g in groups}
        | {"all held out": errors([(r["predicted"][name], r["measured"]) for r in rows if r["group"] != "fit"])}
        for name in topologies
    }
    parameters = {name: asdict(f.parameters) for name, f in fits.items()}
    return {"ranks": ranks, "parameters": parameters, "errors": table, "cases": rows}


def rounded(value: Any) -> Any:
    """Round all floats to four digits."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def show(result: dict[str, Any]) -> None:
    """Print the errors of every model, and the held-out cases."""
    head = ("model", *next(iter(result["errors"].values())))
    rows = [
        (name, *(f"{e['median']:.0%} (worst {e['worst']:.0%})" for e in groups.values()))
        for name, groups in result["errors"].items()
    ]
    print(f"\n{result['ranks']} ranks: median and worst relative error\n{text_table(head, rows, head[1:])}\n")
    model = list(MODELS)[-1]
    rows = [
        (
            r["group"],
            r["kind"],
            r["algorithm"],
            size_text(r["nbytes"]),
            seconds_text(r["measured"]),
            seconds_text(r["predicted"][model]),
            f"{r['predicted'][model] / r['measured']:.2f}",
        )
        for r in result["cases"]
    ]
    head = ("group", "collective", "algorithm", "size", "measured", "predicted", "ratio")
    print(text_table(head, rows, head[3:]), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, fit, compare, and write the results."""
    parser = argparse.ArgumentParser(description="the cost model against measured times, after a calibration")
    parser.add_argument("--quick", action="store_true", help="few sizes and turns: to see that it works")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default 2,4)")
    parser.add_argument("--out", type=Path, default=None, help=f"the results (default {RESULTS.name})")
    options = parser.parse_args(words)
    if options.quick and options.out is None:
        parser.error("--quick needs --out: the committed results are of full runs")
    about, begin = machine(), time.monotonic()
    sizes = QUICK_SIZES if options.quick else SIZES
    groups = {ranks: plan(ranks, sizes) for ranks in map(int, options.ranks.split(","))}
    every = {ranks: [case for some in found.values() for case in some] for ranks, found in groups.items()}
    turns, seconds = (3, 0.001) if options.quick else (TURNS, TURN_SECONDS)
    times, load = measure(every, turns, seconds, lambda ranks: None, anyway=True)
    results = []
    for ranks, some in groups.items():
        spread = {
            Case(m.kind, m.algorithm, n): (low, high)
            for m in times
            if m.ranks == ranks
            for n, low, high in zip(m.nbytes, m.low, m.high, strict=True)
        }
        results.append(judge(ranks, some, samples_of(times, ranks), spread))
        show(results[-1])
    about["load_after"] = os.getloadavg()
    whole = {
        "machine": about,
        "load": load,
        "turns": turns,
        "turn_seconds": seconds,
        "seconds": round(time.monotonic() - begin),
        "results": [{k: v for k, v in r.items() if k != "cases"} for r in results],
    }
    text = json.dumps(rounded(whole), indent=1)
    lines = ",\n".join(f"  {json.dumps(rounded({'ranks': r['ranks'], **c}))}" for r in results for c in r["cases"])
    path = options.out or RESULTS
    path.write_text(f'{text[:-2]},\n "cases": [\n{lines}\n ]\n}}\n')
    if path == RESULTS:
        refresh()
    print(f"written: {path}, after {whole['seconds']} s; load {load}")


if __name__ == "__main__":
    sys.exit(main())
