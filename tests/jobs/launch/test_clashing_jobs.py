"""Processes that come twice to a rendezvous, and jobs with one name."""

from pathlib import Path

import pytest

from tests.support.ranks.ranks import JOIN, SAYS_WHO_COMES, STAY, Ranks, left_behind, wait_until
from tests.support.ranks.rendezvous_visits import handshake, visit

pytestmark = pytest.mark.covers("clashing-jobs")

CLASH = "RendezvousError: two processes came as rank {} of run '{}-0': process "
FAILS = JOIN + "sure(lambda: w.watch.failure() is not None)\nraise w.watch.failure().error()\n"


def told_of_clash(ranks, rank, names):
    """Let all of `names` end, each told that two came as `rank`, and which; their errors."""
    pids = [ranks.processes[name].pid for name in names if name == rank or name == f"twin {rank}"]
    assert len(pids) == 2
    for name in names:
        code, _, error = ranks.end(name)
        assert code == 1 and CLASH.format(rank, ranks.run) in error and "FUNCCOLL_RUN_ID" in error, f"{name}: {error}"
        assert all(f"process {pid} (" in error for pid in pids) and "rank_server.py" in error, error


IMPATIENT = "import funccoll.job.coordinator\nfunccoll.job.coordinator.GRACE = 0.2\n" + STAY


def test_a_rank_that_comes_twice():
    with Ranks(IMPATIENT, [0, 1], world=3) as ranks:
        ranks.start(1, STAY, "twin 1")
        told_of_clash(ranks, 1, [0, 1, "twin 1"])


def test_a_second_rank_0():
    with Ranks(IMPATIENT, [0], world=2) as ranks:
        visit(ranks.run).close()
        ranks.start(0, STAY, "twin 0")
        told_of_clash(ranks, 0, [0, "twin 0"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_twin_of_a_rank_of_a_job_that_has_just_begun(rank):
    """It may be the one that belongs there: nobody can know."""
    with Ranks(FAILS, [0, 1]) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        ranks.start(rank, FAILS, f"twin {rank}")
        told_of_clash(ranks, rank, [0, 1, f"twin {rank}"])


@pytest.mark.parametrize(
    "order",
    [
        [0, 1, 10, 11],
        [0, 11, 1, 10],
        [1, 11, 0, 10],
    ],
)
@pytest.mark.slow
def test_two_jobs_with_one_name(order):
    """Whichever ranks meet, no job of ranks of both goes on; one that starts when they have ended waits in vain."""
    words = "RendezvousError: two processes came as rank ", "did not come within", "ended before the job could begin"
    with Ranks(FAILS, [], world=2, FUNCCOLL_RENDEZVOUS_TIMEOUT="5") as ranks:
        for name in order:
            ranks.start(name % 10, FAILS, name)
        for name in order:
            code, _, error = ranks.end(name)
            assert code == 1 and any(word in error for word in words), error
    assert left_behind(ranks.run) == []


def test_a_later_job_with_the_name_of_one_that_runs():
    """The later one ends at once, and is told by whom; the first one does not notice."""
    script = "if rank == 0:\n    w.watch._coordinator.deadline = 0\nsay('old')\nhear()\nassert w.watch.failure() is None\n"
    with Ranks(JOIN + script, [0, 1]) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        assert set(ranks.lines().values()) == {"old"}
        pid = ranks.processes[0].pid
        for rank in (1, 0):
            ranks.start(rank, STAY, "later")
            code, _, error = ranks.end("later")
            assert code == 1 and f"run '{ranks.run}-0' is a job of 2 processes that runs already" in error
            assert f"its rank 0 is process {pid} (" in error and "rank_server.py" in error
        ranks.start(2, STAY, "larger", FUNCCOLL_WORLD_SIZE="3")
        assert "runs already" in ranks.end("larger")[2]
        for rank in (0, 1):
            ranks.tell(rank)
        ranks.end_well()


def test_a_job_after_one_with_the_same_name():
    """Its ranks may come before those of the first one have ended."""
    with Ranks(JOIN + "job_context.finalize() if rank else hear()\nsay('left')\nhear()\n", [0, 1]) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        assert ranks.line(1) == "left"
        ranks.start(1, STAY, "next 1")
        wait_until(lambda: len([line for line in Path("/proc/net/unix").read_text().splitlines() if ranks.run in line]) > 1)
        ranks.tell(0)
        assert ranks.line(0) == "left"
        for rank in (0, 1):
            ranks.tell(rank)
            assert ranks.end(rank)[0] == 0
        ranks.start(0, STAY, "next 0")
        assert ranks.lines() == {"next 0": "in", "next 1": "in"}


def test_the_place_of_one_that_died_on_the_way_is_free():
    patient = SAYS_WHO_COMES + "funccoll.job.coordinator.GRACE = 120.0\n"
    with Ranks(patient + STAY, [0], world=3) as ranks:
        with visit(ranks.run, handshake(ranks.run, world=3)):
            assert ranks.line(0) == "handshake of [1]"
        assert ranks.line(0) == "gone, and left are []"
        ranks.start(1, STAY)
        assert ranks.line(0) == "handshake of [1]"
        ranks.start(2, STAY)
        assert ranks.line(0) == "handshake of [1, 2]"
        assert set(ranks.lines().values()) == {"in"}


def test_one_that_dies_on_the_way_and_does_not_come_again():
    """Nothing waits for it until the rendezvous times out."""
    with Ranks(SAYS_WHO_COMES + STAY, [0], world=4) as ranks:
        ranks.start(2, STAY)
        assert ranks.line(0) == "handshake of [2]"
        with visit(ranks.run, handshake(ranks.run, world=4)):
            assert ranks.line(0) == "handshake of [1, 2]"
        for r in (0, 2):
            code, _, error = ranks.end(r)
            assert code == 1 and "RendezvousError: rank 1 ended before the job could begin (run" in error, error
