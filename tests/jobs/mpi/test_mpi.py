"""Programs over real MPI of both vendors have the bits of virtual devices: on hosts, and on one by messages between all ranks.

A job runs several cases, because its start takes longer than most of them.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cases import process_cases
from tests.support.ranks import mpi_vendors, network_hosts
from tests.support.ranks.network_hosts import NetworkHosts

pytestmark = pytest.mark.covers("mpi")

SCRIPT = """
import os, sys, time
from pathlib import Path
from tests.support.cases import process_cases
import funccoll as fc
hosts = tuple(map(int, sys.argv[1].split(",")))
fc.init()
assert fc.make_mesh({"d": len(hosts)}).hosts == (hosts if max(hosts) else ()), hosts
def say(*words):  # in one piece: lines of several ranks must not mix
    os.write(1, (" ".join(map(str, ("rank", fc.rank(), *words))) + "\\n").encode())
for name in sys.argv[3:]:
    began = time.perf_counter()
    process_cases.compare(name, Path(sys.argv[2], name))
    say("has run", name, "in", round(time.perf_counter() - began, 1), "s")
say("is fine")
"""
TABLE = ("table", "gradients")
OTHERS = (
    "collectives",
    "forced",
    "programs",
    "staged",
    "staged in one segment",
    "in pieces",
    "data_parallel",
    "communication hooks",
)
ORDERS = ("memory orders", "transformers")
PATIENCE = 900.0
"""Seconds until a job is ended: a watchdog, not an expectation."""
_folder = tempfile.TemporaryDirectory(prefix="funccoll-records-")


@functools.cache
def records(hosts: tuple[int, ...], names: tuple[str, ...]) -> Path:
    """The folder with what virtual devices make of these cases."""
    folder = Path(_folder.name, "-".join(map(str, hosts)))
    folder.mkdir(exist_ok=True)
    for name in names:
        process_cases.record(name, len(hosts), folder / name, hosts)
    return folder


@contextmanager
def job(vendor: str, counts: Sequence[int], program: Sequence[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """mpirun over hosts with so many ranks each, or over this one for a single count; afterwards it has ended."""
    if why_not := mpi_vendors.why_not(vendor) or (len(counts) > 1 and network_hosts.why_not()):
        pytest.skip(why_not)
    variables = {"FUNCCOLL_TIMEOUT": "120", "FUNCCOLL_RENDEZVOUS_TIMEOUT": "120", "FUNCCOLL_CHECK": "", **variables}
    if len(counts) > 1:
        with NetworkHosts(len(counts)) as hosts:
            yield hosts.mpirun(vendor, counts, program, variables)
        return
    here = mpi_vendors.start(vendor, [("localhost", counts[0])], program, variables)
    try:
        yield here
    finally:
        here.kill()
        here.communicate()


def run(vendor: str, counts: Sequence[int], program: Sequence[str], **variables: str) -> str:
    """What a job printed, which must end well; each rank says in the end that it is fine."""
    with job(vendor, counts, program, **variables) as started:
        out, err = started.communicate(timeout=PATIENCE)
    assert started.returncode == 0, out + err
    assert sorted(re.findall(r"rank (\d+) is fine", out)) == [str(rank) for rank in range(sum(counts))], out + err
    return out


def compare(vendor: str, counts: Sequence[int], names: tuple[str, ...], tmp_path: Path) -> None:
    """Run cases over hosts with these counts of ranks; of a single count each rank is a host of its own."""
    if len(counts) == 1:
        hosts, variables = tuple(range(counts[0])), {"FUNCCOLL_TRANSPORT": "mpi"}
    else:
        hosts, variables = tuple(host for host, count in enumerate(counts) for _ in range(count)), {}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = [",".join(map(str, hosts)), str(records(hosts, names)), *names]
    run(vendor, counts, [sys.executable, "-W", "error", str(script), *arguments], **variables)


QUICK = [("openmpi", (1, 1), ("programs", "in pieces")), ("mpich", (1, 2), ("half of collectives",))]
TOPOLOGIES = ((2,), (3,), (4,), (1, 1), (1, 1, 1, 1))
SHARES = ("even", "odd", "in turn", "odd", "in turn")
"""Of the table: half of the cases with two and three ranks, all under each MPI; with four one choice of axes of each case."""


def share_of(names: Sequence[str], share: str) -> tuple[str, ...]:
    return tuple(f"{name} {share}" if share == "in turn" else f"{share} {name}" for name in names)


def leaving_out(*names: str) -> tuple[str, ...]:
    return tuple(name for name in OTHERS if name not in names)


DEEP = [
    *(
        (mpi_vendors.VENDORS[number % 2], counts, share_of(TABLE, share))
        for number, (counts, share) in enumerate(zip(TOPOLOGIES, SHARES, strict=True))
    ),
    ("openmpi", (2, 2), leaving_out("staged in one segment")),
    ("mpich", (2, 1), (*share_of(TABLE, "even"), *OTHERS)),
    ("openmpi", (1, 2, 1), leaving_out("staged", "data_parallel", "communication hooks")),
    ("openmpi", (1, 1), ORDERS),
    ("mpich", (1, 2, 1), ORDERS),
    ("mpich", (1, 2), ("collectives",)),
    ("openmpi", (1, 1), ("started collectives", "started loops", "started gradients in turn")),
    ("mpich", (2, 1), ("started table in turn", "started programs")),
    ("mpich", (2,), ("started half of collectives",)),
    ("openmpi", (2, 2), ("started half of collectives",)),
]
EXHAUSTIVE = [
    *((vendor, counts, TABLE) for vendor in mpi_vendors.VENDORS for counts in (*TOPOLOGIES, (2, 1))),
    *((vendor, counts, OTHERS) for vendor in mpi_vendors.VENDORS for counts in ((2, 2), (1, 2, 1))),
    ("mpich", (1, 1), OTHERS),
    ("mpich", (2,), ORDERS),
]


@pytest.mark.parametrize(
    ("vendor", "counts", "names"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in DEEP),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in EXHAUSTIVE),
    ],
)
def test_ranks_have_the_bits_of_virtual_devices(vendor, counts, names, tmp_path):
    compare(vendor, counts, names, tmp_path)


@pytest.mark.parametrize("vendor", [pytest.param(vendor, marks=pytest.mark.slow) for vendor in mpi_vendors.VENDORS])
def test_digits_trains_over_hosts_with_the_bits_of_virtual_devices(vendor, tmp_path):
    script = str(Path(__file__).parents[3] / "notebooks" / "digits.py")
    with job(vendor, (2, 2), [sys.executable, script, "--save", str(tmp_path / "over hosts.npz")]) as started:
        out, err = started.communicate(timeout=PATIENCE)
    assert started.returncode == 0, out + err
    arguments = ["--devices", "4", "--hosts", "2", "--compare", str(tmp_path / "over hosts.npz")]
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr


THREADS = """
import os, sys, threading
import numpy as np, funccoll as fc
from funccoll import P
how, steps = sys.argv[1], int(sys.argv[2])
meshes = [fc.make_mesh({"d": 2, "e": 1}) for _ in range(2)]
assert meshes[0].hosts == (0, 1)
wrong = []
def work(k):
    mesh, n = meshes[k if how != "axes" else 0], 64 + 64 * (how == "sizes") * k
    if how == "axes":
        over = (("e", "d"), ("d", "e"))[k]
        call = lambda x: fc.all_reduce(x, over, algorithm="mpi")
    else:
        call = lambda x: fc.permute(x, "d", pairs=[(0, 1), (1, 0)])
    whole = P(("d", "e"))
    step = fc.jit(call, mesh=mesh, in_specs=whole, out_specs=P() if how == "axes" else whole)
    for i in range(steps):
        mine = [(k + 1) * 10_000_000 + 2 * i + rank for rank in (0, 1)]
        y = step(fc.from_local(np.full(n, mine[fc.rank()]), mesh, whole)).local
        if not (y == (sum(mine) if how == "axes" else mine[1 - fc.rank()])).all():
            wrong.append((k, i, y[0]))
threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert not wrong, (len(wrong), wrong[:3])
os.write(1, b"rank %d is fine\\n" % fc.rank())
"""


@pytest.mark.parametrize(
    ("vendor", "how", "steps"),
    [
        ("mpich", "same", 300),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("openmpi", "same", 300),
                ("mpich", "sizes", 3000),
                ("openmpi", "axes", 1000),
            )
        ),
    ],
)
def test_threads_get_their_own_messages(vendor, how, steps, tmp_path):
    """Two threads, each with a mesh of its own, or over other axes of one, run the same program at the same time."""
    (tmp_path / "threads.py").write_text(THREADS)
    run(vendor, [2], [sys.executable, str(tmp_path / "threads.py"), how, str(steps)], FUNCCOLL_TRANSPORT="mpi")


LARGE = """
import os
import numpy as np, funccoll as fc
from funccoll import P
n = (1 << 31) + 24
mesh = fc.make_mesh({"d": 2})
assert mesh.hosts == (0, 1)
# Zeros with a few numbers among them: memory that is only read is never given to the process, which takes most of the time.
at = np.unique(np.r_[0, (1 << 31) - 1, 1 << 31, n - 1, np.random.default_rng(0).integers(n, size=1000)])
numbers = lambda rank: np.arange(len(at)) % 120 + 1 + 120 * rank
mine = np.zeros(n, np.uint8)
mine[at] = numbers(fc.rank())
x = fc.from_local(mine, mesh, P("d"))
y = fc.jit(lambda x: fc.permute(x, "d", pairs=[(0, 1), (1, 0)]), mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x).local
assert y.size == n and (y[at] == numbers(1 - fc.rank())).all() and np.count_nonzero(y) == len(at)
os.write(1, b"rank %d is fine\\n" % fc.rank())
"""


@pytest.mark.slow
@pytest.mark.parametrize("vendor", mpi_vendors.VENDORS)
def test_a_message_of_more_than_2_to_the_31_bytes(vendor, tmp_path, tmp_path_factory, request):
    lock = open(tmp_path_factory.getbasetemp().parent / "large_memory.lock", "w")  # noqa: SIM115
    request.addfinalizer(lock.close)
    fcntl.flock(lock, fcntl.LOCK_EX)  # another worker's would take the memory that is available now
    available = int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) >> 20  # type: ignore[index]
    if available < 14:
        pytest.skip(f"4 arrays of 2 GiB, and what is read of 2 more, need 14 GiB of memory, and {available} GiB are available")
    (tmp_path / "large.py").write_text(LARGE)
    run(vendor, [2], [sys.executable, str(tmp_path / "large.py")], FUNCCOLL_TRANSPORT="mpi")
