"""Time from a failure on one host to the exception in every rank of the other hosts and of its own.

Real mpirun over hosts that are namespaces (network_hosts.py), two with two ranks each. Each kind of failure happens 20
times, at steps and in ranks that a seed says. Recorded are the seconds until each survivor's error, and whether it names the
right rank; where a link is down, one of the other side. Writes benchmarks/results/failures_mpi.json.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import extremes, machine, record
from benchmarks.rank import rank_words

ROOT = Path(__file__).parents[2]

from tests.support.ranks import mpi_vendors, network_hosts
from tests.support.ranks.network_hosts import NetworkHosts

RESULTS = Path(__file__).parents[1] / "results" / "failures_mpi.json"
RANK = rank_words("benchmarks.failures.failures_mpi_rank")
COUNTS = (2, 2)
RUNS = 20
TIMEOUT = 2.0
PATIENCE = 60.0
# Deed: (the exceptions that survivors may get, the goal in seconds; of a stop after the timeout).
DEEDS: dict[str, tuple[set[str], float]] = {
    "kill": ({"PeerFailure"}, 1.0),
    "raise": ({"PeerFailure"}, 1.0),
    "mismatch": ({"ProgramMismatch", "PeerFailure"}, 1.0),
    "stop": ({"CollectiveTimeout", "PeerFailure"}, 2.0),  # it is asked where it is, and has a second to answer
    "link down": ({"PeerFailure"}, 5.0),
}


def once(vendor: str, deed: str, seed: int) -> dict[str, Any]:
    """One job and its failure: the seconds until each survivor was told, and by which exception naming whom."""
    draw, n = random.Random(f"{vendor} {deed} {seed}"), sum(COUNTS)
    culprit, step = draw.randrange(n), draw.randrange(20)
    host, axes = culprit // COUNTS[0], draw.sample(["hosts", "ranks"], 2)
    survivors = [rank for rank in range(n) if rank != culprit or deed == "link down"]
    variables = {"FUNCCOLL_TIMEOUT": str(TIMEOUT if deed == "stop" else 20), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name, NetworkHosts(len(COUNTS)) as hosts:
        folder, log = Path(name), Path(name, "output")
        command = [sys.executable, *RANK, name, deed, str(culprit), str(step), *axes]
        with open(log, "w") as file:
            job = hosts.mpirun(vendor, COUNTS, command, variables, stdout=file, stderr=subprocess.STDOUT)
        try:
            began = event(folder, f"does{culprit}", job, log)["at"]
            if deed == "link down":
                began = time.monotonic()
                hosts.link(host, "down")
            told, lost = {}, []
            for rank in survivors:
                try:
                    told[rank] = event(folder, f"error{rank}", job, log)
                except ProcessLookupError:  # MPI's launcher ended it
                    lost.append(rank)
        finally:
            job.kill()
            job.wait()
    wait = TIMEOUT if deed == "stop" else 0.0  # until then a stopped process may go on
    return {
        "culprit": culprit,
        "step": step,
        "first": axes[0],
        "ended by the launcher": lost,
        "told": [
            {
                "rank": rank,
                "seconds": round(found["at"] - began - wait, 4),
                "kind": found["kind"],
                "names": found["rank"],
                "right": is_right(deed, rank, culprit, told),
            }
            for rank, found in told.items()
        ],
    }


def is_right(deed: str, rank: int, culprit: int, told: dict[int, dict[str, Any]]) -> bool:
    """True when a survivor's exception is of a kind that the failure may have, and names a rank that is to blame.

    That is the culprit, or one that was waiting for it itself and has said so.
    """
    if told[rank]["kind"] not in DEEDS[deed][0]:
        return False
    if deed == "link down":  # each side has lost the other
        named = told[rank]["rank"]
        return named is not None and named // COUNTS[0] != rank // COUNTS[0]
    if deed == "mismatch":  # two ranks differ, and no one can know which is wrong
        return f" {culprit} " in told[rank]["text"].partition("entered different collectives")[0]
    seen = set()
    while rank in told and rank not in seen:
        seen.add(rank)
        rank = told[rank]["rank"]
    return rank == culprit


def event(folder: Path, name: str, job: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """Wait for an event. Raises ProcessLookupError when the job has ended without it."""
    end, file = time.monotonic() + PATIENCE, folder / name
    while not file.exists():
        ended = job.poll() is not None
        if ended and not file.exists():
            raise ProcessLookupError(f"the job ended without {name}:\n{log.read_text()}")
        if time.monotonic() > end:
            raise TimeoutError(f"no {name} in {folder}:\n{log.read_text()}")
        time.sleep(0.002)
    return json.loads(file.read_text())


def measured(vendor: str, deed: str, runs: int) -> dict[str, Any]:
    """All runs of one kind of failure."""
    found = [once(vendor, deed, seed) for seed in range(runs)]
    told = [each for run in found for each in run["told"]]
    seconds, goal = extremes([each["seconds"] for each in told]), DEEDS[deed][1]
    right, lost = sum(each["right"] for each in told), sum(len(run["ended by the launcher"]) for run in found)
    print(
        f"{vendor:<8} {deed:<10} median {seconds['median']:6.3f} s  max {seconds['max']:6.3f} s  "
        f"right rank {right} of {len(told)}, ended by the launcher {lost}",
        flush=True,
    )
    return {
        "vendor": mpi_vendors.mpirun(vendor).vendor,
        "version": mpi_vendors.mpirun(vendor).version,
        "failure": deed,
        "hosts": len(COUNTS),
        "ranks": sum(COUNTS),
        "runs": runs,
        "told": len(told),
        "named right": right,
        "ended by the launcher": lost,
        "seconds": seconds,
        "goal": f"≤ {goal:g} s",
        "met": seconds["max"] <= goal,
        "single runs": found,
    }


def main() -> None:
    """Measure all kinds with both vendors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--vendors", nargs="+", default=list(mpi_vendors.VENDORS))
    parser.add_argument("--deeds", nargs="+", default=list(DEEDS))
    options = parser.parse_args()
    for why_not in (network_hosts.why_not(), *map(mpi_vendors.why_not, options.vendors)):
        if why_not:
            sys.exit(f"failures_mpi.py: {why_not}")
    about = machine()
    rows = [measured(vendor, deed, options.runs) for vendor in options.vendors for deed in options.deeds]
    if options.runs == RUNS:
        record(RESULTS, about, timeout_seconds=TIMEOUT, cases=rows)


if __name__ == "__main__":
    main()
