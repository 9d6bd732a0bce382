"""Exceptions that leave a program after its last collective: who goes on after one is not taken for who has had none."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.covers("exceptions", "failures")

SLOW = pytest.mark.slow
CASES = [
    ("index", 2, "IndexError"),
    ("handler", 3, "ValueError: a handler has had enough"),
    ("call", 2, "ValueError: an interrupt"),
    pytest.param("index", 4, "IndexError", marks=SLOW),
    pytest.param("handler", 2, "ValueError", marks=SLOW),
]


@pytest.mark.parametrize(("how", "n", "words"), CASES)
def test_one_rank_that_retries_is_named(how, n, words, job):
    culprit = n - 1
    run = job("late", n, culprits=[culprit], how=how)
    assert run.end() == [0] * n, run.report()
    assert len(run.said(culprit, "fails")) == 1 and not run.said(culprit, "retried"), run.report()
    named = f"rank {culprit} left a program after a collective of it by an exception, and went on; rank "
    for rank in range(n):
        (error,) = run.said(rank, "error")
        assert error["step"] == (3 if rank == culprit else 4), run.report()
        assert error["kind"] in ("ProgramMismatch", "PeerFailure") and named in error["text"] + error["cause"], error
        assert words in error["text"] + error["cause"] and "failure_cases.py" in error["text"]
        assert [again["kind"] for again in run.said(rank, "again")] == ["PeerFailure"] * 2


@pytest.mark.parametrize(("how", "n", "words"), CASES)
def test_all_ranks_retry(how, n, words, job):
    run = job("late", n, culprits=list(range(n)), how=how)
    assert run.end() == [0] * n, run.report()
    value = 3e-3 * n
    for _ in range(20):
        value = np.tanh(value)
    for rank in range(n):
        (retried,) = run.said(rank, "retried")
        assert retried["value"] == pytest.approx(value)
        assert run.hear(rank, "ends")["steps"] == 6 and not run.said(rank, "error")


def test_one_rank_that_gathers_again_is_named(job):
    run = job("gathers", 2, culprits=[1])
    assert run.end() == [0, 0], run.report()
    named = "rank 1 left a program after a collective of it by an exception, and went on; rank "
    for rank in range(2):
        (error,) = run.said(rank, "error")
        assert named in error["text"] + error["cause"] and "ValueError: an interrupt" in error["text"] + error["cause"], error


def test_all_ranks_gather_again(job):
    run = job("gathers", 2, culprits=[0, 1])
    assert run.end() == [0, 0], run.report()
    assert [run.hear(rank, "ends")["steps"] for rank in range(2)] == [6, 6] and not run.said(0, "error")


@pytest.mark.parametrize(("when", "more"), [("before", 2), ("after", 3)])
def test_a_rank_that_is_interrupted_beside_a_step_goes_on(when, more, job):
    """The others meet it in their own steps, with its data of these."""
    run = job("beside_a_step", 2, culprit=1, when=when)
    assert run.end() == [0, 0], run.report()
    (error,), (told,) = run.said(1, "error"), run.said(0, "error")
    assert (error["kind"], error["step"]) == ("KeyboardInterrupt", 4) and not run.said(1, "again"), run.report()
    assert told["kind"] == "PeerFailure" and "rank 1 left" in told["text"] and told["step"] == 4 + more, run.report()
