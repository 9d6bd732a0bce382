"""What ranks do to each other besides being killed, and what they are told: each with real processes."""

from __future__ import annotations

import re
import signal

import pytest

from funccoll.transports.shm.diagnosis import _differing_options
from tests.support.ranks import rank_end

pytestmark = pytest.mark.covers("failures")

SLOW = pytest.mark.slow


def check_told(job, others, kinds, words, caught=True):
    """Each of `others` was told one error of these kinds, which says one of these words or has them in its cause."""
    for rank in others:
        errors = job.said(rank, "error")
        assert len(errors) == 1, job.report()
        (error,) = errors
        assert error["kind"] in kinds, error
        assert any(word in error["text"] + error["cause"] for word in words), error
        assert "failure_" in error["text"], error  # the user's line
        if caught:
            assert [again["kind"] for again in job.said(rank, "again")] == ["PeerFailure"] * 2, job.report()


ENDS = {
    "die": (-9, "rank {} died without a word"),
    "terminate": (-15, "rank {} died without a word"),
    "vanish": (0, "rank {} died without a word"),
    "leave": (0, "rank {} left the job"),
    "exit": (3, "rank {} left the job"),
    "raise": (1, "rank {} raised ValueError: this rank has had enough"),
}


def ends():
    """Every end, caught or not, of one rank or two; some of them in `make test`."""
    for deed in ENDS:
        for n, culprits in ((2, [0]), (2, [1]), (3, [2]), (4, [0]), (4, [3]), (4, [1, 2])):
            for caught in (True, False):
                quick = (n == 3 and caught) or (n == 2 and not caught and culprits == [0] and deed in ("die", "raise"))
                quick = quick or (deed == "die" and culprits == [1, 2] and caught)
                if not quick and caught == ((list(ENDS).index(deed) + n + sum(culprits)) % 2 == 0):
                    continue  # each deed of each of these ranks once, caught or not
                marks = () if quick else SLOW
                yield pytest.param(deed, n, culprits, caught, marks=marks)


@pytest.mark.parametrize(("deed", "n", "culprits", "caught"), list(ends()))
def test_an_end(deed, n, culprits, caught, job, record_property):
    environment = {rank_end.VARIABLE: "1"} if n == 2 else None  # two ranks end as every Python does
    run = job("failing", n, environment, culprits=culprits, deed=deed, caught=caught)
    code, words = ENDS[deed]
    others = set(range(n)) - set(culprits)
    for rank, found in enumerate(run.end()):
        assert found == code if rank in culprits else (found == 0) == caught, run.report()
    # To leave ends only the collectives that need who left. Who is told that may leave, too, before others are told.
    who = range(n) if "left" in words and caught else culprits
    check_told(run, others, ["PeerFailure"], [words.format(c) for c in who], caught=caught)
    when = max(run.said(c, "does")[0]["at"] for c in culprits)
    record_property("seconds", max(run.said(rank, "error")[0]["at"] - when for rank in others))
    for rank in others if caught else ():
        assert run.errors(rank) == ""


# ---------------------------------------------------------------- a rank that is stopped


@pytest.mark.parametrize(("n", "culprit"), [(4, 3), *(pytest.param(*case, marks=SLOW) for case in ((2, 0), (2, 1), (4, 0)))])
def test_a_stopped_rank_is_named_after_the_timeout_and_does_not_go_on(n, culprit, job):
    run = job("failing", n, culprits=[culprit], deed="stop", stay=True, timeout=1)
    others = set(range(n)) - {culprit}
    for rank in others:
        run.hear(rank, "ends")
    assert run.said(culprit, "error") == []
    run.kill(culprit, signal.SIGCONT)
    run.hear(culprit, "ends")
    run.let("go")
    assert run.end() == [0] * n, run.report()
    check_told(run, others, ["CollectiveTimeout", "PeerFailure"], [f"rank {culprit}"])
    check_told(run, [culprit], ["PeerFailure"], [f"rank {r} raised" for r in others])
    late = [e for r in others for e in run.said(r, "error") if e["kind"] == "CollectiveTimeout"]
    assert late
    for error in late:
        for rank in range(n):
            assert f"\n  rank {rank} " in error["text"], error


@pytest.mark.parametrize("culprit", [0, pytest.param(3, marks=SLOW)])
def test_a_rank_that_was_stopped_for_a_while_goes_on(culprit, job):
    run = job("failing", 4, culprits=[culprit], deed="stop", end=30)
    run.hear(culprit, "does")
    run.until_stopped(culprit)
    run.until_waiting(*{0, 1, 2, 3} - {culprit})
    run.kill(culprit, signal.SIGCONT)
    assert run.end() == [0] * 4, run.report()
    assert [run.hear(r, "ends")["steps"] for r in range(4)] == [30] * 4


@pytest.mark.parametrize("culprit", [0, pytest.param(1, marks=SLOW)])
def test_a_stopped_rank_that_is_killed(culprit, job):
    run = job("failing", 3, culprits=[culprit], deed="stop")
    run.hear(culprit, "does")
    run.until_stopped(culprit)
    run.until_waiting(*{0, 1, 2} - {culprit})
    run.kill(culprit)
    assert run.end() == [-9 if r == culprit else 0 for r in range(3)], run.report()
    check_told(run, {0, 1, 2} - {culprit}, ["PeerFailure"], [f"rank {culprit} died without a word"])


