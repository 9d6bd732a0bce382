"""Time between two compute parts of a training step: `python -m benchmarks.calls.step_overhead --before CHECKOUT`.

Two training steps, the demo's and a data-parallel perceptron's with 20 arrays of parameters, on 2 processes with a core each. A
step's compute is the same step on one device, by two processes at once that do not communicate, less its call: a call with the
same arguments and as many results that computes nothing. What the step takes beyond its compute is what stands between two
compute parts: the call of the step, and its collectives with the waiting in them.

Contenders are this checkout, with and without the C extension of the call, and, with `--before`, another checkout, for example
`git worktree add ../before 9348df0`. They are jobs that take turns in every round, in changing order; a turn counts as the
median of its steps on the slower rank. All of them must have the same losses. Writes benchmarks/results/step_overhead.json.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, record, spread
from benchmarks.one_host.host_contender import Turn
from benchmarks.one_host.host_jobs import Job, funccoll_run
from benchmarks.rank import rank_words

RESULTS = Path(__file__).parents[1] / "results" / "step_overhead.json"
RANK = rank_words("benchmarks.calls.step_overhead_rank")
TASKS = ("demo", "MLP of 20 arrays")
RANKS = 2
ROUNDS, TURN_SECONDS = 60, 0.01
"""Many short turns: a part is the difference of two, between which the speed of the cores should not have changed."""
PARTS = (("together", "step"), ("alone", "step"), ("alone", "empty"))
"""What is measured of each contender: in which of its two jobs, and which call."""


class Bench:
    """All contenders, each with two jobs: processes that communicate, and processes that are alone."""

    def __init__(self, stack: ExitStack, before: str, rounds: int, turn: float):
        self.rounds, self.turn = rounds, turn
        launchers = {"now": funccoll_run(RANKS), "now, no extension": funccoll_run(RANKS, extension=False)}
        if before:
            launchers["before"] = funccoll_run(RANKS, checkout=before)
        self.contenders = list(launchers)
        self.jobs = {
            (name, how): stack.enter_context(Job(f"{name}, {how}", RANKS, launcher, [how], rank=RANK))
            for name, launcher in launchers.items()
            for how in ("together", "alone")
        }

    def row(self, task: str) -> dict[str, Any]:
        """The figures of a task."""
        found = {key: job.all("prepare", task) for key, job in self.jobs.items()}
        for how in ("together", "alone"):
            losses = [losses for name in self.contenders for losses, _ in found[name, how]]
            if how == "together" and any(other != losses[0] for other in losses):
                raise AssertionError(f"{task}: the contenders' losses differ: {losses}")
            if not all(other[-1] < other[0] for other in losses):
                raise AssertionError(f"{task}, {how}: the loss does not fall: {losses}")
        keys = [(name, how, way) for name in self.contenders for how, way in PARTS]
        times = {key: max(5, int(self.turn / self.measure(key, task, 20).seconds)) for key in keys}
        turns: dict[tuple[str, str, str], list[Turn]] = {key: [] for key in keys}
        for number in range(self.rounds):
            for key in keys if number % 2 else reversed(keys):
                turns[key].append(self.measure(key, task, times[key]))
        groups = found["now", "together"][0][1]
        figures = {name: figures_of(*(turns[name, how, way] for how, way in PARTS)) for name in self.contenders}
        row: dict[str, Any] = {"task": task, "groups": groups, **{name: f[0] for name, f in figures.items()}}
        if "before" in figures:
            row["before / now"] = compared(figures["before"], figures["now"])
        return row

    def measure(self, key: tuple[str, str, str], task: str, times: int) -> Turn:
        """A turn of one contender."""
        name, how, way = key
        ranks = self.jobs[name, how].all("measure", task, way, times)
        return max(ranks, key=lambda turn: turn.median)


def figures_of(step: list[Turn], alone: list[Turn], empty: list[Turn]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Medians and quartiles of a contender's parts in microseconds, and their values round by round."""
    parts: dict[str, list[float]] = {"step": [turn.median * 1e6 for turn in step]}
    parts["compute"] = [(one.median - call.median) * 1e6 for one, call in zip(alone, empty, strict=True)]
    parts["call"] = [turn.median * 1e6 for turn in empty]
    parts["between"] = [whole - compute for whole, compute in zip(parts["step"], parts["compute"], strict=True)]
    figures: dict[str, Any] = {part: spread(values) for part, values in parts.items()}
    return {**figures, "step_p99": statistics.median(turn.p99 for turn in step) * 1e6}, parts


def compared(old: tuple[dict, dict], new: tuple[dict, dict]) -> dict[str, Any]:
    """How many times as long the old contender takes, of which `figures_of` gave both."""
    return {
        "step": spread([a / b for a, b in zip(old[1]["step"], new[1]["step"], strict=True)]),
        "between, of the medians": old[0]["between"]["median"] / new[0]["between"]["median"],
    }


def show(row: dict[str, Any]) -> None:
    """Print a task's figures."""
    for name in (name for name in ("before", "now", "now, no extension") if name in row):
        words = [f"{part} {row[name][part]['median']:7.1f}" for part in ("step", "compute", "between", "call")]
        print(f"{row['task']:<17} {name:<18} {'  '.join(words)} µs  (99th percentile of steps {row[name]['step_p99']:.1f})")
    if "before / now" in row:
        step, between = row["before / now"].values()
        ratio = f"step {step['median']:.2f}× ({step['q1']:.2f} to {step['q3']:.2f}), between {between:.2f}×"
        print(f"{row['task']:<17} before / now: {ratio}")


def main(words: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="what stands between the compute parts of training steps")
    parser.add_argument("--before", default="", help="the folder of another checkout of funccoll, to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--turn", type=float, default=TURN_SECONDS, help="seconds of a turn")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    about, begin = machine(), time.monotonic()
    if options.before:
        head = ["git", "-C", options.before, "rev-parse", "--short", "HEAD"]
        about["before"] = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    rows = []
    with ExitStack() as stack:
        bench = Bench(stack, options.before, options.rounds, options.turn)
        for task in TASKS:
            rows.append(bench.row(task))
            show(rows[-1])
    settings = {"ranks": RANKS, "rounds": options.rounds, "turn_seconds": options.turn, "unit": "µs"}
    record(options.out, about, **settings, seconds=round(time.monotonic() - begin), tasks=rows)
    print(f"written: {options.out}, after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
