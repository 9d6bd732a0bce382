"""Timelines as lanes of coloured spans, several of them on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..core.display import seconds_text
from ..core.timeline import ACTIVITIES, Timeline
from ..errors import DrawingError, scope_of
from .drawing import Drawing
from .lanes import Lanes
from .scene import Boxes, LegendEntry, Panel, Scene, time_axis

__all__ = ["timelines"]

_COLOURS = {"wait": "grid", "move": "c0", "reduce": "c4", "compute": "c2"}
_OF_SCOPES = "c1", "c3", "c5", "c6"
"""Colours of computing in named scopes, for as many of them."""
_COMPUTE = ACTIVITIES.index("compute")
_RANKS, _SPANS = 64, 3000
"""The most ranks, and spans, that are drawn one by one."""
_EDGED = 24
"""The most spans of a rank that have outlines. Outlines separate neighbours of one activity."""
_NARROW = 0.004
"""The part of the axis below which a span's outline has its own colour. One of the page's colour would cover it."""
_LANES, _BINS = 32, 160
"""Lanes and intervals of the summary form."""


def timelines(*timelines: Timeline, theme: str | None = None) -> Drawing:
    """Draw timelines, simulated or measured, one under the other on one axis of time.

    Ranks are lanes, and activities have colours. Computing in the four named scopes that take longest has colours of its own.
    Every timeline begins at 0. One of more than 64 ranks, or 3,000 spans, is drawn in intervals, each with the activity that
    takes most of it. The drawing then says so.

    Args:
        *timelines: One or more Timelines, as `Simulation.timeline` and `Profile.timeline` return them.
        theme: "light", "dark", or None for FUNCCOLL_THEME.

    Returns:
        A `Drawing`.

    Raises:
        DrawingError: If you pass none, or something that is not a Timeline.
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
    what = [*ACTIVITIES, *(f"compute: {scope}" for scope in _scopes(timelines))]
    doing = [_doing(t, what) for t in timelines]
    panels = [
        _panel(t, d, what, longest, notes, "" if len(timelines) == 1 else _words(t))
        for t, d in zip(timelines, doing, strict=True)
    ]
    used = {int(i) for d in doing for i in np.unique(d)}
    legend = tuple(LegendEntry(name, _colour(i)) for i, name in enumerate(what) if i in used)
    title = _words(timelines[0]) if len(timelines) == 1 else f"{len(timelines)} timelines on one axis of time"
    return Drawing(Scene(title, tuple(panels), tuple(dict.fromkeys(notes)), legend, shared_x=True), theme)


def _scopes(timelines: Sequence[Timeline]) -> list[str]:
    """Return the outermost named scopes that computed longest, in the order of their first spans."""
    seconds: dict[str, float] = {}
    for timeline in timelines:
        lengths = np.bincount(timeline.text, np.where(timeline.activity == _COMPUTE, timeline.end - timeline.start, 0.0))
        for number in np.unique(timeline.text).tolist():
            if (scope := _scope(timeline, number)) and lengths[number]:
                seconds[scope] = seconds.get(scope, 0.0) + float(lengths[number])
    longest = sorted(seconds, key=lambda scope: -seconds[scope])[: len(_OF_SCOPES)]
    return [scope for scope in seconds if scope in longest]


def _scope(timeline: Timeline, text: int) -> str:
    return scope_of(timeline.texts[text][1]).partition("/")[0]


def _doing(timeline: Timeline, what: Sequence[str]) -> np.ndarray:
    """Return, for each span, the index in `what` of its activity. For computing, it is that of its named scope."""
    of_text = [f"compute: {_scope(timeline, number)}" for number in range(len(timeline.texts))]
    found = np.array([what.index(name) if name in what else _COMPUTE for name in of_text] or [0])
    return np.where(timeline.activity == _COMPUTE, found[timeline.text], timeline.activity)


def _colour(i: int) -> str:
    return _COLOURS[ACTIVITIES[i]] if i < len(ACTIVITIES) else _OF_SCOPES[i - len(ACTIVITIES)]


def _words(timeline: Timeline) -> str:
    return f"{timeline.title}: {timeline.kind}, {seconds_text(timeline.seconds)}"


