"""Where the time of one call goes, layer by layer, while the machine is fast and while it is slow.

`python -m benchmarks.calls.call_profile`.

A jitted all_reduce of 64 B on 2 processes with a core each. In each of some hundred short
turns, of this checkout with and without the C extension of the call (and of another one, with `--before CHECKOUT`), both ranks
measure one after the other:

- a reference loop: pure Python without communication, on each core alone, on both at once, and just before and after the calls;
- the time in which a word that one core writes is seen by the other (a ping-pong of compiled code on shared memory);
- the call at each layer: `step(x)`; without finding the program for the arguments; the collective group alone, on NumPy's
  arrays; the compiled plan, repeated in one native call. What a layer adds is its own time;
- the median and the 99th percentile of single calls;
- what the kernel counts for the thread: system calls (sched_yield among them, which a rank calls when it has waited for 60
  tries), context switches, page faults, the time for which it could run and had no processor.

The fourth of the turns with the shortest calls is the fast state, the fourth with the longest the slow one. Linear models of
the call's time in the reference loop's time (around the calls, the slower core), then in the latency, then in the yields of a
call too, say how much of the difference they explain. Instructions of one call, Python's and the machine's, are counted on the
side, the latter one by one (`instruction_count.py`); and how many cache lines a rank publishes, which its peers fetch. What the
processors count themselves is in the results where the machine shows it, and the reason where it does not.

Writes benchmarks/results/call_profile.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calls import instruction_count
from benchmarks.measure import machine, record
from benchmarks.one_host.host_contender import Turn
from benchmarks.one_host.host_jobs import Job, funccoll_run
from benchmarks.one_host.host_ratios import rounded
from benchmarks.rank import rank_words

RESULTS = Path(__file__).parents[1] / "results" / "call_profile.json"
RANK = rank_words("benchmarks.calls.call_profile_rank")
RANKS = 2
KIND, NBYTES = "all_reduce", 64
TURNS, PAUSE = 200, 0.05
"""Turns of each contender, and the seconds between them: the machine's speed changes within seconds."""
LOOP, CALLS, PINGS = 10_000, 200, 500
LOOP_FIGURE = "reference, around the calls"
CAUSES = (LOOP_FIGURE, "latency", "sched_yield")
LAYERS = ("step(x)", "without finding the program", "without Arrays: the group", "native")
OWN = ("finding the program", "arguments and Arrays", "the group's call", "the kernels, with waiting")
"""The own time of each layer: what it takes beyond the next one."""


def turn_of(job: Job, calls: int, first: int) -> dict[str, float]:
    """The figures of one turn, in microseconds where they are times: of the slower rank; counts are the mean of both.

    first: the layer with which it begins.
    """
    figures: dict[str, float] = {}
    for ranks in ((0,), (1,), (0, 1)):
        loops = [seconds for seconds in job.all("reference", ranks, LOOP) if seconds is not None]
        figures["reference, " + ("both at once" if len(ranks) > 1 else f"core {ranks[0]} alone")] = max(loops) * 1e6
        if len(ranks) > 1:
            figures["reference, both at once, faster core"] = min(loops) * 1e6
    figures["latency"] = max(job.all("latency", PINGS)) * 1e6
    timed = job.all("time", calls, first)
    for name in timed[0]:
        of_ranks = [rank[name] for rank in timed]
        per_call = name.startswith(("switches", "minor", "waited"))
        figures[name] = sum(of_ranks) / RANKS / calls / len(LAYERS) if per_call else max(of_ranks) * 1e6
    figures["waited for a core"] *= 1e6
    single = [Turn(*turn) for turn in job.all("single", calls)]
    figures["single call, median"] = max(turn.median for turn in single) * 1e6
    figures["single call, 99th percentile"] = max(turn.p99 for turn in single) * 1e6
    counts = job.all("count", calls)
    figures.update({event: sum(rank[event] for rank in counts) / RANKS for event in counts[0]})
    for own, layer, inner in zip(OWN, LAYERS, [*LAYERS[1:], None], strict=True):
        figures[own] = figures[layer] - (figures[inner] if inner else 0.0)
    return figures


def instructions(job: Job, thread: int) -> dict[str, float] | str:
    """Machine instructions of one call on rank 0 at each layer, less those of an empty call; the reason where none are counted.

    Rank 0 is the slow one meanwhile, and does not wait.
    """

    def count(layer: str) -> int:
        with instruction_count.counted(thread) as found:
            job.all("execute", layer)
        return found[0]

    try:
        empty = count("an empty call")
        found: dict[str, float] = {layer: count(layer) - empty for layer in LAYERS[:-1]}
        found["native"] = (count("native 6") - count("native 1")) / 5
    except OSError as error:
        return str(error)
    return found


