"""Resharding inside a program: the collectives that take a value from one partition spec to another.

Each dimension has its mesh axes in a row, the outermost first. A step changes the end of such rows. own_slice adds axes over
which the value does not vary, all_gather takes axes away, and all_to_all moves them from one dimension to another. A permute
reorders the blocks if each device's block keeps its shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..collectives.functions import all_gather, all_to_all, own_slice, permute
from ..core.mesh import Mesh
from ..core.partition_spec import P
from ..core.sharding import Sharding

__all__ = ["reshard"]

Axes = tuple[str, ...]
Rows = list[Axes]
"""For each dimension its mesh axes."""


def reshard(x: Any, shape: Sequence[int], old: Sharding, new: Sharding) -> Any:
    """Return one device's block of a value split as `new`, from its block of the value split as `old`, on the same mesh.

    Blocks are padded to the largest (`Sharding.padded_shard_shape`). A dimension is padded and cut where devices have it whole.
    If both shardings split it, and pad it to different sizes, it is gathered in between.

    Args:
        x: The block.
        shape: The global shape.
        old: The given sharding.
        new: The wanted one.
    """
    dims = range(x.ndim)
    given, wanted = old.padded_shape(shape), new.padded_shape(shape)
    rows = [() if min(old.parts(d), new.parts(d)) > 1 and given[d] != wanted[d] else new.dim_axes(d) for d in dims]
    between = Sharding(old.mesh, P(*rows))
    x = _resized(x, [d for d in dims if old.parts(d) == 1], shape, wanted)
    x = _reshard_even(x, old, between)
    x = _resized(x, [d for d in dims if between.parts(d) == 1], shape, wanted)
    return _reshard_even(x, between, new)


def _resized(x: Any, dims: Sequence[int], shape: Sequence[int], sizes: Sequence[int]) -> Any:
    """Return a block with other `sizes` of some dimensions that devices have whole: zeros after the `shape` of the values."""
    for dim in dims:
        if x.shape[dim] > shape[dim]:
            x = x[(slice(None),) * dim + (slice(shape[dim]),)]
        if x.shape[dim] < sizes[dim]:
            x = np.pad(x, [(0, sizes[dim] - shape[dim] if d == dim else 0) for d in range(x.ndim)])
    return x


def _reshard_even(x: Any, old: Sharding, new: Sharding) -> Any:
    """Return one device's block of an evenly split value.

    Gathers move most data. So they come last, and gather only the axes that must go.
    """
    mesh = old.mesh
    rows, goal = ([s.dim_axes(d) for d in range(x.ndim)] for s in (old, new))
    while rows != goal:
        then = goal if _blocks_have_one_shape(rows, goal, mesh) else _leaving_last(rows, goal)
        if then != rows:
            axes, pairs = _permutation(rows, then, mesh)
            x, rows = permute(x, axes, pairs=pairs), then
        elif (found := next(_arrivals(rows, goal), None)) is not None:
            axes, source, to = found
            if source is None:
                x = own_slice(x, axes, dim=to)
            else:
                x = all_to_all(x, axes, split_dim=to, concat_dim=source)
                rows[source] = rows[source][: -len(axes)]
            rows[to] += axes
        else:
            dim, axes = _gathered(rows, goal)
            x = all_gather(x, axes, dim=dim)
            rows[dim] = rows[dim][: -len(axes)]
    return x


def _blocks_have_one_shape(rows: Rows, goal: Rows, mesh: Mesh) -> bool:
    """True if blocks need only change places: the axes are the same, and each dimension is cut as finely as before."""
    same_axes = {a for row in rows for a in row} == {a for row in goal for a in row}
    return same_axes and all(_size(row, mesh) == _size(wanted, mesh) for row, wanted in zip(rows, goal, strict=True))


def _size(axes: Axes, mesh: Mesh) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def _leaving_last(rows: Rows, goal: Rows) -> Rows:
    """Return rows in which axes that stay are before those that leave, so that steps can remove these."""
    return [tuple(sorted(row, key=lambda a, wanted=wanted: a not in wanted)) for row, wanted in zip(rows, goal, strict=True)]


def _permutation(rows: Rows, then: Rows, mesh: Mesh) -> tuple[Axes, list[tuple[int, int]]]:
    """Return the axes and the pairs of the permute from `rows` to `then`."""
    changed = [d for d, row in enumerate(rows) if row != then[d]]
    axes = tuple(a for d in changed for a in rows[d])

    def blocks(state: Rows) -> list[tuple[int, ...]]:
        """For each position along `axes`, return the block that is there: its number along each changed dimension."""
        return [tuple(_number(state[d], coordinates, mesh) for d in changed) for coordinates in mesh.walk(axes)]

    holder = {block: position for position, block in enumerate(blocks(rows))}
    return axes, [(holder[block], position) for position, block in enumerate(blocks(then))]


def _number(axes: Axes, coordinates: Mapping[str, int], mesh: Mesh) -> int:
    number = 0
    for axis in axes:
        number = number * mesh.shape[axis] + coordinates[axis]
    return number


def _arrivals(rows: Rows, goal: Rows) -> Iterator[tuple[Axes, int | None, int]]:
    """Return steps that bring axes to a dimension: (axes, the dimension that they leave or None, the dimension).

    A dimension takes new axes only if no axis has to leave it. So its blocks are never cut finer than at the end. Axes that
    arrive in their final order come first, and several axes at once come before one.
    """
    used = {a for row in rows for a in row}
    ready = [d for d, row in enumerate(rows) if set(row) < set(goal[d])]
    for d in sorted(ready, key=lambda d: rows[d] != goal[d][: len(rows[d])]):
        missing = tuple(a for a in goal[d] if a not in rows[d])
        runs = [missing[i:j] for i in range(len(missing)) for j in range(len(missing), i, -1)]
        for axes in runs:
            if used.isdisjoint(axes):
                yield axes, None, d
            yield from ((axes, source, d) for source, row in enumerate(rows) if row[-len(axes) :] == axes)


def _gathered(rows: Rows, goal: Rows) -> tuple[int, Axes]:
    """Return a dimension, and the axes at its end to gather: those that no dimension wants, else one that is in a cycle."""
    wanted = {a for row in goal for a in row}
    leaving = [d for d, row in enumerate(rows) if not set(row) <= set(goal[d])]
    for d in leaving:
        row = rows[d]
        first = next((i for i in range(len(row)) if wanted.isdisjoint(row[i:])), len(row))
        if first < len(row):
            return d, row[first:]
    return leaving[0], rows[leaving[0]][-1:]
