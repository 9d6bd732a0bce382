"""Jobs whose processes mpirun has started, and MPI begins and ends with them: joining, leaving, failures and bad input.

On one machine, with FUNCCOLL_TRANSPORT=mpi: every process is then a host of its own. Under each MPI that is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import uuid

import pytest

from funccoll.job.host import PEER_FAILURE_EXIT_CODE
from tests.support.processes_left import VARIABLE, wait_until_gone
from tests.support.ranks import mpi_vendors, rank_end
from tests.support.ranks.ranks import Ranks

pytestmark = pytest.mark.covers("mpi", "host-failures")

PATIENCE = 300.0
"""Seconds until a command is ended: a watchdog, not an expectation."""
PRELUDE = """
import os, sys, time
def say(*words):  # in one write: lines of several processes must not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def sure(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("never")
        time.sleep(0.001)
"""
JOIN = (
    PRELUDE
    + """
import funccoll as fc
from funccoll.job import job_context
w = fc.init()
rank = w.rank
def others_failure():
    # That of rank 1: others may have left before this one looks.
    sure(lambda: w.watch.failure([1]))
    return w.watch.failure([1])
"""
)


def installed(vendor):
    if why_not := mpi_vendors.why_not(vendor):
        pytest.skip(why_not)
    return vendor


@pytest.fixture(params=mpi_vendors.VENDORS)
def vendor(request):
    return installed(request.param)


@pytest.fixture(params=[pytest.param(each, marks=[pytest.mark.slow] * (each != "openmpi")) for each in mpi_vendors.VENDORS])
def one_vendor(request):
    """Where MPIs hardly differ: the others are slow tests."""
    return installed(request.param)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(VARIABLE, mark)
    yield
    wait_until_gone(mark)


def run(vendor, n, script, tmp_path, options=(), arguments=(), **variables):
    """(exit code, sorted lines of the ranks, stderr) of a script in `n` processes."""
    file = tmp_path / "script.py"
    file.write_text(script)
    environment = {"FUNCCOLL_TRANSPORT": "mpi", "OMP_NUM_THREADS": "1", **variables}
    more = ["--oversubscribe"] if vendor == "openmpi" else []
    done = subprocess.run(
        [mpi_vendors.mpirun(vendor).path, *more, *options, "-n", str(n), sys.executable, str(file), *arguments],
        cwd=tmp_path,
        env={**mpi_vendors.variables(vendor), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        restore_signals=False,
    )
    # MPICH's mpirun writes to stdout, too, where it has killed a process before that has ended by itself.
    theirs = r"\n=+\n=   BAD TERMINATION .*?\nYOUR APPLICATION TERMINATED [^\n]*\n(This typically [^\n]*\n[^\n]*\n)?"
    return done.returncode, sorted(re.sub(theirs, "", done.stdout, flags=re.DOTALL).splitlines()), done.stderr


def ran_well(*arguments, **variables):
    code, lines, errors = run(*arguments, **variables)
    assert code == 0, f"{lines}\n{errors}"
    return lines


def test_every_process_is_a_host_of_its_own(one_vendor, tmp_path):
    script = (
        JOIN
        + """
