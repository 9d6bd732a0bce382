"""Two checkouts of funccoll side by side: a refactoring must cost nothing. `python checkouts.py OLD_PYTHON NEW_PYTHON`.

Each is an interpreter whose environment has one of the checkouts installed (`pip install -e`). All cases of `host.py` on
2 processes take turns between them, and so do the training steps of `ddp.py`, virtual devices, compilation, import and first
calls; the bits of every collective are compared, and losses and parameters of the training. Writes results/checkouts.json,
with the ratio new / old of each case.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rank import rank_words

if TYPE_CHECKING:
    from benchmarks.one_host.host_jobs import Job

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "checkouts.json"
TURN_SECONDS = 0.02
ROUNDS = 11
MEANS = {"host": 1.01, "training": 1.02, "first call": 1.05, "import": 1.05}
"""Upper bounds of new / old, for the geometric mean of each group of cases."""
CASE = 1.05
"""The upper bound of a single case."""


def checkout_of(python: str) -> Path:
    """The checkout that an interpreter's funccoll is in."""
    code = "import funccoll; print(funccoll.__file__)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return Path(found).parents[1]


# ---------------------------------------------------------------- roles: what runs in a checkout's interpreter


def solo() -> dict[str, float]:
    """Seconds of what one process does, by name."""
    begin = time.perf_counter()
    import numpy as np

    begin_ours = time.perf_counter()
    import funccoll as fc

    _ = fc.jit
    found = {"import beyond numpy": time.perf_counter() - begin_ours, "import with numpy": time.perf_counter() - begin}
    mesh, every = fc.make_mesh({"d": 8}), fc.P("d")
    for nbytes in (4, 4096, 1 << 20):
        x = fc.device_put(np.ones(8 * nbytes // 4, np.float32), mesh, every)
        step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=every, out_specs=fc.P())
        begin = time.perf_counter()
        step(x)
        found[f"first call on virtual devices, {nbytes} B"] = time.perf_counter() - begin
        found[f"virtual devices, all_reduce {nbytes} B"] = _repeated(lambda step=step, x=x: step(x))

    def many(x: Any) -> Any:
        for _ in range(250):
            x = np.tanh(x) * 0.5 + x - 1.0
        return fc.all_reduce(np.sum(x), "d")

    x = np.ones((8, 4), np.float32)
    begin = time.perf_counter()
    fc.jit(many, mesh=mesh, in_specs=every, out_specs=fc.P()).lower(x).compile()
    found["trace and compile 1,000 equations"] = time.perf_counter() - begin

    def train(w: Any, batch: Any) -> Any:
        loss = lambda w: fc.all_reduce(np.mean((np.tanh(batch @ w) - 1) ** 2), "d", op="mean")
        value, gradient = fc.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    step = fc.jit(train, mesh=mesh, in_specs=(fc.P(), every), out_specs=fc.P())
    w, batch = np.zeros((16, 4), np.float32), np.ones((64, 16), np.float32)
    step(w, batch)
    found["virtual devices, training step"] = _repeated(lambda: step(w, batch))
    return found


def _repeated(call: Callable[[], Any]) -> float:
    call()
    times, took = 1, 0.0
    while took < TURN_SECONDS:
        times *= 2
        begin = time.perf_counter()
        for _ in range(times):
            call()
        took = time.perf_counter() - begin
    return took / times


def bits() -> dict[str, str]:
    """A hash of this process's results of every collective, dtype and op, by case; alone or as a rank of a job."""
    import numpy as np

    import funccoll as fc
    from tests.support.cases.collective_cases import CASES, dtypes_of, sample
    from tests.support.spmd import axis_choices, per_device, size

    n = fc.world_size()
    found = {}
    for axes in [{"d": 2}, {"d": 4}, {"a": 2, "b": 2}] if n == 1 else [{"d": n}]:
        mesh = fc.make_mesh(axes)
        for over, case in itertools.product(axis_choices(mesh), CASES.values()):
            p, axis = size(mesh, over), over[0] if len(over) == 1 else over
            rng = np.random.default_rng(p)
            blocks = [sample(dtype, (mesh.size, *case.shape(p)), rng) for dtype in dtypes_of(case)]
            step = per_device(mesh, lambda *xs, case=case, axis=axis, p=p: tuple(case.call(x, axis, p) for x in xs))
            digest = hashlib.sha256()
            try:
                results = step(*blocks)
            except AttributeError:  # an older checkout lacks the collective
                continue
            for result in results:
                for shard in result.shards:
                    digest.update(np.ascontiguousarray(shard).tobytes())
            found[f"{axes} {over} {case.name}"] = digest.hexdigest()
    return found


# ---------------------------------------------------------------- measuring


def ask(python: str, role: str, *launcher: str) -> Any:
    """Run a role in an interpreter and return what it prints (JSON); of a job, what rank 0 prints."""
    command = [python, *launcher, *([python] if launcher else []), *rank_words("benchmarks.one_host.checkouts"), "--role", role]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{role} failed in {python}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if "{" in line and (not launcher or line.startswith("[0]"))]
    return json.loads(lines[-1][lines[-1].index("{") :])


def started(stack: ExitStack, pythons: dict[str, str], ranks: int, module: str) -> dict[str, Job]:
    """A job of each checkout, whose ranks execute the module's commands."""
    from benchmarks.one_host.host_jobs import Job

    jobs = {}
    for name, python in pythons.items():
        launcher = [python, "-m", "funccoll", "run", "-n", str(ranks), "--bind-to", "core", "--"]
        jobs[name] = stack.enter_context(Job(name, ranks, launcher, ["ours"], python, rank_words(module, checkout_of(python))))
    return jobs


