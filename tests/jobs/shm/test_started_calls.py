"""Started calls (`fc.start`) in processes of one host, and over MPI: all ways to wait, and all that ends them early."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.jobs.mpi.test_mpi import job, run
from tests.support.cases import started_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("started-calls")

WELL = [cases.ways_of_waiting, cases.forked, cases.finalized, cases.bad_arguments]


@pytest.mark.parametrize("case", WELL, ids=lambda case: case.__name__)
def test_calls_end_well(case):
    assert launch(case, 2) == [True] * 2


def test_another_order_on_one_rank_is_refused_on_both():
    told = launch(cases.other_order, 2)
    assert all("entered different collectives at the same time: they differ in op" in words for words in told), told
    assert all("started_cases.py:" in words for words in told), told


def test_a_thread_is_named_that_starts_the_calls_of_another_ones_mesh():
    told = launch(cases.other_thread, 2)
    assert all(
        "thread 'helper' called a collective over a mesh whose collectives belong to thread 'MainThread'" in t for t in told
    )


DROPPED = "from tests.support.cases import started_cases; started_cases.dropped()"


@pytest.mark.parametrize("when", [(), ("end",)], ids=["before the next call", "at the end"])
def test_a_failure_of_a_dropped_call_is_raised(when, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DROPPED)
    command = [sys.executable, "-m", "funccoll", "run", "-n", "2", str(script), *when]
    done = subprocess.run(command, capture_output=True, text=True)
    if when:
        assert done.returncode in (1, 69) and "ProgramMismatch: ranks" in done.stderr and "differ in op" in done.stderr, done
    else:
        assert done.returncode == 0 and done.stdout.count("is told") == 2, done


SCRIPT = """
import os
{begin}
import funccoll as fc
from tests.support.cases import started_cases
fc.init()
for case in {cases}:
    os.environ["CALL"] = f"{folder}/{{case}}"
    assert getattr(started_cases, case)() is True, case
os.write(1, f"rank {{fc.rank()}} is fine\\n".encode())
"""
FUNNELED = "import mpi4py; mpi4py.rc.thread_level = 'funneled'; from mpi4py import MPI"


@pytest.mark.slow
@pytest.mark.parametrize("vendor", ["openmpi", "mpich"])
@pytest.mark.parametrize(
    ("begin", "names"),
    [("", ["ways_of_waiting", "interrupted", "forked", "bad_arguments", "finalized"]), (FUNNELED, ["one_thread", "finalized"])],
    ids=["threads", "one thread"],
)
def test_calls_end_well_over_mpi(vendor, begin, names, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(begin=begin, cases=names, folder=tmp_path))
    run(vendor, [2], [sys.executable, "-W", "error", str(script)], FUNCCOLL_TRANSPORT="mpi")


@pytest.mark.slow
def test_a_failure_of_a_dropped_call_ends_a_job_of_two_hosts(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DROPPED)
    with job("openmpi", (1, 1), [sys.executable, str(script), "end"]) as started:
        out, err = started.communicate(timeout=600)
    assert started.returncode in (1, 69) and "ProgramMismatch" in err and "differ in op" in err, out + err
