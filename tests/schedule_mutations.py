"""Single mutations of schedules and of streams, judged by every interleaving and by funccoll's own checks.

`python tests/schedule_mutations.py [how many]` makes them and prints the table.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from schedule_judge import Verdict, judge_schedule, judge_streams
from schedule_oracle import variants

import funccoll.schedules as fs
from funccoll.errors import ScheduleError
from funccoll.schedules import Schedule
from funccoll.schedules.collective import Collective
from funccoll.schedules.moves import BUFFERS, Move, encode
from funccoll.schedules.streams import COMBINE, ENTER, Streams

Rounds = list[list[tuple[Move, int]]]  # moves with their channels


@dataclass(frozen=True)
class Mutant:
    """One mutation: of which schedule, of what type, in words, and what came out (None when it cannot be built)."""

    case: str
    type: str
    what: str
    built: Schedule | Streams | None
    refused: str = ""


@dataclass(frozen=True)
class Result:
    """What the judge and the checks say; `error` is the checks' message, "" when they accept."""

    mutant: Mutant
    verdict: Verdict
    error: str


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
    "drop", "duplicate", "redirect rank", "redirect chunk", "redirect buffer", "reorder joined", "reorder alone",
    "source-drop", "source-duplicate", "source-redirect rank", "source-redirect chunk", "source-redirect buffer",
    "source-reorder",
)  # fmt: skip


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
        streams, start=pointers([len(s) for s in rows]), opcode=np.array([i.opcode for i in flat], np.int8),
        dst_ptr=pointers([len(i.dst) for i in flat]), dst=column([c for i in flat for c in i.dst]),
        src_ptr=pointers([len(i.src) for i in flat]), src=column([c for i in flat for c in i.src]),
        count=count, part=part, part_step=step, move=move, wait_ptr=pointers([len(i.waits) for i in flat]),
        wait_stream=column([w[0] for i in flat for w in i.waits]), wait_value=column([w[1] for i in flat for w in i.waits]),
    )  # fmt: skip


def change_streams(rng: random.Random, streams: Streams, kind: str) -> tuple[str, Streams] | None:
    """One mutation of lowered streams, or None where there is nothing to change so."""
    rows = instructions(streams)
    name, _, how = kind.partition(" ")
    if how.endswith("everywhere"):
        change = _change_all_ranks
    else:
        change = {"wait": _change_wait, "swap": _swap, "place": _change_place, "part": _change_part}[name]
    what = change(rng, streams, rows, how)
    return None if what is None else (what, packed(streams, rows))


