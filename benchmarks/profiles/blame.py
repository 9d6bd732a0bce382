"""Blame of a late rank: is it named in profiles of random programs, and is none named where none is late?

4 processes, over a 2 x 2 mesh, run random programs of collectives (kinds, algorithms, axes, from 64 bytes to 1 MiB for each
device) that compute in between. In every second run one rank is 200 ms late at a random collective: asleep before the call,
computing before it, or asleep in the middle of it. Each run is recorded, and read by the command `funccoll profile`. Goals: the
late rank is named in 95 of 100 runs, and no rank in 95 of 100 without a delay. Writes results/blame.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.measure import OtherProcesses, extremes, machine, record

RESULTS = Path(__file__).parents[1] / "results" / "blame.json"
RANKS, DELAY, GOAL = 4, 0.2, 0.95
WAYS = ("asleep before a call", "computing before a call", "asleep in the middle of a call")
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
BATCH = 10
"""Runs in one job: starting processes takes longer than a run."""


def program(mesh: Any, seed: int) -> list[tuple[Any, Any]]:
    """(compiled function, its argument) of each call of a random program; the same on all ranks."""
    import numpy as np

    import funccoll as fc
    from funccoll import schedules

    rng = random.Random(seed)
    everywhere = fc.P(mesh.axis_names)

    def collective(x: Any) -> Any:
        axis: Any = rng.choice(["a", "b", ("a", "b")])
        p = 4 if isinstance(axis, tuple) else 2
        kind = rng.choice(KINDS)
        if kind == "barrier":
            fc.barrier(axis)
            return x
        algorithm = rng.choice([None, None, *schedules.algorithms(kind, p)])
        options: dict[str, Any] = {"algorithm": algorithm}
        if kind == "all_to_all":
            options |= {"split_dim": 0, "concat_dim": 0}
        if kind == "permute":
            options["pairs"] = [(i, (i + 1) % p) for i in range(p)]
        if kind in ("broadcast", "reduce", "gather", "scatter"):
            options["root"] = rng.randrange(p)
        y = getattr(fc, kind)(x, axis, **options)
        return y[: x.shape[0]] if y.shape[0] >= x.shape[0] else np.concatenate([y] * (x.shape[0] // y.shape[0]))

    found = []
    for _ in range(rng.randint(4, 8)):
        count, elements = rng.randint(1, 3), 16 * int(2 ** rng.uniform(0, 14))

        def step(x: Any, count: int = count) -> Any:
            for _ in range(count):
                x = fc.pvary(collective(x * np.float32(0.5) + np.float32(1)), ("a", "b"))
            return x

        x = np.ones(RANKS * elements, np.float32)
        compiled = fc.jit(step, mesh=mesh, in_specs=everywhere, out_specs=everywhere).lower(x).compile()
        found.append((compiled, fc.device_put(x, mesh, everywhere) if rng.random() < 0.5 else x))
    return [rng.choice(found) for _ in range(rng.randint(10, 30))]


def late(call: Any, way: str) -> None:
    """Execute `call() -> group calls of a compiled function`, 200 ms late in some way."""
    from funccoll.kernels.kernel_context import WORD
    from funccoll.transports.shm.shared_memory_executable import SharedMemoryExecutable

    compiled, x = call
    executables = [executable for executable in compiled.group_calls if isinstance(executable, SharedMemoryExecutable)]
    if way == WAYS[2]:
        executable = random.choice(executables)
        executable.context[WORD.instruction_budget] = random.randrange(len(list(executable.plan.text().splitlines())))

        def spent() -> None:
            time.sleep(DELAY)
            executable.context[WORD.instruction_budget] = -1

        executable._budget_spent = spent
    elif way == WAYS[1]:
        end = time.thread_time() + DELAY
        while time.thread_time() < end:
            sum(range(100))
    else:
        time.sleep(DELAY)
    compiled(x)


def job(runs: list[tuple[int, str, int | None]], directory: str) -> None:
    """One rank's part of several runs: (seed, way, late rank) of each."""
    import funccoll as fc

    mesh = fc.make_mesh({"a": 2, "b": 2})
    for seed, way, rank in runs:
        calls = program(mesh, seed)
        for compiled, x in calls:
            compiled(x)
        random.seed(seed)
        where = random.randrange(len(calls))
        with fc.profile(f"{directory}/{seed}"):
            for i, (compiled, x) in enumerate(calls):
                if i == where and rank == fc.rank():
                    late((compiled, x), way)
                else:
                    compiled(x)


