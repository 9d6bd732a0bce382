"""Predicted cost of a collective's algorithms against the size of its data, and the sizes at which the cheapest one changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..core.display import seconds_text, size_text
from ..errors import DrawingError
from ..schedules.collective import check_kind, similar
from ..schedules.model.select import candidates, select
from ..schedules.model.topology import Topology, check_topology
from ..schedules.registry import algorithms as known_algorithms
from ..schedules.registry import known as known_records
from ..schedules.schedule import Schedule
from .drawing import Drawing
from .scene import Axis, Curve, LegendEntry, Mark, Panel, Points, Scene, Texts, spread
from .themes import PALETTE, series

__all__ = ["costs"]

_SMALLEST, _LARGEST, _PER_DECADE = 64, 1 << 28, 3
_MANY = 256
"""The most ranks for which schedules are built for every size.

For more they are built for three sizes only, because `candidates` builds them again for each.
"""
_MARKED = 8
"""The most changes that are listed. If there are more, the drawing says so."""
_LABELLED, _ROW = 5, 0.05
"""The most changes that are named beside their points, in rows at the bottom, each a part of the panel's height."""
_WIDTH, _HEIGHT, _LABELS = 6.6, 4.0, 0.27
"""Inches of the panel, and the part of its width that the names of the curves take."""


class _Point(NamedTuple):
    nbytes: int
    seconds: dict[str, float]
    chosen: str
    objections: dict[str, str]


def costs(
    kind: str,
    topology: Topology | int,
    sizes: Sequence[int] | None = None,
    algorithms: Sequence[str] | None = None,
    *,
    dtype: Any = None,
    theme: str | None = None,
) -> Drawing:
    """Draw the time that the cost model predicts for a collective's algorithms against the bytes of one rank's data.

    The curve of the algorithm that `select` chooses is thick at the sizes where it is chosen. Algorithms that may not be chosen
    there are dashed, with the reason in the hover text. Diamonds mark the sizes at which the choice changes, and rings those at
    which two of the cheapest curves cross. Both are found to the byte.

    Args:
        kind: The collective's name.
        topology: The machine. A number of ranks stands for `Topology.one_host` of it.
        sizes: The bytes to draw, at least two different positive integers. None draws from 64 B to 256 MiB.
        algorithms: Names of algorithms, or None for all.
        dtype: The element type, as in `fc.schedules.select`.
        theme: "light", "dark", or None for FUNCCOLL_THEME.

    Returns:
        A `Drawing`.

    Raises:
        DrawingError: If `sizes` are other values, or an algorithm does not exist.
        ScheduleError: If the collective is unknown.

    Example:
        >>> print(fc.draw.costs("all_gather", fc.schedules.Topology.ethernet(4), sizes=[1024, 1 << 20]))
        <Drawing: Predicted time of all_gather on 4 ranks against the size of one rank's data; .save("drawing.svg") writes it>
    """
    check_kind(kind)
    if isinstance(topology, (int, np.integer)):
        topology = Topology.one_host(topology)
    check_topology(topology)
    names = _names(kind, algorithms)
    wanted = _sizes(sizes)
    question = (_Costs if topology.nranks <= _MANY else _CostsOfMany)(kind, topology, names, dtype, wanted)
    points = [question.at(n) for n in wanted]
    return Drawing(_scene(question, points), theme)


def _names(kind: str, algorithms: Sequence[str] | None) -> list[str]:
    known = known_algorithms(kind)
    if algorithms is None:
        return known
    names = [algorithms] if isinstance(algorithms, str) else list(algorithms)
    for name in names:
        if name not in known:
            raise DrawingError(f"unknown algorithm {name!r} for {kind}.{similar(name, known)} There are: {', '.join(known)}.")
    if not names:
        raise DrawingError(f"algorithms=[] leaves nothing to draw. Leave it out for all of {kind}'s: {', '.join(known)}.")
    return [name for name in known if name in names]


def _sizes(sizes: Sequence[int] | None) -> list[int]:
    if sizes is None:
        n = round(math.log10(_LARGEST / _SMALLEST) * _PER_DECADE)
        return sorted({round(_SMALLEST * (_LARGEST / _SMALLEST) ** (i / n)) for i in range(n + 1)})
    listed = list(sizes) if isinstance(sizes, Iterable) else []
    integers = all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n > 0 for n in listed)
    found = sorted({int(n) for n in listed}) if integers else []
    if len(found) < 2:
        raise DrawingError(f"sizes={sizes!r:.60} must be at least two different numbers of bytes, such as [1024, 1 << 20].")
    return found


