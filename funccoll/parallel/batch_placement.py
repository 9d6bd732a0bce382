"""The placement of a batch's rows on devices, for a step of a data-parallel model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from ..arrays.array import Array
from ..arrays.array_like import to_numpy
from ..arrays.value_hash import value_hash
from ..collectives.argument_checks import Axes
from ..compiler.placement import device_put, from_local
from ..core.mesh import Mesh
from ..core.partition_spec import P, normalize_axes
from ..core.pytree_paths import path_name
from ..core.sharding import Sharding
from ..errors import EqualRowsWarning, ShapeError, ShardingError, TraceError, user_source, warn_at
from ..job.process_allgather import is_equal_on_all

__all__ = ["BatchPlacement"]


class BatchPlacement:
    """The devices of an axis (or axes). Each gets some rows of a batch."""

    def __init__(self, mesh: Mesh, axis: Axes):
        self.mesh, self.spec, self.axes = mesh, P(axis), normalize_axes(axis)
        self._sharding = Sharding(mesh, self.spec)

    def place(self, batch: Any) -> Any:
        """Return the batch with its arrays on the devices. Errors name the part that cannot be placed."""
        leaves, tree = optree.tree_flatten(batch)
        placed = []
        for i, leaf in enumerate(leaves):
            failure = None
            try:
                placed.append(self.place_rows(leaf))
            except (ShapeError, ShardingError, TraceError) as error:  # it names calls that are not the user's
                failure = error
            if failure is not None:
                raise self._error(path_name("batch", tree, i), leaf) or failure
        return tree.unflatten(placed)

    def _error(self, name: str, leaf: Any) -> Exception | None:
        """Return the error about a part of a batch that cannot be placed."""
        of_this = f"DataParallel.step: {name}"
        if not hasattr(leaf, "dtype") and hasattr(leaf, "__iter__") and not isinstance(leaf, str):
            return TraceError(
                f"{of_this} is of type {type(leaf).__name__}, an iterator and not an array. Call step once for each "
                "batch: for batch in batches: dp.step(batch)."
            )
        value = to_numpy(leaf, of_this)
        parts = self.mesh.axis_size(self.axes)
        if value.ndim and not len(value):
            return ShapeError(f"{of_this} of shape {value.shape} has no rows: each device needs some.")
        # A process of a job passes its own rows, not those of all devices.
        if not value.ndim or not self.mesh.is_fully_addressable or not len(value) % parts:
            return None
        along = " x ".join(map(repr, self.axes))
        return ShardingError(
            f"{of_this} of shape {value.shape} has {len(value)} rows, which the {parts} devices along {along} do not divide "
            f"evenly. Pass a multiple of {parts} rows, or take batches and `active` from fc.uneven_batches, which pads them: "
            "dp.step(batch, active=active)."
        )

    def compare_rows(self, batch: Any, active: Any) -> None:
        """Warn on rank 0 if all processes pass the same rows, of which each passes its own. All processes must call it.

        One row, an Array of the mesh, and rows that do not count are not compared.
        """
        if self.mesh.is_fully_addressable or self.mesh.axis_size(self.axes) == 1:
            return
        leaves = [leaf for leaf in optree.tree_leaves(batch) if np.ndim(leaf)]
        is_compared = all(type(leaf) is np.ndarray and len(leaf) > 1 for leaf in leaves) and (active is None or np.all(active))
        # The first hash samples large arrays: sparse ones may agree in it. Numbers below 0 differ on all ranks.
        if not is_equal_on_all(self.mesh, _joint_hash(leaves, value_hash) if leaves and is_compared else -1 - self._rank):
            return
        if is_equal_on_all(self.mesh, _joint_hash(leaves, _whole_hash)) and not self._rank:
            own = "rows[fc.rank() :: fc.world_size()], or " if self.mesh.axis_size(self.axes) == self.mesh.size else ""
            warn_at(
                user_source(),
                EqualRowsWarning,
                f"all {self.mesh.size} processes passed the same rows to the first DataParallel.step, and train on copies of "
                f"them: each process passes its own rows. Pass {own}fc.device_put(rows, mesh, {self.spec!r}) of all rows.",
            )

    @property
    def _rank(self) -> int:
        return self.mesh.process or 0

    def place_rows(self, value: Any) -> Any:
        """Return an array with these rows of this process; an Array of the mesh is taken as it is."""
        if isinstance(value, Array) and value.sharding.mesh == self.mesh:
            return value
        if not np.ndim(value):
            return device_put(value, self.mesh, P())
        if not len(value):
            raise ShapeError(f"DataParallel.step: an array of shape {np.shape(value)} has no rows: each device needs some.")
        if self.mesh.is_fully_addressable:
            self._sharding.check_even(np.shape(value), "DataParallel.step: an array")
            return device_put(value, self._sharding)
        return from_local(value, self._sharding)


def _joint_hash(arrays: Sequence[np.ndarray], hash_of: Callable[[np.ndarray], int]) -> int:
    """Return a hash of some arrays, at least 0, from their hashes, shapes and dtypes."""
    return zlib.crc32(repr([(hash_of(x), x.shape, x.dtype.str) for x in arrays]).encode())


def _whole_hash(value: np.ndarray) -> int:
    buffer: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return zlib.crc32(buffer)
