"""Collectives in groups along an axis, between processes: the bits of slices, and other groups on one rank are an error."""

from __future__ import annotations

import re

import pytest

from tests.support.cases import axis_group_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("axis-groups")

FOUR = ([[0, 3], [2, 1]], [[2], [3, 0, 1]], [[1], [0], [3, 2]], [[3, 2, 1, 0]])


@pytest.mark.parametrize(
    ("ranks", "partitions", "sizes"),
    [
        (3, [[[1], [2, 0]]], (12,)),
        pytest.param(4, FOUR, (12, 3000), marks=pytest.mark.slow),
        pytest.param(2, [[[1], [0]], [[1, 0]]], (12, 3000), marks=pytest.mark.slow),
    ],
)
def test_values(ranks, partitions, sizes):
    assert launch(cases.some, ranks, partitions, sizes) == ["well"] * ranks


@pytest.mark.slow
def test_other_groups_on_one_rank():
    """No rank gets a result: the first call compares what all ranks along the axis run."""
    told = launch(cases.other_groups, 4)
    text = next(text for text in told if text.startswith("ProgramMismatch"))
    (found,) = re.findall(r"differ in axes \('d' in groups (.*?) and 'd' in groups (.*?)\)", text)
    assert {*found} == {"[[0, 1], [2, 3]]", "[[0, 2], [1, 3]]"}, text
    assert all(text.split(":")[0] in ("ProgramMismatch", "PeerFailure") for text in told), told