class _Change(NamedTuple):
    before: str
    after: str
    point: _Point
    """The smallest size after the change."""


class _Costs:
    """The costs of some algorithms by size. Each size is computed once."""

    note = ""

    def __init__(self, kind: str, topology: Topology, names: Sequence[str], dtype: Any, sizes: Sequence[int]):
        self.kind, self.topology, self.names, self.dtype = kind, topology, names, dtype
        self._known: dict[int, _Point] = {}

    def at(self, nbytes: int) -> _Point:
        """Return the costs at a size."""
        if nbytes not in self._known:
            seconds, chosen, objections = self._weighed(nbytes)
            seconds = {name: seconds[name] for name in self.names if name in seconds}
            objections = {name: objections[name] for name in self.names if name in objections}
            self._known[nbytes] = _Point(nbytes, seconds, chosen, objections)
        return self._known[nbytes]

    def _weighed(self, nbytes: int) -> tuple[dict[str, float], str, dict[str, str]]:
        """Return seconds by algorithm, the algorithm that is chosen, and the objections to others."""
        found = candidates(self.kind, self.topology, nbytes, dtype=self.dtype)
        seconds = {c.algorithm.name: c.cost.seconds for c in found if c.cost is not None}
        chosen = select(self.kind, self.topology, nbytes, dtype=self.dtype).algorithm
        return seconds, chosen, {c.algorithm.name: c.objection for c in found if c.objection}

    def change(self, low: _Point, high: _Point, key: Callable[[_Point], str]) -> _Point:
        """Return the smallest size between two at which `key` of a point differs from its value at the lower one."""
        first, a, b = key(low), low.nbytes, high.nbytes
        while b - a > 1 and b / a > 1 + 1e-3:
            middle = round(math.sqrt(a * b)) if b - a > 3 else (a + b) // 2
            middle = min(max(middle, a + 1), b - 1)
            a, b = (middle, b) if key(self.at(middle)) == first else (a, middle)
        return self.at(b)


class _CostsOfMany(_Costs):
    """The same for many ranks. Schedules are built for three of the sizes, and costs are interpolated if that is exact."""

    note = "Algorithms that cut blocks into chunks have the best numbers of chunks of three sizes."

    def __init__(self, kind: str, topology: Topology, names: Sequence[str], dtype: Any, sizes: Sequence[int]):
        super().__init__(kind, topology, names, dtype, sizes)
        self._objections: dict[str, str] = {}
        self._reserve: set[str] = set()
        self._lines: dict[str, dict[int, _Line]] = {}  # algorithm -> number of chunks -> its cost
        for nbytes in sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}):
            for c in candidates(kind, topology, nbytes, dtype=dtype):
                name = c.algorithm.name
                if c.objection:
                    self._objections[name] = c.objection
                self._reserve |= {name} if c.reserve else set()
                if c.schedule is not None and c.cost is not None:
                    of_chunks = self._lines.setdefault(name, {})
                    chunks = c.schedule.collective.chunks
                    if chunks not in of_chunks:
                        of_chunks[chunks] = _Line(c.schedule, topology, sizes[0], sizes[-1])

    def _weighed(self, nbytes: int) -> tuple[dict[str, float], str, dict[str, str]]:
        seconds = {name: min(line.at(nbytes) for line in lines.values()) for name, lines in self._lines.items()}
        free = {n: s for n, s in seconds.items() if n not in self._objections}
        free = free or {n: seconds.get(n, math.inf) for n in self._reserve}
        return seconds, min(free, key=lambda name: _digits(free[name]), default=""), self._objections


class _Line:
    """The time of one schedule against the size. It is piecewise linear and convex.

    So it is a line between two sizes if it touches their chord once between them.
    """

    def __init__(self, schedule: Schedule, topology: Topology, low: int, high: int):
        self._schedule, self._topology = schedule, topology
        self._known = {n: schedule.cost(topology, n).seconds for n in (low, high)}
        self._straight: list[tuple[int, int]] = []

    def at(self, nbytes: int) -> float:
        """Return the seconds at a size between the two."""
        if nbytes in self._known:
            return self._known[nbytes]
        a, b = max(n for n in self._known if n < nbytes), min(n for n in self._known if n > nbytes)
        chord = self._known[a] + (self._known[b] - self._known[a]) * (nbytes - a) / (b - a)
        if any(low <= a and b <= high for low, high in self._straight):
            return chord
        seconds = self._known[nbytes] = self._schedule.cost(self._topology, nbytes).seconds
        if math.isclose(seconds, chord, rel_tol=1e-9):
            self._straight.append((a, b))
        return seconds


