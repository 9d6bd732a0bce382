"""The free list of each process of a job: the bits of virtual devices, also if you keep all results."""

from __future__ import annotations

import pytest

from funccoll.core.c_extension import extension
from tests.support.cases import free_list_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = [
    pytest.mark.covers("fast-calls"),
    pytest.mark.skipif(extension is None, reason="the C extension is not there, or not chosen"),
]


def test_two_processes_have_the_same_bits_if_all_results_are_kept():
    freed, kept = (launch(cases.trained, 2, 2, keeps) for keeps in (False, True))
    assert freed[0] == freed[1] == kept[0] == kept[1] == cases.trained(2, True)
    assert len(set(freed[0])) == 8
