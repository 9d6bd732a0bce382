"""The README's tables of times, made from benchmarks/results/*.json (a test checks that they are that)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STAGES = ("build", "prove", "lower", "verify", "simulate")


def _time(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.1f} ms" if us >= 1e3 else f"{us:.1f} µs"


def _row(case: dict[str, Any]) -> str:
    verdict = {None: "", True: "met", False: "**missed**"}[case["met"]]
    goal = f"{case['goal']}: {verdict}" if case["goal"] else ""
    if "extra_seconds" in case:
        return f"| {case['name']} | {case['extra_seconds']:.2f} s | | | {goal} |"
    ratio = case["ratio"]
    spread = f"{ratio['median']:.2g}× ({ratio['min']:.2g} to {ratio['max']:.2g})"
    ours, peer = _time(case["ours"]["median_us"]), f"{case['against']} {_time(case['peer']['median_us'])}"
    return f"| {case['name']} | {ours} | {peer} | {spread} | {goal} |"


def _load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def speed() -> str:
    """The core against its peers, and the sentence that says what it was measured on."""
    data = _load("core")
    about = data["machine"]
    rows = [_row(case) for case in data["cases"]]
    load = f"{about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after"
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if k in ("numpy", "jax"))
    return "\n".join(
        [
            "| what | funccoll | peer | peer's time / ours: median (lowest to highest) | goal |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Medians of 11 alternating rounds in one run on {about['cpu']}, {about['cores']} cores (load {load}), "
            f"Python {about['python']}, {versions}; JAX with 8 virtual CPU devices. A ratio above 1 means that funccoll is "
            "faster, below 1 that it is slower. `make bench` makes it anew.",
        ]
    )


def schedules() -> str:
    """What schedules cost to make."""
    data = _load("schedules")
    about, first = data["machine"], data["first_simulation"]
    rows = []
    for case in data["cases"]:
        times = [_time(case["seconds"][s]["median"] * 1e6) if s in case["seconds"] else "" for s in STAGES]
        verdict = {None: "", True: f"{case['goal']}: met", False: f"{case['goal']}: **missed**"}[case["met"]]
        name = f"{case['kind']} {case['algorithm']}, p = {case['nranks']:,}"
        rows.append(f"| {name} | {case['instructions']:,} | {' | '.join(times)} | {case['peak_gib']:.2f} GiB | {verdict} |")
    load = f"{about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after"
    return "\n".join(
        [
            "| schedule | instructions | build | prove | lower | verify | simulate | peak memory | goal |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Medians, each case in a process of its own, on {about['cpu']}, {about['cores']} cores (load {load}). The "
            f"simulator is compiled once per machine, which takes {first['cold']:.1f} s; later its first use in a process "
            f"takes {first['warm']:.2f} s to load.",
        ]
    )


TABLES = {"speed": speed, "schedules": schedules}


def marks(name: str) -> tuple[str, str]:
    """What stands before and after a table in the README."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def refresh() -> None:
    """Put the tables between the README's markers."""
    path = ROOT / "README.md"
    for name, table in TABLES.items():
        begin, end = marks(name)
        head, _, rest = path.read_text().partition(begin)
        _, _, tail = rest.partition(end)
        path.write_text(f"{head}{begin}\n{table()}\n{end}{tail}")


if __name__ == "__main__":
    refresh()
