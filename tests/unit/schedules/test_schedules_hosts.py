"""Streams of ranks on several hosts: every algorithm on any map has the bits of one host, and what is wrong is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll.schedules as fs
from funccoll.errors import ScheduleError
from funccoll.schedules.split_hosts import split_hosts
from funccoll.schedules.streams.instructions import Opcode
from funccoll.schedules.streams.interpret import interpret
from tests.support.oracles.schedule_oracle import built, variants

pytestmark = pytest.mark.covers("host-schedules")

MAPS = [(0, 1), (0, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3), (0, 0, 0, 1, 1), (0, 1, 2, 0, 1, 0, 2, 2)]
QUICK = [(0, 1, 1), (0, 1, 0, 1)]


def outputs(streams, inputs, op, seed):
    return [[None if x is None else x.tobytes() for x in ranks] for ranks in interpret(streams, inputs, op=op, seed=seed)]


def same_bits(schedule, hosts, seeds=2):
    kind = schedule.kind
    streams = schedule.streams(hosts).verify()
    rng = np.random.default_rng(3)
    op = "max" if kind == "barrier" else "sum"
    shape = (schedule.nranks * 21, 2)
    inputs = [[rng.standard_normal(shape).astype(np.float32) for _ in hosts] for _ in range(2)]
    expected = outputs(schedule.streams(), inputs, op, 0)
    for seed in range(seeds):
        assert outputs(streams, inputs, op, seed) == expected, (schedule, hosts, seed)


@pytest.mark.parametrize("hosts", QUICK, ids=str)
def test_every_algorithm_has_the_bits_of_one_host(hosts):
    """Of other roots, levels and chunks every third; with one channel, or two, in turn."""
    for number, (kind, name, options) in enumerate(variants(len(hosts))):
        if not options or number % 3 == 0:
            same_bits(built(kind, len(hosts), name, channels=1 + number % 2, **options), hosts, seeds=1)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", MAPS, ids=str)
def test_every_algorithm_has_the_bits_of_one_host_in_other_orders(hosts):
    for kind, name, options in variants(len(hosts)):
        for channels in (1, 2):
            same_bits(built(kind, len(hosts), name, channels=channels, **options), hosts)


@pytest.mark.slow
@given(st.data(), st.integers(2, 12))
def test_any_map_of_hosts(data, p):
    kind, name, options = data.draw(st.sampled_from(list(variants(p))))
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=p, max_size=p))
    same_bits(built(kind, p, name, channels=data.draw(st.integers(1, 2)), **options), hosts, 1)


def test_one_host_needs_no_messages():
    schedule = fs.build("all_reduce", 4, "ring")
    assert schedule.streams((7, 7, 7, 7)) is schedule.streams() is schedule.streams(())
    assert schedule.streams([0, 0, 1, 1]) is schedule.streams((0, 0, 1, 1)) is not schedule.streams()


def test_what_stays_on_a_host_is_no_message():
    ring = fs.build("all_reduce", 4, "ring").streams((0, 0, 1, 1))
    opcodes = ring.opcode[ring.start[0] : ring.start[1]].tolist()
    assert opcodes.count(Opcode.RECEIVE) == 6 and Opcode.SEND not in opcodes  # it gets from rank 3, and rank 1 reads from it
    assert "receive: scratch[1]@0 := input[2]@3" in ring.text(0) and "post  after instruction 6 of rank 1" in ring.text(0)
    alone = fs.build("all_reduce", 4, "ring").messages()
    assert len(alone.wait_stream) == 0 and np.count_nonzero(alone.opcode == Opcode.SEND) == 4 * 6
    both = split_hosts(fs.build("all_reduce", 4, "two_shot"), (0, 0, 1, 1))
    assert both.whole is not None and both.prove() is both.whole.prove() and both.scratch_chunks > 0


def test_what_cannot_be_split():
    with pytest.raises(ScheduleError, match="there must be a host for each rank"):
        fs.build("all_reduce", 4, "ring").streams((0, 1))


@pytest.mark.parametrize(
    ("kind", "name", "hosts"),
    [("all_reduce", "ring", (0, 0, 1, 1)), ("all_reduce", "two_shot", (0, 1, 0, 1)), ("all_to_all", "bruck", (0, 0, 0, 1))],
)
def test_without_any_one_wait_they_are_wrong(kind, name, hosts):
    streams = fs.build(kind, len(hosts), name).streams(hosts)
    owner = np.repeat(np.arange(len(streams)), np.diff(streams.wait_ptr))
    assert len(streams.wait_stream) > 3
    for w in range(len(streams.wait_stream)):
        ptr = streams.wait_ptr.copy()
        ptr[owner[w] + 1 :] -= 1
        fewer = replace(
            streams, wait_ptr=ptr, wait_stream=np.delete(streams.wait_stream, w), wait_value=np.delete(streams.wait_value, w)
        )
        with pytest.raises(ScheduleError):
            fewer.verify()


def changed(streams, column, i, value):
    out = getattr(streams, column).copy()
    out[i] = value
    return replace(streams, **{column: out})


def test_broken_messages_are_refused():
    streams = fs.build("all_reduce", 4, "ring").streams((0, 0, 1, 1))
    send, receive = (int(np.flatnonzero(streams.opcode == opcode)[1]) for opcode in (Opcode.SEND, Opcode.RECEIVE))
    post = int(np.flatnonzero(streams.opcode == Opcode.POST)[0])
    waiting = streams.opcode[np.repeat(np.arange(len(streams)), np.diff(streams.wait_ptr))]
    waits = int(np.flatnonzero(waiting == Opcode.COMBINE)[0])
    combine = int(np.flatnonzero(streams.opcode == Opcode.COMBINE)[0])
    for wrong, words in (
        (changed(streams, "opcode", send, Opcode.COMBINE), "touches memory of another host"),
        (changed(streams, "opcode", combine, Opcode.SEND), "a message"),
        (replace(changed(streams, "opcode", post, Opcode.SEND), move=np.maximum(streams.move, 0)), "a move is not a row"),
        (changed(changed(streams, "opcode", post, Opcode.SEND), "move", post, 0), "a message has one source"),
        (changed(streams, "src", streams.src_ptr[receive], streams.src[streams.src_ptr[receive]] + 4), "is paired with"),
        (changed(streams, "part", send, (streams.part[send] + 1) % 4), "is paired with"),
        (changed(streams, "count", receive, 2), "is paired with"),
        (changed(streams, "wait_stream", waits, 3), "it waits for a rank of another host"),
        (replace(streams, hosts=(0, 1, 0, 1)), "waits for a rank of another host"),
        (replace(streams, hosts=(0, 1)), "are not those of 4 ranks"),
        (replace(streams, hosts=()), "an opcode is not one of streams"),
    ):
        with pytest.raises(ScheduleError, match=words):
            wrong.verify()


def test_what_a_round_receives_it_does_not_send():
    """Rank 2's POST before its SEND is left out, so that it would send what is still to come; rank 3 has more, and is late."""
    streams = fs.build("broadcast", 4, "binomial").streams((0, 1, 2, 3))
    at = int(streams.start[2]) + 3
    kinds = [Opcode(kind).name for kind in streams.opcode[streams.start[2] : streams.start[3]]]
    assert kinds == ["ENTER", "POST", "RECEIVE", "POST", "SEND", "LEAVE"]
    late = int(streams.start[3]) + 1
    rows = [i for i in range(len(streams)) if i != at for _ in range(4 if i == late else 1)]
    pointers = [*rows, len(streams)]
    start = np.searchsorted(rows, streams.start).astype(streams.start.dtype)
    columns = {name: getattr(streams, name)[rows] for name in ("opcode", "count", "part", "part_step", "move")}
    columns |= {name: getattr(streams, name)[pointers] for name in ("dst_ptr", "src_ptr", "wait_ptr")}
    with pytest.raises(ScheduleError, match="it sends what another message of its round receives"):
        replace(streams, start=start, span=int(np.diff(start).max()), **columns).verify()


