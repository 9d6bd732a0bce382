"""Time from a failure in one rank to the exception in every other rank.

Real processes, which step through collectives over two axes of a mesh (the cases of failure_cases.py). Each kind of
failure happens ten times, in each rank in turn. Writes benchmarks/results/failures.json.

`--attack --seed N` attacks running jobs instead, as the seed says (attacks.py), and adds its counts to that file.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import extremes, machine, record

ROOT = Path(__file__).parents[2]

from tests.support.ranks.failure_jobs import Job, Server

RESULTS = Path(__file__).parents[1] / "results" / "failures.json"
ROUNDS = 10
GOAL = 1.0
TIMEOUT = 1.0
# Failure: (case, its arguments, the event that the rank reports when it happens, the exceptions that others may get).
KINDS: dict[str, tuple[str, dict[str, Any], str, set[str]]] = {
    "kill -9 at an instruction": ("kill", {}, "dies", {"PeerFailure"}),
    "kill -9 in the backward pass": ("kill", {"step": "backward"}, "dies", {"PeerFailure"}),
    "kill -9 between collectives": ("failing", {"deed": "die"}, "does", {"PeerFailure"}),
    "exit without a word": ("failing", {"deed": "vanish"}, "does", {"PeerFailure"}),
    "an exception": ("failing", {"deed": "raise"}, "does", {"PeerFailure"}),
    "a clean exit": ("failing", {"deed": "leave"}, "does", {"PeerFailure"}),
    "Ctrl-C in a wait": ("interrupted", {"caught": False}, "", {"PeerFailure"}),
    "another collective": ("mismatch", {"change": "collective"}, "does", {"ProgramMismatch", "PeerFailure"}),
    "another shape": ("mismatch", {"change": "shape"}, "does", {"ProgramMismatch", "PeerFailure"}),
    "stopped, after the timeout": ("failing", {"deed": "stop"}, "does", {"CollectiveTimeout", "PeerFailure"}),
}


def once(server: Server, folder: Path, kind: str, n: int, number: int) -> list[float]:
    """Seconds until each other rank was told, in one job."""
    case, arguments, event, exceptions = KINDS[kind]
    culprit = number % n
    if case == "kill":
        arguments = {"victim": culprit, "where": random.Random(number).random(), **arguments}
    elif case == "failing":
        arguments = {"culprits": [culprit], **arguments}
    elif case == "mismatch":
        arguments = {"culprit": culprit, **arguments}
    else:
        arguments = {"holder": (culprit + 1) % n, **arguments}
    stops = arguments.get("deed") == "stop"
    others = set(range(n)) - {culprit}
    with Job(server, folder, case, n, {"FUNCCOLL_TIMEOUT": str(TIMEOUT)} if stops else {}, **arguments) as job:
        job.start()
        if case == "interrupted":
            others -= {arguments["holder"]}
            for rank in range(n):
                job.hear(rank, "ready")
            time.sleep(0.3)  # by now they wait
            began = time.monotonic()
            job.kill(culprit, 2)
            others |= {culprit}  # it is told as well
        else:
            began = job.hear(culprit, event)["at"]
        errors = {rank: job.hear(rank, "error") for rank in others}
        assert all(error["kind"] in {*exceptions, "KeyboardInterrupt"} for error in errors.values()), errors
    return [error["at"] - began - TIMEOUT * stops for error in errors.values()]


def attack(seed: int, jobs: int, clashes: int) -> None:
    """Attack running jobs, and record what happened; a failure ends it."""
    from benchmarks.failures.attacks import attack_jobs, clash_jobs

    about, began = machine(), time.monotonic()
    found = {"seed": seed, "jobs": attack_jobs(seed, jobs), "clashing pairs": clashes, "clashes": clash_jobs(seed, clashes)}
    found |= {"wrong": 0, "hangs": 0, "left behind": 0, "seconds": round(time.monotonic() - began), "machine": about}
    known = json.loads(RESULTS.read_text())
    known["attacks"] = [*(a for a in known.get("attacks", []) if a["seed"] != seed), found]
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{jobs} jobs and {clashes} pairs: nothing wrong, no hang, nothing left behind")


def main() -> None:
    """Measure all kinds, with 2 and 4 ranks, or attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attack", action="store_true", help="attack running jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--clashes", type=int, default=20)
    options = parser.parse_args()
    if options.attack:
        return attack(options.seed, options.jobs, options.clashes)
    about, rows = machine(), []
    with tempfile.TemporaryDirectory() as folder, Server() as server:
        for kind in KINDS:
            for n in (2, 4):
                once(server, Path(folder), kind, n, 0)  # loads what it needs
                seconds = [s for number in range(ROUNDS) for s in once(server, Path(folder), kind, n, number)]
                found = extremes(seconds)
                rows.append(
                    {
                        "kind": kind,
                        "ranks": n,
                        "events": ROUNDS,
                        "told": len(seconds),
                        "seconds": found,
                        "goal": f"≤ {GOAL:g} s",
                        "met": found["max"] <= GOAL,
                    }
                )
                print(f"{kind:<28} {n} ranks  median {found['median']:6.3f} s  max {found['max']:6.3f} s", flush=True)
    attacks = json.loads(RESULTS.read_text()).get("attacks", []) if RESULTS.exists() else []
    record(RESULTS, about, timeout_seconds=TIMEOUT, cases=rows, attacks=attacks)


if __name__ == "__main__":
    main()
