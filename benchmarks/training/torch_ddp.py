"""funccoll.torch.DistributedDataParallel against torch's own over Gloo: `python -m benchmarks.training.torch_ddp`.

Two processes with one thread each hold the same module under every wrapper, and train it with torch's SGD from the same
parameters, on the same data. Wrappers take turns in rounds, in changing order; a turn counts as the median of its steps on the
slower rank. A turn during which other processes computed is repeated, until `--patience` seconds are spent. Each wrapper's
communication is its step less its step within no_sync(), in the same round. That all wrappers get the same losses, and the
same parameters, is checked first.

`--before FOLDER` compares our wrapper with that of another checkout instead, in turns as well: a step may take CASE times as
long at most. That goes to results/torch_ddp_before.json.

Goals are judged against the better of torch's two ways: the faster step, and the shorter communication. Writes
benchmarks/results/torch_ddp.json and its table in docs/benchmarks.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import ROUNDS, OtherProcesses, QuietTurns, extremes, machine
from benchmarks.one_host.host import write
from benchmarks.one_host.host_jobs import Job, cores, funccoll_run
from benchmarks.one_host.host_ratios import rounded
from benchmarks.rank import rank_words
from benchmarks.result_tables import refresh

RESULTS = Path(__file__).parents[1] / "results" / "torch_ddp.json"
BEFORE = RESULTS.with_name("torch_ddp_before.json")
RANK = rank_words("benchmarks.training.torch_ddp_rank")
RANKS = 2
TURN_SECONDS = 0.2
CHECKED_STEPS = 10
TOLERANCE = 1e-4
"""Relative differences of losses and of parameters between wrappers, after 10 steps in float32."""
OURS, OURS_TOO, THEIRS = "funccoll", "funccoll, views", ("torch", "torch, views")
CASE = 1.03
"""The upper bound of a step's time over that of the checkout before."""
GOALS: dict[str, dict[str, float]] = {
    "MLP 4 x 1024": {"step": 1.7, "communication": 1 / 4},
    "MLP 8 x 64": {"step": 2.4},
    "transformer 4 x 256": {"step": 1.2, "communication": 1 / 3},
}
"""Of each task what the issue asks for: torch's time of a step over ours, and our communication over torch's."""

Turns = dict[str, dict[str, list[float]]]
"""Wrapper -> "step", "no_sync" and "communication" -> seconds, by round."""


class Bench:
    """The ranks, which hold a task under all wrappers."""

    def __init__(self, stack: ExitStack, rounds: int, patience: float, checkout: str = ""):
        self.rounds, self.quiet = rounds, QuietTurns(patience)
        meeting = f"{stack.enter_context(tempfile.TemporaryDirectory())}/meeting"
        # Not bound to cores: Gloo's threads want other ones, and torchrun binds none.
        launcher = funccoll_run(RANKS, bound=False, checkout=checkout)
        self.job = stack.enter_context(Job(checkout or "both", RANKS, launcher, [meeting], rank=RANK))

    def row(self, task: str) -> dict[str, Any]:
        """A task under all wrappers."""
        nbytes = self.job.all("prepare", task)[0]
        losses = self.check()
        row = {"task": task, "parameter_bytes": nbytes, "losses": losses, **compared(self.turns())}
        return {**row, "load": os.getloadavg()}

    def check(self) -> dict[str, Any]:
        """Train a few steps under each wrapper; raises AssertionError where results differ by more than rounding."""
        found = {}
        for way in (OURS, OURS_TOO, *THEIRS):
            ranks = self.job.all("check", way, CHECKED_STEPS)
            assert all(squares == ranks[0][1] for _, squares in ranks), f"{way}: the ranks' parameters differ"
            found[way] = [[statistics.mean(column) for column in zip(*(losses for losses, _ in ranks))], ranks[0][1]]
        theirs = found[THEIRS[0]]
        apart = {way: [_apart(a, b) for a, b in zip(both, theirs, strict=True)] for way, both in found.items()}
        assert all(max(pair) < TOLERANCE for pair in apart.values()), f"losses or parameters differ: {apart}"
        losses = theirs[0]
        assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
        return {"steps": CHECKED_STEPS, "first": losses[0], "last": losses[-1], "differences": apart}

    def turns(self) -> Turns:
        """Seconds of a step of every wrapper, in rounds in which all take their turn."""
        ways = [OURS, OURS_TOO, *THEIRS]
        times = {way: max(5, math.ceil(TURN_SECONDS / min(self.measure(way, False, 2)[0] for _ in range(2)))) for way in ways}
        found: Turns = {way: {"step": [], "no_sync": [], "communication": []} for way in ways}
        for number in range(self.rounds):
            for way in ways if number % 2 else reversed(ways):
                step, alone = (self.quiet.take(lambda: self.measure(way, alone, times[way])) for alone in (False, True))
                for name, seconds in (("step", step), ("no_sync", alone), ("communication", step - alone)):
                    found[way][name].append(seconds)
        return found

    def measure(self, way: str, alone: bool, times: int) -> tuple[float, float]:
        """(seconds of a step on the slower rank, processor seconds of other processes in a second)."""
        with OtherProcesses() as others:
            ranks = self.job.all("measure", way, alone, times)
        return max(median for median, _ in ranks), others.rate(sum(spent for _, spent in ranks))


