"""Streams of ranks that are hosts of their own: every algorithm verified and run; rounds of messages; what is refused."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import funccoll.schedules as fs
from funccoll.errors import ScheduleError
from funccoll.schedules import Move
from funccoll.schedules.collective import KINDS, Collective
from funccoll.schedules.moves import encode
from funccoll.schedules.schedule import Schedule
from funccoll.schedules.streams.instructions import Opcode
from funccoll.schedules.streams.interpret import interpret
from funccoll.schedules.streams.streams import MESSAGES, Streams
from tests.support.oracles.schedule_oracle import Oracle, built, check, make_inputs, variants

pytestmark = pytest.mark.covers("schedules")


def schedule_of(collective: Collective, *rounds: Any) -> Schedule:
    """A schedule from lists of moves, without registering an algorithm."""
    batches = [encode(m, collective, t, None) for t, moves in enumerate(rounds) for m in moves]
    p = collective.nranks
    last = max(int((b.count + x.max(axis=1) // p).max()) for b in batches if b for x in (b.dst, b.src))
    scratch = max(0, last - collective.input_chunks - collective.output_chunks)
    return Schedule(collective, "own", tuple(b for b in batches if b), scratch)


def nrounds(streams: Streams) -> int:
    return len(list(streams.rounds())) - 1


def count(streams: Streams, opcode: Opcode) -> int:
    return int(np.count_nonzero(streams.opcode == opcode))


# ---------------------------------------------------------------- every algorithm


QUICK = (1, 2, 3, 4, 6)


def run_all(schedule: Schedule, orders: int) -> None:
    """Two executions in a row in that many orders, of integers and floats in turn."""
    c = schedule.collective
    messages = schedule.messages().verify()
    assert c.nranks == 1 or not len(messages.wait_stream), "a rank waits for messages alone"
    rng = np.random.default_rng(zlib.crc32(repr(schedule).encode()))
    op = "max" if c.kind == "barrier" else "sum"
    for order in range(orders):
        dtype = (np.int32, np.float32)[order % 2]
        block = int(rng.choice([2, c.parts * 64 // np.dtype(dtype).itemsize + 5]))
        inputs = [make_inputs(rng, c.nranks, (block * c.input_blocks,), dtype) for _ in range(2)]
        for given, outputs in zip(inputs, interpret(messages, inputs, op=op, seed=order), strict=True):
            Oracle(c, given, op).check(outputs, f"{schedule}, seed {order}")


@pytest.mark.parametrize("p", QUICK)
def test_every_algorithm(p):
    """One channel, or two, in turn, and of the variants every second, with four or six ranks every fourth."""
    for number, (kind, name, options) in enumerate(list(variants(p))[p % 2 :: 2 if p < 4 else 4]):
        run_all(built(kind, p, name, channels=1 + (number + p) % 2, **options), 2)


@pytest.mark.parametrize("p", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_every_algorithm_for_a_power_of_two(p):
    for kind in KINDS:
        for name in fs.algorithms(kind, p):
            pairs = [(r, (r + 3) % p) for r in range(p)] if kind == "permute" else ()
            run_all(built(kind, p, name, pairs=pairs), 2)


def run_variants(p: int, orders: int) -> None:
    for kind, name, options in variants(p):
        for channels in (1, 2) if p < 10 else (1,):
            run_all(built(kind, p, name, channels=channels, **options), orders if p < 10 else 2)


@pytest.mark.slow
@pytest.mark.parametrize("p", [33, 17, 12, 9, 8, 7, 6, 5, 4, 3, 2, 1])
def test_every_variant(p):
    run_variants(p, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("p", [64, 33, 31, 27, 24, 20, 18, 17, 16, 15, 13, *range(12, 0, -1)])
def test_every_variant_in_many_orders(p):
    run_variants(p, 10)


def test_messages_give_the_bits_of_one_host():
    """A mean is divided, and 16-bit floats are rounded, at the same places."""
    rng = np.random.default_rng(0)
    for name in fs.algorithms("all_reduce", 6):
        schedule = fs.build("all_reduce", 6, name)
        for dtype, op in ((np.float32, "sum"), (np.float32, "mean"), (np.float16, "mean"), (np.float16, "prod")):
            inputs = make_inputs(rng, 6, (500,), dtype)
            both = (interpret(streams.verify(), [inputs], op=op)[0] for streams in (schedule.streams(), schedule.messages()))
            for a, b in zip(*both, strict=True):
                assert a is not None and b is not None and a.tobytes() == b.tobytes(), (name, dtype, op)


def test_dimensions():
    rng = np.random.default_rng(0)
    schedule = fs.build("all_to_all", 3, "bruck", channels=2)
    inputs = make_inputs(rng, 3, (5, 6, 4), np.float64)
    (outputs,) = interpret(schedule.messages(), [inputs], dim=1, concat_dim=2)
    check(schedule.collective, inputs, outputs, dim=1, concat_dim=2)


# ---------------------------------------------------------------- rounds


def log2(p: int) -> int:
    return (p - 1).bit_length()


ROUNDS = {
    ("all_reduce", "ring"): lambda p: 2 * (p - 1),
    ("all_reduce", "two_shot"): lambda p: 2,
    ("all_reduce", "one_shot"): lambda p: 1,
    ("all_reduce", "circulant"): lambda p: 2 * log2(p),
    ("all_gather", "ring"): lambda p: p - 1,
    ("all_gather", "bruck"): log2,
    ("all_gather", "circulant"): log2,
    ("reduce_scatter", "ring"): lambda p: p - 1,
    ("reduce_scatter", "direct"): lambda p: 1,
    ("reduce_scatter", "circulant"): log2,
    ("all_to_all", "direct"): lambda p: p - 1,
    ("all_to_all", "bruck"): log2,
    ("broadcast", "flat"): lambda p: 1,
    ("broadcast", "binomial"): log2,
    ("broadcast", "pipelined_chain"): lambda p: p - 2 + 8,
    ("reduce", "flat"): lambda p: 1,
    ("reduce", "binomial"): log2,
    ("gather", "binomial"): log2,
    ("scatter", "binomial"): log2,
    ("permute", "direct"): lambda p: 1,
    ("barrier", "dissemination"): log2,
}


@pytest.mark.parametrize(("kind", "name"), ROUNDS)
def test_the_number_of_rounds(kind, name):
    for p in (2, 3, 8, 13):
        pairs = [(r, (r + 1) % p) for r in range(p)] if kind == "permute" else ()
        for channels in (1, 2):
            messages = fs.build(kind, p, name, pairs=pairs, channels=channels).messages()
            rounds = list(messages.rounds())
            assert len(rounds) - 1 == ROUNDS[kind, name](p), p
            assert not rounds[0][0] and all(sends for sends, _ in rounds[1:])
            posts = np.bincount(messages.stream[messages.opcode == Opcode.POST], minlength=p)
            assert posts.max() <= len(rounds) - 1, "a rank posts once in a round"
            for i in np.flatnonzero(messages.opcode == Opcode.POST).tolist():  # receives first
                assert len(messages.posted(i)) and (np.diff(messages.opcode[messages.posted(i)]) <= 0).all()


def test_powers_of_two():
    for k in range(1, 6):
        p = 1 << k
        assert nrounds(fs.build("all_reduce", p, "recursive_doubling").messages()) == k
        assert nrounds(fs.build("all_reduce", p, "rabenseifner").messages()) == 2 * k
        assert nrounds(fs.build("all_gather", p, "recursive_doubling").messages()) == k
        assert nrounds(fs.build("reduce_scatter", p, "recursive_halving").messages()) == k


def test_single_moves_are_merged_into_rounds():
    """A generator that yields one move at a time, as a beginner's does, still has few rounds."""
    p = 8
    shift = [[Move((r, "output", 0), ((r - 1) % p, "input", 0))] for r in range(p)]
    schedule = schedule_of(Collective("permute", p, pairs=tuple((r, (r + 1) % p) for r in range(p))), *shift)
    assert schedule.nrounds == p
    assert nrounds(schedule.messages().verify()) == 1


