"""Loops and branches with collectives: ranks that decide differently are refused at the next one, with place and numbers."""

from __future__ import annotations

import re

import pytest

from tests.support.cases import decision_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("control-flow")

QUICK = ("fori_loop", 4), ("fori_loop", 20000), ("no iteration", 4), ("cond", 4), ("nested", 20000), ("root", 4)


ERROR = re.compile(
    r"(PeerFailure: rank \d raised funccoll\.errors\.)?ProgramMismatch: ranks \d and \d decided differently about collectives: "
)
"""An error of a rank that compares, or of one that waits in a loop for a root which has compared."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if (name, size) in QUICK else pytest.mark.slow)
        for name in cases.CASES
        for size in (4, 20000)
    ],
)
def test_ranks_that_decide_differently_are_refused(name, size):
    wanted = re.escape(cases.CASES[name][2]).replace("cases\\.py", r"cases\.py:\d+")
    for went, told in launch(cases.differs, 2, name, size):
        assert went == 4
        assert ERROR.match(told) and re.search(wanted, told), told
        assert "What they call next does not fit together" in told and "with fc.all_reduce first" in told


def test_the_rank_in_the_loop_names_its_iteration():
    (_, left), (_, inside) = launch(cases.differs, 2, "fori_loop", 4)
    assert "ended after 3 iterations on rank 0, and rank 1 is still in it, or took another way" in left
    assert "ended after 3 iterations on rank 0, and rank 1 is in iteration 4 of it" in inside


def test_all_ranks_hear_of_it():
    for _, told in launch(cases.differs, 3, "fori_loop", 4):
        assert ERROR.match(told), told


def test_decisions_in_a_called_function():
    for told in launch(cases.differs_in_a_called_function, 2):
        assert ERROR.match(told) and cases.BRANCH in told, told


@pytest.mark.slow
def test_a_loop_over_one_axis():
    told = launch(cases.differs_along_one_axis, 4)
    for rank in (1, 3):
        assert ERROR.match(told[rank]) and "ranks 1 and 3" in told[rank], told[rank]
        assert "ended after 2 iterations on rank 1" in told[rank]
    for rank in (0, 2):
        assert told[rank].startswith("PeerFailure: rank ") and "decided differently" in told[rank], told[rank]


def test_the_last_call_of_a_job_waits_for_a_rank_that_has_left():
    none, told = launch(cases.last_call, 2)
    assert none == "no error"
    assert told.startswith("PeerFailure: rank 0 left the job") and "and waited for rank 0: the loop at decision_cases" in told
    assert "ended after 2 iterations on rank 0, and rank 1 is in iteration 3 of it.\n" in told


def test_equal_decisions_go_on():
    launch(cases.alike, 2)


@pytest.mark.slow
def test_equal_decisions_go_on_in_python(monkeypatch):
    monkeypatch.setenv("FUNCCOLL_NATIVE", "0")
    launch(cases.alike, 3, (2, 5000))


def test_groups_of_an_axis_decide_for_themselves():
    launch(cases.alike_in_groups, 4)