from mpi4py import MPI
assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
theirs, ours = MPI.COMM_WORLD, w.transport.communicator
assert (ours.rank, ours.size) == (rank, w.world) and ours != theirs and ours.Get_errhandler() == MPI.ERRORS_RETURN
assert w.watch.ask(1 - rank if rank < 2 else 0, {"kind": "where"}, 60)["text"]
theirs.Barrier()  # one that has left does not answer
say(rank, w.hosts, w.transport.name, w.transport.heap.size > 3 * w.transport.heap.arena)
"""
    )
    assert ran_well(one_vendor, 3, script, tmp_path) == [f"{r} (0, 1, 2) mpi False" for r in range(3)]


def test_a_job_on_one_host_needs_no_mpi(one_vendor, tmp_path):
    script = JOIN + "assert 'mpi4py' not in sys.modules\nsay(rank, w.hosts, w.transport.name)\n"
    assert ran_well(one_vendor, 2, script, tmp_path, FUNCCOLL_TRANSPORT="") == ["0 (0, 0) shm", "1 (0, 0) shm"]


@pytest.mark.parametrize(
    "begin",
    [
        "from mpi4py import MPI\n",
        pytest.param("import mpi4py\nmpi4py.rc.initialize = False\nfrom mpi4py import MPI\n", marks=pytest.mark.slow),
    ],
)
def test_a_program_that_uses_mpi_itself(one_vendor, begin, tmp_path):
    """Its messages and ours do not meet, also those that any process may send with any tag."""
    script = (
        begin
        + JOIN
        + """
from mpi4py import MPI
comm = MPI.COMM_WORLD
if rank == 0:
    comm.send("theirs", 1, tag=5)
for _ in range(3):
    job_context.finalize()
    w = fc.init()
    assert w.transport.communicator.size == comm.size == comm.allreduce(1)
if rank == 1:
    assert comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG) == "theirs"
say(rank, "is fine")
"""
    )
    assert ran_well(one_vendor, 2, script, tmp_path) == ["0 is fine", "1 is fine"]


@pytest.mark.slow
def test_mpi_is_finalized_when_all_have_left(one_vendor, tmp_path):
    """A rank that leaves early waits for the others; the others hear at once that it has left."""
    script = (
        JOIN
        + """
import atexit
from mpi4py import MPI
@atexit.register  # before funccoll's functions are called
def last():
    say(rank, "ends")
if rank == 1:
    sys.exit()
say(rank, "hears that", others_failure())
assert not MPI.Is_finalized()
"""
    )
    # The failure is no error of the others' here, so that all end well.
    left = "rank 1 left the job: its program ended, or called fc.finalize()"
    expected = [*(f"{r} hears that {left}" for r in (0, 2)), *(f"{r} ends" for r in range(3))]
    assert ran_well(one_vendor, 3, script, tmp_path) == sorted(expected)


FAILS = (
    JOIN
    + """
if rank == 1:
    FAIL
failure = others_failure()
say(rank, failure.kind, failure.rank)
raise failure.error()
"""
)


def test_an_exception_is_told_and_mpi_is_not_finalized(one_vendor, tmp_path):
    code, _, errors = run(one_vendor, 2, FAILS.replace("FAIL", "raise ValueError('the loss is nan')"), tmp_path)
    assert code in (1, 9, PEER_FAILURE_EXIT_CODE) and "ValueError: the loss is nan" in errors  # MPICH's mpirun kills (9)


def test_nothing_waits_for_a_rank_that_needs_one_that_left(one_vendor, tmp_path):
    """The one that left waits to finalize MPI, which the others do not, because they fail."""
    code, lines, errors = run(one_vendor, 2, FAILS.replace("FAIL", "sys.exit()"), tmp_path)
    assert code in (9, PEER_FAILURE_EXIT_CODE) and "PeerFailure: rank 1 left the job" in errors, errors
    assert lines == ["0 left 1"]


@pytest.mark.slow
def test_a_killed_rank_under_open_mpi(tmp_path):
    """mpirun kills the others 0.26 s later, and with ULFM never. MPICH's kills them within 20 ms."""
    installed("openmpi")
    for options in ((), ("--with-ft", "ulfm")):
        code, lines, errors = run("openmpi", 3, FAILS.replace("FAIL", "os.kill(os.getpid(), 9)"), tmp_path, options)
        assert code != 0 and lines == ["0 died 1", "2 died 1"], errors
        assert errors.count("PeerFailure: rank 1 died without a word") == 2, errors


