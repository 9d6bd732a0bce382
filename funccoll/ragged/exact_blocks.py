"""Ragged collectives outside of traced functions: blocks and results of exactly the rows that count.

Devices tell each other their sizes by an all_gather. Then all know, and check, everything alike. One compiled program moves the
rows. It has room for as many rows as any device has and receives, rounded up to 4, 6, 8, 12, 16, 24, ... So few programs serve
all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

from ..arrays.array import Array
from ..arrays.array_layout import layout_of
from ..collectives.functions import all_gather
from ..compiler.jit import jit
from ..core.interpreter import as_array, bind
from ..core.mesh import Mesh
from ..core.partition_spec import P, axes_in_words
from ..core.sharding import Sharding
from ..errors import DTypeError, MeshError, PytreeError, ShapeError
from ..job.job_context import current, transport_of
from ..ops.indexing import getitem
from ..primitives.varying import axis_index_p

__all__ = ["KEPT", "Move", "exact"]

KEPT = 64
"""Programs that a job keeps, or a mesh that may end before it."""

Move = Callable[..., Sequence[Any]]
"""A ragged collective in a traced function: (leaves, axes, table, rows of results, **params) -> results."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that the devices of a collective tell each other, and what follows from them.

    A table has a row for each rank: the number of its rows, then its sizes.
    """

    has_sizes: bool
    """Each device has a size for each device. Otherwise its own rows are all."""
    result_rows: Callable[[np.ndarray, int], np.ndarray]
    """(table, root) -> the rows of each rank's result."""
    received: Callable[[np.ndarray, int, int], Any]
    """(table, root, rank) -> the sizes that a rank learns."""
    of_all: bool = True
    """The sizes of all ranks count, not only the root's."""
    are_equal: bool = False
    """All ranks must have the same sizes."""


SIZES = {
    "ragged.all_gather": Sizes(False, lambda t, root: np.full(len(t), t[:, 0].sum()), lambda t, root, rank: t[:, 0]),
    "ragged.gather": Sizes(
        False, lambda t, root: np.where(np.arange(len(t)) == root, t[:, 0].sum(), 0), lambda t, root, rank: t[:, 0]
    ),
    "ragged.all_to_all": Sizes(True, lambda t, root: t[:, 1:].sum(0), lambda t, root, rank: t[:, 1 + rank]),
    "ragged.reduce_scatter": Sizes(True, lambda t, root: t[0, 1:], lambda t, root, rank: t[0, 1:], are_equal=True),
    "ragged.scatter": Sizes(True, lambda t, root: t[root, 1:], lambda t, root, rank: t[root, 1 + rank], of_all=False),
}


def exact(name: str, move: Move, x: Any, axis: Any, mesh: Mesh, sizes: Any = None, **params: Any) -> tuple[Any, Any]:
    """Run a ragged collective on a mesh.

    Args:
        name: The public function, a key of `SIZES`.
        move: The same in a traced function.
        x: This process's block, or a list with the block of each device that it plays.
        axis: The axis, or a tuple of axes.
        mesh: The mesh.
        sizes: What the user gave as sizes.
        params: The parameters of `move`; `root` is that of the collective.

    Returns:
        (results, sizes), as lists if this process plays several devices.

    Raises:
        ShapeError: On all devices, if sizes do not fit.
    """
    if not isinstance(mesh, Mesh) or mesh.is_abstract:
        raise MeshError(f"{name} takes a mesh with devices, from fc.make_mesh({{...}}), not {mesh!r:.60}.")
    along, rule, root = _along(mesh, axis), SIZES[name], params.get("root", 0)
    blocks, treedef = _blocks(name, x, mesh)
    told = _told(name, sizes, mesh, along.size, [len(leaves[0]) for leaves in blocks], rule)
    table = _gathered(along, told)
    known = np.asarray(table)
    tables = [known] if along.is_whole else [known[ranks] for ranks in along.ranks]
    for of_group in tables:
        _check(name, along, of_group, root, rule)
    result_rows = [rule.result_rows(of_group, root).tolist() for of_group in tables]
    room = _room(int(known[:, 0].max()))
    operands = [_padded(leaves, room, along) for leaves in zip(*blocks, strict=True)]
    found = _program(along, (name, _room(max(map(max, result_rows))), *params.items()), move, rule)(operands, table)
    results, learned, download = [], [], transport_of(mesh).device.library.download
    for number, (group, rank) in enumerate(along.places):
        rows = result_rows[group][rank]
        own = [download(y.shards[number] if mesh.is_fully_addressable else y.local)[:rows] for y in found]
        for part in own:
            part.flags.writeable = False
        results.append(optree.tree_unflatten(treedef, own))
        learned.append(rule.received(tables[group], root, rank))
    return (results, learned) if _is_listed(mesh) else (results[0], learned[0])


