"""The variables of launchers: which processes belong to a job, on which hosts, over which transport."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from funccoll import FunccollError
from funccoll.config import TIMEOUT
from funccoll.errors import MeshError, RendezvousError
from funccoll.job.handshake import JobSpec
from funccoll.job.launchers import job_of
from funccoll.job.rendezvous import positive_number
from funccoll.job.torch_variables import are_repetitions, bound_port, for_torch
from funccoll.runtime.transport import choose_job_transport
from tests.support.groups import in_groups
from tests.support.ranks.ranks import STAY, Ranks

pytestmark = pytest.mark.covers("launch")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, JobSpec(0, 1, "")),
        ({"WORLD_SIZE": "1", "RANK": "0"}, JobSpec(0, 1, "")),
        ({"FUNCCOLL_WORLD_SIZE": "4", "FUNCCOLL_RANK": "3", "FUNCCOLL_RUN_ID": "ab"}, JobSpec(3, 4, "ab")),
        (
            {
                "WORLD_SIZE": "2",
                "RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_RESTART_COUNT": "1",
            },
            JobSpec(1, 2, "none-h-29500-1"),
        ),
        (
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "PMIX_NAMESPACE": "prterun-1@1",
            },
            JobSpec(1, 2, "prterun-1@1"),
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_ess_base_jobid": "7"}, JobSpec(0, 2, "7")),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "SLURM_JOB_ID": "3", "SLURM_STEP_ID": "1"}, JobSpec(1, 2, "3-1")),
        (
            {
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_PROCID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "4",
                "SLURM_JOB_ID": "3",
                "SLURM_STEP_ID": "0",
            },
            JobSpec(2, 4, "3-0"),
        ),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "3"}, JobSpec(0, 1, "")),  # a batch script
        (
            {
                "HOROVOD_SIZE": "2",
                "HOROVOD_RANK": "1",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": "9",
            },
            JobSpec(1, 2, "h-9"),
        ),
        (
            {"LOCAL_RANK": "1", "MASTER_ADDR": "h", "SLURM_STEP_NUM_TASKS": "4", "WORLD_SIZE": "", "PMI_RANK": ""},
            JobSpec(0, 1, ""),
        ),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, JobSpec(0, 1, "")),
    ],
)
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
STEP = {
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "9",
    "SLURM_STEP_ID": "0",
}
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


@pytest.mark.parametrize(
    ("added", "words"),
    [
        (
            ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},),
            r"says WORLD_SIZE=2, and RANK is not set: .*`funccoll run -n 2`, torchrun or mpirun, or unset "
            r"WORLD_SIZE to run alone",
        ),
        (({"RANK": "0"},), r"says RANK=0, and WORLD_SIZE is not set: .* or unset RANK to run alone"),
        (({"OMPI_COMM_WORLD_RANK": "0"},), r"says OMPI_COMM_WORLD_RANK=0, and OMPI_COMM_WORLD_SIZE is not set"),
        (({"PMI_SIZE": "2"},), r"says PMI_SIZE=2, and PMI_RANK is not set"),
        (
            ({**POD, **OPEN_MPI},),
            r"WORLD_SIZE=1 and RANK=0 \(torchrun\) and OMPI_COMM_WORLD_SIZE=2 and OMPI_COMM_WORLD_RANK=1 "
            r"\(Open MPI's mpirun\), which contradict each other",
        ),
        ((OPEN_MPI, POD), r"WORLD_SIZE=1 and RANK=0 .* OMPI_COMM_WORLD_SIZE=2 and OMPI_COMM_WORLD_RANK=1"),
        (({**POD, **STEP},), r"WORLD_SIZE=1 and RANK=0 .* SLURM_STEP_NUM_TASKS=3 and SLURM_PROCID=2"),
        ((FUNCCOLL, POD), r"WORLD_SIZE=1 and RANK=0 .* FUNCCOLL_WORLD_SIZE=2 and FUNCCOLL_RANK=1"),
        (
            (OPEN_MPI, {"WORLD_SIZE": "8"}),
            r"OMPI_COMM_WORLD_SIZE=2 and OMPI_COMM_WORLD_RANK=1 .* and WORLD_SIZE=8 \(torchrun\)",
        ),
        (({**OPEN_MPI, "RANK": "0"},), r"OMPI_COMM_WORLD_SIZE=2 and OMPI_COMM_WORLD_RANK=1 .* and RANK=0"),
        (({"WORLD_SIZE": "two", "RANK": "0"},), r"WORLD_SIZE='two' and RANK='0', which is not a job"),
    ],
)
def test_variables_that_are_missing_or_contradict_each_other(added, words):
    around = [{}]
    for each in added:
        around.append({**around[-1], **each})
    with pytest.raises(MeshError, match=words):
        job_of(around[-1], around[::-1])


PORT = {"MASTER_PORT": "7"}


@pytest.mark.parametrize(
    ("outside", "address", "port"),
    [
        ({}, "127.0.0.1", "5"),
        ({"MASTER_ADDR": "localhost", **PORT}, "localhost", "7"),  # your own
        (PORT, "127.0.0.1", "7"),
        (POD, "127.0.0.1", "5"),
        (TORCHRUN_RANK, "127.0.0.1", "5"),
        ({"RANK": "3", **PORT}, "127.0.0.1", "5"),
    ],
)
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
    (
        {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "x"},
        8,
        "Open MPI's mpirun",
        True,
    ),
    ({"PMI_SIZE": "3", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}, 1, "MPICH's mpirun", True),
    ({"PMI_SIZE": "3", "PMI_RANK": "2", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "1"}, 1, "MPICH's mpirun", True),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 1, "srun", True),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, 2, "srun", True),
]


@pytest.mark.parametrize(("environment", "local", "launcher", "brings_mpi"), SEVERAL_HOSTS)
def test_a_launcher_says_that_there_are_several_hosts(environment, local, launcher, brings_mpi):
    found = job_of(environment)
    assert found.across_hosts and (found.local, found.launcher, found.brings_mpi) == (local, launcher, brings_mpi)


@pytest.mark.parametrize("text", ["two", "2(x", "8", "2,2,", "0"])
def test_numbers_of_processes_on_hosts_that_are_none(text):
    with pytest.raises(MeshError, match=r"SLURM_STEP_TASKS_PER_NODE=.*, which does not say how many of the 7 processes"):
        job_of({**SLURM, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": "2"})


TORCHRUN, MPIRUN = JobSpec(0, 16, "a", 8, "torchrun", False), JobSpec(0, 16, "a", 8, "mpirun", True)


@pytest.mark.parametrize(
    ("job", "transport", "words"),
    [
        (TORCHRUN, "", r"16 processes, 8 of them on this host, needs MPI, and torchrun .*`mpirun -n 16 python SCRIPT`"),
        (TORCHRUN, "mpi", r"FUNCCOLL_TRANSPORT=mpi needs MPI, and torchrun"),
        (MPIRUN, "shm", r"FUNCCOLL_TRANSPORT=shm is for one host, .* 16 processes, 8 of them on this one\. Unset it\."),
        (MPIRUN, "tcp", r"FUNCCOLL_TRANSPORT='tcp' must be one of shm, mpi; leave it unset"),
    ],
)
def test_a_transport_that_cannot_be(job, transport, words, monkeypatch):
    monkeypatch.setenv("FUNCCOLL_TRANSPORT", transport)
    with pytest.raises(RendezvousError, match=words):
        choose_job_transport(job)


@pytest.mark.parametrize(
    ("job", "transport", "name"),
    [
        (MPIRUN, "", "mpi"),
        (MPIRUN, "mpi", "mpi"),
        (replace(MPIRUN, local=16), "", "shm"),
        (replace(MPIRUN, local=16), "mpi", "mpi"),
        (replace(TORCHRUN, local=0), "", "shm"),
        (replace(TORCHRUN, local=16), "shm", "shm"),
    ],
)
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
