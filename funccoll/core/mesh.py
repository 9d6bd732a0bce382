"""Meshes and groups of their devices: plain values that need no hardware and no job."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MeshError
from .partition_spec import normalize_axes

__all__ = [
    "Mesh",
    "ReplicaGroups",
    "abstract_mesh",
    "check_hosts",
    "copies_of_devices",
    "copy_coordinates",
    "number_hosts",
    "shown_groups",
]


def _device_ids(devices: Sequence[int] | None) -> Sequence[int] | None:
    """Return ids as a range if they are consecutive, else as a tuple. So a mesh of a million devices stays small."""
    if devices is None or (isinstance(devices, range) and devices.step == 1):
        return devices
    given: tuple[Any, ...] = tuple(devices) if isinstance(devices, Iterable) else (None,)
    if not all(isinstance(d, (int, np.integer)) for d in given):
        raise MeshError(f"devices={devices!r}: it takes one integer id for each device of the mesh.")
    ids = tuple(int(d) for d in given)
    run = range(ids[0], ids[0] + len(ids)) if ids else range(0)
    return run if tuple(run) == ids else ids


def number_hosts(names: Iterable[Hashable]) -> tuple[int, ...]:
    """Return the host of each device as a number, in the order of first appearance; () if all are on one host."""
    numbers: dict[Hashable, int] = {}
    hosts = tuple([numbers.setdefault(name, len(numbers)) for name in names])
    return hosts if len(numbers) > 1 else ()


def check_hosts(
    hosts: Any, size: int, members: str = "devices", error: Callable[[str], Exception] = MeshError
) -> tuple[int, ...]:
    """Return the hosts of `size` devices (or ranks), given a number of equal hosts or the host of each."""
    if isinstance(hosts, (int, np.integer)) and not isinstance(hosts, bool):
        if hosts < 1 or size % hosts:
            raise error(
                f"hosts={hosts}: {size} {members} cannot be cut into {hosts} equal hosts. Give a divisor of {size}, or the "
                f"host of each of the {members}, such as hosts=(0, 0, 1) for three."
            )
        return number_hosts(np.repeat(np.arange(hosts), size // hosts).tolist())
    given: tuple[Any, ...] = tuple(hosts) if isinstance(hosts, Iterable) else (None,)
    if not all(isinstance(h, (int, np.integer)) and not isinstance(h, bool) and h >= 0 for h in given):
        raise error(
            f"hosts={hosts!r:.80} must be a number of equal hosts, or the host of each of the {members}: integers, at least 0, "
            "such as hosts=(0, 0, 1, 1)."
        )
    if given and len(given) != size:
        raise error(f"hosts={hosts!r:.80} has {len(given)} entries, and there are {size} {members}: give one for each.")
    return number_hosts(map(int, given))


@dataclass(frozen=True)
class ReplicaGroups:
    """Devices that communicate in a collective (XLA's replica groups): every group of a mesh, in the order of its ranks.

    `axes` are the mesh axes along which they are, for messages. `ranks` are the positions of each group's devices in the
    mesh. All groups have one size, and a device is in one of them.
    """

    axes: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    within: tuple[tuple[int, ...], ...] = ()
    """The positions along the axes that form groups (`groups=` of a collective), for messages; () if all of them are one."""

    def __post_init__(self):
        devices = [device for ranks in self.ranks for device in ranks]
        if len({*map(len, self.ranks)}) != 1 or len({*devices}) < len(devices) or not devices:
            raise MeshError(f"groups {self.ranks!r:.200}: they must have one size, and each device may be in one of them.")

    @property
    def size(self) -> int:
        """The number of ranks of each group."""
        return len(self.ranks[0])

    @property
    def whole(self) -> ReplicaGroups:
        """The groups of all devices along the axes, without groups within them."""
        if not self.within:
            return self
        lines = []
        for first in range(0, len(self.ranks), len(self.within)):
            line = dict[int, int]()
            for places, ranks in zip(self.within, self.ranks[first:], strict=False):
                line.update(zip(places, ranks, strict=True))
            lines.append(tuple([line[place] for place in range(len(line))]))
        return ReplicaGroups(self.axes, tuple(lines))

    def of(self, device: int | None) -> tuple[int, ...]:
        """Return the group of a device. Raise MeshError if it is in none."""
        found = next((ranks for ranks in self.ranks if device in ranks), None)
        if found is None:
            raise MeshError(
                f"device {device} is in none of the groups {self.ranks!r:.200} over {self}, and every device of a mesh runs "
                "all collectives of a program: give it a group, too."
            )
        return found

    def __str__(self) -> str:
        groups = f" in groups {shown_groups(self.within)}" if self.within else ""
        return ", ".join(map(repr, self.axes)) + groups


def shown_groups(groups: Sequence[Sequence[int]]) -> str:
    """Return groups of positions as users write them, for messages: all of them, or the beginning."""
    whole = str([list(group) for group in groups])
    return whole if len(whole) <= 120 else f"{whole[:117]}..."


class Mesh:
    """An n-d grid of devices with named axes, row-major (the last axis is contiguous).

    `devices` holds one integer id per device. It is None for an abstract mesh, which can be traced, lowered and costed against,
    but not run on. `hosts` has the number of each device's host, in the order of first appearance, or is () if all are on one.
    `device_type` is "cpu" or "cuda": where the arrays are. Meshes are values: equal if names, sizes, devices, hosts, device
    type and process are.

    `transport` executes collectives over the mesh and has the device of its arrays (`runtime/transport.py`). It is opaque here,
    and neither compared nor pickled. Nor are `on_devices` and `programs`, which belong to one mesh and end with it. Equal
    meshes, which may be of two jobs, have their own.
    """

    __slots__ = (
        "_hash",
        "axis_names",
        "device_type",
        "devices",
        "hosts",
        "made_alone",
        "on_devices",
        "process",
        "programs",
        "shape",
        "size",
        "sizes",
        "transport",
    )

    def __init__(
        self,
        axes: Mapping[str, int],
        devices: Sequence[int] | None = None,
        process: int | None = None,
        transport: Any = None,
        device_type: str = "cpu",
        hosts: int | Sequence[int] = (),
    ):
        if not isinstance(axes, Mapping):
            raise MeshError(f'a mesh is made from a dict of axis names and sizes, such as {{"data": 4}}, not from {axes!r}.')
        for name, size in axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"mesh axis name {name!r} must be a string of letters, digits and underscores.")
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size!r}: sizes are integers, at least 1.")
        self.axis_names: tuple[str, ...] = tuple(axes)
        self.sizes: tuple[int, ...] = tuple(int(s) for s in axes.values())
        self.shape: Mapping[str, int] = MappingProxyType(dict(zip(self.axis_names, self.sizes, strict=True)))
        """Axis name -> size, in axis order (read-only)."""
        self.size = math.prod(self.sizes)
        """The number of devices."""
        self.devices: Sequence[int] | None = _device_ids(devices)
        if self.devices is not None:
            if len(self.devices) != self.size:
                raise MeshError(
                    f"a mesh {dict(self.shape)} has {self.size} places, and {len(self.devices)} devices were given."
                )
            if not isinstance(self.devices, range) and len(set(self.devices)) != self.size:
                raise MeshError(f"devices {list(self.devices)} name a device twice.")
        self.process = process
        """The position of the one device that this process plays; None if it plays all."""
        self.transport = transport
        self.device_type = device_type
        self.hosts: tuple[int, ...] = check_hosts(hosts, self.size)
        self.made_alone: str | None = None
        """The place (" at train.py:3") at which `make_mesh` made it for a single process; None for other meshes."""
        self.on_devices: dict[str, Mesh] = {}
        """The same mesh by device type, itself included, once something asked for it (`on_device` of `job/job_context.py`)."""
        self.programs: dict[str, Any] = {}
        """Compiled programs that a library keeps for this mesh alone, under the library's name."""
        self._hash = hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        """The parts that make meshes equal."""
        return self.axis_names, self.sizes, self.devices, self.process, self.device_type, self.hosts

    @property
    def is_abstract(self) -> bool:
        """True if there are no devices to run on."""
        return self.devices is None

    @property
    def local_devices(self) -> range:
        """The positions of the devices that this process plays."""
        return range(self.size) if self.process is None else range(self.process, self.process + 1)

    @property
    def is_fully_addressable(self) -> bool:
        """True if this process plays all devices, so that no block of a value is elsewhere."""
        return self.process is None

    @property
    def abstract(self) -> Mesh:
        """Return the same names, sizes and hosts without devices."""
        return Mesh(self.shape, hosts=self.hosts)

    def check_axes(self, axes: str | Iterable[str], what: str = "axis") -> tuple[str, ...]:
        """Return `axes` as a tuple. Raise MeshError for an unknown name or a repeated one."""
        if not isinstance(axes, Iterable):
            raise MeshError(f"{what} {axes!r}: a mesh axis is given by its name, one of {list(self.axis_names)}.")
        names = normalize_axes(axes)
        for axis in names:
            if not isinstance(axis, str) or axis not in self.shape:
                remedy = f"Use one of {list(self.axis_names)}, or add {axis!r} to the mesh."
                if not self.axis_names:
                    remedy = "Was mesh=fc.make_mesh({...}) forgotten?"
                raise MeshError(f"unknown {what} {axis!r}: the mesh has axes {dict(self.shape)}. {remedy}")
        if len(set(names)) != len(names):
            raise MeshError(f"{what} {names!r} names a mesh axis twice.")
        return names

    def axis_size(self, axes: str | Iterable[str]) -> int:
        """Return the product of the sizes of `axes`."""
        return math.prod(self.shape[a] for a in self.check_axes(axes))

    def coordinates(self, device: int) -> dict[str, int]:
        """Return axis name -> index of `device` along it. `device` is a position, 0 to size - 1."""
        if isinstance(device, bool) or not isinstance(device, (int, np.integer)) or not 0 <= device < self.size:
            raise MeshError(f"device {device!r} is not in a mesh of {self.size} devices, numbered from 0.")
        return dict(zip(self.axis_names, map(int, np.unravel_index(device, self.sizes or (1,))), strict=False))

    def position(self, coordinates: Mapping[str, int]) -> int:
        """Return the position of the device at `coordinates` (missing axes count as 0)."""
        self.check_axes(coordinates)
        index = 0
        for name, size in self.shape.items():
            here = coordinates.get(name, 0)
            if not 0 <= here < size:
                raise MeshError(f"there is no device at {name}={here!r}: {name!r} has size {size}.")
            index = index * size + here
        return index

    def groups(self, axes: str | Iterable[str]) -> list[list[int]]:
        """Return the sets of device positions that communicate in a collective over `axes`.

        Devices in a group are ordered by their index along `axes`, the first axis outermost. Groups are ordered by the
        coordinates along the other axes.
        """
        names = self.check_axes(axes)
        order = [self.axis_names.index(a) for a in (*(a for a in self.axis_names if a not in names), *names)]
        positions = np.arange(self.size).reshape(self.sizes).transpose(order)
        return positions.reshape(-1, self.axis_size(names)).tolist()

    def replica_groups(self, axes: str | Iterable[str], within: Sequence[Sequence[int]] = ()) -> ReplicaGroups:
        """Return the groups of devices that communicate in a collective over `axes`.

        `within` are groups of positions along the axes, of one size, if not all devices along them communicate.
        """
        along = self.groups(axes)
        places = within or (range(len(along[0])),)
        ranks = tuple([tuple([line[place] for place in group]) for line in along for group in places])
        return ReplicaGroups(self.check_axes(axes), ranks, tuple(map(tuple, within)))

    def hosts_along(self, groups: str | Iterable[str] | ReplicaGroups) -> tuple[int, ...]:
        """Return the host of each rank of a collective over these axes or groups; () if every group is on one host.

        All groups of a collective run one schedule, so all have the same bits. But groups may lie on hosts in different ways.
        Two ranks count as neighbours if they share a host in every group, and as apart if they are on two hosts in one group.
        So a group may run a schedule for more hosts than it has, but never one that reads memory it cannot reach.
        """
        if not self.hosts:
            return ()
        ranks = groups.ranks if isinstance(groups, ReplicaGroups) else self.groups(groups)
        return number_hosts(map(tuple, np.array(self.hosts)[np.array(ranks)].T.tolist()))

    def walk(self, axes: Iterable[str]) -> list[dict[str, int]]:
        """Return all coordinates along `axes`, the first axis outermost."""
        names = tuple(axes)
        ranges = [range(self.shape[a]) for a in names]
        return [dict(zip(names, point, strict=True)) for point in itertools.product(*ranges)]

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """Return the sub-mesh of `axes` (in that order) through this process's device; one process's goes through the first.

        In a job, each process along other axes has a mesh of its own processes. All of these have to ask for it.
        """
        names, devices, process = self.check_axes(axes), None, None
        fixed = {} if self.process is None else self.coordinates(self.process)
        places = [self.position({**fixed, **c}) for c in self.walk(names)]
        if self.devices is not None:
            devices = [self.devices[i] for i in places]
        hosts = number_hosts(self.hosts[i] for i in places) if self.hosts else ()
        shape = {a: self.shape[a] for a in names}
        transport = self.transport
        if self.process is not None:
            process = places.index(self.process)
            transport = None if transport is None or devices is None else transport.for_part(names, devices)
        return Mesh(shape, devices, process, transport, self.device_type, hosts)

    __iter__ = None  # __getitem__ takes names; without this Python would try mesh[0], mesh[1], ...

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):
        return Mesh, (dict(self.shape), self.devices, self.process, None, self.device_type, self.hosts)

    def __copy__(self) -> Mesh:
        return self

    def __deepcopy__(self, memo: Any) -> Mesh:
        return self  # a value; a copy of an Array stays on its transport

    def __repr__(self) -> str:
        inside = ", ".join(f"{n!r}: {s}" for n, s in self.shape.items())
        where = "" if self.device_type == "cpu" else f", {self.device_type!r}"
        if self.hosts:
            where += f", hosts={self.hosts if self.size <= 16 else f'<{1 + max(self.hosts)} hosts>'}"
        return f"{'abstract_mesh' if self.is_abstract else 'Mesh'}({{{inside}}}{where})"

    def _repr_html_(self) -> str:
        from .display import mesh_table

        return mesh_table(self)


