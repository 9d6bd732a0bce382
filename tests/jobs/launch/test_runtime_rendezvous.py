"""Processes find each other: all of a job, nobody else, and whoever is missing is named."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import funccoll
from funccoll import FunccollError
from funccoll._version import __version__
from funccoll.config import TIMEOUT
from funccoll.errors import MeshError, RendezvousError
from funccoll.job.handshake import JobSpec, installation
from funccoll.job.job_context import finalize, init
from funccoll.job.launchers import job_of
from funccoll.job.rendezvous import positive_number
from funccoll.job.torch_variables import are_repetitions, bound_port, for_torch
from funccoll.runtime.transport import choose_job_transport
from tests.support.groups import in_groups
from tests.support.ranks.ranks import (
    JOIN,
    PATIENCE,
    PRELUDE,
    SAYS_WHO_COMES,
    STAY,
    Ranks,
    address,
    left_behind,
    listening,
    wait_until,
)

FOLDER = Path(funccoll.__file__).parent


def visit(run, *packets):
    """Connect to rank 0 of a run as soon as it listens, and send."""
    end = time.monotonic() + PATIENCE
    while True:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            stranger.connect(address(run))
            break
        except OSError:
            stranger.close()
            assert time.monotonic() < end
            time.sleep(0.01)
    for packet in packets:
        stranger.send(packet)
    stranger.settimeout(PATIENCE)
    return stranger


def handshake(run, **changes):
    said = {**installation(), "run": f"{run}-0", "rank": 1, "world": 2, "arena": 64 << 30, **changes}
    return json.dumps(said).encode()


def ended(stranger):
    """Whether the other side has closed the connection without a word."""
    try:
        return stranger.recv(1 << 16) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("n", [2, 5])
def test_all_find_each_other(n):
    with Ranks(JOIN + "say(w.rank, w.world, job_context.current() is w, job_context.init() is w); hear()", range(n)) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        assert ranks.lines() == {r: f"{r} {n} True True" for r in range(n)}
        assert len(listening(ranks.run)) == 1
        for r in range(n):
            ranks.tell(r)
        ranks.end_well()
        assert left_behind(ranks.run) == []


def test_unidentified_connections_are_dropped():
    with Ranks(STAY, [0], world=2) as ranks:
        run = ranks.run
        garbage = [
            b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"[]", b"3", b"null", b'{"funccoll": "0"}', b"[" * 50_000, b"x" * 150_000,
            handshake("another"), handshake(run, rank="1"), handshake(run, rank=None), handshake(run, world=2.0),
            handshake(run, funccoll=""), handshake(run, rank={}), handshake(run, arena="all"), b"\xff\xfe",
        ]  # fmt: skip
        unidentified = [visit(run, packet) for packet in garbage]
        silent = [visit(run) for _ in range(50)]
        visit(run).close()
        visit(run, garbage[0]).close()
        read, write = os.pipe()
        bearer = visit(run)
        socket.send_fds(bearer, [b"{}"], [read, write, read])
        assert all(ended(s) for s in [*unidentified, bearer])
        ranks.start(1, STAY)
        assert ranks.lines() == {0: "in", 1: "in"}
        assert all(ended(s) for s in silent)
        for s in [*unidentified, *silent, bearer]:
            s.close()
        os.close(write)
        assert os.read(read, 1) == b""  # rank 0 keeps no descriptor that it was sent
        os.close(read)
        for r in (0, 1):
            ranks.tell(r)
        ranks.end_well()
    assert left_behind(run) == []


def test_a_socket_of_another_type_or_a_flood_of_connections_hurts_nobody():
    with Ranks(STAY, [0], world=2) as ranks:
        visit(ranks.run).close()
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with pytest.raises(OSError):
            stream.connect(address(ranks.run))
        stream.close()
        for _ in range(500):
            visit(ranks.run).close()
        ranks.start(1, STAY)
        assert ranks.lines() == {0: "in", 1: "in"}


NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if sys.argv[2] == "listen":
    s.bind(sys.argv[1].replace("@", chr(0))); s.listen(); print("ready", flush=True)
    while True:
        c, _ = s.accept(); print(c.recv(9999) and "heard", flush=True)
else:
    s.connect(sys.argv[1].replace("@", chr(0)))
    try:
        s.send(sys.argv[3].encode())
        print(s.recv(9999))
    except (ConnectionResetError, BrokenPipeError):
        print(b"")
"""


def as_nobody(run, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", NOBODY, address(run).replace("\0", "@"), *arguments], stdout=subprocess.PIPE, text=True
    )  # fmt: skip


