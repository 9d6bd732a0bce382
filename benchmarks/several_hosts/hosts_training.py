"""Training on two hosts against torch's DistributedDataParallel over Gloo.

`python -m benchmarks.several_hosts.hosts_training`.

The hosts are network namespaces of this machine (network_hosts.py) with one rank each. Their links have 1 Gbit/s, 10 Gbit/s,
or no limit. In each rank the same model is trained in every way of `hosts_training_ways.WAYS`: under our wrapper of torch
modules, under torch's own, as a function of NumPy under `fc.data_parallel`, and without communication. Ways take turns in
rounds, in changing order; a turn counts as the median of its steps on the slower rank. That all that communicate get the same
losses, and the same parameters, is checked first.

The *bound* of a step says when it ends if communication takes no processor time, and buckets travel one after the other, each
as soon as it is ready: t_k = max(ready_k, t_(k-1)) + wire_k, and then max(t_last, end of the backward pass) + optimizer. All
parts are measured in each round, ready_k in steps without communication, and wire_k by the bucket's collective alone.

Goals judge our defaults against torch with the size of buckets that serves it best. Writes
benchmarks/results/hosts_training.json and its table in docs/benchmarks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import OtherProcesses, QuietTurns, machine, spread, summary
from benchmarks.one_host.host import write
from benchmarks.one_host.host_jobs import Job, one_thread
from benchmarks.one_host.host_ratios import rounded
from benchmarks.rank import rank_words
from benchmarks.result_tables import refresh
from benchmarks.several_hosts.hosts_training_ways import (
    ALONE,
    CAPS,
    DECIDES,
    DEFAULTS,
    TASKS,
    THEIRS,
    WAYS,
    Way,
    bound,
    goals,
    slower,
)
from benchmarks.several_hosts.mpi import settings

RESULTS = Path(__file__).parents[1] / "results" / "hosts_training.json"

from tests.support.ranks import mpi_vendors, network_hosts
from tests.support.ranks.network_hosts import NetworkHosts

VENDOR = "openmpi"
LINKS = {"1 Gbit/s": 1000, "10 Gbit/s": 10_000, "unlimited": 0}
"""Megabits per second of each link, in each direction."""
BURST_SECONDS = 1e-3
"""Seconds that a limited link may send in one go. With less, it is slower when the kernel is busy."""
ROUNDS, FEW_ROUNDS, STEPS = 9, 3, 3
"""Rounds of the link that decides the goals, and of the others; steps of a turn."""
CHECKED_STEPS = 9
"""One more than there are batches, so the last loss is that of the first batch."""
TOLERANCE = 1e-3
"""Relative differences of losses and parameters between the ways, after training steps in float32."""

Round = dict[Way, float]


class HostsBench:
    """A job of two ranks on two hosts, which train a task in all ways."""

    def __init__(self, stack: ExitStack, link: str, quiet: QuietTurns):
        self.quiet = quiet
        hosts = stack.enter_context(NetworkHosts(2))
        if megabits := LINKS[link]:
            hosts.rate(megabits, int(megabits * 1e6 / 8 * BURST_SECONDS))
        meeting = f"{stack.enter_context(tempfile.TemporaryDirectory())}/meeting"
        counts = [1, 1]
        start = lambda program: hosts.mpirun(VENDOR, counts, program, settings(counts), stdout=sys.stderr, stderr=None)
        rank = rank_words("benchmarks.several_hosts.hosts_training_rank")
        self.job = stack.enter_context(Job(link, len(counts), start, [meeting], rank=rank))

    def row(self, task: str, ways: tuple[Way, ...], rounds: int, steps: int) -> dict[str, Any]:
        """A task in all ways."""
        nbytes = self.job.all("prepare", task, ways)[0]
        losses = self.check(ways)
        times: list[Round] = []
        bounds: list[Round] = []
        parts: dict[str, Any] = {}
        for number in range(rounds):
            times.append({way: self.turn("measure", way, steps) for way in (ways if number % 2 else reversed(ways))})
            bounds.append({})
            for way in DEFAULTS:
                found = slower(self.turn("parts", way, 2))
                bounds[-1][way] = bound(found)
                parts[str(way)] = found._asdict()
        return {"task": task, "parameter_bytes": nbytes, "losses": losses, **compared(times, bounds), "parts_s": parts}

    def turn(self, command: str, way: Way, times: int) -> Any:
        """A turn of some steps: their median seconds on the slower rank, or the parts on each."""

        def measure() -> tuple[Any, float]:
            with OtherProcesses() as others:
                ranks = self.job.all(command, way, times)
            found = [result for result, _ in ranks]
            return (max(found) if command == "measure" else found), others.rate(sum(spent for _, spent in ranks))

        return self.quiet.take(measure)

    def check(self, ways: tuple[Way, ...]) -> dict[str, Any]:
        """Train a few steps in each way; raises AssertionError where results differ by more than rounding."""
        found = {}
        for way in (way for way in ways if way.contender != ALONE):
            ranks = self.job.all("check", way, CHECKED_STEPS)
            assert all(squares == ranks[0][1] for _, squares in ranks), f"{way}: the ranks' parameters differ"
            found[way] = [[statistics.mean(column) for column in zip(*(losses for losses, _ in ranks))], ranks[0][1]]
        first = found[ways[0]]
        apart = {str(way): [_apart(a, b) for a, b in zip(both, first, strict=True)] for way, both in found.items()}
        assert all(max(pair) < TOLERANCE for pair in apart.values()), f"losses or parameters differ: {apart}"
        losses = first[0]
        assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
        return {"steps": CHECKED_STEPS, "first": losses[0], "last": losses[-1], "differences": apart}


def _apart(a: list[float], b: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(x - y) / max(abs(x), abs(y), 1e-12) for x, y in zip(a, b, strict=True))


def compared(times: list[Round], bounds: list[Round]) -> dict[str, Any]:
    """Times in microseconds, and the ratios, round by round, to the bound and to the best of torch's ways."""
    theirs = [Way(THEIRS, cap) for cap in CAPS]
    best = min(theirs, key=lambda way: statistics.median(r[way] for r in times))
    ours = [way for way in times[0] if way.contender not in (THEIRS, ALONE)]
    return {
        "us": {str(way): summary([r[way] for r in times]) for way in times[0]},
        "bound_us": {str(way): summary([b[way] for b in bounds]) for way in bounds[0]},
        "over_bound": {str(way): spread([r[way] / b[way] for r, b in zip(times, bounds, strict=True)]) for way in bounds[0]},
        "torch_best": str(best),
        "over_torch": {str(way): spread([r[way] / r[best] for r in times]) for way in ours},
    }


