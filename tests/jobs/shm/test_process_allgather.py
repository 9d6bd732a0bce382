"""fc.process_allgather of what each process holds, and of Arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import DTypeError, TraceError
from tests.support.cases import process_allgather_cases
from tests.support.cases.process_allgather_cases import same
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("collectives")


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_values_of_all_processes(world):
    launch(process_allgather_cases.gathered, world)


def test_arrays_that_are_split_along_different_axes():
    launch(process_allgather_cases.gathered_along_axes, 4)


def test_reads_of_split_arrays():
    launch(process_allgather_cases.reads_of_split_arrays, 2)


def test_values_that_differ_are_an_error_on_all_ranks():
    first, *others = launch(process_allgather_cases.different, 2)
    assert len(first) == len(process_allgather_cases.DIFFERENT) and all(told == first for told in others)


def test_a_rank_that_gathers_alone_is_told_with_its_line():
    """The collectives of an earlier line with the same shapes are not named in its place."""
    lines = Path(process_allgather_cases.__file__).read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith("# this line")]
    found = launch(process_allgather_cases.one_rank_alone, 2)
    table = next(text for text in found if text.startswith("ProgramMismatch: "))
    assert f"all_gather on 2 ranks of f64, shape [2], over 'd' by direct at process_allgather_cases.py:{line} (" in table, found


def test_one_process_is_one_of_one():
    process_allgather_cases.gathered()
    same(fc.process_allgather(np.ones((2, 3))), np.ones((1, 2, 3)))
    same(fc.process_allgather(np.ones((2, 3)), tiled=True), np.ones((2, 3)))
    x = np.ones(2)
    found = fc.process_allgather(x)
    found[:] = 5
    assert x.all() and (x == 1).all()


def test_arrays_keep_their_meaning():
    mesh = fc.make_mesh({"d": 4})
    for spec in (P("d"), P()):
        same(fc.process_allgather(fc.device_put(np.arange(8), mesh, spec)), np.arange(8))


def test_errors_name_the_leaf():
    for value, words in (({"w": [object()]}, r"arr\['w'\]\[0\]"), (["text"], r"arr\[0\]")):
        with pytest.raises((TraceError, DTypeError), match=rf"process_allgather: {words}"):
            fc.process_allgather(value)
    with pytest.raises(TraceError, match="arr is a traced array"):
        fc.jit(lambda x: fc.process_allgather(x))(np.ones(2))
