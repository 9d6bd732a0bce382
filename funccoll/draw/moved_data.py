"""The data that a schedule moves between ranks: each chunk's identity, found by running the moves on expressions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ..errors import DrawingError, ScheduleError
from ..schedules.collective import Collective
from ..schedules.moves import Batch
from ..schedules.proof.symbolic import SymbolicExecutor
from ..schedules.runs import expand
from ..schedules.schedule import Schedule

__all__ = ["MovedData", "Transfer", "check_schedule", "columns_between", "data_name", "schedule_title", "transfers"]


_LONG = 90
"""The most characters of a collective in a title."""


class Transfer(NamedTuple):
    """One chunk that moves from one rank to another in a round."""

    round: int
    hop: int
    """1 for the second half of a move if its executing rank is neither its source nor its destination, else 0."""
    halves: bool
    """True if the move consists of two such halves."""
    source: int
    destination: int
    data: int
    """The number of the data that move. Equal data have equal numbers."""
    colour: int
    name: str
    combines: bool
    line: str


class MovedData(NamedTuple):
    """Transfers between ranks and within one, with the names of their colours."""

    between: list[Transfer]
    local: list[Transfer]
    ncolours: int
    names: dict[int, str]
    notes: tuple[str, ...]


def check_schedule(schedule: Schedule, drawing: str) -> None:
    """Raise DrawingError, in the name of a drawing, if `schedule` is not a Schedule."""
    if not isinstance(schedule, Schedule):
        made = "schedules.build(kind, nranks, algorithm) and schedules.select make one"
        raise DrawingError(f"{drawing}() draws a Schedule, not {type(schedule).__name__}: {made}.")


def schedule_title(schedule: Schedule) -> str:
    """Return the collective, the algorithm and the sizes. Many groups are only counted."""
    rounds, parts, what = schedule.nrounds, schedule.collective.parts, str(schedule.collective)
    if len(what) > _LONG and schedule.collective.groups:
        what = f"{replace(schedule.collective, groups=())} in {len(schedule.collective.groups)} groups"
    return (
        f"{what}: {schedule.algorithm}, {rounds} round{'s' if rounds != 1 else ''}, "
        f"{parts} chunk{'s' if parts != 1 else ''} per block"
    )


def transfers(schedule: Schedule) -> MovedData:
    """Return every chunk that a schedule's moves take from rank to rank."""
    between: list[Transfer] = []
    local: list[Transfer] = []
    names = _DataNames(schedule)
    executor: SymbolicExecutor | None = SymbolicExecutor(schedule.places, schedule.algorithm)
    notes: tuple[str, ...] = ()
    for _, group in groupby(schedule.batches, key=lambda b: b.round):
        batches = list(group)
        before = None if executor is None else executor.holds.copy()
        if executor is not None:
            try:
                executor.round(batches)
            except ScheduleError as error:
                executor = before = None
                notes = (f"The schedule is wrong: {error.args[0].splitlines()[0]}", "From there on colours are chunk numbers.")
        after = None if executor is None else executor.holds
        for batch in batches:
            for t in _of_batch(batch, schedule.nranks, names, before, after, executor):
                (local if t.source == t.destination else between).append(t)
    seen = {t.colour: names.colour_name(t.colour) for t in (*between, *local)}
    return MovedData(between, local, max(seen, default=0) + 1, seen, notes)


def _of_batch(
    batch: Batch,
    p: int,
    names: _DataNames,
    before: np.ndarray | None,
    after: np.ndarray | None,
    executor: SymbolicExecutor | None,
) -> list[Transfer]:
    out = []
    dsts, srcs, rows = expand(batch, p)
    line = str(batch.source) if batch.source else ""
    for dst, src, row in zip(dsts.tolist(), srcs.tolist(), rows.tolist(), strict=True):
        by, combines = int(batch.by[row]), len(src) > 1
        incoming = [s for s in src if s % p != by]
        outgoing = [d for d in dst if d % p != by]
        halves = bool(incoming and outgoing)
        for s in incoming:
            what = names.of(s, before, executor)
            out.append(Transfer(batch.round, 0, halves, s % p, by, *what, combines, line))
        for d in outgoing:
            what = names.of(d, after, executor)
            out.append(Transfer(batch.round, int(halves), halves, by, d % p, *what, False, line))
        if not incoming and not outgoing:
            out.append(Transfer(batch.round, 0, False, by, by, *names.of(dst[0], after, executor), combines, line))
    return out


def columns_between(schedule: Schedule) -> Iterator[tuple[int, int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (1 if it is combined, round, from rank, to rank, chunks) of what each batch moves between ranks."""
    p = schedule.nranks
    for batch in schedule.batches:
        several = int(batch.src.shape[1] > 1)
        for peers, outgoing in ((batch.src % p, False), (batch.dst % p, True)):
            row, column = np.nonzero(peers != batch.by[:, None])
            peer, by = peers[row, column], batch.by[row]
            ends = (by, peer) if outgoing else (peer, by)
            yield (0 if outgoing else several), batch.round, *ends, batch.count[row]


def data_name(collective: Collective, rank: int, label: int) -> str:
    """Return the name of a chunk of one rank's input: the rank, and its destination block.

    A root's data have only the chunk, but each group has a root of its own.
    """
    block, part = int(collective.blocks_of_rows[label]), int(collective.parts_of_rows[label])
    if collective.meaning.rooted and collective.kind != "gather" and not collective.groups:
        return str(label)
    name = f"{rank}→{block}" if collective.input_blocks > 1 else str(rank)
    return f"{name}.{part}" if collective.parts > 1 else name


class _DataNames:
    """Numbers, colours and names of data.

    If values are combined, data are a chunk of the input. Else they are the chunk of one rank's input of which they are a copy.
    Colours are chunks if all ranks contribute to one, or one rank has all; else the rank that contributes.
    """

    def __init__(self, schedule: Schedule):
        self.collective = schedule.collective
        self.places = schedule.places
        meaning = self.collective.meaning
        one_root = meaning.rooted and not self.collective.groups
        self.by_rank = (not meaning.reduces and not one_root) or self.collective.kind == "gather"
        self.p = schedule.nranks

    def of(self, code: int, holds: np.ndarray | None, executor: SymbolicExecutor | None) -> tuple[int, int, str]:
        """Return (number, colour, name) of the data that a place holds."""
        if holds is None or executor is None or holds[code] < 0:
            chunk = self.places.place(code).chunk
            return chunk, chunk, str(chunk)
        node = np.array([holds[code]])
        label = max(0, int(executor.expressions.labels(node)[0]))
        if not self.by_rank:
            return label, label, str(label)
        source = int(node[0]) % self.p
        return source * self.collective.input_chunks + label, source, data_name(self.collective, source, label)

    def colour_name(self, colour: int) -> str:
        """Return the text of a colour in the legend."""
        if self.by_rank:
            return f"from rank {colour}"
        return f"chunk {colour}"
