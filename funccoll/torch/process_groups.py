"""Process groups of torch modules: meshes whose devices are the processes of the job."""

from __future__ import annotations

import functools

from ..errors import MeshError
from ..mesh import Mesh
from ..runtime.job.world import World, current, init, make_mesh, world_size

__all__ = ["mesh_of_group"]


def mesh_of_group(process_group: Mesh | None, what: str) -> Mesh:
    """Return the mesh that a module's `process_group` stands for: itself, or, for None, one of all processes of the job.

    That one is the same for all modules; its axis is "data", and this process joins the job where it has not yet. `what`
    names the module in errors. Raises MeshError for what is not a mesh, and for a mesh of virtual devices.
    """
    if process_group is None:
        return _mesh_of_job(current() or init())
    if not isinstance(process_group, Mesh):
        raise MeshError(
            f"{what}: process_group={process_group!r:.60} must be a mesh from fc.make_mesh({{...}}), or None for all "
            "processes of the job. Groups of torch.distributed have a transport of their own."
        )
    if process_group.is_fully_addressable and process_group.size > 1:
        raise MeshError(
            f"{what}: {process_group!r} has no process for each of its {process_group.size} devices. Start them: "
            f"`funccoll run -n {process_group.size} script.py`, or torchrun."
        )
    return process_group


@functools.lru_cache(maxsize=1)
def _mesh_of_job(world: World | None) -> Mesh:
    return make_mesh({"data": world_size()})
