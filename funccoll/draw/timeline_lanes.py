"""Timelines as lanes of coloured spans, several of them on one axis of time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..display import seconds_text
from ..errors import DrawingError
from ..timeline import ACTIVITIES, Timeline
from .drawing import Drawing
from .lanes import Lanes
from .scene import Boxes, LegendEntry, Panel, Scene, time_axis

__all__ = ["timelines"]

_COLOURS = {"wait": "grid", "move": "c0", "reduce": "c4", "compute": "c2"}
_RANKS, _SPANS = 64, 3000
"""The most ranks, and spans, that are drawn one by one."""
_EDGED = 24
"""The most spans of a rank that have outlines, which tell neighbours of one activity apart."""
_NARROW = 0.004
"""The part of the axis below which a span's outline has its own colour: one of the page's would cover it."""
_LANES, _BINS = 32, 160
"""Lanes and intervals of the summary form."""


def timelines(*timelines: Timeline, theme: str | None = None) -> Drawing:
    """Draw timelines, simulated or measured, one under the other on one axis of time: ranks as lanes, activities by colour.

    Every timeline begins at 0. One of more than 64 ranks, or 3,000 spans, is drawn in intervals, each with the activity
    that takes most of it, which the drawing says. Raises DrawingError for none, and for what is not a Timeline.
    """
    if not timelines:
        raise DrawingError("timelines() draws Timelines, and none was given: Simulation.timeline() makes one.")
    for given in timelines:
        if not isinstance(given, Timeline):
            raise DrawingError(
                f"timelines() draws Timelines, not {type(given).__name__}. A Simulation and a profile give one: .timeline()."
            )
    longest = max(t.seconds for t in timelines)
    notes: list[str] = []
    panels = [_panel(t, longest, notes, "" if len(timelines) == 1 else _words(t)) for t in timelines]
    used = {int(a) for t in timelines for a in np.unique(t.activity)}
    legend = tuple(LegendEntry(name, _COLOURS[name]) for i, name in enumerate(ACTIVITIES) if i in used)
    title = _words(timelines[0]) if len(timelines) == 1 else f"{len(timelines)} timelines on one axis of time"
    return Drawing(Scene(title, tuple(panels), tuple(dict.fromkeys(notes)), legend, shared_x=True), theme)


def _words(timeline: Timeline) -> str:
    return f"{timeline.title}: {timeline.kind}, {seconds_text(timeline.seconds)}"


def _panel(timeline: Timeline, seconds: float, notes: list[str], title: str) -> Panel:
    p = timeline.nranks
    lanes = Lanes.of(p, _LANES) if p > _RANKS else Lanes(p, 1)
    if p > _RANKS or len(timeline) > _SPANS:
        boxes, bins = _binned(timeline, lanes)
        notes.append(
            f"{lanes.note()} {len(timeline):,} spans: drawn as {bins} intervals, each in the colour of the activity that takes "
            "most of it.".strip()
        )
    else:
        boxes = _single(timeline, seconds)
    pitch = 0.3 if len(lanes) <= 8 else 0.22 if len(lanes) <= 16 else 0.14
    axis = time_axis(seconds)
    return Panel(axis, lanes.axis(), (boxes,) if len(boxes) else (), 8.2, max(0.4, len(lanes) * pitch), title)


def _single(timeline: Timeline, seconds: float) -> Boxes:
    """A box for each span, waits below the others; those of several channels share the rank's lane."""
    nchannels = 1 + int(timeline.channel.max(initial=0))
    boxes = []
    for span in sorted(timeline, key=lambda s: s.activity != "wait"):
        top = span.rank - 0.4 + 0.8 * span.channel / nchannels
        peer = ""
        if span.peer >= 0:
            peer = f" for rank {span.peer}" if span.activity == "wait" else f" from rank {span.peer}"
        when = f"{seconds_text(span.end - span.start)}, from {seconds_text(span.start)} on"
        hover = f"rank {span.rank}: {span.activity}{peer}, {when}"
        hover += "".join(f"\n{t}" for t in (span.label, span.source) if t)
        boxes.append((span.start, span.end, top, top + 0.8 / nchannels, _COLOURS[span.activity], hover))
    narrow = bool(len(timeline)) and float((timeline.end - timeline.start).min()) < _NARROW * seconds
    few = len(timeline) <= _EDGED * max(1, timeline.nranks)
    return Boxes.of(boxes, "fill" if narrow else "surface" if few else "")


def _binned(timeline: Timeline, lanes: Lanes) -> tuple[Boxes, int]:
    """A box for each run of intervals in which a lane spends most time on one activity."""
    total = _time_in_bins(timeline, lanes)
    most = np.where(total.any(axis=0), total.argmax(axis=0), -1)  # lane, bin
    width = timeline.seconds / _BINS
    boxes = []
    for lane, row in enumerate(most):
        bounds = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), _BINS]
        for a, b in pairwise(bounds):
            if row[a] >= 0:
                name = ACTIVITIES[row[a]]
                lane_name = f"rank {lanes.name(lane)}" if lanes.each == 1 else f"ranks {lanes.name(lane)}"
                hover = f"{lane_name}: mostly {name}, from {seconds_text(a * width)} to {seconds_text(b * width)}"
                boxes.append((a * width, b * width, lane - 0.4, lane + 0.4, _COLOURS[name], hover))
    return Boxes.of(boxes), _BINS


def _time_in_bins(timeline: Timeline, lanes: Lanes) -> np.ndarray:
    """float64[activities, lanes, bins]: seconds that the ranks of a lane spend on each activity in each interval."""
    seconds = timeline.seconds or 1.0
    begin, end = (np.clip(t / seconds * _BINS, 0, _BINS) for t in (timeline.start, timeline.end))
    first, last = np.minimum(begin.astype(int), _BINS - 1), np.minimum(end.astype(int), _BINS - 1)
    lane = timeline.rank // lanes.each
    # Whole intervals as differences of a running sum, and the parts of the first and the last one.
    total = np.zeros((len(ACTIVITIES), len(lanes), _BINS))
    steps = np.zeros((len(ACTIVITIES), len(lanes), _BINS + 1))
    one = first == last
    np.add.at(total, (timeline.activity[one], lane[one], first[one]), (end - begin)[one])
    many = ~one
    a, rows, f, g = timeline.activity[many], lane[many], first[many], last[many]
    np.add.at(total, (a, rows, f), f + 1 - begin[many])
    np.add.at(total, (a, rows, g), end[many] - g)
    np.add.at(steps, (a, rows, f + 1), 1.0)
    np.add.at(steps, (a, rows, g), -1.0)
    return total + steps.cumsum(axis=2)[:, :, :-1]
