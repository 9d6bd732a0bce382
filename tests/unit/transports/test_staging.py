"""Staging of private arrays: segments are ranges of parts, copies do not overlap. `test_processes.py` has the bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll import schedules
from funccoll.schedules.chunk_layout import ChunkLayout, cut_as_one, in_segments
from funccoll.transports.plans import staging

pytestmark = pytest.mark.covers("staging")

KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


def layouts_of(schedule, shapes, dim=0):
    return [ChunkLayout.of(schedule.collective, shape, size, dim, dim) for shape, size in shapes]


@given(
    st.sampled_from(KINDS),
    st.integers(1, 5),
    st.integers(1, 12),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 9), st.sampled_from([1, 2, 4, 8, 16])), min_size=1, max_size=6),
)
def test_segments_are_ranges_of_parts(kind, p, count, joined, arrays):
    schedule = schedules.build(kind, p, algorithm=schedules.algorithms(kind, p)[0])
    layouts = layouts_of(schedule, [((rows * p, columns), size) for rows, columns, size in arrays])
    if joined and kind == "all_reduce":
        layouts = cut_as_one(layouts)
    segments = in_segments(layouts, count)
    assert len(segments) == count
    for i, whole in enumerate(layouts):
        for number, (low, high) in enumerate(whole.parts):
            at = low
            for segment in segments:
                if i not in segment:
                    continue
                begin, end = segment[i].parts[number]
                assert begin == at and end >= begin
                assert end in (low, high) or (end - low) * whole.itemsize % 64 == 0
                at = end
            assert at == high
    # A segment has about its share of every chunk, of all arrays together.
    sizes = [[sum((h - b) * x.itemsize for b, h in (x.parts[j],)) for x in layouts] for j in range(schedule.collective.parts)]
    largest = max(map(sum, sizes))
    for segment in segments:
        for j in range(schedule.collective.parts):
            mine = sum((x.parts[j][1] - x.parts[j][0]) * x.itemsize for x in segment.values())
            assert mine <= -(-largest // (64 * count)) * 64 + 64 * len(layouts)


def test_many_arrays_take_few_steps():
    """A segment has some arrays, not a little of each."""
    schedule = schedules.build("all_reduce", 2, algorithm="two_shot")
    layouts = cut_as_one(layouts_of(schedule, [((100_000,), 4)] * 200))
    segments = staging.segments_of(layouts)
    assert len(segments) == -(-200 * 400_000 // (1 << 20))
    shared = staging.shared_chunks(schedule.streams(), 0)
    parts = [part for segment in segments for array in staging.staged_parts(segment, shared)[0].values() for part in array]
    assert len(parts) < 2 * (200 + 2 * len(segments))


@pytest.mark.parametrize(
    ("kind", "mib", "count"),
    [
        ("all_reduce", 1, 1),
        ("all_reduce", 5, 5),
        ("broadcast", 1, 4),
        ("broadcast", 5, 5),
        ("broadcast", 1 / 8, 1),
        ("all_reduce", 1000, 256),
        ("all_reduce", 1 / 1024, 0),
    ],
)
def test_small_segments_are_for_those_who_wait_for_a_root(kind, mib, count):
    schedule = schedules.build(kind, 2)
    assert len(staging.segments_of(layouts_of(schedule, [((int(mib * 1024),), 1024)]))) == count


@pytest.mark.parametrize(
    ("kind", "algorithm", "rank", "wanted"),
    [
        ("all_reduce", "two_shot", 1, {0: -1, 2: -1}),  # it combines chunk 1 by itself
        ("reduce_scatter", "direct", 0, {1: -1, 2: -1}),
        ("all_gather", "direct", 2, {0: 3}),  # in its output's block 2, which comes after one chunk of input
        ("all_to_all", "direct", 1, {0: -1, 2: -1}),
        ("broadcast", "flat", 0, {0: 1}),
        ("broadcast", "flat", 1, {}),
    ],
)
def test_only_what_peers_read_is_staged(kind, algorithm, rank, wanted):
    schedule = schedules.build(kind, 3, algorithm=algorithm)
    assert staging.shared_chunks(schedule.streams(), rank) == wanted


@given(st.sampled_from(KINDS), st.integers(2, 4), st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.data())
def test_copies_lie_apart_and_are_all_that_peers_read(kind, p, length, count, arrays, data):
    algorithm = data.draw(st.sampled_from(schedules.algorithms(kind, p)))
    schedule = schedules.build(kind, p, algorithm=algorithm)
    layouts = layouts_of(schedule, [((p * 3 * (i + 1), p * length), 4) for i in range(arrays)])
    for rank in range(p):
        shared = staging.shared_chunks(schedule.streams(), rank)
        copied = [np.zeros(layout.input.size * 4, bool) for layout in layouts]
        for segment in in_segments(layouts, count):
            found, nbytes = staging.staged_parts(segment, shared)
            buffer, outputs = np.zeros(nbytes, bool), [np.zeros(layout.output.size * 4, bool) for layout in layouts]
            for i, parts in found.items():
                for part in parts:
                    if part.copy >= 0:
                        memory = outputs[i] if part.in_output else buffer
                        assert part.copy + part.nbytes <= len(memory)
                        assert not memory[part.copy : part.copy + part.nbytes].any()
                        assert not copied[i][part.start : part.start + part.nbytes].any()
                        memory[part.copy : part.copy + part.nbytes] = True
                        copied[i][part.start : part.start + part.nbytes] = True
        for layout, done in zip(layouts, copied, strict=True):
            wanted = np.zeros(layout.input.size, bool)
            for chunk in shared:
                wanted[layout.index(chunk, int(layout.collective.parts_of_rows[chunk]))] = True
            np.testing.assert_array_equal(done[::4], wanted)
