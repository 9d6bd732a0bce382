"""Processes of one host against Open MPI and Gloo, and against the memory's own limit: `make bench`.

Every contender is a job of processes that lives for all cases, and measures when it is told to, while all others sleep.
In each of 11 rounds all of them take their turn, in changing order; a turn begins with a barrier, repeats the collective
for some milliseconds, and counts the slowest rank. The tables:

- native: our compiled plan, repeated in one native call, and mpi4py minus what an empty mpi4py call takes (`peers.Mpi`).
  No Python runs between our repetitions, so no rank reads the results, and each rank has one of its own. Gloo's calls count
  as they are.
- python: a user's loop (`host_contender.Loop`). `y = step(x)`, jitted, on funccoll's Arrays, or a call of mpi4py or
  torch.distributed; then the whole result is read on every rank (`host_contender.read`), which is part of every contender's
  time. A result is kept until the next one has taken its place, so ours alternate between two arrays, and the peers, which
  write where they are told to, have one. Our ranks share large results that are the same on all, also a broadcast's, which then
  moves nothing: `transports/shm/shared_buffers.py`. Of 32 all_reduces in a step only the step and the calls are measured.
- numpy: the same, but our step is given NumPy's arrays, which are not in shared memory. The peers always are.
- "python, no extension" and "numpy, no extension": the same with FUNCCOLL_NATIVE=0, without the C extension of the call.

In records of before November 24, 2026 each result was released when it had been read, and Open MPI was the one in PATH:
`native` means what it meant, and `python` and `numpy` are somewhat harder now.

`ratio` is that of the turns' means. Single calls are timed as well, in a repetition of their own where a clock would slow them
down: `call_us` has the medians over the rounds of a round's median and 99th percentile (of fewer than 100 calls: the longest),
and `p99_ratio` the peer's 99th percentile over ours, round by round.

Open MPI runs in all versions that are installed (`make bench` installs 4.1 and 5.0), with and without mpi_yield_when_idle, and
the lowest median counts: `way` names it. Peers that are not installed are left out, and the results say so. `--before CHECKOUT`
adds another checkout of funccoll as a contender of the first three tables. Writes benchmarks/results/host.json and the pages'
table, and adds the goals of this run to host_runs.json, which keeps the last three.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import ROUNDS, machine
from benchmarks.one_host import host_limit, host_start, peers
from benchmarks.one_host.host_cases import COLLECTIVES, SIZES, STEP, Case, cases
from benchmarks.one_host.host_contender import Turn
from benchmarks.one_host.host_goals import goals, means
from benchmarks.one_host.host_jobs import Job, JobError, funccoll_run, mpirun
from benchmarks.one_host.host_ratios import against, rounded, times_of
from benchmarks.result_tables import refresh
from funccoll.core.display import size_text

RESULTS = Path(__file__).parents[1] / "results" / "host.json"
RUNS = RESULTS.with_name("host_runs.json")
TURN_SECONDS = 0.012
# Repetitions in a turn: the first ones find the caches full of the others' memory. Large cases take up to 0.1 s.
_LEAST, _MANY, _LONG = 4, 12, 0.1
LIMITED = ("all_reduce", "all_gather")
LIMITED_FROM = 16 << 20
HOPELESS = 5.0
"""Factor by which a variant of a peer may be slower than its other one; a slower one is not measured further in this case. With
more ranks than cores, Open MPI without yielding takes milliseconds for everything."""
PLAIN = "ours, no extension"
OURS = ("ours", PLAIN, "before")
TABLES = {
    "native": ("ours", "native", "native"),
    "python": ("ours", "python", "python"),
    "numpy": ("ours", "numpy", "python"),
    "python, no extension": (PLAIN, "python", "python"),
    "numpy, no extension": (PLAIN, "numpy", "python"),
}
"""Our job, and its way and the peers' way to execute a case, in each table."""
QUICK_SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20)