def _change_wait(rng: random.Random, streams: Streams, rows: list[list[Instruction]], how: str) -> str | None:
    edge = how == "drop-edge"  # a wait of LEAVE, of ENTER or for ENTER
    found = [
        (s, i, k)
        for s, stream in enumerate(rows)
        for i, row in enumerate(stream)
        for k, (other, value) in enumerate(row.waits)
        if not edge or row.opcode != COMBINE or rows[other][value - 1].opcode == ENTER
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
    gates = [i for i, row in enumerate(rows[s]) if row.opcode != COMBINE]
    others = [i for i, row in enumerate(rows[s]) if row.opcode == COMBINE]
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
    found = [(s, i) for s, stream in enumerate(rows) for i, row in enumerate(stream) if row.opcode == COMBINE]
    if not found:
        return None
    s, i = rng.choice(found)
    side = rows[s][i].dst if how == "destination" else rows[s][i].src
    k = rng.randrange(len(side))
    places = streams.schedule.places
    choices = [c for c in range(places.size - (rows[s][i].run[0] - 1) * streams.schedule.nranks) if c != side[k]]
    old, side[k] = side[k], rng.choice(choices)
    return f"instruction {i} of stream {s}: {how} {places.place(old)} becomes {places.place(side[k])}"


def _change_part(rng: random.Random, streams: Streams, rows: list[list[Instruction]], how: str) -> str | None:
    parts = streams.schedule.collective.parts
    found = [(s, i) for s, stream in enumerate(rows) for i, row in enumerate(stream) if row.opcode == COMBINE]
    if parts == 1 or not found:
        return None
    s, i = rng.choice(found)
    count, part, step, move = rows[s][i].run
    rows[s][i].run = (count, (part + rng.randrange(1, parts)) % parts, step, move)
    return f"instruction {i} of stream {s}: part {part} becomes {rows[s][i].run[1]}"


STREAM_TYPES = (
    "wait drop", "wait by-one", "wait lower", "wait raise", "wait drop-edge", "wait drop everywhere", "wait lower everywhere",
    "swap combines", "swap gate", "place destination", "place source", "part",
)  # fmt: skip


# ---------------------------------------------------------------- the campaign


@cache
def cases() -> tuple[tuple[str, Schedule], ...]:
    """Every algorithm for 2 and 3 ranks, with 2 chunks where they are pipelined, in two channels for 2 ranks.

    Besides some for 4 ranks, which the verifier takes for alike by exclusive or, and some that do more than they must.
    """
    out: dict[str, Schedule] = {}
    for p in (2, 3):
        for kind, name, options in variants(p):
            if options.pop("chunks", None) or fs.registry.find(kind, name, p).options & {"chunks"}:
                options["chunks"] = 2
            for channels in (1, 2) if p == 2 else (1,):
                schedule = fs.build(kind, p, name, channels=channels, **options)
                if schedule.batches and (channels == 1 or len(schedule.streams()) <= 24):
                    out[f"{kind} {name} p={p} channels={channels} {options}"] = schedule
    special = [*_with_slack(), *(fs.build(kind, 4, name) for kind, name in FOUR)]
    return (*out.items(), *((f"{s.kind} {s.algorithm} p={s.nranks}", s) for s in special))


FOUR = (
    ("all_reduce", "recursive_doubling"), ("all_gather", "recursive_doubling"), ("reduce_scatter", "recursive_halving"),
    ("all_gather", "bruck"),
)  # fmt: skip


def _with_slack() -> list[Schedule]:
    """Schedules that do more than they must, so that some mutations of them do no harm."""

    def place(text: str) -> tuple[int, str, int]:
        buffer, chunk, rank = text[0], text[1], text[3]
        return int(rank), {"i": "input", "o": "output", "s": "scratch"}[buffer], int(chunk)

    def rounds(text: str) -> Rounds:
        out: Rounds = []
        for line in text.strip().splitlines():
            sides = [[[place(x) for x in side.split()] for side in move.split("=")] for move in line.split(";")]
            out.append([(Move(dsts, srcs, by=dsts[0][0]), 0) for dsts, srcs in sides])
        return out

    detour = """
        o0@0 = i0@0; s0@1 = i0@0
        s1@2 = s0@1; s2@1 = s0@1
        o0@1 = s0@1; o0@2 = s0@1
        s3@2 = s1@2"""
    sums = """
        s0@0 = i0@0 i0@1; s0@2 = i0@2; s1@1 = i0@1 i0@2
        o0@0 = s0@0 s0@2; s2@1 = s1@1 i0@0
        o0@1 o0@2 = o0@0; s3@0 = s2@1"""
    parts = """
        s0@0 = i0@0 i0@1; s1@0 = i1@0 i1@1
        o0@0 = s0@0; o1@0 = s1@0; s2@1 = s0@0; s3@1 = s1@0
        o0@1 = o0@0; o1@1 = o1@0; s4@1 = s2@1 s2@1; s5@1 = s3@1"""
    root = """
        s0@1 = i0@1 i0@2
        o0@0 = i0@0 s0@1; s1@2 = s0@1
        s2@2 = s1@2; s2@1 = s0@1 s0@1"""
    return [
        assembled(Collective("reduce", 3), "root", rounds(root)),
        assembled(Collective("broadcast", 3), "detour", rounds(detour)),
        assembled(Collective("all_reduce", 3), "sums", rounds(sums)),
        assembled(Collective("all_reduce", 2, chunks=2), "parts", rounds(parts)),
    ]


def mutants(count: int, seed: int = 0) -> Iterator[Mutant]:
    """That many different mutations, types and schedules in turn."""
    rng = random.Random(seed)
    seen: set[tuple[str, str]] = set()
    all_types: list[tuple[str, Callable]] = [
        *((t, _mutate_schedule) for t in MOVE_TYPES), *((t, _mutate_streams) for t in STREAM_TYPES)
    ]  # fmt: skip
    for turn in range(20 * count):  # rarer types run out of new ones
        kind, mutate = all_types[turn % len(all_types)]
        case, schedule = rng.choice(cases()[-8:] if rng.random() < 0.15 else cases())
        mutant = mutate(rng, case, schedule, kind)
        if mutant is not None and (case, mutant.what) not in seen:
            seen.add((case, mutant.what))
            yield mutant
        if len(seen) == count:
            return


def _mutate_schedule(rng: random.Random, case: str, schedule: Schedule, kind: str) -> Mutant | None:
    changed = change_move(rng, schedule, kind)
    if changed is None:
        return None
    try:
        built = assembled(schedule.collective, schedule.algorithm, changed[1], schedule.scratch_chunks)
        return Mutant(case, kind, changed[0], built)
    except ScheduleError as error:
        return Mutant(case, kind, changed[0], None, str(error))


def _mutate_streams(rng: random.Random, case: str, schedule: Schedule, kind: str) -> Mutant | None:
    changed = change_streams(rng, schedule.streams(), kind)
    return None if changed is None else Mutant(case, kind, *changed)


def examine(mutant: Mutant) -> Result:
    """Judge a mutant, and ask funccoll's checks."""
    built = mutant.built
    if built is None:  # it names a place that does not exist, which no one could run
        return Result(mutant, Verdict("no such place"), mutant.refused)
    verdict = judge_schedule(built) if isinstance(built, Schedule) else judge_streams(built)
    try:
        if isinstance(built, Schedule):
            built.prove()
            built = built.streams()
        built.verify()
    except ScheduleError as error:
        return Result(mutant, verdict, str(error))
    if isinstance(mutant.built, Schedule) and not verdict:
        verdict = judge_streams(built)  # what was lowered from a harmless schedule must be harmless
    return Result(mutant, verdict, "")


REASONS = (
    ("which nothing has written before", "reads a place that was never written; what comes of it is not used"),
    ("different parts of the data meet", "mixes chunks whose lengths may differ; what comes of it is not used"),
    ("only copies", "combines in a collective that only copies; what comes of it is not used"),
    ("names part", "names a wrong element range; what comes of it is not used"),
)
"""Words in a message, and the class of harmless mutants that are refused so."""


def reason(result: Result) -> str:
    """Why a harmless mutant is refused, as a class."""
    for words, name in REASONS:
        if words in result.error:
            return name
    return "unexplained"


def table(results: list[Result]) -> str:
    """Counts by type of mutation, and the classes of harmless ones that are refused."""
    types = [*MOVE_TYPES, *STREAM_TYPES]
    columns = ("harmful, rejected", "harmful, accepted", "harmless, accepted", "harmless, rejected")
    counts = Counter((r.mutant.type, _outcome(r)) for r in results)
    lines = [f"{'mutation':24}" + "".join(f"{c:>22}" for c in columns)]
    for t in types:
        lines.append(f"{t:24}" + "".join(f"{counts[t, c]:>22,}" for c in columns))
    lines.append(f"{'all':24}" + "".join(f"{sum(counts[t, c] for t in types):>22,}" for c in columns))
    harms = Counter(r.verdict.harm for r in results if r.verdict)
    lines += ["", "harmful by: " + ", ".join(f"{h} {n:,}" for h, n in harms.most_common())]
    classes = Counter((r.mutant.type, reason(r)) for r in results if _outcome(r) == columns[3])
    lines += ["", "harmless and rejected:"] if classes else []
    lines += [f"  {n:5,}  {t}: {why}" for (t, why), n in sorted(classes.items())]
    return "\n".join(lines)


def _outcome(result: Result) -> str:
    return f"{'harmful' if result.verdict else 'harmless'}, {'rejected' if result.error else 'accepted'}"


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    begin = time.perf_counter()
    results = [examine(m) for m in mutants(count)]
    print(f"{len(results):,} mutations of {len(cases())} schedules in {time.perf_counter() - begin:.1f} s\n")
    print(table(results))
    for r in results:
        if _outcome(r) == "harmful, accepted" and r.mutant.type not in ("part","swap gate"):
            print("\nACCEPTED:", r.mutant.case, "|", r.mutant.what, "|", r.verdict)


if __name__ == "__main__":
    main()
