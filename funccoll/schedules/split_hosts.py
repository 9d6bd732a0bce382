"""A schedule cut at the borders of hosts: every move is a copy from one host to another, or stays inside one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ScheduleError
from .assign_rounds import HostWork, assign_rounds
from .moves import Batch
from .proof.prove import Proof
from .schedule import Schedule

__all__ = ["SplitSchedule", "split_hosts"]


@dataclass(frozen=True, eq=False)
class SplitSchedule(Schedule):
    """A schedule whose moves across hosts are copies of single places, each a message. `split_hosts` makes it.

    The messages of a round are one batch. The moves inside hosts that follow need nothing that comes later.
    """

    hosts: tuple[int, ...] = ()
    """The host of each rank."""
    whole: Schedule | None = None
    """The schedule that it carries out."""

    @property
    def channels(self) -> int:
        """One stream of each rank: the channels of the whole schedule share its rounds of messages."""
        return 1

    @functools.cached_property
    def _proof(self) -> Proof:
        """The proof of the whole schedule. Executing this one must give those results, in that order of combination."""
        assert self.whole is not None
        return self.whole.prove()


def split_hosts(schedule: Schedule, hosts: Sequence[int]) -> SplitSchedule:
    """Cut the moves of a schedule that cross from host to host. `hosts` has the host of each rank.

    A combine first gets the sources on other hosts into scratch, and afterwards sends its result to the destinations on other
    hosts. Rounds are those of `assign_rounds`. Raises ScheduleError for a wrong number of hosts.
    """
    if len(hosts) != schedule.nranks:
        raise ScheduleError(
            f"{schedule!r} cannot be cut at the borders of the hosts {tuple(hosts)}: there must be a host for each rank."
        )
    assigned = assign_rounds(schedule, hosts)
    flow, p, batches = assigned.flow, schedule.nranks, []
    for number in range(assigned.nrounds + 1):
        rows = np.flatnonzero(flow.round == number)
        if len(rows):
            to = (flow.dst[rows] % p).astype(np.int32)
            dst, src = flow.dst[rows][:, None], flow.src[rows][:, None]
            batches.append(Batch(dst, src, flow.chunks[rows], to, 0, len(batches), None))
        batches += _inside(assigned.work, number, len(batches))
    scratch = schedule.scratch_chunks + assigned.staging
    return SplitSchedule(
        schedule.collective, schedule.algorithm, tuple(batches), scratch, schedule.host_map, tuple(hosts), schedule
    )


def _inside(work: HostWork, number: int, first: int) -> Iterator[Batch]:
    """Yield the moves inside hosts of one round, step by step.

    Those with equal numbers of sources and destinations are together.
    """
    dst_ptr, src_ptr = (np.concatenate([[0], np.cumsum(n)]) for n in (work.dsts, work.srcs))
    rows = np.flatnonzero(work.round == number)
    for step in np.unique(work.step[rows]):
        of = rows[work.step[rows] == step]
        shapes = np.stack([work.dsts[of], work.srcs[of]], axis=1)
        for m, k in np.unique(shapes, axis=0):
            some = of[(shapes == (m, k)).all(axis=1)]
            dst = work.dst[dst_ptr[some][:, None] + np.arange(m)]
            src = work.src[src_ptr[some][:, None] + np.arange(k)]
            yield Batch(dst, src, work.chunks[some], work.rank[some].astype(np.int32), 0, first, None)
        first += 1
