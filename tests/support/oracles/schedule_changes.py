"""Single changes of schedules and of streams: what a mutation is."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from funccoll.schedules import Schedule
from funccoll.schedules.collective import Collective
from funccoll.schedules.moves import BUFFERS, Move, encode
from funccoll.schedules.streams.instructions import Opcode
from funccoll.schedules.streams.streams import Streams

Rounds = list[list[tuple[Move, int]]]  # moves with their channels


# ---------------------------------------------------------------- schedules


def rounds_of(schedule: Schedule) -> Rounds:
    """A schedule as lists of moves that can be changed."""
    out: dict[int, list[tuple[Move, int]]] = {}
    for batch in schedule.batches:
        for row in range(len(batch)):
            dsts, srcs = ([schedule.places.place(c) for c in side[row]] for side in (batch.dst, batch.src))
            move = Move(dsts, srcs, int(batch.count[row]), int(batch.by[row]))
            out.setdefault(batch.round, []).append((move, batch.channel))
    return [out[number] for number in sorted(out)]


def assembled(collective: Collective, name: str, rounds: Rounds, scratch_chunks: int = 0) -> Schedule:
    """The schedule of these moves. Raises ScheduleError for what a generator could not yield either."""
    batches = []
    for number, moves in enumerate(rounds):
        for move, channel in moves:
            batch = encode(move, collective, number, None)
            if batch is not None:
                batches.append(replace(batch, channel=channel))
    first = collective.input_chunks + collective.output_chunks
    last = max((int((b.count + x.max(axis=1) // collective.nranks).max()) for b in batches for x in (b.dst, b.src)), default=0)
    return Schedule(collective, name, tuple(batches), max(scratch_chunks, last - first))


def redirected(rng: random.Random, schedule: Schedule, place: Any, how: str) -> Any:
    """A place on another rank, in another chunk, or in another buffer (chunks one too far are among them)."""
    rank, buffer, chunk = (int(place[0]), place[1], int(place[2]))
    c = schedule.collective
    sizes = {"input": c.input_chunks, "output": c.output_chunks, "scratch": schedule.scratch_chunks + 1}
    if how == "rank":
        return (rng.choice([r for r in range(c.nranks) if r != rank]), buffer, chunk)
    if how == "chunk":
        return (rank, buffer, rng.choice([k for k in range(-1, sizes[buffer] + 1) if k != chunk]))
    other = rng.choice([b for b in BUFFERS if b != buffer])
    return (rank, other, rng.randrange(sizes[other]))


def change_move(rng: random.Random, schedule: Schedule, kind: str) -> tuple[str, Rounds] | None:
    """One mutation of a schedule's moves, or None where there is nothing to change so."""
    rounds = rounds_of(schedule)
    at = rng.choice([(i, j) for i, moves in enumerate(rounds) for j in range(len(moves))])
    move, channel = rounds[at[0]][at[1]]
    text = f"{move} of round {at[0]}"
    name, _, how = kind.partition(" ")
    rest = [m for j, m in enumerate(rounds[at[0]]) if j != at[1]]
    if name == "drop":
        rounds[at[0]] = rest
        return f"drop {text}", rounds
    if name == "duplicate":
        later = rng.randrange(at[0], len(rounds) + 1)
        if later == len(rounds):
            rounds.append([])
        rounds[later] = [*rounds[later], (move, channel)]
        return f"do {text} again in round {later}", rounds
    if name == "reorder":
        rounds[at[0]] = rest
        if how == "alone":  # to a round of its own
            to = rng.randrange(len(rounds) + 1)
            rounds.insert(to, [(move, channel)])
        else:
            to = rng.choice([i for i in range(-1, len(rounds) + 1) if i != at[0]])
            rounds = [[], *rounds, []]
            rounds[to + 1] = [*rounds[to + 1], (move, channel)]
        return f"{text} goes to round {to} {how}", rounds
    changed = change_places(rng, schedule, move, name, how)
    if changed is None:
        return None
    rounds[at[0]][at[1]] = (changed, channel)
    return f"{text} becomes {changed}", rounds


