"""What the tests of collectives share: meshes, every choice of axes, and running a function on given shards."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh

MESHES = {
    name: Mesh(axes, range(math.prod(axes.values())))  # virtual devices, in a process of a job too
    for name, axes in {
        "line": {"data": 4},
        "grid": {"data": 4, "model": 2},
        "cube": {"a": 2, "b": 3, "c": 2},
        "thin": {"one": 1, "x": 3},
    }.items()
}


def axis_choices(mesh: fc.Mesh) -> list[tuple[str, ...]]:
    """Every non-empty subset of the axes, in every order."""
    return [c for k in range(1, len(mesh.axis_names) + 1) for c in itertools.permutations(mesh.axis_names, k)]


ON_MESHES = [(mesh, axes) for mesh, m in MESHES.items() for axes in axis_choices(m)]
"""(name of a mesh, axes): everything a collective can be over."""


def on_meshes(name: str, names: Iterable[str], every: int) -> list[tuple[str, tuple[str, ...]]]:
    """One in `every` of ON_MESHES for each name, in turn: names that follow each other have all of them."""
    return ON_MESHES[list(names).index(name) % every :: every]


@functools.cache
def group_of(mesh: fc.Mesh, axes: tuple[str, ...], device: int) -> tuple[list[int], int]:
    """The devices that communicate with `device` over `axes`, in axis order, and its place among them.

    Written from the definition, without Mesh's own methods: row-major coordinates, the first axis outermost.
    """
    names, sizes = list(mesh.axis_names), [mesh.shape[a] for a in mesh.axis_names]
    mine = np.unravel_index(device, sizes)
    group = []
    for point in itertools.product(*(range(mesh.shape[a]) for a in axes)):
        coordinates = list(mine)
        for axis, index in zip(axes, point):
            coordinates[names.index(axis)] = index
        group.append(int(np.ravel_multi_index(coordinates, sizes)))
    return group, group.index(device)


def expected(mesh: fc.Mesh, axes: tuple[str, ...], shards: Sequence[Any], one: Callable[[list[Any], int], Any]) -> list[Any]:
    """`one(shards of the group, place)` on each device."""
    out = []
    for device in range(mesh.size):
        group, place = group_of(mesh, axes, device)
        out.append(one([shards[d] for d in group], place))
    return out


def size(mesh: fc.Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def stacked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with a dimension of length 1 in front of all that it takes and returns."""
    return lambda *xs: fc.tree.map(lambda y: y[None], fn(*fc.tree.map(lambda x: x[0], xs)))


def per_device(mesh: fc.Mesh, fn: Callable[..., Any]) -> Any:
    """A jitted function from arrays with one block for each device (stacked in front) to the same.

    `fn` sees its own block, varying over all axes; its results are stacked again.
    """
    everywhere = P(mesh.axis_names)
    return fc.jit(stacked(fn), mesh=mesh, in_specs=everywhere, out_specs=everywhere)


def bits(x: Any) -> Any:
    """The bytes of an array, so that comparison sees NaN payloads and the signs of zeros."""
    x = np.ascontiguousarray(x)
    return x.dtype, x.shape, x.tobytes()
