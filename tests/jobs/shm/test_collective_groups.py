"""Collectives that sit together are one native call; results, arguments and intermediate values are in the right memory."""

from __future__ import annotations

import re

import pytest

from tests.support.cases import collective_group_cases as cases
from tests.support.cases import group_wait_cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("collective-groups", "job-checks")


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_sits_together_is_one_call(n):
    assert launch(cases.grouping, n) == [[1, 1, 1, 2]] * n


@pytest.mark.parametrize(
    ("n", "non_temporal"),
    [
        (2, 0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 9), (3, 0))),
    ],
)
def test_large_arrays(n, non_temporal):
    launch(cases.large, n, non_temporal)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_memory(n):
    launch(cases.memory, n)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_arguments(n):
    launch(cases.arguments, n)


def test_threads_over_different_groups():
    launch(cases.threads, 4)


def test_threads_with_a_mesh_each_do_not_mix():
    assert launch(cases.same_program, 2, False) == [[], []]


def test_one_mesh_belongs_to_one_thread():
    for told in launch(cases.same_program, 2, True):
        (text,) = told
        assert text.startswith("FunccollError: thread 'worker 1' called a collective over a mesh whose collectives belong to")
        assert "thread 'worker 0', which called one before" in text and "make one mesh per thread" in text
        assert "collective_group_cases.py" in text


def test_detail_compares_what_is_claimed_to_be_equal(monkeypatch):
    monkeypatch.setenv("FUNCCOLL_DEBUG", "detail")
    assert launch(cases.detail, 2, False) == ["", ""]
    for text in launch(cases.detail, 2, True):
        assert "w['bias'] of" in text
        assert "must be equal along 'd', and ranks 0 and 1 hold different values" in text


def test_detail_compares_values_that_are_taken_as_global(monkeypatch):
    monkeypatch.setenv("FUNCCOLL_DEBUG", "detail")
    for text in launch(cases.detail_of_values, 2):
        assert "y of <lambda> is not an Array, so it is taken as the global value" in text
        assert "Ranks 0 and 1 passed different values" in text and "fc.from_local(x, mesh, P('d'))" in text


def test_where_a_rank_is_is_told_from_its_counter():
    """One that has not signalled since it entered may not have published what it runs."""
    before, inside, after = launch(group_wait_cases.positions, 2, [0, 1, 2])[0]
    assert before == "rank 1 has not entered any collective of this group"
    assert inside.startswith("rank 1 is in all_reduce over 'd' at group_wait_cases.py")
    assert inside.endswith(": 1 of 2 signals sent")
    assert after.startswith("rank 1 has finished all_reduce") and after.endswith("and has entered nothing since")


def test_the_timeout_is_an_argument(tmp_path):
    told = launch(group_wait_cases.late, 2, tmp_path)
    assert re.match(r"CollectiveTimeout: rank 0 waited [\d.]+ s in all_reduce", told[0])
    assert "rank 1 has not entered any collective" in told[0]
    assert "rank 0 is in all_reduce over 'd' at group_wait_cases.py" in told[0] and "(this rank)" in told[0]
    assert told[1].startswith("PeerFailure: rank 0 raised")


@pytest.mark.parametrize("threads", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_ranks_that_wait_for_each_other_over_different_axes_are_told(threads, tmp_path):
    told = launch(group_wait_cases.in_a_cycle, 4, (1, 2), tmp_path, threads)
    assert all("ranks wait for each other: rank " in text for text in told)
    assert any(text.startswith("ProgramMismatch") for text in told)
    for text in told:
        assert "over 'a' at group_wait_cases.py" in text and "over 'b' at group_wait_cases.py" in text


def test_a_thread_calls_collectives_for_one_that_waits():
    """Its waits count as that one's, too: ranks that wait for each other are told."""
    for found, refused, deadlock in launch(group_wait_cases.a_thread_works_for_another, 2):
        assert found == [[1.0]] * 6 and "a mesh whose collectives belong to thread 'MainThread'" in refused
        assert "ranks wait for each other: rank " in deadlock


def test_a_thread_that_computes_is_no_part_of_a_deadlock(tmp_path):
    assert launch(group_wait_cases.a_thread_computes, 2, tmp_path) == [[[1.0], [2.0]]] * 2


@pytest.mark.parametrize("n", [1, 100_000])
def test_an_interrupt_ends_a_call_at_once(n, tmp_path):
    first, second = launch(group_wait_cases.holding_the_interrupt, 2, n, tmp_path)
    assert first[0] == "interrupted"
    assert "KeyboardInterrupt in the middle of all_reduce" in first[1]
    assert second[0].startswith("PeerFailure: rank 0 raised KeyboardInterrupt")


@pytest.mark.parametrize("caught", [True, False])
def test_a_collective_in_a_signal_handler_is_refused(caught, tmp_path):
    (refused, *first), second = launch(group_wait_cases.in_a_handler, 2, caught, tmp_path)
    assert refused.startswith("FunccollError: a collective was called in the middle of another one")
    if caught:  # the one in the middle goes on
        assert first == second == ["2.0", "2.0"]
    else:
        assert first[0] == refused  # after it had published its array, which rank 1 may have got
        assert second[0] == "2.0" or second[0].startswith("PeerFailure")
        assert all(text.startswith("PeerFailure") for text in (first[1], second[1]))


def test_collectives_that_only_wait_for_each_other_are_compared(tmp_path):
    told = launch(group_wait_cases.only_waits, 2, tmp_path)
    assert any(text.startswith("ProgramMismatch") for text in told), told
    assert "nothing" not in told


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_oddities(n):
    launch(cases.oddities, n)


def test_first_uses_in_any_order():
    launch(cases.first_uses, 4)


def test_arrays_of_which_a_process_holds_a_block_are_shown():
    for rank, texts in enumerate(launch(cases.shown, 2)):
        block = ", ".join(f"{v}." for v in range(4 * rank, 4 * rank + 4))
        assert texts[0] == texts[1] == texts[2] == f"Array(block {rank} of 2: [{block}], f32[8], P('d') on Mesh({{'d': 2}}))"
        assert f"device {rank}: [{block.replace(',', '')}]" in texts[3]
        assert texts[5] == "[0. 1. 2. 3. 4. 5. 6. 7.]"


def test_memory_of_many_shapes_is_bounded_and_can_be_dropped():
    for rank, (arrays, sites, arrays_left, sites_left) in enumerate(launch(cases.many_shapes, 2)):
        most = 16 + 8 * rank
        assert most // 2 <= sites <= most and arrays <= 5 * most
        assert (arrays_left, sites_left) == (2, 0)  # the memory that all calls use in turn, and the notes of first calls