root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@root
def test_another_users_process_cannot_be_a_rank():
    with Ranks(STAY, [0], world=2) as ranks:
        visit(ranks.run).close()
        with as_nobody(ranks.run, "connect", handshake(ranks.run).decode()) as other:
            assert other.communicate(timeout=PATIENCE)[0] == "b''\n"
        ranks.start(1, STAY)
        assert ranks.lines() == {0: "in", 1: "in"}


@root
def test_another_users_process_cannot_be_rank_0():
    with Ranks(STAY, [], world=2, FUNCCOLL_RENDEZVOUS_TIMEOUT="1") as ranks, as_nobody(ranks.run, "listen") as other:
        assert other.stdout.readline() == "ready\n"
        ranks.start(0, STAY)
        ranks.start(1, STAY)
        for rank in range(2):
            code, _, error = ranks.end(rank)
            assert code == 1 and f"process {other.pid} of user 65534 has taken the name of the socket by which run" in error
            assert "Set FUNCCOLL_RUN_ID" in error
        other.kill()
        assert "heard" not in other.communicate()[0]


@root
def test_ranks_of_two_users():
    other = PRELUDE + "from funccoll.job.handshake import installation\ninstallation()\n"
    other += "os.setgroups([]); os.setgid(65534); os.setuid(65534)\njob_context.init(rendezvous_timeout=0.5)\n"
    with Ranks(STAY, [0], world=2) as ranks:
        visit(ranks.run).close()
        ranks.start(1, other)
        code, _, error = ranks.end(1)
        words = f"rank 0 of run '{ranks.run}-0' waits as user 0, and this process, rank 1, runs as user 65534"
        assert code == 1 and words in error, error
        assert "Start all processes of a job as one user" in error


CLASH = "RendezvousError: two processes came as rank {} of run '{}-0': process "
FAILS = JOIN + "sure(lambda: w.watch.failure() is not None)\nraise w.watch.failure().error()\n"


def told_of_clash(ranks, rank, names):
    """Let all of `names` end, each told that two came as `rank`, and which; their errors."""
    pids = [ranks.processes[name].pid for name in names if name == rank or name == f"twin {rank}"]
    assert len(pids) == 2
    for name in names:
        code, _, error = ranks.end(name)
        assert code == 1 and CLASH.format(rank, ranks.run) in error and "FUNCCOLL_RUN_ID" in error, f"{name}: {error}"
        assert all(f"process {pid} (" in error for pid in pids) and "rank_server.py" in error, error


IMPATIENT = "import funccoll.job.coordinator\nfunccoll.job.coordinator.GRACE = 0.2\n" + STAY


def test_a_rank_that_comes_twice():
    with Ranks(IMPATIENT, [0, 1], world=3) as ranks:
        ranks.start(1, STAY, "twin 1")
        told_of_clash(ranks, 1, [0, 1, "twin 1"])


