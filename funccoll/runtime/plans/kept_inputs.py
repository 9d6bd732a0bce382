"""Results that are their rank's input, so that the two can be one array, as at the root of a broadcast."""

from __future__ import annotations

import numpy as np

from ...schedules.streams.streams import Streams

__all__ = ["keeps_input"]


def keeps_input(streams: Streams, rank: int) -> bool:
    """True when each chunk of a rank's output is written once, as a copy of the same chunk of its own input.

    The streams are verified, so that is all that any rank writes there.
    """
    c, p = streams.schedule.collective, streams.schedule.nranks
    if c.meaning.reduces or not c.meaning.input_blocks == c.meaning.output_blocks == 1:
        return False
    instruction = np.repeat(np.arange(len(streams)), np.diff(streams.dst_ptr))
    written = np.zeros(c.output_chunks, np.int64)
    for i in np.flatnonzero(streams.dst % p == rank).tolist():
        chunk, k = int(streams.dst[i]) // p - c.input_chunks, int(instruction[i])
        if chunk >= c.output_chunks:  # of scratch
            continue
        first, end = int(streams.src_ptr[k]), int(streams.src_ptr[k + 1])
        if end - first != 1 or int(streams.src[first]) != chunk * p + rank:
            return False
        written[chunk : chunk + int(streams.count[k])] += 1
    return bool((written == 1).all())
