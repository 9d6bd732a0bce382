"""Programs over hosts whose started collectives are in flight while they compute: the bits of plain calls."""

from __future__ import annotations

import random
import sys

import pytest

from tests.jobs.mpi.test_mpi import run
from tests.support.cases.overlap_cases import KINDS

pytestmark = [pytest.mark.covers("overlap", "mpi"), pytest.mark.slow]

SCRIPT = """
import os, sys
import funccoll as fc
from tests.support.cases import overlap_cases
fc.init()
flown = overlap_cases.compare(eval(sys.argv[1]))
assert flown > 10, flown
os.write(1, b"rank %d is fine\\n" % fc.rank())
"""


@pytest.mark.parametrize(("vendor", "counts"), [("openmpi", (1, 1)), ("mpich", (1, 1)), ("mpich", (2,))])
def test_random_programs_have_the_bits_of_plain_calls(vendor, counts, tmp_path):
    draw = random.Random(f"{vendor} {counts}")
    drawn = lambda: (draw.choice(KINDS), draw.randrange(8), draw.randrange(8))
    programs = [([drawn() for _ in range(draw.randrange(4, 17))], draw.random() < 0.5) for _ in range(8)]
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {"FUNCCOLL_TRANSPORT": "mpi"} if len(counts) == 1 else {}
    run(vendor, counts, [sys.executable, str(tmp_path / "script.py"), repr(programs)], FUNCCOLL_FUSE="1", **variables)