def test_a_second_rank_0():
    with Ranks(IMPATIENT, [0], world=2) as ranks:
        visit(ranks.run).close()
        ranks.start(0, STAY, "twin 0")
        told_of_clash(ranks, 0, [0, "twin 0"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_twin_of_a_rank_of_a_job_that_has_just_begun(rank):
    """It may be the one that belongs there: nobody can know."""
    with Ranks(FAILS, [0, 1]) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        ranks.start(rank, FAILS, f"twin {rank}")
        told_of_clash(ranks, rank, [0, 1, f"twin {rank}"])


@pytest.mark.parametrize("order", [
    [0, 1, 10, 11], [0, 11, 1, 10], [1, 11, 0, 10],
])  # fmt: skip
@pytest.mark.slow
def test_two_jobs_with_one_name(order):
    """Whichever ranks meet, no job of ranks of both goes on; one that starts when they have ended waits in vain."""
    words = "RendezvousError: two processes came as rank ", "did not come within", "ended before the job could begin"
    with Ranks(FAILS, [], world=2, FUNCCOLL_RENDEZVOUS_TIMEOUT="5") as ranks:
        for name in order:
            ranks.start(name % 10, FAILS, name)
        for name in order:
            code, _, error = ranks.end(name)
            assert code == 1 and any(word in error for word in words), error
    assert left_behind(ranks.run) == []


def test_a_later_job_with_the_name_of_one_that_runs():
    """The later one ends at once, and is told by whom; the first one does not notice."""
    script = "if rank == 0:\n    w.watch._coordinator.deadline = 0\nsay('old')\nhear()\nassert w.watch.failure() is None\n"
    with Ranks(JOIN + script, [0, 1]) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        assert set(ranks.lines().values()) == {"old"}
        pid = ranks.processes[0].pid
        for rank in (1, 0):
            ranks.start(rank, STAY, "later")
            code, _, error = ranks.end("later")
            assert code == 1 and f"run '{ranks.run}-0' is a job of 2 processes that runs already" in error
            assert f"its rank 0 is process {pid} (" in error and "rank_server.py" in error
        ranks.start(2, STAY, "larger", FUNCCOLL_WORLD_SIZE="3")
        assert "runs already" in ranks.end("larger")[2]
        for rank in (0, 1):
            ranks.tell(rank)
        ranks.end_well()


def test_a_job_after_one_with_the_same_name():
    """Its ranks may come before those of the first one have ended."""
    with Ranks(JOIN + "job_context.finalize() if rank else hear()\nsay('left')\nhear()\n", [0, 1]) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        assert ranks.line(1) == "left"
        ranks.start(1, STAY, "next 1")
        wait_until(lambda: len([line for line in Path("/proc/net/unix").read_text().splitlines() if ranks.run in line]) > 1)
        ranks.tell(0)
        assert ranks.line(0) == "left"
        for rank in (0, 1):
            ranks.tell(rank)
            assert ranks.end(rank)[0] == 0
        ranks.start(0, STAY, "next 0")
        assert ranks.lines() == {"next 0": "in", "next 1": "in"}


def test_the_place_of_one_that_died_on_the_way_is_free():
    patient = SAYS_WHO_COMES + "funccoll.job.coordinator.GRACE = 120.0\n"
    with Ranks(patient + STAY, [0], world=3) as ranks:
        with visit(ranks.run, handshake(ranks.run, world=3)):
            assert ranks.line(0) == "handshake of [1]"
        assert ranks.line(0) == "gone, and left are []"
        ranks.start(1, STAY)
        assert ranks.line(0) == "handshake of [1]"
        ranks.start(2, STAY)
        assert ranks.line(0) == "handshake of [1, 2]"
        assert set(ranks.lines().values()) == {"in"}


def test_one_that_dies_on_the_way_and_does_not_come_again():
    """Nothing waits for it until the rendezvous times out."""
    with Ranks(SAYS_WHO_COMES + STAY, [0], world=4) as ranks:
        ranks.start(2, STAY)
        assert ranks.line(0) == "handshake of [2]"
        with visit(ranks.run, handshake(ranks.run, world=4)):
            assert ranks.line(0) == "handshake of [1, 2]"
        for r in (0, 2):
            code, _, error = ranks.end(r)
            assert code == 1 and "RendezvousError: rank 1 ended before the job could begin (run" in error, error


def test_missing_ranks_are_named_by_all():
    with Ranks(PRELUDE + "say('ready')\n" + STAY, [2], world=4) as ranks:
        assert ranks.line(2) == "ready"
        ranks.start(0, STAY, FUNCCOLL_RENDEZVOUS_TIMEOUT="1.5")
        for r in (0, 2):
            code, _, error = ranks.end(r)
            assert code == 1
            assert "RendezvousError: ranks 1, 3 of 4 did not come within 1.5 s" in error
            assert ranks.run in error and "FUNCCOLL_RENDEZVOUS_TIMEOUT" in error and error.count("  at ") == 1


def test_rank_0_is_missing():
    with Ranks(PRELUDE + "job_context.init(rendezvous_timeout=0.3)", [1], world=2) as ranks:
        code, _, error = ranks.end(1)
        assert code == 1 and "rank 0 did not come within 0.3 s" in error and "rank 1 of 2" in error


@pytest.mark.parametrize(("variables", "words"), [
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "RUN", "SLURM_STEP_ID": "0"},
     ["because of SLURM_STEP_NUM_TASKS=2 and SLURM_PROCID=0; unset them to run alone, ", "in an interactive Slurm shell)."]),
    ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "RUN"},
     ["because of WORLD_SIZE=2 and RANK=1; unset them to run alone). Look for an error of theirs above; if they only start ",
      "to more seconds. MASTER_ADDR=192.0.2.1 is another host: a job on several hosts needs mpirun.\n"]),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "RUN"}, ["more seconds.\n"]),
])  # fmt: skip
def test_a_rendezvous_that_times_out_quotes_what_it_believed(variables, words):
    run = secrets.token_hex(8)
    variables = {name: run if value == "RUN" else value for name, value in variables.items()}
    ours = dict.fromkeys(("FUNCCOLL_RANK", "FUNCCOLL_WORLD_SIZE", "FUNCCOLL_RUN_ID"), "")
    with Ranks(PRELUDE + "job_context.init(rendezvous_timeout=0.2)", [0], **ours, **variables) as ranks:
        code, _, error = ranks.end(0)
        assert code == 1 and all(part in error for part in words), error


def test_ranks_of_jobs_of_different_size():
    with Ranks(SAYS_WHO_COMES + STAY, [0], world=3) as ranks:
        ranks.start(1, STAY)
        assert ranks.line(0) == "handshake of [1]"
        ranks.start(2, STAY, FUNCCOLL_WORLD_SIZE="4")
        for r in range(3):
            code, _, error = ranks.end(r)
            assert code == 1 and "rank 2 was started as one of 4 processes and rank 0 as one of 3" in error


