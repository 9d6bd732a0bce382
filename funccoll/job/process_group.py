"""Groups of processes: some ranks of a job, which communicate without the others."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ..core.mesh import Mesh, number_hosts
from ..core.partition_spec import P
from ..core.sharding import Sharding
from ..errors import MeshError, PlannedError, user_frames
from ..runtime.transport import mesh_number
from .job_context import init, transport_of, world_size
from .membership import Membership

__all__ = ["ProcessGroup", "group"]

_CREATED, _DROPPED = "process groups", "meshes of groups that were dropped"


class ProcessGroup:
    """Some ranks of a job, in an order of their own. `fc.group` and `split` make it, `mesh` gives it axes.

    Its ranks communicate without the others. If a rank outside of it fails meanwhile, the collective goes on, and the next
    one raises PeerFailure. `ranks` are the members, by their ranks in the job; `name` is its name; `rank` is this process's
    position among the members, or None if it is not one of them.
    """

    def __init__(self, world: Membership | None, ranks: tuple[int, ...], name: str, identity: str):
        own = 0 if world is None else world.rank
        self.ranks, self.name = ranks, name
        self.rank = ranks.index(own) if own in ranks else None
        self._world, self._identity, self._own = world, identity, own
        self._meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}
        self._splits, self._is_freed = 0, False

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @user_frames()
    def mesh(self, axes: Mapping[str, int], *, device: str | None = None) -> Mesh:
        """Return a mesh of the members, such as `group.mesh({"data": 3})`.

        All members make the same meshes. Equal axes give the same mesh.

        Args:
            axes: Axis names and sizes. The members are numbered row-major, in the order of `ranks`.
            device: "cpu". Meshes of GPUs of some of a job's processes are planned.

        Returns:
            A mesh, for `fc.jit` and `fc.device_put`.

        Raises:
            MeshError: If this process is not a member, or the product of the sizes is not the number of members.
            PlannedError: For another device.
            RendezvousError: If this process has left the job.

        Example:
            >>> fc.group([0]).mesh({"data": 1})
            Mesh({'data': 1})
        """
        self._require_member("makes no mesh of it")
        if device not in (None, "cpu"):
            raise PlannedError(f"meshes of GPUs for groups of some processes are planned, and device={device!r} was given.")
        made = Mesh(axes)
        if made.size != self.size:
            raise MeshError(
                f"a mesh {dict(made.shape)} has {made.size} devices, and {self} has {self.size} members: each is one device. "
                f"Choose sizes whose product is {self.size}."
            )
        key = tuple(made.shape.items())
        if key not in self._meshes:
            if self._world is None:
                self._meshes[key] = Mesh(axes, range(1))
            else:
                hosts = number_hosts(self._world.hosts[rank] for rank in self.ranks)
                number = mesh_number(self._identity, *made.axis_names, *made.sizes)
                transport = self._world.transport.for_mesh(number, self.ranks)
                _dropped(self._world).note(transport, number)
                self._meshes[key] = Mesh(axes, self.ranks, self.rank, transport, hosts=hosts)
        return self._meshes[key]

    @user_frames()
    def split(self, color: int | None, key: int = 0) -> ProcessGroup | None:
        """Split the group: members that pass one `color` become a group. All members must call it.

        Args:
            color: An integer of at least 0; None for a member that joins no group.
            key: The order within a group. Members with equal keys stay in their order here.

        Returns:
            This process's group, or None without a color.

        Raises:
            MeshError: If this process is not a member, or an argument is not such an integer.

        Example:
            >>> fc.group([0]).split(color=3).ranks
            (0,)

        References:
            MPI_Comm_split.
        """
        self._require_member("cannot split it")
        wanted = -1 if color is None else _integer("color", color)
        if wanted < 0 and color is not None:
            raise MeshError(f"split: color={color!r} must be at least 0, or None to join no group.")
        self._splits += 1
        rows = [(wanted, _integer("key", key), 0)]
        if self._world is not None:
            mesh = self.mesh({"member": self.size})
            own = np.array([[wanted, _integer("key", key)]], np.int64)
            pairs = transport_of(mesh).gather_whole(own, (self.size, 2), Sharding(mesh, P("member")))
            rows = [(int(c), int(k), i) for i, (c, k) in enumerate(pairs.tolist())]
        if color is None:
            return None
        members = sorted((k, i) for c, k, i in rows if c == wanted)
        ranks = tuple(self.ranks[i] for _, i in members)
        return ProcessGroup(self._world, ranks, self.name, f"{self._identity} split {self._splits} {wanted}")

    @user_frames()
    def free(self) -> None:
        """Free the memory of the group's collectives. Later uses of it and of its meshes raise MeshError.

        Each member calls it, after its last collective of the group. A job has room for 4,096 groups and parts of meshes at
        once. `with fc.group([0, 3]) as group:` frees it, too. A group that you drop, with its meshes, arrays and functions, is
        freed when you make the next one, once Python has collected it.

        Raises:
            MeshError: In the middle of one of the group's collectives.

        References:
            `torch.distributed.destroy_process_group`, MPI_Comm_free.
        """
        for mesh in self._meshes.values():
            transport_of(mesh).free()
        self._meshes.clear()
        self._is_freed = True

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()

    def _require_member(self, what: str) -> None:
        if self._is_freed:
            raise MeshError(f"{self} was freed. Make another one with fc.group.")
        if self.rank is None:
            raise MeshError(
                f"rank {self._own} is not a member of {self}, so it {what}. Let only members call it: "
                "`if group.rank is not None:`."
            )

    def __repr__(self) -> str:
        return f"group({list(self.ranks)!r:.200}{f', {self.name!r}' if self.name else ''})"


class _DroppedMeshes:
    """Meshes of groups that nothing refers to any more. They are freed at the next call that makes a group or a mesh.

    A mesh dies anywhere, also while its communicators' lock is held. So its end only puts a reference into a queue, by a
    function in C: a handler of a signal cannot run there.
    """

    def __init__(self, world: Membership):
        self._world, self._ended = world, deque[Any]()
        self._numbers: dict[Any, int] = {}  # by the weak references to transports, which have one mesh each

    def note(self, transport: Any, number: int) -> None:
        """Free the mesh of that number once its transport has died."""
        self._numbers[weakref.ref(transport, self._ended.append)] = number

    def free(self) -> None:
        """Free the meshes that have died."""
        while self._ended:
            with suppress(IndexError):  # another thread took it
                self._world.transport.free_part(self._numbers.pop(self._ended.popleft()))


def _dropped(world: Membership) -> _DroppedMeshes:
    found: _DroppedMeshes = world.once(_DROPPED, lambda: _DroppedMeshes(world))
    found.free()
    return found


@user_frames()
def group(ranks: Iterable[int], name: str = "") -> ProcessGroup:
    """Make a group of some processes of the job. Only its members have to call this, each in its own order.

    No process waits. Members that make several groups of the same ranks and name make them in the same order: the n-th of one
    member is the n-th of another. A member that never makes it is named when a collective of the group times out.

    Args:
        ranks: The members, by their ranks in the job. Their order is that of positions in the group.
        name: Tells groups of the same ranks apart, if threads or libraries make them in orders of their own.

    Returns:
        The group. On a process that is not a member its methods raise.

    Raises:
        MeshError: If a rank is not of this job, or is given twice, or there are none.

    Example:
        >>> fc.group([0]).size  # in a job of 6: fc.group([0, 3, 5]).mesh({"data": 3})
        1

    References:
        `torch.distributed.new_group`, MPI_Comm_create_group.
    """
    processes = world_size()
    given: tuple[object, ...] = (
        tuple(ranks) if isinstance(ranks, Iterable) and not isinstance(ranks, (str, bytes)) else (ranks,)
    )
    members = tuple(_integer("rank", rank) for rank in given)
    if not isinstance(name, str):
        raise MeshError(f"fc.group: name={name!r} must be a string.")
    if not members:
        raise MeshError("fc.group: no rank was given. A group has at least one.")
    if outside := [rank for rank in members if not 0 <= rank < processes]:
        raise MeshError(
            f"fc.group({list(members)!r:.200}): this job has {processes} process{'es' * (processes > 1)}, ranks 0 to "
            f"{processes - 1}, and {outside[0]} is not one of them."
        )
    if len({*members}) < len(members):
        twice = next(rank for rank in members if members.count(rank) > 1)
        raise MeshError(f"fc.group({list(members)!r:.200}): rank {twice} is given twice.")
    world = init()
    key, count = f"{members} {name}", 0
    if world is not None:
        _dropped(world)
        counts: dict[str, int] = world.once(_CREATED, dict)
        count = counts[key] = counts.get(key, 0) + 1
    return ProcessGroup(world, members, name, f"{key} {count}")


def _integer(what: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise MeshError(f"{what} {value!r:.80} must be an integer.") from None
