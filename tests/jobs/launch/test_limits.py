"""Limits of the shell, sandboxes and full disks: errors that name the limit, and how it is lifted."""

import errno
import multiprocessing
import subprocess
import sys

import pytest

from funccoll.job.identity import started_by
from tests.support.ranks.forbidden_calls import NUMBERS
from tests.support.ranks.ranks import JOIN, PRELUDE, STAY, Ranks

pytestmark = pytest.mark.covers("launch")

LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_{}, ({}, {}))\n"


def limited(kind, limit, script=STAY):
    return LIMIT.format(kind, limit, limit) + script


def test_the_size_of_files_limits_the_memory_of_a_job():
    with Ranks(limited("FSIZE", 20 << 20), [0], world=2) as ranks:
        code, _, error = ranks.end(0)
        assert code == 1 and "this process may write only 20 MiB into a file (`ulimit -f`), also into the memory that" in error
        assert "and 2 ranks need 24 MiB: `ulimit -f unlimited` lifts the limit." in error
    large = (
        JOIN
        + """
try:
    w.transport.heap.array((200 << 20,), "u1")
except MemoryError as error:
    say(error)
w.transport.heap.array((100 << 20,), "u1")[:] = 1
"""
    )
    with Ranks(large, [0], world=2) as ranks:
        ranks.start(1, limited("FSIZE", 300 << 20, large))
        ranks.lines()
        said = ranks.lines()
        for rank, whose in enumerate(("`ulimit -v` or `ulimit -f` of another rank", "`ulimit -f`")):
            start = f"no address space is left for 208 MiB in rank {rank}'s arena of 142 MiB, of which "
            assert said[rank].startswith(start) and said[rank].endswith(f" are in use: {whose} limits it for all ranks."), said
        ranks.end_well()


FILES = """
import resource, warnings
import numpy as np, funccoll as fc
from funccoll.core import machine_profile
from tests.support.machine_profiles import profile
found = profile()
mesh = fc.make_mesh({"d": 2})
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=fc.P("d"), out_specs=fc.P())
step(np.ones(4))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with fc.profile("profile"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        for _ in range(2000):
            step(np.ones(4))
print(*(each.message for each in told))
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 4000))
try:
    machine_profile.save(found, machine_profile.Path("kept.json"))
except ValueError as error:
    print(error)
"""


def test_the_size_of_files_limits_profiles(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    done = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith("ends here: File too large (`ulimit -f` limits the size of files).") and "profile of rank" in first
    assert second == "kept.json: File too large (`ulimit -f` limits the size of files)"


SANDBOX = PRELUDE + "from tests.support.ranks.forbidden_calls import forbid\nforbid({}, {})\njob_context.init()\n"


@pytest.mark.skipif(not NUMBERS, reason="the numbers of this processor's system calls are not known")
@pytest.mark.parametrize(
    ("calls", "error", "words", "others"),
    [
        (
            ["memfd_create"],
            errno.EPERM,
            "RendezvousError: rank 0 cannot make the memory that ranks share (memfd_create: Operation not "
            "permitted). A sandbox",
            "rank 0 cannot make the memory that ranks share",
        ),
        (
            ["eventfd2"],
            errno.EPERM,
            "RendezvousError: rank 0 cannot join the job: the system denies what that needs ([Errno 1] "
            "Operation not permitted). A "
            "sandbox (seccomp) may forbid it, or a limit is reached (`ulimit -a`).",
            "",
        ),
        (
            ["clone", "clone3"],
            errno.EAGAIN,
            "RendezvousError: rank 0 cannot start the thread that watches the others (can't start new thread). `ulimit -u`",
            "",
        ),
    ],
)
def test_what_a_sandbox_forbids(calls, error, words, others):
    watches = JOIN + "sure(lambda: w.watch.failure())\nsay(w.watch.failure().kind)\n"
    with Ranks(watches, [1], world=2) as ranks:
        ranks.start(0, SANDBOX.format(calls, error))
        code, _, said = ranks.end(0)
        assert code == 1 and words in said, said
        if others:
            assert others in ranks.end(1)[2]
        else:
            assert (ranks.line(1), ranks.line(1)) == ("in", "died")
            ranks.end_well()


def test_what_a_worker_is_told():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert "which workers do not run" in str(pool.apply(started_by, [0]))