def change_places(rng: random.Random, schedule: Schedule, move: Move, name: str, how: str) -> Move | None:
    """A move with one destination or source changed."""
    dsts, srcs = list(move.dsts), list(move.srcs)
    j = rng.randrange(len(srcs))
    match name:
        case "redirect":
            i = rng.randrange(len(dsts))
            dsts[i] = redirected(rng, schedule, dsts[i], how)
        case "source-drop" if len(srcs) > 1:
            del srcs[j]
        case "source-duplicate":
            srcs.insert(rng.randrange(len(srcs) + 1), srcs[j])
        case "source-redirect":
            srcs[j] = redirected(rng, schedule, srcs[j], how)
        case "source-reorder" if len(srcs) > 1:
            k = rng.choice([k for k in range(len(srcs)) if k != j])
            srcs[j], srcs[k] = srcs[k], srcs[j]
        case _:
            return None
    return replace(move, dsts=dsts, srcs=srcs)


MOVE_TYPES = (
    "drop",
    "duplicate",
    "redirect rank",
    "redirect chunk",
    "redirect buffer",
    "reorder joined",
    "reorder alone",
    "source-drop",
    "source-duplicate",
    "source-redirect rank",
    "source-redirect chunk",
    "source-redirect buffer",
    "source-reorder",
)


# ---------------------------------------------------------------- streams


@dataclass
class Instruction:
    """One row of Streams with lists in it."""

    opcode: int
    dst: list[int]
    src: list[int]
    waits: list[tuple[int, int]]
    run: tuple[int, int, int, int]  # count, part, part_step, move


def instructions(streams: Streams) -> list[list[Instruction]]:
    """The instructions of every stream."""
    s = streams

    def part(ptr: np.ndarray, column: np.ndarray, i: int) -> list[int]:
        return column[ptr[i] : ptr[i + 1]].tolist()

    out = []
    for start, stop in pairwise(s.start.tolist()):
        rows = []
        for i in range(start, stop):
            waits = list(zip(part(s.wait_ptr, s.wait_stream, i), part(s.wait_ptr, s.wait_value, i), strict=True))
            run = (int(s.count[i]), int(s.part[i]), int(s.part_step[i]), int(s.move[i]))
            rows.append(Instruction(int(s.opcode[i]), part(s.dst_ptr, s.dst, i), part(s.src_ptr, s.src, i), waits, run))
        out.append(rows)
    return out


