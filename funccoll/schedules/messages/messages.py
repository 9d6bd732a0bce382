"""Messages: a schedule as rounds of nonblocking sends and receives, for transports without shared memory (MPI, NCCL)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ScheduleError
from ..assign_rounds import assign_rounds
from ..collective import check_rank
from ..columns import is_integer, leaves_buffer, not_column, not_writable
from ..moves import Batch, Places
from ..proof.prove import check_against_proof
from ..proof.symbolic import SymbolicExecutor
from ..streams.verify import wrong_parts

if TYPE_CHECKING:
    from ..schedule import Schedule

__all__ = ["Combines", "Messages", "Transfers", "to_messages"]


@dataclass(frozen=True, eq=False)
class Transfers:
    """One side of all messages, as columns, ordered by round and rank.

    Row i: in round[i], `rank` sends to (or receives from) `peer` the run of `count` chunks at its own
    `place`, the c-th of which has the length of part `part + c * part_step` of a block. Between two ranks, the k-th send of
    a round meets the k-th receive of that round.
    """

    round: np.ndarray
    rank: np.ndarray
    peer: np.ndarray
    place: np.ndarray
    count: np.ndarray
    part: np.ndarray
    part_step: np.ndarray

    def __len__(self) -> int:
        return len(self.round)


@dataclass(frozen=True, eq=False)
class Combines:
    """Local folds of each rank, done when the messages of a round have arrived; round 0 is before the first message.

    Row i: `rank` sets its places dst[dst_ptr[i]:dst_ptr[i + 1]] to the left fold of its places
    src[src_ptr[i]:src_ptr[i + 1]]; rows of one round are done in the order of `step`. Runs and parts as in Transfers.
    """

    round: np.ndarray
    step: np.ndarray
    rank: np.ndarray
    dst_ptr: np.ndarray
    dst: np.ndarray
    src_ptr: np.ndarray
    src: np.ndarray
    count: np.ndarray
    part: np.ndarray
    part_step: np.ndarray

    def __len__(self) -> int:
        return len(self.round)


@dataclass(frozen=True, eq=False)
class Messages:
    """A schedule in `nrounds` rounds of messages. Made by `schedule.messages()`.

    In round t (from 1) every rank posts its receives and sends of the round, waits until all are done, and then does
    its combines of that round. Places are numbered as the schedule's, with `staging` more scratch chunks on each rank
    for operands of combines.
    """

    schedule: Schedule
    nrounds: int
    staging: int
    sends: Transfers
    receives: Transfers
    combines: Combines

    @cached_property
    def places(self) -> Places:
        """The numbering of the places in the columns."""
        return Places(self.schedule.collective, self.schedule.scratch_chunks + self.staging)

    def verify(self) -> Messages:
        """Check the messages on their own, without any buffering; returns self. The result is kept.

        Every send meets one receive of the same round and length; nothing is received into a place that is sent from
        or received into in that round; ranks touch only their own places and do not write to inputs; and the values are
        the collective's, combined in the order of the schedule's proof. With every round complete on its own, no order of
        progress can deadlock. Raises ScheduleError.
        """
        return self._verified

    @cached_property
    def _verified(self) -> Messages:
        self._check_columns()
        self._check_order()
        self._check_own_places()
        name = f"{self.schedule.algorithm} in messages"
        proof = self.schedule.prove()
        executor = SymbolicExecutor(self.places, name, proof.nodes.extended())
        for _, together in groupby(self._batches(), key=lambda found: found[0].round):
            together = list(together)
            for batch, part, step in together:
                self._check_parts(executor, batch, part, step)
            executor.round([batch for batch, _, _ in together])
        check_against_proof(executor, proof, name)
        return self

    def matched(self) -> tuple[np.ndarray, np.ndarray]:
        """(row in sends, row in receives) of every message. Raises ScheduleError for one without its other side."""
        s, r = self.sends, self.receives
        order_s = np.lexsort((s.peer, s.rank, s.round))
        order_r = np.lexsort((r.rank, r.peer, r.round))
        out = np.stack([s.round, s.rank, s.peer])[:, order_s]
        into = np.stack([r.round, r.peer, r.rank])[:, order_r]
        least = min(len(s), len(r))
        differs = np.append((out[:, :least] != into[:, :least]).any(axis=0), len(s) != len(r))
        if differs.any():
            i = int(np.argmax(differs))
            # The smaller key has no partner: everything before it is matched.
            sent = i < len(s) and (i >= len(r) or tuple(out[:, i]) < tuple(into[:, i]))
            row = int(order_s[i] if sent else order_r[i])
            self._unmatched(s if sent else r, row, "send" if sent else "receive")
        for name in ("count", "part", "part_step"):
            wrong = getattr(s, name)[order_s] != getattr(r, name)[order_r]
            if wrong.any():
                i = int(np.argmax(wrong))
                self._unequal(int(order_s[i]), int(order_r[i]))
        return order_s, order_r

    def _batches(self) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
        """The messages as rounds of copies, and the combines as rounds of moves after them; with their parts."""
        s, r = self.matched()
        rounds = self.sends.round[s]
        c = self.combines
        number = 0
        for t in range(self.nrounds + 1):
            low, high = np.searchsorted(rounds, [t, t + 1])
            if high > low:
                sent, into = s[low:high], r[low:high]
                dst, src = self.receives.place[into][:, None], self.sends.place[sent][:, None]
                batch = Batch(dst, src, self.sends.count[sent], self.receives.rank[into], 0, number, None)
                yield batch, self.sends.part[sent], self.sends.part_step[sent]
                number += 1
            low, high = np.searchsorted(c.round, [t, t + 1])
            for step in np.unique(c.step[low:high]):
                yield from self._combining(low + np.flatnonzero(c.step[low:high] == step), number)
                number += 1

    def _combining(self, rows: np.ndarray, number: int) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
        """Combines as batches, one for each number of destinations and sources."""
        c = self.combines
        shape = np.stack([np.diff(c.dst_ptr)[rows], np.diff(c.src_ptr)[rows]], axis=1)
        for m, k in np.unique(shape, axis=0):
            of = rows[(shape == (m, k)).all(axis=1)]
            dst = c.dst[c.dst_ptr[of][:, None] + np.arange(m)]
            src = c.src[c.src_ptr[of][:, None] + np.arange(k)]
            yield Batch(dst, src, c.count[of], c.rank[of], 0, number, None), c.part[of], c.part_step[of]

    def _check_parts(self, executor: SymbolicExecutor, batch: Batch, part: np.ndarray, step: np.ndarray) -> None:
        """Refuse rows whose parts are not those of the chunks that they read."""
        row, place = wrong_parts(executor, batch, part, step)
        if row >= 0:
            raise self._error(
                f"{self.places.place(place)} is taken for part {part[row]} of a block, and it holds another part, which "
                "may have another length."
            )

    def _check_columns(self) -> None:
        """Refuse columns that no executor can read."""
        for name, least in (("nrounds", 0), ("staging", 0)):
            if not is_integer(getattr(self, name), least):
                raise self._error(f"{name} is {getattr(self, name)!r}, and must be an integer, at least {least}.")
        for what in ("sends", "receives", "combines"):
            table = getattr(self, what)
            columns = {f.name: getattr(table, f.name) for f in fields(table)}
            fault = not_column(columns.items())
            for side in ("dst", "src") if what == "combines" and not fault else ():
                ptr, codes = columns.pop(f"{side}_ptr"), columns.pop(side)
                whole = len(ptr) == len(table) + 1 and ptr[0] == 0 and ptr[-1] == len(codes)
                if not whole or (np.diff(ptr) < 1).any():
                    fault = f"{side}_ptr does not cut its column, with at least one place for each row"
            if not fault and any(len(column) != len(table) for column in columns.values()):
                fault = "columns have different lengths"
            if fault:
                raise self._error(f"in its {what} {fault}.")

    def _check_order(self) -> None:
        """Refuse rows that are not in the order of execution."""
        c = self.combines
        columns = (("sends", self.sends.round, 1), ("receives", self.receives.round, 1), ("combines", c.round, 0))
        for what, rounds, first in columns:
            known = (rounds >= first) & (rounds <= self.nrounds)
            if not known.all():
                raise self._error(f"{what} of round {rounds[~known][0]}, and rounds are {first} to {self.nrounds}.")
            if (np.diff(rounds) < 0).any():
                raise self._error(f"its {what} are not in the order of their rounds.")
        if (np.lexsort((c.step, c.round)) != np.arange(len(c))).any():
            raise self._error("its combines are not in the order of their rounds and steps.")

    def _check_own_places(self) -> None:
        """Refuse places of other ranks, and writes to inputs and to outputs that a rank does not have."""
        collective, p, c = self.schedule.collective, self.schedule.nranks, self.combines
        writers, readers = np.repeat(c.rank, np.diff(c.dst_ptr)), np.repeat(c.rank, np.diff(c.src_ptr))
        lengths = np.repeat(c.count, np.diff(c.dst_ptr)), np.repeat(c.count, np.diff(c.src_ptr))
        sides = [
            ("sends from", self.sends.place, self.sends.rank, self.sends.count, False),
            ("receives into", self.receives.place, self.receives.rank, self.receives.count, True),
            ("combines into", c.dst, writers, lengths[0], True), ("combines from", c.src, readers, lengths[1], False),
        ]  # fmt: skip
        for what, codes, ranks, count, writes in sides:
            absent = leaves_buffer(self.places, codes, count)
            foreign = absent | (codes % p != ranks)
            refused = foreign | (not_writable(collective, codes) if writes else False)
            if not refused.any():
                continue
            i = int(np.argmax(refused))
            why = "a rank has only its own memory" if foreign[i] else "an input is only read, and no other rank has this output"
            place = f"{count[i]} chunk(s) from place {codes[i]}" if absent[i] else self.places.place(codes[i])
            raise self._error(f"rank {ranks[i]} {what} {place}: {why}.")

    def _unmatched(self, side: Transfers, row: int, what: str) -> None:
        other, verb = ("receive", "sends to") if what == "send" else ("send", "receives from")
        raise self._error(
            f"in round {side.round[row]} rank {side.rank[row]} {verb} rank {side.peer[row]}, and that rank has no {other} for "
            f"it in this round: it would wait forever. (The place is {self.places.place(side.place[row])}.)"
        )

    def _unequal(self, s: int, r: int) -> None:
        side = self.sends
        ends = ((side, s), (self.receives, r))
        lengths = [f"{t.count[i]} chunk(s) of part {t.part[i]} (step {t.part_step[i]})" for t, i in ends]
        raise self._error(
            f"in round {side.round[s]} rank {side.rank[s]} sends {lengths[0]} from {self.places.place(side.place[s])} to rank "
            f"{side.peer[s]}, which expects {lengths[1]} there: sends and receives of a pair of ranks meet in their order."
        )

    def _error(self, what: str) -> ScheduleError:
        return ScheduleError(f"messages of {self.schedule.algorithm} for {self.schedule.collective}: {what}")

    def __repr__(self) -> str:
        s = self.schedule
        busiest = 0
        if len(self.sends):
            busiest = int(np.unique(np.stack([self.sends.round, self.sends.rank]), axis=1, return_counts=True)[1].max())

        def several(n: int, what: str) -> str:
            return f"{n:,} {what}{'s' if n != 1 else ''}"

        return (
            f"<Messages of {s.algorithm} for {s.collective}: {several(self.nrounds, 'round')}, "
            f"{several(len(self.sends), 'message')} (a rank sends at most {busiest} in a round), "
            f"{several(len(self.combines), 'local combine')}, {several(self.staging, 'staging chunk')} per rank>"
        )

    def text(self, rank: int | None = None) -> str:
        """One rank's rounds as text (None: those of all ranks)."""
        p = self.schedule.nranks
        if rank is None:
            return "\n".join(f"rank {r}\n{self.text(r)}" for r in range(p))
        check_rank(rank, p)
        lines = []
        for t in range(self.nrounds + 1):
            for side, word in ((self.sends, "send {} to {}"), (self.receives, "receive {} from {}")):
                for i in np.flatnonzero((side.round == t) & (side.rank == rank)):
                    lines.append(f"round {t}: " + word.format(self._run(side.place[i], side.count[i]), side.peer[i]))
            c = self.combines
            for i in np.flatnonzero((c.round == t) & (c.rank == rank)):
                dst, src = c.dst[c.dst_ptr[i] : c.dst_ptr[i + 1]], c.src[c.src_ptr[i] : c.src_ptr[i + 1]]
                sides = [", ".join(self._run(x, c.count[i]) for x in codes) for codes in (dst, src)]
                lines.append(f"round {t}: {sides[0]} := {sides[1]}")
        return "\n".join(lines)

    def _run(self, code: int, count: int) -> str:
        _, buffer, chunk = self.places.place(code)
        return f"{buffer}[{chunk}{f':{chunk + count}' if count > 1 else ''}]"