def test_a_round_is_not_joined_by_what_depends_on_it_or_uses_its_ports():
    c = Collective("broadcast", 4)
    own, a, d = (Move((r, "output", 0), (0, "input", 0)) for r in (0, 1, 3))
    b = Move((2, "output", 0), (1, "output", 0))
    for rounds in (
        ([own], [a], [b], [d]),  # b after a; d joins b
        ([own], [a], [d], [b]),  # d after a by its port; b joins d
        ([own], [a, d], [b]),  # yielded together they stay together
    ):
        assert nrounds(schedule_of(c, *rounds).messages().verify()) == 2


def test_what_is_sent_is_not_overwritten_in_the_same_round():
    c = Collective("broadcast", 3)
    moves = [
        [Move((0, "output", 0), (0, "input", 0))],
        [Move((1, "scratch", 0), (0, "input", 0))],
        [Move((2, "output", 0), (1, "scratch", 0))],
        [Move((1, "scratch", 0), (0, "output", 0))],
        [Move((1, "output", 0), (1, "scratch", 0))],
    ]
    messages = schedule_of(c, *moves).messages().verify()
    assert nrounds(messages) == 3
    assert count(messages, Opcode.COMBINE) == 2


def test_remote_destinations_of_a_combine_take_the_next_round():
    c = Collective("reduce", 3, root=2)
    sources = [(r, "input", 0) for r in range(3)]
    messages = schedule_of(c, [Move((2, "output", 0), sources, by=1)]).messages().verify()
    assert nrounds(messages) == 2
    assert messages.schedule.scratch_chunks == 3  # two sources arrive, the sum is kept until it is sent
    assert [line.partition(": ")[2] for line in messages.text(1).splitlines()] == [
        "enter",
        "post",
        "receive: scratch[0]@1 := input[0]@0",
        "receive: scratch[1]@1 := input[0]@2",
        "scratch[2]@1 := scratch[0]@1, input[0]@1, scratch[1]@1",
        "post",
        "send: output[0]@2 := scratch[2]@1",
        "leave",
    ]
    with pytest.raises(ScheduleError, match="rank=9 must be a rank"):
        messages.text(9)


