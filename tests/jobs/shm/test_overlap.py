"""Programs whose started collectives are in flight while they compute: the bits of plain calls, and how they fail."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funccoll.compiler.passes.overlap import MOST_IN_FLIGHT
from tests.support.cases import overlap_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("overlap")

INSTRUCTIONS = st.tuples(st.sampled_from(cases.KINDS), st.integers(0, 7), st.integers(0, 7))
PROGRAMS = st.lists(st.tuples(st.lists(INSTRUCTIONS, min_size=4, max_size=16), st.booleans()), min_size=8, max_size=8)


@settings(max_examples=2)
@given(PROGRAMS, st.sampled_from("01"), st.sampled_from([1, 1 << 18, MOST_IN_FLIGHT]))
def test_random_programs_have_the_bits_of_plain_calls(programs, fuse, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUNCCOLL_FUSE", fuse)
        launch(cases.compare, 2, programs, most)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels take memory of operands more often than NumPy's operations."""
    monkeypatch.setenv("FUNCCOLL_FUSE", "1")


@pytest.mark.usefixtures("kernels")
def test_memory_in_flight_is_not_overwritten():
    assert launch(cases.overwrite, 2, True, True) == [["right", "right"]] * 2


@pytest.mark.usefixtures("kernels")
def test_the_compiler_proves_it():
    for (text,) in launch(cases.overwrite, 2, False, True):
        assert "overlap_cases.py" in text and "(overwriting) writes to memory of a call in flight" in text


@pytest.mark.usefixtures("kernels")
def test_without_protection_and_proof_numbers_are_wrong():
    """So the two tests above test what they should."""
    assert all("wrong" in found for found in launch(cases.overwrite, 2, False, False))


def test_calls_in_flight_run_started_collectives_plainly():
    assert launch(cases.nest, 2) == [True] * 2


@pytest.mark.parametrize("kind", ["raise", "raise in a loop"])
def test_an_exception_of_all_ranks_ends_what_is_in_flight(kind):
    for first, *others in launch(cases.fail, 2, kind, [0, 1]):
        assert first.startswith("ValueError: in the middle") and len({*others}) == 1 and float(others[0]) > 1


def test_an_exception_of_one_rank_is_noticed():
    failed, other = launch(cases.fail, 2, "raise", [1])[::-1]
    assert failed[0].startswith("ValueError: in the middle") and float(other[0]) > 1
    for text in (failed[1], other[1]):
        assert text.startswith(("ProgramMismatch", "PeerFailure")) and "ValueError: in the middle" in text


def test_an_interrupt_ends_what_is_in_flight():
    failed, other = launch(cases.fail, 2, "interrupt", [1])[::-1]
    assert failed[0].startswith("KeyboardInterrupt") and failed[1].startswith("PeerFailure")
    assert all("rank 1 raised KeyboardInterrupt" in text for text in other[1:])


def test_a_call_that_finds_no_memory_is_not_counted():
    for found in launch(cases.fail, 2, "no memory", [0, 1]):
        assert found[0].startswith("MemoryError"), found
        assert len({*found[1:]}) == 1 and float(found[1]) > 1