def abstract_mesh(axes: Mapping[str, int], *, hosts: int | Sequence[int] = ()) -> Mesh:
    """Make a mesh without devices, of any size, to trace, lower and cost programs without hardware.

    Args:
        axes: Axis names and sizes.
        hosts: The hosts of its devices, as in `fc.make_mesh`.

    Returns:
        A mesh on which nothing can run.

    Raises:
        MeshError: If sizes are not positive integers, or hosts do not fit them.

    Example:
        >>> mesh = fc.abstract_mesh({"data": 1024})
        >>> fn = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> print(fn.trace(fc.ArrayType((2048,), np.dtype(np.float32))).program.outputs[0].type)
        f32[2]
    """
    return Mesh(axes, hosts=hosts)


def copy_coordinates(mesh: Mesh, varying: frozenset[str]) -> tuple[dict[str, int], ...]:
    """Return the coordinates of the distinct copies of a value that varies over `varying`, in the order of the mesh's axes.

    A process that plays all devices holds one copy for all devices along an axis over which the value does not vary. A
    process that plays one device holds its own copy.
    """
    device = None if mesh.is_fully_addressable else mesh.local_devices[0]
    return _copy_coordinates(mesh.axis_names, mesh.sizes, device, varying)


@lru_cache(maxsize=4096)  # it keeps no mesh: one of a group may be freed
def _copy_coordinates(
    names: tuple[str, ...], sizes: tuple[int, ...], device: int | None, varying: frozenset[str]
) -> tuple[dict[str, int], ...]:
    mesh = Mesh(dict(zip(names, sizes, strict=True)))
    if device is None:
        return tuple(mesh.walk(a for a in names if a in varying))
    own = mesh.coordinates(device)
    return ({a: own[a] for a in names if a in varying},)


def copies_of_devices(mesh: Mesh, varying: frozenset[str]) -> list[int]:
    """Return, for each device of a mesh that one process plays, the number of its copy of a value (`copy_coordinates`)."""
    sizes = [size if axis in varying else 1 for axis, size in mesh.shape.items()]
    return np.broadcast_to(np.arange(math.prod(sizes)).reshape(sizes), mesh.sizes).ravel().tolist()


if not TYPE_CHECKING:  # for type checkers every name would be there

    def __getattr__(name: str) -> Any:
        """Return `Sharding`, which pickles look for here that were written before it had a module of its own."""
        if name == "Sharding":
            from .sharding import Sharding

            return Sharding
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
