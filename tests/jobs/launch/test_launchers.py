"""Other launchers, where they are installed: torchrun with torch.distributed, and both mpiruns with mpi4py, in the same script.

funccoll finds its processes by the launcher's environment, and leaves that alone: the other library goes on working.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import SUPPORT
from tests.support.ranks import mpi_vendors

pytestmark = pytest.mark.covers("launchers")

STEP = """
import os, sys
import numpy as np
import funccoll as fc
from funccoll import P
before = dict(os.environ)

def ours(n, scale):
    mesh = fc.make_mesh({"data": n})
    total = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    x = np.arange(3.0 * n) * scale
    found = np.asarray(total(x))
    assert (found == x.reshape(n, 3).sum(axis=0)).all(), found
    assert fc.world_size() == n

def fine(n):  # in one write: lines of several processes must not mix
    os.write(1, f"rank {fc.rank()} of {n} is fine\\n".encode())
"""
TORCH = (
    STEP
    + """
import torch, torch.distributed as dist

def theirs(n):
    x = torch.full((4,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    assert (x == n * (n + 1) / 2).all(), x

if sys.argv[1] == "torch first":
    dist.init_process_group("gloo")
    theirs(int(os.environ["WORLD_SIZE"]))
n = fc.world_size()
ours(n, 1)
if sys.argv[1] == "funccoll first":
    dist.init_process_group("gloo")
assert fc.rank() == dist.get_rank() and n == dist.get_world_size()
for i in range(20):                                     # in turn
    theirs(n)
    ours(n, i)
later = {k: v for k, v in os.environ.items() if not k.startswith("FUNCCOLL_")}
assert {k: before[k] for k in later} == later and before["MASTER_PORT"]  # nothing was changed
dist.destroy_process_group()
fine(n)
"""
)
MPI = (
    STEP
    + """
from mpi4py import MPI
comm = MPI.COMM_WORLD

def theirs(n):
    found = np.empty(2)
    comm.Allreduce(np.full(2, comm.rank + 1.0), found)
    assert (found == n * (n + 1) / 2).all(), found

n = fc.world_size()
assert (fc.rank(), n) == (comm.rank, comm.size)
for i in range(20):
    theirs(n)
    ours(n, i)
fine(n)
"""
)
FAILING = (
    STEP
    + """
ours(fc.world_size(), 1)
if fc.rank() == 1:
    raise ValueError("rank 1 has had enough")
ours(fc.world_size(), 2)
"""
)


def launched(command, script, tmp_path, *arguments, **environment):
    file = tmp_path / "script.py"
    file.write_text(script)
    return subprocess.run(
        [*command, str(file), *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def torchrun(n):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: pip install 'funccoll[torch]'")
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]


def mpirun(n, vendor):
    """(command, environment)."""
    if why_not := mpi_vendors.why_not(vendor):
        pytest.skip(why_not)
    options = ["--oversubscribe"] if vendor == "openmpi" else []
    return ["mpirun", *options, "-n", str(n), sys.executable], mpi_vendors.variables(vendor)


AROUND = {
    "WORLD_SIZE": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "pod-0",
    "MASTER_PORT": "23456",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_JOB_ID": "3",
    "SLURM_STEP_ID": "0",
}
"""Variables of a pod with one process and of a Slurm step of one task, which the launcher inside contradicts."""


def check(done, n):
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of {n} is fine" for r in range(n)]


@pytest.mark.parametrize(
    ("n", "order"),
    [
        pytest.param(2, "torch first", marks=pytest.mark.slow),
        pytest.param(3, "funccoll first", marks=pytest.mark.slow),
    ],
)
def test_torchrun(n, order, tmp_path):
    check(launched(torchrun(n), TORCH, tmp_path, order, **(AROUND if n == 2 else {})), n)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["torch first", "funccoll first"])
def test_funccoll_run_starts_scripts_of_torch(order, tmp_path):
    """torch finds the variables that torchrun would have set, also in a pod and inside torchrun, whose own do not count."""
    command = [sys.executable, "-m", "funccoll", "run", "-n", "2"]
    around = {**AROUND, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"} if order == "torch first" else {}
    done = launched(command, TORCH, tmp_path, order, **around)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] rank {r} of 2 is fine" for r in range(2)]


CHANGED = "from torch.nn.parallel import DistributedDataParallel", "from funccoll.torch import DistributedDataParallel"
"""The line that a user of torch changes in a script, and what to."""


@pytest.mark.slow
def test_a_script_of_torch_trains_the_same_with_one_import_changed(tmp_path):
    """Its losses and its checkpoint have the same bits."""
    script = (SUPPORT / "ranks/torch_script.py").read_text()
    assert script.count(CHANGED[0]) == 1
    found = []
    for name, text in (("torch", script), ("funccoll", script.replace(*CHANGED))):
        for _ in range(3):
            done = launched(torchrun(2), text, tmp_path, str(tmp_path / name), MKL_CBWR="COMPATIBLE")
            if name != "torch" or "terminate called without an active exception" not in done.stderr:
                break  # now and then a process of torch's own, with Gloo alone, aborts when it has done everything
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(done.stdout.splitlines())
    losses = [float(line.partition("loss ")[2].partition(",")[0]) for line in found[0]]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert found[0] == found[1]
    import torch

    theirs, ours = (torch.load(tmp_path / name) for name in ("torch", "funccoll"))
    assert theirs.keys() == ours.keys() and list(theirs["model"]) == list(ours["model"])
    assert all(torch.equal(ours["model"][name], value) for name, value in theirs["model"].items())
    assert str(theirs["optimizer"]) == str(ours["optimizer"])


@pytest.mark.parametrize(
    ("vendor", "n"),
    [
        (vendor, n) if (vendor, n) == ("openmpi", 2) else pytest.param(vendor, n, marks=pytest.mark.slow)
        for vendor in mpi_vendors.VENDORS
        for n in (2, 3)
    ],
)
def test_mpirun(vendor, n, tmp_path):
    """Alone, and in a pod and a Slurm step with variables of their own."""
    command, environment = mpirun(n, vendor)
    check(launched(command, MPI, tmp_path, **environment, **(AROUND if n == 2 else {})), n)


@pytest.mark.parametrize("vendor", ["", *mpi_vendors.VENDORS])
@pytest.mark.slow
def test_a_failure_under_another_launcher_is_told(vendor, tmp_path):
    command, environment = mpirun(2, vendor) if vendor else (torchrun(2), {})
    done = launched(command, FAILING, tmp_path, **environment)
    assert done.returncode != 0
    assert "ValueError: rank 1 has had enough" in done.stderr


@pytest.mark.slow
def test_torchrun_restarts_a_job(tmp_path):
    """The processes of the second attempt find each other, and not what is left of the first."""
    command = [*torchrun(2), "--max-restarts", "1"]
    script = (
        STEP
        + """
n = fc.world_size()
ours(n, 1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and fc.rank() == 0:
    sys.exit(3)
ours(n, 2)
fine(n)
"""
    )
    check(launched(command, script, tmp_path), 2)


@pytest.mark.slow
@pytest.mark.parametrize("vendor", mpi_vendors.VENDORS)
def test_two_jobs_of_mpirun_at_once_do_not_meet(vendor, tmp_path):
    command, environment = mpirun(2, vendor)
    (tmp_path / "script.py").write_text(MPI)
    jobs = [
        subprocess.Popen([*command, str(Path(tmp_path, "script.py"))], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for job in jobs:
        out, _ = job.communicate(timeout=300)
        assert job.returncode == 0 and out.count("is fine") == 2
