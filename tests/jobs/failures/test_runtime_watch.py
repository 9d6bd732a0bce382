"""A process that dies, raises or leaves: the others hear it at once, and hear why."""

import os
import pickle
import signal

import pytest

from funccoll.errors import FunccollError, PeerFailure
from funccoll.job.failure import Failure
from funccoll.job.host import PEER_FAILURE_EXIT_CODE
from tests.support.ranks.ranks import JOIN, Ranks, left_behind

pytestmark = pytest.mark.covers("failures")

HEARD = """
def heard(members=()):
    failure = w.watch.failure(members)
    if failure is None:
        return False
    word = int(w.transport.heap.view(0, (1,), "i8")[0])
    say(word, failure.rank, failure.kind, repr(failure.text))
    return True
"""
WAIT = (
    JOIN
    + HEARD
    + """
sure(heard)
hear()
"""
)
# The ranks of whom the watch has read the last word.
ENDED = """
import funccoll.job.failure_detector
ended, read = set(), funccoll.job.failure_detector.FailureDetector._hear
def read_and_note(self, rank):
    more = read(self, rank)
    ended.update(() if more else [rank])
    return more
funccoll.job.failure_detector.FailureDetector._hear = read_and_note
"""


def report(line):
    """(word 0, rank, kind, text) as a rank printed it."""
    word, rank, kind, text = line.split(" ", 3)
    return int(word), int(rank), kind, eval(text)


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (0, signal.SIGKILL),
        (1, signal.SIGKILL),
        (2, signal.SIGKILL),
        (1, signal.SIGTERM),
        (0, signal.SIGSEGV),
    ],
)
def test_a_killed_rank_is_noticed(victim, how):
    """How soon: benchmarks/results/failures.json."""
    with Ranks(WAIT, range(3)) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        ranks.kill(victim, how)
        assert ranks.end(victim)[0] == -how
        for r in set(range(3)) - {victim}:
            assert report(ranks.line(r))[:3] == (1 + victim, victim, "died")
        for r in set(range(3)) - {victim}:
            ranks.tell(r)
        ranks.end_well()
    assert left_behind(ranks.run) == []


def test_an_exit_without_a_word_is_a_death():
    with Ranks(WAIT, [0], world=2) as ranks:
        ranks.start(1, JOIN + "os._exit(0)")
        ranks.lines()
        assert report(ranks.line(0)) == (2, 1, "died", "")


BUSY = (
    JOIN
    + """
x = 0
while w.watch.failure() is None:
    for n in range(2_000_000):  # Python code that never waits
        x += n
say("heard")
"""
)


def test_a_busy_process_hears_too():
    with Ranks(BUSY, [0, 1]) as ranks:
        ranks.lines()
        ranks.kill(1)
        assert ranks.line(0) == "heard"


# ---------------------------------------------------------------- to leave is no failure


LEAVE = (
    ENDED
    + JOIN
    + HEARD
    + """
if rank == hub:
    sys.exit(code)
others = [r for r in range(3) if r not in (rank, hub)]
sure(lambda: w.watch.failure([hub]) and hub in ended)
assert not heard() and not heard(others)
assert heard([*others, hub])
say("waiting")
hear()
"""
)


@pytest.mark.parametrize("hub", [0, 1])
def test_a_clean_exit_says_bye(hub):
    with Ranks(f"hub, code = {hub}, 0\n" + LEAVE, range(3)) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        assert ranks.end(hub) == (0, [], "")
        for r in {0, 1, 2} - {hub}:
            assert report(ranks.line(r)) == (0, hub, "left", "")
            assert ranks.line(r) == "waiting"
        for r in {0, 1, 2} - {hub}:
            ranks.tell(r)
        ranks.end_well()


