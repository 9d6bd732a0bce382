"""Values across processes: whole values of Arrays, and, with FUNCCOLL_DEBUG=detail, comparisons of arguments that must be
equal."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...arrays.array_layout import ArrayLayout
from ...core.mesh import Mesh
from ...core.partition_spec import P
from ...core.sharding import Sharding
from ...core.types import ArrayType
from ...errors import ShardingError, Source
from ...runtime.collective_call import CollectiveCall, Operand
from ...runtime.transport import ArgumentCheck
from ...schedules.schedule import build
from .communicators import Communicators
from .passed_arguments import different_values
from .shared_memory_executable import SharedMemoryExecutable

__all__ = ["gather_identity", "gathers_of", "replica_check"]

_HASH = np.dtype(np.uint64)
_NO_VALUE = 0
"""In place of a hash for an Array argument: this process does not have its global value. `_hash` never gives it."""
_KNOWN = 64
"""The most shapes, at lines of yours, whose gathering collectives are kept."""


def gather_identity(layout: ArrayLayout | None = None) -> str:
    """The identity of the collectives that gather an Array of a layout, or a value that is not an Array."""
    if layout is None:
        return "process_allgather"
    return _gather_identity(layout.type, layout.sharding.spec, () if layout.is_even else layout.shape)


@functools.lru_cache(maxsize=_KNOWN)
def _gather_identity(type: ArrayType, spec: P, shape: tuple[int, ...]) -> str:
    uneven = f" {shape}" if shape else ""  # several are padded to one
    return hashlib.sha256(f"process_allgather {type} {spec!r}{uneven}".encode()).hexdigest()


def gathers_of(
    block: np.ndarray,
    sharding: Sharding,
    identity: str,
    communicators: Communicators,
    number: int,
    known: dict[Any, Any],
    source: Source | None,
) -> list[SharedMemoryExecutable]:
    """The collectives, one after the other, from this process's block to the global value, for the user's line `source`.

    `known` keeps the compiled ones.
    """
    shape, dtype, gathers = block.shape, block.dtype, list[SharedMemoryExecutable]()
    for dim in range(block.ndim):
        axes = sharding.dim_axes(dim)
        if axes:
            size = sharding.mesh.axis_size(axes)
            out = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
            key = (number, sharding.mesh.axis_names, sharding.mesh.sizes, axes, shape, dtype, dim, identity, source)
            if key not in known:
                operand = Operand(shape, out, dtype, dim, dim, 0)
                groups = sharding.mesh.replica_groups(axes)
                call = CollectiveCall(groups, build("all_gather", size), "sum", (operand,), identity, source)
                if len(known) >= _KNOWN:
                    del known[next(iter(known))]
                known[key] = SharedMemoryExecutable(communicators, number, [call])
            gathers.append(known[key])
            shape = out
    return gathers


def replica_check(
    mesh: Mesh,
    layouts: Sequence[ArrayLayout],
    name: Callable[[int], str],
    communicators: Communicators,
    number: int,
) -> ArgumentCheck:
    """A check of this process's arguments. If two that must be equal differ, it raises ShardingError on all processes.

    Blocks must be equal along the mesh axes that their specs do not name, and global values on all processes. `name` names the
    i-th argument.
    """
    count, size = len(layouts), mesh.size
    operand = Operand((2 * count,), (2 * count * size,), _HASH, argument=0)
    every = mesh.replica_groups(mesh.axis_names)
    call = CollectiveCall(every, build("all_gather", size), "sum", (operand,), "FUNCCOLL_DEBUG=detail")
    gather = SharedMemoryExecutable(communicators, number, [call])
    split = [bool(layout.sharding.varying) for layout in layouts]  # of the others, the block is the global value

    def check(blocks: Sequence[Any], values: Sequence[np.ndarray | None]) -> None:
        wholes = [_hash(v) if v is not None and cut else _NO_VALUE for v, cut in zip(values, split, strict=True)]
        mine = np.array([*map(_hash, blocks), *wholes], _HASH)
        rows = gather(mine)[0].reshape(size, 2 * count).T.tolist()  # of each argument: the hashes of all ranks
        for i, layout in enumerate(layouts):
            spec, of_blocks, of_values = layout.sharding.spec, rows[i], rows[count + i]
            if found := _different(of_values, [None if h == _NO_VALUE else () for h in of_values]):
                raise ShardingError(different_values(name(i), spec, True, found))
            if found := _different(of_blocks, [_coordinates(mesh, layout, rank) for rank in range(size)]):
                axes = ", ".join(repr(a) for a in mesh.axis_names if a not in layout.sharding.varying)
                raise ShardingError(different_values(name(i), spec, False, found, axes))

    return check


def _coordinates(mesh: Mesh, layout: ArrayLayout, rank: int) -> tuple[int, ...]:
    """The place of a rank along the axes that split an argument."""
    coordinates = mesh.coordinates(rank)
    return tuple(coordinates[a] for a in mesh.axis_names if a in layout.sharding.varying)


def _different(hashes: Sequence[int], keys: Sequence[tuple | None]) -> tuple[int, int] | None:
    """Two ranks of one key with different hashes, if there are any. A rank with the key None is not compared."""
    first: dict[tuple, int] = {}
    for rank, key in enumerate(keys):
        if key is not None and hashes[first.setdefault(key, rank)] != hashes[rank]:
            return first[key], rank
    return None


def _hash(block: Any) -> int:
    return int.from_bytes(hashlib.blake2b(np.asarray(block).tobytes(), digest_size=8).digest(), "little") or 1
