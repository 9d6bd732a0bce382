"""Staging: what of a private array is copied to where others can read it, and in how many pieces.

A rank reads its own array where it is. What others read of it is copied to a room in the heap, piece after piece: a
collective in pieces is the same proved streams once for each piece, and a rank leaves a piece after all who read its room.
There is room for two pieces, which stays in the caches: while others read one piece, the next one is copied. A chunk that
goes into the rank's own output, as in an all_gather, is copied just there, and others read it there. Every element stays in
its part of the array, so pieces change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..schedules.collective import ALIGNMENT
from ..schedules.layout import Layout, Piece
from ..schedules.streams import Streams

__all__ = ["Part", "Staging", "in_pieces", "is_strided"]

_STAGED = 1 << 14
"""Bytes of arrays from which on only what others read is copied. Small ones are copied whole: that is one instruction."""
_PIECE = 1 << 18
_MOST = 256
"""Bytes of a piece: it stays in the second level of cache. Very large arrays have larger pieces, to keep plans short."""


class Part(NamedTuple):
    """Where a chunk, or a part of it, is: bytes from the array's beginning; of a private one's copy, from the beginning of its
    room, or of the output (-1: there is no copy)."""

    chunk: int
    start: int
    copy: int = -1
    in_output: bool = False
    rows: int = 0
    """Rows to copy, of `nbytes`, with these strides."""
    nbytes: int = 0
    copy_stride: int = 0
    stride: int = 0


def in_pieces(layouts: Sequence[Layout]) -> list[list[Layout]]:
    """The layouts of some arrays for each piece; no piece for arrays that are copied whole."""
    nbytes = sum(max(layout.input.size, layout.output.size) * layout.itemsize for layout in layouts)
    if nbytes < _STAGED:
        return []
    n = min(-(-nbytes // _PIECE), _MOST)
    return [[replace(layout, piece=(k, n)) for layout in layouts] for k in range(n)]


def is_strided(layout: Layout) -> bool:
    """Whether the chunks of an input have gaps. Its room is then a mirror of the whole array, read with the same strides."""
    return layout.input.outer > 1


@dataclass(frozen=True)
class Staging:
    """How a rank's inputs are staged."""

    shared: dict[int, int]
    """The chunks that others read, each with the row of the rank's output that it is copied to, or -1."""

    @classmethod
    def of(cls, streams: Streams, rank: int) -> Staging:
        """What one rank has to stage."""
        c, p = streams.schedule.collective, streams.schedule.nranks
        reader, writer = (np.repeat(np.arange(len(streams)), np.diff(ptr)) for ptr in (streams.src_ptr, streams.dst_ptr))
        foreign = (streams.src % p == rank) & (streams.stream[reader] // streams.schedule.channels != rank)
        read = np.zeros(c.input_chunks, bool)
        for i in np.flatnonzero(foreign).tolist():
            first = int(streams.src[i]) // p
            read[first : first + int(streams.count[reader[i]])] = True
        writes = np.zeros(c.input_chunks + c.output_chunks, np.int64)
        copied: dict[int, int] = {}
        for i in np.flatnonzero(streams.dst % p == rank).tolist():
            row, k, count = int(streams.dst[i]) // p, int(writer[i]), int(streams.count[writer[i]])
            writes[row : row + count] += 1
            place, of = divmod(int(streams.src[streams.src_ptr[k]]), p)
            if of == rank and streams.src_ptr[k + 1] - streams.src_ptr[k] == 1 and row < len(writes):
                copied.update((place + j, row + j) for j in range(count))
        once = {chunk: row for chunk, row in copied.items() if writes[row] == 1}
        return cls({chunk: once.get(chunk, -1) for chunk in np.flatnonzero(read).tolist()})

    def room_bytes(self, layout: Layout) -> int:
        """Bytes of the room of one array, for two pieces."""
        if is_strided(layout):
            return layout.input.size * layout.itemsize if self.shared else 0
        return len(self._roomed(layout)) * _slot_bytes(layout) * min(2, layout.piece[1])

    def copies(self, layout: Layout) -> Iterator[Part]:
        """What is copied of a private array for this piece."""
        if not is_strided(layout):
            yield from (s for s in self.places(layout) if s.copy >= 0)
            return
        size = layout.itemsize
        for chunk in self.shared:
            for piece in _ranges(layout, chunk):
                start, stride = piece.start * size, piece.stride * size
                yield Part(chunk, start, start, False, piece.rows, piece.length * size, stride, stride)

    def places(self, layout: Layout) -> Iterator[Part]:
        """Where every chunk is. A strided one's place is the array's."""
        size, roomed = layout.itemsize, self._roomed(layout)
        first = layout.piece[0] % 2 * len(roomed)
        for chunk in range(layout.collective.input_chunks):
            if is_strided(layout):
                yield Part(chunk, 0, 0 if chunk in self.shared else -1)
                continue
            ranges = _ranges(layout, chunk)
            start, length = (ranges[0].start, ranges[0].length) if ranges else (0, 0)
            copy, in_output = -1, False
            if chunk in roomed:
                copy = (first + roomed.index(chunk)) * _slot_bytes(layout)
            elif chunk in self.shared and ranges:
                copy, in_output = _ranges(layout, self.shared[chunk])[0].start * size, True
            yield Part(chunk, start * size, copy, in_output, 1, length * size)

    def _roomed(self, layout: Layout) -> list[int]:
        """The chunks that need room: those that do not become one range of the output."""
        if is_strided(layout):
            return []
        return [chunk for chunk, row in self.shared.items() if row < 0 or layout.output.outer > 1]


def _ranges(layout: Layout, row: int) -> list[Piece]:
    """Where this piece of a chunk of the input, or of the output, is."""
    c = layout.collective
    blocks = layout.input if row < c.input_chunks else layout.output
    return blocks.pieces(int(c.blocks_of_rows[row]), *layout.part(int(c.parts_of_rows[row])))


def _slot_bytes(layout: Layout) -> int:
    return -(-layout.capacity * layout.itemsize // ALIGNMENT) * ALIGNMENT
