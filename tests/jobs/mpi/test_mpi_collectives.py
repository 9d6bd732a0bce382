"""MPI's own collectives by `algorithm="mpi"`: their values, what MPI lacks, and what a rank is told of failures within them."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import ScheduleError
from funccoll.job.mpirun import passed_on
from tests.support import SUPPORT
from tests.support.ranks import mpi_vendors, network_hosts
from tests.support.ranks.network_hosts import NetworkHosts

pytestmark = pytest.mark.covers("host-failures", "mpi-collectives", "axis-groups")

VENDORS = [
    pytest.param(v, marks=pytest.mark.skipif(bool(mpi_vendors.why_not(v)), reason=mpi_vendors.why_not(v)))
    for v in mpi_vendors.VENDORS
]
CASES = str(SUPPORT / "cases/mpi_collective_cases.py")
PATIENCE = 300


def on_one_host(vendor: str, count: int, call: str, file: str = CASES) -> str:
    """What the ranks print, each a host of its own on this one."""
    environment = {**mpi_vendors.variables(vendor), "FUNCCOLL_TRANSPORT": "mpi"}
    program = [sys.executable, file, call]
    command = mpi_vendors.mpirun(vendor).command([("localhost", count)], program, passed_on(environment))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


MESHES = ({"d": 2}, "d"), ({"a": 2, "b": 2}, "a"), ({"d": 3}, "d"), ({"a": 2, "b": 2}, ("b", "a"))


@pytest.mark.parametrize(
    ("vendor", "axes", "axis"),
    [
        pytest.param(*VENDORS[(number + other) % 2].values, *mesh, marks=[*VENDORS[(number + other) % 2].marks, mark])
        for other, mark in enumerate((pytest.mark.slow, pytest.mark.exhaustive))
        for number, mesh in enumerate(MESHES)
    ],
)
def test_values_are_those_of_virtual_devices(vendor, axes, axis):
    ranks = int(np.prod(list(axes.values())))
    out = on_one_host(vendor, ranks, f"values({axes!r}, {axis!r})")
    assert len(set(re.findall(r"(\d+) cases", out))) == 1 and len(re.findall("cases", out)) == ranks


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.slow
def test_groups_that_are_not_those_of_axes(vendor):
    """Of schedules and of MPI itself."""
    out = on_one_host(vendor, 4, "run(), run(native='mpi'), left_out()", str(SUPPORT / "cases/replica_group_cases.py"))
    told = dict(re.findall(r"rank (\d): \('well', 'well', \W(device \d is in none|)", out))
    assert told == {"0": "device 0 is in none", "1": "", "2": "", "3": "device 3 is in none"}, out


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.slow
def test_groups_along_an_axis(vendor):
    """Messages between ranks that are hosts of their own have the bits of slices."""
    out = on_one_host(
        vendor, 4, "some([[[0, 3], [2, 1]], [[2], [3, 0, 1]]], (12, 3000))", str(SUPPORT / "cases/axis_group_cases.py")
    )
    assert out.count(": well") == 4, out


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.slow
def test_programs_over_equal_meshes_from_pickles_share_communicators_of_mpi(vendor):
    assert on_one_host(vendor, 2, "pickled()").count("made [1, 1, 2]") == 2


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.slow
def test_what_mpi_lacks_is_refused_when_it_is_compiled(vendor):
    out = on_one_host(vendor, 2, "refused()")
    assert out.count('all_reduce: MPI cannot combine f16. Leave algorithm="mpi" out, or name one of') == 2
    assert out.count("permute: MPI has no such collective. Leave") == 2
    assert out.count("mpi (native: not proved)") == 2


def told_of_decisions(vendor: str, call: str, **variables: str) -> None:
    """Run a case whose ranks decide differently: both have an error that says so."""
    environment = {**mpi_vendors.variables(vendor), "FUNCCOLL_TRANSPORT": "mpi", **variables}
    command = mpi_vendors.mpirun(vendor).command(
        [("localhost", 2)], [sys.executable, CASES, call], passed_on(environment, [*variables])
    )
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE).stdout
    for rank in (0, 1):
        (told,) = re.findall(rf"rank {rank}: (.*)", out)
        assert re.match(r"(PeerFailure: rank \d raised \S+)?ProgramMismatch: ranks 0 and 1 decided differently", told), out
        assert re.search(r"the loop at mpi_collective_cases.py:\d+ \(loop\) ended after 3 iterations on rank 0, and", told)


@pytest.mark.parametrize(
    ("algorithm", "size"),
    [
        (None, 4),
        pytest.param(None, 20000, marks=pytest.mark.slow),
        pytest.param("mpi", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("vendor", VENDORS[:1])
def test_ranks_that_decide_differently_are_refused(vendor, algorithm, size):
    told_of_decisions(vendor, f"decides({algorithm!r}, {size})")


@pytest.mark.parametrize("algorithm", [None, "mpi"])
@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.slow
def test_a_mismatch_is_told_however_late_ranks_say_what_they_run(vendor, algorithm):
    told_of_decisions(vendor, f"answers_late({algorithm!r})", FUNCCOLL_TIMEOUT="30")


@pytest.mark.parametrize(
    ("vendor", "how", "algorithm"),
    [
        (VENDORS[0].values[0], "meshes", None),
        *(
            pytest.param(vendor.values[0], how, algorithm, marks=[*vendor.marks, pytest.mark.slow])
            for vendor in VENDORS
            for how in ("meshes", "axes", "late")
            for algorithm in (None, "mpi")
        ),
    ],
)
def test_ranks_of_different_hosts_that_wait_for_each_other_are_told(vendor, how, algorithm):
    """A rank that is only late is waited for, longer than until the others ask it."""
    ranks = {"axes": 4}.get(how, 2)
    told = dict(re.findall(r"rank (\d): (.*)", on_one_host(vendor, ranks, f"crosses({how!r}, {algorithm!r})")))
    assert len(told) == ranks
    others = {"axes": 3, "meshes": 1, "late": 0}[how]
    cycle = rf"rank (?P<first>\d) for (rank \d for ){{{others}}}rank (?P=first)"
    for text in told.values():
        error = rf"(PeerFailure: rank \d raised \S+)?ProgramMismatch: ranks wait for each other: {cycle}\. .*"
        assert re.fullmatch(error if others else "no error", text), told


OVERTAKES = {
    "shorter": "ranks 0 and 1 entered different collectives at the same time: they differ in .* some calls before",
    "equal": "ranks wait for each other: rank 1 for rank 0 for rank 1",
    "loop": r"ranks 0 and 1 decided differently .* ended after 3 iterations on rank 0, and rank 1 is in iteration 4 of it",
}


@pytest.mark.parametrize(
    ("vendor", "how"),
    [
        (VENDORS[0].values[0], "shorter"),
        *(
            pytest.param(vendor.values[0], how, marks=[*vendor.marks, pytest.mark.slow])
            for vendor in VENDORS
            for how in OVERTAKES
        ),
    ],
)
def test_a_rank_that_leaves_out_a_call_is_told_although_the_root_has_gone_on(vendor, how):
    """The next collective of that kind is not taken for the one left out, and no rank waits for the timeout."""
    told = dict(re.findall(r"rank (\d): (.*)", on_one_host(vendor, 2, f"overtakes({how!r})")))
    for text in (told["0"], told["1"]):
        assert re.match(rf"(PeerFailure: rank \d raised \S+)?ProgramMismatch: {OVERTAKES[how]}", text), told


@pytest.mark.slow
@pytest.mark.parametrize("vendor", VENDORS)
def test_the_floating_point_environment_of_a_rank_changes_no_bits(vendor):
    assert on_one_host(vendor, 2, "environments()").count("the same bits") == 2


def test_a_mesh_without_mpi_has_none_of_its_collectives():
    mesh = fc.make_mesh({"d": 2})
    function = fc.jit(lambda x: fc.all_reduce(x, "d", algorithm="mpi"), mesh=mesh, in_specs=P("d"), out_specs=P())
    with pytest.raises(ScheduleError, match=r"algorithm='mpi' is MPI's own collective, between processes of several hosts"):
        function(np.ones((2, 2)))


FAILURES = {
    "dies": r"PeerFailure: rank 1 .*(died|killed).*Rank \d was in all_reduce among ranks \[0, 1\]",
    "raises": r"PeerFailure: rank 1 raised .*ValueError: of the test",
    "hangs": r"CollectiveTimeout: rank 0 waited 3\.\d s for MPI to finish all_reduce among ranks \[0, 1\]",
}


@pytest.mark.slow
@pytest.mark.skipif(bool(network_hosts.why_not()), reason=network_hosts.why_not())
@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_within_mpi_is_told_as_any_other(vendor, how, first):
    """Also of a rank that waits for the others to make MPI's communicator, which it does in C."""
    seconds = "3" if how == "hangs" else "120"
    with NetworkHosts(2) as hosts:
        job = hosts.mpirun(vendor, [1, 1], [sys.executable, CASES, f"fails({how!r}, {first})"], {"FUNCCOLL_TIMEOUT": seconds})
        assert job.stdout is not None
        said = (line.partition("rank 0: ")[2] for line in job.stdout)
        lines = list(islice(filter(None, said), 2))
    _, errors = job.communicate(timeout=PATIENCE)  # a rank that hangs went with its host
    assert len(lines) == 2, (lines, errors)
    first, later = lines
    assert re.search(FAILURES[how], first), first
    assert "an earlier failure ended all collectives of this job" in later