def to_messages(schedule: Schedule) -> Messages:
    """A schedule as rounds of messages.

    A copy is a message from the source's rank to the destination's. A combine receives its remote sources in its own
    round, and sends to its remote destinations in the next. The moves of one round of the algorithm stay together; a
    later round's join the open round of messages if they are independent of it and use none of its ports (a rank that
    sends and a rank that receives). Local copies and combines take no round.
    """
    assigned = assign_rounds(schedule, range(schedule.nranks))
    flow, work, p = assigned.flow, assigned.work, schedule.nranks
    run = (flow.chunks, flow.part, flow.part_step)
    order = np.lexsort((flow.src % p, flow.round))
    sends = Transfers(*(x[order] for x in (flow.round, flow.src % p, flow.dst % p, flow.src, *run)))
    order = np.lexsort((flow.dst % p, flow.round))
    receives = Transfers(*(x[order] for x in (flow.round, flow.dst % p, flow.src % p, flow.dst, *run)))
    dst_ptr, src_ptr = (np.concatenate([[0], np.cumsum(n)]) for n in (work.dsts, work.srcs))
    combines = Combines(
        work.round, work.step, work.rank, dst_ptr, work.dst, src_ptr, work.src, work.chunks, work.part, work.part_step
    )
    return Messages(schedule, assigned.nrounds, assigned.staging, sends, receives, combines)