def test_nobody_waits_for_a_post():
    """After it messages are still under way: what is ordered with it alone would race with them."""
    streams = fs.build("all_reduce", 4, "ring").streams((0, 0, 1, 1))
    posts = set(np.flatnonzero(streams.opcode == Opcode.POST).tolist())
    for w in range(len(streams.wait_stream)):
        awaited = int(streams.start[streams.wait_stream[w]]) + int(streams.wait_value[w]) - 1
        assert awaited not in posts
        earlier = changed(streams, "wait_value", w, streams.wait_value[w] - 1)
        with pytest.raises(ScheduleError):
            earlier.verify()


def test_exchanges_that_wait_for_each_other_in_turn_are_a_deadlock():
    """Two hosts, each of which first receives and then sends: what is buffered must not matter."""
    streams = fs.build("permute", 2, pairs=[(0, 1), (1, 0)]).streams((0, 1)).verify()
    rows = [
        [Opcode.ENTER, Opcode.POST, Opcode.RECEIVE, Opcode.POST, Opcode.SEND, Opcode.LEAVE],
        [Opcode.ENTER, Opcode.POST, Opcode.RECEIVE, Opcode.POST, Opcode.SEND, Opcode.LEAVE],
    ]
    opcode = np.array(rows, np.int8).reshape(-1)
    moved = np.isin(opcode, (Opcode.SEND, Opcode.RECEIVE))
    ptr = np.concatenate([[0], np.cumsum(moved)])
    places = {i: (int(streams.dst[streams.dst_ptr[i]]), int(streams.src[streams.src_ptr[i]])) for i in (2, 3)}
    order = [places[2], places[3], places[3], places[2]]
    n = len(opcode)
    ring = replace(
        streams,
        start=np.array([0, 6, 12]),
        opcode=opcode,
        dst_ptr=ptr,
        src_ptr=ptr,
        dst=np.array([d for d, _ in order]),
        src=np.array([s for _, s in order]),
        count=np.ones(n, np.int32),
        part=np.zeros(n, np.int32),
        part_step=np.zeros(n, np.int32),
        wait_ptr=np.zeros(n + 1, np.int64),
        wait_stream=np.zeros(0, np.int32),
        wait_value=np.zeros(0, np.int32),
        move=np.where(moved, 0, -1),
        span=6,
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        ring.verify()
