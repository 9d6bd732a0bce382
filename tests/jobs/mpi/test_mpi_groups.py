"""Groups of a job's processes over MPI: on hosts of their own, and on one machine by messages between all ranks."""

from __future__ import annotations

import sys

import pytest

from tests.jobs.mpi.test_mpi import run

pytestmark = [pytest.mark.covers("process-groups", "mpi"), pytest.mark.slow]

# Groups of random members, parts of a mesh, splits, groups that are freed: each compares with virtual devices.
SCRIPT = """
import os
import funccoll as fc
from tests.support.cases import process_group_cases as cases
fc.init()
cases.random_groups(3, 6)
if fc.world_size() == 4:
    cases.parts_and_splits()
cases.many(20, True)  # until as many groups as ever are alive at once
(_, half), (_, whole) = cases.many(20, True)
assert half == whole, (half, whole)
os.write(1, f"rank {fc.rank()} is fine\\n".encode())
"""


@pytest.mark.parametrize("vendor", ["openmpi", "mpich"])
@pytest.mark.parametrize("counts", [(4,), (2, 2), (1, 2)])
def test_groups_have_the_bits_of_virtual_devices(vendor, counts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {"FUNCCOLL_TRANSPORT": "mpi"} if len(counts) == 1 else {}
    run(vendor, counts, [sys.executable, "-W", "error", str(script)], **variables)
