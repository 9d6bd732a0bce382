"""Traces of plotly: one for each kind of mark of a scene, and those of its legend."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .scene import Arrows, Boxes, Cells, Curve, LegendEntry, Mark, Panel, Points, Texts
from .themes import Theme

__all__ = ["DPI", "POINT", "Area", "legend_trace", "mark_traces", "plotly_number"]

DPI = 96
POINT = DPI / 72


@dataclass(frozen=True)
class Area:
    """A panel with the size of its area in pixels."""

    panel: Panel
    width: float
    height: float

    @property
    def pixels_per_unit(self) -> tuple[float, float]:
        """Of linear axes."""
        x, y = self.panel.x, self.panel.y
        return self.width / (x.upper - x.lower), self.height / (y.upper - y.lower)


def plotly_number(value: float) -> float | None:
    """Return a number with six digits, so that the JSON is not longer than needed. A gap in a line, NaN, is None."""
    if math.isnan(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) else short


def _numbers(values: Any) -> list[float | None]:
    return [plotly_number(float(v)) for v in values]


def _hover(texts: Any) -> list[str]:
    return [html.escape(t, quote=False).replace("\n", "<br>") for t in texts]


def _boxes(mark: Boxes, area: Area, theme: Theme) -> list[dict[str, Any]]:
    corners = list(zip(mark.x0, mark.x1, mark.y0, mark.y1, strict=True))
    fills = [theme.colour(f) for f in mark.fill]
    trace = {
        "type": "bar",
        "orientation": "h",
        "meta": "boxes",
        "base": _numbers(a for a, _, _, _ in corners),
        "x": _numbers(b - a for a, b, _, _ in corners),
        "y": _numbers((c + d) / 2 for _, _, c, d in corners),
        "width": _numbers(abs(d - c) for _, _, c, d in corners),
        "marker": {
            "color": fills,
            "line": {
                "width": 1 if mark.edge else 0,
                "color": fills if mark.edge == "fill" else theme.colour(mark.edge or "surface"),
            },
        },
        "hovertext": _hover(mark.hover),
        "hoverinfo": "text" if any(mark.hover) else "skip",
    }
    return [trace, *_labels(mark, area, theme)] if corners else []


def _labels(mark: Boxes, area: Area, theme: Theme) -> list[dict[str, Any]]:
    """Return the texts in boxes that fit there.

    plotly's own texts of bars shrink, or move away if they have too little room.
    """
    sx, sy = area.pixels_per_unit
    x, y, texts, sizes, colours = [], [], [], [], []
    for i, text in enumerate(mark.text):
        lines = text.split("\n")
        wide, tall = abs(mark.x1[i] - mark.x0[i]) * sx, abs(mark.y1[i] - mark.y0[i]) * sy
        fits = (s for s in (11, 10, 9, 8, 7) if len(lines) * s * 1.25 <= tall and max(map(len, lines)) * s * 0.57 <= wide - 2)
        size = next(fits, 0) if text else 0
        if size:
            x.append((mark.x0[i] + mark.x1[i]) / 2)
            y.append((mark.y0[i] + mark.y1[i]) / 2)
            texts.append("<br>".join(map(html.escape, lines)))
            sizes.append(size)
            colours.append(theme.text_on(mark.fill[i]))
    return (
        [
            {
                "type": "scatter",
                "mode": "text",
                "meta": "labels",
                "x": _numbers(x),
                "y": _numbers(y),
                "text": texts,
                "textposition": "middle center",
                "hoverinfo": "skip",
                "textfont": {"size": _one_or_all(sizes), "color": _one_or_all(colours)},
            }
        ]
        if texts
        else []
    )


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else values


def _cells(mark: Cells, area: Area, theme: Theme) -> list[dict[str, Any]]:
    stops = [i / 8 for i in range(9)]
    return [
        {
            "type": "heatmap",
            "meta": "cells",
            "z": [[None if v is None else plotly_number(v) for v in row] for row in mark.values],
            "zmin": 0,
            "zmax": 1,
            "showscale": False,
            "xgap": 1,
            "ygap": 1,
            "hoverongaps": False,
            "colorscale": [[s, theme.colour(f"s{s:.4f}")] for s in stops],
            "text": [list(row) for row in mark.text],
            "texttemplate": "%{text}" if any(map(any, mark.text)) else "",
            "textfont": {"size": 10},
            "hovertext": [_hover(row) for row in mark.hover],
            "hoverinfo": "text",
        }
    ]


def _arrows(mark: Arrows, area: Area, theme: Theme) -> list[dict[str, Any]]:
    groups: defaultdict[tuple[str, bool, float], list[int]] = defaultdict(list)
    for i, key in enumerate(zip(mark.colour, mark.combines, mark.width, strict=True)):
        groups[key].append(i)
    traces = []
    for (colour, combines, width), rows in groups.items():
        x: list[float | None] = []
        y: list[float | None] = []
        text: list[str] = []
        for i in rows:
            x0, x1, y0, y1 = mark.x0[i], mark.x1[i], mark.y0[i], mark.y1[i]
            x += [plotly_number(x0), plotly_number((x0 + x1) / 2), plotly_number(x1), None]
            y += [plotly_number(y0), plotly_number((y0 + y1) / 2), plotly_number(y1), None]
            text += ["", mark.hover[i], "", ""]
        ring = theme.colour(colour)
        head = {
            "symbol": "circle-cross" if combines else "arrow",
            "angleref": "up" if combines else "previous",
            "size": [0, 0, 8 if combines else 7 + width, 0] * len(rows),
            "color": theme.surface if combines else ring,
            "opacity": 1,
            "line": {"width": 1.2 if combines else 0, "color": ring},
        }
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "meta": "arrows",
                "x": x,
                "y": y,
                "hovertext": _hover(text),
                "hoverinfo": "text",
                "line": {"width": width * POINT, "color": ring},
                "marker": head,
                "cliponaxis": False,
            }
        )
    return traces


def _curve(mark: Curve, area: Area, theme: Theme) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "meta": "curve",
            "x": _numbers(mark.x),
            "y": _numbers(mark.y),
            "line": {"width": mark.width * POINT, "color": theme.colour(mark.colour), "dash": "dash" if mark.dash else "solid"},
            "hovertext": _hover(mark.hover),
            "hoverinfo": "text" if mark.hover else "skip",
        }
    ]


_SYMBOLS = {"dot": "circle", "diamond": "diamond", "bar": "line-ns-open"}


def _points(mark: Points, area: Area, theme: Theme) -> list[dict[str, Any]]:
    return (
        [
            {
                "type": "scatter",
                "mode": "markers",
                "meta": "points",
                "x": _numbers(mark.x),
                "y": _numbers(mark.y),
                "marker": {
                    "symbol": _SYMBOLS[mark.symbol],
                    "size": mark.size * 1.5,
                    "color": [theme.colour(c) for c in mark.colour],
                },
                "hovertext": _hover(mark.hover),
                "hoverinfo": "text",
                "cliponaxis": False,
            }
        ]
        if len(mark)
        else []
    )


def _texts(mark: Texts, area: Area, theme: Theme) -> list[dict[str, Any]]:
    # plotly names the side of the point on which the text stands.
    side = {"center": "middle center", "left": "middle right", "right": "middle left"}[mark.align]
    bold = "<b>{}</b>" if mark.bold else "{}"
    return (
        [
            {
                "type": "scatter",
                "mode": "text",
                "meta": "texts",
                "x": _numbers(mark.x),
                "y": _numbers(mark.y),
                "text": [bold.format(html.escape(t)) for t in mark.text],
                "textposition": side,
                "hoverinfo": "skip",
                "textfont": {"size": round(mark.size * POINT), "color": theme.colour(mark.colour)},
                "cliponaxis": False,
            }
        ]
        if len(mark)
        else []
    )


_TRACES: dict[type[Mark], Callable[[Any, Area, Theme], list[dict[str, Any]]]] = {
    Boxes: _boxes,
    Cells: _cells,
    Arrows: _arrows,
    Curve: _curve,
    Points: _points,
    Texts: _texts,
}


def mark_traces(mark: Mark, area: Area, theme: Theme) -> list[dict[str, Any]]:
    """Return the traces of a mark in a panel's area."""
    return _TRACES[type(mark)](mark, area, theme)


def legend_trace(entry: LegendEntry, theme: Theme) -> dict[str, Any]:
    """Return a trace without points, only for the legend."""
    colour = theme.colour(entry.colour)
    trace: dict[str, Any] = {
        "type": "scatter",
        "x": [None],
        "y": [None],
        "name": html.escape(entry.text),
        "showlegend": True,
        "meta": "legend",
        "hoverinfo": "skip",
        "mode": "markers",
        "marker": {"symbol": "square", "size": 12, "color": colour},
    }
    if entry.sample in ("line", "dash"):
        dash = "dash" if entry.sample == "dash" else "solid"
        trace |= {"mode": "lines", "line": {"width": 3, "color": colour, "dash": dash}}
    elif entry.sample in ("arrow", "ring"):
        ring = entry.sample == "ring"
        trace |= {"mode": "lines+markers", "line": {"width": 1.5, "color": colour}}
        trace["marker"] = {
            "symbol": "circle-cross" if ring else "arrow-right",
            "size": 9,
            "line": {"width": 1, "color": colour},
            "color": theme.surface if ring else colour,
        }
    elif entry.sample in _SYMBOLS:
        trace["marker"] = {"symbol": _SYMBOLS[entry.sample], "size": 9, "color": colour}
    return trace