class _Along:
    """The axes of a collective on a mesh, and what follows from them."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]):
        self.mesh, self.axes, self.words = mesh, axes, axes_in_words(axes)
        groups = mesh.replica_groups(axes)
        self.size, self.ranks = groups.size, [[*ranks] for ranks in groups.ranks]
        self.is_whole = self.ranks == [[*range(mesh.size)]]
        """True if there is one group, of all devices in order."""
        ranks_of = {device: (group, rank) for group, ranks in enumerate(self.ranks) for rank, device in enumerate(ranks)}
        self.places = [ranks_of[device] for device in mesh.local_devices]
        """(group, rank in it) of each device of this process."""
        self.every = Sharding(mesh, P(mesh.axis_names))
        """A block for each device."""


def _along(mesh: Mesh, axis: Any) -> _Along:
    known = mesh.programs.setdefault("axes of ragged collectives", {})
    if not isinstance(axis, (str, tuple)) or axis not in known:
        axis = mesh.check_axes(axis)
        known[axis] = _Along(mesh, axis)
        known.update({axis[0]: known[axis]} if len(axis) == 1 else {})
    return known[axis]


def _is_listed(mesh: Mesh) -> bool:
    """True if users pass and get a list with something for each device."""
    return mesh.is_fully_addressable and mesh.size > 1


# ---------------------------------------------------------------- what users give


def _blocks(name: str, x: Any, mesh: Mesh) -> tuple[list[list[np.ndarray]], Any]:
    """Return the leaves of each device's block, and their structure."""
    given = x if _is_listed(mesh) else [x]
    if not isinstance(given, (list, tuple)) or len(given) != len(mesh.local_devices):
        what = f"a list of {len(given)}" if isinstance(given, (list, tuple)) else f"one {type(given).__name__}"
        raise MeshError(
            f"{name}: this process plays all {mesh.size} devices of {mesh!r}, so it takes a list of {mesh.size} blocks, one "
            f"for each device, not {what}."
        )
    flat = [optree.tree_flatten(block) for block in given]
    if any(treedef != flat[0][1] for _, treedef in flat):
        raise PytreeError(f"{name}: the blocks of all devices must have one structure, and these differ.")
    blocks = [[as_array(leaf) for leaf in leaves] for leaves, _ in flat]
    kinds = {tuple([(leaf.dtype, leaf.shape[1:]) for leaf in leaves]) for leaves in blocks}
    if (
        not blocks[0]
        or len(kinds) > 1
        or any(leaf.ndim == 0 or len(leaf) != len(leaves[0]) for leaves in blocks for leaf in leaves)
    ):
        shapes = "; ".join(", ".join(f"{leaf.dtype}{[*leaf.shape]}" for leaf in leaves) for leaves in blocks)
        raise ShapeError(
            f"{name}: the blocks are {shapes or 'empty pytrees'}. All must have at least one dimension, and the arrays of one "
            "block the same number of rows. Dtypes and further dimensions must be equal on all devices."
        )
    return blocks, flat[0][1]


def _told(name: str, sizes: Any, mesh: Mesh, p: int, rows: Sequence[int], rule: Sizes) -> np.ndarray:
    """Return what each device of this process tells: its rows, and the sizes if there are any."""
    if not rule.has_sizes:
        return np.array(rows, np.int64)[:, None]
    of_each = isinstance(sizes, (list, tuple)) and any(each is None or np.ndim(each) for each in sizes)
    given = sizes if _is_listed(mesh) and (of_each or np.ndim(sizes) > 1) else [sizes] * len(rows)
    if len(given) != len(rows):
        raise ShapeError(f"{name}: sizes has {len(given)} lists, and this process plays {len(rows)} devices: one for each.")
    told = np.zeros((len(rows), 1 + p), np.int64)
    told[:, 0] = rows
    for row, each in zip(told, given, strict=True):
        if each is None and not rule.of_all:
            continue
        array = np.asarray(each)
        if array.dtype.kind not in "iu":
            raise DTypeError(f"{name}: sizes={each!r:.60} must be integers, one for each of the {p} devices along the axis.")
        if array.shape != (p,):
            raise ShapeError(f"{name}: sizes has shape {array.shape}, and must be one number for each of the {p} devices.")
        row[1:] = array
    return told


