"""Element ranges of a schedule's chunks in the arrays of one call, also when a dimension other than 0 is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..errors import ScheduleError
from .collective import ALIGNMENT, Collective, chunk_bounds

__all__ = [
    "Blocks",
    "ChunkLayout",
    "FlatBuffers",
    "Index",
    "StridedRange",
    "cut_as_one",
    "in_segments",
    "joined",
    "shifted",
]

Index = slice | np.ndarray
"""Elements of a flat array: a slice if they are contiguous, else int64 numbers."""


class StridedRange(NamedTuple):
    """`rows` runs of `length` elements, the first at `start`, each `stride` after the one before."""

    start: int
    rows: int
    stride: int
    length: int


@dataclass(frozen=True)
class Blocks:
    """An array cut into equal blocks along one dimension: row-major (outer, blocks, inner) elements.

    Block b is every [o, b, :]. Its outer * inner elements are numbered in its own row-major order, as in an array that holds
    only the block. So the same element has the same number in every array that holds the block.
    """

    outer: int
    blocks: int
    inner: int

    @classmethod
    def along(cls, shape: Sequence[int], dim: int, blocks: int) -> Blocks:
        """Cut an array of this shape along `dim`. Raises ScheduleError if the blocks do not divide it."""
        if blocks == 1:
            return cls(1, 1, math.prod(shape))
        if not 0 <= dim < len(shape) or shape[dim] % blocks:
            raise ScheduleError(
                f"an array of shape {tuple(shape)} cannot be cut into {blocks} blocks along dimension {dim}: that "
                f"dimension must exist and be divisible by {blocks}. Pad it, or choose another dim."
            )
        return cls(math.prod(shape[:dim]), blocks, shape[dim] // blocks * math.prod(shape[dim + 1 :]))

    @property
    def elements(self) -> int:
        """The number of elements of one block."""
        return self.outer * self.inner

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return self.elements * self.blocks

    @property
    def is_strided(self) -> bool:
        """True if a block's elements are not contiguous."""
        return self.outer > 1

    def flat(self, array: Any, contiguous: Callable[[Any], Any]) -> Any:
        """Return an array's elements as flat memory in which block follows on block.

        It is the array's own memory if they lie so. `contiguous` makes a C-contiguous array of a scalar or a view, and returns
        any other array itself.
        """
        if self.is_strided:
            array = array.reshape((self.outer, self.blocks, self.inner)).transpose((1, 0, 2))
        return contiguous(array).reshape((self.size,))

    def shaped(self, flat: Any, shape: Sequence[int]) -> Any:
        """Return the array of this shape whose blocks follow each other in flat memory."""
        if self.is_strided:
            flat = flat.reshape((self.blocks, self.outer, self.inner)).transpose((1, 0, 2))
        return flat.reshape(shape)

    def ranges(self, block: int, start: int, stop: int) -> list[StridedRange]:
        """Return elements start … stop of a block as at most three ranges.

        They are the end of a row, whole rows, and the beginning of a row.
        """
        if stop <= start:
            return []
        stride, offset = self.blocks * self.inner, block * self.inner
        first, into = divmod(start, self.inner)
        last, left = divmod(stop, self.inner)
        if first == last:
            return [StridedRange(first * stride + offset + into, 1, stride, left - into)]
        found = []
        if into:
            found.append(StridedRange(first * stride + offset + into, 1, stride, self.inner - into))
            first += 1
        if last > first:
            found.append(StridedRange(first * stride + offset, last - first, stride, self.inner))
        if left:
            found.append(StridedRange(last * stride + offset, 1, stride, left))
        return found

    def index(self, block: int, start: int, stop: int) -> Index:
        """Return the same elements as an index into the flat array."""
        ranges = self.ranges(block, start, stop)
        if not ranges:
            return slice(0, 0)
        if len(ranges) == 1 and (ranges[0].rows == 1 or ranges[0].stride == ranges[0].length):
            only = ranges[0]
            return slice(only.start, only.start + only.rows * only.length)
        rows = [(r.start + r.stride * np.arange(r.rows)[:, None] + np.arange(r.length)).reshape(-1) for r in ranges]
        return np.concatenate(rows)