def test_ranks_with_different_versions():
    # The module that an older installation would have.
    older = PRELUDE + "import funccoll.job.handshake as r\nr.__version__ = '0.0.1'\n"
    older += "r.installation.cache_clear()\njob_context.init()"
    with Ranks(STAY, [0], world=2) as ranks:
        ranks.start(1, older)
        for r in range(2):
            code, _, error = ranks.end(r)
            assert code == 1 and "rank 1 runs funccoll 0.0.1 of " in error
            assert f"rank 0 runs funccoll {__version__} of " in error


def test_ranks_of_two_checkouts_with_one_version(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "funccoll", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "funccoll/core/display.py").open("a") as changed:
        changed.write("# changed\n")
    join = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import funccoll as fc; fc.init()"
    other = f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', {join!r}])"
    with Ranks(STAY, [0], world=2) as ranks:
        ranks.start(1, other)
        for r in range(2):
            code, _, error = ranks.end(r)
            assert code == 1 and f"rank 1 runs funccoll {__version__} of {tmp_path}/funccoll" in error
            assert f"rank 0 runs funccoll {__version__} of {FOLDER}" in error


def test_when_rank_0_cannot_start_the_job_all_hear_why():
    cannot = PRELUDE + (
        "import funccoll.transports.shm.shm_transport as shm_transport\ndef refuse(*_):\n    raise MemoryError('no room')\n"
        "shm_transport.create = refuse\njob_context.init()"
    )
    with Ranks(STAY, [1], world=2) as ranks:
        ranks.start(0, cannot)
        assert "MemoryError: no room" in ranks.end(0)[2]
        assert "RendezvousError: rank 0 could not start the job: MemoryError('no room')" in ranks.end(1)[2]


def test_the_smallest_limit_on_address_space_holds_for_all():
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n" + JOIN
    show = "say(w.transport.heap.arena); w.transport.heap.array((1000,), 'f8')[:] = 1\n"
    with Ranks(JOIN + show, [0], world=2) as ranks:
        ranks.start(1, limited + show)
        assert set(ranks.lines().values()) == {"in"}
        sizes = set(ranks.lines().values())
        assert len(sizes) == 1 and 1 << 29 < int(sizes.pop()) <= 1 << 30  # half of the limit, for two mappings of two arenas
        ranks.end_well()


def test_limits_that_are_too_low_are_named():
    files = "import resource\nn = len(os.listdir('/proc/self/fd')) + 3\nresource.setrlimit(resource.RLIMIT_NOFILE, (n, n))\n"
    with Ranks(PRELUDE + files + "job_context.init()\n", [0], world=2) as ranks:
        ranks.start(1, STAY, FUNCCOLL_RENDEZVOUS_TIMEOUT="1")
        code, _, error = ranks.end(0)
        assert code == 1 and "RendezvousError: rank 0 may open only " in error and "joining a job of 2 processes" in error
    space = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))\n"
    with Ranks(PRELUDE + space + "job_context.init()\n", [0], world=2) as ranks:
        code, _, error = ranks.end(0)
        assert code == 1 and "may map only 400 MiB of memory (`ulimit -v`), and a rank needs 640 MiB" in error


AGAIN = JOIN + """
from pathlib import Path
def count():
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), "memfd:funccoll" in maps
job_context.init()
job_context.finalize(); job_context.finalize()
assert job_context.current() is None and count()[2] is False
hook, before = sys.excepthook, count()
for generation in range(30):
    w = job_context.init()
    assert w.epoch == generation + 1 and w.once("it", lambda: generation) == w.once("it", list) == generation
    array = w.transport.heap.array((8,), "i8")
    array[:] = 100 * generation + w.rank
    mine, other = (w.transport.heap.view(65536 + 64 * r, (2,), "i8") for r in (w.rank, 1 - w.rank))
    mine[0] = w.transport.heap.offset_of(array)
    sure(lambda: other[0] != 0)
    assert w.transport.heap.view(other[0], (8,), "i8")[3] == 100 * generation + 1 - w.rank
    mine[1] = 1
    sure(lambda: other[1] == 1)
    job_context.finalize()
    del array, mine, other, w
assert count() == before and sys.excepthook is hook, (count(), before)
say("done")
"""


def test_leave_and_join_again():
    with Ranks(AGAIN, range(2)) as ranks:
        ranks.lines()
        assert ranks.lines() == {0: "done", 1: "done"}
        ranks.end_well()
    assert left_behind(ranks.run) == []


