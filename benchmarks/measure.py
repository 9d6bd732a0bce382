"""Measuring side by side: two contenders alternate in rounds, so that a drift of the machine meets both."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_tables import refresh

ROUNDS = 11
ROUND_SECONDS = 0.05


def machine() -> dict[str, Any]:
    """The machine, the versions and the load that numbers are measured with."""
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "")
    versions = {}
    for package in ("numpy", "numba", "jax", "jaxlib", "optree", "ml_dtypes"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "funccoll") else ""),
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "as many as cores"),
        "load_before": os.getloadavg(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], capture_output=True, text=True, check=False).stdout.strip()


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, in microseconds."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"median_us": median * 1e6, "q1_us": low * 1e6, "q3_us": high * 1e6}


def extremes(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, of ratios."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high}


def _round(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def compare(ours: Callable[[], Any], peer: Callable[[], Any], once: bool = False) -> dict[str, Any]:
    """Alternate the two for `ROUNDS` rounds; `ratio` is the peer's time over ours, round by round.

    Each round repeats the call for about `ROUND_SECONDS`; with `once`, it calls once (for work that is cached).
    """
    counts = []
    for call in (ours, peer):
        call()
        once_took = _round(call, 1 if once else 3)
        counts.append(1 if once else max(1, int(ROUND_SECONDS / max(once_took, 1e-7))))
    mine, theirs = [], []
    for number in range(ROUNDS):
        order = [(ours, counts[0], mine), (peer, counts[1], theirs)]
        for call, count, times in order if number % 2 else reversed(order):
            times.append(_round(call, count))
    return {
        "ours": summary(mine),
        "peer": summary(theirs),
        "ratio": extremes([p / m for m, p in zip(mine, theirs, strict=True)]),
        "rounds": ROUNDS,
        "calls_per_round": counts,
    }


MOST_OTHERS = 0.1
"""Processor seconds of other processes in a second, up to which a turn counts as undisturbed."""


class OtherProcesses:
    """What processes that are not measured compute within a `with` statement."""

    def __enter__(self) -> OtherProcesses:
        self.begin, self.busy = time.monotonic(), _busy_seconds()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds, self.spent = time.monotonic() - self.begin, _busy_seconds() - self.busy

    def rate(self, measured: float) -> float:
        """Their processor seconds in a second, where those that are measured took `measured` processor seconds."""
        return (self.spent - measured) / self.seconds


class QuietTurns:
    """Repeat turns during which other processes computed, until `patience` seconds are spent on that."""

    def __init__(self, patience: float):
        self.patience = patience
        self.counts = {"undisturbed": 0, "disturbed": 0, "repeated": 0}

    def take(self, measure: Callable[[], tuple[Any, float]]) -> Any:
        """The result of `measure() -> (result, processor seconds of others in a second)` in the turn that counts."""
        while True:
            begin = time.monotonic()
            found, others = measure()
            quiet = others <= MOST_OTHERS
            if quiet or self.patience <= 0:
                self.counts["undisturbed" if quiet else "disturbed"] += 1
                return found
            self.counts["repeated"] += 1
            time.sleep(0.2)
            self.patience -= time.monotonic() - begin


def _busy_seconds() -> float:
    """Seconds that all processors have spent on something since the machine started; 0 where that is not told."""
    try:
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return 0.0
    idle, waiting = 3, 4
    return sum(int(word) for i, word in enumerate(words) if i not in (idle, waiting)) / os.sysconf("SC_CLK_TCK")


def import_seconds(statement: str) -> float:
    """Wall time of a fresh interpreter that runs `statement`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def record(path: Path, about: dict[str, Any], **results: Any) -> None:
    """Write results beside what `machine` returned before they were measured, and refresh the pages' tables."""
    about["load_after"] = os.getloadavg()
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": about, **results}, indent=1, ensure_ascii=False) + "\n")
    refresh()
