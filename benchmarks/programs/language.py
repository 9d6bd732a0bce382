"""Loops, convolutions and batched gradients against JAX, in one run.

`python -m benchmarks.programs.language [--lines rnn,lenet]`.

Each side is a process of its own with one thread, on the same core; the rounds alternate between the two. In each round a new
function is traced and compiled, and called. Memory is the peak above that after the imports, of the arguments, one compilation
and three calls. Writes benchmarks/results/language.json (lines that are not measured stay) and its table in docs/benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import OtherProcesses, machine, record
from benchmarks.rank import rank_words

RESULTS = Path(__file__).parents[1] / "results" / "language.json"
SIDE = rank_words("benchmarks.programs.language_side")
CALL_SECONDS = 0.1
"""The calls of a round, in seconds."""


class Case(NamedTuple):
    """A program of some sizes, and by measure ("compile", "run", "peak") how many times JAX's it may take (None: no goal)."""

    name: str
    program: str
    sizes: tuple[int, ...]
    goals: Mapping[str, float | None]
    pairs: int = 1
    """Pairs of processes, one after the other."""
    rounds: int = 11
    """Of each pair."""
    jax: bool = True
    compiles: int | None = None
    """Rounds that compile anew; None for all."""


_SCAN = {"compile": 1.0, "run": 1.2, "peak": 1.2}
_UNROLLED = {"compile": None, "run": None}

LINES: dict[str, list[Case]] = {
    "rnn": [
        Case(
            f"RNN of 64 units by scan, {steps:,} steps, batch {batch}",
            "rnn",
            (steps, batch),
            _SCAN if batch > 1 else dict.fromkeys(_SCAN),
            pairs=3,
            rounds=4,
        )
        for batch in (32, 1)
        for steps in (1000, 5000)
    ],
    "lenet": [
        Case(f"a training step of LeNet {widths}, batch 64", "lenet", widths, {"compile": None, "run": 1.3}, compiles=1)
        for widths in ((6, 16, 120), (20, 50, 500), (32, 64, 128))
    ],
    "vmap": [
        Case(
            "gradients of each of 64 examples, MLP 784-512-10, by vmap",
            "vmap",
            (64,),
            {"compile": None, "run": 1.2},
            compiles=1,
        )
    ],
    "rows": [
        Case(
            f"gradient of {steps:,} unrolled steps over `xs[t]`",
            "rows",
            (steps,),
            _UNROLLED,
            rounds=3,
            jax=steps <= 300,
            compiles=2,
        )  # XLA takes half a minute to compile the smallest
        for steps in (300, 1000, 3000)
    ],
    "collectives": [
        Case(f"{count:,} collectives, 8 devices", "collectives", (count,), {"compile": None}, rounds=3, jax=False)
        for count in (1000, 2000, 4000)
    ],
    "unrolled": [
        Case(
            "5,000 unrolled steps of the RNN, batch 32",
            "unrolled",
            (5000,),
            {"compile": None, "peak": None},
            rounds=3,
            jax=False,
        )
    ],
}
LINEAR = {"rows": (("compile", "run"), 1000, 3000, 3.3), "collectives": (("compile",), 1000, 4000, None)}
"""For each line that grows: its measures, a smaller and a larger size, and the goal for the ratio of their times (or None)."""


