"""Schedules as algorithms: a schedule that was read from a file gets a name, for programs to use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from ..errors import ScheduleError
from .collective import BUFFERS
from .moves import Batch, Move, mirrored
from .registry import Algorithm, add
from .runs import expand
from .schedule import Schedule

__all__ = ["register"]


def register(schedule: Schedule, name: str | None = None) -> str:
    """Make a schedule an algorithm of its collective.

    Your program uses it like any other, `fc.all_reduce(x, "data", algorithm="mine")`, on meshes with the schedule's number of
    ranks, root and pairs. `build` makes it with as many channels as you ask for. The cost model may choose it, too. It replaces
    a schedule of the same name that you registered before.

    Args:
        schedule: A schedule, such as `from_json` or `from_msccl_xml` returns.
        name: The algorithm's name, by default the schedule's own.

    Returns:
        The name.

    Raises:
        ScheduleError: If the schedule's proof fails, or another algorithm has the name.

    Example:
        >>> text = fc.schedules.build("all_gather", 4, "ring").to_json()
        >>> print(fc.schedules.register(fc.schedules.from_json(text), "from_file"))
        from_file
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"register takes a Schedule, such as from_msccl_xml(path), not {schedule!r:.60}.")
    name = schedule.algorithm if name is None else name
    if not isinstance(name, str) or not name:
        raise ScheduleError(f"name={name!r:.60} of a registered schedule must be a string that is not empty.")
    schedule.prove()
    c = schedule.collective
    function = _generator(_one_channel(schedule))  # in rank order: `build` turns it around for reverse
    add(Algorithm(c.kind, name, function, c.parts, schedule=schedule))
    return name


def _generator(schedule: Schedule) -> Any:
    c, p = schedule.collective, schedule.nranks

    def rounds(nranks: int) -> Iterator[list[Move]]:
        for _, same in groupby(schedule.batches, key=lambda b: b.round):
            yield [move for batch in same for move in _moves(batch, schedule)]

    def rooted(nranks: int, root: int) -> Iterator[list[Move]]:
        yield from rounds(nranks)

    def paired(nranks: int, pairs: Any) -> Iterator[list[Move]]:
        if tuple(pairs) != c.pairs:
            raise ScheduleError(f"this schedule of {c.kind} was made for pairs={list(c.pairs)}, not {list(pairs)}.")
        yield from rounds(p)

    function = rooted if c.meaning.rooted else paired if c.meaning.takes_pairs else rounds
    function.__doc__ = f"A schedule that was registered: {schedule!r}."
    return function


def _moves(batch: Batch, schedule: Schedule) -> Iterator[Move]:
    """Yield a batch as moves of arrays, one for each combination of buffers."""
    p, places = schedule.nranks, schedule.places
    firsts = np.array([places.first_row(b) for b in BUFFERS])
    codes = np.concatenate([batch.dst, batch.src], axis=1).astype(np.int64)
    buffers = places.buffer_of(codes)
    for combination in np.unique(buffers, axis=0):
        rows = (buffers == combination).all(axis=1)
        columns = [
            (codes[rows, i] % p, BUFFERS[b], codes[rows, i] // p - firsts[b]) for i, b in enumerate(combination.tolist())
        ]
        split = batch.dst.shape[1]
        yield Move(columns[:split], columns[split:], batch.count[rows], batch.by[rows])


def _one_channel(schedule: Schedule) -> Schedule:
    """Return the same moves, with the chunks of all channels as those of one, and a reversed scan in rank order."""
    c = schedule.collective
    if c.reverse:
        batches = tuple([mirrored(batch, c.nranks) for batch in schedule.batches])
        schedule = replace(schedule, collective=replace(c, reverse=False), batches=batches)
        c = schedule.collective
    if c.channels == 1:
        return schedule
    p = c.nranks
    whole = replace(c, chunks=c.parts, channels=1)
    rows = np.arange(schedule.places.rows)
    first = 0
    for n in (c.input_chunks, c.output_chunks):
        own = slice(first, first + n)
        rows[own] = first + c.blocks_of_rows[own] * c.parts + c.parts_of_rows[own]
        first += n
    batches = []
    for batch in schedule.batches:
        dst, src, row = expand(batch, p)
        dst, src = ((rows[x // p] * p + x % p).astype(x.dtype) for x in (dst, src))
        batches.append(Batch(dst, src, np.ones(len(row), np.int32), batch.by[row], 0, batch.round, batch.source))
    return Schedule(whole, schedule.algorithm, tuple(batches), schedule.scratch_chunks)
