"""Programs that differ between ranks around equal collectives: the error names the first difference."""

from __future__ import annotations

import re

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.core.ir import Program
from funccoll.core.program_difference import program_rows
from tests.support.cases import other_program_cases as cases
from tests.support.ranks.ranks import Ranks, launch

pytestmark = pytest.mark.covers("job-checks")

LINE = r"at \S*other_program_cases.py:\d+ \(body\)"


@pytest.mark.parametrize(
    ("kind", "words", "is_value"),
    [
        ("number", r"rank RANK: multiply of f64\[2,3\]\{d\}, the number (0|1)\.5 LINE", True),
        ("operation", r"rank RANK: (cos|sin) of f64\[2,3\]\{d\} LINE", False),
        ("more", r"rank RANK: (reduce_sum\S*.*|tan) of f64\[2,3\]\{d\} LINE", False),
        ("captured", r"rank RANK: .* of a captured f64\[3\] \(values ([0-9a-f]{8})\) LINE", True),
        ("loop", r"rank RANK: multiply of f64\[2,3\]\{d\}, the number (2|3)\.0 at \S*other_program_cases.py:\d+", True),
    ],
)
def test_the_first_difference_is_told(kind, words, is_value):
    told = launch(cases.other_program, 2, kind)
    texts = [text for found, text in told if found == "ProgramMismatch"]
    assert texts and all(found in ("ProgramMismatch", "PeerFailure") for found, _ in told), told
    text = next((text for text in texts if "their programs differ, first in rank" in text), "")
    first, *_, remedy = [line for line in text.splitlines() if not line.startswith("  ")]
    pattern = words.replace("LINE", LINE)
    parts = [re.search(pattern.replace("RANK", str(rank)), part) for part in first.split("; ") for rank in (0, 1)]
    one, other = [part for part in parts if part]
    assert one[1] != other[1] and one[0] != other[0], text  # what it shows is not alike
    assert ("np.random" in remedy) == is_value and ("branches on the rank" in remedy) != is_value, text


def test_a_rank_that_does_not_compile_is_named():
    """Its program has one operation, which says nothing to the user."""
    texts = [text for found, text in launch(cases.other_program, 2, "not compiled") if found == "ProgramMismatch"]
    for text in texts:
        assert "rank 1 runs operations one by one, in fc.debug.disable_jit, and rank 0 is in a compiled program.\n" in text
        assert "\nUse fc.debug.disable_jit on all ranks, or on none.\n" in text
    assert texts


def traced(factor: float, weights: np.ndarray) -> Program:
    mesh = fc.make_mesh({"d": 2})
    jitted = fc.jit(lambda x: np.sin(x * factor) + weights, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    return jitted.lower(np.ones((2, 3))).compile().program


def test_rows_are_equal_where_fingerprints_are():
    one, again = traced(2.0, np.arange(3.0)), traced(2.0, np.arange(3.0))
    assert one.fingerprint == again.fingerprint and program_rows(one) == program_rows(again)
    for other in traced(3.0, np.arange(3.0)), traced(2.0, np.arange(3.0) + 1):
        rows = [*zip(program_rows(one), program_rows(other), strict=True)]
        differ = [(mine, theirs) for mine, theirs in rows if mine.hash != theirs.hash]
        assert other.fingerprint != one.fingerprint and len(differ) == 1
        ((mine, theirs),) = differ
        assert mine.form == theirs.form and mine.shown != theirs.shown


BOUNDARY = """
import numpy as np, funccoll as fc
mesh = fc.make_mesh({"d": 4})
@fc.jit(mesh=mesh, in_specs=fc.P("d"), out_specs=fc.P("d"))
def f(x):
    return fc.permute(x * (2 + (fc.rank() == 0)), "d", [(0, 1)])
f(np.arange(8.0))
"""


def test_ranks_whose_peer_has_ended_tell_the_difference_that_the_first_has_found():
    """A rank that comes to its error late asks one which answers no more."""
    with Ranks(BOUNDARY, range(4)) as ranks:
        codes, _, errors = zip(*[ranks.end(rank) for rank in range(4)], strict=True)
    written = "\n".join(errors)
    told = re.findall(r"^funccoll.errors.ProgramMismatch: .*", written, re.MULTILINE)
    assert all(codes) and told, written
    for line in told:
        pattern = r": their programs differ, (as those of ranks (0 and \d|\d and 0) do, )?first in rank \d: multiply of "
        assert re.search(pattern, line), line
    assert written.count("The operation is the same, and a value that each rank had") >= len(told), written
    assert "TracedRankWarning" not in written  # each rank is one device, and says itself what it traced