def states(turns: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Medians of every figure in the fast state, in the slow one, and over all turns."""
    ordered = sorted(turns, key=lambda turn: turn["step(x)"])
    fourth = max(1, len(ordered) // 4)
    parts = {"fast": ordered[:fourth], "slow": ordered[-fourth:], "all": ordered}
    return {state: {name: statistics.median(t[name] for t in part) for name in turns[0]} for state, part in parts.items()}


def explained(turns: list[dict[str, float]]) -> dict[str, Any]:
    """How far the speed of the cores, the latency between them, and yields explain the time of a call."""
    limit = np.quantile([turn["step(x)"] for turn in turns], 0.98)  # a turn in which somebody else computed is another matter
    kept = [turn for turn in turns if turn["step(x)"] <= limit]
    columns = {name: np.array([turn[name] for turn in kept]) for name in kept[0]}
    calls, found = columns["step(x)"], states(kept)
    correlate = lambda a, b: float(np.corrcoef(a, b)[0, 1]) if len(a) > 2 and np.std(a) > 0 and np.std(b) > 0 else None
    difference, models = found["slow"]["step(x)"] - found["fast"]["step(x)"], []
    causes = [name for name in CAUSES if name in columns]
    for number in range(1, len(causes) + 1):
        matrix = np.stack([columns[name] for name in causes[:number]], axis=1)
        weights, *_ = np.linalg.lstsq(matrix, calls, rcond=None)
        variance = float(np.var(calls))
        of_it = sum(w * (found["slow"][name] - found["fast"][name]) for w, name in zip(weights, causes, strict=False))
        models.append(
            {
                "causes": causes[:number],
                "weights": weights.tolist(),
                "of the difference": float(of_it),
                "share of the variance": 1 - float(np.var(calls - matrix @ weights)) / variance if variance else None,
            }
        )
    return {
        "slow - fast": difference,
        "models": models,
        "unexplained": difference - models[-1]["of the difference"],
        "correlation of the call with": {
            name: correlate(calls, column) for name, column in columns.items() if name not in (*LAYERS, *OWN)
        },
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Print one contender's table."""
    plan = found["plan"]
    print(
        f"\n{name}: {found['implementation']}, {plan['entries']} entry, {plan['published lines']} lines published, "
        f"{plan['waits']} waits, {plan['instructions']} instructions of the plan"
    )
    print(f"{'':<42}{'fast':>10}{'slow':>10}{'slow/fast':>11}{'all':>10}")
    units = {
        "reference": "ns",
        "switches": "/call",
        "minor": "/call",
        "system": "/call",
        "sched_yield": "/call",
        "context": "/call",
        "migrations": "/call",
        "instructions": "/call",
        "cache": "/call",
    }
    for figure in found["states"]["all"]:
        unit = next((unit for start, unit in units.items() if figure.startswith(start)), "µs")
        scale = 1000 if unit == "ns" else 1
        fast, slow, every = (found["states"][state][figure] * scale for state in ("fast", "slow", "all"))
        ratio = f"{slow / fast:10.2f}×" if fast > 1e-9 else " " * 11
        note = f"   {sum(found['bytecode'][figure].values())} bytecode" if figure in found["bytecode"] else ""
        if figure in found["instructions"] and isinstance(found["instructions"], dict):
            note += f"   {found['instructions'][figure]:.0f} machine instructions"
        print(f"{figure + ', ' + unit:<42}{fast:>10.3f}{slow:>10.3f}{ratio}{every:>10.3f}{note}")
    why = found["explained"]
    print(f"a slow call takes {why['slow - fast']:.2f} µs more than a fast one")
    for model in why["models"]:
        share = "-" if model["share of the variance"] is None else f"{model['share of the variance']:.0%}"
        print(f"  {model['of the difference']:6.2f} µs by {', '.join(model['causes'])} ({share} of the variance)")
    print(f"  {why['unexplained']:6.2f} µs unexplained")
    strong = {k: v for k, v in why["correlation of the call with"].items() if v is not None and abs(v) >= 0.3}
    print("correlation of the call's time with " + ", ".join(f"{k} {v:.2f}" for k, v in strong.items()))


def main(words: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="one call, layer by layer, in the machine's fast and slow state")
    parser.add_argument("--before", default="", help="the folder of another checkout of funccoll, to compare with")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--calls", type=int, default=CALLS, help="calls of each layer in a turn")
    parser.add_argument("--pause", type=float, default=PAUSE, help="seconds between turns")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    about, begin = machine(), time.monotonic()
    launchers = {"now": funccoll_run(RANKS), "now, no extension": funccoll_run(RANKS, extension=False)}
    if options.before:
        launchers["before"] = funccoll_run(RANKS, checkout=options.before)
    with ExitStack() as stack:
        jobs, contenders, turns = {}, {}, {name: [] for name in launchers}
        for name, launcher in launchers.items():
            memory = os.memfd_create("words")
            stack.callback(os.close, memory)
            os.ftruncate(memory, 1 << 12)
            path = f"/proc/{os.getpid()}/fd/{memory}"
            jobs[name] = stack.enter_context(Job(name, RANKS, launcher, [path], rank=RANK))
            contenders[name] = jobs[name].all("prepare", KIND, NBYTES)[0]
            contenders[name]["instructions"] = instructions(jobs[name], contenders[name].pop("thread"))
        for number in range(options.turns):
            for name in jobs if number % 2 else reversed(jobs):
                turns[name].append(turn_of(jobs[name], options.calls, number % len(LAYERS)))
            time.sleep(options.pause)
    for name, found in contenders.items():
        found.update(states=states(turns[name]), explained=explained(turns[name]))
        show(name, found)
        figures = (LAYERS[0], LOOP_FIGURE, "latency", "native", "sched_yield")
        found["turns"] = {figure: [turn[figure] for turn in turns[name]] for figure in figures if figure in turns[name][0]}
    for event, reason in contenders["now"]["unsupported"].items():
        print(f"{event} are not counted here: {reason}")
    record(
        options.out,
        about,
        ranks=RANKS,
        kind=KIND,
        nbytes=NBYTES,
        turns=options.turns,
        calls=options.calls,
        seconds=round(time.monotonic() - begin),
        contenders=rounded(contenders),
    )
    print(f"written: {options.out}, after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