MANY = PRELUDE + """
import funccoll as fc
import funccoll.transports.shm.communicators as communicators
import funccoll.transports.shm.heap as heap
communicators._MAX_COMMUNICATORS = 3
heap.LARGEST = 16 << 40  # of 128 TiB
def until_it_raises(step):
    for _ in range(20):
        try:
            step()
        except fc.FunccollError as error:
            return say(str(error).partition("\\n")[0])
def one_more_mesh():
    add = lambda x: fc.all_reduce(x, "d")
    fc.jit(add, mesh=fc.make_mesh({"d": 2}), in_specs=fc.P("d"), out_specs=fc.P())(np.ones(4))
kept = []
def one_more_job():
    job_context.finalize()
    kept.append(job_context.init().transport.heap.array((1,), "i8"))
until_it_raises(one_more_mesh)
until_it_raises(one_more_job)
"""


def test_limits_of_meshes_and_of_jobs_are_told_in_one_sentence():
    with Ranks(MANY, range(2), FUNCCOLL_RENDEZVOUS_TIMEOUT="2") as ranks:
        assert set(ranks.lines().values()) == {
            "this job has 3 communicators, one for each mesh and the axes over which its programs communicate, and no room for "
            "another: make each mesh once, with fc.make_mesh, and use it in all functions."
        }
        said = ranks.lines().values()
        assert any(line.startswith("this process cannot map the job's 32") for line in said), said
        assert any("jobs that it has left and whose arrays it keeps (Cannot allocate memory): join f" in line for line in said)
        ranks.end_well()


STARTS = JOIN + """
import subprocess
joining = "from funccoll.job import job_context; job_context.init(); print('again', flush=True)"
child = subprocess.run([sys.executable, "-c", joining], stderr=subprocess.PIPE, text=True)
assert child.returncode == 1 and f"started by rank {rank} and is not a rank of its own" in child.stderr, child.stderr
remedy = f"or alone, without FUNCCOLL_WORLD_SIZE=2 and FUNCCOLL_RANK={rank} in its environment."
assert "Start it as a job of its own (`funccoll run -n N`, fc.launch), " + remedy in child.stderr, child.stderr
alone = {name: value for name, value in os.environ.items() if name not in ("FUNCCOLL_RANK", "FUNCCOLL_WORLD_SIZE")}
subprocess.run([sys.executable, "-c", joining], stdout=subprocess.DEVNULL, check=True, env=alone)
job_context.finalize()
os.execv(sys.executable, [sys.executable, "-c", joining])
"""


def test_a_program_that_a_rank_starts_is_no_rank():
    """But one that takes its place is: after `finalize`, and under the same process id."""
    with Ranks(STARTS, range(2)) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        assert ranks.lines() == {0: "again", 1: "again"}
        ranks.end_well()


def test_alone_there_is_nobody_to_join():
    assert init() is None
    finalize()


# ---------------------------------------------------------------- the environment


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, JobSpec(0, 1, "")),
    ({"WORLD_SIZE": "1", "RANK": "0"}, JobSpec(0, 1, "")),
    ({"FUNCCOLL_WORLD_SIZE": "4", "FUNCCOLL_RANK": "3", "FUNCCOLL_RUN_ID": "ab"}, JobSpec(3, 4, "ab")),
    ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500",
      "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, JobSpec(1, 2, "none-h-29500-1")),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
      "PMIX_NAMESPACE": "prterun-1@1"}, JobSpec(1, 2, "prterun-1@1")),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_ess_base_jobid": "7"}, JobSpec(0, 2, "7")),
    ({"PMI_SIZE": "2", "PMI_RANK": "1", "SLURM_JOB_ID": "3", "SLURM_STEP_ID": "1"}, JobSpec(1, 2, "3-1")),
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_JOB_ID": "3",
      "SLURM_STEP_ID": "0"}, JobSpec(2, 4, "3-0")),
    ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "3"}, JobSpec(0, 1, "")),  # a batch script
    ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h", "HOROVOD_GLOO_RENDEZVOUS_PORT": "9"},
     JobSpec(1, 2, "h-9")),
    ({"LOCAL_RANK": "1", "MASTER_ADDR": "h", "SLURM_STEP_NUM_TASKS": "4", "WORLD_SIZE": "", "PMI_RANK": ""}, JobSpec(0, 1, "")),
    ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, JobSpec(0, 1, "")),
])  # fmt: skip
def test_a_launchers_environment(environment, expected):
    found = job_of(environment)
    assert (found.rank, found.world, found.run) == (expected.rank, expected.world, expected.run) and not found.across_hosts
    assert found.gives_grace == ("FUNCCOLL_RANK" in environment)
    values = dict(part.split("=") for part in found.variables.split(" and ") if part)
    assert values.items() <= environment.items() and len(values) == 2 * (found.world > 1)


