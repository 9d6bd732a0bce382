"""Overhead of profiles: a checkout without them, this one with none, and this one while one is recorded, in turns.

`python profile_overhead.py OLD_PYTHON`: an interpreter whose environment has the older checkout installed. All ways of
`host.py` (jitted calls, and plans repeated natively) execute all_reduces of some sizes on 2 processes. Goal: without a profile
the median ratio of turns beside each other is within the spread of the older checkout against itself. Writes
results/profile_overhead.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, record
from benchmarks.one_host.checkouts import checkout_of
from benchmarks.one_host.host_cases import Case
from benchmarks.one_host.host_jobs import RANK, Job
from benchmarks.rank import rank_words

RESULTS = Path(__file__).parents[1] / "results" / "profile_overhead.json"
SIZES = (4, 4096, 1 << 18)
RANKS, ROUNDS, TURN_SECONDS = 2, 21, 0.02
OLD, AGAIN, OFF, ON = "older checkout", "the same again", "no profile", "recorded"


def start(stack: ExitStack, name: str, python: str, directory: str) -> Job:
    """A contender's job; `directory` is where it is recorded, empty for no profile."""
    os.environ.pop("FUNCCOLL_PROFILE", None)
    if directory:
        os.environ["FUNCCOLL_PROFILE"] = directory
    launcher = [python, "-m", "funccoll", "run", "-n", str(RANKS), "--bind-to", "core", "--"]
    words = rank_words(RANK, checkout_of(python))
    try:
        return stack.enter_context(Job(name, RANKS, launcher, ["ours"], python, words))
    finally:
        os.environ.pop("FUNCCOLL_PROFILE", None)


def row(case: Case, way: str, jobs: dict[str, Job]) -> dict[str, Any]:
    """Medians of a way to execute a case, and ratios to the older checkout's turns beside them."""
    took = min(max(sum(job.measure(way, 3)), 1e-8) for job in jobs.values() for _ in range(3))
    count = max(1, int(TURN_SECONDS / took))
    turns: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(ROUNDS):
        names = list(jobs)
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            turns[name].append(jobs[name].measure(way, count)[0])
    found: dict[str, Any] = {"way": way, "nbytes": case.nbytes, "calls_per_turn": count}
    for name, values in turns.items():
        low, ratio, high = statistics.quantiles([v / o for v, o in zip(values, turns[OLD], strict=True)], n=4)
        found[name] = {"us": statistics.median(values) * 1e6, "ratio": ratio, "q1": low, "q3": high}
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", help="the interpreter of the older checkout")
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    about = machine()
    os.chdir("/")  # `python -m` and `-c` import from the current directory first
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        pythons = {OLD: options.old, AGAIN: options.old, OFF: sys.executable, ON: sys.executable}
        jobs = {name: start(stack, name, python, directory if name == ON else "") for name, python in pythons.items()}
        rows = []
        for nbytes in SIZES:
            case = Case("all_reduce", nbytes)
            prepared = [job.prepare(case) for job in jobs.values()]
            rows += [row(case, way, jobs) for way in prepared[0]]
        written = sum(path.stat().st_size for path in Path(directory).rglob("*.rows"))
    for r in rows:
        parts = [f"{name} {r[name]['ratio']:.3f} ({r[name]['q1']:.3f} to {r[name]['q3']:.3f})" for name in (AGAIN, OFF, ON)]
        extra = r[ON]["us"] - r[OFF]["us"]
        print(f"{r['way']:7} {r['nbytes']:8} B {r[OLD]['us']:9.2f} µs; {'; '.join(parts)}; recording adds {extra:.2f} µs")
    means = {name: statistics.geometric_mean(r[name]["ratio"] for r in rows) for name in (AGAIN, OFF, ON)}
    inside = [r[OFF]["q1"] <= 1 <= r[OFF]["q3"] or r[AGAIN]["q1"] <= r[OFF]["ratio"] <= r[AGAIN]["q3"] for r in rows]
    print(f"geometric means: {means}; within the spread without a profile: {sum(inside)} of {len(rows)}")
    if not options.dry:
        record(
            RESULTS,
            about,
            ranks=RANKS,
            rounds=ROUNDS,
            old=str(checkout_of(options.old).name),
            geometric_means=means,
            within_spread=sum(inside),
            of=len(rows),
            bytes_written=written,
            cases=rows,
        )


if __name__ == "__main__":
    main()
