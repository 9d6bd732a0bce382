"""Attacks on running jobs, drawn from a seed: signals at any time, under load, beside threads and forks; clashing jobs.

`python failures.py --attack --seed N` runs them. Each attack must end every rank, with the culprit's name in every other
one's error; no rank may have wrong data, and nothing may be left behind.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

from tests.support.ranks.failure_jobs import PATIENCE, Job, Server

__all__ = ["attack_jobs", "clash_jobs"]

RANKS = (2, 2, 3, 3, 4, 4, 8)
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
    "raise in a handler": signal.SIGUSR1,
}
TIMEOUT = 3.0  # seconds of a collective, after which a stopped rank is late
CODES = {"kill": {-9}, "stop": {-9}, "terminate": {-15}, "interrupt": {0, 1, -2}, "raise in a handler": {0, 1}}


class Load:
    """Busy processes of another job."""

    def __init__(self, count: int):
        self.processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def attack_jobs(seed: int, count: int) -> dict[str, Any]:
    """Attack `count` jobs. Returns counts; raises AssertionError for wrong data, a hang, a wrong name, or what is left."""
    rng, happened = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder, Server() as server:
        for number in range(count):
            n, how = rng.choice(RANKS), rng.choice(list(SIGNALS))
            culprit, busy = rng.randrange(n), rng.choice((0, 0, 2, 4))
            options: dict[str, Any] = {name: rng.random() < 0.3 for name in ("threads", "forks", "started")}
            options["timeout"] = TIMEOUT if how == "stop" else 120.0
            with Load(busy), Job(server, Path(folder), "attacked", n, **options) as job:
                _attack(job, n, culprit, how, rng.random() ** 2 * 0.5)
                beside = [said["steps"] for rank in range(n) for said in job.said(rank, "beside")]
                happened["steps of second threads"] += sum(beside)
            happened[how] += 1
            happened[f"{n} ranks"] += 1
            happened.update(name for name in ("threads", "forks", "started") if options[name])
            print(f"{number + 1:4} of {count}: {how}, rank {culprit} of {n}, {busy} busy processes", flush=True)
    return dict(happened)


def _attack(job: Job, n: int, culprit: int, how: str, delay: float) -> None:
    job.start()
    for rank in range(n):
        job.hear(rank, "runs")
    time.sleep(delay)
    job.kill(culprit, SIGNALS[how])
    others = set(range(n)) - {culprit}
    for rank in others:
        error = job.hear(rank, "error")
        assert error["kind"] in ("PeerFailure", "CollectiveTimeout", "ProgramMismatch"), (error, job.report())
        assert f"rank {culprit}" in error["text"] + error["cause"], (how, culprit, error, job.report())
    if how == "stop":
        job.kill(culprit)
    codes = job.end()
    assert all(codes[rank] == 0 for rank in others), (how, codes, job.report())
    assert codes[culprit] in CODES[how], (how, codes, job.report())
    assert "AssertionError: wrong data" not in job.report(), job.report()
    assert "Exception in thread" not in job.report(), job.report()
    end = time.monotonic() + PATIENCE
    while left := job.left():  # a child that a killed rank had forked ends by itself
        assert time.monotonic() < end, (left, job.report())
        time.sleep(0.01)


def clash_jobs(seed: int, count: int) -> dict[str, int]:
    """Start `count` pairs of jobs under one name, in random order.

    A job may end well only where it has computed nothing wrong; ranks of both may meet for a moment, and then all end badly.
    """
    rng, happened = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder, Server() as server:
        for number in range(count):
            n = rng.choice((2, 3))
            with Job(server, Path(folder), "clashing", n, {"FUNCCOLL_RENDEZVOUS_TIMEOUT": "6"}, value=1.0) as one:
                same = {"FUNCCOLL_RENDEZVOUS_TIMEOUT": "6", "FUNCCOLL_RUN_ID": one.run}
                with Job(server, Path(folder), "clashing", n, same, value=1000.0) as two:
                    order = [(job, rank) for job in (one, two) for rank in range(n)]
                    rng.shuffle(order)
                    for job, rank in order:
                        time.sleep(rng.random() ** 3 * 0.5)
                        job.start([rank])
                    ends = [(job, rank, code) for job in (one, two) for rank, code in enumerate(job.end())]
                    for job, rank, code in ends:
                        wrong = sum(said["wrong"] for said in job.said(rank, "sums"))
                        assert code != 0 or not wrong, (number, rank, one.report(), two.report())
                        told = [word in job.errors(rank) for word in ("RendezvousError", "PeerFailure")]
                        assert code == 0 or any(told), job.report()
                        happened["ended well" if code == 0 else "ended with an error"] += 1
                        happened["ended with an error after wrong sums"] += bool(wrong)
            print(f"clash {number + 1:3} of {count}: {[code for _, _, code in ends]}", flush=True)
    return dict(happened)
