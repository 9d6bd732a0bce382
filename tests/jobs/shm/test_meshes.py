"""Meshes of a job: ranks that make different ones are told so by `make_mesh`."""

from __future__ import annotations

import re

import pytest

from tests.support.cases import rank_mesh_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("job-checks")


@pytest.mark.parametrize(
    ("way", "one", "two"),
    [
        ("another order of axes", "{'a': 2, 'b': 1}", "{'b': 1, 'a': 2}"),
        ("other sizes", "{'a': 2, 'b': 1}", "{'a': 1, 'b': 2}"),
        ("another order of meshes", "{'a': 2}", "{'b': 2}"),
    ],
)
def test_ranks_that_make_different_meshes(way, one, two):
    told = launch(cases.other_meshes, 2, way)
    found = [text for kind, text in told if kind == "MeshError"]
    assert found and all(kind in ("", "MeshError") for kind, _ in told), told  # the first one saw no other
    line = r"rank_mesh_cases\.py:\d+ \(other_meshes\)"
    meshes = rf"rank 0 {re.escape(one)} at {line}, rank 1 {re.escape(two)} at {line}"
    for text in found:
        assert re.match(rf"ranks 0 and 1 made different meshes, each as its number 2: {meshes}\. Make the same", text), text
        assert re.search(r"\n  at .*rank_mesh_cases\.py:\d+ in other_meshes", text), text


def test_equal_meshes_from_other_lines():
    assert launch(cases.equal_meshes, 2) == [[1.0, 1.0, 1.0]] * 2


def test_different_meshes_from_pickles_do_not_meet():
    for *found, same in launch(cases.threads_with_pickled_meshes, 2):
        assert found == [1.0] * 3
        assert "which called one before and is alive" in same  # an equal mesh
