"""The cost of making schedules: build, prove, lower, verify and simulate, each measured separately. `make bench`.

Every case runs in a fresh process, so that its peak memory is its own, and several times over; the simulator's
machine code is in Numba's cache already (what compiling and loading it takes is measured too). No other library makes
schedules of these sizes: the figures of msccl-tools and LogGOPSim are those that the project's issue quotes, not
measured here. Writes benchmarks/results/schedules.json.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import extremes, machine, record
from benchmarks.rank import rank_words

RESULTS = Path(__file__).parents[1] / "results" / "schedules.json"
STAGES = ("build", "prove", "lower", "verify", "simulate")
NBYTES = 1 << 24
CASES: list[tuple[str, int, str, tuple[str, ...], int, dict[str, Any]]] = [
    # kind, p, algorithm, stages, rounds, goal
    ("all_reduce", 8, "two_shot", STAGES, 11, {}),
    ("all_reduce", 64, "two_shot", STAGES, 11, {}),
    ("all_reduce", 128, "ring", STAGES, 7, {}),
    ("all_reduce", 256, "ring", STAGES, 5, {"seconds": 5.0, "of": STAGES, "text": "all together ≤ 5 s"}),
    (
        "all_reduce",
        1024,
        "ring",
        ("build", "prove", "lower", "simulate"),
        5,
        {"seconds": 5.0, "of": ("build", "lower", "simulate"), "text": "build, lower and simulate ≤ 5 s"},
    ),
    ("all_reduce", 4096, "ring", ("build", "prove", "lower", "simulate"), 1, {"gib": 8.0, "text": "within 8 GiB"}),
    ("all_reduce", 16384, "recursive_doubling", STAGES, 5, {"text": "p = 16,384"}),
    ("all_reduce", 1024, "rabenseifner", STAGES, 5, {}),
    ("all_reduce", 1000, "circulant", ("build", "prove", "lower", "simulate"), 3, {}),
    ("all_reduce", 1024, "hierarchical", ("build", "prove", "lower", "simulate"), 3, {}),
    ("all_to_all", 256, "bruck", STAGES, 3, {}),
    ("broadcast", 1024, "double_binary_tree", STAGES, 5, {}),
]


def child(kind: str, p: int, algorithm: str, stages: list[str], rounds: int) -> dict[str, Any]:
    """Measure one case, in this process."""
    from funccoll import schedules

    topology = schedules.Topology.one_host(p)
    small = schedules.build("barrier", 2)  # loads the simulator's machine code
    start = time.perf_counter()
    small.simulate(schedules.Topology.one_host(2), 0)
    load = time.perf_counter() - start
    seconds: dict[str, list[float]] = {stage: [] for stage in stages}
    facts: dict[str, Any] = {}
    for _ in range(rounds):
        facts.clear()
        schedule = None
        for stage in stages:
            start = time.perf_counter()
            if stage == "build":
                schedule = schedules.build(kind, p, algorithm)
            elif stage == "prove":
                schedule.prove()
            elif stage == "lower":
                facts["waits"] = len(schedule.streams().wait_stream)  # proved already
            elif stage == "verify":
                schedule.streams().verify()
            else:
                facts["simulated_seconds"] = schedule.simulate(topology, NBYTES).seconds
            seconds[stage].append(time.perf_counter() - start)
        facts["instructions"] = len(schedule.streams())
    return {
        "seconds": seconds,
        "load_seconds": load,
        **facts,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def run(*arguments: Any, cache: str | None = None) -> Any:
    """Run this file in a process of its own; return the JSON that it prints."""
    environment = {**os.environ, **({"NUMBA_CACHE_DIR": cache} if cache else {})}
    command = [sys.executable, *rank_words("benchmarks.cost_model.schedules"), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def row(kind: str, p: int, algorithm: str, stages: tuple[str, ...], rounds: int, goal: dict[str, Any]) -> dict[str, Any]:
    """Measure one case, print it, and return its row of the results."""
    found = run("child", kind, p, algorithm, ",".join(stages), rounds)
    median = {stage: statistics.median(times) for stage, times in found["seconds"].items()}
    met = None
    if "seconds" in goal:
        met = sum(median[s] for s in goal["of"]) <= goal["seconds"]
    elif goal:
        met = found["peak_gib"] <= goal.get("gib", 8.0)
    times = "  ".join(f"{s} {median[s]:8.4f}" if s in median else " " * (len(s) + 9) for s in STAGES)
    verdict = {None: "", True: "met: ", False: "MISSED: "}[met] + goal.get("text", "")
    print(f"{kind:<11} {algorithm:<19} p={p:<6} {times}  {found['peak_gib']:5.2f} GiB  {verdict}", flush=True)
    spread = {stage: extremes(times) for stage, times in found["seconds"].items()}
    facts = {k: found.get(k) for k in ("instructions", "waits", "simulated_seconds", "peak_gib", "load_seconds")}
    return {
        "kind": kind,
        "nranks": p,
        "algorithm": algorithm,
        "rounds": rounds,
        "seconds": spread,
        **facts,
        "goal": goal.get("text", ""),
        "met": met,
    }


def compile_seconds() -> dict[str, float]:
    """The first simulation with an empty cache of machine code, and with a full one, in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        cold = run("child", "all_reduce", 4, "ring", "build", 1, cache=folder)["load_seconds"]
        warm = [run("child", "all_reduce", 4, "ring", "build", 1, cache=folder)["load_seconds"] for _ in range(5)]
    return {"cold": cold, "warm": statistics.median(warm)}


def main() -> None:
    """Measure all cases, and write the results."""
    about = machine()
    print("seconds, medians")
    first = compile_seconds()
    print(f"first simulation: {first['cold']:.1f} s to compile (once per machine), {first['warm']:.2f} s to load")
    rows = [row(*case) for case in CASES]
    quoted = {
        "msccl-tools": "builds ring at p = 128 in 110 s, fails at 256",
        "LogGOPSim": "simulates ring at p = 1,024 in 3.7 s",
        "note": "quoted from the project's issue, not measured in this run",
    }
    record(RESULTS, about, first_simulation=first, cases=rows, quoted=quoted)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _, _, kind, p, algorithm, stages, rounds = sys.argv
        print(json.dumps(child(kind, int(p), algorithm, stages.split(","), int(rounds))))
    else:
        main()
