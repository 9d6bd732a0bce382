"""Blocks of ragged collectives: which rows each device gets of each other one, from the sizes that devices have told.

A ragged collective has two operands. The second one is its *table*: sizes that are equal on all devices of the group. An
all_gather has made them, or they vary over no axis of the collective. So all devices raise the same error for a wrong table,
before anything moves. A transport reads the table in each call. So new sizes compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType
from ..errors import DTypeError, ShapeError, UnsupportedError, VaryingError
from ..primitives.combining import Shards

__all__ = [
    "READINGS",
    "PairBlocks",
    "Reading",
    "as_stated",
    "batch_rows",
    "check_operands",
    "in_order",
    "of_results",
    "of_sources",
    "received",
]


class PairBlocks(NamedTuple):
    """Rows by (source, destination): where they begin in the source's operand, how many, and where they go in the destination's
    result. Each is an int64 array of shape (p, p)."""

    starts: np.ndarray
    sizes: np.ndarray
    places: np.ndarray

    def checked(self, over: str, rows: int, result_rows: int, combines: bool) -> PairBlocks:
        """Return the blocks themselves if they lie in operands and results of these numbers of rows.

        Args:
            over: The collective and its axes, for errors.
            rows: Rows of each operand.
            result_rows: Rows of each result.
            combines: Blocks of one destination are combined. Otherwise they must not overlap there.

        Raises:
            ShapeError: For the first block that does not fit. The text is the same on all devices.
        """
        ends, places = self.starts + self.sizes, self.places + self.sizes
        lowest = np.minimum(np.minimum(self.starts, self.sizes), self.places).min(initial=0)
        if lowest < 0 or ends.max(initial=0) > rows or places.max(initial=0) > result_rows:
            raise self._outside(over, rows, result_rows)
        if not combines:
            self._check_disjoint(over)
        return self

    def _outside(self, over: str, rows: int, result_rows: int) -> ShapeError:
        """Make the error of a block that is not in its operand or result."""
        for what, values in (("size", self.sizes), ("first row", self.starts), ("place", self.places)):
            if values.min(initial=0) < 0:
                source, to = np.argwhere(values < 0)[0].tolist()
                return ShapeError(f"{over}: the {what} of the rows from rank {source} to rank {to} is {values[source, to]}.")
        ends = self.starts + self.sizes
        if ends.max(initial=0) > rows:
            source, to = np.argwhere(ends > rows)[0].tolist()
            return ShapeError(
                f"{over}: rank {source} sends rows {self.starts[source, to]} to {ends[source, to]} to rank {to}, and its "
                f"operand has {rows} rows. The sizes that rank {source} sends are {_listed(self.sizes[source])}."
            )
        ends = self.places + self.sizes
        source, to = np.argwhere(ends > result_rows)[0].tolist()
        return ShapeError(
            f"{over}: rank {to} receives {self.sizes[source, to]} rows from rank {source} as its rows "
            f"{self.places[source, to]} to {ends[source, to]}, and its result has {result_rows} rows. Make room for "
            f"{int(ends.max())} rows in the results of all ranks (result_rows=)."
        )

    def _check_disjoint(self, over: str) -> None:
        if (self.places[1:] >= (self.places + self.sizes)[:-1]).all():
            return  # in the order of ranks, as most are
        order = np.argsort(self.places, axis=0, kind="stable")
        places, sizes = np.take_along_axis(self.places, order, 0), np.take_along_axis(self.sizes, order, 0)
        # An empty block overlaps nothing: the end of all before it is what counts.
        reached = np.maximum.accumulate(np.where(sizes > 0, places + sizes, 0), axis=0)
        wrong = (places[1:] < reached[:-1]) & (sizes[1:] > 0)
        if wrong.any():
            later, to = np.argwhere(wrong)[0].tolist()
            second = int(order[later + 1, to])
            before = [
                s for s in order[: later + 1, to].tolist() if self.places[s, to] + self.sizes[s, to] > places[later + 1, to]
            ]
            raise ShapeError(
                f"{over}: the rows that rank {to} receives from ranks {before[-1]} and {second} overlap: they begin at "
                f"{self.places[before[-1], to]} and {self.places[second, to]}, with {self.sizes[before[-1], to]} and "
                f"{self.sizes[second, to]} rows. Each row of a result comes from one rank."
            )


def received(blocks: PairBlocks, shards: Shards, rows: int) -> list[np.ndarray]:
    """Return what each device receives, with zeros between: the definition, in NumPy, of ragged collectives that only move."""
    results = [np.zeros((rows, *shards[0].shape[1:]), shards[0].dtype) for _ in shards]
    for source, shard in enumerate(shards):
        for to, result in enumerate(results):
            start, size, place = (int(values[source, to]) for values in blocks)
            result[place : place + size] = shard[start : start + size]
    return results


# ---------------------------------------------------------------- tables


def in_order(table: np.ndarray, over: str) -> PairBlocks:
    """Read a table of sizes by (source, destination): blocks lie in the order of ranks, without gaps, on both sides."""
    return PairBlocks(_before(table, 1), table, _before(table, 0))


def of_sources(table: np.ndarray, over: str) -> PairBlocks:
    """Read the sizes of all ranks' operands: each goes to all, after those of the ranks before."""
    sizes, places = np.broadcast_arrays(table[:, None], _before(table, 0)[:, None], np.empty((1, len(table))))[:2]
    return PairBlocks(np.zeros_like(sizes), sizes, places)


