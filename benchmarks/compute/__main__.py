"""Compute within a step against JAX and torch, in one run.

`python -m benchmarks.compute [--case gelu,gpt] [--quick]`.

Each side is a process of its own with one thread, on the same core; the rounds alternate between all. "numpy" and "fused" are
funccoll with FUNCCOLL_FUSE=0 and 1. Results are compared before times count. The first call's caches on disk are empty, and
imports are apart. Writes benchmarks/results/compute.json (cases that are not measured stay) and its table in docs/benchmarks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compute.cases import CASES, GOALS, TORCH_GOALS, Case
from benchmarks.measure import OtherProcesses, machine, record
from benchmarks.programs.language import Process, children_seconds, figures
from benchmarks.rank import rank_words
from funccoll import config

RESULTS = Path(__file__).parents[1] / "results" / "compute.json"
SIDE = rank_words("benchmarks.compute.side")
CALL_SECONDS = 0.08
"""The calls of a round, in seconds."""
PAIRS, ROUNDS = 3, 5
"""Processes of each side, one after the other, and the rounds of each."""
OURS = ("numpy", "fused")


def sides_of(case: Case, first_pair: bool) -> list[str]:
    """What measures a case. torch is there once, for it takes long to start."""
    sides = [*OURS, "jax"] if "FUNCCOLL_FUSE" in config.VARIABLES else ["fused", "jax"]  # without a switch it always fuses
    if first_pair and _installed("torch"):
        sides += ["torch"] * case.torch + ["torch.compile"] * case.compile_torch
    return sides


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


@contextmanager
def _processes(name: str, sides: Sequence[str]) -> Iterator[dict[str, Process]]:
    """A process for each side, with caches on disk that are empty and are removed."""
    with tempfile.TemporaryDirectory(prefix="funccoll-compute-") as folder:
        started: dict[str, Process] = {}
        try:
            for side in sides:
                cache = Path(folder) / side
                cache.mkdir(mode=0o700)
                environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "NUMBA_CACHE_DIR": str(cache)}
                environment |= {"XDG_CACHE_HOME": str(cache)}
                if side in OURS:
                    environment["FUNCCOLL_FUSE"] = str(OURS.index(side))
                if CASES[name].double:
                    environment["JAX_ENABLE_X64"] = "1"
                started[side] = Process([*SIDE, side, name], environment)
                started[side].answer()  # the next one starts alone
            yield started
        finally:
            for process in started.values():
                process.close()


def differs(case: Case, found: Path, wanted: Path) -> None:
    """Raise an AssertionError if two sides' results are too far apart."""
    with np.load(found) as mine, np.load(wanted) as theirs:
        assert len(mine.files) == len(theirs.files), (found.stem, mine.files, theirs.files)
        for name in mine.files:
            a, b = (x[name].astype(np.float64) for x in (mine, theirs))
            if case.random:
                a, b = np.abs(a).sum(), np.abs(b).sum()
            scale = max(float(np.abs(b).max()), 1e-30)
            np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=case.rtol, err_msg=f"{found.stem}: {case.name}")


def _check(case: Case, processes: Mapping[str, Process]) -> None:
    with tempfile.TemporaryDirectory(prefix="funccoll-compute-") as folder:
        files = {side: Path(folder) / f"{side}.npz" for side in processes}
        for side, process in processes.items():
            process.ask("check", files[side])
        for file in files.values():
            differs(case, file, files["jax"])


def measure(name: str, pairs: int = PAIRS, rounds: int = ROUNDS) -> dict[str, Any]:
    """The row of a case. One in which a process ends or results differ has failed."""
    try:
        return _measured(name, pairs, rounds)
    except (RuntimeError, AssertionError) as error:
        print(f"{CASES[name].name:<56} FAILED: {error}", flush=True)
        reason = "a process has ended" if isinstance(error, RuntimeError) else "results differ"
        return {"name": CASES[name].name, "goal": CASES[name].goal, "met": False, "failed": reason}