FUNCCOLL = {"FUNCCOLL_WORLD_SIZE": "2", "FUNCCOLL_RANK": "1", "FUNCCOLL_RUN_ID": "f"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "o"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}
POD = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "pod", "MASTER_PORT": "1"}
PODS = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "pod-0", "MASTER_PORT": "1"}
TORCHRUN_RANK = {**PODS, "RANK": "2", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "t", "TORCHELASTIC_RESTART_COUNT": "0"}
STEP = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_NODEID": "2",
        "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}  # fmt: skip
ONE_TASK = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
REPEATED = {**FUNCCOLL, "WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "7", "FUNCCOLL_SET_TORCH": "1 2"}
"""The variables that `funccoll run` sets, with torch's."""
NESTED = [
    # Launchers from the outermost one to the innermost one: what each adds to the environment.
    ((STEP, OPEN_MPI), (1, 2, "o")),
    ((STEP, MPICH), (1, 2, "parent")),
    ((STEP, TORCHRUN_RANK), (2, 4, "t-pod-0-1-0")),
    ((POD, OPEN_MPI), (1, 2, "o")),
    ((POD, MPICH), (1, 2, "parent")),
    ((POD, TORCHRUN_RANK), (2, 4, "t-pod-0-1-0")),
    ((PODS, OPEN_MPI), (1, 2, "o")),
    ((PODS, {}), (3, 4, "pod-0-1")),
    ((POD, {}), (0, 1, "")),
    ((ONE_TASK, OPEN_MPI), (1, 2, "o")),
    ((OPEN_MPI, TORCHRUN_RANK), (2, 4, "t-pod-0-1-0")),
    ((TORCHRUN_RANK, OPEN_MPI), (1, 2, "o")),
    ((TORCHRUN_RANK, FUNCCOLL), (1, 2, "f")),
    ((FUNCCOLL, TORCHRUN_RANK), (2, 4, "t-pod-0-1-0")),
    ((FUNCCOLL, OPEN_MPI), (1, 2, "o")),
    ((STEP, OPEN_MPI, FUNCCOLL), (1, 2, "f")),
    ((OPEN_MPI, PODS), (3, 4, "pod-0-1")),  # a script starts processes itself, and sets torch's variables
    ((OPEN_MPI, {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}), (1, 2, "o")),  # or repeats values
    (({"WORLD_SIZE": "4"}, OPEN_MPI), (1, 2, "o")),  # half of another job's
    (({"RANK": "64"}, FUNCCOLL), (1, 2, "f")),
    (({**OPEN_MPI, "WORLD_SIZE": "2"}, {}), (1, 2, "o")),
    (({**ONE_TASK, **PODS},), (3, 4, "pod-0-1")),
    (({**FUNCCOLL, **PODS},), (1, 2, "f")),  # a program sets torch's variables, and calls fc.launch
    (({**FUNCCOLL, "RANK": "64"},), (1, 2, "f")),
    (({**STEP, "PMI_SIZE": "3", "PMI_RANK": "2"},), (2, 3, "9-0")),  # srun --mpi=pmi2
    ((REPEATED,), (1, 2, "f")),
    ((REPEATED, {"MASTER_PORT": "8"}), (1, 2, "f")),  # a script chooses a port for torch
    ((REPEATED, OPEN_MPI), (1, 2, "o")),
    ((REPEATED, {"PMI_SIZE": "3", "PMI_RANK": "1"}), (1, 3, "parent")),
    ((TORCHRUN_RANK, {**REPEATED, "TORCHELASTIC_RUN_ID": ""}), (1, 2, "f")),
    # With the same numbers as those around it.
    ((REPEATED, {**TORCHRUN_RANK, "WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}), (1, 2, "t-pod-0-1-0")),
    ((REPEATED, dict.fromkeys(FUNCCOLL, "")), (0, 1, "")),  # a rank starts a program that shall run alone
]


@in_groups(("added", "expected"), NESTED, ids=str)
def test_the_innermost_launcher_counts(added, expected):
    """Whatever the parent knows was there before; what cannot be read is passed over."""
    around = [{"PATH": "/bin"}]
    for each in added:
        around.append({**around[-1], **each})
    ancestors = list(reversed(around))
    found = job_of(ancestors[0], ancestors)
    run = "parent" if found.run.startswith(f"{os.getppid()}-") else found.run
    assert (found.rank, found.world, run) == expected
    ancestors.insert(1, ancestors[0])  # a process in between
    assert job_of(ancestors[0], ancestors) == found


@pytest.mark.parametrize(("added", "words"), [
    (({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},),
     r"says WORLD_SIZE=2, and RANK is not set: .*`funccoll run -n 2`, torchrun or mpirun, or unset WORLD_SIZE to run alone"),
    (({"RANK": "0"},), r"says RANK=0, and WORLD_SIZE is not set: .* or unset RANK to run alone"),
    (({"OMPI_COMM_WORLD_RANK": "0"},), r"says OMPI_COMM_WORLD_RANK=0, and OMPI_COMM_WORLD_SIZE is not set"),
    (({"PMI_SIZE": "2"},), r"says PMI_SIZE=2, and PMI_RANK is not set"),
    (({**POD, **OPEN_MPI},), r"WORLD_SIZE=1 and RANK=0 \(torchrun\) and OMPI_COMM_WORLD_SIZE=2 and OMPI_COMM_WORLD_RANK=1 "
                             r"\(Open MPI's mpirun\), which contradict each other"),
    ((OPEN_MPI, POD), r"WORLD_SIZE=1 and RANK=0 .* OMPI_COMM_WORLD_SIZE=2 and OMPI_COMM_WORLD_RANK=1"),
    (({**POD, **STEP},), r"WORLD_SIZE=1 and RANK=0 .* SLURM_STEP_NUM_TASKS=3 and SLURM_PROCID=2"),
    ((FUNCCOLL, POD), r"WORLD_SIZE=1 and RANK=0 .* FUNCCOLL_WORLD_SIZE=2 and FUNCCOLL_RANK=1"),
    ((OPEN_MPI, {"WORLD_SIZE": "8"}), r"OMPI_COMM_WORLD_SIZE=2 and OMPI_COMM_WORLD_RANK=1 .* and WORLD_SIZE=8 \(torchrun\)"),
    (({**OPEN_MPI, "RANK": "0"},), r"OMPI_COMM_WORLD_SIZE=2 and OMPI_COMM_WORLD_RANK=1 .* and RANK=0"),
    (({"WORLD_SIZE": "two", "RANK": "0"},), r"WORLD_SIZE='two' and RANK='0', which is not a job"),
])  # fmt: skip
def test_variables_that_are_missing_or_contradict_each_other(added, words):
    around = [{}]
    for each in added:
        around.append({**around[-1], **each})
    with pytest.raises(MeshError, match=words):
        job_of(around[-1], around[::-1])


PORT = {"MASTER_PORT": "7"}


@pytest.mark.parametrize(("outside", "address", "port"), [
    ({}, "127.0.0.1", "5"),
    ({"MASTER_ADDR": "localhost", **PORT}, "localhost", "7"),  # your own
    (PORT, "127.0.0.1", "7"),
    (POD, "127.0.0.1", "5"),
    (TORCHRUN_RANK, "127.0.0.1", "5"),
    ({"RANK": "3", **PORT}, "127.0.0.1", "5"),
])  # fmt: skip
def test_variables_for_torch(outside, address, port):
    found = for_torch({"PATH": "/bin", "FUNCCOLL_SET_TORCH": "1 2", **outside}, 2, 3, 5)
    assert not any(name.startswith("TORCHELASTIC") for name in found) and are_repetitions(found)
    assert not are_repetitions({**found, "RANK": "0"}) and not are_repetitions({**found, "TORCHELASTIC_RUN_ID": "t"})
    place = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    assert found == {"PATH": "/bin", "FUNCCOLL_SET_TORCH": "2 3", **place, "MASTER_ADDR": address, "MASTER_PORT": port}
    assert job_of(found) == JobSpec(0, 1, "")  # they alone make no job


def test_a_port_that_is_kept_for_torch():
    """A socket that reuses addresses can listen there, as torch's store does; others cannot have it."""
    kept = bound_port()
    assert kept is not None
    with kept, socket.socket() as store, socket.socket() as other:
        place = kept.getsockname()
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(place)
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", place[1]))
        store.listen()
        with socket.create_connection(place):
            pass


def test_environments_of_ancestors():
    """Those with which they were started; a process that has written a title over its own is passed over."""
    script = """
import json, os, sys
from funccoll.job import launchers
os.environ.update(WORLD_SIZE="2", RANK="0", MASTER_ADDR="h", MASTER_PORT="1")
try:
    print(launchers.job_of(os.environ).launcher)
except launchers.MeshError as error:
    print(error)
title, real = sys.argv[1:] == ["title"], launchers._first_environment
if title:
    launchers._ancestors.cache_clear()
    own = f"/proc/{os.getpid()}/environ"
    launchers.Path.read_bytes = lambda path: b"title" if str(path) == own else open(path, "rb").read()
    print(real(os.getpid()), launchers.claimed(os.environ)[:2])
"""
    wrapped = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}, 'title'])"]
    outside = {name: value for name, value in os.environ.items() if name not in {*POD, *STEP, *OPEN_MPI, *FUNCCOLL}}
    done = subprocess.run(wrapped, env={**outside, **STEP}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["torchrun", "{} (0, 2)"], done.stdout + done.stderr


def test_mpich_names_no_run_and_its_ranks_have_one_parent():
    first, second = (job_of({"PMI_SIZE": "2", "PMI_RANK": str(r)}) for r in range(2))
    assert first.run == second.run and str(os.getppid()) in first.run


SLURM = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "6", "SLURM_JOB_ID": "1"}
SEVERAL_HOSTS = [
    ({"WORLD_SIZE": "16", "RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_PORT": "1"}, 8, "torchrun", False),
    ({"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "x"},
     8, "Open MPI's mpirun", True),
    ({"PMI_SIZE": "3", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}, 1, "MPICH's mpirun", True),
    ({"PMI_SIZE": "3", "PMI_RANK": "2", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "1"}, 1, "MPICH's mpirun", True),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 1, "srun", True),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, 2, "srun", True),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "local", "launcher", "brings_mpi"), SEVERAL_HOSTS)
