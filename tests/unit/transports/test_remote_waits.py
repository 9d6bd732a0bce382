"""Cycles of waits are found where no rank can go on, and nowhere else, in random programs of calls over random groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.schedules.collective import KINDS, REDUCTION, Collective
from funccoll.transports.shm.remote_waits import Progress, Wait, find_cycle

pytestmark = pytest.mark.covers("failures", "host-failures")

RANKS = 4
GROUPS = (0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2), (0, 1, 2, 3)


class Job:
    """Ranks that run calls one after the other, which `calls` has as tags of groups: a call is left when all have come to it.

    The counter of a rank over a group is the number of its calls there that it has entered.
    """

    def __init__(self, calls: list[list[int]]):
        self.calls = [[tag for tag in mine if rank in GROUPS[tag]] for rank, mine in enumerate(calls)]
        self.at = [0] * RANKS
        """By rank, how many calls it has left; it is in the next one if that has begun."""
        self.is_in = [False] * RANKS

    def counter(self, rank: int, tag: int) -> int:
        return self.calls[rank][: self.at[rank] + self.is_in[rank]].count(tag)

    def lacks(self, rank: int) -> list[int]:
        """The ranks that have yet to come to the call in which a rank is."""
        wait = self.wait(rank)
        return [other for other, goal in wait.needs.items() if self.counter(other, wait.tag) < goal] if wait else []

    def can_step(self, rank: int) -> bool:
        return not self.lacks(rank) if self.is_in[rank] else self.at[rank] < len(self.calls[rank])

    def step(self, rank: int) -> None:
        self.at[rank] += self.is_in[rank]
        self.is_in[rank] = not self.is_in[rank]

    def wait(self, rank: int) -> Wait | None:
        """The wait of a rank in its call, or in the last one, of which it may still tell."""
        begun = self.at[rank] + self.is_in[rank]
        if not begun:
            return None
        tag = self.calls[rank][begun - 1]
        others = [other for other in GROUPS[tag] if other != rank]
        goal = self.counter(rank, tag)
        late = [other for other in others if self.counter(other, tag) < goal]
        return Wait((late or others)[0], tag, dict.fromkeys(others, goal))

    def look(self, tag, ranks):
        assert all(rank in GROUPS[tag] for rank in ranks)
        told = {rank: Progress(self.counter(rank, tag), self.wait(rank)).told() for rank in ranks}
        return {rank: Progress.of(answer) for rank, answer in told.items()}

    def cycles(self) -> list[list[int]]:
        waits = {rank: wait for rank in range(RANKS) if (wait := self.wait(rank)) and self.is_in[rank]}
        return [find_cycle(rank, wait, self.look(wait.tag, [wait.rank]), self.look) for rank, wait in waits.items()]


@given(st.lists(st.lists(st.integers(0, len(GROUPS) - 1), max_size=5), min_size=RANKS, max_size=RANKS), st.data())
def test_a_cycle_is_found_where_all_ranks_wait_and_nowhere_else(calls, data):
    job, told = Job(calls), set[int]()
    while able := [rank for rank in range(RANKS) if job.can_step(rank)]:
        for cycle in filter(None, job.cycles()):
            assert all(job.is_in[rank] for rank in cycle)
            told.update(cycle)
        rank = data.draw(st.sampled_from(able))
        assert not (rank in told and job.is_in[rank]), "a rank of a cycle has left its call"
        job.step(rank)
    found = job.cycles()
    if all(job.is_in):
        assert any(found)
    for cycle in filter(None, found):
        for rank, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert following in job.lacks(rank)


@pytest.mark.parametrize("kind", KINDS)
def test_contributors_are_the_ranks_of_the_postcondition(kind):
    for p in (1, 2, 5):
        pairs = tuple((i, (i + 2) % p) for i in range(p - 1)) if kind == "permute" else ()
        collective = Collective(kind, p, root=p - 1 if KINDS[kind].rooted else 0, pairs=pairs, chunks=2)
        rank, _, source, _ = collective.required()
        for mine in range(p):
            sources = set(np.asarray(source)[np.asarray(rank) == mine].tolist())
            ranks = {"inclusive_scan": range(mine + 1), "exclusive_scan": range(mine)}.get(kind, range(p))
            assert set(collective.contributors(mine)) == (set(ranks) if REDUCTION in sources else sources)