class Process:
    """One side of one case: these words after the interpreter."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str] | None = None):
        command = [sys.executable, *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
        )
        assert self.process.stdin
        assert self.process.stdout
        self.input, self.output = self.process.stdin, self.process.stdout

    def ask(self, *command: Any) -> Any:
        """The answer to a command."""
        print(*command, file=self.input, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """The next line of the process."""
        answer = self.output.readline()
        if not answer:
            raise RuntimeError(f"{self.process.args} has ended with {self.process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self.input.close()
        self.output.close()
        self.process.wait()


def _process(side: str, case: Case) -> Process:
    return Process([*SIDE, side, case.program, *map(str, case.sizes)])


def _measure(case: Case, pairs: int, rounds: int) -> tuple[dict[str, dict[str, list[float]]], float]:
    """By side and measure the figures of all rounds, and how many cores other processes kept busy."""
    sides = ("ours", "jax") if case.jax else ("ours",)
    found: dict[str, dict[str, list[float]]] = {side: {"compile": [], "run": [], "peak": []} for side in sides}
    before = children_seconds()
    with OtherProcesses() as others:
        for _ in range(pairs):
            processes = {side: _process(side, case) for side in sides}
            times = {}
            for side, process in processes.items():
                found[side]["compile"].append(process.ask("compile"))
                once = process.ask("run", 3)
                found[side]["peak"].append(process.ask("peak"))
                times[side] = max(1, round(CALL_SECONDS / once))
            if case.jax:
                checks = [process.ask("check") for process in processes.values()]
                np.testing.assert_allclose(*checks, rtol=1e-3)
            compiles = rounds if case.compiles is None else case.compiles
            for number in range(rounds):
                order = list(processes.items())
                for side, process in order if number % 2 else reversed(order):
                    if number < compiles - 1:
                        found[side]["compile"].append(process.ask("compile"))
                    found[side]["run"].append(process.ask("run", times[side]))
            for process in processes.values():
                process.close()
    return found, others.rate(children_seconds() - before)


def children_seconds() -> float:
    """Processor seconds of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, which lie among the values."""
    low, median, high = statistics.quantiles(values if len(values) > 1 else [*values] * 2, n=4, method="inclusive")
    return {"median": median, "q1": low, "q3": high}


def _rows(case: Case, found: dict[str, dict[str, list[float]]], others: float) -> list[dict[str, Any]]:
    """A row for each measure of a case."""
    rows = []
    for measure, goal in case.goals.items():
        ours, jax = found["ours"][measure], found.get("jax", {}).get(measure)
        row: dict[str, Any] = {
            "name": case.name,
            "measure": measure,
            "unit": "MiB" if measure == "peak" else "s",
            "ours": figures(ours),
            "others": others,
            "rounds": len(ours),
        }
        if jax is not None:
            row |= {"jax": figures(jax), "times_jax": figures([a / b for a, b in zip(ours, jax, strict=True)])}
            row |= {"goal": goal, "met": None if goal is None else row["times_jax"]["median"] <= goal}
        rows.append(row)
        said = "" if jax is None else f"   JAX {row['jax']['median']:9.4f}   {row['times_jax']['median']:5.2f} × JAX's"
        verdict = {None: "", True: "met", False: "MISSED"}[row.get("met")]
        print(f"{case.name:<58} {measure:<8} {row['ours']['median']:9.4f} {row['unit']}{said}  {verdict}", flush=True)
    return rows


def _growth(line: str, pairs: int = 4, rounds: int = 3) -> list[dict[str, Any]]:
    """The rows that say how the time grows with the size: the first time in a process, and again, in alternating rounds."""
    measures, small, large, _ = LINEAR[line]
    cases = [next(case for case in LINES[line] if case.sizes[0] == size) for size in (small, large)]
    ratios: dict[str, list[float]] = {"the first time": [], "again": []}
    for _ in range(pairs):
        processes = [_process("ours", case) for case in cases]
        for number in range(rounds + 1):
            took = [sum(process.ask(m, *([1] if m == "run" else [])) for m in measures) for process in processes]
            ratios["again" if number else "the first time"].append(took[1] / took[0])
        for process in processes:
            process.close()
    return [growth_row(line, when, found) for when, found in ratios.items()]


def growth_row(line: str, when: str, ratios: Sequence[float]) -> dict[str, Any]:
    """The row of these ratios, one for each round."""
    (_, small, large, goal), ratio = LINEAR[line], figures(ratios)
    met = None if goal is None else ratio["median"] <= goal
    name = {"rows": "steps over `xs[t]`, compiled and run", "collectives": "collectives, compiled"}[line]
    print(f"{line}: {large:,} take {ratio['median']:.2f} times as long as {small:,}, {when}: {met}", flush=True)
    return {
        "name": f"{large:,} / {small:,} {name} {when}",
        "measure": "growth",
        "unit": "times",
        "ours": ratio,
        "goal": goal,
        "met": met,
        "rounds": len(ratios),
    }


def measure_line(line: str, quick: bool = False) -> dict[str, Any]:
    """Measure all cases of a line; `quick` takes the smallest alone, in two rounds."""
    about, rows = machine(), []
    for case in LINES[line][:1] if quick else LINES[line]:
        start = time.perf_counter()
        found, others = _measure(case, 1 if quick else case.pairs, 2 if quick else case.rounds)
        rows += _rows(case, found, others)
        print(f"  {time.perf_counter() - start:.0f} s, other processes {others:.2f} cores", flush=True)
    if line in LINEAR and not quick:
        rows += _growth(line)
    return {"machine": about | {"load_after": os.getloadavg()}, "rows": rows}


def main(arguments: Sequence[str]) -> None:
    """Measure, write the JSON, refresh the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", default=",".join(LINES), help=f"some of {', '.join(LINES)}")
    parser.add_argument("--quick", action="store_true", help="the smallest case of each line, in two rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    about = machine()
    lines = json.loads(options.out.read_text())["lines"] if options.out.exists() else {}
    for line in options.lines.split(","):
        lines[line] = measure_line(line, options.quick)
    record(options.out, about, lines={line: lines[line] for line in LINES if line in lines})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
