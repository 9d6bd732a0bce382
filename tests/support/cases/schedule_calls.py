"""A call of every collective that has schedules, with any algorithm, and what its streams make of the same operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import funccoll as fc
from funccoll.collectives.record import lowering
from funccoll.schedules.streams.interpret import interpret
from tests.support.spmd import per_device

# Each on shards of shape (2p, 3p): `call(x, p, algorithm)`.
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda x, a, p, how: fc.all_reduce(x, a, algorithm=how),
    "all_gather": lambda x, a, p, how: fc.all_gather(x, a, dim=1, algorithm=how),
    "reduce_scatter": lambda x, a, p, how: fc.reduce_scatter(x, a, dim=1, algorithm=how),
    "all_to_all": lambda x, a, p, how: fc.all_to_all(x, a, split_dim=0, concat_dim=1, algorithm=how),
    "permute": lambda x, a, p, how: fc.permute(x, a, pairs=[(i, (i + 1) % p) for i in range(p) if i != 1], algorithm=how),
    "broadcast": lambda x, a, p, how: fc.broadcast(x, a, root=p - 1, algorithm=how),
    "reduce": lambda x, a, p, how: fc.reduce(x, a, root=p // 2, algorithm=how),
    "inclusive_scan": lambda x, a, p, how: fc.inclusive_scan(x, a, algorithm=how),
    "exclusive_scan": lambda x, a, p, how: fc.exclusive_scan(x, a, reverse=True, algorithm=how),
    "gather": lambda x, a, p, how: fc.gather(x, a, root=p - 1, dim=1, algorithm=how),
    "scatter": lambda x, a, p, how: fc.scatter(x, a, root=p // 2, dim=1, algorithm=how),
}
SCANS = ("inclusive_scan", "exclusive_scan")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce", *SCANS)


def options_of(kind: str, p: int) -> dict[str, Any]:
    """What a reduction needs to be told besides the op: the last rank is the root."""
    return {"reduce": {"root": p - 1}, "reduce_scatter": {"dim": 1}, "exclusive_scan": {"reverse": True}}.get(kind, {})


def forced(kind: str, how: str | None, mesh: fc.Mesh, axes: Any = "x", **options: Any) -> Any:
    """A jitted function from one block for each device to one for each."""
    p = int(np.prod([mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes)]))
    if options:
        call = lambda x: getattr(fc, kind)(x, axes, algorithm=how, **options)
    else:
        call = lambda x: CALLS[kind](x, axes, p, how)
    return per_device(mesh, call)


def numbers(mesh: fc.Mesh, dtype: Any = np.float32, shape: tuple[int, ...] | None = None) -> np.ndarray:
    rng = np.random.default_rng(mesh.size)
    shape = (2 * mesh.size, 3 * mesh.size) if shape is None else shape
    if np.dtype(dtype).kind in "iu":
        return rng.integers(-9, 9, (mesh.size, *shape)).astype(dtype)
    return (rng.normal(size=(mesh.size, *shape)) * 10.0 ** rng.integers(-2, 3, shape)).astype(dtype)


def of(lowered: Any, kind: str) -> Any:
    """The schedule of a program's only collective of a kind."""
    (found,) = [s for e, s in lowered.schedules.items() if e.primitive.name == kind]
    return found


def streamed(lowered: Any, kind: str, x: Any, **given: Any) -> list[Any]:
    """The outputs of the streams of a program's collective, in a random order of events."""
    ((eqn, schedule),) = [found for found in lowered.schedules.items() if found[0].primitive.name == kind]
    how = lowering(eqn)
    return interpret(schedule.streams(), [list(x)], dim=how.cut_dim, concat_dim=how.concat_dim, **given)[0]
