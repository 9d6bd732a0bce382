"""The one rule for the job and rank of this process before it has joined: torch's group, then the launcher's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from .. import config
from ..errors import MeshError, RendezvousError
from .handshake import JobSpec
from .launchers import claimed, is_inherited, job_of
from .torch_group import TorchGroup, agree_on_run, default_group

__all__ = [
    "check_joined",
    "describe_rank",
    "new_job",
    "own_place",
    "started_by",
]

_TORCH = "torch.distributed"


def own_place(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(processes, rank) of this process; (1, 0) alone.

    If torch.distributed is initialized, its default group decides. Launchers' variables may then repeat it, or describe one
    process. They may also be those of the process that has started this one by multiprocessing. Raises MeshError for others. A
    process that a rank has started has the rank's place, as it has by a launcher's variables.
    """
    group = default_group()
    if group is None:
        launcher = claimed(environment)
        rank, world, process, words = [*config.TORCH_RANK.read(environment).split(maxsplit=3), "", "", "", ""][:4]
        if world and process != str(os.getpid()) and words == launcher.variables:
            return int(world), int(rank)
        return launcher.world, launcher.rank
    _launcher(group, environment)
    return group.world, group.rank


def describe_rank(job: JobSpec, environment: Mapping[str, str] = os.environ) -> str:
    """This process in the job, for config.TORCH_RANK, with its launcher's words. A launcher inside it would change those."""
    try:
        words = claimed(environment).variables
    except MeshError:
        words = ""
    return f"{job.rank} {job.world} {os.getpid()} {words}".strip()


def new_job(timeout: float, environment: Mapping[str, str] = os.environ) -> tuple[JobSpec, JobSpec]:
    """This process's job, of several processes, and its launcher's description of it.

    In a group of torch all processes call it together, and it waits for them up to `timeout` seconds. Raises MeshError,
    RendezvousError.
    """
    group = default_group()
    if group is None:
        job = job_of(environment)
        if job.world == 1:  # the place is that of the process that has started this one
            raise started_by(own_place(environment)[1])
        return job, job
    launched = JobSpec(0, 1, "")
    if _launcher(group, environment):
        with suppress(MeshError):  # nothing else names the run; the group does
            launched = job_of(environment)
    job = launched if launched.world > 1 else JobSpec(*group, run="", launcher=_TORCH)
    return agree_on_run(job, timeout), launched


def _launcher(group: TorchGroup, environment: Mapping[str, str]) -> bool:
    """True if the launcher's variables agree with the group, False if they say nothing about this process.

    The variables belong to another process in three cases: they are half set; they describe one process, which may have started
    more; or a multiprocessing process (torch's mp.spawn) has inherited them. Raises MeshError for a contradiction.
    """
    try:
        launcher = claimed(environment)
    except MeshError:
        return False
    if launcher.world == 1:
        return False
    from multiprocessing import parent_process  # here: it imports twenty modules

    if parent_process() is not None and is_inherited(launcher, environment):
        return False
    if (launcher.rank, launcher.world) != group:
        raise MeshError(
            f"{group}, and the environment says {launcher}. Initialize torch.distributed with all processes of the job, or "
            "unset these variables if they are another job's."
        )
    return True


def started_by(rank: int, variables: str = "") -> RendezvousError:
    """The error of a process that a rank has started: a worker, or another script. `variables` gave that rank its place."""
    from multiprocessing import parent_process

    variables = variables or config.TORCH_RANK
    remedy = f"Start it as a job of its own (`funccoll run -n N`, fc.launch), or alone, without {variables} in its environment."
    if parent_process() is not None:
        remedy = 'Keep what needs the other ranks under `if __name__ == "__main__":`, which workers do not run.'
    return RendezvousError(
        f"this process was started by rank {rank} and is not a rank of its own: rank {rank} has joined the job. {remedy}"
    )


def check_joined(rank: int, world: int) -> None:
    """Raise MeshError if torch's group is not the job that this process has joined."""
    group = default_group()
    if group is not None and group != (rank, world):
        raise MeshError(
            f"{group}, and this process has joined a job as rank {rank} of {world}. Call fc.finalize() before you initialize "
            "torch.distributed anew, or initialize it with all processes of the job."
        )