def test_a_launcher_says_that_there_are_several_hosts(environment, local, launcher, brings_mpi):
    found = job_of(environment)
    assert found.across_hosts and (found.local, found.launcher, found.brings_mpi) == (local, launcher, brings_mpi)


@pytest.mark.parametrize("text", ["two", "2(x", "8", "2,2,", "0"])
def test_numbers_of_processes_on_hosts_that_are_none(text):
    with pytest.raises(MeshError, match=r"SLURM_STEP_TASKS_PER_NODE=.*, which does not say how many of the 7 processes"):
        job_of({**SLURM, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": "2"})


TORCHRUN, MPIRUN = JobSpec(0, 16, "a", 8, "torchrun", False), JobSpec(0, 16, "a", 8, "mpirun", True)


@pytest.mark.parametrize(("job", "transport", "words"), [
    (TORCHRUN, "", r"16 processes, 8 of them on this host, needs MPI, and torchrun .*`mpirun -n 16 python SCRIPT`"),
    (TORCHRUN, "mpi", r"FUNCCOLL_TRANSPORT=mpi needs MPI, and torchrun"),
    (MPIRUN, "shm", r"FUNCCOLL_TRANSPORT=shm is for one host, .* 16 processes, 8 of them on this one\. Unset it\."),
    (MPIRUN, "tcp", r"FUNCCOLL_TRANSPORT='tcp' must be one of shm, mpi; leave it unset"),
])  # fmt: skip
def test_a_transport_that_cannot_be(job, transport, words, monkeypatch):
    monkeypatch.setenv("FUNCCOLL_TRANSPORT", transport)
    with pytest.raises(RendezvousError, match=words):
        choose_job_transport(job)


@pytest.mark.parametrize(("job", "transport", "name"), [
    (MPIRUN, "", "mpi"), (MPIRUN, "mpi", "mpi"), (replace(MPIRUN, local=16), "", "shm"),
    (replace(MPIRUN, local=16), "mpi", "mpi"), (replace(TORCHRUN, local=0), "", "shm"),
    (replace(TORCHRUN, local=16), "shm", "shm"),
])  # fmt: skip
def test_the_transport_of_a_job(job, transport, name, monkeypatch):
    monkeypatch.setenv("FUNCCOLL_TRANSPORT", transport)
    assert choose_job_transport(job).name == name


def test_a_job_without_a_name():
    with pytest.raises(MeshError, match=r"WORLD_SIZE=2.*FUNCCOLL_RUN_ID"):
        job_of({"WORLD_SIZE": "2", "RANK": "0"})


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", " "])
def test_a_timeout_that_is_none(text, monkeypatch):
    monkeypatch.setenv("FUNCCOLL_TIMEOUT", text)
    with pytest.raises(RendezvousError, match=r"FUNCCOLL_TIMEOUT=.*must be seconds, more than 0; leave it unset for 600\."):
        positive_number(TIMEOUT, "seconds")
    monkeypatch.setenv("FUNCCOLL_TIMEOUT", "2.5")
    assert positive_number(TIMEOUT, "seconds") == 2.5
    monkeypatch.delenv("FUNCCOLL_TIMEOUT")
    assert positive_number(TIMEOUT, "seconds") == 600
    assert issubclass(RendezvousError, (FunccollError, RuntimeError))


def test_any_run_id_fits_a_sockets_name():
    names = {JobSpec(0, 2, run).address for run in ("a", "ä" * 300, "ä" * 299, "x" * 64, "x" * 65)}
    assert len(names) == 5 and all(len(name) <= 107 for name in names)
    assert JobSpec(0, 2, "a").address[0] == 0  # abstract: no file


@pytest.mark.parametrize("text", ["-1", "nan"])
def test_a_wrong_timeout_of_collectives_is_refused_when_joining(text):
    with Ranks(STAY, [0], world=2, FUNCCOLL_TIMEOUT=text) as ranks:
        code, _, error = ranks.end(0)
        assert code == 1 and f"FUNCCOLL_TIMEOUT={text!r} must be seconds, more than 0" in error
