"""What of private arrays is staged: pieces are parts of parts, rooms do not overlap. `test_processes.py` has the bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll import schedules
from funccoll.runtime import staging
from funccoll.schedules.collective import ALIGNMENT
from funccoll.schedules.layout import Layout


def layouts(kind: str, p: int, shape: tuple[int, ...], itemsize: int, dim: int, pieces: int, algorithm: str | None = None):
    """A schedule, an array's layout for it, and the layouts of its pieces."""
    schedule = schedules.build(kind, p, algorithm=algorithm or schedules.algorithms(kind, p)[0])
    whole = Layout.of(schedule.collective, shape, itemsize, dim, dim)
    return schedule, whole, [replace(whole, piece=(k, pieces)) for k in range(pieces)]


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]), st.integers(1, 6),
    st.integers(0, 70), st.integers(1, 9), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 12),
)  # fmt: skip
def test_pieces_are_parts_of_parts(kind, p, rows, columns, itemsize, pieces):
    _, whole, some = layouts(kind, p, (rows * p, columns), itemsize, 0, pieces)
    for number in range(whole.collective.parts):
        low, high = whole.part(number)
        at = low
        for layout in some:
            begin, end = layout.part(number)
            assert begin == min(at, high)
            assert begin <= end
            assert end - begin <= layout.capacity
            assert end == high or (end - low) * itemsize % ALIGNMENT == 0
            at = end
        assert at == high


@pytest.mark.parametrize(("kind", "algorithm", "rank", "wanted"), [
    ("all_reduce", "owner", 1, {0: -1, 2: -1}),  # it combines chunk 1 by itself
    ("reduce_scatter", "owner", 0, {1: -1, 2: -1}),
    ("all_gather", "direct", 2, {0: 3}),  # in its output's block 2, which comes after one chunk of input
    ("all_to_all", "direct", 1, {0: -1, 2: -1}),
    ("broadcast", "flat", 0, {0: 1}),
    ("broadcast", "flat", 1, {}),
])  # fmt: skip
def test_only_what_others_read_is_staged(kind, algorithm, rank, wanted):
    schedule = schedules.build(kind, 3, algorithm=algorithm)
    assert staging.Staging.of(schedule.streams(), rank).shared == wanted


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]), st.integers(2, 4), st.integers(0, 1),
    st.integers(1, 40), st.integers(1, 5), st.data(),
)  # fmt: skip
def test_copies_lie_apart_and_inside_of_their_room(kind, p, dim, length, pieces, data):
    algorithm = data.draw(st.sampled_from(schedules.algorithms(kind, p)))
    schedule, whole, some = layouts(kind, p, (p * 3, p * length), 4, dim, pieces, algorithm)
    for rank in range(p):
        how = staging.Staging.of(schedule.streams(), rank)
        room, staged = how.room_bytes(some[0]), np.zeros(whole.input.size * 4, bool)
        for k, layout in enumerate(some):
            used, out = np.zeros(room, bool), np.zeros(whole.output.size * 4, bool)
            for j in range(min(2, pieces - k)):  # this piece and the next one are there at once
                for part in how.copies(some[k + j]):
                    for row in range(part.rows):
                        begin = part.copy + row * part.copy_stride
                        memory = out if part.in_output else used
                        assert begin + part.nbytes <= len(memory) or not part.nbytes
                        assert not memory[begin : begin + part.nbytes].any()
                        memory[begin : begin + part.nbytes] = True
                        if j == 0:
                            at = part.start + row * part.stride
                            assert not staged[at : at + part.nbytes].any()
                            staged[at : at + part.nbytes] = True
            assert len(list(how.places(layout))) == whole.collective.input_chunks
        chunks = np.zeros(whole.input.size, bool)
        for chunk in how.shared:
            chunks[whole.index(chunk, int(whole.collective.parts_of_rows[chunk]))] = True
        np.testing.assert_array_equal(staged[::4], chunks)  # all that others read, and nothing else
