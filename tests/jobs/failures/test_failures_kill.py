"""kill -9 of any rank at any instruction: the others hear of it at once, who it was, and nothing stays."""

from __future__ import annotations

import random

import pytest

from tests.support.ranks.failure_jobs import Job

pytestmark = pytest.mark.covers("failures")

POINTS = 60
QUICK = 8


def points():
    """(ranks, victim, at which fraction of the instructions of some steps, of which kind, with two calls of it in flight), the
    same ones every time."""
    chance = random.Random(4)
    for number in range(POINTS):
        n = 2 + number % 3
        marks = () if number < QUICK else pytest.mark.slow
        step = "backward" if number % 4 == 3 else "work"
        started = number % 5 == 2
        name = f"{'started ' * started}{step}-{number}"
        yield pytest.param(n, chance.randrange(n), chance.random(), step, started, marks=marks, id=name)


@pytest.mark.parametrize(("n", "victim", "where", "step", "started"), list(points()))
def test_a_rank_dies_at_an_instruction(n, victim, where, step, started, server, tmp_path, record_property):
    """Of a step with every kind of collective, or in the backward pass of training."""
    with Job(server, tmp_path, "kill", n, victim=victim, where=where, step=step, started=started) as job:
        job.start()
        codes = job.end()
        assert codes == [-9 if rank == victim else 0 for rank in range(n)], job.report()
        (death,) = job.said(victim, "dies")
        for rank in set(range(n)) - {victim}:
            (error,) = job.said(rank, "error")
            assert error["kind"] == "PeerFailure", error
            assert f"rank {victim} died without a word" in error["text"]
            assert "failure_ranks.py" in error["text"]
            # One that waits for a third rank may still be in the step before: no rank waits for the others' ends of a step.
            assert abs(error["step"] - death["step"]) <= 1
            assert error["at"] > death["at"]  # how much later is measured by benchmarks/failures/failures.py
            record_property(f"seconds_rank_{rank}", error["at"] - death["at"])
            assert len(job.said(rank, "again")) == 2
            assert job.errors(rank) == ""