def packed(streams: Streams, rows: list[list[Instruction]]) -> Streams:
    """Streams of these instructions."""
    flat = [i for stream in rows for i in stream]

    def pointers(lengths: list[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

    def column(values: list[int]) -> np.ndarray:
        return np.array(values, np.int32)

    count, part, step, move = (column([i.run[k] for i in flat]) for k in range(4))
    return replace(
        streams,
        start=pointers([len(s) for s in rows]),
        opcode=np.array([i.opcode for i in flat], np.int8),
        dst_ptr=pointers([len(i.dst) for i in flat]),
        dst=column([c for i in flat for c in i.dst]),
        src_ptr=pointers([len(i.src) for i in flat]),
        src=column([c for i in flat for c in i.src]),
        count=count,
        part=part,
        part_step=step,
        move=move,
        wait_ptr=pointers([len(i.waits) for i in flat]),
        wait_stream=column([w[0] for i in flat for w in i.waits]),
        wait_value=column([w[1] for i in flat for w in i.waits]),
    )


def change_streams(rng: random.Random, streams: Streams, kind: str) -> tuple[str, Streams] | None:
    """One mutation of lowered streams, or None where there is nothing to change so."""
    rows = instructions(streams)
    name, _, how = kind.partition(" ")
    if how.endswith("everywhere"):
        change = _change_all_ranks
    else:
        change = {"wait": _change_wait, "swap": _swap, "place": _change_place, "part": _change_part, "sources": _reorder}[name]
    what = change(rng, streams, rows, how)
    return None if what is None else (what, packed(streams, rows))


def _change_wait(rng: random.Random, streams: Streams, rows: list[list[Instruction]], how: str) -> str | None:
    edge = how == "drop-edge"  # a wait of LEAVE, of ENTER or for ENTER
    found = [
        (s, i, k)
        for s, stream in enumerate(rows)
        for i, row in enumerate(stream)
        for k, (other, value) in enumerate(row.waits)
        if not edge or row.opcode != Opcode.COMBINE or rows[other][value - 1].opcode == Opcode.ENTER
    ]
    if not found:
        return None
    s, i, k = rng.choice(found)
    other, value = rows[s][i].waits[k]
    text = f"instruction {i} of stream {s}: wait for stream {other} ≥ {value}"
    if how.startswith("drop"):
        del rows[s][i].waits[k]
        return f"{text} dropped"
    if how == "raise":
        new = value + rng.randrange(1, streams.span + 1)
    else:
        new = value - 1 if how == "by-one" else rng.randrange(-streams.span, value)
    rows[s][i].waits[k] = (other, new)
    return f"{text} becomes ≥ {new}"


def _change_all_ranks(rng: random.Random, streams: Streams, rows: list[list[Instruction]], how: str) -> str | None:
    """The same change on every rank: checks that look at one rank for all must see it too."""
    p, channels = streams.schedule.nranks, streams.schedule.channels
    found = [(s, i, k) for s in range(channels) for i, row in enumerate(rows[s]) for k in range(len(row.waits))]
    if not found:
        return None
    s, i, k = rng.choice(found)
    other, value = rows[s][i].waits[k]
    lower = rng.randrange(-streams.span, value)
    # A ring looks alike from all ranks by rotation, recursive doubling by exclusive or.
    turned = [(rank * channels + s, (other + rank * channels) % (p * channels)) for rank in range(p)]
    mirrored = [(rank * channels + s, (rank ^ (other // channels)) * channels + other % channels) for rank in range(p)]
    for pairs in (turned, mirrored):
        if all(t < len(rows) and i < len(rows[own]) and (t, value) in rows[own][i].waits for own, t in pairs):
            break
    else:
        return None
    for own, theirs in pairs:
        at = rows[own][i].waits.index((theirs, value))
        rows[own][i].waits[at : at + 1] = [] if how.startswith("drop") else [(theirs, lower)]
    change = "dropped" if how.startswith("drop") else f"becomes ≥ {lower}"
    return f"instruction {i} of channel {s} of every rank: wait for stream {other} (from rank 0) ≥ {value} {change}"


def _swap(rng: random.Random, streams: Streams, rows: list[list[Instruction]], how: str) -> str | None:
    s = rng.randrange(len(rows))
    gates = [i for i, row in enumerate(rows[s]) if row.opcode != Opcode.COMBINE]
    others = [i for i, row in enumerate(rows[s]) if row.opcode == Opcode.COMBINE]
    if how == "gate":  # ENTER or LEAVE with another
        if not gates or not others:
            return None
        i, j = rng.choice(gates), rng.choice(others)
    elif len(others) < 2:
        return None
    else:
        i, j = rng.sample(others, 2)
    rows[s][i], rows[s][j] = rows[s][j], rows[s][i]
    return f"instructions {i} and {j} of stream {s} swapped"


def _change_place(rng: random.Random, streams: Streams, rows: list[list[Instruction]], how: str) -> str | None:
    found = [(s, i) for s, stream in enumerate(rows) for i, row in enumerate(stream) if row.opcode == Opcode.COMBINE]
    if not found:
        return None
    s, i = rng.choice(found)
    side = rows[s][i].dst if how == "destination" else rows[s][i].src
    k = rng.randrange(len(side))
    places = streams.schedule.places
    choices = [c for c in range(places.size - (rows[s][i].run[0] - 1) * streams.schedule.nranks) if c != side[k]]
    old, side[k] = side[k], rng.choice(choices)
    return f"instruction {i} of stream {s}: {how} {places.place(old)} becomes {places.place(side[k])}"


def _reorder(rng: random.Random, streams: Streams, rows: list[list[Instruction]], how: str) -> str | None:
    """Another order of the sources of one instruction: in sums of three and more other bits, and the same sum."""
    found = [(s, i) for s, stream in enumerate(rows) for i, row in enumerate(stream) if len(set(row.src)) > 1]
    if not found:
        return None
    s, i = rng.choice(found)
    src, before = rows[s][i].src, list(rows[s][i].src)
    while src == before:
        rng.shuffle(src)
    return f"instruction {i} of stream {s}: sources {before} become {src}"


def _change_part(rng: random.Random, streams: Streams, rows: list[list[Instruction]], how: str) -> str | None:
    parts = streams.schedule.collective.parts
    found = [(s, i) for s, stream in enumerate(rows) for i, row in enumerate(stream) if row.opcode == Opcode.COMBINE]
    if parts == 1 or not found:
        return None
    s, i = rng.choice(found)
    count, part, step, move = rows[s][i].run
    rows[s][i].run = (count, (part + rng.randrange(1, parts)) % parts, step, move)
    return f"instruction {i} of stream {s}: part {part} becomes {rows[s][i].run[1]}"


STREAM_TYPES = (
    "wait drop",
    "wait by-one",
    "wait lower",
    "wait raise",
    "wait drop-edge",
    "wait drop everywhere",
    "wait lower everywhere",
    "swap combines",
    "swap gate",
    "place destination",
    "place source",
    "sources reorder",
    "part",
)
