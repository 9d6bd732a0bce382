"""The variables of launchers. They identify the job of a process.

Launchers are started inside each other: mpirun in a Slurm step, torchrun in a pod that exports WORLD_SIZE=1. A process inherits
the variables of all of them. The *innermost* launcher counts: its values were set last on the way from the first ancestor to
this process, as the ancestors' environments show (/proc/PID/environ). If they do not show it, all launchers must agree.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from .. import config
from ..errors import MeshError
from .handshake import JobSpec
from .torch_variables import are_repetitions

__all__ = ["Claimed", "claimed", "is_inherited", "job_of"]


class _Launcher(NamedTuple):
    """Variables of a launcher: the number of processes, this process's rank, and processes of its host (the first one set)."""

    name: str
    size: str
    rank: str
    runs: str
    """One of the variables that name its run."""
    local: tuple[str, ...] = ()
    brings_mpi: bool = True
    gives_grace: bool = False


_TORCH = _Launcher("torchrun", "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", ("LOCAL_WORLD_SIZE",), brings_mpi=False)
_SLURM = _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID", ("SLURM_STEP_TASKS_PER_NODE",))
_OURS = _Launcher("funccoll run", config.WORLD_SIZE, config.RANK, config.RUN_ID, brings_mpi=False, gives_grace=True)
_LAUNCHERS = (
    _OURS,
    _TORCH,
    _Launcher(
        "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    ),
    # Also Intel MPI's, and srun --mpi=pmi2.
    _Launcher("MPICH's mpirun", "PMI_SIZE", "PMI_RANK", "PMI_JOBID", ("MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")),
    _Launcher(
        "horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", ("HOROVOD_LOCAL_SIZE",), brings_mpi=False
    ),
    _SLURM,
)
# What names a run, by launcher: all of these that are set. torchrun restarts a job within a run.
_RUNS = (
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMI_JOBID",),
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_NODES = re.compile(r"(\d+)(?:\(x(\d+)\))?")
"""A number of processes, and of hosts with as many, in Slurm's lists: "2(x3),1" is 2, 2, 2, 1."""
_MOST_ANCESTORS = 64


class _Claim(NamedTuple):
    """A launcher's values; None for one that is not set."""

    launcher: _Launcher
    size: str | None
    rank: str | None
    depth: int
    """Ancestors that had the same values when they were started."""

    @property
    def is_complete(self) -> bool:
        return self.size is not None and self.rank is not None

    def agrees(self, other: _Claim) -> bool:
        """True if no value of one contradicts the other's."""
        pairs = ((self.size, other.size), (self.rank, other.rank))
        return all(mine == theirs or None in (mine, theirs) for mine, theirs in pairs)

    def __str__(self) -> str:
        named = ((self.launcher.size, self.size), (self.launcher.rank, self.rank))
        return " and ".join(f"{name}={value}" for name, value in named if value is not None)


def _claims(environment: Mapping[str, str], ancestors: Sequence[Mapping[str, str]] | None) -> list[_Claim]:
    """The values of all launchers. Half of Slurm's remain in the shells of salloc and in batch scripts, and mean nothing.

    Nor do torch's, if `funccoll run` or `fc.launch` has set them beside its own.
    """
    found = [
        _Claim(launcher, environment.get(launcher.size) or None, environment.get(launcher.rank) or None, 0)
        for launcher in _LAUNCHERS
        if environment.get(launcher.size) or environment.get(launcher.rank)
    ]
    found = [claim for claim in found if claim.is_complete or claim.launcher is not _SLURM]
    found = [claim for claim in found if claim.launcher is not _TORCH or not are_repetitions(environment)]
    if len(found) < 2:
        return found
    if ancestors is None:
        ancestors = _ancestors(os.getpid()) if environment is os.environ else ()
    return [claim._replace(depth=_depth(claim, ancestors)) for claim in found]


def _depth(claim: _Claim, ancestors: Sequence[Mapping[str, str]]) -> int:
    names = (claim.launcher.size, claim.launcher.rank, claim.launcher.runs)
    own, *around = [tuple(first.get(name) or None for name in names) for first in ancestors] or [()]
    if own[:2] != (claim.size, claim.rank):  # set since
        return 0
    return next((depth for depth, values in enumerate(around, 1) if values != own), len(ancestors))


def _innermost(environment: Mapping[str, str], ancestors: Sequence[Mapping[str, str]] | None) -> _Claim | None:
    """The values that count; None without any. Raises MeshError if values are missing, or contradict each other."""
    claims = _claims(environment, ancestors)
    complete = sorted((claim for claim in claims if claim.is_complete), key=lambda claim: claim.depth)
    if len(complete) > 1:  # a Slurm step of one task holds whatever that task starts
        complete = [claim for claim in complete if claim.launcher is not _SLURM or claim.size != "1"]
    if not complete:
        half = next((claim for claim in claims if (claim.size, claim.rank) != ("1", None)), None)
        if half is not None:
            raise MeshError(_incomplete(half))
        return None
    chosen = complete[0]  # of several ours: fc.launch sets them in a program that may itself have set others since
    by_hand = chosen.launcher is _TORCH and "TORCHELASTIC_RUN_ID" not in environment
    for other in claims:
        counts = other in complete or not other.is_complete
        outer = chosen.depth < other.depth or (chosen.launcher is _OURS and chosen.depth == other.depth)
        inside = outer and not (by_hand and chosen.size == "1" and other.is_complete)
        if counts and not inside and not other.agrees(chosen):
            raise MeshError(
                f"the environment says {chosen} ({chosen.launcher.name}) and {other} ({other.launcher.name}), which contradict "
                "each other, and neither launcher is known to have started the other. Unset those that are left over."
            )
    same = [claim for claim in complete if (claim.size, claim.rank) == (chosen.size, chosen.rank)]
    # Scripts repeat their launcher's values in torch's variables. The launcher knows the hosts and the run.
    return next((claim for claim in same if claim.launcher is not _TORCH), chosen) if by_hand else chosen


def _incomplete(half: _Claim) -> str:
    size, rank = half.launcher.size, half.launcher.rank
    absent = rank if half.rank is None else size
    start = f"`funccoll run -n {half.size or 'N'}`, torchrun or mpirun"
    return (
        f"the environment says {half}, and {absent} is not set: {size} counts the processes of a job, and {rank} is this one. "
        f"Start the processes with {start}, or unset {size if absent == rank else rank} to run alone."
    )


@functools.lru_cache(maxsize=1)  # by process: a forked one has another parent
def _ancestors(process: int) -> Sequence[Mapping[str, str]]:
    """The environments with which a process and its ancestors were started, as far as they can be read."""
    found: list[Mapping[str, str]] = []
    for _ in range(_MOST_ANCESTORS):
        first = _first_environment(process)
        if first:
            found.append(first)
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended, or another user's if these are hidden
            break
        if process == 0:
            break
    return found


def _first_environment(process: int) -> Mapping[str, str]:
    """The environment with which a process was started; {} if it cannot be read, or the process has written over it."""
    try:
        entries = [entry for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0") if entry]
    except OSError:
        return {}
    if not all(b"=" in entry for entry in entries):  # a title in its place
        return {}
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in (entry.partition(b"=") for entry in entries)}


class Claimed(NamedTuple):
    """This process's place, as its launcher's variables say."""

    rank: int
    world: int
    variables: str = ""
    """The variables with their values, in words."""
    launcher: _Launcher | None = None

    def __str__(self) -> str:
        return f"{self.variables} ({self.launcher.name})" if self.launcher is not None else "nothing of a job"


def claimed(environment: Mapping[str, str], ancestors: Sequence[Mapping[str, str]] | None = None) -> Claimed:
    """This process's place, as the launcher's environment says; rank 0 of 1 without one. Raises MeshError."""
    claim = _innermost(environment, ancestors)
    if claim is None:
        return Claimed(0, 1)
    try:
        processes, number = int(claim.size or ""), int(claim.rank or "")
    except ValueError:
        processes, number = 0, 0
    if not 0 <= number < processes:
        size, rank = claim.launcher.size, claim.launcher.rank
        raise MeshError(
            f"the environment says {size}={claim.size!r} and {rank}={claim.rank!r}, which is not a job: {size} counts the "
            f"processes, {rank} is this one, from 0. Unset both to run in one process."
        )
    return Claimed(number, processes, str(claim), claim.launcher)


def is_inherited(place: Claimed, environment: Mapping[str, str]) -> bool:
    """True if this process was started with the variables, and has not set them itself."""
    first, launcher = _first_environment(os.getpid()), place.launcher
    return launcher is not None and all(first.get(n) == environment.get(n) for n in (launcher.size, launcher.rank))


def job_of(environment: Mapping[str, str], ancestors: Sequence[Mapping[str, str]] | None = None) -> JobSpec:
    """This process's job, as the launcher's environment says. Raises MeshError if that makes no sense.

    ancestors: the environments with which this process and those around it were started, itself first; None reads them if
    `environment` is this process's.
    """
    number, world, variables, launcher = claimed(environment, ancestors)
    if launcher is None or world == 1:
        return JobSpec(0, 1, "")
    spec = JobSpec(
        number,
        world,
        "",
        _local(environment, launcher.local, world),
        launcher.name,
        launcher.brings_mpi,
        launcher.gives_grace,
        variables=variables,
        main_host=environment.get("MASTER_ADDR", "") if launcher is _TORCH else "",
    )
    if run := _run_name(environment, launcher):
        return replace(spec, run=run)
    raise MeshError(
        f"the environment says {launcher.size}={world}, and nothing that names the run, by which its processes find each "
        "other. Start them with `funccoll run`, torchrun or mpirun, or set FUNCCOLL_RUN_ID to the same new text for all."
    )


def _run_name(environment: Mapping[str, str], launcher: _Launcher) -> str:
    """The name of the run; "" if nothing has one."""
    ours = config.RUN_ID.read(environment)
    if ours and (launcher.size == config.WORLD_SIZE or config.RANK not in environment):  # else of another job around
        return ours
    if launcher.size == "PMI_SIZE" and "MPI_LOCALNRANKS" in environment:  # MPICH's: a Slurm step may have several of its jobs
        return environment.get("PMI_JOBID") or _parent()
    known = _RUNS[1:] if are_repetitions(environment) else _RUNS
    for names in sorted(known, key=lambda names: launcher.runs not in names):
        found = [environment[name] for name in names if environment.get(name)]
        if found:
            return "-".join(found)
    return _parent() if launcher.size == "PMI_SIZE" else ""


def _local(environment: Mapping[str, str], names: Sequence[str], world: int) -> int:
    """The processes of this host; 0 if the launcher does not say. Slurm lists those of all hosts."""
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
    """A name for the process that started this one. MPICH gives all ranks nothing else in common."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{parent}-{started}"
