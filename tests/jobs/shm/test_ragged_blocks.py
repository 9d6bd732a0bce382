"""Ragged collectives between processes: the bits of slices, and what ranks tell differently."""

from __future__ import annotations

import pytest

from tests.support.cases import ragged_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("ragged")
SLOW = pytest.mark.slow


@pytest.fixture(params=[pytest.param("1", id="C"), pytest.param("0", id="python")])
def native(request, monkeypatch):
    monkeypatch.setenv("FUNCCOLL_NATIVE", request.param)


@pytest.mark.parametrize(
    ("axes", "over", "seeds", "most"),
    [
        ({"d": 3}, ("d",), range(1), 9),
        pytest.param({"d": 3}, ("d",), range(1, 12), 5000, marks=SLOW),
        pytest.param({"d": 2}, ("d",), range(12), 5000, marks=SLOW),
        pytest.param({"a": 2, "b": 2}, ("a",), range(6), 900, marks=SLOW),
        pytest.param({"a": 2, "b": 2}, ("b", "a"), range(6), 900, marks=SLOW),
    ],
)
def test_values(native, axes, over, seeds, most):
    ranks = 1
    for size in axes.values():
        ranks *= size
    assert launch(cases.some, ranks, axes, over, list(seeds), most) == ["well"] * ranks


@pytest.mark.parametrize(
    ("ranks", "seeds"), [(3, [3]), pytest.param(2, range(6), marks=SLOW), pytest.param(4, range(12), marks=SLOW)]
)
def test_groups(ranks, seeds):
    assert launch(cases.some_groups, ranks, ranks, list(seeds)) == ["well"] * ranks


@SLOW
def test_loops_and_branches():
    assert launch(cases.in_control_flow, 3, 3) == ["well"] * 3


def test_all_ranks_raise_what_one_has_told_wrongly(native):
    """Nothing has moved: the next calls are right."""
    first, *others = launch(cases.told_wrongly, 3)
    assert all(other == first for other in others)
    assert [text.partition(": ")[2] for text in first] == [
        "ragged_all_to_all over 'd': rank 1 sends rows 2 to 4 to rank 1, and its operand has 3 rows. The sizes that rank 1 "
        "sends are [2, 2, 2].",
        "ragged.all_to_all over axis 'd': rank 1 has 3 rows, and its sizes are [2, 2, 2]. They must be at least 0, and sum up "
        "to the rows.",
        "ragged.reduce_scatter over axis 'd': rank 1 has 3 rows, and its sizes are [2, 0, 0]. They must be at least 0, and sum "
        "up to the rows.",
        "ragged.reduce_scatter over axis 'd': ranks 0 and 1 have different sizes: [3, 0, 0] and [0, 3, 0]. They are those of "
        "all ranks' results, and must be equal on all ranks.",
    ]


def test_a_call_of_another_thread_changes_no_words(tmp_path):
    told = launch(cases.another_thread, 2, str(tmp_path))
    assert "called a collective over a mesh whose collectives belong to thread" in told[0] and not told[1]


def test_other_shapes_between_ranks():
    told = launch(cases.other_shapes, 2)
    assert all(text.startswith("ProgramMismatch") for text in told), told
    assert any("shape" in text and "[4, 3]" in text and "[4, 4]" in text for text in told), told