def test_rank_0_is_stopped_while_another_is_killed(job):
    run = job("failing", 4, culprits=[0, 3], deed="stop")
    run.hear(0, "does"), run.hear(3, "does")
    run.kill(3)
    for rank in (1, 2):
        run.hear(rank, "error")
    run.kill(0, signal.SIGCONT)
    assert run.end() == [0, 0, 0, -9], run.report()
    check_told(run, [0, 1, 2], ["PeerFailure"], ["rank 3 died without a word"])


# ---------------------------------------------------------------- something else in one rank


DIFFER = {
    "collective": r"they differ in collective and op and algorithm\.$",
    "op": r"they differ in op\.$",
    "shape": r"arguments: x of <lambda> is float32\[\d+, 5\] in blocks of \[\d+, 5\] on ranks? \d.*, and float32\[\d+, 5\] in",
    "dtype": r"arguments: x of <lambda> is float(32|64)\[.*\] on ranks? \d.*, and float(32|64)\[.*\] on ranks? \d.*\.$",
}


@pytest.mark.parametrize(("n", "culprit"), [pytest.param(2, 1, marks=SLOW), (3, 0), pytest.param(4, 3, marks=SLOW)])
@pytest.mark.parametrize("change", ["collective", "shape", "dtype", "op"])
def test_something_else_in_one_rank(change, n, culprit, job):
    run = job("mismatch", n, culprit=culprit, change=change)
    assert run.end() == [0] * n, run.report()
    check_told(run, range(n), ["ProgramMismatch", "PeerFailure"], ["ProgramMismatch", "rank"])
    texts = [e["text"] for r in range(n) for e in run.said(r, "error") if e["kind"] == "ProgramMismatch"]
    assert texts, run.report()
    for text in texts:
        differ, first, second = text.splitlines()[:3]
        assert re.search(DIFFER[change], differ) and len(text.splitlines()) <= 12, text
        assert first.startswith("  rank ") and " over 'a' by " in first and " over 'a' by " in second, text
        assert first.startswith(f"  rank {culprit}: ") or n == 2, text  # of two, neither is more


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("broadcast on 2 ranks, root=0", "broadcast on 2 ranks, root=1", "root (0 and 1)"),
        ("broadcast on 2 ranks, root=0", "gather on 2 ranks, root=1", ""),
        ("gather on 2 ranks, root=0", "gather on 3 ranks, root=0", ""),
    ],
)
def test_the_option_in_which_one_collective_differs_is_named(first, second, says):
    assert _differing_options(first, second) == says


@pytest.mark.parametrize(("n", "culprit"), [pytest.param(2, 1, marks=SLOW), (4, 3)])
def test_another_axis_in_one_rank(n, culprit, job):
    """They wait for each other in different groups: the timeout ends it, and says where each is."""
    run = job("mismatch", n, culprit=culprit, change="axis", timeout=1)
    assert run.end() == [0] * n, run.report()
    check_told(run, range(n), ["ProgramMismatch", "PeerFailure", "CollectiveTimeout"], [f"rank {culprit}", "ProgramMismatch"])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("n", "culprit"), [(2, 0), pytest.param(3, 1, marks=SLOW), pytest.param(4, 2, marks=SLOW)])
def test_another_order_in_one_rank(n, culprit, known, job):
    run = job("order", n, culprit=culprit, known=known, timeout=2)
    assert run.end() == [0] * n, run.report()
    check_told(run, range(n), ["ProgramMismatch", "PeerFailure", "CollectiveTimeout"], ["rank"])


# ---------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("caught", [True, False])
@pytest.mark.parametrize(("n", "holder", "interrupted"), [(2, 0, 1), (3, 1, 0), pytest.param(4, 3, 1, marks=SLOW)])
def test_an_interrupt_in_the_middle_of_a_wait(n, holder, interrupted, caught, job):
    run = job("interrupted", n, holder=holder, caught=caught)
    for rank in range(n):
        run.hear(rank, "ready")
    run.until_waiting(interrupted)
    run.kill(interrupted, signal.SIGINT)
    for rank in set(range(n)) - {holder}:
        run.hear(rank, "error")
    run.let("go")
    codes = run.end()
    if caught:
        assert codes == [0] * n, run.report()
    else:
        assert codes[interrupted] == -signal.SIGINT and 0 not in codes, codes
    (error,) = run.said(interrupted, "error")
    assert error["kind"] == "KeyboardInterrupt"
    words = [f"rank {interrupted} raised KeyboardInterrupt"]
    check_told(run, set(range(n)) - {interrupted}, ["PeerFailure"], words, caught=caught)
    if caught:
        assert [again["kind"] for again in run.said(interrupted, "again")] == ["PeerFailure"] * 2


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("limit", ["memory", pytest.param("address space", marks=SLOW)])
def test_who_has_no_memory_raises_and_the_others_hear(limit, job):
    run = job("memory", 2, culprit=1, limit=limit, caught=False)
    assert run.end()[1] == 1, run.report()
    assert "MemoryError" in run.errors(1) and len(run.said(1, "memory")) == 1
    assert run.said(1, "memory")[0]["kept"] > 1
    check_told(run, [0], ["PeerFailure"], ["rank 1 raised MemoryError"], caught=False)


@SLOW
@pytest.mark.parametrize("limit", ["memory", "address space"])
def test_who_makes_room_goes_on(limit, job):
    run = job("memory", 3, culprit=1, limit=limit, caught=True)
    assert run.end() == [0] * 3, run.report()
    assert [run.hear(r, "ends")["steps"] for r in range(3)] == [300] * 3
    assert len(run.said(1, "memory")) >= 1