class Bench:
    """All contenders, on one number of ranks."""

    def __init__(self, stack: ExitStack, ranks: int, options: argparse.Namespace, missing: dict[str, str]):
        self.ranks, self.options = ranks, options
        self.turn = TURN_SECONDS / 4 if options.quick else TURN_SECONDS
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.jobs: dict[str, Any] = {}

        def start(name: str, launcher: list[str], *words: str) -> None:
            self.jobs[name] = stack.enter_context(Job(name, ranks, launcher, words))

        start("ours", funccoll_run(ranks), "ours")
        start(PLAIN, funccoll_run(ranks, extension=False), "ours")
        if options.before:
            start("before", funccoll_run(ranks, checkout=options.before), "ours")
        mpis = {} if "mpi" in missing else peers.open_mpis()
        for version, before in mpis.items():
            start(f"mpi {version}", mpirun(ranks, False, before), "mpi")
            start(f"mpi {version}, yields", mpirun(ranks, True, before), "mpi")
        if "gloo" not in missing:
            start("gloo", funccoll_run(ranks, bound=False), "gloo", f"{folder}/meeting")  # its threads want other cores
        area = host_limit.area(max(options.sizes))
        memory = os.memfd_create("limit")
        stack.callback(os.close, memory)
        os.ftruncate(memory, (ranks + 1) * area)
        start("limit", funccoll_run(ranks), "limit", f"/proc/{os.getpid()}/fd/{memory}", str(area))
        self.versions = {k: v for job in self.jobs.values() for k, v in job.versions.items()}
        if mpis:
            self.versions["Open MPI"] = " and ".join(mpis)

    def rows(self, case: Case) -> Iterator[dict[str, Any]]:
        """Measure one case; give its row in each table."""
        ways: dict[tuple[str, str], list[Turn]] = {}
        refused = {}
        for name, job in self.jobs.items():
            if name == "limit" and (case.kind not in LIMITED or case.nbytes < LIMITED_FROM):
                continue
            try:
                ways.update({(name, way): [] for way in job.prepare(case) if (name, way) != (PLAIN, "native")})
            except JobError as error:
                if name != "gloo":
                    raise
                refused[name] = str(error).strip().splitlines()[-1]
        times = {key: self.calibrate(*key) for key in ways}
        hopeless: dict[str, dict[str, float]] = {}
        for name, way in [key for key in times if key[0].startswith("mpi")]:
            took = times[name, way][1]
            best = min(t for (n, w), (_, t) in times.items() if n.startswith("mpi") and w == way)
            if took > HOPELESS * best:
                del ways[name, way]
                hopeless.setdefault(way, {})[name] = took * 1e6
        # One limit takes turns with us: four, one after the other, would find their memory in the caches, and we would not.
        limits = sorted((t, key) for key, (_, t) in times.items() if key[0] == "limit")
        limits_us = {way: t * 1e6 for t, (_, way) in limits}
        for _, key in limits[1:]:
            del ways[key]
        for number in range(self.rounds(max(seconds for _, seconds in times.values()))):
            for key in list(ways) if number % 2 else list(reversed(ways)):
                ways[key].append(self.jobs[key[0]].measure(key[1], times[key][0]))
        for table, (name, mine, theirs) in TABLES.items():
            found = {n: turns for (n, way), turns in ways.items() if way == (mine if n in OURS else theirs)}
            found = {n: turns for n, turns in found.items() if n == name or n not in OURS or (name, n) == ("ours", "before")}
            if name in found:
                found = {"ours": found.pop(name), **found}
                row = {"table": table, "ranks": self.ranks, "kind": case.kind, "nbytes": case.nbytes, **self.row(found)}
                if table == "native" and limits:
                    key = limits[0][1]
                    row["limit"] = {**against({key[1]: ways[key]}, found["ours"]), "calibrated_us": limits_us}
                if refused:
                    row["refused"] = refused
                if theirs in hopeless:
                    row["hopeless_us"] = hopeless[theirs]
                row["calls"] = {n: times[name, mine][0] if n == "ours" else times[n, theirs][0] for n in found if n != "before"}
                yield row

    def calibrate(self, name: str, way: str) -> tuple[int, float]:
        """(repetitions in a turn, seconds of one of them with everything that is subtracted), roughly."""
        times, best = 1, math.inf
        for seconds in (self.turn / 4, self.turn):
            turn = self.jobs[name].measure(way, times)
            best = min(best, max(turn.seconds + turn.subtracted, 1e-8))
            times = max(self.repetitions(best), int(seconds / best))
        return times, best

    def repetitions(self, seconds: float) -> int:
        """The least repetitions in a turn of what takes so long."""
        return max(_LEAST, min(_MANY, int(_LONG / seconds)))

    def rounds(self, seconds: float) -> int:
        """The rounds of a case whose slowest contender takes so long."""
        return self.options.rounds

    def row(self, found: dict[str, list[Turn]]) -> dict[str, Any]:
        """The row of a case in one table."""
        ours = found["ours"]
        row: dict[str, Any] = {"ours": times_of(ours)}
        variants = {name: turns for name, turns in found.items() if name.startswith("mpi")}
        if variants:
            row["mpi"] = against(variants, ours)
        for name in ("gloo", "before"):
            if name in found:
                row[name] = against({name: found[name]}, ours)
        return row


