"""A rank outside of a group fails while the group communicates: the collective goes on, and the next one raises."""

from __future__ import annotations

import pytest

from tests.jobs.failures.test_failures_ranks import ENDS, check_told

pytestmark = pytest.mark.covers("process-groups", "failures")

SLOW = pytest.mark.slow
MEMBERS = {0, 2, 3}


@pytest.mark.parametrize("deed", ["die", pytest.param("raise", marks=SLOW), pytest.param("terminate", marks=SLOW)])
def test_the_collective_ends_and_the_next_one_raises(deed, job):
    run = job("beside_a_group", 4, culprits=[1], deed=deed)
    run.hear(2, "notices")
    run.until_waiting(0, 3)  # in a collective, for rank 2
    run.let("go")
    code, words = ENDS[deed]
    assert run.end() == [0, code, 0, 0], run.report()
    check_told(run, MEMBERS, ["PeerFailure"], [words.format(1)])
    for rank in MEMBERS:
        assert [each["value"] for each in run.said(rank, "sum")] == [5.0, 5.0], run.report()
        assert "which ended" in run.said(rank, "error")[0]["text"]


@pytest.mark.parametrize("deed", ["leave", pytest.param("exit", marks=SLOW)])
def test_a_rank_outside_may_leave(deed, job):
    run = job("beside_a_group", 4, culprits=[1], deed=deed)
    run.hear(1, "does")
    run.let("go")
    assert run.end() == [0, ENDS[deed][0], 0, 0], run.report()
    assert [len(run.said(rank, "sum")) for rank in range(4)] == [40, 0, 40, 40]


@pytest.mark.parametrize("culprit", [3, pytest.param(0, marks=SLOW)])
def test_a_member_that_dies_after_a_rank_outside_ends_the_collective(culprit, job):
    """The first failure is told, as elsewhere: the second one often follows from it."""
    run = job("beside_a_group", 4, culprits=[1], deed="die")
    run.hear(2, "notices")
    rest = MEMBERS - {culprit}
    run.until_waiting(0, 3)  # in a collective, for rank 2
    run.kill(culprit)
    (waiting,) = rest - {2}
    error = run.hear(waiting, "error")
    assert error["kind"] == "PeerFailure" and "rank 1 died without a word" in error["text"], run.report()
    run.let("go")
    assert run.end() == [-9 if rank in (1, culprit) else 0 for rank in range(4)], run.report()


def test_a_member_that_dies_is_named(job):
    run = job("beside_a_group", 4, culprits=[2], deed="die")
    run.hear(2, "does")
    assert run.end() == [0, 0, -9, 0], run.report()
    check_told(run, [0, 3], ["PeerFailure"], ["rank 2 died without a word"])
