"""The job: how many processes there are, and meshes that fit them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import MeshError, PlannedError
from ..mesh import Mesh

__all__ = ["make_mesh", "rank", "world_size"]

# (variable with the number of processes, variable with this process's rank), by launcher.
_LAUNCHERS = (
    ("FUNCCOLL_WORLD_SIZE", "FUNCCOLL_RANK"),
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)


def _job(environment: Mapping[str, str]) -> tuple[int, int]:
    """(processes, rank) as the launcher's environment says; (1, 0) without one."""
    for size, rank in _LAUNCHERS:
        if size in environment and rank in environment:
            try:
                processes, number = int(environment[size]), int(environment[rank])
            except ValueError:
                processes, number = 0, 0
            if not 0 <= number < processes:
                raise MeshError(
                    f"the environment says {size}={environment[size]!r} and {rank}={environment[rank]!r}, which is no "
                    f"job: {size} counts the processes, {rank} is this one, from 0. Unset both to run in one process."
                )
            return processes, number
    return 1, 0


def world_size() -> int:
    """The number of processes of this job."""
    return _job(os.environ)[0]


def rank() -> int:
    """This process's number, 0 to world_size() - 1."""
    return _job(os.environ)[1]


def make_mesh(axes: Mapping[str, int]) -> Mesh:
    """A mesh with named axes, for example `make_mesh({"data": 4, "model": 2})`.

    In a single process it has as many virtual devices as it asks for; in a job of several processes, one
    device for each process.

    Raises: MeshError when sizes are not positive integers, or do not fit the job.
    """
    mesh = Mesh(axes)
    processes = world_size()
    if processes > 1:
        if mesh.size != processes:
            raise MeshError(
                f"a mesh {dict(mesh.shape)} has {mesh.size} devices, and this job has {processes} processes: each "
                f"process is one device. Start it with {mesh.size} processes, or choose sizes whose product is "
                f"{processes}."
            )
        raise PlannedError(
            f"this job has {processes} processes, and this version of funccoll runs in one: processes over shared "
            "memory are planned. Run the script without a launcher; it gets virtual devices."
        )
    return Mesh(mesh.shape, range(mesh.size))