@dataclass(frozen=True)
class ChunkLayout:
    """The chunks of one rank's three buffers as element ranges. All ranks have the same layout.

    Scratch is an array of slots. Each has the elements of the largest part. A chunk in a slot begins where the slot does.
    """

    collective: Collective
    itemsize: int
    input: Blocks
    output: Blocks
    ranges: tuple[tuple[int, int], ...] | None = None
    """(start, stop) of each part of a block, in elements, if other arrays of the group affect it.

    See `cut_as_one` and `in_segments`.
    """

    @classmethod
    def of(
        cls, collective: Collective, shape: Sequence[int], itemsize: int, dim: int = 0, concat_dim: int | None = None
    ) -> ChunkLayout:
        """Return the layout for one rank's input of this shape.

        An input of p blocks is cut along `dim`. An output of p blocks is concatenated along `concat_dim` (None: along `dim`
        too). Raises ScheduleError if the number of ranks does not divide the dimension.
        """
        taken = Blocks.along(shape, dim, collective.input_blocks)
        join = dim if concat_dim is None else concat_dim
        given = Blocks.along(cls.output_shape(collective, shape, dim, concat_dim), join, collective.output_blocks)
        return cls(collective, itemsize, taken, given)

    @staticmethod
    def output_shape(
        collective: Collective, shape: Sequence[int], dim: int = 0, concat_dim: int | None = None
    ) -> tuple[int, ...]:
        """Return the shape of one rank's output if its input has `shape`."""
        out = list(shape)
        if collective.input_blocks > 1:
            out[dim] //= collective.input_blocks
        if collective.output_blocks > 1:
            out[dim if concat_dim is None else concat_dim] *= collective.output_blocks
        return tuple(out)

    @cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each part of a block, in elements."""
        if self.ranges is not None:
            return self.ranges
        return tuple(pairwise(chunk_bounds(self.input.elements, self.collective.parts, self.itemsize).tolist()))

    @cached_property
    def capacity(self) -> int:
        """The elements of a scratch slot: those of the largest part."""
        return max(high - low for low, high in self.parts)

    def index(self, row: int, part: int) -> Index:
        """Return the index of a chunk's elements in its rank's memory (input, output and scratch in a row).

        `row` is the chunk's row (see `Places`). `part` is the part in a scratch slot. Chunks of the other buffers have fixed
        parts.
        """
        c = self.collective
        slot = row - c.input_chunks - c.output_chunks
        if slot >= 0:
            start = self.input.size + self.output.size + slot * self.capacity
            low, high = self.parts[part]
            return slice(start, start + high - low)
        own, block = int(c.parts_of_rows[row]), int(c.blocks_of_rows[row])
        buffer, before = (self.input, 0) if row < c.input_chunks else (self.output, self.input.size)
        return shifted(buffer.index(block, *self.parts[own]), before)


def cut_as_one(layouts: Sequence[ChunkLayout]) -> list[ChunkLayout]:
    """Cut several arrays of whole blocks as if they were one. A chunk then holds some of the arrays, not a part of each.

    This is for schedules that combine all chunks alike.
    """
    sizes = [layout.input.elements * layout.itemsize for layout in layouts]
    bounds = chunk_bounds(sum(sizes), layouts[0].collective.parts, 1)
    starts = np.cumsum([0, *sizes[:-1]])
    cuts = [
        np.clip((bounds - start) // layout.itemsize, 0, layout.input.elements).tolist()
        for layout, start in zip(layouts, starts, strict=True)
    ]
    return [replace(layout, ranges=tuple(pairwise(cut))) for layout, cut in zip(layouts, cuts, strict=True)]


def in_segments(layouts: Sequence[ChunkLayout], count: int) -> list[dict[int, ChunkLayout]]:
    """Return the layouts of each of `count` segments, by array number.

    A segment is a range of every part, over all arrays in a row. Every element stays in its part, and is combined in the same
    order. A segment of many arrays holds some of them.
    """
    sizes = np.array([[(high - low) * x.itemsize for low, high in x.parts] for x in layouts])  # arrays, parts
    starts = np.cumsum(sizes, axis=0) - sizes
    step = -(-int(sizes.sum(axis=0).max()) // (count * ALIGNMENT)) * ALIGNMENT
    cuts = np.arange(count + 1)[:, None, None] * step - starts
    cuts = np.clip(cuts - cuts % ALIGNMENT, 0, sizes)  # segments, arrays, parts: bytes of a part
    cuts[-1] = sizes
    has = np.any(np.diff(cuts, axis=0), axis=2)  # segment, array
    return [{i: _ranged(layouts[i], *cuts[k : k + 2, i]) for i in np.flatnonzero(has[k]).tolist()} for k in range(count)]


def _ranged(layout: ChunkLayout, begin: np.ndarray, end: np.ndarray) -> ChunkLayout:
    elements = ((begin // layout.itemsize).tolist(), (end // layout.itemsize).tolist())
    return replace(layout, ranges=tuple((low + b, low + e) for (low, _), b, e in zip(layout.parts, *elements, strict=True)))


class FlatBuffers:
    """The buffers of all ranks as one flat array: the input, output and scratch of each rank in turn."""

    def __init__(self, layout: ChunkLayout, scratch_chunks: int):
        self.layout = layout
        self.nranks = layout.collective.nranks
        self.rank_size = layout.input.size + layout.output.size + scratch_chunks * layout.capacity
        self._chunks: dict[tuple[int, int], Index] = {}

    def index(self, code: int, count: int, part: int, part_step: int) -> Index:
        """Return the index of a run of `count` chunks from place `code` on. The i-th is of part `part + i * part_step`."""
        row, rank = divmod(code, self.nranks)
        chunks = []
        for i in range(count):
            key = (row + i, part + i * part_step)
            if key not in self._chunks:
                self._chunks[key] = self.layout.index(*key)
            chunks.append(self._chunks[key])
        return shifted(chunks[0] if count == 1 else joined(chunks), rank * self.rank_size)

    def of_rank(self, rank: int) -> slice:
        """Return the index of all buffers of a rank."""
        return slice(rank * self.rank_size, (rank + 1) * self.rank_size)


def shifted(index: Index, by: int) -> Index:
    """Return an index, `by` elements further on."""
    return slice(index.start + by, index.stop + by) if isinstance(index, slice) else index + by


def joined(indexes: Sequence[Index]) -> Index:
    """Return several indexes as one: a slice if each continues the one before."""
    slices = [i for i in indexes if isinstance(i, slice) and i.stop > i.start]
    if all(isinstance(i, slice) for i in indexes) and all(a.stop == b.start for a, b in pairwise(slices)):
        return slice(slices[0].start, slices[-1].stop) if slices else slice(0, 0)
    return np.concatenate([np.arange(i.start, i.stop) if isinstance(i, slice) else i for i in indexes])
