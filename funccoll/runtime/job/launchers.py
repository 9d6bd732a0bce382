"""The variables of launchers, which say of which job a process is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import MeshError
from .hello import JobSpec

__all__ = ["job_of", "place_in_job"]


class _Launcher(NamedTuple):
    """Variables of a launcher: the number of processes, this process's rank, and processes of its host (the first one set)."""

    name: str
    size: str
    rank: str
    local: tuple[str, ...] = ()
    brings_mpi: bool = True
    gives_grace: bool = False


_LAUNCHERS = (
    _Launcher("funccoll run", "FUNCCOLL_WORLD_SIZE", "FUNCCOLL_RANK", brings_mpi=False, gives_grace=True),
    _Launcher("torchrun", "WORLD_SIZE", "RANK", ("LOCAL_WORLD_SIZE",), brings_mpi=False),
    _Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    # Also Intel MPI's, and srun --mpi=pmi2.
    _Launcher("MPICH's mpirun", "PMI_SIZE", "PMI_RANK", ("MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")),
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", ("SLURM_STEP_TASKS_PER_NODE",)),  # a batch script has no step
)
# What names a run, by launcher: all of these that are set. torchrun restarts a job within a run.
_RUNS = (
    ("FUNCCOLL_RUN_ID",),
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMI_JOBID",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_NODES = re.compile(r"(\d+)(?:\(x(\d+)\))?")
"""A number of processes, and of hosts with as many, in Slurm's lists: "2(x3),1" is 2, 2, 2, 1."""


def _launcher(environment: Mapping[str, str]) -> _Launcher | None:
    return next((each for each in _LAUNCHERS if each.size in environment and each.rank in environment), None)


def place_in_job(environment: Mapping[str, str]) -> tuple[int, int]:
    """(processes, rank) as the launcher's environment says; (1, 0) without one. Raises MeshError."""
    launcher = _launcher(environment)
    if launcher is None:
        return 1, 0
    size, rank = launcher.size, launcher.rank
    try:
        processes, number = int(environment[size]), int(environment[rank])
    except ValueError:
        processes, number = 0, 0
    if not 0 <= number < processes:
        raise MeshError(
            f"the environment says {size}={environment[size]!r} and {rank}={environment[rank]!r}, which is not "
            f"a job: {size} counts the processes, {rank} is this one, from 0. Unset both to run in one process."
        )
    return processes, number


def job_of(environment: Mapping[str, str]) -> JobSpec:
    """This process's job, as the launcher's environment says. Raises MeshError when it says nothing sensible."""
    world, number = place_in_job(environment)
    launcher = _launcher(environment)
    if launcher is None or world == 1:
        return JobSpec(0, 1, "")
    local = _local(environment, launcher.local, world)
    for names in _RUNS:
        found = [environment[name] for name in names if environment.get(name)]
        if found:
            return JobSpec(number, world, "-".join(found), local, launcher.name, *launcher[4:])
    if launcher.size == "PMI_SIZE":
        return JobSpec(number, world, _parent(), local, launcher.name, *launcher[4:])
    raise MeshError(
        f"the environment says {launcher.size}={world}, and nothing that names the run, by which its processes find each "
        "other. Start them with `funccoll run`, torchrun or mpirun, or set FUNCCOLL_RUN_ID to the same new text for all."
    )


def _local(environment: Mapping[str, str], names: Sequence[str], world: int) -> int:
    """The processes of this host; 0 when the launcher does not say. Slurm lists those of all hosts."""
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        return 0
    entries = [_NODES.fullmatch(entry.strip()) for entry in environment[name].split(",")]
    counts = [int(entry[1]) for entry in entries if entry for _ in range(int(entry[2] or 1))]
    node = environment.get("SLURM_NODEID", "0") if len(counts) > 1 else "0"
    if not all(entries) or not node.isdecimal() or int(node) >= len(counts) or not 0 < counts[int(node)] <= world:
        raise MeshError(
            f"the environment says {name}={environment[name]!r}, which does not say how many of the {world} processes are on "
            "this host. Unset it to run on one host."
        )
    return counts[int(node)]


def _parent() -> str:
    """A name for the process that started this one: MPICH gives all ranks nothing else in common."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{parent}-{started}"