def _digits(seconds: float) -> float:
    """Round to 9 digits, so that equal sums in another order are equal. Of equal costs the first is taken."""
    return float(f"{seconds:.8e}")


def _cheapest(point: _Point) -> str:
    return min(point.seconds, key=lambda name: _digits(point.seconds[name]), default="")


def _scene(costs: _Costs, points: list[_Point]) -> Scene:
    changes = _changes(costs, points, lambda p: p.chosen)
    crossings = _changes(costs, points, _cheapest)
    points = sorted({p.nbytes: p for p in (*points, *(x.point for x in (*changes, *crossings)))}.values())
    curves = [name for name in costs.names if sum(name in p.seconds for p in points) > 1]
    colour = _colours(curves, points)
    times = [p.seconds[name] for p in points for name in curves if p.seconds.get(name, 0.0) > 0]
    notes = _notes(costs, points, curves, changes, crossings)
    title = f"Predicted time of {costs.kind} on {costs.topology.nranks:,} ranks against the size of one rank's data"
    axis = _size_axis(points)
    if not times:
        panel = Panel(axis, Axis(0.0, 1.0, "predicted time"), (), _WIDTH, 1.0)
        return Scene(title, (panel,), (*notes, "Nothing takes time here."))
    low, high = math.log10(min(times)), math.log10(max(times))
    named = [c for c in changes if c.after in colour][:_LABELLED]
    span = (high - low + 0.1) / (0.92 - _ROW * len(named))
    y = Axis(10 ** (high + 0.04 * span - span), 10 ** (high + 0.04 * span), "predicted time", log=True, grid=True)
    y = replace(y, ticks=_decades(y.lower, y.upper))
    marks: list[Mark] = []
    for name in curves:
        marks += _curve(name, points, colour[name])
    marks += _marked(named, [c for c in crossings if c not in changes], y)
    marks += _end_labels(curves, points, axis, y, colour)
    legend = [LegendEntry("chosen", "ink", "line")]
    if any(name in p.objections for p in points for name in curves):
        legend.append(LegendEntry("may not be chosen", "muted", "dash"))
    legend += [LegendEntry("the choice changes", "ink", "diamond")] if changes else []
    legend += [LegendEntry("the cheapest changes", "muted", "dot")] if any(c not in changes for c in crossings) else []
    return Scene(title, (Panel(axis, y, tuple(marks), _WIDTH, _HEIGHT),), tuple(notes), tuple(legend))


def _colours(curves: list[str], points: list[_Point]) -> dict[str, str]:
    """Return a colour of the palette for each curve.

    If there are too many, only those that come nearest to the cheapest get one.
    """

    def excess(name: str) -> tuple[bool, float]:
        ratios = [p.seconds[name] / (p.seconds[_cheapest(p)] or 1.0) for p in points if name in p.seconds]
        return all(p.chosen != name for p in points), min(ratios, default=math.inf)

    best = set(sorted(curves, key=excess)[:PALETTE])
    coloured = [name for name in curves if name in best]
    return {name: series(coloured.index(name), len(coloured)) if name in best else "muted" for name in curves}


def _notes(
    costs: _Costs, points: list[_Point], curves: list[str], changes: list[_Change], crossings: list[_Change]
) -> list[str]:
    notes = [f"{costs.topology!r}"[1:-1] + ("" if costs.dtype is None else f"; {np.dtype(costs.dtype)}") + "."]
    left_out = [f"{name} ({points[0].objections.get(name, 'not costed')})" for name in costs.names if name not in curves]
    if left_out:
        notes.append(f"Not drawn: {'; '.join(left_out)}.")
    if costs.note and any(known.options >= {"chunks"} for known in known_records(costs.kind)):
        notes.append(costs.note)
    if not changes:
        notes.append(f"{points[0].chosen} is chosen for every size here.")
    for what, found in (("Choice", changes), ("Cheapest", [c for c in crossings if c not in changes])):
        listed = [f"{c.before} → {c.after} at {size_text(c.point.nbytes)}" for c in found]
        if listed:
            more = f" and {len(listed) - _MARKED} more" if len(listed) > _MARKED else ""
            notes.append(f"{what}: {', '.join(listed[:_MARKED])}{more}.")
    return notes


