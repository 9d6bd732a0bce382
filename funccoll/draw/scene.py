"""Scenes: the contents of a drawing, as columns of marks in data coordinates. Drawings make them, and renderers draw them.

Colours are roles of a theme (`themes`). Lengths of panels are inches. y grows downwards if `Axis.reversed` is True.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Arrows",
    "Axis",
    "Boxes",
    "Cells",
    "Curve",
    "LegendEntry",
    "Mark",
    "Panel",
    "Points",
    "Scene",
    "Texts",
    "isotonic",
    "shown_steps",
    "spread",
    "time_axis",
]


@dataclass(frozen=True)
class Axis:
    """One axis of a panel: its range, label with the unit, and ticks (value, text)."""

    lower: float
    upper: float
    label: str = ""
    ticks: tuple[tuple[float, str], ...] = ()
    log: bool = False
    reversed: bool = False
    grid: bool = False


@dataclass(frozen=True)
class Boxes:
    """Rectangles, with a text inside each one that has room."""

    x0: Sequence[float]
    x1: Sequence[float]
    y0: Sequence[float]
    y1: Sequence[float]
    fill: Sequence[str]
    hover: Sequence[str]
    text: Sequence[str] = ()
    edge: str = ""
    """The role of their outlines. It is empty for none, and "fill" for each one's own colour, so that narrow ones show."""

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, ...]], edge: str = "") -> Boxes:
        """Make boxes of rows (x0, x1, y0, y1, fill, hover), and perhaps text."""
        columns: list[Any] = list(zip(*rows, strict=True)) or [()] * 6
        return cls(*columns, edge=edge)

    def __len__(self) -> int:
        return len(self.x0)


@dataclass(frozen=True)
class Arrows:
    """Arrows from (x0, y0) to (x1, y1). An arrow whose data are combined at its end has a ring there, a copy a head."""

    x0: Sequence[float]
    y0: Sequence[float]
    x1: Sequence[float]
    y1: Sequence[float]
    colour: Sequence[str]
    combines: Sequence[bool]
    width: Sequence[float]
    """In points."""
    hover: Sequence[str]

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, ...]]) -> Arrows:
        """Make arrows of rows (x0, y0, x1, y1, colour, combines, width, hover)."""
        columns: list[Any] = list(zip(*rows, strict=True)) or [()] * 8
        return cls(*columns)

    def __len__(self) -> int:
        return len(self.x0)


@dataclass(frozen=True)
class Curve:
    """A line through points. `hover` has a text for each, or none at all."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    width: float = 1.5
    dash: bool = False
    hover: Sequence[str] = ()

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True)
class Points:
    """Points with a symbol: "dot", "diamond" or "bar"."""

    x: Sequence[float]
    y: Sequence[float]
    colour: Sequence[str]
    hover: Sequence[str]
    symbol: str = "dot"
    size: float = 5.0

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Texts:
    """Texts at points. `align` is the side of the text that is at the point."""

    x: Sequence[float]
    y: Sequence[float]
    text: Sequence[str]
    colour: str = "ink"
    size: float = 8.0
    align: str = "center"
    bold: bool = False

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Cells:
    """A grid of cells, one unit wide and high, cell (row i, column j) around (j, i). Values from 0 to 1 are shades."""

    values: Sequence[Sequence[float | None]]
    """None for a cell that is not there."""
    text: Sequence[Sequence[str]]
    hover: Sequence[Sequence[str]]

    def __len__(self) -> int:
        return sum(v is not None for row in self.values for v in row)


Mark = Arrows | Boxes | Cells | Curve | Points | Texts


@dataclass(frozen=True)
class Panel:
    """A pair of axes with marks, drawn in their order."""

    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    width: float
    """Of the area between the axes, in inches."""
    height: float
    title: str = ""


@dataclass(frozen=True)
class LegendEntry:
    """A line of the legend: a sample of a "box", "line", "dash", "arrow", "ring" or "diamond", and its meaning."""

    text: str
    colour: str
    sample: str = "box"


@dataclass(frozen=True)
class Scene:
    """The contents of a drawing. Panels stand in rows of `columns`. With `steps` they are the positions of one slider.

    In the static form the slider's positions `shown` stand side by side.
    """

    title: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    """Lines below the title: what is drawn in a summary form, and what is left out."""
    legend: tuple[LegendEntry, ...] = ()
    columns: int = 1
    shared_x: bool = False
    """True if panels have one x axis, so that zooming one zooms all."""
    steps: tuple[str, ...] = ()
    shown: tuple[int, ...] = field(default=())

    @property
    def static_panels(self) -> tuple[Panel, ...]:
        """The panels of the static form."""
        return tuple(self.panels[i] for i in self.shown) if self.steps else self.panels


def shown_steps(n: int, most: int) -> tuple[int, ...]:
    """Return at most `most` of n steps: the first, the last, and some between them."""
    return tuple(range(n)) if n <= most else tuple(round(i * (n - 1) / (most - 1)) for i in range(most))


def spread(wanted: Sequence[float], gap: float, lower: float, upper: float) -> list[float]:
    """Return the positions nearest to the wanted ones (least squares) that are `gap` from each other, within the limits.

    If the limits have too little room, they are as far apart as they can be. Positions less i * apart must ascend.
    """
    n = len(wanted)
    order = sorted(range(n), key=lambda i: wanted[i])
    gap = min(gap, (upper - lower) / max(1, n - 1))
    flat = [min(max(x, lower), upper - (n - 1) * gap) for x in isotonic([wanted[i] - k * gap for k, i in enumerate(order)])]
    out = [0.0] * n
    for k, i in enumerate(order):
        out[i] = flat[k] + k * gap
    return out


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the ascending sequence nearest to `values` in least squares, by pooling neighbours (Ayer et al., 1955)."""
    pools: list[tuple[float, int]] = []  # mean, members
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            other, members = pools.pop()
            mean, size = (mean * size + other * members) / (size + members), size + members
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


def time_axis(seconds: float, label: str = "time") -> Axis:
    """Return an axis from 0 to a duration, with round ticks in a unit that suits it."""
    seconds = seconds if seconds > 0 and math.isfinite(seconds) else 1e-6
    unit, size = next((u, s) for u, s in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)) if seconds >= s or u == "ns")
    step = _round_step(seconds / size / 6)
    ticks = [k * step for k in range(int(seconds / size / step + 1e-9) + 1)]
    return Axis(0.0, seconds * 1.01, f"{label} [{unit}]", tuple((t * size, f"{t:.6g}") for t in ticks), grid=True)


def _round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))