def _panel(timeline: Timeline, doing: np.ndarray, what: Sequence[str], seconds: float, notes: list[str], title: str) -> Panel:
    p = timeline.nranks
    lanes = Lanes.of(p, _LANES) if p > _RANKS else Lanes(p, 1)
    if p > _RANKS or len(timeline) > _SPANS:
        boxes, bins = _binned(timeline, doing, what, lanes)
        notes.append(
            f"{lanes.note()} {len(timeline):,} spans: drawn as {bins} intervals, each in the colour of the activity that takes "
            "most of it.".strip()
        )
    else:
        boxes = _single(timeline, doing, seconds)
    pitch = 0.3 if len(lanes) <= 8 else 0.22 if len(lanes) <= 16 else 0.14
    axis = time_axis(seconds)
    return Panel(axis, lanes.axis(), (boxes,) if len(boxes) else (), 8.2, max(0.4, len(lanes) * pitch), title)


def _single(timeline: Timeline, doing: np.ndarray, seconds: float) -> Boxes:
    """Return a box for each span, waits below the others. Spans of several channels share the rank's lane."""
    nchannels = 1 + int(timeline.channel.max(initial=0))
    boxes = []
    for span, i in sorted(zip(timeline, doing.tolist(), strict=True), key=lambda found: found[0].activity != "wait"):
        top = span.rank - 0.4 + 0.8 * span.channel / nchannels
        peer = ""
        if span.peer >= 0:
            peer = f" for rank {span.peer}" if span.activity == "wait" else f" from rank {span.peer}"
        when = f"{seconds_text(span.end - span.start)}, from {seconds_text(span.start)} on"
        hover = f"rank {span.rank}: {span.activity}{peer}, {when}"
        hover += "".join(f"\n{t}" for t in (span.label, span.source) if t)
        boxes.append((span.start, span.end, top, top + 0.8 / nchannels, _colour(i), hover))
    narrow = bool(len(timeline)) and float((timeline.end - timeline.start).min()) < _NARROW * seconds
    few = len(timeline) <= _EDGED * max(1, timeline.nranks)
    return Boxes.of(boxes, "fill" if narrow else "surface" if few else "")


def _binned(timeline: Timeline, doing: np.ndarray, what: Sequence[str], lanes: Lanes) -> tuple[Boxes, int]:
    """Return a box for each run of intervals in which a lane spends most time on one activity."""
    total = _time_in_bins(timeline, doing, len(what), lanes)
    most = np.where(total.any(axis=0), total.argmax(axis=0), -1)  # lane, bin
    width = timeline.seconds / _BINS
    boxes = []
    for lane, row in enumerate(most):
        bounds = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), _BINS]
        for a, b in pairwise(bounds):
            if row[a] >= 0:
                name = what[row[a]]
                lane_name = f"rank {lanes.name(lane)}" if lanes.each == 1 else f"ranks {lanes.name(lane)}"
                hover = f"{lane_name}: mostly {name}, from {seconds_text(a * width)} to {seconds_text(b * width)}"
                boxes.append((a * width, b * width, lane - 0.4, lane + 0.4, _colour(int(row[a])), hover))
    return Boxes.of(boxes), _BINS


def _time_in_bins(timeline: Timeline, doing: np.ndarray, count: int, lanes: Lanes) -> np.ndarray:
    """Return the time, in intervals, that the ranks of a lane spend on each thing in each interval.

    The result is float64[count, lanes, bins].
    """
    seconds = timeline.seconds or 1.0
    begin, end = (np.clip(t / seconds * _BINS, 0, _BINS) for t in (timeline.start, timeline.end))
    first, last = np.minimum(begin.astype(int), _BINS - 1), np.minimum(end.astype(int), _BINS - 1)
    lane = timeline.rank // lanes.each
    # Whole intervals are differences of a running sum. The first and the last interval add their parts.
    total = np.zeros((count, len(lanes), _BINS))
    steps = np.zeros((count, len(lanes), _BINS + 1))
    one = first == last
    np.add.at(total, (doing[one], lane[one], first[one]), (end - begin)[one])
    many = ~one
    a, rows, f, g = doing[many], lane[many], first[many], last[many]
    np.add.at(total, (a, rows, f), f + 1 - begin[many])
    np.add.at(total, (a, rows, g), end[many] - g)
    np.add.at(steps, (a, rows, f + 1), 1.0)
    np.add.at(steps, (a, rows, g), -1.0)
    return total + steps.cumsum(axis=2)[:, :, :-1]