def training_rows(pythons: dict[str, str], rounds: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The training steps of `ddp.py` on both checkouts in turns, and in how many of them losses and parameters are equal."""
    from benchmarks.training.ddp import CHECKED_STEPS, NETWORKS, OURS, RANKS

    rows, equal = [], 0
    with ExitStack() as stack:
        jobs = started(stack, pythons, RANKS, "benchmarks.training.ddp_rank")
        for network, way in itertools.product(NETWORKS, OURS):
            for job in jobs.values():
                job.all("prepare", network, {way: OURS[way]})
            old, new = (job.all("check", way, CHECKED_STEPS) for job in jobs.values())
            equal += old == new
            took = min(median for job in jobs.values() for median, *_ in job.all("measure", way, 3))
            times = max(2, int(5 * TURN_SECONDS / took))
            turns: dict[str, list[float]] = {name: [] for name in jobs}
            for number in range(rounds):
                for name in list(jobs) if number % 2 else list(jobs)[::-1]:
                    turns[name].append(max(median for median, *_ in jobs[name].all("measure", way, times)))
            rows.append(row(f"training {network}, {way}", turns))
    return rows, {"cases": len(rows), "equal": equal}


def host_rows(pythons: dict[str, str], rounds: int, ranks: int) -> list[dict[str, Any]]:
    """Every case of `host.py`, on both checkouts in turns."""
    from benchmarks.one_host.host_cases import STEP, Case, cases
    from benchmarks.one_host.host_jobs import RANK

    rows = []
    with ExitStack() as stack:
        jobs = started(stack, pythons, ranks, RANK)
        for case in [*cases(ranks), Case(STEP, 1024)]:
            ways = [job.prepare(case) for job in jobs.values()]
            for way in ways[0]:
                times = {}
                for name, job in jobs.items():
                    took = min(max(sum(job.measure(way, 3)), 1e-8) for _ in range(3))
                    times[name] = max(1, int(TURN_SECONDS / took))
                count = min(times.values())
                turns: dict[str, list[float]] = {name: [] for name in jobs}
                for number in range(rounds):
                    for name in list(jobs) if number % 2 else list(jobs)[::-1]:
                        turns[name].append(jobs[name].measure(way, count)[0])
                rows.append(row(f"host, {way} {case.kind} {case.nbytes} B, {ranks} ranks", turns))
    return rows


def row(name: str, turns: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the ratio new / old of the turns beside each other: median and quartiles."""
    ratios = [new / old for old, new in zip(turns["old"], turns["new"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    medians = {f"{name}_us": statistics.median(values) * 1e6 for name, values in turns.items()}
    return {"case": name, **medians, "ratio": median, "q1": low, "q3": high}


def solo_rows(pythons: dict[str, str], rounds: int) -> list[dict[str, Any]]:
    """Rows of what one process does, and of the start of a job, in turns."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for name in list(pythons) if number % 2 else list(pythons)[::-1]:
            took = ask(pythons[name], "solo")
            begin = time.perf_counter()
            first = ask(pythons[name], "start", "-m", "funccoll", "run", "-n", "2", "--")
            took["start of 2 processes to their end"] = time.perf_counter() - begin
            for what, seconds in {**took, **first}.items():
                found.setdefault(what, {"old": [], "new": []})[name].append(seconds)
    return [row(what, turns) for what, turns in found.items()]


def start() -> dict[str, float]:
    """Seconds of a job's first collective."""
    import numpy as np

    import funccoll as fc

    mesh = fc.make_mesh({"d": fc.world_size()})
    x = fc.from_local(np.ones(1024, np.float32), mesh, fc.P("d"))
    begin = time.perf_counter()
    fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=fc.P("d"), out_specs=fc.P())(x)
    return {"first call of 2 processes, 4096 B each": time.perf_counter() - begin}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*", help="the interpreters of the old and of the new checkout")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--role", choices=("solo", "bits", "start"))
    options = parser.parse_args()
    if options.role:
        print(json.dumps({"solo": solo, "bits": bits, "start": start}[options.role]()))
        return
    from benchmarks.measure import machine, record

    about = machine()
    os.chdir("/")  # `python -m` and `-c` import from the current directory first
    pythons: dict[str, str] = dict(zip(("old", "new"), options.pythons, strict=True))
    about["checkouts"] = {
        name: subprocess.run(
            ["git", "-C", checkout_of(python), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name, python in pythons.items()
    }
    job = ("-m", "funccoll", "run", "-n", "2", "--")
    same = {}
    for what, launcher in (("virtual devices", ()), ("2 processes, rank 0's", job)):
        old, new = (ask(python, "bits", *launcher) for python in pythons.values())
        same[what] = {"cases": len(old), "equal": sum(new.get(case) == digest for case, digest in old.items())}
    trained, same["training, losses and parameters"] = training_rows(pythons, options.rounds)
    rows = [*solo_rows(pythons, options.rounds), *trained, *host_rows(pythons, options.rounds, options.ranks)]
    means = {
        group: {"ratio": statistics.geometric_mean(r["ratio"] for r in rows if r["case"].startswith(group)), "at most": most}
        for group, most in MEANS.items()
    }
    slower = [r["case"] for r in rows if r["q1"] > CASE]
    for r in rows:
        print(f"{r['ratio']:6.3f} ({r['q1']:.3f} to {r['q3']:.3f})  {r['old_us']:12.2f} {r['new_us']:12.2f} µs  {r['case']}")
    for group, mean in means.items():
        print(f"{group}: geometric mean {mean['ratio']:.3f}, at most {mean['at most']}")
    print(f"spread excludes {CASE}: {slower or 'none'}; {same}")
    record(RESULTS, about, bits=same, geometric_means=means, slower=slower, cases=rows)


if __name__ == "__main__":
    main()