def _measured(name: str, pairs: int, rounds: int) -> dict[str, Any]:
    case = CASES[name]
    kinds = ("run", "first", "peak")
    found: dict[str, dict[str, list[float]]] = {side: {k: [] for k in kinds} for side in sides_of(case, True)}
    left_out: list[str] = []
    before = children_seconds()
    with OtherProcesses() as others:
        for pair in range(pairs):
            with _processes(name, sides_of(case, pair == 0)) as processes:
                times = {}
                for side, process in list(processes.items()):
                    try:
                        found[side]["first"].append(process.ask("first"))
                    except RuntimeError:
                        if not side.startswith("torch"):
                            raise
                        print(f"{case.name}: {side} has failed, and is left out", flush=True)
                        left_out.append(side)
                        del found[side]
                        processes.pop(side).close()
                        continue
                    times[side] = max(1, round(CALL_SECONDS / process.ask("run", 3)))
                    found[side]["peak"].append(process.ask("peak"))
                if pair == 0:
                    _check(case, processes)
                for number in range(rounds):
                    order = list(processes.items())
                    for side, process in order if number % 2 else reversed(order):
                        found[side]["run"].append(process.ask("run", times[side]))
    sides = {side: {kind: figures(values[kind]) for kind in kinds} for side, values in found.items()}
    return row(name, found, sides, others.rate(children_seconds() - before)) | ({"left_out": left_out} if left_out else {})


def row(name: str, found: Mapping[str, Mapping[str, Sequence[float]]], sides: Any, others: float) -> dict[str, Any]:
    """What is recorded of a case: the sides, ours over JAX's round by round, and whether the goal is met."""
    case, mine = CASES[name], [side for side in OURS if side in found]
    ratios = {s: figures([a / b for a, b in zip(found[s]["run"], found["jax"]["run"], strict=True)]) for s in mine}
    ratio = ratios["fused"]["median"]
    met = None if case.goal is None else ratio <= case.goal
    if name in TORCH_GOALS and "torch" in sides:
        met = bool(met) and sides["fused"]["run"]["median"] <= TORCH_GOALS[name] * sides["torch"]["run"]["median"]
    said = "  ".join(f"{side} {sides[side]['run']['median'] * 1e3:8.3f}" for side in sides)
    verdict = {None: "", True: "met", False: "MISSED"}[met]
    first = sides["fused"]["first"]["median"], sides["jax"]["first"]["median"]
    print(f"{case.name:<56} {ratio:5.2f} {verdict:<6} ms: {said}; first {first[0]:.3f} JAX {first[1]:.3f}", flush=True)
    return {"name": case.name, "goal": case.goal, "met": met, "sides": sides, "times_jax": ratios, "others": others}


def means(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """For each of ours the geometric means of its ratios to JAX: of calls, of first calls, of memory."""

    def least(figure: Mapping[str, float], kind: str) -> float:
        return max(figure["median"], 1.0) if kind == "peak" else figure["median"]  # below a MiB is noise

    found = {}
    for side in OURS:
        rows = [row["sides"] for row in cases.values() if side in row.get("sides", ())]
        if rows:
            found[side] = {
                kind: math.exp(
                    sum(math.log(least(r[side][kind], kind) / least(r["jax"][kind], kind)) for r in rows) / len(rows)
                )
                for kind in GOALS
            }
    return found


def main(arguments: Sequence[str]) -> None:
    """Measure, write the JSON, refresh the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compute", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="one process of each side, and two rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    names = options.case.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"{', '.join(unknown)}: they are not cases. The cases are {', '.join(CASES)}.")
    about = machine()
    about["versions"] |= {p: importlib.metadata.version(p) for p in ("torch", "llvmlite") if _installed(p)}
    cases = json.loads(options.out.read_text())["cases"] if options.out.exists() else {}
    for name in names:
        load = os.getloadavg()[0]
        cases[name] = measure(name, *((1, 2) if options.quick else ())) | {"commit": about["commit"], "load": load}
    cases = {name: cases[name] for name in CASES if name in cases}
    record(options.out, about, cases=cases, means=means(cases), goals=GOALS, torch_goals=TORCH_GOALS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
