"""Every rank is told of the first failure, whatever rank 0 and the others are doing."""

import os
import signal

import pytest

from funccoll.job.excepthook import shortened
from funccoll.job.failure import Failure
from funccoll.transports.shm.diagnosis import job_is_over
from tests.support.ranks.ranks import JOIN, SAYS_WHO_COMES, STAY, Ranks, left_behind

pytestmark = pytest.mark.covers("failures")

TELL = (
    JOIN
    + """
def tell(members=()):
    sure(lambda: w.watch.failure(members))
    failure = w.watch.failure(members)
    say(failure.rank, failure.kind, str(failure))
"""
)
BUSY = (
    TELL
    + """
import ctypes
if rank == 0:
    say("busy")
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # C code that holds Python's lock: no thread here runs
    tell()
elif rank == victim:
    hear()
    1 / 0
else:
    tell()
hear()
"""
)


def news(line):
    """(rank, kind, words)."""
    rank, kind, words = line.split(" ", 2)
    return int(rank), kind, words


@pytest.mark.parametrize("how", ["kill", "raise", "stop rank 0"])
def test_rank_0_need_not_listen(how):
    """It may be in C code for long, or stopped: the others hear each other's end, at once."""
    with Ranks("victim = 2\n" + BUSY, range(4)) as ranks:
        ranks.lines()
        assert ranks.line(0) == "busy"
        ranks.wait_until_in(0, "pipe")
        if how == "stop rank 0":
            ranks.kill(0, signal.SIGSTOP)
        if how == "raise":
            ranks.tell(2)
        else:
            ranks.kill(2)
        for r in (1, 3):
            assert news(ranks.line(r))[:2] == (2, "raised" if how == "raise" else "died")
        ranks.kill(0, signal.SIGCONT)
        ranks.tell(0)
        assert news(ranks.line(0))[0] == 2
        ranks.end(2)
        for r in (0, 1, 3):
            ranks.tell(r)
        ranks.end_well()
    assert left_behind(ranks.run) == []


def test_rank_0_dies_and_then_another():
    script = TELL + "hear()\ntell()\nhear()"
    with Ranks(script, range(4)) as ranks:
        ranks.lines()
        ranks.kill(0)
        ranks.kill(1)
        ranks.end(0), ranks.end(1)
        for r in (2, 3):
            ranks.tell(r)
            rank, kind, _ = news(ranks.line(r))
            assert rank in (0, 1) and kind == "died"
            ranks.tell(r)
        ranks.end_well()


# Rank 0 writes the word in shared memory, and dies before it says more.
WRITES = (
    TELL
    + """
import funccoll.job.failure_detector as module
if rank == 0:
    def die(*_):
        os.kill(os.getpid(), 9)
    module.FailureDetector._tell = die
    say("ready")
if rank == 1:
    hear()
    1 / 0
tell()
hear()
"""
)


def test_rank_0_dies_while_it_tells():
    with Ranks(WRITES, range(4)) as ranks:
        ranks.lines()
        assert ranks.line(0) == "ready"
        ranks.tell(1)
        assert ranks.end(0)[0] == -signal.SIGKILL
        ranks.end(1)
        for r in (2, 3):
            rank, kind, _ = news(ranks.line(r))
            assert (rank, kind) == (1, "raised")
            ranks.tell(r)
        ranks.end_well()


LATER = (
    TELL
    + """
if rank == 3:
    say("busy")
    import ctypes
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
if rank == 2:
    hear()
    1 / 0
if rank in (0, 1):
    hear()
    assert w.watch.failure().rank == 2
    raise ValueError("because of rank 2")
tell()
hear()
"""
)


def test_the_first_failure_is_told_also_to_who_hears_of_all_at_once():
    with Ranks(LATER, range(4)) as ranks:
        ranks.lines()
        assert ranks.line(3) == "busy"
        for r in (2, 1, 0):
            ranks.tell(r)
            ranks.end(r)
        ranks.tell(3)
        rank, kind, words = news(ranks.line(3))
        assert (rank, kind, words) == (2, "raised", "rank 2 raised ZeroDivisionError: division by zero")
        ranks.tell(3)
        ranks.end_well()


REPORTS = (
    TELL
    + """
if rank == 1:
    w.watch.report("ValueError: enough")
    say(int(w.transport.heap.view(0, (1,), "i8")[0]), w.watch.failure())
    job_context.finalize()
else:
    tell()
hear()
"""
)


def test_who_reports_a_failure_has_ended_the_job_when_it_goes_on():
    """The word in shared memory is written before anything of what it shared can change."""
    with Ranks(REPORTS, range(3)) as ranks:
        ranks.lines()
        assert ranks.line(1) == "2 rank 1 raised ValueError: enough"
        for r in (0, 2):
            assert news(ranks.line(r)) == (1, "raised", "rank 1 raised ValueError: enough")
        for r in range(3):
            ranks.tell(r)
        ranks.end_well()


