"""Steps on two processes: fused, with FUNCCOLL_FUSE=0, and a peer's.

`python -m benchmarks.compute.steps [--case gpt,heat]`.

A GPT's step against torch's DistributedDataParallel over Gloo, a stencil against mpi4py's code in place, and training of small
networks against the same without fusion. Each contender is a job of two processes with one thread each. They take turns in
rounds, and sleep meanwhile. A turn counts as the median of its steps on the slower rank. A turn during which other processes
computed is repeated, until `--patience` seconds are spent. Losses are compared first.

Writes benchmarks/results/steps.json (cases that are not measured stay) and its table in docs/benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.compute.steps_cases import STEPS, StepCase
from benchmarks.measure import machine, record, spread, summary
from benchmarks.one_host import peers
from benchmarks.one_host.host_jobs import Job, funccoll_run, mpirun
from benchmarks.rank import rank_words
from benchmarks.training.ddp import Turns, close

RESULTS = Path(__file__).parents[1] / "results" / "steps.json"
RANK = rank_words("benchmarks.compute.steps_rank")
RANKS = 2
ROUNDS = 11
CHECKED_STEPS = 10
OURS = {"fused": "1", "numpy": "0"}
"""FUNCCOLL_FUSE of each of ours."""


class Contenders(Turns):
    """The jobs of a case: ours, fused and not, and the peers that are installed."""

    def __init__(self, stack: ExitStack, case: StepCase, rounds: int, patience: float):
        super().__init__(rounds, patience)
        missing = peers.missing_peers()
        folder = stack.enter_context(tempfile.TemporaryDirectory())

        def start(name: str, launcher: Sequence[str], *words: str) -> None:
            self.jobs[name] = stack.enter_context(Job(name, RANKS, launcher, [name, *words], rank=RANK))

        for name, fuse in OURS.items():
            start(name, ["env", f"FUNCCOLL_FUSE={fuse}", *funccoll_run(RANKS)])
        if "torch" in case.peers and "gloo" not in missing:
            start("torch", funccoll_run(RANKS, bound=False), f"{folder}/meeting")  # Gloo's threads want other cores
        if "mpi4py" in case.peers and "mpi" not in missing:
            start("mpi4py", mpirun(RANKS, False, [*peers.open_mpis().values()][-1]))
        jobs = {way: way.partition(",")[0] for way in (*OURS, *case.peers)}  # "torch, tuned" is of the job "torch"
        self.versions = {k: v for job in self.jobs.values() for k, v in job.versions.items()}
        self.ways = [(job, way) for way, job in jobs.items() if job in self.jobs]
        for job in self.jobs:
            self.jobs[job].all("prepare", case, dict.fromkeys(way for j, way in self.ways if j == job))

    def compare(self, case: StepCase) -> None:
        """Raise AssertionError if the contenders compute different steps."""
        means = {}
        for job, way in self.ways:
            ranks = self.jobs[job].all("check", way, CHECKED_STEPS)
            losses = [found[0] if isinstance(found, tuple) else found for found in ranks]
            means[way] = [statistics.mean(column) for column in zip(*losses, strict=True)]
        apart = {way: close(found, means["fused"]) for way, found in means.items()}
        assert max(apart.values()) <= case.apart, f"{case.name}: losses differ: {apart}, {means}"


def measure(case: StepCase, rounds: int, patience: float) -> dict[str, Any]:
    """Return the row of a case."""
    with ExitStack() as stack:
        contenders = Contenders(stack, case, rounds, patience)
        contenders.compare(case)
        turns = contenders.turns(contenders.ways)
    times = {way: [median for median, _ in turns[job, way]] for job, way in contenders.ways}
    found = {"turns": contenders.quiet.counts, "load": os.getloadavg()[0], "versions": contenders.versions}
    return {**row(case, times), **found}


def row(case: StepCase, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return what is recorded of a case: times, and ours over the best peer's, round by round."""
    sides = {way: summary(seconds) for way, seconds in times.items()}
    ratios = {
        way: spread([a / b for a, b in zip(times["fused"], seconds, strict=True)])
        for way, seconds in times.items()
        if way != "fused"
    }
    here = [way for way in case.peers if way in times]
    best = min(here, key=lambda way: sides[way]["median_us"]) if here else None
    met = None if best is None else ratios[best]["median"] <= case.goal
    said = "  ".join(f"{way} {found['median_us']:9.1f} µs" for way, found in sides.items())
    verdict = {None: "no peer", True: "met", False: "MISSED"}[met]
    print(f"{case.name:<52} {said}  {'' if best is None else format(ratios[best]['median'], '.2f')} {verdict}", flush=True)
    return {"name": case.name, "goal": case.goal, "best_peer": best, "met": met, "sides": sides, "fused_over": ratios}


def main(arguments: Sequence[str]) -> None:
    """Measure, write the JSON, refresh the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compute.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default=",".join(STEPS), help=f"some of {', '.join(STEPS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--patience", type=float, default=300, help="seconds for turns that others disturbed (default 300)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    names = options.case.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"{', '.join(unknown)}: they are not cases. The cases are {', '.join(STEPS)}.")
    about = machine()
    cases = json.loads(options.out.read_text())["cases"] if options.out.exists() else {}
    for name in names:
        cases[name] = measure(STEPS[name], options.rounds, options.patience / len(names)) | {"commit": about["commit"]}
        about["versions"] |= cases[name]["versions"]
    record(options.out, about, ranks=RANKS, cases={name: cases[name] for name in STEPS if name in cases})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