def test_a_copy_goes_straight_from_its_source_to_its_destinations():
    c = Collective("broadcast", 4)
    everyone = Move([(r, "output", 0) for r in range(4)], (0, "input", 0), by=3)
    messages = schedule_of(c, [everyone]).messages().verify()
    assert (nrounds(messages), count(messages, Opcode.SEND), count(messages, Opcode.COMBINE)) == (1, 3, 1)
    assert messages.schedule.scratch_chunks == 0


def test_runs_that_cross_blocks_are_cut():
    c = Collective("all_gather", 2, chunks=2)
    moves = [Move((r, "output", 2 * r), (r, "input", 0), count=2) for r in (0, 1)]
    whole = [Move((1 - r, "output", 2 * r), (r, "output", 2 * r), count=2) for r in (0, 1)]
    assert count(schedule_of(c, moves, whole).messages().verify(), Opcode.SEND) == 2
    again = Move((1, "scratch", 0), (0, "output", 0), count=4)  # parts 0, 1, 0, 1
    messages = schedule_of(c, moves, whole, [again]).messages().verify()
    assert count(messages, Opcode.SEND) == 6
    inputs = [np.arange(40.0), np.arange(40.0) + 100]
    check(c, inputs, interpret(messages, [inputs])[0])


def test_no_messages():
    alone = fs.build("all_reduce", 1).messages().verify()
    ((sends, combines),) = alone.rounds()
    assert (len(sends), len(combines)) == (0, 1)
    assert interpret(alone, [[np.ones(3)]])[0][0] is not None
    nothing = fs.build("permute", 3).messages().verify()
    assert list(nothing.rounds()) == [([], [])]
    assert interpret(nothing, [[np.ones(3)] * 3]) == [[None] * 3]


