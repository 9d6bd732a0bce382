"""Collectives among groups of ranks that are not those of mesh axes: the values of their definitions, or an error."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import MeshError
from tests.support.cases import replica_group_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("collectives")

LEFT_OUT = r"device {} is in none of the groups \(\(1, 2\),\) over 'd', .*\n  at .*replica_group_cases\.py:\d+ in"


def test_virtual_devices():
    mesh = fc.make_mesh(cases.AXES)
    assert cases.run(mesh) == "well"
    assert re.match(LEFT_OUT.format(0), cases.left_out(mesh))


@pytest.mark.parametrize("kinds", [cases.FEW, pytest.param(tuple(cases.KINDS), marks=pytest.mark.slow)], ids=["few", "all"])
def test_processes(kinds):
    assert launch(cases.run, 4, None, "", (6, 3000), kinds) == ["well"] * 4


def test_a_rank_in_no_group():
    told = launch(cases.left_out, 4)
    assert told[1] == told[2] == "" and all(re.match(LEFT_OUT.format(rank), told[rank]) for rank in (0, 3)), told


@pytest.mark.parametrize(
    ("groups", "given", "made", "words"),
    [
        (cases.GROUPS, P("a"), P(("a", "d")), "its operand varies over axis 'a' alone"),
        (cases.GROUPS, P(("a", "d")), P("a"), "its result varies over axis 'a' alone"),
        (((0, 1, 2, 3),), P(), P(), "its operand varies over no axis alone"),
        (((0, 1, 2, 3),), P(("a", "d")), P(), ""),
        (((3, 1), (0, 2)), P(("a", "d")), P(("d", "a")), ""),
    ],
)
def test_copies_of_which_groups_make_different_ones(groups, given, made, words):
    mesh = fc.make_mesh(cases.AXES)
    _, call = cases.call_of("all_reduce", mesh, np.ones((4, 2, 6), np.float32), cases.GROUPS)
    schedule = fc.schedules.build("all_reduce", len(groups[0]))
    call = replace(call, groups=replace(call.groups, ranks=groups), schedule=schedule)
    if words:
        with pytest.raises(MeshError, match=words):
            call.groups_of_copies(mesh, frozenset(given.axes), frozenset(made.axes))
    else:
        size, copies, results = call.groups_of_copies(mesh, frozenset(given.axes), frozenset(made.axes))
        assert (size, copies) == (4, groups) and len(results) == np.prod([mesh.shape[a] for a in made.axes], dtype=int)
