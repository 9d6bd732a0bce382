"""Programs over real processes: the bits of virtual devices; and what a process is told when another one fails."""

from __future__ import annotations

import re

import pytest

from tests.support.cases import process_cases
from tests.support.ranks.ranks import PRELUDE, Ranks, launch

pytestmark = pytest.mark.covers("control-flow", "collectives", "shared-memory", "staging")

QUICK = [
    ("half of fewest", 2),
    ("half of collectives", 2),
    ("forced", 3),
    ("programs", 3),
    ("staged", 2),
    ("loops", 3),
    ("data_parallel", 2),
    ("communication hooks", 2),
    ("memory orders", 2),
    ("transformers", 2),
    ("started half of fewest", 2),
]
DEEP = [
    ("forced", 2),
    ("programs", 2),
    ("loops", 2),
    ("whole table", 2),
    ("table in turn", 4),
    ("collectives", 2),
    ("collectives", 3),
    ("staged", 3),
    ("staged in one segment", 3),
    ("collectives", 4),
    ("forced", 4),
    ("programs", 4),
    ("forced", 8),
    ("programs", 8),
    ("nans", 4),
    ("data_parallel", 4),
    ("communication hooks", 4),
    ("memory orders", 4),
    ("transformers", 4),
    ("started table in turn", 3),
    ("started gradients in turn", 4),
    ("started loops", 3),
    ("overlapped loops", 3),
    ("overlapped programs", 3),
    ("overlapped data_parallel", 2),
    ("overlapped memory orders", 2),
    ("overlapped transformers", 2),
]
OTHERS = [
    ("table", 2),
    ("table", 3),
    ("table", 4),
    ("staged in one segment", 2),
    ("staged", 4),
    ("staged in one segment", 4),
    ("collectives", 8),
    ("nans", 2),
    ("data_parallel", 3),
    ("communication hooks", 3),
    ("memory orders", 3),
]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in DEEP),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS),
    ],
)
def test_processes_have_the_bits_of_virtual_devices(name, count, tmp_path, monkeypatch):
    process_cases.record(name, count, tmp_path / "record")
    monkeypatch.setenv("FUNCCOLL_CHECK", "")  # the passes are checked where the programs are recorded
    launch(process_cases.compare, count, name, tmp_path / "record")


def told(what: str) -> str:
    """What rank 0 is told when rank 1 does something."""
    script = PRELUDE + f"from tests.support.cases import process_cases; process_cases.failure({what!r})"
    with Ranks(script, range(2), imports=["tests.support.cases.process_cases"]) as ranks:
        _, printed, _ = ranks.end(0)
    out = "\n".join(printed)
    assert "again: an earlier failure ended all collectives of this job" in out
    return out


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("kill", "PeerFailure.*rank 1 died without a word"),
        ("raise", "PeerFailure.*rank 1 raised ValueError: rank 1 has had enough.*Traceback"),
        (
            "leave",
            r"PeerFailure: rank 1 left the job[^\n]*\. If only some ranks called this function, call it on all of them and "
            r"print on one\.\n  rank 0 .*again: [^\n]*It was: rank 1 left the job[^\n]* waited for rank 1\.\n",
        ),
        (
            "mismatch",
            r"ProgramMismatch: ranks 1 and 0 entered .* differ in op\.\s+rank 1: all_reduce on 2 ranks \(max\) of f64",
        ),
    ],
)
def test_what_a_rank_is_told(what, words):
    out = told(what)
    assert re.search(words, out, re.DOTALL), out
    assert re.search(r"at .*process_cases\.py:\d+ in", out), out


def test_a_rank_that_does_not_come_is_named_after_the_timeout():
    out = told("sleep")
    assert "CollectiveTimeout" in out
    assert re.search(r"waited [1-9][\d.]* s", out)
    assert "rank 1 has finished all_reduce" in out