ORPHANS = (
    JOIN
    + HEARD
    + """
if rank == 0:
    sys.exit()
sure(lambda: w.watch.failure([0]))
say("alone")
if rank == 1:
    command = hear()
    if command == "raise":
        raise ValueError("after rank 0")
    sys.exit()
sure(lambda: heard([1]))
"""
)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("kill", (2, 1, "died")),
        ("raise", (2, 1, "raised")),
        ("leave", (0, 1, "left")),
    ],
)
def test_after_rank_0_the_others_watch_each_other(command, expected):
    with Ranks(ORPHANS, range(4)) as ranks:
        ranks.lines()
        assert ranks.end(0) == (0, [], "")
        assert set(ranks.lines().values()) == {"alone"}
        if command == "kill":
            ranks.kill(1)
        else:
            ranks.tell(1, command)
        for r in (2, 3):
            *news, text = report(ranks.line(r))
            assert tuple(news) == expected
            assert ("ValueError: after rank 0" in text) == (command == "raise")
        ranks.end(1)
        ranks.end_well()


def test_finalize_is_to_leave():
    script = (
        JOIN
        + HEARD
        + """
if rank == 1:
    job_context.finalize()
    assert w.watch.failure() is None
else:
    sure(lambda: heard([1]))
hear()
"""
    )
    with Ranks(script, range(2)) as ranks:
        ranks.lines()
        assert report(ranks.line(0)) == (0, 1, "left", "")
        for r in (0, 1):
            ranks.tell(r)
        ranks.end_well()


def test_all_leave_at_once():
    with Ranks(JOIN + "assert w.watch.failure() is None", range(4)) as ranks:
        ranks.end_well()


# ---------------------------------------------------------------- exceptions


RAISE = """
def inner():
    raise ValueError("the loss is nan, 漢字 \\udcff" + "!" * extra)
if rank == victim:
    inner()
sure(heard)
try:
    raise w.watch.failure().error("all_reduce at train.py:3 cannot finish.")
except Exception as error:
    import traceback
    say(repr(traceback.format_exc()))
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_traceback_arrives(victim):
    with Ranks(f"victim, extra = {victim}, 0\n" + JOIN + HEARD + RAISE, range(3)) as ranks:
        ranks.lines()
        code, _, printed = ranks.end(victim)
        assert code == 1 and "ValueError: the loss is nan" in printed
        for r in {0, 1, 2} - {victim}:
            word, rank, kind, text = report(ranks.line(r))
            assert (word, rank, kind) == (1 + victim, victim, "raised")
            assert text.startswith("Traceback (most recent call last)") and ", in inner\n" in text
            assert text.rstrip().endswith("ValueError: the loss is nan, 漢字 \udcff")
            shown = eval(ranks.line(r))
            assert ", in inner\n" in shown and "direct cause" in shown and "PeerTraceback" in shown
            assert f"PeerFailure: rank {victim} raised ValueError: the loss is nan" in shown
            assert "all_reduce at train.py:3 cannot finish." in shown
        ranks.end_well()


def test_the_end_of_a_long_traceback_arrives():
    with Ranks("victim, extra = 1, 1_000_000\n" + JOIN + HEARD + RAISE, range(2)) as ranks:
        ranks.lines()
        text = report(ranks.line(0))[-1]
        assert text == "!" * (len(text) - 1) + "\n" and 10_000 < len(text) < 100_000


def test_the_users_own_hook_is_called():
    script = "import sys\nsys.excepthook = lambda *error: print('mine', error[1], flush=True)\n" + JOIN
    with Ranks(script + HEARD + "if rank: 1 / 0\nsure(heard)", range(2)) as ranks:
        ranks.lines()
        assert ranks.end(1) == (1, ["mine division by zero"], "")
        assert report(ranks.line(0))[:3] == (2, 1, "raised")


def test_the_first_failure_is_the_one_that_is_told():
    script = JOIN + HEARD + "if rank == 1: 1 / 0\nsure(heard)\nraise w.watch.failure().error()"
    with Ranks(script, range(4)) as ranks:
        ranks.lines()
        for r in (0, 2, 3):
            assert report(ranks.line(r))[1:3] == (1, "raised")
            code, _, printed = ranks.end(r)
            assert code == PEER_FAILURE_EXIT_CODE and "rank 1 raised ZeroDivisionError: division by zero." in printed


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Failure(3, "died"), "rank 3 died without a word"),
        (Failure(0, "left"), r"rank 0 left the job: its program ended"),
        (Failure(1, "raised", ""), "rank 1 raised an exception"),
        (Failure(1, "raised", "Traceback\nA: b\n"), "rank 1 raised A: b"),
    ],
)
def test_a_failure_in_words(failure, words):
    error = failure.error("x cannot finish.")
    assert isinstance(error, (PeerFailure, FunccollError, RuntimeError))
    with pytest.raises(PeerFailure, match=words + r".*\. x cannot finish\."):
        raise error
    assert (error.__cause__ is not None) == (failure.kind == "raised")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# ---------------------------------------------------------------- children


FORK = (
    JOIN
    + HEARD
    + """
