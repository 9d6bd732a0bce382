"""Schedules of a program's collectives: the choice of their algorithms, and the proved schedule of each.

Schedules are imported only for a program that has collectives: the import takes 40 ms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives.record import are_uneven, lowering, operands_of
from ..core.ir import Equation, Program
from ..core.mesh import Mesh, ReplicaGroups
from ..core.types import is_inexact
from ..errors import ScheduleError, at_source
from ..job.job_context import joined_transport
from ..runtime.collective_call import NATIVE_ALGORITHMS, groups_of

if TYPE_CHECKING:
    from ..schedules.model.explanation import Explanation
    from ..schedules.model.topology import Topology
    from ..schedules.registry import Algorithm
    from ..schedules.schedule import Schedule

__all__ = [
    "check_algorithms",
    "choose",
    "explain_choice",
    "is_large",
    "is_users",
    "measured_seconds",
    "predicted_seconds",
    "schedules_of",
]

LARGE = 256
"""More ranks than a host has. Above it the choice is made without comparing costs (`_unweighed`). On an abstract mesh nothing
runs, so a schedule is proved only on request, because proofs take seconds."""


def check_algorithms(program: Program, mesh: Mesh) -> None:
    """Raise ScheduleError, at the collective's line, for an algorithm that does not exist or does not fit its size or mesh."""
    for eqn in program.collectives():
        name = eqn.params["algorithm"]
        if name is not None:
            with at_source(eqn.source):
                transport = joined_transport(mesh)
                if name in NATIVE_ALGORITHMS and (transport is None or name not in transport.native_algorithms):
                    raise ScheduleError(
                        f"{eqn.primitive.name}: algorithm={name!r} is {NATIVE_ALGORITHMS[name]}, which {mesh!r} does not have. "
                        "Leave it out, or name one of fc.schedules.algorithms."
                    )
                for size in {*map(len, eqn.params.get("groups", ()))} or {eqn.params["size"]}:
                    _find(eqn, size)
                if name in NATIVE_ALGORITHMS and are_uneven(eqn.params.get("groups", ())):
                    sizes = ", ".join(str(len(group)) for group in eqn.params["groups"])
                    raise ScheduleError(
                        f"{eqn.primitive.name}: algorithm={name!r} takes groups of one size, and these have sizes {sizes}. "
                        "Leave it out: proved schedules take any."
                    )


def _find(eqn: Equation, size: int | None = None) -> Algorithm:
    """Return the algorithm that a collective names, else the first for its size; for a native one, its replacement here."""
    from ..schedules.registry import find

    name = eqn.params["algorithm"]
    how = lowering(eqn)
    return find(how.kind, None if name in NATIVE_ALGORITHMS else name, size or eqn.params["size"], how.options.get("root"))


