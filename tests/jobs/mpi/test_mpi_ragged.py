"""Ragged collectives over MPI: on hosts of their own, and on one machine by messages between all ranks."""

from __future__ import annotations

import sys

import pytest

from tests.jobs.mpi.test_mpi import run

pytestmark = [pytest.mark.covers("ragged", "mpi"), pytest.mark.slow]

SCRIPT = """
import os
import funccoll as fc
from tests.support.cases import ragged_cases as cases
fc.init()
n = fc.world_size()
cases.some({"d": n}, ("d",), range(2), 9)
cases.some({"d": n}, ("d",), [4, 5], 20000)
cases.some_groups(n, [1, 2, 3])
if n == 4:
    cases.some({"a": 2, "b": 2}, ("a",), [4], 900)
    cases.some({"a": 2, "b": 2}, ("b", "a"), [5], 900)
assert len(cases.told_wrongly()) == 4
os.write(1, f"rank {fc.rank()} is fine\\n".encode())
"""


@pytest.mark.parametrize("vendor", ["openmpi", "mpich"])
@pytest.mark.parametrize("counts", [(3,), (2, 2), (1, 2)])
def test_ragged_blocks_are_slices(vendor, counts, tmp_path):
    """Up to 700 kB between hosts are messages of several pieces, of which a call may need few."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {"FUNCCOLL_TRANSPORT": "mpi"} if len(counts) == 1 else {}
    run(vendor, counts, [sys.executable, "-W", "error", str(script)], **variables)
