"""Groups of some of a job's processes: programs on them have the bits of as many virtual devices, and misuse is named."""

from __future__ import annotations

import re

import pytest

from tests.support.cases import process_group_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("process-groups")


@pytest.mark.parametrize(
    ("n", "seed"), [(4, 0), *(pytest.param(n, s, marks=pytest.mark.slow) for n in (2, 3, 4) for s in (1, 2))]
)
def test_random_groups_have_the_bits_of_virtual_devices(n, seed):
    assert sum(launch(cases.random_groups, n, seed, 8)) > 0


def test_parts_of_a_mesh_and_splits():
    launch(cases.parts_and_splits, 4)


def test_groups_of_the_same_members_do_not_mix():
    assert launch(cases.equal_groups, 2) == [[40.0, 400.0, 4000.0]] * 2


def test_refusals():
    everyone, *others = launch(cases.refusals, 3)
    assert others == [everyone[:7]] * 2
    expected = [
        r"MeshError: fc.group\(\[0, 7\]\): this job has 3 processes, ranks 0 to 2, and 7 is not one of them",
        r"MeshError: fc.group\(\[0, 1, 0\]\): rank 0 is given twice",
        r"MeshError: fc.group: no rank was given",
        r"MeshError: rank 'a' must be an integer",
        r"MeshError: split: color=-2 must be at least 0, or None to join no group",
        r"MeshError: a mesh \{'a': 2\} has 2 devices, and group\(\[0, 1, 2\]\) has 3 members.* Choose sizes whose product is 3",
        r"PlannedError: meshes of GPUs for groups of some processes are planned",
        r"MeshError: rank 0 is not a member of group\(\[2, 1\]\), so it makes no mesh of it. Let only members call it",
        r"MeshError: rank 0 is not a member of group\(\[2, 1\]\), so it cannot split it",
    ]
    for pattern, text in zip(expected, everyone, strict=True):
        assert re.match(pattern, text), text
        assert re.search(r"\n  at .*process_group_cases\.py:\d+ in ", text), text


def test_a_member_that_never_makes_the_group_is_named():
    text, _ = launch(cases.never_made, 2, 1.0)
    assert "rank 1 left the job" in text or text.startswith("CollectiveTimeout: "), text
    assert "  rank 1 has not entered any collective" in text or "rank 1 left the job" in text, text


@pytest.mark.parametrize(("count", "drop"), [(60, True), *(pytest.param(2_000, d, marks=pytest.mark.slow) for d in (0, 1))])
def test_groups_that_are_freed_or_dropped_leave_nothing(count, drop):
    for (some, half), (entries, whole) in launch(cases.many, 3, count, drop):
        assert half == whole and max(some, entries) <= 16
        assert whole["known"] == whole["parts"] == whole["gathers"] == whole["meshes"] == 0, whole


def test_a_group_lives_as_long_as_what_was_made_of_it():
    assert launch(cases.kept_by_parts, 2) == [[3.0, 3.0, [0.0, 1.0]]] * 2


def test_stale_uses_are_refused():
    for texts in launch(cases.stale_uses, 2):
        assert len(texts) == 5
        for text in texts:
            assert re.match(
                r"MeshError: (the group of this mesh|group\(\[0, 1\]\)) was freed\. Make another one with fc\.group", text
            ), text
            assert re.search(r"\n  at .*process_group_cases\.py:\d+ in ", text), text
