"""Eager streams in any order of instructions."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from funccoll.kernels.cpu import combine_address
from funccoll.kernels.kernel_context import BUDGET_SPENT, FINISHED, MISMATCH, WAITING, WORD
from funccoll.schedules.collective import KINDS
from funccoll.schedules.streams.instructions import Opcode, disassemble
from funccoll.transports.plans.control_block import MAILBOXES, MAILBOXES_ON_SHARED_CORES, ControlBlock
from tests.support.eager_schedules import simple
from tests.support.groups import in_groups
from tests.support.oracles.schedule_oracle import expected
from tests.support.ranks.kernel_ranks import MEMORY, Rank, RankMemory

pytestmark = pytest.mark.covers("collectives")

I4 = np.dtype(np.int32)
COPIED = [kind for kind in KINDS if kind != "barrier"]
SIMPLE = {
    "all_reduce": "one_shot",
    "all_gather": "direct",
    "reduce_scatter": "direct",
    "all_to_all": "direct",
    "permute": "direct",
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), "flat"),
    **dict.fromkeys(("inclusive_scan", "exclusive_scan"), "one_shot"),
}
SMALL, LARGE = ControlBlock(0, 2, mailboxes=MAILBOXES).rings


class Job:
    """Ranks in one process that call the same collectives, each as far as it can."""

    def __init__(self, p, programs, seed, mailboxes=MAILBOXES):
        """`programs` has for each rank the collectives that it has, as (kind, elements, root)."""
        self.p, self.rng = p, np.random.default_rng(seed)
        memory = mmap.mmap(-1, MEMORY)
        combine_address("sum", I4)
        self.ranks, self.schedules = [], []
        for rank, program in enumerate(programs):
            shared = RankMemory(rank, memory)
            made = [simple(kind, p, root) for kind, _, root in program]
            self.schedules.append(made)
            self.ranks.append(
                [
                    Rank(rank, shared, schedule, elements, I4, "sum", identity=f"{kind} {elements} {root}", mailboxes=mailboxes)
                    for schedule, (kind, elements, root) in zip(made, program, strict=True)
                ]
            )
        self.numbers, self.refused, self.most_ahead = [0] * p, {}, 0
        self.current = [self.begin(rank, 0) for rank in range(p)]

    def values(self, number, rank, length):
        return np.random.default_rng([number, rank]).integers(-1000, 1000, length).astype(np.int32)

    def begin(self, rank, number):
        call = self.ranks[rank][number % len(self.ranks[rank])]
        call.input[:], call.output[:] = self.values(number, rank, call.input.size), -99
        return call

    def run(self, calls, slow=()):
        """Run this many calls on all ranks; `slow` ranks seldom get a turn. Returns the ranks that ended with MISMATCH."""
        vain, weights = 0, np.array([0.02 if rank in slow else 1.0 for rank in range(self.p)])
        while min(self.numbers) < calls and len(self.refused) < self.p:
            left = [r for r in range(self.p) if self.numbers[r] < calls and r not in self.refused]
            if self.refused and vain > 200:
                break  # the others would be told of it
            rank = int(self.rng.choice(left, p=weights[left] / weights[left].sum()))
            vain = 0 if self.step(rank, int(self.rng.integers(1, 9))) else vain + 1
            assert vain < 20_000, f"all wait: {self.numbers}"
        return self.refused

    def run_ahead(self, calls, order):
        """Run this many calls on all ranks: the next step is always that of the first in `order` that need not wait."""
        while min(self.numbers) < calls and not self.refused:
            left = [rank for rank in order if self.numbers[rank] < calls]
            assert any(self.step(rank, 1) for rank in left), f"all wait: {self.numbers}"
        return self.refused

    def step(self, rank, instructions):
        """Run this many instructions of a rank's call, and begin its next one at the end; False where it only waits."""
        call = self.current[rank]
        before = int(call.context[WORD.pc])
        status = call.advance(instructions)
        if status == MISMATCH:
            self.refused[rank] = int(call.context[WORD.peer]) - 10
        elif status == FINISHED:
            self.check(rank, self.numbers[rank], call)
            self.numbers[rank] += 1
            self.most_ahead = max(self.most_ahead, self.numbers[rank] - min(self.numbers))
            self.current[rank] = self.begin(rank, self.numbers[rank])
        else:
            assert status in (BUDGET_SPENT, WAITING), status
        return status != WAITING or int(call.context[WORD.pc]) != before

    def check(self, rank, number, call):
        schedule = self.schedules[rank][number % len(self.ranks[rank])]
        inputs = [self.values(number, r, call.input.size) for r in range(self.p)]
        want = expected(schedule.collective, inputs, "sum")[rank]
        if want is not None:
            np.testing.assert_array_equal(call.output, np.asarray(want).reshape(-1), err_msg=f"{number}: {schedule}")
        call.input[:] = 77  # it is the caller's again


def some_program(p, rng, one_way):
    """A few collectives; with `one_way` such in a row of which some ranks wait for none."""
    kinds = ["broadcast", "scatter"] if one_way and rng.integers(2) else ["reduce", "gather"] if one_way else COPIED
    roots = [rng.integers(p)] if one_way else range(p)
    drawn = rng.choice(kinds, rng.integers(1, 5))
    return [(str(kind), int(rng.choice([1, 3, 20, 150])), int(rng.choice(roots))) for kind in drawn]


@pytest.mark.parametrize(("p", "seed", "one_way"), [(2, 0, False), (3, 1, False), (4, 2, False), (2, 3, False), (3, 5, True)])
def test_calls_are_right_in_any_order_of_instructions(p, seed, one_way):
    rng = np.random.default_rng([p, seed])
    job = Job(p, [some_program(p, rng, one_way)] * p, seed)
    assert job.run(100, slow=[int(rng.integers(p))] if seed % 2 else ()) == {}