from funccoll.errors import RendezvousError
if rank == 1:
    child = os.fork()
    if child == 0:
        assert job_context.current() is None and threading.active_count() == 1
        job_context.finalize()
        try:
            job_context.init()
        except RendezvousError as error:
            assert "forked from rank 1" in str(error)
            say("child", os.getpid())
        while True:
            signal.pause()
    hear()
else:
    sure(heard)
"""
)


@pytest.mark.parametrize("victim", [1, 0])
def test_a_forked_child_does_not_hide_a_death(victim):
    script = FORK.replace("rank == 1", f"rank == {victim}").replace("from rank 1", f"from rank {victim}")
    with Ranks(script, range(3)) as ranks:
        ranks.lines()
        child = int(ranks.line(victim).split()[1])
        try:
            ranks.kill(victim)
            for r in {0, 1, 2} - {victim}:
                assert report(ranks.line(r))[:3] == (1 + victim, victim, "died")
            os.kill(child, 0)  # it still runs
        finally:
            os.kill(child, signal.SIGKILL)


CHILDREN = (
    ENDED
    + JOIN
    + HEARD
    + """
import multiprocessing
def work(n):
    return n * n
with multiprocessing.get_context("fork").Pool(2) as pool:  # as a DataLoader does
    assert pool.map(work, range(10)) == [n * n for n in range(10)]
for end in (lambda: sys.exit(3), lambda: 1 / 0, lambda: os._exit(0)):
    if (child := os.fork()) == 0:
        sys.stderr = None
        end()
    os.waitpid(child, 0)
assert not heard([0, 1])
say("done")
hear()
if rank != first:
    sure(lambda: first in ended)  # and all that was said before
    assert heard([first])
"""
)


@pytest.mark.parametrize("first", [0, 1])
def test_children_that_end_say_nothing(first):
    """Their parent's leaving is the first that is heard."""
    with Ranks(f"first = {first}\n" + CHILDREN, range(2)) as ranks:
        ranks.lines()
        assert ranks.lines() == {0: "done", 1: "done"}
        for r in (0, 1):
            ranks.tell(r)
        assert report(ranks.line(1 - first)) == (0, first, "left", "")
        ranks.end_well()


def test_a_started_program_does_not_hide_a_death():
    script = JOIN + "import subprocess\nsay(subprocess.Popen(['sleep', '1000'], close_fds=False).pid)\nhear()"
    with Ranks(WAIT, [0], world=2) as ranks:
        ranks.start(1, script)
        ranks.lines()
        sleeper = int(ranks.line(1))
        try:
            ranks.kill(1)
            assert report(ranks.line(0))[:3] == (2, 1, "died")
        finally:
            os.kill(sleeper, signal.SIGKILL)


def test_words_in_shared_memory_begin_at_zero():
    script = JOIN + "assert not w.transport.heap.view(0, (65536 // 8,), 'i8').any(); say('zero'); hear()"
    with Ranks(script, range(2)) as ranks:
        ranks.lines()
        assert ranks.lines() == {0: "zero", 1: "zero"}


MANY = (
    JOIN
    + """
import funccoll as fc
fc.init(timeout=3)
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=fc.make_mesh({"d": w.world}), in_specs=fc.P("d"), out_specs=fc.P())
step(np.ones(w.world))
if rank == CULPRIT:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    step(np.ones(w.world))
except fc.FunccollError as error:
    say(str(error).splitlines()[0])
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 5])
def test_a_stopped_rank_of_many_is_named(culprit):
    """Where not every two ranks have a socket to each other, and rank 0, which forwards what they say, may be the culprit."""
    with Ranks(MANY.replace("CULPRIT", str(culprit)), range(18)) as ranks:
        ranks.lines()
        for rank in {*range(18)} - {culprit}:
            told = ranks.line(rank)
            assert f"for rank {culprit}." in told and "died without a word" not in told, told
