"""Staging: parts of private arrays are copied to a place where peers can read them, segment by segment.

A rank reads its own array in place. What peers read of it is copied to a staging buffer in the heap, in segments. A segmented
collective runs the same proved streams once for each segment. A rank leaves a segment after all ranks that read its chunks. The
buffer holds two segments, and they stay in the caches: while peers read one, the next one is copied. A chunk that goes into the
rank's own output, as in an all_gather, is copied there, and peers read it there. Every element stays in its part of the array,
so segments do not change any bit.

A strided input that is cut along another dimension than its first is copied whole.

Nothing is staged if peers read private arrays directly (`kernels.direct_reads`). They do from a least number of bytes on,
measured by `funccoll tune`. In an all_to_all, a permute or a scatter this saves one of two copies. An all_reduce or a
reduce_scatter needs as many copies, but combines data from the reader's own cache: that pays if the way between cores is long.
In all others staging is free. In an all_gather or a broadcast the owner copies what it needs in its own output anyway. In a
gather or a reduce it would only wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...core.machine_profile import DirectReads
from ...schedules.chunk_layout import ChunkLayout, in_segments
from ...schedules.collective import ALIGNMENT
from ...schedules.streams.instructions import NO_COPY
from ...schedules.streams.streams import Streams

__all__ = [
    "COMBINING",
    "COPYING",
    "Part",
    "reads_directly",
    "segments_of",
    "shared_chunks",
    "staged_parts",
]

_STAGED_BYTES = 1 << 14
"""Bytes of arrays from which on only what peers read is copied. Smaller arrays are copied whole, by one instruction."""
_SEGMENT_BYTES = 1 << 20
"""Bytes of a segment, measured. Most of it stays in the second-level cache. Smaller segments cost more in waits, and arrays
that are not staged have these, too. If all ranks wait for a root to stage, a small array has four segments, so that they
overlap soon."""
_MAX_SEGMENTS = 256
"""The most segments of one collective. Very large arrays have larger segments, which keeps plans short."""
COPYING, COMBINING = ("all_to_all", "permute", "scatter"), ("all_reduce", "reduce_scatter")
"""Collectives that read private arrays directly."""


class Part(NamedTuple):
    """A segment's part of a chunk: its first byte in the array, and its bytes."""

    chunk: int
    start: int
    nbytes: int = 0
    copy: int = NO_COPY
    """The offset of its copy for peers, if the array is private: in bytes of the segment's buffer, or of the output."""
    in_output: bool = False


def segments_of(layouts: Sequence[ChunkLayout]) -> list[dict[int, ChunkLayout]]:
    """The layouts of each segment, by array; no segment for arrays that are copied whole."""
    nbytes = sum(max(layout.input.size, layout.output.size) * layout.itemsize for layout in layouts)
    if nbytes < _STAGED_BYTES:
        return []
    rooted = layouts[0].collective.meaning.rooted
    each = min(max(nbytes // 4, _SEGMENT_BYTES // 4), _SEGMENT_BYTES) if rooted else _SEGMENT_BYTES
    return in_segments(layouts, min(-(-nbytes // each), _MAX_SEGMENTS))


def reads_directly(kind: str, layouts: Sequence[ChunkLayout], direct_reads: DirectReads | None) -> bool:
    """True if private arrays of these layouts are read directly: a read has enough bytes, on average over the arrays."""
    if direct_reads is None or kind not in (*COPYING, *COMBINING):
        return False
    least = direct_reads.copied if kind in COPYING else direct_reads.combined
    rows = [min(layout.capacity, layout.input.inner) * layout.itemsize for layout in layouts]
    return 0 < least <= sum(rows) / len(rows)


def shared_chunks(streams: Streams, rank: int) -> dict[int, int]:
    """The chunks of a rank's input that peers read, each with the row of its own output that it becomes, or -1."""
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
        first, of = divmod(int(streams.src[streams.src_ptr[k]]), p)
        if of == rank and streams.src_ptr[k + 1] - streams.src_ptr[k] == 1 and row < len(writes):
            copied.update((first + j, row + j) for j in range(count))
    once = {chunk: row for chunk, row in copied.items() if writes[row] == 1}
    return {chunk: once.get(chunk, -1) for chunk in np.flatnonzero(read).tolist()}


def staged_parts(segment: Mapping[int, ChunkLayout], shared: Mapping[int, int]) -> tuple[dict[int, list[Part]], int]:
    """The parts of every array in one segment, and the bytes of a buffer for their copies. Empty parts are left out."""
    found, nbytes = {}, 0
    for number, layout in segment.items():
        parts = found[number] = list[Part]()
        for chunk in range(layout.collective.input_chunks):
            low, high = _range(layout, chunk)
            if layout.input.is_strided:  # its address is the array's: it is copied whole when it is bound
                parts.append(Part(chunk, 0))
            elif high > low and chunk not in shared:
                parts.append(Part(chunk, low))
            elif high > low and shared[chunk] >= 0 and not layout.output.is_strided:
                parts.append(Part(chunk, low, high - low, _range(layout, shared[chunk])[0], in_output=True))
            elif high > low:
                parts.append(Part(chunk, low, high - low, nbytes))
                nbytes += -(-(high - low) // ALIGNMENT) * ALIGNMENT
    return found, nbytes


def _range(layout: ChunkLayout, row: int) -> tuple[int, int]:
    """The first byte of a contiguous chunk of the input or output, and the byte behind its last."""
    c = layout.collective
    blocks = layout.input if row < c.input_chunks else layout.output
    block, (low, high) = int(c.blocks_of_rows[row]) * blocks.inner, layout.parts[int(c.parts_of_rows[row])]
    return (block + low) * layout.itemsize, (block + high) * layout.itemsize
