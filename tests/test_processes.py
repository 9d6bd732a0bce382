"""Programs over real processes: the bits of virtual devices; and what a process is told when another one fails."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import process_cases
import pytest

SCRIPT = Path(__file__).parent / "process_cases.py"


def run(count: int, *arguments: str) -> list[tuple[int, str, str]]:
    """(exit status, stdout, stderr) of each rank. Stdin of a rank ends when those before it have ended."""
    run_id = secrets.token_hex(8)
    ranks = []
    for rank in range(count):
        job = {"FUNCCOLL_RANK": str(rank), "FUNCCOLL_WORLD_SIZE": str(count), "FUNCCOLL_RUN_ID": run_id,
               "FUNCCOLL_CHECK": ""}  # the passes are checked where the programs are recorded
        ranks.append(subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), *arguments], env={**os.environ, **job}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ))  # fmt: skip
    try:
        return [(p.returncode, *out) for p in ranks if (out := p.communicate(timeout=500))]
    finally:
        for p in ranks:
            p.kill()


NAMES = ["table", "collectives", "forced", "programs", "staged", "staged in one segment"]
QUICK = [*((name, 2) for name in NAMES[:5]), ("forced", 3), ("programs", 3), ("data_parallel", 2),
         ("communication hooks", 2)]
DEEP = [
    ("table", 3), ("whole table", 2), ("table", 4), ("collectives", 3), ("staged", 3), ("staged in one segment", 2),
    ("staged in one segment", 3),
    *((name, 4) for name in NAMES[1:]), ("collectives", 8), ("forced", 8), ("programs", 8),
    ("nans", 2), ("nans", 4), ("data_parallel", 3), ("data_parallel", 4),
    ("communication hooks", 3), ("communication hooks", 4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "count"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in DEEP)])
def test_processes_have_the_bits_of_virtual_devices(name, count, tmp_path):
    process_cases.record(name, count, tmp_path / "record")
    assert run(count, name, str(tmp_path / "record")) == [(0, "", "")] * count


def told(what: str) -> str:
    """What rank 0 is told when rank 1 does something."""
    _, out, _ = run(2, what)[0]
    assert "again: an earlier failure ended all collectives of this job" in out
    return out


@pytest.mark.parametrize(("what", "words"), [
    ("kill", "PeerFailure.*rank 1 died without a word"),
    ("raise", "PeerFailure.*rank 1 raised ValueError: rank 1 has had enough.*Traceback"),
    ("leave", "PeerFailure.*rank 1 left the job"),
    ("mismatch", r"ProgramMismatch: ranks 1 and 0 entered .* differ in op:\s+rank 1: all_reduce on 2 ranks \(max\) of f64"),
])  # fmt: skip
def test_what_a_rank_is_told(what, words):
    out = told(what)
    assert re.search(words, out, re.DOTALL), out
    assert re.search(r"at .*process_cases\.py:\d+ in", out), out


def test_a_rank_that_does_not_come_is_named_after_the_timeout():
    out = told("sleep")
    assert "CollectiveTimeout" in out
    assert re.search(r"waited [1-9][\d.]* s", out)
    assert "rank 1 has finished all_reduce" in out