@pytest.mark.parametrize("calls", [pytest.param(200, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("p", "seed", "one_way"), [(2 + seed % 4, seed, (seed + seed // 4) % 4 < 2) for seed in range(4, 20)])
def test_many_calls_are_right_in_any_order_of_instructions(p, seed, one_way, calls):
    """Mailboxes are used again after 64 calls, those of large arrays after 32."""
    rng = np.random.default_rng([p, seed])
    job = Job(p, [some_program(p, rng, one_way)] * p, seed)
    assert job.run(calls, slow=[int(rng.integers(p))] if seed % 2 else ()) == {}


ONE_WAY = {"broadcast": "root", "scatter": "root", "reduce": "others", "gather": "others"}
"""By kind, the ranks that wait for none in a row of calls with one root."""
RINGS = [(MAILBOXES, 0, 4), (MAILBOXES, 1, 200), *((MAILBOXES_ON_SHARED_CORES, i, n) for i, n in enumerate((4, 200, 1000)))]
"""Mailboxes, the number of a ring among them, and elements that are too many for the ring before."""
ON_RINGS = [
    pytest.param(kind, *ring, marks=pytest.mark.slow if (j - 2 * i) % len(RINGS) > 1 else ())
    for i, kind in enumerate(ONE_WAY)
    for j, ring in enumerate(RINGS)
]
"""Each kind on all rings; two of them, in turn, are not slow."""


def one_way(kind, mailboxes, number, elements):
    """A job of calls with root 1, the order in which those that wait for none come first, and the ring of its mailboxes."""
    elements = elements // 3 if kind == "scatter" else elements  # of each block
    job = Job(3, [[(kind, elements, 1)]] * 3, 0, mailboxes)
    order = [1, 0, 2] if ONE_WAY[kind] == "root" else [0, 2, 1]
    return job, order, ControlBlock(4096, 3, mailboxes=mailboxes).rings[number]


def find_other_mailboxes(job, change):
    """Let all ranks' mailboxes be found among `change(mailboxes)` of them."""
    for calls in job.ranks:
        for call in calls:
            for i in disassemble(call.code.tolist()):
                if i.opcode == Opcode.FIND_MAILBOX:
                    Opcode.FIND_MAILBOX.write(call.code, i.pc, "mailboxes", change(i.operands["mailboxes"]))


@pytest.mark.parametrize(("kind", "mailboxes", "number", "elements"), ON_RINGS)
def test_a_rank_that_waits_for_none_is_as_many_calls_ahead_as_there_are_mailboxes(kind, mailboxes, number, elements):
    """And what the others read in the mailboxes, as late as they can, is what was written there."""
    job, order, ring = one_way(kind, mailboxes, number, elements)
    assert job.run_ahead(2 * ring.mailboxes + 5, order) == {}
    assert job.most_ahead == ring.mailboxes


@pytest.mark.parametrize(("kind", "mailboxes", "number", "elements"), ON_RINGS)
def test_a_ring_with_fewer_mailboxes_than_are_kept_is_noticed(kind, mailboxes, number, elements):
    """The same with a RESERVE that is satisfied too early: mailboxes are overwritten before they are read."""
    job, order, ring = one_way(kind, mailboxes, number, elements)
    find_other_mailboxes(job, lambda mailboxes: mailboxes // 2)
    with pytest.raises(AssertionError):
        assert job.run_ahead(2 * ring.mailboxes + 5, order) == {}


@pytest.mark.parametrize(
    ("program", "mailboxes"),
    [
        ([("all_reduce", 4, 0)], 2),
        ([("all_reduce", 4, 0), ("broadcast", 4, 1), ("broadcast", 4, 0)], 4),
    ],
)
def test_few_mailboxes_are_enough_where_ranks_wait_for_all_now_and_then(program, mailboxes):
    """So no simulation of such a program tells how many mailboxes there are."""
    job = Job(3, [program] * 3, 0)
    find_other_mailboxes(job, lambda _: mailboxes)
    assert job.run_ahead(100, [1, 0, 2]) == {}


@pytest.mark.parametrize("p", [2, 3])
@in_groups(
    ("one", "other"),
    [
        (("broadcast", 4, 0), ("reduce", 4, 0)),
        (("broadcast", 4, 0), ("scatter", 4, 0)),
        (("gather", 4, 0), ("reduce", 4, 0)),
        (("all_reduce", 4, 0), ("all_reduce", 5, 0)),
        (("all_reduce", 4, 0), ("all_reduce", 400, 0)),
        (("broadcast", 4, 0), ("broadcast", 4, 1)),
        (("reduce", 200, 0), ("gather", 200, 0)),
        (("broadcast", 4, 0), ("broadcast", 900, 0)),
        (("reduce", 4, 0), ("reduce", 200, 0)),
    ],
)
@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_that_differ_are_refused_soon(one, other, p, odd):
    """One rank calls something else once. Nothing waits for some of these: they are found when a mailbox is used again."""
    for seed in range(2):
        usual = [one] * 7
        programs = [list(usual) for _ in range(p)]
        programs[odd][3] = other
        job = Job(p, programs, seed)
        job.check = lambda *_: None  # the results of the call that differs are wrong
        refused = job.run(1000)
        assert refused and all(odd in (rank, peer) or peer in refused for rank, peer in refused.items()), refused
        assert max(job.numbers) <= 4 + SMALL.mailboxes + 1
