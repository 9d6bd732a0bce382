"""Many small collectives in a step: `python -m benchmarks.calls.many_small`.

A step with 4, 32 and 256 all_reduces of scalars and small arrays (metrics, norms, counts) over one axis, on 2 processes: all
sums of float32, or sums, means and maxima of three dtypes. How many native calls, entries (in each a rank publishes where its
arrays are, and waits for the others), instructions, published bytes and cache lines the plan has; and the time of a step, with
and without the C extension of the call (and of another checkout, with `--before CHECKOUT`), against mpi4py: a call for each
array, and a call for all arrays of one operation and dtype, which are copied together first. Contenders take turns in rounds,
as in `host.py`; results are kept until the next ones, and not read. Writes benchmarks/results/many_small.json.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.calls.many_small_rank import Many
from benchmarks.measure import ROUNDS, machine, record
from benchmarks.one_host import peers
from benchmarks.one_host.host_contender import Turn
from benchmarks.one_host.host_jobs import Job, funccoll_run, mpirun
from benchmarks.one_host.host_ratios import against, rounded, times_of
from benchmarks.rank import rank_words

RESULTS = Path(__file__).parents[1] / "results" / "many_small.json"
RANK = rank_words("benchmarks.calls.many_small_rank")
RANKS = 2
CASES = tuple(Many(count, mixed) for mixed in (False, True) for count in (4, 32, 256))
TURN_SECONDS = 0.012
WAYS = ("one call each", "concatenated")


def row(case: Many, jobs: dict[str, Job], rounds: int, seconds: float) -> dict[str, Any]:
    """The figures of a case."""
    prepared = {name: job.all("prepare_many", case)[0] for name, job in jobs.items()}
    keys = [(name, way) for name, (ways, _) in prepared.items() for way in ways]
    times = {key: max(4, int(seconds / max(jobs[key[0]].measure(key[1], 4).seconds, 1e-7))) for key in keys}
    turns: dict[tuple[str, str], list[Turn]] = {key: [] for key in keys}
    for number in range(rounds):
        for name, way in keys if number % 2 else reversed(keys):
            turns[name, way].append(jobs[name].measure(way, times[name, way]))
    ours = turns["ours", "one step"]
    found: dict[str, Any] = {"count": case.number, "mixed": case.mixed, "plan": prepared["ours"][1], "ours": times_of(ours)}
    for name in ("ours, no extension", "before"):
        if name in jobs:
            found[name] = against({name: turns[name, "one step"]}, ours)
    for way in WAYS:
        mpis = {name: these for (name, w), these in turns.items() if w == way}
        if mpis:
            found[f"mpi, {way}"] = against(mpis, ours)
    return found


def show(found: dict[str, Any]) -> None:
    """Print a case."""
    plan, kinds = found["plan"], "mixed" if found["mixed"] else "sums of float32"
    names = ("native calls", "entries", "waits", "instructions", "published bytes", "published lines")
    facts = ", ".join(f"{plan[name]} {name}" for name in names)
    print(f"{found['count']:>4} {kinds:<16} {found['ours']['median_us']:8.2f} µs  {facts}")
    for name in ("ours, no extension", "before", *(f"mpi, {way}" for way in WAYS)):
        if name in found:
            ratio = found[name]["ratio"]["median"]
            print(f"     {name:<22} {found[name]['median_us']:8.2f} µs {ratio:6.2f}×  {found[name]['way']}", flush=True)


def main(words: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="steps with many small collectives, against mpi4py")
    parser.add_argument("--before", default="", help="the folder of another checkout of funccoll, to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--turn", type=float, default=TURN_SECONDS, help="seconds of a turn")
    parser.add_argument("--without-mpi", action="store_true", help="leave mpi4py out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    about, begin, missing = machine(), time.monotonic(), peers.missing_peers()
    if options.without_mpi:
        missing["mpi"] = "left out by --without-mpi"
    launchers = {"ours": funccoll_run(RANKS), "ours, no extension": funccoll_run(RANKS, extension=False)}
    if options.before:
        launchers["before"] = funccoll_run(RANKS, checkout=options.before)
    words_of = {name: ["ours"] for name in launchers}
    for version, before in {} if "mpi" in missing else peers.open_mpis().items():
        launchers[f"mpi {version}"], words_of[f"mpi {version}"] = mpirun(RANKS, False, before), ["mpi"]
    rows = []
    with ExitStack() as stack:
        start = lambda name: stack.enter_context(Job(name, RANKS, launchers[name], words_of[name], rank=RANK))
        jobs = {name: start(name) for name in launchers}
        for case in CASES:
            rows.append(row(case, jobs, options.rounds, options.turn))
            show(rows[-1])
    record(
        options.out,
        about,
        ranks=RANKS,
        rounds=options.rounds,
        missing={k: v for k, v in missing.items() if k == "mpi"},
        seconds=round(time.monotonic() - begin),
        cases=rounded(rows),
    )
    print(f"written: {options.out}, after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
