"""Rounds of messages: every algorithm verified and run with rendezvous semantics; round counts; what is refused."""

from __future__ import annotations

import random
import zlib
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import funccoll.schedules as fs
from funccoll.errors import ScheduleError
from funccoll.schedules import Move
from funccoll.schedules.collective import KINDS, Collective
from funccoll.schedules.messages.interpret import interpret_messages
from funccoll.schedules.messages.messages import Messages, Transfers, to_messages
from funccoll.schedules.moves import encode
from funccoll.schedules.schedule import Schedule
from tests.support.oracles.schedule_oracle import Oracle, built, check, make_inputs, variants


def schedule_of(collective: Collective, *rounds: Any) -> Schedule:
    """A schedule from lists of moves, without registering an algorithm."""
    batches = [encode(m, collective, t, None) for t, moves in enumerate(rounds) for m in moves]
    p = collective.nranks
    last = max(int((b.count + x.max(axis=1) // p).max()) for b in batches if b for x in (b.dst, b.src))
    scratch = max(0, last - collective.input_chunks - collective.output_chunks)
    return Schedule(collective, "own", tuple(b for b in batches if b), scratch)


# ---------------------------------------------------------------- every algorithm


QUICK = (1, 2, 3, 4, 6)


def run_all(schedule: Schedule, orders: int) -> None:
    """In that many orders, of integers and floats in turn."""
    c = schedule.collective
    messages = schedule.messages().verify()
    rng = np.random.default_rng(zlib.crc32(repr(schedule).encode()))
    op = "max" if c.kind == "barrier" else "sum"
    for order in range(orders):
        dtype = (np.int32, np.float32)[order % 2]
        block = int(rng.choice([2, c.parts * 64 // np.dtype(dtype).itemsize + 5]))
        inputs = make_inputs(rng, c.nranks, (block * c.input_blocks,), dtype)
        outputs = interpret_messages(messages, inputs, op=op, seed=order)
        Oracle(c, inputs, op).check(outputs, f"{schedule}, seed {order}")


@pytest.mark.parametrize("p", QUICK)
def test_every_algorithm(p):
    """One channel, or two, in turn, and of the variants every second, with four or six ranks every fourth."""
    for number, (kind, name, options) in enumerate(list(variants(p))[p % 2 :: 2 if p < 4 else 4]):
        run_all(built(kind, p, name, channels=1 + (number + p) % 2, **options), 2)


def test_every_algorithm_for_16_ranks():
    for kind in KINDS:
        for name in fs.algorithms(kind, 16):
            pairs = [(r, (r + 3) % 16) for r in range(16)] if kind == "permute" else ()
            run_all(built(kind, 16, name, pairs=pairs), 2)


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


def test_messages_and_streams_give_the_same_bits():
    """A mean is divided, and 16-bit floats are rounded, at the same places."""
    from funccoll.schedules.streams.interpret import interpret

    rng = np.random.default_rng(0)
    for name in fs.algorithms("all_reduce", 6):
        schedule = fs.build("all_reduce", 6, name)
        for dtype, op in ((np.float32, "sum"), (np.float32, "mean"), (np.float16, "mean"), (np.float16, "prod")):
            inputs = make_inputs(rng, 6, (500,), dtype)
            streams = interpret(schedule.streams(), [inputs], op=op)[0]
            messages = interpret_messages(schedule.messages(), inputs, op=op)
            for a, b in zip(streams, messages, strict=True):
                assert a is not None and b is not None and a.tobytes() == b.tobytes(), (name, dtype, op)


def test_dimensions():
    rng = np.random.default_rng(0)
    schedule = fs.build("all_to_all", 3, "bruck", channels=2)
    inputs = make_inputs(rng, 3, (5, 6, 4), np.float64)
    outputs = interpret_messages(schedule.messages(), inputs, dim=1, concat_dim=2)
    check(schedule.collective, inputs, outputs, dim=1, concat_dim=2)


# ---------------------------------------------------------------- rounds


def log2(p: int) -> int:
    return (p - 1).bit_length()


ROUNDS = {
    ("all_reduce", "ring"): lambda p: 2 * (p - 1),
    ("all_reduce", "owner"): lambda p: 2,
    ("all_reduce", "one_shot"): lambda p: 1,
    ("all_reduce", "circulant"): lambda p: 2 * log2(p),
    ("all_gather", "ring"): lambda p: p - 1,
    ("all_gather", "bruck"): log2,
    ("all_gather", "circulant"): log2,
    ("reduce_scatter", "ring"): lambda p: p - 1,
    ("reduce_scatter", "owner"): lambda p: 1,
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
            assert messages.nrounds == ROUNDS[kind, name](p), p
            for side in (messages.sends, messages.receives):
                assert len(side) == 0 or (side.round.min() == 1 and side.round.max() == messages.nrounds)
                assert (np.diff(side.round) >= 0).all()


def test_powers_of_two():
    for k in range(1, 6):
        p = 1 << k
        assert fs.build("all_reduce", p, "recursive_doubling").messages().nrounds == k
        assert fs.build("all_reduce", p, "rabenseifner").messages().nrounds == 2 * k
        assert fs.build("all_gather", p, "recursive_doubling").messages().nrounds == k
        assert fs.build("reduce_scatter", p, "recursive_halving").messages().nrounds == k


def test_single_moves_are_merged_into_rounds():
    """A generator that yields one move at a time, as a beginner's does, still has few rounds."""
    p = 8
    shift = [[Move((r, "output", 0), ((r - 1) % p, "input", 0))] for r in range(p)]
    schedule = schedule_of(Collective("permute", p, pairs=tuple((r, (r + 1) % p) for r in range(p))), *shift)
    assert schedule.nrounds == p
    assert schedule.messages().verify().nrounds == 1


def test_a_round_is_not_joined_by_what_depends_on_it_or_uses_its_ports():
    c = Collective("broadcast", 4)
    own, a, d = (Move((r, "output", 0), (0, "input", 0)) for r in (0, 1, 3))
    b = Move((2, "output", 0), (1, "output", 0))
    assert schedule_of(c, [own], [a], [b], [d]).messages().verify().nrounds == 2  # b after a; d joins b
    assert schedule_of(c, [own], [a], [d], [b]).messages().verify().nrounds == 2  # d after a by its port; b joins d
    assert schedule_of(c, [own], [a, d], [b]).messages().verify().nrounds == 2  # yielded together they stay together


def test_what_is_sent_is_not_overwritten_in_the_same_round():
    c = Collective("broadcast", 3)
    moves = [
        [Move((0, "output", 0), (0, "input", 0))], [Move((1, "scratch", 0), (0, "input", 0))],
        [Move((2, "output", 0), (1, "scratch", 0))], [Move((1, "scratch", 0), (0, "output", 0))],
        [Move((1, "output", 0), (1, "scratch", 0))],
    ]  # fmt: skip
    messages = schedule_of(c, *moves).messages().verify()
    assert messages.nrounds == 3
    assert len(messages.combines) == 2


def test_remote_destinations_of_a_combine_take_the_next_round():
    c = Collective("reduce", 3, root=2)
    sources = [(r, "input", 0) for r in range(3)]
    messages = schedule_of(c, [Move((2, "output", 0), sources, by=1)]).messages().verify()
    assert (messages.nrounds, messages.staging) == (2, 3)  # two sources arrive, the sum is kept until it is sent
    assert messages.text(1).splitlines() == [
        "round 1: receive scratch[0] from 0", "round 1: receive scratch[1] from 2",
        "round 1: scratch[2] := scratch[0], input[0], scratch[1]", "round 2: send scratch[2] to 2",
    ]  # fmt: skip
    with pytest.raises(ScheduleError, match="rank=9 must be a rank"):
        messages.text(9)


def test_a_copy_goes_straight_from_its_source_to_its_destinations():
    c = Collective("broadcast", 4)
    everyone = Move([(r, "output", 0) for r in range(4)], (0, "input", 0), by=3)
    messages = schedule_of(c, [everyone]).messages().verify()
    assert (messages.nrounds, messages.staging, len(messages.sends), len(messages.combines)) == (1, 0, 3, 1)


def test_runs_that_cross_blocks_are_cut():
    c = Collective("all_gather", 2, chunks=2)
    moves = [Move((r, "output", 2 * r), (r, "input", 0), count=2) for r in (0, 1)]
    whole = [Move((1 - r, "output", 2 * r), (r, "output", 2 * r), count=2) for r in (0, 1)]
    assert len(schedule_of(c, moves, whole).messages().verify().sends) == 2
    again = Move((1, "scratch", 0), (0, "output", 0), count=4)  # parts 0, 1, 0, 1
    messages = schedule_of(c, moves, whole, [again]).messages().verify()
    assert len(messages.sends) == 6
    inputs = [np.arange(40.0), np.arange(40.0) + 100]
    check(c, inputs, interpret_messages(messages, inputs))


def test_no_messages():
    alone = fs.build("all_reduce", 1).messages().verify()
    assert (alone.nrounds, len(alone.sends), len(alone.combines)) == (0, 0, 1)
    assert interpret_messages(alone, [np.ones(3)])[0] is not None
    nothing = fs.build("permute", 3).messages().verify()
    assert interpret_messages(nothing, [np.ones(3)] * 3) == [None] * 3


def test_the_repr():
    text = repr(fs.build("all_reduce", 4, "ring").messages())
    assert text.startswith("<Messages of ring for all_reduce on 4 ranks: 6 rounds, 24 messages (a rank sends at most 1 in")


def test_many_ranks_take_little_time():
    messages = fs.build("all_reduce", 256, "ring").messages()
    assert (messages.nrounds, len(messages.sends)) == (510, 256 * 510)


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def ring() -> Messages:
    return fs.build("all_reduce", 3, "ring").messages()


def without(side: Transfers, row: int) -> Transfers:
    return Transfers(*(np.delete(getattr(side, f.name), row) for f in fields(side)))


def changed(side: Any, name: str, row: int, value: int) -> Any:
    column = getattr(side, name).copy()
    column[row] = value
    return replace(side, **{name: column})


def test_a_send_without_a_receive(ring):
    bad = replace(ring, receives=without(ring.receives, 4))
    with pytest.raises(ScheduleError, match=r"in round 2 rank \d sends to rank \d, and that rank has no receive"):
        bad.verify()
    with pytest.raises(ScheduleError, match="deadlock: rank"):
        interpret_messages(bad, [np.ones(48)] * 3)


def test_a_receive_without_a_send(ring):
    with pytest.raises(ScheduleError, match=r"in round 4 rank \d receives from rank \d, and that rank has no send"):
        replace(ring, sends=without(ring.sends, len(ring.sends) - 1)).verify()


def test_a_receive_in_another_round(ring):
    with pytest.raises(ScheduleError, match="in this round"):
        replace(ring, receives=changed(ring.receives, "round", 2, 2)).verify()


def test_lengths_that_differ(ring):
    row = int(np.argmin(ring.receives.place))
    with pytest.raises(ScheduleError, match=r"sends 1 chunk\(s\) of part . \(step 0\) from .* which expects 2 chunk"):
        replace(ring, receives=changed(ring.receives, "count", row, 2)).verify()
    bad = replace(ring, receives=changed(ring.receives, "part", 0, 0 if ring.receives.part[0] == 2 else 2))
    with pytest.raises(ScheduleError, match="which expects"):
        bad.verify()
    with pytest.raises(ScheduleError, match=r"sends 1[68] elements to rank \d, which expects 1[68]"):
        interpret_messages(bad, [np.ones(50)] * 3)


def test_rows_in_another_order(ring):
    with pytest.raises(ScheduleError, match="its receives are not in the order of their rounds"):
        replace(ring, receives=changed(ring.receives, "round", 0, 2)).verify()
    with pytest.raises(ScheduleError, match="its combines are not in the order of their rounds and steps"):
        replace(ring, combines=changed(ring.combines, "step", 0, 9)).verify()
    with pytest.raises(ScheduleError, match="sends of round 0, and rounds are 1 to 4"):
        replace(ring, sends=changed(ring.sends, "round", 0, 0)).verify()


def test_an_input_is_not_received_into(ring):
    with pytest.raises(ScheduleError, match=r"rank 0 receives into input\[1\] of rank 0: an input is only read"):
        replace(ring, receives=changed(ring.receives, "place", 0, 3)).verify()


def test_another_ranks_memory(ring):
    bad = replace(ring, sends=changed(ring.sends, "place", 0, ring.sends.place[0] + 1))
    with pytest.raises(ScheduleError, match=r"rank 0 sends from .* of rank 1: a rank has only its own memory"):
        bad.verify()


def test_receiving_into_what_is_being_sent():
    c = Collective("permute", 2, pairs=((0, 1), (1, 0)))
    steps = [
        [Move((r, "output", 0), (r, "input", 0)) for r in (0, 1)],
        [Move((r, "scratch", 0), (1 - r, "output", 0)) for r in (0, 1)],
        [Move((r, "output", 0), (r, "scratch", 0)) for r in (0, 1)],
    ]  # fmt: skip
    good = schedule_of(c, *steps).messages().verify()
    bad = replace(good, receives=replace(good.receives, place=good.sends.place.copy()))
    with pytest.raises(ScheduleError, match="in this round moves overwrite what others read"):
        bad.verify()


def test_a_wrong_value(ring):
    combines = replace(ring.combines, src=ring.combines.src.copy())
    combines.src[0] = combines.src[1]
    with pytest.raises(ScheduleError, match="must hold"):
        replace(ring, combines=combines).verify()


def test_mutated_messages_are_refused_or_right():
    """1,000 single changes of a column: what `verify` accepts runs and gives the right thing."""
    rng = random.Random(0)
    names = ("ring", "owner", "recursive_doubling", "circulant", "hierarchical")
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
        inputs = make_inputs(numbers, messages.schedule.nranks, (400,), np.int64)
        check(messages.schedule.collective, inputs, interpret_messages(mutant, inputs, seed=rng.randrange(99)))
    assert 0 < accepted < 400


def mutated(rng: random.Random, messages: Messages) -> Messages:
    """One element of one column of sends, receives or combines moved by 1 or p, or one row dropped."""
    what = rng.choice(["sends", "receives", "combines"])
    side = getattr(messages, what)
    if what != "combines" and rng.random() < 0.2:
        return replace(messages, **{what: without(side, rng.randrange(len(side)))})
    name = rng.choice([f.name for f in fields(side) if f.name not in ("dst_ptr", "src_ptr")])
    column = getattr(side, name)
    row = rng.randrange(len(column))
    step = rng.choice([-1, 1, -messages.schedule.nranks, messages.schedule.nranks])
    return replace(messages, **{what: changed(side, name, row, int(column[row]) + step)})


def test_to_messages_is_what_schedules_call():
    schedule = fs.build("broadcast", 5)
    assert schedule.messages() is schedule.messages()
    assert repr(to_messages(schedule)) == repr(schedule.messages())
