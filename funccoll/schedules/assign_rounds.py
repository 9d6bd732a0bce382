"""Assignment of moves to rounds of messages.

Messages go between *hosts*: ranks of one host read and write each other's places. If every rank is a host of its own, all data
that move between ranks are messages.

A copy is a message from the source's rank to the destination's. A combine receives its remote sources in its own round, and
sends to its remote destinations in the next. The moves of one round of the algorithm stay together. Those of a later round join
the open round of messages if they are independent of it and use none of its ports (a rank that sends and a rank that receives).
Copies and combines inside a host take no round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .moves import Batch
from .runs import chunks_of_runs, expand, part_steps

if TYPE_CHECKING:
    from .schedule import Schedule

__all__ = ["AssignedRounds", "Flow", "HostWork", "assign_rounds"]


class Flow(NamedTuple):
    """Messages from place to place, as columns. The rank of a place is its remainder by the number of ranks."""

    round: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    chunks: np.ndarray
    part: np.ndarray
    part_step: np.ndarray


class HostWork(NamedTuple):
    """Copies and combines inside hosts, as columns. Row i has the next `dsts[i]` of dst and the next `srcs[i]` of src."""

    round: np.ndarray
    step: np.ndarray
    rank: np.ndarray
    dsts: np.ndarray
    dst: np.ndarray
    srcs: np.ndarray
    src: np.ndarray
    chunks: np.ndarray
    part: np.ndarray
    part_step: np.ndarray


@dataclass(frozen=True)
class AssignedRounds:
    """The moves of a schedule by rounds. Round t has messages and the combines after them, and round 0 has no messages."""

    nrounds: int
    staging: int
    flow: Flow
    work: HostWork


def assign_rounds(schedule: Schedule, hosts: Sequence[int]) -> AssignedRounds:
    """Assign the moves of a schedule to rounds of messages. The schedule must be proved.

    `hosts` has the host of each rank.
    """
    assigner = _RoundAssigner(schedule, hosts)
    for _, batches in groupby(schedule.batches, key=lambda b: b.round):
        assigner.add(list(batches))
    return assigner.finish()


class _MoveRun(NamedTuple):
    """A batch of runs, with the part of each run's first chunk and the step to the next."""

    batch: Batch
    part: np.ndarray
    step: np.ndarray

    def of(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.batch.count[row], self.part[row], self.step[row]


class _RoundAssigner:
    """Takes the rounds of an algorithm in order. `open` is the round of messages that the last one reached.

    A message belongs to a later round than what it reads, and than the last use of what it overwrites. A combine belongs to no
    earlier one, because combines come after messages and run in order.
    """

    def __init__(self, schedule: Schedule, hosts: Sequence[int]):
        self.p = schedule.nranks
        self.host = np.asarray(hosts)
        self.size = schedule.places.size  # places from here on are staging
        parts = schedule.collective.parts_of_rows
        self.written = np.full(self.size, -1, np.int32)  # the last round
        self.read = np.full(self.size, -1, np.int32)
        self.part = np.concatenate([np.repeat(parts, self.p), np.zeros(self.size - len(parts) * self.p, np.int32)])
        self.sent = np.zeros(self.p, np.int32)  # the last round in which each rank sends
        self.received = np.zeros(self.p, np.int32)
        self.open = self.step = 0
        # Staging has two halves, for even and odd rounds: one round may combine what the next sends.
        self.used = np.zeros((2, self.p), np.int64)
        self.half = [0, 0]
        self.flows: list[Flow] = []
        self.works: list[HostWork] = []

    def add(self, batches: Sequence[Batch]) -> None:
        """Assign the moves of one of the algorithm's rounds. They are independent of each other."""
        p, host = self.p, self.host
        self.step += 1
        runs = [self._with_parts(b) for b in batches]
        remote = []  # per batch: rows and columns of the messages before the combine
        for batch, _, _ in runs:
            copies = batch.src.shape[1] == 1
            to = host[batch.dst % p] if copies else host[batch.by][:, None]
            travels = to != host[batch.src % p]
            remote.append(np.nonzero(travels))
        self._open(self._round_for([b for b, _, _ in runs], remote))
        pushes = []
        for run, (row, col) in zip(runs, remote, strict=True):
            batch = run.batch
            if batch.src.shape[1] == 1:
                self._send(batch.src[row, 0], batch.dst[row, col], *run.of(row))
                inside = host[batch.dst % p] == host[batch.src % p]
                row, col = np.nonzero(inside & (batch.dst != batch.src))  # a copy to itself does nothing
                dst = batch.dst[row, col]
                by = np.where(host[batch.by[row]] == host[dst % p], batch.by[row], dst % p)
                self._work(by, np.ones(len(row), int), dst, batch.src[row], *run.of(row))
            else:
                sources = batch.src.astype(np.int64)
                sources[row, col] = self._stage(batch.by[row], batch.count[row])
                self._send(batch.src[row, col], sources[row, col], *run.of(row))
                pushes.append((run, *self._combine(run, sources)))
        if any(len(row) for _, row, _, _ in pushes):
            self._open(self.open + 1)
            for run, row, src, dst in pushes:
                self._send(src, dst, *run.of(row))

    def _with_parts(self, batch: Batch) -> _MoveRun:
        """Return runs with their parts. Runs without a constant step from part to part are cut into single chunks."""
        dst, src, row = expand(batch, self.p)
        part = self.part[src[:, 0]]
        self.part[dst] = part[:, None]
        first, step, regular = part_steps(part, batch.count)
        if regular:
            return _MoveRun(batch, first, step)
        return _MoveRun(replace(batch, dst=dst, src=src, count=np.ones_like(row), by=batch.by[row]), part, np.zeros_like(part))

    def _round_for(self, batches: Sequence[Batch], remote: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
        """Return the open round if the messages are independent of it and use none of its ports, else the next."""
        round, shares_port = self.open, False
        for batch, (row, col) in zip(batches, remote, strict=True):
            if not len(row):
                continue
            copies = batch.src.shape[1] == 1
            src = batch.src[row, 0 if copies else col]
            to = batch.dst[row, col] % self.p if copies else batch.by[row]
            after = self.written[self._chunks(src, batch.count[row])].max()
            if copies:
                over = self._chunks(batch.dst[row, col], batch.count[row])
                after = max(after, self.written[over].max(), self.read[over].max())
            round = max(round, 1, int(after) + 1)
            shares_port |= bool((self.sent[src % self.p] == self.open).any() or (self.received[to] == self.open).any())
        return round + (shares_port and round == self.open)

    def _open(self, round: int) -> None:
        if round > self.open:
            self.open = round
            self.used[round % 2] = 0

    def _stage(self, rank: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Return staging places for runs on these ranks in the open round.

        They are places in one half: `finish` puts the halves one after the other.
        """
        order = np.argsort(rank, kind="stable")
        ordered, length = rank[order], count[order].astype(np.int64)
        before = np.cumsum(length) - length
        new = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
        before -= np.repeat(before[new], np.diff(np.append(np.flatnonzero(new), len(ordered))))
        used = self.used[self.open % 2]
        slot = np.empty(len(rank), np.int64)
        slot[order] = used[ordered] + before
        np.add.at(used, rank, count)
        self.half[self.open % 2] = max(self.half[self.open % 2], int(used.max(initial=0)))
        return self.size + slot * self.p + rank

    def _combine(self, run: _MoveRun, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Combine on the executing ranks. Returns (row in the batch, source, destination) of what is sent on."""
        batch = run.batch
        own = self.host[batch.dst % self.p] == self.host[batch.by][:, None]
        nowhere = ~own.any(axis=1)
        nearest = np.where(batch.dst % self.p == batch.by[:, None], 2, own).argmax(axis=1)
        held = batch.dst[np.arange(len(batch)), nearest].astype(np.int64)
        held[nowhere] = self._stage(batch.by[nowhere], batch.count[nowhere])
        targets = np.concatenate([batch.dst, held[:, None]], axis=1)
        mine = np.concatenate([own, nowhere[:, None]], axis=1)
        self._work(batch.by, mine.sum(axis=1), targets[mine], sources, batch.count, run.part, run.step)
        row, col = np.nonzero(~own)
        return row, held[row], batch.dst[row, col]

    def _send(self, src: np.ndarray, dst: np.ndarray, count: np.ndarray, part: np.ndarray, step: np.ndarray) -> None:
        if not len(src):
            return
        self.sent[src % self.p] = self.received[dst % self.p] = self.open
        self._mark(self.read, src, count)
        self._mark(self.written, dst, count)
        self.flows.append(Flow(np.full(len(src), self.open), src, dst, count, part, step))

    def _work(
        self,
        rank: np.ndarray,
        dsts: np.ndarray,
        dst: np.ndarray,
        src: np.ndarray,
        count: np.ndarray,
        part: np.ndarray,
        step: np.ndarray,
    ) -> None:
        if not len(rank):
            return
        n, k = src.shape
        self._mark(self.read, src.reshape(-1), np.repeat(count, k))
        self._mark(self.written, dst, np.repeat(count, dsts))
        rounds, steps = np.full(n, self.open), np.full(n, self.step)
        self.works.append(HostWork(rounds, steps, rank, dsts, dst, np.full(n, k), src.reshape(-1), count, part, step))

    def _mark(self, last_round: np.ndarray, codes: np.ndarray, count: np.ndarray) -> None:
        own = codes < self.size
        last_round[self._chunks(codes[own], count[own])] = self.open

    def _chunks(self, codes: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Return the places of runs."""
        if (count == 1).all():
            return codes
        run, within = chunks_of_runs(count)
        return codes[run] + within * self.p

    def finish(self) -> AssignedRounds:
        """Return the rounds of all moves."""
        none = np.zeros(0, np.int64)
        flow = Flow(*(np.concatenate(c) for c in zip(*self.flows))) if self.flows else Flow(*[none] * len(Flow._fields))
        columns = [np.concatenate(c) for c in zip(*self.works)] if self.works else [none] * len(HostWork._fields)
        work = HostWork(*columns)
        flow = flow._replace(src=self._final(flow.src, flow.round - 1), dst=self._final(flow.dst, flow.round))
        dst, src = np.repeat(work.round, work.dsts), np.repeat(work.round, work.srcs)
        work = work._replace(dst=self._final(work.dst, dst), src=self._final(work.src, src))
        return AssignedRounds(self.open, sum(self.half), flow, work)

    def _final(self, codes: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """Return places with the odd rounds' half of staging behind that of the even rounds."""
        return codes + np.where((codes >= self.size) & (rounds % 2 == 1), self.half[0] * self.p, 0)
