"""Values of Arrays across processes: gathered whole, and, with FUNCCOLL_DEBUG=detail, compared where they must be equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...arrays.array_layout import ArrayLayout
from ...errors import ShardingError
from ...mesh import Mesh, Sharding
from ...schedules.schedule import build
from .collective_group import CollectiveGroup, GroupedCollective, Operand
from .communicators import Communicators

__all__ = ["gather_whole", "replica_check"]

_HASH = np.dtype(np.uint64)
_KNOWN = 64
"""The most shapes for which the collectives that gather them are kept."""


def gather_whole(
    array: np.ndarray, shape: tuple[int, ...], sharding: Sharding, communicators: Communicators, number: int,
    known: dict[Any, Any],
) -> np.ndarray:  # fmt: skip
    """The global value of this process's block, on every process. `known` keeps what was compiled."""
    for dim in range(len(shape)):
        axes = sharding.dim_axes(dim)
        if axes:
            size = sharding.mesh.axis_size(axes)
            out = (*array.shape[:dim], array.shape[dim] * size, *array.shape[dim + 1 :])
            key = (number, sharding.mesh, axes, array.shape, array.dtype, dim)
            if key not in known:
                operand = Operand(array.shape, out, array.dtype, dim, dim, 0)
                call = GroupedCollective(tuple(axes), build("all_gather", size), "sum", (operand,), "process_allgather")
                if len(known) >= _KNOWN:
                    del known[next(iter(known))]
                known[key] = CollectiveGroup(communicators, sharding.mesh, number, [call])
            (array,) = known[key](array)
    return np.array(array)


def replica_check(
    mesh: Mesh, layouts: Sequence[ArrayLayout], name: Callable[[int], str], communicators: Communicators,
    number: int,
) -> Callable[[Sequence[Any]], None]:
    """A function of this process's blocks that raises ShardingError, on all processes, when two that must be equal differ.

    Blocks must be equal along the axes of the mesh that their specs do not name. `name` names the i-th argument.
    """
    count, size = len(layouts), mesh.size
    operand = Operand((count,), (count * size,), _HASH, argument=0)
    call = GroupedCollective(mesh.axis_names, build("all_gather", size), "sum", (operand,), "FUNCCOLL_DEBUG=detail")
    gather = CollectiveGroup(communicators, mesh, number, [call])

    def check(blocks: Sequence[Any]) -> None:
        mine = np.array([_hash(block) for block in blocks], _HASH)
        table = gather(mine)[0].reshape(size, count)
        for i, layout in enumerate(layouts):
            first: dict[tuple[int, ...], int] = {}
            for device in range(size):
                coordinates = mesh.coordinates(device)
                key = tuple(coordinates[a] for a in mesh.axis_names if a in layout.sharding.varying)
                other = first.setdefault(key, device)
                if table[other, i] != table[device, i]:
                    axes = ", ".join(repr(a) for a in mesh.axis_names if a not in layout.sharding.varying)
                    raise ShardingError(
                        f"{name(i)} has the spec {layout.sharding.spec!r}, so it must be equal along {axes}, and ranks {other} "
                        f"and {device} hold different values. Make it from the same data and the same random seed, "
                        "broadcast it from one rank, or name the axis in its spec."
                    )

    return check


def _hash(block: Any) -> int:
    return int.from_bytes(hashlib.blake2b(np.asarray(block).tobytes(), digest_size=8).digest(), "little")
