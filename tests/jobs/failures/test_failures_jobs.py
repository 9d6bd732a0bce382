"""Joining, leaving, children, long runs and many ranks: with real processes, and nothing stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support.processes_left import VARIABLE, wait_until_gone
from tests.support.ranks.failure_jobs import PATIENCE

pytestmark = pytest.mark.covers("shared-memory", "failures")

SLOW = pytest.mark.slow
RECORD = Path(__file__).parents[3] / "benchmarks" / "results" / "failures.json"


# ---------------------------------------------------------------- joining


@pytest.mark.parametrize(
    ("culprit", "where"),
    [
        (0, "coordinator.Coordinator._admit 2"),
        (1, "rendezvous.receive_answer"),
        (1, "job_context.FailureDetector"),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                (0, "coordinator.Coordinator._collect"),
                (0, "shm_transport.create"),
                (0, "coordinator.send"),
                (0, "failure_detector.send"),
                (0, "coordinator.send 2"),
                (0, "failure_detector.send 2"),
                (0, "job_context.FailureDetector"),
                (1, "rendezvous.meet"),
                (2, "shm_transport.Heap"),
            )
        ),
    ],
)
def test_a_rank_dies_while_the_job_begins(culprit, where, job):
    """The others are told so: either that it did not come, or, when they have met already, that it died."""
    run = job("born", 3, {"FUNCCOLL_RENDEZVOUS_TIMEOUT": "4"}, culprit=culprit, where=where)
    assert run.end() == [-9 if rank == culprit else 0 for rank in range(3)], run.report()
    for rank in {0, 1, 2} - {culprit}:
        (error,) = run.said(rank, "error")
        assert error["kind"] in ("RendezvousError", "PeerFailure"), error
        assert f"rank {culprit}" in error["text"], error


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize(
    ("culprit", "where", "others"),
    [
        (0, "failure_detector.send 2", "leave"),
        (1, "failure_detector.FailureDetector._tell", "go on"),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                (0, "failure_detector.send 2", "go on"),
                (1, "failure_detector.FailureDetector._tell", "leave"),
                (0, "failure_detector.FailureDetector.leave", "go on"),
                (2, "failure_detector.FailureDetector._close", "leave"),
                (1, "heap.Heap.close", "go on"),
            )
        ),
    ],
)
def test_a_rank_dies_while_it_leaves(culprit, where, others, job):
    run = job("parting", 3, culprit=culprit, where=where, others=others)
    assert run.end() == [-9 if rank == culprit else 0 for rank in range(3)], run.report()
    for rank in {0, 1, 2} - {culprit}:
        assert len(run.said(rank, "left")) == 1 and run.errors(rank) == ""
        errors = run.said(rank, "error")
        assert len(errors) == (others == "go on")
        for error in errors:
            assert error["kind"] == "PeerFailure" and f"rank {culprit} " in error["text"] + error["cause"], error


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=SLOW)])
def test_leave_and_join_again(n, job):
    run = job("rejoin", n, times=6)
    assert run.end() == [0] * n, run.report()
    for rank in range(n):
        assert [line["number"] for line in run.said(rank, "generation")] == list(range(6))
        assert len(run.said(rank, "over")) == 2 * (6 + 5)
        assert all("left" in line["text"] for line in run.said(rank, "over")), run.said(rank, "over")


def test_begin_again_after_a_timeout(job):
    run = job("recover", 3, culprit=1)
    run.hear(0, "error"), run.hear(2, "error")
    run.kill(1, signal.SIGCONT)
    run.hear(1, "error")
    run.let("go")
    assert run.end() == [0] * 3, run.report()
    assert all(run.said(rank, "recovered") for rank in range(3))


# ---------------------------------------------------------------- children


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=SLOW)])
def test_forked_children_are_harmless(n, job):
    run = job("forks", n, {"FUNCCOLL_TIMEOUT": "30"})
    assert run.end() == [0] * n, run.report()
    for rank in range(n):
        children = run.said(rank, "child")
        assert len(children) == 9 and all(child["code"] == child["wanted"] for child in children), run.report()
        assert run.said(rank, "ends") and not run.said(rank, "error")


# ---------------------------------------------------------------- long runs, many ranks


@pytest.mark.parametrize(("n", "steps"), [(2, 1000), pytest.param(3, 10_000, marks=SLOW)])
def test_many_steps_take_nothing(n, steps, job, record_property):
    run = job("growth", n, steps=steps)
    assert run.end() == [0] * n, run.report()
    for rank in range(n):
        (grown,) = run.said(rank, "grown")
        before, after = grown["before"], grown["after"]
        resident = after.pop("resident KiB") - before.pop("resident KiB")
        record_property(f"resident_{rank}", resident)
        assert resident < 1024, grown  # 0.1 KiB for each of 10,000 steps
        assert after == before


@SLOW
def test_eight_ranks(job):
    run = job("failing", 8, culprits=[], deed="", end=5)
    assert run.end() == [0] * 8, run.report()
    assert [run.hear(rank, "ends")["steps"] for rank in range(8)] == [5] * 8


@SLOW
def test_one_of_eight_ranks_dies(job):
    run = job("failing", 8, culprits=[5], deed="die")
    assert run.end() == [-9 if rank == 5 else 0 for rank in range(8)], run.report()
    for rank in set(range(8)) - {5}:
        assert "rank 5 died" in run.said(rank, "error")[0]["text"]


def test_the_record_says_how_late_failures_were_told():
    data = json.loads(RECORD.read_text())
    kinds = {(case["kind"], case["ranks"]) for case in data["cases"]}
    assert len(kinds) == len(data["cases"]) == 20 and all(case["events"] >= 10 for case in data["cases"])
    for case in data["cases"]:
        assert case["seconds"]["min"] <= case["seconds"]["median"] <= case["seconds"]["max"]
        assert case["met"] is (case["seconds"]["max"] <= 1.0)
    assert {"cpu", "cores", "load_before", "load_after", "commit"} <= data["machine"].keys()


# ---------------------------------------------------------------- Ctrl-C


WAITING = """
import time
import numpy as np
import funccoll as fc
mesh = fc.make_mesh({"d": fc.world_size()})
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=fc.P("d"), out_specs=fc.P())
step(np.ones(4))
print("ready", flush=True)
if fc.rank() == 1:
    time.sleep(1000)
step(np.ones(4))
"""


@pytest.mark.parametrize("whom", [pytest.param("all", marks=SLOW), "the command"])
def test_ctrl_c_while_ranks_wait(whom, tmp_path, monkeypatch):
    """As a terminal sends it, to the command's group; and to the command alone."""
    monkeypatch.setenv(VARIABLE, mark := uuid.uuid4().hex)
    (tmp_path / "script.py").write_text(WAITING)
    command = [sys.executable, "-W", "error", "-m", "funccoll", "run", "-n", "2", "script.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as runner:
        try:
            assert {runner.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
            (os.killpg if whom == "all" else os.kill)(runner.pid, signal.SIGINT)
            output, errors = runner.communicate(timeout=PATIENCE)
        finally:
            runner.kill()
    assert (runner.returncode, output) == (130, ""), errors
    assert "KeyboardInterrupt" in errors
    wait_until_gone(mark)
    assert list(tmp_path.iterdir()) == [tmp_path / "script.py"]