def test_many_ranks_take_little_time():
    messages = fs.build("all_reduce", 256, "ring").messages()
    assert (nrounds(messages), count(messages, Opcode.SEND)) == (510, 256 * 510)


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def ring() -> Streams:
    return fs.build("all_reduce", 3, "ring").messages()


def with_rows(streams: Streams, rows: Sequence[int]) -> Streams:
    """Streams of these instructions, each stream's in this order. They have no waits."""
    length = np.bincount(streams.stream[rows], minlength=streams.nstreams)
    columns = {name: getattr(streams, name)[rows] for name in ("opcode", "count", "part", "part_step", "move")}
    for side in ("dst", "src"):
        ptr, codes = getattr(streams, f"{side}_ptr"), getattr(streams, side)
        places = [codes[ptr[i] : ptr[i + 1]] for i in rows]
        columns |= {side: np.concatenate(places), f"{side}_ptr": np.cumsum([0, *map(len, places)])}
    columns |= {"start": np.concatenate([[0], np.cumsum(length)]), "wait_ptr": np.zeros(len(rows) + 1, int)}
    return replace(streams, span=int(length.max()), **columns)


def without(streams: Streams, row: int) -> Streams:
    return with_rows(streams, [i for i in range(len(streams)) if i != row])


def changed(streams: Streams, name: str, row: int, value: int) -> Streams:
    column = getattr(streams, name).copy()
    column[row] = value
    return replace(streams, **{name: column})


def rows_of(streams: Streams, opcode: Opcode) -> list[int]:
    return np.flatnonzero(streams.opcode == opcode).tolist()


def test_a_send_without_a_receive(ring):
    bad = without(ring, rows_of(ring, Opcode.RECEIVE)[-1])
    with pytest.raises(ScheduleError, match=r"rank 1, .*: send: .* is paired with nothing: it would wait forever"):
        bad.verify()


def test_a_receive_without_a_send(ring):
    with pytest.raises(ScheduleError, match=r"rank 0, .*: receive: .* is paired with nothing: it would wait forever"):
        without(ring, rows_of(ring, Opcode.SEND)[-1]).verify()


def test_messages_in_another_order(ring):
    """One rank receives in the other order what its peer sends in two rounds."""
    first, second = rows_of(ring, Opcode.RECEIVE)[:2]
    rows = list(range(len(ring)))
    rows[first], rows[second] = second, first
    with pytest.raises(ScheduleError, match=r"send: .* is paired with .* receive: .*: it would wait forever"):
        with_rows(ring, rows).verify()


def test_a_receive_in_a_later_round(ring):
    """It still meets its send, but the value is there too late."""
    post = rows_of(ring, Opcode.POST)[0]
    assert ring.opcode[post + 1] == Opcode.RECEIVE and ring.opcode[post + 4] == Opcode.POST
    rows = [*range(post + 1), *range(post + 2, post + 5), post + 1, *range(post + 5, len(ring))]
    with pytest.raises(ScheduleError, match=r"it reads scratch\[1\] of rank 0, which nothing has written"):
        with_rows(ring, rows).verify()


def test_lengths_that_differ(ring):
    receive = rows_of(ring, Opcode.RECEIVE)[0]
    for name, value in (("part", (ring.part[receive] + 1) % 3), ("part_step", 1)):
        with pytest.raises(ScheduleError, match="is paired with"):
            changed(ring, name, receive, value).verify()


def test_an_input_is_not_received_into(ring):
    send, receive = (int(rows[0]) for rows in ring.messages)
    ends = [ring.dst_ptr[i] for i in (send, receive)]
    into = 4 * ring.stream[receive]  # of the receiver's input the chunk that it does not send in this round
    bad = changed(changed(ring, "dst", ends[0], into), "dst", ends[1], into)
    with pytest.raises(ScheduleError, match=r"it writes to input\[(\d)\] of rank \1, an input"):
        bad.verify()


