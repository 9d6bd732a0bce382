"""Processes find each other: all of a job, nobody else, and whoever is missing is named."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import funccoll
import funccoll as fc
from funccoll._version import __version__
from funccoll.errors import RendezvousError
from funccoll.job.job_context import finalize, init
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
)
from tests.support.ranks.rendezvous_visits import ended, handshake, visit

pytestmark = pytest.mark.covers("launch")

FOLDER = Path(funccoll.__file__).parent


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
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * 100,
            b"[]",
            b"3",
            b"null",
            b'{"funccoll": "0"}',
            b"[" * 50_000,
            b"x" * 150_000,
            handshake("another"),
            handshake(run, rank="1"),
            handshake(run, rank=None),
            handshake(run, world=2.0),
            handshake(run, funccoll=""),
            handshake(run, rank={}),
            handshake(run, arena="all"),
            b"\xff\xfe",
        ]
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
    )


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


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "RUN", "SLURM_STEP_ID": "0"},
            [
                "because of SLURM_STEP_NUM_TASKS=2 and SLURM_PROCID=0; unset them to run alone, ",
                "in an interactive Slurm shell).",
            ],
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "RUN"},
            [
                "because of WORLD_SIZE=2 and RANK=1; unset them to run alone). Look for an error of theirs "
                "above; if they only start ",
                "to more seconds. MASTER_ADDR=192.0.2.1 is another host: a job on several hosts needs mpirun.\n",
            ],
        ),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "RUN"}, ["more seconds.\n"]),
    ],
)
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


@pytest.mark.parametrize("fused", [0, 1])
def test_a_rank_without_fused_kernels(fused):
    modes = {fused: "fused kernels", 1 - fused: "NumPy (FUNCCOLL_FUSE=0)"}
    with Ranks(STAY, [], world=2) as ranks:
        for r in range(2):
            ranks.start(r, STAY, FUNCCOLL_FUSE="1" if r == fused else "0")
        for r in range(2):
            code, _, error = ranks.end(r)
            assert code == 1 and f"rank 1 computes with {modes[1]}, and rank 0 with {modes[0]}. Their results" in error, error
            assert "Set FUNCCOLL_FUSE=0 on all ranks" in error


def test_ranks_without_fused_kernels_for_different_reasons():
    old = PRELUDE + "import funccoll.job.handshake as h\nimport funccoll.kernels.native.machine_code as m\n"
    old += "m.processor_level = lambda: None\nm.why_not.cache_clear()\nh.installation.cache_clear()\n" + STAY
    with Ranks(STAY, [], world=2) as ranks:
        ranks.start(0, STAY, FUNCCOLL_FUSE="0")
        ranks.start(1, old, FUNCCOLL_FUSE="1")
        assert ranks.lines() == {0: "in", 1: "in"}
        for r in range(2):
            ranks.tell(r)
        ranks.end_well()


def compiled_in_another_mode():
    """Compile in the mode of the join, in another one, and in the first one again. Return the error."""
    mesh, x = fc.make_mesh({"d": 2}), np.ones((2, 8), np.float32)
    own = os.environ["FUNCCOLL_FUSE"]
    steps = [fc.jit(lambda x, k=k: fc.all_reduce(np.exp(x + k), "d"), mesh=mesh, in_specs=fc.P("d")) for k in range(2)]
    steps[0](x)
    os.environ["FUNCCOLL_FUSE"] = "01"[own == "0"]
    with pytest.raises(RendezvousError) as raised:
        steps[1](x)
    steps[0](x)  # it is compiled
    os.environ["FUNCCOLL_FUSE"] = own
    steps[1](x)
    return str(raised.value)


def test_a_rank_that_changes_its_mode_of_compute_after_it_joined(monkeypatch):
    monkeypatch.setenv("FUNCCOLL_FUSE", "0")
    for error in fc.launch(compiled_in_another_mode, 2):
        assert "computes with fused kernels, and it joined its job with NumPy (FUNCCOLL_FUSE=0)" in error
        assert "FUNCCOLL_FUSE has changed since" in error


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


AGAIN = (
    JOIN
    + """
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
)


def test_leave_and_join_again():
    with Ranks(AGAIN, range(2)) as ranks:
        ranks.lines()
        assert ranks.lines() == {0: "done", 1: "done"}
        ranks.end_well()
    assert left_behind(ranks.run) == []


MANY = (
    PRELUDE
    + """
import funccoll as fc
import funccoll.transports.shm.communicators as communicators
import funccoll.transports.shm.memory_file as memory_file
communicators._MAX_COMMUNICATORS = 3
memory_file.LARGEST = 16 << 40  # of 128 TiB
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
)


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


STARTS = (
    JOIN
    + """
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
)


def test_a_program_that_a_rank_starts_is_no_rank():
    """But one that takes its place is: after `finalize`, and under the same process id."""
    with Ranks(STARTS, range(2)) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        assert ranks.lines() == {0: "again", 1: "again"}
        ranks.end_well()


def test_alone_there_is_nobody_to_join():
    assert init() is None
    finalize()
