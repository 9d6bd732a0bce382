"""Programs over real processes: the bits of virtual devices; and what a process is told when another one fails."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "process_cases.py"


def run(count: int, *arguments: str, **environment: str) -> list[tuple[int, str, str]]:
    """(exit status, stdout, stderr) of each rank."""
    run_id = secrets.token_hex(8)
    ranks = []
    for rank in range(count):
        job = {"FUNCCOLL_RANK": str(rank), "FUNCCOLL_WORLD_SIZE": str(count), "FUNCCOLL_RUN_ID": run_id, **environment}
        ranks.append(subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), *arguments], env={**os.environ, **job}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ))  # fmt: skip
    try:
        return [(p.returncode, *out) for p in ranks if (out := p.communicate(timeout=500))]
    finally:
        for p in ranks:
            p.kill()


@pytest.mark.parametrize("count", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["table", "collectives", "forced", "programs"])
def test_processes_have_the_bits_of_virtual_devices(what, count):
    for status, out, err in run(count, what):
        assert (status, out, err) == (0, "", "")


@pytest.mark.parametrize("count", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["staged", "staged in one piece"])
def test_what_is_staged_has_the_bits_of_what_is_shared(what, count):
    for status, out, err in run(count, what):
        assert (status, out, err) == (0, "", "")


def told(what: str, **environment: str) -> tuple[str, float]:
    """What rank 0 is told when rank 1 does something, and after how many seconds."""
    _, out, _ = run(2, what, **environment)[0]
    found = re.match(r"\w+ after ([\d.]+) s: ", out)
    assert found, out
    assert "again: an earlier failure ended all collectives of this job" in out
    return out, float(found[1])


@pytest.mark.parametrize(("what", "words"), [
    ("kill", "PeerFailure.*rank 1 died without a word"),
    ("raise", "PeerFailure.*rank 1 raised ValueError: rank 1 has had enough.*Traceback"),
    ("leave", "PeerFailure.*rank 1 left the job"),
    ("mismatch", "ProgramMismatch.*rank 0 is in all_reduce among ranks .0, 1. .process_cases.py.*and rank 1 entered another"),
])  # fmt: skip
def test_what_a_rank_is_told(what, words):
    out, _ = told(what)
    assert re.search(words, out, re.DOTALL), out
    assert re.search(r"at .*process_cases\.py:\d+ in", out), out


def test_a_rank_that_does_not_come_is_named_after_the_timeout():
    out, seconds = told("sleep", FUNCCOLL_TIMEOUT="1")
    assert "CollectiveTimeout" in out
    assert "waited" in out
    assert "rank 1 has finished all_reduce" in out
    assert seconds >= 1