def of_results(table: np.ndarray, over: str) -> PairBlocks:
    """Read the sizes of all ranks' results, as one row, or as one row told by each rank.

    Raises:
        ShapeError: If two ranks told different sizes.
    """
    told = np.atleast_2d(table)
    if (told != told[0]).any():
        rank = int(np.argwhere((told != told[0]).any(1))[0, 0])
        raise ShapeError(
            f"{over}: ranks 0 and {rank} have different sizes: {_listed(told[0])} and {_listed(told[rank])}. They are those of "
            "all ranks' results, and must be equal on all ranks."
        )
    starts, sizes, _ = np.broadcast_arrays(_before(told[:1], 1), told[:1], np.empty((told.shape[1], 1)))
    return PairBlocks(starts, sizes, np.zeros_like(sizes))


def as_stated(table: np.ndarray, over: str) -> PairBlocks:
    """Read what each rank has stated: (rank, what, peer) with input offsets, send sizes, output offsets and receive sizes.

    Raises:
        ShapeError: If a rank sends another number of rows than its peer expects.
    """
    starts, sent, places, expected = (table[:, what] for what in range(4))
    if (sent != expected.T).any():
        source, to = np.argwhere(sent != expected.T)[0].tolist()
        raise ShapeError(
            f"{over}: rank {source} sends {sent[source, to]} rows to rank {to} (send_sizes), and rank {to} expects "
            f"{expected[to, source]} rows from it (recv_sizes). Both must be the same number."
        )
    return PairBlocks(starts, sent, places)


def _before(sizes: np.ndarray, axis: int) -> np.ndarray:
    return np.cumsum(sizes, axis) - sizes


def _listed(sizes: np.ndarray) -> str:
    return str(sizes.tolist()) if len(sizes) <= 16 else f"[{', '.join(map(str, sizes[:16].tolist()))}, ...]"


Reading = Callable[[np.ndarray, str], PairBlocks]
"""How a table is read: maps it, and the collective's name for errors, to the blocks that move."""

READINGS: tuple[Reading, ...] = (in_order, of_sources, of_results, as_stated)
"""All of them. The C extension reads tables too, and knows them by their places here."""

# ---------------------------------------------------------------- types


def check_operands(
    name: str, x: ArrayType, table: ArrayType, axes: Sequence[str], tables: Sequence[tuple[int, ...]], rows: Any
) -> None:
    """Raise the errors of a ragged collective's types. `tables` are the shapes that its table may have."""
    if not x.ndim:
        raise ShapeError(f"{name}: the operand is a scalar, and the rows of its first dimension are what moves.")
    if table.dtype != np.int64 or table.shape not in tables:
        raise DTypeError(f"{name}: a table of type {table}; it is int64 of shape {' or '.join(map(str, tables))}.")
    if common := table.varying & set(axes):
        raise VaryingError(
            f"{name}: the table varies over {sorted(common)}, and all devices of a group must have the same one."
        )
    if missing := (table.varying | set(axes)) - x.varying:
        raise VaryingError(f"{name}: the operand {x} does not vary over {sorted(missing)}. Use fc.pvary first.")
    if rows < 0:
        raise ShapeError(f"{name}: rows={rows} must be the rows of each result, at least 0.")


# ---------------------------------------------------------------- batches


def batch_rows(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], length: int, /, **params: Any) -> Any:
    """The rule of `vmap`: the batch becomes the last dimension of the rows, which move with all of it.

    Raises:
        UnsupportedError: If sizes are batched: each member of the batch would have blocks of its own.
    """
    x, table = values
    if batched[1]:
        raise UnsupportedError(
            f"vmap of {primitive.name}: sizes differ within the batch, so its members move different rows. Leave the sizes "
            "unbatched (in_axes=None), or call it for each member."
        )
    (y,) = bind(primitive, np.moveaxis(x, 0, -1), table, **params)
    return [np.moveaxis(y, -1, 0)]