def test_another_ranks_memory(ring):
    send, combine = (rows_of(ring, opcode)[0] for opcode in (Opcode.SEND, Opcode.COMBINE))
    with pytest.raises(ScheduleError, match="a message of another rank"):
        changed(ring, "src", ring.src_ptr[send], ring.src[ring.src_ptr[send]] + 2).verify()
    with pytest.raises(ScheduleError, match="it touches memory of another host"):
        changed(ring, "src", ring.src_ptr[combine], ring.src[ring.src_ptr[combine]] + 1).verify()


def test_receiving_into_what_is_being_sent():
    c = Collective("permute", 2, pairs=((0, 1), (1, 0)))
    steps = [
        [Move((r, "output", 0), (r, "input", 0)) for r in (0, 1)],
        [Move((r, "scratch", 0), (1 - r, "output", 0)) for r in (0, 1)],
        [Move((r, "output", 0), (r, "scratch", 0)) for r in (0, 1)],
    ]
    good = schedule_of(c, *steps).messages().verify()
    bad = replace(good, dst=good.dst.copy())
    for i in np.flatnonzero(np.isin(good.opcode, MESSAGES)).tolist():
        source = good.src[good.src_ptr[i]]
        bad.dst[bad.dst_ptr[i]] = source ^ 1  # the output of the receiver
    with pytest.raises(ScheduleError, match="it sends what another message of its round receives"):
        bad.verify()
    last = rows_of(bad, Opcode.COMBINE)[1::2]
    swap = with_rows(bad, [i for i in range(len(bad)) if i not in last])  # the outputs, in place
    for seed in range(20):  # what is received into holds nothing from its POST on
        for outputs in interpret(swap, [[np.ones(3), np.full(3, 2.0)]], seed=seed):
            assert np.isnan(outputs).all()


def test_a_wrong_value(ring):
    combine = rows_of(ring, Opcode.COMBINE)[0]
    first = ring.src_ptr[combine]
    with pytest.raises(ScheduleError, match="must hold"):
        changed(ring, "src", first, ring.src[first + 1]).verify()


def test_mutated_messages_are_refused_or_right():
    """1,000 single changes: what `verify` accepts runs and gives the right thing."""
    rng = random.Random(0)
    names = ("ring", "two_shot", "recursive_doubling", "circulant", "hierarchical")
    originals = [fs.build("all_reduce", p, name).messages() for p in (2, 3, 4) for name in names]
    numbers = np.random.default_rng(0)
    accepted = 0
    for _ in range(1_000):
        messages = rng.choice(originals)
        mutant = mutated(rng, messages)
        try:
            mutant.verify()
        except ScheduleError:
            continue
        accepted += 1
        c = messages.schedule.collective
        inputs = [make_inputs(numbers, c.nranks, (400,), np.int64) for _ in range(2)]
        for given, outputs in zip(inputs, interpret(mutant, inputs, seed=rng.randrange(99)), strict=True):
            check(c, given, outputs)
    assert 0 < accepted < 400


def mutated(rng: random.Random, messages: Streams) -> Streams:
    """One element of a column moved by 1 or p, or another opcode; one row dropped, twice there, or behind the next one."""
    row = rng.randrange(len(messages) - 1)
    if rng.random() < 0.3:
        rows = list(range(len(messages)))
        rows[row : row + 2] = rng.choice([[row + 1], [row, row, row + 1], [row + 1, row]])
        return with_rows(messages, sorted(rows, key=lambda i: messages.stream[i]))
    name = rng.choice(["opcode", "dst", "src", "count", "part", "part_step"])
    if name == "opcode":
        return changed(messages, name, row, rng.choice([Opcode.COMBINE, Opcode.POST, *MESSAGES]))
    column, p = getattr(messages, name), messages.schedule.nranks
    row = rng.randrange(len(column))
    return changed(messages, name, row, int(column[row]) + rng.choice([-1, 1, -p, p]))


def test_messages_are_streams_of_hosts():
    schedule = fs.build("broadcast", 5)
    assert schedule.messages() is schedule.messages() is schedule.streams(range(5))