BEGUN_DIFFERENTLY = (
    """
import atexit, os, sys
how = sys.argv[1:][int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))]
if how != "fc":
    import mpi4py
    mpi4py.rc.finalize = how == "mpi4py"
    from mpi4py import MPI
    @atexit.register  # called after funccoll's functions
    def last():
        assert how == "mpi4py" or MPI.Is_finalized()
        MPI.Is_finalized() or MPI.COMM_WORLD.Get_name()
"""
    + JOIN
    + """
job_context.finalize()
w = fc.init()
say(rank, "is fine")
if how == "program":
    job_context.finalize()
    MPI.Finalize()
"""
)


@pytest.mark.parametrize(
    "how",
    [
        ["mpi4py", "fc", "program"],
        pytest.param(["fc", "mpi4py"], marks=pytest.mark.slow),
        pytest.param(["program", "mpi4py"], marks=pytest.mark.slow),
        pytest.param(["mpi4py", "fc", "fc"], marks=pytest.mark.slow),
        pytest.param(["fc", "program"], marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_ranks_that_begin_mpi_differently_end_well(one_vendor, how, tmp_path):
    """Some have imported mpi4py.MPI before fc.init, which then finalizes MPI there; some finalize it themselves."""
    lines = ran_well(one_vendor, len(how), BEGUN_DIFFERENTLY, tmp_path, arguments=how)
    assert lines == [f"{rank} is fine" for rank in range(len(how))]


@pytest.mark.slow
def test_ranks_that_begin_mpi_differently_and_fail(one_vendor, tmp_path):
    """The rank that has left does not wait for ever for one that will not finalize MPI."""
    script = (
        BEGUN_DIFFERENTLY
        + """
if rank == 0:
    sys.exit()
sure(lambda: w.watch.failure([0]))
raise ValueError("the loss is nan")
"""
    )
    code, _, errors = run(one_vendor, 2, script, tmp_path, arguments=["mpi4py", "fc"])
    assert code != 0 and "ValueError: the loss is nan" in errors, errors


OWN_MPI = """
import atexit
from mpi4py import MPI
@atexit.register  # before funccoll's functions, and called after them
def last():
    os.write(2, b"ends\\n")
"""


@pytest.mark.slow
def test_a_failure_where_mpi4py_would_finalize(one_vendor, tmp_path):
    """It would wait for rank 1, which is stopped. All functions for Python's end are called before, and its exit code stays."""
    script = (
        OWN_MPI
        + JOIN
        + """
from funccoll.job.failure import Failure
if rank == 1:
    os.kill(os.getpid(), 19)
w.watch._record(Failure(1, "unreachable"))
raise w.watch.failure().error()
"""
    )
    code, _, errors = run(one_vendor, 3, script, tmp_path)
    assert code in (9, PEER_FAILURE_EXIT_CODE) and "PeerFailure: rank 1's host does not answer" in errors, errors
    assert "ends" in errors


# ---------------------------------------------------------------- bad input


@pytest.mark.slow
def test_a_rank_that_ends_before_mpi_begins(vendor, tmp_path):
    """The others are in MPI's initialization, in C, which mpi4py calls with Python's lock."""
    script = (
        PRELUDE
        + """
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    sys.exit()
import funccoll as fc
fc.init(rendezvous_timeout=1)
"""
    )
    code, _, errors = run(vendor, 3, script, tmp_path)
    assert code != 0 and "not all 3 processes have begun MPI within 1 s. Look for an error of another one above" in errors


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named(one_vendor, tmp_path):
    script = (
        PRELUDE
        + """
import funccoll as fc
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 2:
    time.sleep(1000)
try:
    fc.init(rendezvous_timeout=2)
except fc.errors.RendezvousError as error:
    say(str(error).partition(" (run")[0])
    MPI.COMM_WORLD.Barrier() if MPI.COMM_WORLD.rank else time.sleep(1), os._exit(7)
"""
    )
    _, lines, errors = run(one_vendor, 3, script, tmp_path)
    assert "rank 2 of 3 did not come within 2 s" in lines, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vendor", "number", "says"),
    [
        ("openmpi", 9, "RendezvousError: rank 1 ended before the job could begin"),
        ("openmpi", 19, "all ranks came, and not all were ready in time"),
        ("mpich", 19, "all ranks came, and not all were ready"),
    ],
)
def test_a_rank_that_ends_or_stops_while_the_communicator_is_made(vendor, number, says, tmp_path):
    script = (
        PRELUDE
        + f"""
import funccoll as fc
from funccoll.transports.mpi import mpi_transport
def end(self, check):
    os.kill(os.getpid(), {number})
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    mpi_transport._Mpi.begin = end
fc.init(rendezvous_timeout=5)
"""
    )
    options = ["--with-ft", "ulfm"] if number == 9 else []  # or mpirun would kill the others
    code, _, errors = run(installed(vendor), 3, script, tmp_path, options)
    assert code != 0 and says in errors, errors


def test_an_mpi_that_is_not_the_launchers(one_vendor, tmp_path):
    other = next(name for name in mpi_vendors.VENDORS if name != one_vendor)
    library = mpi_vendors.variables(installed(other))["MPI4PY_LIBMPI"]
    code, _, errors = run(one_vendor, 2, JOIN, tmp_path, MPI4PY_LIBMPI=library, TMPDIR=str(tmp_path))
    named = {"openmpi": "Open MPI v", "mpich": "MPICH Version:"}[other]
    # Either rank tells it: mpirun stops the other one as soon as one has ended.
    assert code != 0 and re.search("mpirun started this process as rank [01] of 2; mpi4py uses " + named, errors), errors
    why = {"openmpi": "which says that it is rank 0 of 1", "mpich": "which cannot begin under it"}[other]
    assert f"{why}. Start the job with that MPI's mpirun" in errors


def refused(vendor, script, before="", **variables):
    """The answer of fc.init(), without mpirun, in a process that gets a launcher's variables when it has run `before`."""
    launched = {
        "openmpi": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_ess_base_jobid": "7"},
        "mpich": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    }
    ours = dict.fromkeys(("FUNCCOLL_RANK", "FUNCCOLL_WORLD_SIZE", "FUNCCOLL_RUN_ID"), "")
    environment = {**mpi_vendors.variables(vendor), **ours, "FUNCCOLL_TRANSPORT": "mpi", **variables}
    given = f"import os\nos.environ.update({launched[vendor]!r})\n"
    with Ranks(before + given + script, [0], **environment, **{rank_end.VARIABLE: "1"}) as ranks:  # mpi4py ends MPI then
        code, _, errors = ranks.end(0)
    assert code == 1
    return errors


def test_an_mpi_that_cannot_be_loaded(vendor):
    errors = refused(vendor, JOIN, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "RendezvousError: mpi4py cannot load an MPI: " in errors and "/nowhere/libmpi.so" in errors, errors


def test_without_mpi4py(vendor):
    errors = refused(vendor, "import sys\nsys.modules['mpi4py'] = None\n" + JOIN)
    assert f"MissingPackageError: a job on several hosts needs mpi4py, and {sys.executable} on " in errors, errors
    assert "pip install 'funccoll[mpi]'" in errors


# These begin MPI before they have a launcher's variables.
def test_a_single_threaded_mpi(vendor):
    begin = "import mpi4py\nmpi4py.rc.threads = False\nfrom mpi4py import MPI\n"
    errors = refused(vendor, JOIN, begin)
    assert "RendezvousError: MPI was initialized with MPI_THREAD_SINGLE" in errors, errors
    assert "MPI_THREAD_MULTIPLE" in errors


def test_an_mpi_that_is_over(vendor):
    errors = refused(vendor, JOIN, "from mpi4py import MPI\nMPI.Finalize()\n")
    assert "MPI was finalized in this process before fc.init()" in errors, errors
