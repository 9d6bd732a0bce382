"""Moves, chunks and streams of schedules."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll import schedules
from funccoll.errors import ScheduleError
from funccoll.schedules import Move, algorithm, build
from funccoll.schedules.collective import KINDS, chunk_bounds
from funccoll.schedules.registry import _ALGORITHMS
from funccoll.schedules.streams.instructions import Opcode
from tests.support.example_counts import examples
from tests.support.groups import in_groups
from tests.support.refused_schedules import refused

pytestmark = pytest.mark.covers("schedules")

EVERY = [(kind, name) for kind in KINDS for name in schedules.algorithms(kind)]


def test_moves_are_read_one_by_one():
    schedule = build("all_reduce", 3, "ring")
    assert len(schedule.moves) == sum(1 for _ in schedule.moves) == 2 * 2 * 3
    assert [str(m) for m in schedule.moves] == [str(schedule.moves[i]) for i in range(len(schedule.moves))]
    assert repr(schedule.moves[-1]) == repr(list(schedule.moves)[-1])
    assert len(schedule.moves[2:5]) == 3
    with pytest.raises(IndexError):
        schedule.moves[12]
    runs = build("all_gather", 7, "bruck")
    assert all(m.count == 1 for m in runs.moves)
    assert len(runs.moves) == 7 * 7


@given(st.integers(0, 5000), st.integers(1, 70), st.sampled_from([1, 2, 4, 8, 16]))
def test_chunks_cover_a_block_in_order(elements, parts, itemsize):
    bounds = chunk_bounds(elements, parts, itemsize)
    assert bounds[0] == 0
    assert bounds[-1] == elements
    assert len(bounds) == parts + 1
    assert (np.diff(bounds) >= 0).all()
    assert (bounds[1:-1] * itemsize % 64 == 0).all()
    assert np.abs(bounds - np.arange(parts + 1) * elements / parts).max() <= 64 // itemsize


@examples(60)
@given(st.data())
def test_channels_touch_different_chunks(data):
    kind, name = data.draw(st.sampled_from(EVERY))
    p = data.draw(st.sampled_from([2, 4, 8]))
    channels = data.draw(st.integers(2, 4))
    pairs = [(0, 1)] if kind == "permute" else []
    schedule = build(kind, p, name, channels=channels, pairs=pairs)
    owner: dict[int, int] = {}
    for batch in schedule.batches:
        for place in (*batch.dst.ravel().tolist(), *batch.src.ravel().tolist()):
            assert owner.setdefault(place, batch.channel) == batch.channel
    assert set(owner.values()) == set(range(channels))


def drop_wait(streams, *dropped: int):
    keep = ~np.isin(np.arange(len(streams.wait_stream)), dropped)
    ptr = np.concatenate([[0], np.cumsum(keep)])[streams.wait_ptr]
    return dataclasses.replace(
        streams, wait_ptr=ptr, wait_stream=streams.wait_stream[keep], wait_value=streams.wait_value[keep]
    )


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["a third", "all"])
@in_groups(("kind", "name"), EVERY, of=6)
def test_every_wait_is_needed(kind, name, every):
    """The waits are transitively reduced: without any one of them the streams are refused."""
    for p in (2, 4):
        streams = build(kind, p, name).streams()
        for w in range(EVERY.index((kind, name)) % every if p > 2 else 0, len(streams.wait_stream), every if p > 2 else 1):
            opcode = streams.opcode[np.searchsorted(streams.wait_ptr, w, side="right") - 1]
            if kind == "barrier" and opcode == Opcode.LEAVE:
                continue
            with pytest.raises(ScheduleError, match=r"race in|deadlock in|does not implement "):
                drop_wait(streams, w).verify()


@in_groups(("kind", "name"), [(k, n) for k, n in EVERY if k != "barrier"], of=6)
def test_every_wait_is_needed_on_all_ranks(kind, name):
    """As above, with the same wait left out by every rank: the rest may look alike from all of them."""
    streams = build(kind, 4, name).streams()
    waits = np.diff(streams.wait_ptr[streams.start])
    if (waits != waits[0]).any():
        return
    for w in range(int(waits[0])):
        with pytest.raises(ScheduleError, match=r"race in|deadlock in|does not implement "):
            drop_wait(streams, *(w + int(waits[0]) * np.arange(4))).verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"span": 1}, "span is 1, and a stream has 4 instructions"),
        ({"span": 0}, "span is 0"),
        ({"src": -1}, "a place does not exist"),
        ({"src": 99}, "a place does not exist"),
        ({"dst": -99}, "a place does not exist"),
        ({"wait_stream": 9}, "an instruction waits for a stream that does not exist"),
        ({"wait_stream": -1}, "an instruction waits for a stream that does not exist"),
        ({"count": -1}, "a run has no chunks"),
        ({"count": 40}, "a place does not exist"),
        ({"dst_ptr": 1}, "dst_ptr does not cut its column"),
        ({"opcode": Opcode.COPY}, "an opcode is not one of streams"),
    ],
)
def test_columns_that_are_no_streams(change, message):
    streams = build("all_reduce", 2, "ring").streams()
    ((name, value),) = change.items()
    if name != "span":
        column = getattr(streams, name).copy()
        column[1 if name == "count" else 0] = value
        value = column
    with pytest.raises(ScheduleError, match=f"streams of all_reduce on 2 ranks are broken: {message}"):
        dataclasses.replace(streams, **{name: value}).verify()


def test_narrow_numpy_integers_are_integers():
    for args, options in (
        (("all_gather", np.int8(16)), {}),
        (("gather", np.uint8(8), "binomial"), {"root": np.int8(3)}),
        (("broadcast", 4, "pipelined_chain"), {"chunks": np.int8(100), "channels": np.int8(2)}),
    ):
        assert build(*args, **options).prove()
    assert schedules.explain("all_reduce", np.int8(100), np.int16(64)).chosen.algorithm == "one_shot"

    def narrow(p):
        yield Move((0, "output", np.int8(100)), (0, "input", np.int8(100)), np.int8(100))

    assert "does not exist" in str(refused("broadcast", narrow, p=1, chunks=128))


def test_a_copy_to_where_it_comes_from():
    def keeps(p, root):
        yield Move((0, "scratch", 0), (0, "input", 0))
        yield Move([(0, "output", 0), (0, "scratch", 0)], (0, "scratch", 0))
        yield Move((0, "output", 1), (1, "input", 0))

    algorithm("gather", name="test_only")(keeps)
    try:
        schedule = build("gather", 2, "test_only")
        assert schedule.streams().verify()
        assert schedule.messages().verify()
    finally:
        del _ALGORITHMS["gather"]["test_only"]


def test_one_rank_that_does_everything():
    def push(p):
        r = np.arange(p)
        yield Move((r, "scratch", 0), (0, "input", 0), by=0)
        yield Move((r, "output", 0), (r, "scratch", 0), by=0)

    algorithm("broadcast", name="test_only")(push)
    try:
        streams = build("broadcast", 300, "test_only").streams()
        assert streams.verify() is streams
    finally:
        del _ALGORITHMS["broadcast"]["test_only"]


def test_a_wait_for_ever_and_a_cycle_are_deadlocks():
    streams = build("all_reduce", 4, "ring").streams()
    value = streams.wait_value.copy()
    value[0] = 9
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0, instruction 1: .* waits for count 9 of stream 3"):
        dataclasses.replace(streams, wait_value=value).verify()
    value[0] = 7
    words = r"deadlock in all_reduce on 4 ranks: \d instructions wait for each other in a cycle"
    with pytest.raises(ScheduleError, match=words) as error:
        dataclasses.replace(streams, wait_value=value).verify()
    assert error.value.source is not None
    assert "waits for rank 3, instruction 6" in str(error.value)


def test_ring_streams_have_one_wait_for_each_instruction():
    for p in (2, 5, 64, 256):
        streams = build("all_reduce", p, "ring").streams()
        assert len(streams) == p * 2 * (p - 1) + 2 * p
        # Every move waits for the left neighbour, every leave for the right one; nothing waits for more.
        assert len(streams.wait_stream) == p * 2 * (p - 1) + p


def test_schedules_are_pickled_without_what_is_kept():
    schedule = build("all_reduce", 8, "ring")
    small = len(pickle.dumps(schedule))
    schedule.streams().verify()
    assert len(pickle.dumps(schedule)) < 1.1 * small
    assert repr(pickle.loads(pickle.dumps(schedule)).prove()) == repr(schedule.prove())


def test_reprs_say_what_they_are():
    schedule = build("all_reduce", 4, "ring", channels=2)
    assert repr(schedule).startswith("<Schedule ring for all_reduce on 4 ranks: 6 rounds, 48 moves, 4 chunks per block, 2")
    assert repr(schedule.prove()) == "<Proof of ring for all_reduce on 4 ranks: 32 output chunks, 16 partial results>"
    assert build("all_reduce", 3, "ring").prove().text(2).splitlines() == [
        "output[0]@2 = x0[0] + (x1[0] + x2[0])",
        "output[1]@2 = x1[1] + (x0[1] + x2[1])",
        "output[2]@2 = x2[2] + (x0[2] + x1[2])",
    ]
    assert build("broadcast", 2, root=1).prove().text() == "output[0]@0 = x1[0]\noutput[0]@1 = x1[0]"
    assert "8 streams: " in repr(schedule.streams())
    assert "after instruction 0 of rank 3, channel 0" in schedule.streams().text(0)
    assert str(schedule.moves[0]).count(":=") == 1
    assert len(repr(schedule.moves).splitlines()) == 11
