"""Process groups of torch modules: meshes whose devices are the processes of the job."""

from __future__ import annotations

import functools
from typing import Any

from ..core.mesh import Mesh
from ..errors import MeshError
from ..job.job_context import check_alone, current, init, make_mesh, on_device, world_size
from ..job.membership import Membership

__all__ = ["group_of_device_mesh", "mesh_of_group"]


def mesh_of_group(process_group: Any, what: str, *, own: bool = False) -> Mesh:
    """Return the mesh of a module's `process_group`. A mesh is itself; None means all processes of the job.

    A group of torch.distributed means the job if it has all of the job's processes. The job's mesh has the axis "data". All
    modules share it, unless the module needs its `own`. This process joins the job if it has not yet. `what` names the module
    in errors. Raise MeshError for anything else, and for a mesh of virtual devices.
    """
    if not isinstance(process_group, Mesh):
        joined = current() or init()
        mesh = make_mesh({"data": world_size()}, device="cpu") if own else _mesh_of_job(joined)
        if process_group is not None:
            size = process_group.size() if hasattr(process_group, "size") else None
            if size != mesh.size:
                given = f"{process_group!r:.60}" if size is None else f"of {size} processes, and the job has {mesh.size}"
                raise MeshError(
                    f"{what}: process_group is {given}. Give a mesh, fc.make_mesh({{...}}), or None for all processes."
                )
        return mesh
    check_alone(process_group)
    if process_group.is_abstract or (process_group.is_fully_addressable and process_group.size > 1):
        raise MeshError(
            f"{what}: {process_group!r} has no process for each of its {process_group.size} devices. Start them: "
            f"`funccoll run -n {process_group.size} script.py`, or torchrun."
        )
    return on_device(process_group, "cpu")


def group_of_device_mesh(device_mesh: Any, process_group: Any) -> Any:
    """Return the process group of a one-dimensional mesh of torch.distributed. Raise MeshError for another mesh."""
    if process_group is not None:
        raise MeshError(
            "DistributedDataParallel: process_group and device_mesh both name the processes that average gradients. Give one."
        )
    if device_mesh.ndim != 1:
        raise MeshError(
            f"DistributedDataParallel: device_mesh has {device_mesh.ndim} dimensions, and gradients are averaged over one. "
            'Give the one of the data, device_mesh["data"].'
        )
    return device_mesh.get_group(mesh_dim=0)


def _mesh_of_job(joined: Membership | None) -> Mesh:
    return _mesh_alone() if joined is None else joined.once("mesh of torch modules", _new_mesh)


def _new_mesh() -> Mesh:
    return make_mesh({"data": world_size()}, device="cpu")


_mesh_alone = functools.lru_cache(maxsize=1)(_new_mesh)