def read(directory: str) -> dict[str, Any]:
    """What the command prints of a profile."""
    from funccoll.tools.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["profile", directory, "--json"]) == 0
    return json.loads(printed.getvalue())


def measure(runs: list[tuple[int, str, int | None]], keep: str | None) -> list[dict[str, Any]]:
    """The outcome of each run; profiles of those that went wrong are copied to `keep`."""
    import numpy as np

    import funccoll as fc

    found = []
    with tempfile.TemporaryDirectory() as directory:
        begin, others = time.monotonic(), OtherProcesses()
        with others:
            spent = os.times()
            fc.launch(job, RANKS, runs, directory, timeout=600)
            spent_by_us = sum(os.times()[:4]) - sum(spent[:4])
        for seed, way, rank in runs:
            told = read(f"{directory}/{seed}")
            if told["named"] != rank and keep:
                shutil.copytree(f"{directory}/{seed}", f"{keep}/{seed}")
            totals = np.array(told["caused"]).sum(axis=0)
            found.append(
                {
                    "seed": seed,
                    "way": way if rank is not None else "",
                    "late": rank,
                    "named": told["named"],
                    "caused_ms": [round(1e3 * t, 1) for t in totals.tolist()],
                    "machine_ms": round(1e3 * told["machine"], 1),
                    "seconds": round(told["seconds"], 3),
                    "causes": told["causes"][:3],
                }
            )
        seconds, rate = time.monotonic() - begin, others.rate(spent_by_us)
        print(f"{len(runs)} runs in {seconds:.1f} s; other processes took {rate:.2f} cores", file=sys.stderr)
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="with a delay, and as many without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--keep", metavar="DIRECTORY", help="where to keep the profiles of runs that went wrong")
    options = parser.parse_args()
    about, rng = machine(), random.Random(options.seed)
    runs: list[tuple[int, str, int | None]] = []
    for i in range(options.runs):
        runs.append((1000 * options.seed + 2 * i, WAYS[i % len(WAYS)], rng.randrange(RANKS)))
        runs.append((1000 * options.seed + 2 * i + 1, "", None))
    begin = time.monotonic()
    found = [outcome for i in range(0, len(runs), BATCH) for outcome in measure(runs[i : i + BATCH], options.keep)]
    seconds = time.monotonic() - begin
    delayed = [o for o in found if o["late"] is not None]
    plain = [o for o in found if o["late"] is None]
    right = {
        "named the late rank": sum(o["named"] == o["late"] for o in delayed),
        "named none without a delay": sum(o["named"] is None for o in plain),
    }
    wrong = [o for o in found if o["named"] != o["late"]]
    ways = {
        way: [sum(o["named"] == o["late"] for o in delayed if o["way"] == way), sum(o["way"] == way for o in delayed)]
        for way in WAYS
    }
    goal = min(right.values()) >= GOAL * options.runs
    for outcome in wrong:
        print(json.dumps(outcome))
    print(f"{right} of {options.runs} each; by way: {ways}; {seconds:.0f} s; goal {'met' if goal else 'MISSED'}")
    if options.dry:
        return
    record(
        RESULTS,
        about,
        ranks=RANKS,
        delay_s=DELAY,
        runs=options.runs,
        right=right,
        ways=ways,
        goal=GOAL,
        met=goal,
        seconds=round(seconds, 1),
        machine_ms=extremes([o["machine_ms"] for o in found]),
        profile_seconds=extremes([o["seconds"] for o in found]),
        wrong=wrong,
        most_caused_without_delay_ms=extremes([max(o["caused_ms"]) for o in plain]),
        named_as=dict(Counter(str(o["named"]) for o in plain)),
    )


if __name__ == "__main__":
    main()
