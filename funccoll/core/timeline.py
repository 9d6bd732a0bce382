"""Timelines: the acts of each rank of an execution, simulated or measured, and their form for trace viewers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FunccollError, scope_of
from .display import html_table, seconds_text, text_table, titled

if TYPE_CHECKING:
    import numpy as np

    from ..draw.drawing import Drawing

__all__ = ["ACTIVITIES", "Span", "Timeline"]

ACTIVITIES = ("wait", "move", "reduce", "compute")
"""Acts of a rank: it waits for another rank, copies, combines, or runs other code than communication."""


class Span(NamedTuple):
    """One act of a rank. Times are in seconds from the timeline's beginning."""

    rank: int
    start: float
    end: float
    activity: str
    """One of ACTIVITIES."""
    peer: int
    """The rank that it waits for or reads from; -1 for none."""
    label: str
    source: str
    """The `file:line` of it; empty if there is none."""
    channel: int = 0


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans of time on the ranks of one execution, as columns of equal length in the order of ranks and starts.

    Raise FunccollError if columns do not fit each other, or a span ends before it starts.
    """

    title: str
    nranks: int
    rank: np.ndarray
    """int32[spans]"""
    start: np.ndarray
    """float64[spans]: seconds from the timeline's beginning."""
    end: np.ndarray
    """float64[spans]: seconds, at least `start`."""
    activity: np.ndarray
    """int8[spans]: indices into ACTIVITIES."""
    peer: np.ndarray
    """int32[spans]: the rank that is waited for or read from, or -1."""
    text: np.ndarray
    """int32[spans]: indices into `texts`."""
    texts: Sequence[tuple[str, str]]
    """(label, `file:line`) of the acts, each once."""
    channel: np.ndarray
    """int32[spans]"""
    kind: str = "measured"
    """"measured" or "simulated"."""

    def __post_init__(self) -> None:
        import numpy as np

        columns = (self.rank, self.start, self.end, self.activity, self.peer, self.text, self.channel)
        if len({len(column) for column in columns}) > 1:
            raise FunccollError(f"{self.title}: the columns of a timeline have {[len(c) for c in columns]} entries.")
        limits = (
            ("rank", self.rank, 0, self.nranks),
            ("activity", self.activity, 0, len(ACTIVITIES)),
            ("peer", self.peer, -1, self.nranks),
            ("text", self.text, 0, len(self.texts)),
        )
        for name, column, low, stop in limits:
            if len(column) and not (low <= column.min() and column.max() < stop):
                raise FunccollError(f"{self.title}: a span's {name} is not from {low} to {stop - 1}.")
        if not (np.isfinite(self.start).all() and np.isfinite(self.end).all() and (self.end >= self.start).all()):
            raise FunccollError(f"{self.title}: a span ends before it starts, or has no time.")

    @classmethod
    def of(cls, title: str, nranks: int, spans: Iterable[Span], kind: str = "measured") -> Timeline:
        """Make a timeline of spans in any order."""
        import numpy as np

        ordered = sorted(spans, key=lambda s: (s.rank, s.channel, s.start, s.end))
        texts: dict[tuple[str, str], int] = {}
        numbers = [texts.setdefault((s.label, s.source), len(texts)) for s in ordered]
        columns = list(zip(*ordered, strict=True)) or [()] * len(Span._fields)
        rank, start, end, activity, peer, _, _, channel = columns
        return cls(
            title,
            nranks,
            np.array(rank, np.int32),
            np.array(start, np.float64),
            np.array(end, np.float64),
            np.array([ACTIVITIES.index(a) for a in activity], np.int8),
            np.array(peer, np.int32),
            np.array(numbers, np.int32),
            list(texts),
            np.array(channel, np.int32),
            kind,
        )

    def __len__(self) -> int:
        return len(self.rank)

    def __iter__(self) -> Iterator[Span]:
        columns = (self.rank, self.start, self.end, self.activity, self.peer, self.text, self.channel)
        for rank, start, end, activity, peer, text, channel in zip(*(c.tolist() for c in columns), strict=True):
            label, source = self.texts[text]
            yield Span(rank, start, end, ACTIVITIES[activity], peer, label, source, channel)

    @property
    def seconds(self) -> float:
        """The end of the last span; 0 without spans."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def split(self) -> np.ndarray:
        """Return float64[ranks, activities]: seconds of each rank in each of ACTIVITIES, summed over channels."""
        import numpy as np

        total = np.zeros((self.nranks, len(ACTIVITIES)))
        np.add.at(total, (self.rank, self.activity), self.end - self.start)
        return total

    def _cells(self) -> list[tuple[str, ...]]:
        rows = [*self.split[:16]]
        return [(str(r), *(seconds_text(float(s)) for s in row)) for r, row in enumerate(rows)]

    def __repr__(self) -> str:
        head, more = ("rank", *ACTIVITIES), f"\n... and {self.nranks - 16:,} more ranks" if self.nranks > 16 else ""
        return f"{self._title()}\n{text_table(head, self._cells(), head)}{more}"

    def _title(self) -> str:
        spans = f"{len(self):,} span{'' if len(self) == 1 else 's'}"
        return f"<Timeline ({self.kind}) {seconds_text(self.seconds)}: {self.title}; {spans}>"

    def _repr_html_(self) -> str:
        head = ("rank", *ACTIVITIES)
        return titled(self._title(), html_table(head, self._cells(), right=head))

    def draw(self, **options: Any) -> Drawing:
        """Draw the timeline, by `fc.draw.timelines`, which also draws several on one axis."""
        from ..draw import timelines

        return timelines(self, **options)

    def to_perfetto(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the timeline as JSON in Chrome's Trace Event Format, for Perfetto and chrome://tracing.

        A rank is a process, a channel a thread, and a span a complete event ("X") with times in microseconds. With `path` the
        text is also written there. Source: Trace Event Format (Google, 2016).
        """
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": r, "tid": 0, "args": {"name": f"rank {r}"}} for r in range(self.nranks)
        ]
        events += [
            {"ph": "M", "name": "process_sort_index", "pid": r, "tid": 0, "args": {"sort_index": r}} for r in range(self.nranks)
        ]
        for span in self:
            args: dict[str, object] = {"source": span.source} if span.source else {}
            if scope := scope_of(span.source):
                args["scope"] = scope
            if span.peer >= 0:
                args["waits for rank" if span.activity == "wait" else "reads rank"] = span.peer
            events.append(
                {
                    "ph": "X",
                    "name": span.label or span.activity,
                    "cat": span.activity,
                    "pid": span.rank,
                    "tid": span.channel,
                    "ts": _microseconds(span.start),
                    "dur": _microseconds(span.end - span.start),
                    "args": args,
                }
            )
        other = {"title": self.title, "kind": self.kind}
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}, allow_nan=False)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text


def _microseconds(seconds: float) -> float:
    """Round to a picosecond, because simulated times are short."""
    return round(seconds * 1e6, 6) if math.isfinite(seconds) else 0.0
