"""Single mutations: every harmful one is refused, and of the harmless ones only those of explained classes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from funccoll.errors import ScheduleError
from funccoll.schedules.streams.interpret import interpret
from funccoll.schedules.streams.streams import Streams
from tests.support.oracles.schedule_changes import MOVE_TYPES, STREAM_TYPES
from tests.support.oracles.schedule_judge import judge_schedule, judge_streams
from tests.support.oracles.schedule_mutations import Mutant, Result, cases, examine, mutants, reason, table
from tests.support.oracles.schedule_oracle import check, make_inputs
from tests.support.oracles.schedule_outcomes import every_outcome, right_outcome

pytestmark = pytest.mark.covers("schedule-mutations")


def campaign(count: int, seed: int) -> list[Result]:
    results = [examine(m) for m in mutants(count, seed)]
    print(f"\n{len(results):,} mutations of {len(cases())} schedules\n\n{table(results)}")
    accepted = [r for r in results if r.verdict and not r.error]
    assert not accepted, f"harmful and accepted: {accepted[:3]}"
    unexplained = [r for r in results if r.error and not r.verdict and reason(r) == "unexplained"]
    assert not unexplained, f"harmless and rejected: {unexplained[:3]}"
    counts = Counter(r.mutant.type for r in results)
    assert min(counts[t] for t in (*MOVE_TYPES, *STREAM_TYPES)) >= min(50, count // 120), counts
    # Harmless ones that are accepted show that the checks do not refuse everything.
    assert sum(not r.verdict and not r.error for r in results) > count // 20
    return results


def test_every_harmful_mutation_is_refused():
    assert len(campaign(150, seed=0)) == 150


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(3_000, marks=pytest.mark.slow),
        pytest.param(12_000, marks=pytest.mark.exhaustive),
    ],
)
def test_every_harmful_one_of_many_mutations_is_refused(count):
    assert len(campaign(count, seed=1)) == count


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_not_mutated_is_harmless_and_accepted(every):
    for case, schedule in list(cases())[::every]:
        schedule.prove()
        schedule.streams().verify()
        assert not judge_schedule(schedule), case
        assert not judge_streams(schedule.streams()), case


def small_streams(count: int, seed: int, instructions: int) -> list[Mutant]:
    """Mutated streams of two ranks with few instructions and single chunks."""
    out = []
    for m in mutants(count, seed):
        s = m.built
        if isinstance(s, Streams) and s.schedule.nranks == 2 and len(s) <= instructions and (s.count == 1).all():
            if s.schedule.kind != "barrier" and m.type != "part":  # there a chunk is one number, and contributions count
                out.append(m)
    return out


@pytest.mark.parametrize(
    ("count", "instructions"),
    [
        (400, 7),
        pytest.param(2_000, 8, marks=pytest.mark.slow),
        pytest.param(10_000, 10, marks=pytest.mark.exhaustive),
    ],
)
def test_the_judge_agrees_with_every_outcome(count, instructions):
    """The judge leans on a theorem; the slow search over states with memory does not."""
    verdicts = Counter()
    for mutant in small_streams(count, 2, instructions):
        streams = mutant.built
        assert isinstance(streams, Streams)
        outcomes, verdict = every_outcome(streams), judge_streams(streams)
        verdicts[verdict.harm] += 1
        if not verdict or verdict.harm == "order":  # integers do not see the order
            assert outcomes == {right_outcome(streams)}, mutant
        elif verdict.harm == "deadlock":
            assert outcomes == {"deadlock"}, mutant
        elif verdict.harm == "wrong":
            assert len(outcomes) == 1 and outcomes != {right_outcome(streams)}, mutant
        else:  # some interleaving shows it: whoever reads or writes out of turn meets garbage
            assert outcomes != {right_outcome(streams)}, mutant
    assert {"", "race", "caller", "wrong"} <= set(verdicts), verdicts


@pytest.mark.parametrize("count", [250, pytest.param(1_500, marks=pytest.mark.slow)])
def test_the_interpreter_agrees_with_the_judge(count):
    """Harmless streams compute the right thing in every order, deadlocks are found in every order."""
    rng = np.random.default_rng(0)
    seen = Counter()
    for mutant in mutants(count, seed=3):
        streams = mutant.built
        if not isinstance(streams, Streams) or mutant.type == "part":
            continue
        c = streams.schedule.collective
        op = "or" if c.kind == "barrier" else "sum"
        harm = judge_streams(streams).harm
        if harm not in ("", "deadlock"):
            continue
        seen[harm] += 1
        shape = (c.input_blocks * c.parts * 8,)
        for seed in range(4):
            inputs = [make_inputs(rng, c.nranks, shape, np.int64) for _ in range(2)]
            if harm:
                with pytest.raises(ScheduleError, match="deadlock"):
                    interpret(streams, inputs, op=op, seed=seed)
                continue
            for given, outputs in zip(inputs, interpret(streams, inputs, op=op, seed=seed), strict=True):
                check(c, given, outputs, op)
    assert seen[""] > 4 and seen["deadlock"] > 0, seen


@pytest.mark.parametrize("count", [120, pytest.param(600, marks=pytest.mark.slow)])
def test_the_interpreter_shows_races(count):
    """Among 60 orders of a race some give wrong numbers: reads meet garbage, as nothing keeps the writer away."""
    rng = np.random.default_rng(0)
    shown = total = 0
    for mutant in mutants(count, seed=4):
        streams = mutant.built
        if not isinstance(streams, Streams) or judge_streams(streams).harm != "race" or mutant.type == "part":
            continue
        c = streams.schedule.collective
        op = "or" if c.kind == "barrier" else "sum"
        inputs = [make_inputs(rng, c.nranks, (c.input_blocks * c.parts * 8,), np.int64) for _ in range(2)]
        total += 1
        shown += any(not _right(streams, inputs, op, seed) for seed in range(60))
    assert total > count // 12 and shown > 0.9 * total, (shown, total)


def _right(streams, inputs, op, seed) -> bool:
    c = streams.schedule.collective
    try:
        for given, outputs in zip(inputs, interpret(streams, inputs, op=op, seed=seed), strict=True):
            check(c, given, outputs, op)
    except (AssertionError, ScheduleError):
        return False
    return True