def against_before(now: Bench, before: Bench, task: str) -> dict[str, Any]:
    """Our wrapper's steps in two checkouts, in turns: microseconds, and the ratio round by round."""
    for bench in (now, before):
        bench.job.all("prepare", task)
    found: dict[str, dict[str, list[float]]] = {what: {"now": [], "before": []} for what in ("step", "no_sync")}
    times = max(5, math.ceil(TURN_SECONDS / min(now.measure(OURS, False, 2)[0] for _ in range(2))))
    for number in range(now.rounds):
        pair = [("now", now), ("before", before)]
        for name, bench in pair if number % 2 else reversed(pair):
            for what, alone in (("step", False), ("no_sync", True)):
                seconds = now.quiet.take(lambda bench=bench, alone=alone: bench.measure(OURS, alone, times))
                found[what][name].append(seconds)
    row: dict[str, Any] = {"task": task, "load": os.getloadavg()}
    for what, both in found.items():
        ratios = [a / b for a, b in zip(both["now"], both["before"], strict=True)]
        us = {name: extremes([s * 1e6 for s in seconds]) for name, seconds in both.items()}
        row[what] = {"us": us, "now / before": extremes(ratios)}
    row["met"] = row["step"]["now / before"]["median"] <= CASE
    return row


def _apart(a: list[float], b: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(x - y) / max(abs(x), abs(y), 1e-12) for x, y in zip(a, b, strict=True))


def compared(turns: Turns) -> dict[str, Any]:
    """Times in microseconds, and the ratios, round by round, to the better of torch's ways."""

    def better(what: str) -> str:
        return min(THEIRS, key=lambda way: statistics.median(turns[way][what]))

    def ratio(what: str, upside_down: bool) -> dict[str, Any]:
        peer = better(what)
        pairs = zip(turns[peer][what], turns[OURS][what], strict=True)
        return {"against": peer, **extremes([o / t if upside_down else t / o for t, o in pairs])}

    us = {way: {what: extremes([s * 1e6 for s in seconds]) for what, seconds in mine.items()} for way, mine in turns.items()}
    return {"us": us, "step": ratio("step", False), "communication": ratio("communication", True)}


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals, and what was reached."""
    found = []
    for row in rows:
        for what, wanted in GOALS[row["task"]].items():
            reached = row[what]["median"]
            at_least = what == "step"
            found.append(
                {
                    "task": row["task"],
                    "what": what,
                    "goal": "torch's step / ours" if at_least else "our communication / torch's",
                    "wanted": f"≥ {wanted:.2g}" if at_least else f"≤ 1/{1 / wanted:.0f}",
                    "reached": reached,
                    "met": reached >= wanted if at_least else reached <= wanted,
                }
            )
    return found


def show(row: dict[str, Any]) -> None:
    """Print a task's row."""
    print(f"{row['task']}, {row['parameter_bytes']:,} bytes")
    for way, found in row["us"].items():
        print(f"    {way:<16}", "  ".join(f"{what} {us['median']:>9.1f} µs" for what, us in found.items()), flush=True)


def parse(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="funccoll's wrapper of torch modules against torch's own, over Gloo")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--patience", type=float, default=300, help="seconds for turns that others disturbed (default 300)")
    parser.add_argument("--tasks", default="", help="numbers of the tasks (default: all)")
    parser.add_argument("--before", default="", help="the folder of another checkout, to compare our wrapper's steps with")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    options.out = options.out or (BEFORE if options.before else RESULTS)
    tasks = list(GOALS)
    options.tasks = [tasks[int(n)] for n in options.tasks.split(",") if n] or tasks
    return options


def main(words: list[str] | None = None) -> None:
    """Measure everything and write the results."""
    options, about, begin, rows = parse(words), machine(), time.monotonic(), []
    with ExitStack() as stack:
        bench = Bench(stack, options.rounds, options.patience)
        about["versions"].update(bench.job.versions)
        if options.before:
            before = Bench(stack, options.rounds, options.patience, options.before)
            rows = [against_before(bench, before, task) for task in options.tasks]
        for task in () if options.before else options.tasks:
            rows.append(bench.row(task))
            show(rows[-1])
    about["load_after"] = os.getloadavg()
    if options.before:
        write(options.out, rounded({"machine": about, "rounds": options.rounds, "turns": bench.quiet.counts, "cases": rows}))
        for row in rows:
            ratio = row["step"]["now / before"]
            print(f"{'met' if row['met'] else 'MISSED':<8} {row['task']}: a step takes {ratio} of the time before, ≤ {CASE}")
        return
    results = {
        "machine": about,
        "ranks": RANKS,
        "cores": cores(),
        "threads": 1,
        "rounds": options.rounds,
        "turns": bench.quiet.counts,
        "seconds": round(time.monotonic() - begin),
        "goals": rounded(goals(rows)),
        "cases": rows,
    }
    write(options.out, results)
    if options.out == RESULTS:
        refresh()
    for g in results["goals"]:
        verdict = "met" if g["met"] else "MISSED"
        print(f"{verdict:<8} {g['task']}: {g['goal']} {g['wanted']}, reached {g['reached']}")
    print(f"turns: {bench.quiet.counts}\nwritten: {options.out}, after {results['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
