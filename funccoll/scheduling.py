"""From the collectives of a program to their schedules: which algorithm each has, and the proved schedule of it."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any

from .errors import ScheduleError, at_source
from .ir import Equation, Program
from .schedules.registry import Algorithm, find
from .schedules.schedule import Schedule, build

__all__ = ["Schedules", "check_algorithms", "choose", "digest", "schedules_of"]

Schedules = Mapping[Equation, Schedule]
"""The schedule of each collective of a program, in program order."""


def check_algorithms(program: Program) -> None:
    """Raise ScheduleError, at the collective's line, where the user names an algorithm that cannot be had."""
    for eqn in program.collectives():
        if eqn.params["algorithm"] is not None:
            with at_source(eqn.source):
                find(eqn.primitive.name, eqn.params["algorithm"], eqn.params["size"])


def choose(eqn: Equation) -> str:
    """The algorithm for a collective when the user names none."""
    return build(eqn.primitive.name, eqn.params["size"]).algorithm


def schedules_of(program: Program) -> dict[Equation, Schedule]:
    """The proved schedules of all collectives; every one has its algorithm by now.

    Raises ScheduleError for a schedule that is wrong, at the line of the move, with a note which collective it is for.
    """
    return {eqn: _schedule(eqn, program.axis_sizes) for eqn in program.collectives()}


def _schedule(eqn: Equation, axis_sizes: Mapping[str, int]) -> Schedule:
    kind, params = eqn.primitive.name, eqn.params
    with at_source(eqn.source):
        found = find(kind, params["algorithm"], params["size"])
        given = {"root": params.get("root", 0), "pairs": params.get("pairs", ()), "levels": _levels(found, eqn, axis_sizes)}
        try:
            return _proved(found, params["size"], **given)
        except ScheduleError as error:
            error.add_note(f"in the schedule of {kind}, algorithm {found.name!r}, called at {eqn.source}")
            raise


def _levels(found: Algorithm, eqn: Equation, axis_sizes: Mapping[str, int]) -> tuple[int, int] | None:
    """Hosts and ranks per host of a collective over several axes: the first one is the hosts'."""
    sizes = [axis_sizes[a] for a in eqn.axes()]
    return (sizes[0], math.prod(sizes[1:])) if "levels" in found.options and len(sizes) > 1 else None


@functools.lru_cache(maxsize=256)
def _proved(found: Algorithm, nranks: int, **given: Any) -> Schedule:
    """Built and proved once for each algorithm *object*: one that was defined anew under its name is another."""
    schedule = build(found.kind, nranks, found.name, **given)
    schedule.prove()
    return schedule


@functools.lru_cache(maxsize=256)
def digest(schedule: Schedule) -> str:
    """sha256 of a schedule's moves: equal where they are equal, whoever built it."""
    found = hashlib.sha256(repr(schedule.collective).encode())
    for batch in schedule.batches:
        found.update(repr((batch.dst.shape, batch.src.shape, batch.channel, batch.round)).encode())
        for column in (batch.dst, batch.src, batch.count, batch.by):
            found.update(column.tobytes())
    return found.hexdigest()