def show(row: dict[str, Any]) -> None:
    """Print a task's row."""
    print(f"{row['link']}, {row['task']}, {row['parameter_bytes']:,} bytes; torch's best: {row['torch_best']}")
    for way, us in row["us"].items():
        words = [f"    {way:<24} {us['median_us'] / 1e3:8.1f} ms ({us['q1_us'] / 1e3:.1f} to {us['q3_us'] / 1e3:.1f})"]
        if way in row["over_torch"]:
            words.append(f"torch {row['over_torch'][way]['median']:.2f}×")
        if way in row["bound_us"]:
            words.append(f"bound {row['bound_us'][way]['median_us'] / 1e3:.1f} ms: {row['over_bound'][way]['median']:.2f}×")
        print(*words, flush=True)


def parse(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="training on two hosts against torch's DistributedDataParallel over Gloo")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of a turn (default {STEPS})")
    parser.add_argument("--patience", type=float, default=40, help="seconds for turns that others disturbed (default 40)")
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--tasks", default="", help="numbers of the tasks (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    options.links = options.links.split(",")
    options.tasks = [TASKS[int(n)] for n in options.tasks.split(",") if n] or list(TASKS)
    return options


def main(words: list[str] | None = None) -> None:
    """Measure everything and write the results."""
    options, about, begin, rows = parse(words), machine(), time.monotonic(), []
    if why_not := network_hosts.why_not() or mpi_vendors.why_not(VENDOR):
        sys.exit(why_not)
    os.environ.update(one_thread())
    quiet = QuietTurns(options.patience)
    for link in options.links:
        with ExitStack() as stack:
            bench = HostsBench(stack, link, quiet)
            about["versions"].update(bench.job.versions)
            for task in options.tasks:
                rounds = options.rounds if link == DECIDES else min(options.rounds, FEW_ROUNDS)
                row = bench.row(task, WAYS, rounds, options.steps)
                rows.append({"link": link, **rounded(row), "load": os.getloadavg()})
                show(rows[-1])
    about["load_after"] = os.getloadavg()
    results = {
        "machine": about,
        "rounds": options.rounds,
        "steps": options.steps,
        "turns": quiet.counts,
        "seconds": round(time.monotonic() - begin),
        "goals": goals(rows),
        "cases": rows,
    }
    write(options.out, results)
    if options.out == RESULTS:
        refresh()
    for g in results["goals"]:
        verdict = "met" if g["met"] else "MISSED"
        print(f"{verdict:<8} {g['task']}, {g['way']}: {g['goal']} {g['wanted']}, reached {g['reached']:.3g}×")
    print(f"turns: {quiet.counts}\nwritten: {options.out}, after {results['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