def _hosts_along(eqn: Equation, mesh: Mesh, group: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the hosts of a collective's ranks: of the largest group if sizes differ, or of the one given."""
    if not mesh.hosts:
        return ()
    groups = eqn.params.get("groups", ())
    if not are_uneven(groups):
        return mesh.hosts_along(groups_of(eqn, mesh))
    places = group or max(groups, key=len)
    lines = [tuple([line[place] for place in places]) for line in groups_of(eqn, mesh).ranks]
    return mesh.hosts_along(ReplicaGroups(eqn.axes(), tuple(lines)))


def _topology(mesh: Mesh, eqn: Equation) -> Topology:
    """Return the topology of a collective of a mesh."""
    from ..schedules.model.topology import Topology

    hosts, size = _hosts_along(eqn, mesh), eqn.params["size"]
    if hosts:
        return Topology.of_hosts(hosts)
    if mesh.device_type == "cpu":
        return Topology.one_host(size)
    return Topology.one_gpu(size) if mesh.is_fully_addressable else Topology.nvlink(size)


def choose(eqn: Equation, mesh: Mesh) -> str:
    """Return the algorithm for a collective if the user names none: the cheapest one on the mesh's hosts.

    Only proved algorithms count. On one host a reduction's algorithm is a left fold in rank order at every size, so the choice
    never changes bits there.
    """
    from ..schedules.model.select import select

    how, size = lowering(eqn), eqn.params["size"]
    if size > LARGE:
        return _unweighed(eqn, mesh)
    dtypes = [a.type.dtype for a in operands_of(eqn)]
    with at_source(eqn.source):
        uneven = are_uneven(eqn.params.get("groups", ()))
        if uneven and mesh.hosts:
            return _find(eqn).name  # the one that fits every size and every host
        transport = joined_transport(mesh)
        if transport is not None and not uneven:
            native = transport.native_algorithm(how.kind, how.op, dtypes, _nbytes(eqn), size, how.options)
            if native is not None:
                return native
        return select(how.kind, _topology(mesh, eqn), _nbytes(eqn), dtype=_narrowest(dtypes), **how.options).algorithm


def _unweighed(eqn: Equation, mesh: Mesh) -> str:
    """Return the algorithm for more than `LARGE` ranks: the collective's first, or the first for hosts with several ranks."""
    from ..schedules.registry import known

    hosts = _hosts_along(eqn, mesh)
    if hosts and len(set(hosts)) < len(hosts):
        for algorithm in known(lowering(eqn).kind):
            if "hosts" in algorithm.options and not algorithm.is_users:
                return algorithm.name
    return _find(eqn).name


def predicted_seconds(eqn: Equation, mesh: Mesh) -> float:
    """Return the cost model's time for a collective, by the cheapest schedule, or the one that it names."""
    from ..schedules.model.cost import cost

    return cost(_chosen(eqn, mesh), _topology(mesh, eqn), _nbytes(eqn)).seconds


def measured_seconds(eqn: Equation, mesh: Mesh) -> float | None:
    """Return the time that `funccoll tune` measured for a collective of the same kind and size; None without a measurement."""
    from ..schedules.model.explanation import measured_seconds as measured

    how, dtype = lowering(eqn), _narrowest([a.type.dtype for a in operands_of(eqn)])
    algorithm, topology = _chosen(eqn, mesh).algorithm, _topology(mesh, eqn)
    return measured(how.kind, algorithm, topology, _nbytes(eqn), dtype, how.options.get("root", 0))


def _chosen(eqn: Equation, mesh: Mesh) -> Schedule:
    """Return the cheapest schedule of a collective, or the one that it names."""
    from ..schedules.model.select import select

    if eqn.params["algorithm"] is not None:
        return _part(eqn, mesh, max(eqn.params.get("groups", ()), key=len, default=()))
    how, dtype = lowering(eqn), _narrowest([a.type.dtype for a in operands_of(eqn)])
    return select(how.kind, _topology(mesh, eqn), _nbytes(eqn), dtype=dtype, **how.options)


def explain_choice(eqn: Equation, mesh: Mesh) -> Explanation:
    """Return the table of what `choose` compares for a collective, if the user names no algorithm."""
    from ..schedules.model.explanation import explain

    how, dtype = lowering(eqn), _narrowest([a.type.dtype for a in operands_of(eqn)])
    return explain(how.kind, _topology(mesh, eqn), _nbytes(eqn), dtype=dtype, **how.options)


def _nbytes(eqn: Equation) -> int:
    """Return the bytes of the larger of a collective's operands and results on one device, at least 1."""
    return max(1, *(sum(a.type.nbytes for a in side) for side in (operands_of(eqn), eqn.outputs)))


def _narrowest(dtypes: Sequence[np.dtype]) -> np.dtype | None:
    """Return the dtype for which an algorithm is chosen: one of 16 bits restricts the choice."""
    return next((d for d in dtypes if d.itemsize == 2 and is_inexact(d)), next(iter(dtypes), None))


def is_large(program: Program) -> bool:
    """True if a collective has more than `LARGE` ranks."""
    return any(eqn.params["size"] > LARGE for eqn in program.collectives())


def schedules_of(program: Program, mesh: Mesh) -> dict[Equation, Schedule]:
    """Return the proved schedule of each collective, barriers included, in program order. All have their algorithms by now.

    For a wrong schedule it raises ScheduleError at the line of the move, with a note that names the collective.
    """
    return {eqn: _schedule(eqn, mesh) for eqn in program.collectives()}


def _schedule(eqn: Equation, mesh: Mesh) -> Schedule:
    groups = eqn.params.get("groups", ())
    if not are_uneven(groups):
        return _part(eqn, mesh, groups[0] if groups else ())
    from ..schedules.side_by_side import side_by_side

    return side_by_side(tuple([_part(eqn, mesh, group) for group in groups]), groups)


def _part(eqn: Equation, mesh: Mesh, group: Sequence[int]) -> Schedule:
    """Return the proved schedule of a group, () for all ranks along the axes."""
    with at_source(eqn.source):
        size = len(group) or eqn.params["size"]
        found = _find(eqn, size)
        try:
            return _proved(found, size, **_hosts(found, eqn, mesh, group), **lowering(eqn).options)
        except ScheduleError as error:
            error.add_note(f"in the schedule of {found.kind}, algorithm {found.name!r}, called at {eqn.source}")
            raise


def _hosts(found: Algorithm, eqn: Equation, mesh: Mesh, group: Sequence[int]) -> dict[str, Any]:
    """Return the options with the hosts of a collective's ranks, for a hierarchical algorithm.

    On one host, the first of several axes stands for the hosts.
    """
    if not found.is_hierarchical:
        return {}
    hosts = _hosts_along(eqn, mesh, group)
    sizes = [mesh.shape[a] for a in eqn.axes()]
    if hosts or len(sizes) < 2 or "groups" in eqn.params:
        return {"hosts": hosts or None}
    return {"levels": (sizes[0], math.prod(sizes[1:]))}


@functools.lru_cache(maxsize=256)
def _proved(found: Algorithm, nranks: int, **given: Any) -> Schedule:
    """Build and prove a schedule, once for each algorithm *object*: a redefinition under the same name is a new one."""
    from ..schedules.schedule import build

    schedule = build(found.kind, nranks, found.name, **given)
    schedule.prove()
    return schedule


def is_users(eqn: Equation) -> bool:
    """True if a collective's algorithm is the user's own; its name does not determine its moves."""
    return _find(eqn).is_users