def show(row: dict[str, Any]) -> str:
    """One printed line of a row."""
    words = [f"{row['ranks']} {row['table']:<20} {row['kind']:<14} {size_text(row['nbytes']):>7}"]
    words.append(f"{row['ours']['median_us']:>10.2f} µs")
    for name, title in (("mpi", "Open MPI"), ("gloo", "Gloo"), ("before", "before"), ("limit", "limit")):
        if name in row:
            late = f" (p99 {row[name]['p99_ratio']['median']:5.2f}×)" if "p99_ratio" in row[name] else ""
            words.append(f"{title} {row[name]['median_us']:>10.2f} µs {row[name]['ratio']['median']:6.2f}×{late}")
    return "  ".join(words)


def parse(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="funccoll on one host against Open MPI and Gloo")
    parser.add_argument("--quick", action="store_true", help="few sizes, 3 rounds: to see that it works")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default 2,4)")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--without", default="", help="what to leave out: mpi,gloo,start")
    parser.add_argument("--sizes", default="", help="bytes (default 4 B to 64 MiB in powers of 4)")
    parser.add_argument("--before", default="", help="the folder of another checkout of funccoll, to compare with")
    parser.add_argument("--out", type=Path, default=None, help=f"the results; {RESULTS.name} and the pages if left out")
    options = parser.parse_args(words)
    options.ranks = [int(n) for n in options.ranks.split(",")]
    options.collectives = tuple(options.collectives.split(","))
    options.sizes = tuple(map(int, filter(None, options.sizes.split(",")))) or (QUICK_SIZES if options.quick else SIZES)
    options.rounds = 3 if options.quick else ROUNDS
    if options.quick and options.out is None:
        parser.error("--quick needs --out: the committed results are of full runs")
    return options


def write(path: Path, results: dict[str, Any]) -> None:
    """Write JSON with a line for each case."""
    whole = {key: value for key, value in results.items() if key != "cases"}
    text = json.dumps(whole, indent=1, ensure_ascii=False)
    rows = ",\n".join(f"  {json.dumps(rounded(row), ensure_ascii=False)}" for row in results["cases"])
    path.write_text(f'{text[:-2]},\n "cases": [\n{rows}\n ]\n}}\n')


def keep(results: dict[str, Any], path: Path = RUNS) -> None:
    """Add this run's goals and means to those of the last ones."""
    runs = json.loads(path.read_text()) if path.exists() else []
    runs = [*runs, {name: results[name] for name in ("machine", "seconds", "goals", "means")}][-3:]
    path.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n")


def main(words: list[str] | None = None) -> None:
    """Measure everything, write the results, refresh the pages."""
    options, about, begin = parse(words), machine(), time.monotonic()
    missing = peers.missing_peers()
    missing.update(dict.fromkeys(filter(None, options.without.split(",")), "left out by --without"))
    for name, why in missing.items():
        print(f"without {name}: {why}", flush=True)
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        with ExitStack() as stack:
            bench = Bench(stack, ranks, options, missing)
            about["versions"].update(bench.versions)
            contenders = list(bench.jobs)
            steps = [Case(STEP, 1 << 10)] if "all_reduce" in options.collectives else []
            for case in [*cases(ranks, options.sizes, options.collectives), *steps]:
                for row in bench.rows(case):
                    rows.append(rounded(row))
                    print(show(row), flush=True)
    mpi = list(peers.open_mpis().values()) if "mpi" not in missing else []
    starts = (2, 1) if options.quick else (options.rounds, 3)
    start = {} if "start" in missing else host_start.record(*starts, mpi[-1] if mpi else None)
    start = rounded(start)
    about["load_after"] = os.getloadavg()
    results = {
        "machine": about,
        "rounds": options.rounds,
        "turn_seconds": TURN_SECONDS,
        "quick": options.quick,
        "missing": missing,
        "seconds": round(time.monotonic() - begin),
        "goals": rounded(goals(rows, start)),
        "means": rounded(means(rows)),
        "contenders": contenders,
        "start": start,
        "cases": rows,
    }
    path = options.out or RESULTS
    write(path, results)
    for g in results["goals"]:
        verdict = {None: "not measured", True: "met", False: "MISSED"}[g["met"]] + ("" if g["asked"] else " (not asked)")
        reached = "" if g["reached"] is None else f": {g['reached']:.4g} {g['unit']} ({g['at']})"
        print(f"{verdict:<18} {g['ranks']} ranks, {g['goal']}{reached}, wanted {g['wanted']}")
    if options.out is None:
        keep(results)
        refresh()
    print(f"written: {path}, after {results['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
