"""Results of a simulation: when each instruction began and ended, and what never happened."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...core.display import html_table, seconds_text, titled
from ...core.timeline import ACTIVITIES, Timeline
from .topology import Topology

if TYPE_CHECKING:
    from ...draw.drawing import Drawing
    from ..schedule import Schedule
    from ..streams.streams import Streams

__all__ = ["Event", "Simulation"]


class Event(NamedTuple):
    """An instruction that was executed. Times are in seconds from the beginning."""

    stream: int
    rank: int
    channel: int
    instruction: int
    """Its number in the columns of `streams`."""
    start: float
    end: float
    move: int
    """The row in the concatenation of the schedule's batches; -1 for enter and leave."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """The timeline of one execution: the result of `simulate`."""

    schedule: Schedule
    streams: Streams
    topology: Topology
    nbytes: int
    start: np.ndarray
    """float64[instructions]: the time at which each instruction of `streams` began, in seconds. NaN if it never did."""
    end: np.ndarray
    """float64[instructions]: the time at which it was done. NaN if it never was."""
    needs_lost: np.ndarray
    """int64: the instructions that need a lost link."""

    @cached_property
    def finish(self) -> np.ndarray:
        """float64[ranks]: the time at which each rank left the collective, in seconds. inf if it never does."""
        last = self.streams.start[1 :: self.schedule.channels].astype(np.int64) - 1
        return np.nan_to_num(self.end[last], nan=math.inf)

    @property
    def seconds(self) -> float:
        """The time at which the last rank left. inf if a rank never does."""
        return float(self.finish.max())

    @cached_property
    def impossible(self) -> list[str]:
        """The instructions that need a lost link, as text: executing rank, places, file:line of the move."""
        return [self.streams.describe(int(i)) for i in self.needs_lost]

    @property
    def blocked(self) -> int:
        """The number of other instructions that never finish, because they wait for those."""
        return int(np.isnan(self.end).sum()) - len(self.needs_lost)

    @property
    def stuck_ranks(self) -> list[int]:
        """The ranks that never leave."""
        return np.flatnonzero(np.isinf(self.finish)).tolist()

    def events(self) -> Iterator[Event]:
        """Executed instructions, stream by stream."""
        channels = self.schedule.channels
        bounds = self.streams.start.tolist()
        for stream, (first, stop) in enumerate(pairwise(bounds)):
            rank, channel = divmod(stream, channels)
            for i in range(first, stop):
                if not math.isnan(self.end[i]):
                    times = float(self.start[i]), float(self.end[i])
                    yield Event(stream, rank, channel, i, *times, int(self.streams.move[i]))

    __iter__ = events

    def timeline(self) -> Timeline:
        """Return the execution as a Timeline: for each rank its waits, copies ("move") and combines ("reduce").

        A copy or combine lasts from the beginning of its instruction until it is done, including the wait for a port. A wait is
        the time before it. Its peer is the rank that ended the wait. What never ended is left out.
        """
        streams, p = self.streams, self.schedule.nranks
        stream, done = streams.stream, ~np.isnan(self.end)
        before = np.where(np.arange(len(stream)) == streams.start[stream], 0.0, np.concatenate([[0.0], self.end[:-1]]))
        works = np.flatnonzero(done & (np.diff(streams.src_ptr) > 0) & (self.end > self.start))
        waits = np.flatnonzero(done & (self.start > before))
        texts = {("wait", ""): 0}
        labels = np.array([texts.setdefault(self._text(int(i)), len(texts)) for i in works], np.int32)
        reads = streams.src[streams.src_ptr[works]] % p
        rank = stream[works] // self.schedule.channels
        columns = (
            (stream[waits], stream[works]),
            (before[waits], self.start[works]),
            (self.start[waits], self.end[works]),
            (
                np.full(len(waits), ACTIVITIES.index("wait")),
                np.where(np.diff(streams.src_ptr)[works] > 1, ACTIVITIES.index("reduce"), ACTIVITIES.index("move")),
            ),
            ([self._waited_for(int(i)) for i in waits], np.where(reads == rank, -1, reads)),
            (np.zeros(len(waits)), labels),
        )
        whose, start, end, activity, peer, text = (np.concatenate(c) for c in columns)
        order = np.lexsort((start, whose))
        ranks, channels = np.divmod(whose[order], self.schedule.channels)
        return Timeline(
            f"{self.schedule.algorithm} for {self.schedule.collective}, {self.nbytes:,} bytes, on {self.topology.name}",
            p,
            ranks.astype(np.int32),
            start[order],
            end[order],
            activity[order].astype(np.int8),
            peer[order].astype(np.int32),
            text[order].astype(np.int32),
            list(texts),
            channels.astype(np.int32),
            "simulated",
        )

    def _text(self, i: int) -> tuple[str, str]:
        """(instruction i in words, file:line of its move)."""
        source = self.streams.source(i)
        where = f" ({source})" if source else ""
        return self.streams.describe(i).partition(": ")[2].removesuffix(where), str(source) if source else ""

    def _waited_for(self, i: int) -> int:
        """The rank whose instruction ended the wait of instruction i."""
        s = self.streams
        span = slice(s.wait_ptr[i], s.wait_ptr[i + 1])
        whose = s.wait_stream[span]
        if not len(whose):
            return -1
        ended = self.end[np.minimum(s.start[whose] + s.wait_value[span], s.start[whose + 1]) - 1]
        return int(whose[int(np.nanargmax(ended))]) // self.schedule.channels

    def draw(self, **options: Any) -> Drawing:
        """Draw what each rank does when, by `fc.draw.timelines`."""
        from ...draw import timelines

        return timelines(self.timeline(), **options)

    def __repr__(self) -> str:
        what = f"{self.schedule.algorithm} for {self.schedule.collective}, {self.nbytes:,} bytes, on {self.topology.name}"
        if not len(self.needs_lost):
            return f"<Simulation {seconds_text(self.seconds)}: {what}; {len(self.end):,} instructions>"
        shown = [f"\n  impossible: {self.streams.describe(int(i))}" for i in self.needs_lost[:5]]
        more = f"\n  ... and {len(self.needs_lost) - 5:,} more" if len(self.needs_lost) > 5 else ""
        return (
            f"<Simulation never ends: {what}; instructions that need a lost link: {len(self.needs_lost):,}, that wait for "
            f"them: {self.blocked:,}; ranks that never leave: {len(self.stuck_ranks):,} of {self.schedule.nranks:,}"
            f"{''.join(shown)}{more}>"
        )

    def _repr_html_(self) -> str:
        slowest = np.argsort(-self.finish, kind="stable")[:16]
        rows = [(str(r), seconds_text(float(self.finish[r]))) for r in slowest]
        head = "leaves" if len(rows) == self.schedule.nranks else f"leaves (the last {len(rows)} of {self.schedule.nranks:,})"
        return titled(repr(self), html_table(("rank", head), rows, right=("rank", head)))