def _check(name: str, along: _Along, table: np.ndarray, root: int, rule: Sizes) -> None:
    """Raise ShapeError for sizes that do not fit, the same on all devices."""
    if not rule.has_sizes:
        return
    over, listed = f"{name} over {along.words}", table.tolist()
    for rank in range(len(table)) if rule.of_all else [root]:
        rows, *sizes = listed[rank]
        if min(sizes) < 0 or sum(sizes) != rows:
            raise ShapeError(
                f"{over}: rank {rank} has {rows} rows, and its sizes are {sizes}. They must be at least 0, and sum "
                "up to the rows."
            )
    if rule.are_equal and any(row != listed[0] for row in listed):
        rank = [row != listed[0] for row in listed].index(True)
        raise ShapeError(
            f"{over}: ranks 0 and {rank} have different sizes: {listed[0][1:]} and {listed[rank][1:]}. They "
            "are those of all ranks' results, and must be equal on all ranks."
        )


# ---------------------------------------------------------------- programs


def _gathered(along: _Along, told: np.ndarray) -> Array:
    """Return what all devices told, in device order."""
    mesh = along.mesh

    def ragged_sizes(row: Any) -> Any:
        return all_gather(row, mesh.axis_names)

    gather = _kept(mesh, ("sizes",), lambda: jit(ragged_sizes, mesh=mesh, in_specs=along.every.spec, out_specs=P()))
    return gather(_padded([row[None] for row in told], 1, along))


def _program(along: _Along, key: tuple[Any, ...], move: Move, rule: Sizes) -> Callable[..., Sequence[Array]]:
    (name, room, *params), mesh, axes = key, along.mesh, along.axes

    def ragged_rows(leaves: Sequence[Any], told: Any) -> Sequence[Any]:
        others = tuple(a for a in mesh.axis_names if a not in axes)
        order = [mesh.axis_names.index(a) for a in (*others, *axes)]
        grid = np.transpose(np.reshape(told, (*mesh.sizes, -1)), (*order, len(order)))
        p = math.prod(mesh.shape[a] for a in axes)
        table = np.reshape(grid, (mesh.size // p, p, -1))
        table = getitem(table, bind(axis_index_p, axes=others)) if others else table[0]
        return move(leaves, axes, table[:, 1:] if rule.has_sizes else table[:, 0], room, **dict(params))

    def make() -> Any:
        ragged_rows.__name__ = ragged_rows.__qualname__ = name
        return jit(ragged_rows, mesh=mesh, in_specs=(along.every.spec, P()), out_specs=along.every.spec)

    return _kept(mesh, (axes, *key), make)


def _kept(mesh: Mesh, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return a program of a mesh. The last ones used are kept as long as the job, or a mesh that may end before it."""
    member = None if mesh.is_fully_addressable or mesh.transport.part is not None else current()
    programs = mesh.programs.setdefault("ragged", {}) if member is None else member.once("ragged collectives", dict)
    key = (mesh, mesh.transport, *key)
    programs[key] = program = programs.pop(key, None) or make()
    if len(programs) > KEPT:
        del programs[next(iter(programs))]
    return program


def _room(rows: int) -> int:
    """Return the rows of a program for this many: 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << max(2, (rows - 1).bit_length())
    return power * 3 // 4 if power > 4 and rows <= power * 3 // 4 else power


def _padded(blocks: Sequence[np.ndarray], rows: int, along: _Along) -> Array:
    """Return an Array of blocks with room for `rows` rows. What lies behind a block's own rows is not read."""
    mesh, first = along.mesh, blocks[0]
    device, on_host = transport_of(mesh).device, mesh.device_type == "cpu"
    allocate, copies = device.allocate if on_host else np.empty, []
    for block in blocks:
        room = allocate((rows, *block.shape[1:]), block.dtype)
        room[: len(block)] = block
        room.flags.writeable = False
        copies.append(room if on_host else device.library.upload(room))
    layout = layout_of((rows * mesh.size, *first.shape[1:]), first.dtype, along.every)
    return Array(layout, copies if len(copies) > 1 else copies[0])
