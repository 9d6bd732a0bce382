"""The README's speed table, made from benchmarks/results/core.json (a test checks that it is that)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"


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


def table() -> str:
    """The table and the sentence that says what it was measured on."""
    data = json.loads((ROOT / "benchmarks" / "results" / "core.json").read_text())
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


def refresh() -> None:
    """Put the table between the README's markers."""
    path = ROOT / "README.md"
    text = path.read_text()
    if BEGIN in text:
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        path.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}")


if __name__ == "__main__":
    refresh()
