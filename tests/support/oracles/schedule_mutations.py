"""Single mutations of schedules and of streams, judged by every interleaving and by funccoll's own checks.

`python -m tests.support.oracles.schedule_mutations [how many]` makes them and prints the table.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import funccoll.schedules as fs
from funccoll.errors import ScheduleError
from funccoll.schedules import Schedule
from funccoll.schedules.collective import Collective
from funccoll.schedules.moves import Move
from funccoll.schedules.streams.streams import Streams
from tests.support.oracles.schedule_changes import (
    MOVE_TYPES,
    STREAM_TYPES,
    Rounds,
    assembled,
    change_move,
    change_streams,
)
from tests.support.oracles.schedule_judge import Verdict, judge_schedule, judge_streams
from tests.support.oracles.schedule_oracle import variants


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


# ---------------------------------------------------------------- the campaign


@cache
def cases() -> tuple[tuple[str, Schedule], ...]:
    """Every algorithm for 2 and 3 ranks, with 2 chunks where they are pipelined, in two channels for 2 ranks.

    Besides some for 4 ranks, which the verifier takes for alike by exclusive or, and some that do more than they must.
    """
    out: dict[str, Schedule] = {}
    for p in (2, 3):
        for kind, name, options in variants(p):
            if options.get("reverse") and name != "blelloch":
                continue  # the same moves, of ranks with other numbers
            if options.pop("chunks", None) or fs.registry.find(kind, name, p).options & {"chunks"}:
                options["chunks"] = 2
            for channels in (1, 2) if p == 2 else (1,):
                schedule = fs.build(kind, p, name, channels=channels, **options)
                if schedule.batches and (channels == 1 or len(schedule.streams()) <= 24):
                    out[f"{kind} {name} p={p} channels={channels} {options}"] = schedule
    special = [*_with_slack(), *(fs.build(kind, 4, name) for kind, name in FOUR)]
    return (*out.items(), *((f"{s.kind} {s.algorithm} p={s.nranks}", s) for s in special))


FOUR = (
    ("all_reduce", "recursive_doubling"),
    ("all_gather", "recursive_doubling"),
    ("reduce_scatter", "recursive_halving"),
    ("all_gather", "bruck"),
)


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
        *((t, _mutate_schedule) for t in MOVE_TYPES),
        *((t, _mutate_streams) for t in STREAM_TYPES),
    ]
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
    (
        "it mixes chunks that are different parts of the data",
        "mixes chunks whose lengths may differ; what comes of it is not used",
    ),
    ("only copies", "combines in a collective that only copies; what comes of it is not used"),
    ("a scan combines in the order of ranks", "commutes operands of a scan, which must be right for ops that do not commute"),
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
        if _outcome(r) == "harmful, accepted" and r.mutant.type not in ("part", "swap gate"):
            print("\nACCEPTED:", r.mutant.case, "|", r.mutant.what, "|", r.verdict)


if __name__ == "__main__":
    main()
