"""Calls whose arguments, results or process change in the middle: a clear error or right values, in C and in Python."""

from __future__ import annotations

import pytest

from funccoll.config import NATIVE
from funccoll.core.c_extension import extension
from tests.support.cases import call_failure_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("fast-calls")

NEEDS_IT = pytest.mark.skipif(extension is None, reason="the C extension is not there, or not chosen")


@pytest.fixture(autouse=True, params=["python", pytest.param("C", marks=NEEDS_IT)])
def kind(request, monkeypatch):
    monkeypatch.setenv(NATIVE, "0" if request.param == "python" else "1")


def test_arguments_that_another_thread_changes():
    launch(cases.changed_arguments, 2)


def test_results_that_another_thread_drops():
    launch(cases.dropped_results, 2, 500)


def test_forks_in_the_middle_of_the_calls_of_another_thread():
    launch(cases.forked, 2, 3)


def test_a_call_from_a_handler_is_refused():
    told, others = launch(cases.nested_calls, 2)
    assert len(told) == 2 and all("in the middle of another one" in text for text in told) and not others


def test_a_handler_that_raises_ends_the_calls():
    interrupted, peer = launch(cases.raising_handler, 2)
    assert interrupted[0].startswith("KeyboardInterrupt") and len(interrupted) == len(peer) == 2
    assert "KeyboardInterrupt in the middle of all_reduce" in interrupted[1] and all("PeerFailure" in text for text in peer)


def test_many_signals():
    assert max(launch(cases.many_signals, 2, 500)) > 0


def test_an_argument_whose_conversion_calls_the_function():
    launch(cases.recursive, 2)


def test_another_thread_that_leaves_the_job():
    for told in launch(cases.finalized, 2):
        assert len(told) == 2 and "wrong" not in told and told[1] != "right"