FRAMES = "Traceback (most recent call last):\n  File 'a.py'\n    f()\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{FRAMES}ShapeError: x is odd\n  at a.py:3 in f\n", "ShapeError: x is odd"),
        (f"{FRAMES}A: b\n\nThe above exception was the direct cause:\n\n{FRAMES}B: c\nd\n", "B: c"),
        ("half of a line\nA: b\n", "A: b"),
        ("A: b", "A: b"),
        (FRAMES, "    f()"),
    ],
)
def test_the_line_that_says_what_was_raised(text, words):
    assert str(Failure(1, "raised", text)) == f"rank 1 raised {words}"


@pytest.mark.parametrize(
    "cause",
    [
        Failure(2, "left"),
        Failure(2, "died"),
        Failure(2, "raised", "ValueError: no data. Look there"),
        Failure(2, "unreachable"),
    ],
    ids=str,
)
def test_failures_that_follow_from_each_other_tell_the_first_alone(cause):
    """Also where a call after the failure repeats it: each rank's own position stands in its own error only."""
    found = cause
    for rank in (0, 3, 1):
        context = f"Rank {rank} was in all_reduce among ranks [0, 1, 2, 3] (train.py:7 (step)) and waited for rank 2."
        error = found.error(context)
        assert str(error).count("Rank ") == 1 and error.rank == found.rank
        again = job_is_over(error, None) if rank == 3 else error
        found = Failure(rank, "raised", f"Traceback (most recent call last):\n  File\nfunccoll.errors.PeerFailure: {again}\n")
        assert str(found) == f"{cause}; rank {rank} raised PeerFailure because of it"


def test_long_messages_end_with_a_word():
    words = " ".join(["word"] * 70)
    assert shortened(words[:300]) == words[:300]
    assert shortened(words) == f"{' '.join(['word'] * 59)}..." and len(shortened(words)) <= 300
    assert shortened("x" * 400) == "x" * 297 + "..."


MEET = (
    """
import funccoll.job.failure_detector as module, os
real = module.send
count = [0]
def send(*args):
    if "meet" in str(args[1]) and os.environ["FUNCCOLL_RANK"] == "0":
        count[0] += 1
        if count[0] == last:
            os.kill(os.getpid(), 9)
    return real(*args)
module.send = send
"""
    + TELL
    + "tell()\nhear()"
)


@pytest.mark.parametrize("last", [1, 2, 5])
def test_rank_0_dies_while_it_introduces_the_others(last):
    with Ranks(f"last = {last}\n" + MEET, range(4)) as ranks:
        assert ranks.end(0)[0] == -signal.SIGKILL
        for r in (1, 2, 3):
            assert ranks.line(r) == "in"
            assert news(ranks.line(r))[:2] == (0, "died")
            ranks.tell(r)
        ranks.end_well()


def test_a_large_job_has_rank_0_as_its_messenger():
    few = "import funccoll.job.failure_detector as module\nmodule._MAX_FULL_MESH = 2\n"
    script = few + TELL + "if rank == 2: hear(); 1 / 0\ntell()\nhear()"
    with Ranks(script, range(4)) as ranks:
        ranks.lines()
        before = len(os.listdir(f"/proc/{ranks.processes[1].pid}/fd"))
        ranks.tell(2)
        for r in (0, 1, 3):
            assert news(ranks.line(r)) == (2, "raised", "rank 2 raised ZeroDivisionError: division by zero")
        assert len(os.listdir(f"/proc/{ranks.processes[1].pid}/fd")) == before
        ranks.end(2)
        for r in (0, 1, 3):
            ranks.tell(r)
        ranks.end_well()


def test_another_exception_hook_takes_the_place_of_ours():
    """As rich.traceback.install() does. What is raised is told nevertheless, when the process ends."""
    script = TELL + "if rank == 1: sys.excepthook = lambda *error: None; hear(); 1 / 0\ntell()\nhear()"
    with Ranks(script, range(3)) as ranks:
        ranks.lines()
        ranks.tell(1)
        assert ranks.end(1) == (1, [], "")
        for r in (0, 2):
            assert news(ranks.line(r)) == (1, "raised", "rank 1 raised ZeroDivisionError: division by zero")
            ranks.tell(r)
        ranks.end_well()


# ---------------------------------------------------------------- before the job begins


@pytest.mark.parametrize(
    ("dies", "words"),
    [
        (True, "rank 0 was there, and ended before the job could begin"),
        pytest.param(False, "rank 0 was there but did not answer within 0.5 s", marks=pytest.mark.slow),  # takes 5 s more
    ],
)
def test_rank_0_that_dies_or_stops_while_ranks_come(dies, words):
    """Who waits for it hears of its end long before the timeout."""
    seconds = "1000" if dies else "0.5"
    with Ranks(SAYS_WHO_COMES + STAY, [0], world=4, FUNCCOLL_RENDEZVOUS_TIMEOUT="1000") as ranks:
        ranks.start(1, STAY)
        assert ranks.line(0) == "handshake of [1]"
        if not dies:
            ranks.kill(0, signal.SIGSTOP)
        ranks.start(2, STAY, "late", FUNCCOLL_RANK="2", FUNCCOLL_RENDEZVOUS_TIMEOUT=seconds)
        if dies:
            assert ranks.line(0) == "handshake of [1, 2]"
            ranks.kill(0)
        code, _, error = ranks.end("late")
        assert code == 1 and words in error and "rank 2 of 4" in error, error