def _curve(name: str, points: list[_Point], colour: str) -> list[Mark]:
    """Return a curve: thin if it could be chosen, dashed if not, thick if it is."""
    marks: list[Mark] = []
    have = [p for p in points if name in p.seconds]
    for a, b in pairwise(have):
        thick = a.chosen == name
        dash = name in a.objections
        hover = [_hover(name, p) for p in (a, b)]
        ends = [a.nbytes, b.nbytes], [a.seconds[name], b.seconds[name]]
        piece = Curve(*ends, colour, 3.6 if thick else 1.3, dash and not thick, hover)
        last = marks[-1] if marks else None
        if isinstance(last, Curve) and (last.width, last.dash) == (piece.width, piece.dash):
            joined = [*last.x, b.nbytes], [*last.y, b.seconds[name]]
            marks[-1] = Curve(*joined, colour, piece.width, piece.dash, [*last.hover, hover[1]])
        else:
            marks.append(piece)
    return marks


def _hover(name: str, point: _Point) -> str:
    text = f"{name}, {size_text(point.nbytes)}: {seconds_text(point.seconds[name])}"
    if name == point.chosen:
        return text + ", chosen"
    return text + (f"\n{point.objections[name]}" if name in point.objections else "")


def _changes(costs: _Costs, points: list[_Point], key: Callable[[_Point], str]) -> list[_Change]:
    """Return every change of `key` between neighbouring sizes, with the first size after it."""
    out = []
    for a, b in pairwise(points):
        while key(a) != key(b):
            found = costs.change(a, b, key)
            out.append(_Change(key(a), key(found), found))
            a = found
    return out


def _marked(changes: list[_Change], crossings: list[_Change], y: Axis) -> list[Mark]:
    """Return diamonds at changes of the choice, each with a line down to its name.

    Changes of the cheapest curve get dots.
    """
    marks: list[Mark] = []
    at = [y.lower * (y.upper / y.lower) ** ((row + 0.6) * _ROW) for row in range(len(changes))]
    for c, bottom in zip(changes, at, strict=True):
        marks.append(Curve([c.point.nbytes, c.point.nbytes], [bottom, c.point.seconds[c.after]], "muted", 0.8))
    for found, colour, symbol, what in (
        (crossings, "muted", "dot", "cheaper than"),
        (changes, "ink", "diamond", "chosen in place of"),
    ):
        hover = [f"{c.after} is {what} {c.before} from {size_text(c.point.nbytes)} on" for c in found]
        xs, ys = [c.point.nbytes for c in found], [c.point.seconds[c.after] for c in found]
        marks.append(Points(xs, ys, [colour] * len(found), hover, symbol, 5.0 if symbol == "dot" else 6.0))
    words = [f"  {c.after} from {size_text(c.point.nbytes)} on" for c in changes]
    marks.append(Texts([c.point.nbytes for c in changes], at, words, "ink", 8.0, "left"))
    return marks


def _end_labels(names: list[str], points: list[_Point], x: Axis, y: Axis, colour: dict[str, str]) -> list[Mark]:
    """Return the curves' names to the right of their ends, moved apart, with a line to each."""
    last = [next(p for p in reversed(points) if name in p.seconds) for name in names]
    low, high = math.log10(y.lower), math.log10(y.upper)
    ends = [max(low, math.log10(p.seconds[name])) if p.seconds[name] > 0 else low for name, p in zip(names, last, strict=True)]
    at = spread(ends, 0.155 * (high - low) / _HEIGHT, low, high - 0.02 * (high - low))
    right, wide = points[-1].nbytes, x.upper / x.lower
    marks: list[Mark] = [
        Curve([p.nbytes, right * wide**0.03], [p.seconds[name], 10**to], colour[name], 0.8)
        for name, p, to in zip(names, last, at, strict=True)
    ]
    return [*marks, Texts([right * wide**0.036] * len(names), [10**to for to in at], names, "ink", 8.0, "left")]


def _size_axis(points: list[_Point]) -> Axis:
    first, last = points[0].nbytes, points[-1].nbytes
    upper = first * (last / first) ** (1 / (1 - _LABELS))
    powers = [1 << k for k in range(max(0, first.bit_length() - 1), last.bit_length() + 1) if first <= 1 << k <= last]
    every = -(-len(powers) // 9)
    ticks = powers[::every] if len(powers) > 1 else [first, last]
    label = "bytes of one rank's data"
    return Axis(first * (first / last) ** 0.01, upper, label, tuple((n, size_text(n)) for n in ticks), log=True, grid=True)


def _decades(lower: float, upper: float) -> tuple[tuple[float, str], ...]:
    exponents = range(math.ceil(math.log10(lower)), math.floor(math.log10(upper)) + 1)
    values = [10.0**e for e in exponents]
    if len(values) < 2:
        values = [m * 10.0**e for e in range(min(exponents, default=math.floor(math.log10(lower))) - 1, 3) for m in (1, 2, 5)]
        values = [v for v in values if lower <= v <= upper]
    return tuple((v, seconds_text(v * (1 + 1e-12))) for v in values)
