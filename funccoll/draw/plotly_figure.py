"""The interactive renderer: a scene as plotly's JSON, for which viewers need plotly, and this process does not."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .page_layout import (
    LABEL_SIZE,
    LEGEND_SIZE,
    NOTE_SIZE,
    TICK_SIZE,
    TITLE_SIZE,
    estimated_width,
    missing,
    visible_ticks,
    wrapped,
)
from .scene import Arrows, Axis, Boxes, Cells, Curve, LegendEntry, Mark, Panel, Points, Scene, Texts
from .themes import Theme

__all__ = ["plotly_figure", "plotly_json"]

_DPI = 96
_POINT = _DPI / 72
_WIDEST = 1000.0
"""Pixels: a notebook's column."""
_FONT = "Arial, Helvetica, sans-serif"


def plotly_figure(scene: Scene, theme: Theme) -> Any:
    """The scene as a plotly.graph_objects.Figure. Raises MissingPackageError without plotly."""
    try:
        import plotly.graph_objects as objects
    except ImportError as error:
        raise missing("plotly", error) from error
    return objects.Figure(plotly_json(scene, theme))


def plotly_json(scene: Scene, theme: Theme) -> dict[str, Any]:
    """The scene as plotly's data and layout."""
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    page = _Page(scene)
    owners: list[int] = []
    for number, panel in enumerate(scene.panels):
        place = 0 if scene.steps else number
        before = len(traces)
        suffix = str(place + 1) if place else ""
        for order, mark in enumerate(panel.marks, 1):
            for trace in _TRACES[type(mark)](mark, _Area(panel, *page.pixels(place)), theme):
                trace.update({"xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "showlegend": False})
                if trace["type"] != "heatmap":  # which is below all others
                    trace["zorder"] = order
                traces.append(trace)
        if number == place:
            page.add_axes(layout, panel, place, theme)
        owners += [number] * (len(traces) - before)
    for entry in scene.legend:
        traces.append(_sample(entry, theme))
        owners.append(-1)
    layout["annotations"] = [*layout.get("annotations", ()), *page.headings(theme)]
    layout.update(page.layout(theme))
    if scene.steps:
        first = len(scene.steps) // 2
        for trace, owner in zip(traces, owners, strict=True):
            if owner not in (-1, first):
                trace["visible"] = False
        layout["sliders"] = [_slider(scene, theme, owners, first, page)]
    return {"data": traces, "layout": layout}


@dataclass(frozen=True)
class _Area:
    """A panel with the size of its area in pixels."""

    panel: Panel
    width: float
    height: float

    @property
    def pixels_per_unit(self) -> tuple[float, float]:
        """Of linear axes."""
        x, y = self.panel.x, self.panel.y
        return self.width / (x.upper - x.lower), self.height / (y.upper - y.lower)


class _Page:
    """Places of titles, panels, legend and slider in pixels."""

    def __init__(self, scene: Scene):
        self.scene = scene
        panels = scene.panels[:1] if scene.steps else scene.panels
        self.columns = max(1, min(scene.columns, len(panels)))
        self.rows = [range(i, min(i + self.columns, len(panels))) for i in range(0, len(panels), self.columns)]
        self.left = [max(_left(panels[i]) for i in range(j, len(panels), self.columns)) for j in range(self.columns)]
        inner = [max(panels[i].width for i in range(j, len(panels), self.columns)) * _DPI for j in range(self.columns)]
        right = 24.0
        self.width = max(560.0, min(_WIDEST, sum(inner) + sum(self.left) + right * self.columns))
        room = self.width - sum(self.left) - right * self.columns
        self.inner = [room * w / sum(inner) for w in inner]
        self.right = right
        text = self.width - 30
        self.title = wrapped(scene.title, text, lambda t: estimated_width(t, TITLE_SIZE) * _DPI)
        self.notes = [line for n in scene.notes for line in wrapped(n, text, lambda t: estimated_width(t, NOTE_SIZE) * _DPI)]
        self.top = (len(self.title) * TITLE_SIZE + len(self.notes) * NOTE_SIZE) * 1.4 * _POINT + 16
        self.heights = [max(panels[i].height for i in row) * _DPI for row in self.rows]
        self.gaps = [24.0 + (22 if any(panels[i].x.label or panels[i].x.ticks for i in row) else 0) for row in self.rows]
        self.heads = [22.0 if any(panels[i].title for i in row) else 4.0 for row in self.rows]
        legend = sum(estimated_width(e.text, LEGEND_SIZE) * _DPI + 62 for e in scene.legend)
        self.legend = math.ceil(legend / (self.width - 20)) * 24.0 + 6 if scene.legend else 0.0
        self.slider = 74.0 if scene.steps else 0.0
        self.middle = sum(self.heights) + sum(self.gaps) + sum(self.heads)
        self.height = self.top + self.middle + self.slider + self.legend + 8

    def area(self, place: int) -> tuple[float, float, float, float]:
        """(left, right, bottom, top) of a panel's area as parts of the page; the plot area is the whole page."""
        row, column = divmod(place, self.columns)
        x = sum(self.left[: column + 1]) + sum(self.inner[:column]) + self.right * column
        y = self.top + sum(self.heads[: row + 1]) + sum(self.heights[:row]) + sum(self.gaps[:row])
        w, h = self.width, self.height
        return x / w, (x + self.inner[column]) / w, 1 - (y + self.heights[row]) / h, 1 - y / h

    def pixels(self, place: int) -> tuple[float, float]:
        """The size of a panel's area."""
        left, right, bottom, top = self.area(place)
        return (right - left) * self.width, (top - bottom) * self.height

    def add_axes(self, layout: dict[str, Any], panel: Panel, place: int, theme: Theme) -> None:
        suffix = str(place + 1) if place else ""
        left, right, bottom, top = self.area(place)
        inner_width, inner_height = (pixels / _DPI for pixels in self.pixels(place))
        x = _axis(panel.x, inner_width, True, theme)
        layout[f"xaxis{suffix}"] = {**x, "domain": [left, right], "anchor": f"y{suffix}"}
        if self.scene.shared_x and place:
            layout[f"xaxis{suffix}"]["matches"] = "x"
        layout[f"yaxis{suffix}"] = {
            **_axis(panel.y, inner_height, False, theme), "domain": [bottom, top], "anchor": f"x{suffix}",
        }  # fmt: skip
        if panel.title and not self.scene.steps:
            layout.setdefault("annotations", []).append({
                "text": f"<b>{html.escape(panel.title)}</b>", "x": left, "y": top, "xref": "paper", "yref": "paper",
                "xanchor": "left", "yanchor": "bottom", "showarrow": False,
                "font": {"size": 12, "color": theme.colour("ink")},
            })  # fmt: skip

    def headings(self, theme: Theme) -> list[dict[str, Any]]:
        """The title and the notes; plotly's own title does not know where its second line ends."""
        out, y = [], 10.0
        for lines, size, role, form in ((self.title, TITLE_SIZE, "ink", "<b>{}</b>"), (self.notes, NOTE_SIZE, "muted", "{}")):
            for line in lines:
                out.append({
                    "text": form.format(html.escape(line)), "x": 0, "y": 1, "xref": "paper", "yref": "paper", "xshift": 12,
                    "yshift": -round(y), "xanchor": "left", "yanchor": "top", "showarrow": False, "borderpad": 0,
                    "font": {"size": round(size * _POINT), "color": theme.colour(role)},
                })  # fmt: skip
                y += size * 1.4 * _POINT
        return out

    def layout(self, theme: Theme) -> dict[str, Any]:
        ink = theme.colour("ink")
        return {
            "width": round(self.width), "height": round(self.height), "margin": {"l": 0, "r": 0, "t": 0, "b": 0, "pad": 0},
            "paper_bgcolor": theme.surface, "plot_bgcolor": theme.surface,
            "font": {"family": _FONT, "size": 12, "color": ink}, "hovermode": "closest", "barmode": "overlay", "bargap": 0,
            "hoverlabel": {"align": "left", "bgcolor": theme.band, "bordercolor": theme.grid, "font": {"color": ink}},
            "showlegend": bool(self.scene.legend),
            "legend": {"orientation": "h", "x": 0, "y": 0, "yanchor": "bottom", "xanchor": "left", "itemclick": False,
                       "itemdoubleclick": False, "font": {"size": round(LEGEND_SIZE * _POINT), "color": ink}},
        }  # fmt: skip


def _left(panel: Panel) -> float:
    """Pixels for the tick labels and the label of a panel's y axis."""
    widest = max((estimated_width(t, TICK_SIZE) * _DPI for _, t in panel.y.ticks), default=0.0)
    return widest + (34 if panel.y.label else 14)


def _axis(axis: Axis, inches: float, horizontal: bool, theme: Theme) -> dict[str, Any]:
    ticks = visible_ticks(axis, inches, horizontal)
    ends = [math.log10(axis.lower), math.log10(axis.upper)] if axis.log else [axis.lower, axis.upper]
    return {
        "type": "log" if axis.log else "linear", "range": ends[::-1] if axis.reversed else ends,
        "title": {"text": html.escape(axis.label), "standoff": 6,
                  "font": {"size": round(LABEL_SIZE * _POINT), "color": theme.colour("muted")}},
        "tickmode": "array", "tickvals": [_number(v) for v, _ in ticks], "ticktext": [html.escape(t) for _, t in ticks],
        "tickfont": {"size": round(TICK_SIZE * _POINT), "color": theme.colour("ink")}, "showgrid": axis.grid,
        "gridcolor": theme.colour("grid"), "zeroline": False, "showline": False, "ticks": "",
        "ticklabelstandoff": 4,
    }  # fmt: skip


def _number(value: float) -> float | None:
    """A number with six digits, so that the JSON is not longer than it must be; a gap in a line, NaN, is None."""
    if math.isnan(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) else short


def _numbers(values: Any) -> list[float | None]:
    return [_number(float(v)) for v in values]


def _hover(texts: Any) -> list[str]:
    return [html.escape(t, quote=False).replace("\n", "<br>") for t in texts]


# ---------------------------------------------------------------- marks


def _boxes(mark: Boxes, area: _Area, theme: Theme) -> list[dict[str, Any]]:
    corners = list(zip(mark.x0, mark.x1, mark.y0, mark.y1, strict=True))
    fills = [theme.colour(f) for f in mark.fill]
    trace = {
        "type": "bar", "orientation": "h", "meta": "boxes",
        "base": _numbers(a for a, _, _, _ in corners), "x": _numbers(b - a for a, b, _, _ in corners),
        "y": _numbers((c + d) / 2 for _, _, c, d in corners), "width": _numbers(abs(d - c) for _, _, c, d in corners),
        "marker": {"color": fills,
                   "line": {"width": 1 if mark.edge else 0,
                            "color": fills if mark.edge == "fill" else theme.colour(mark.edge or "surface")}},
        "hovertext": _hover(mark.hover), "hoverinfo": "text" if any(mark.hover) else "skip",
    }  # fmt: skip
    return [trace, *_labels(mark, area, theme)] if corners else []


def _labels(mark: Boxes, area: _Area, theme: Theme) -> list[dict[str, Any]]:
    """The texts in boxes that fit there. plotly's own texts of bars shrink or go where they have less room than they need."""
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
    return [{
        "type": "scatter", "mode": "text", "meta": "labels", "x": _numbers(x), "y": _numbers(y), "text": texts,
        "textposition": "middle center", "hoverinfo": "skip",
        "textfont": {"size": _one_or_all(sizes), "color": _one_or_all(colours)},
    }] if texts else []  # fmt: skip


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else values


def _cells(mark: Cells, area: _Area, theme: Theme) -> list[dict[str, Any]]:
    stops = [i / 8 for i in range(9)]
    return [{
        "type": "heatmap", "meta": "cells", "z": [[None if v is None else _number(v) for v in row] for row in mark.values],
        "zmin": 0, "zmax": 1, "showscale": False, "xgap": 1, "ygap": 1, "hoverongaps": False,
        "colorscale": [[s, theme.colour(f"s{s:.4f}")] for s in stops],
        "text": [list(row) for row in mark.text], "texttemplate": "%{text}" if any(map(any, mark.text)) else "",
        "textfont": {"size": 10},
        "hovertext": [_hover(row) for row in mark.hover], "hoverinfo": "text",
    }]  # fmt: skip


def _arrows(mark: Arrows, area: _Area, theme: Theme) -> list[dict[str, Any]]:
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
            x += [_number(x0), _number((x0 + x1) / 2), _number(x1), None]
            y += [_number(y0), _number((y0 + y1) / 2), _number(y1), None]
            text += ["", mark.hover[i], "", ""]
        ring = theme.colour(colour)
        head = {"symbol": "circle-cross" if combines else "arrow", "angleref": "up" if combines else "previous",
                "size": [0, 0, 8 if combines else 7 + width, 0] * len(rows), "color": theme.surface if combines else ring,
                "opacity": 1, "line": {"width": 1.2 if combines else 0, "color": ring}}  # fmt: skip
        traces.append({
            "type": "scatter", "mode": "lines+markers", "meta": "arrows", "x": x, "y": y, "hovertext": _hover(text),
            "hoverinfo": "text", "line": {"width": width * _POINT, "color": ring}, "marker": head, "cliponaxis": False,
        })  # fmt: skip
    return traces


def _curve(mark: Curve, area: _Area, theme: Theme) -> list[dict[str, Any]]:
    return [{
        "type": "scatter", "mode": "lines", "meta": "curve", "x": _numbers(mark.x), "y": _numbers(mark.y),
        "line": {"width": mark.width * _POINT, "color": theme.colour(mark.colour), "dash": "dash" if mark.dash else "solid"},
        "hovertext": _hover(mark.hover), "hoverinfo": "text" if mark.hover else "skip",
    }]  # fmt: skip


_SYMBOLS = {"dot": "circle", "diamond": "diamond", "bar": "line-ns-open"}


def _points(mark: Points, area: _Area, theme: Theme) -> list[dict[str, Any]]:
    return [{
        "type": "scatter", "mode": "markers", "meta": "points", "x": _numbers(mark.x), "y": _numbers(mark.y),
        "marker": {"symbol": _SYMBOLS[mark.symbol], "size": mark.size * 1.5, "color": [theme.colour(c) for c in mark.colour]},
        "hovertext": _hover(mark.hover), "hoverinfo": "text", "cliponaxis": False,
    }] if len(mark) else []  # fmt: skip


def _texts(mark: Texts, area: _Area, theme: Theme) -> list[dict[str, Any]]:
    # plotly names the side on which the text stands, seen from its point.
    side = {"center": "middle center", "left": "middle right", "right": "middle left"}[mark.align]
    bold = "<b>{}</b>" if mark.bold else "{}"
    return [{
        "type": "scatter", "mode": "text", "meta": "texts", "x": _numbers(mark.x), "y": _numbers(mark.y),
        "text": [bold.format(html.escape(t)) for t in mark.text], "textposition": side, "hoverinfo": "skip",
        "textfont": {"size": round(mark.size * _POINT), "color": theme.colour(mark.colour)}, "cliponaxis": False,
    }] if len(mark) else []  # fmt: skip


_TRACES: dict[type[Mark], Callable[[Any, _Area, Theme], list[dict[str, Any]]]] = {
    Boxes: _boxes, Cells: _cells, Arrows: _arrows, Curve: _curve, Points: _points, Texts: _texts,
}  # fmt: skip


def _sample(entry: LegendEntry, theme: Theme) -> dict[str, Any]:
    """A trace without points, which only stands in the legend."""
    colour = theme.colour(entry.colour)
    trace: dict[str, Any] = {
        "type": "scatter", "x": [None], "y": [None], "name": html.escape(entry.text), "showlegend": True, "meta": "legend",
        "hoverinfo": "skip", "mode": "markers", "marker": {"symbol": "square", "size": 12, "color": colour},
    }  # fmt: skip
    if entry.sample in ("line", "dash"):
        dash = "dash" if entry.sample == "dash" else "solid"
        trace |= {"mode": "lines", "line": {"width": 3, "color": colour, "dash": dash}}
    elif entry.sample in ("arrow", "ring"):
        ring = entry.sample == "ring"
        trace |= {"mode": "lines+markers", "line": {"width": 1.5, "color": colour}}
        trace["marker"] = {"symbol": "circle-cross" if ring else "arrow-right", "size": 9,
                           "line": {"width": 1, "color": colour}, "color": theme.surface if ring else colour}  # fmt: skip
    elif entry.sample in _SYMBOLS:
        trace["marker"] = {"symbol": _SYMBOLS[entry.sample], "size": 9, "color": colour}
    return trace


def _slider(scene: Scene, theme: Theme, owners: list[int], first: int, page: _Page) -> dict[str, Any]:
    steps = [
        {"method": "restyle", "label": html.escape(name), "args": [{"visible": [owner in (-1, i) for owner in owners]}]}
        for i, name in enumerate(scene.steps)
    ]
    y = (page.legend + page.slider) / page.height
    return {
        "active": first, "steps": steps, "x": page.left[0] / page.width, "len": 1 - (page.left[0] + 24) / page.width,
        "y": y, "yanchor": "top", "pad": {"t": 2, "b": 0}, "currentvalue": {"prefix": "", "font": {"size": 13}},
        "tickcolor": theme.colour("muted"), "bgcolor": theme.colour("grid"), "bordercolor": theme.colour("grid"),
        "activebgcolor": theme.colour("accent"), "font": {"size": 10, "color": theme.colour("ink")}, "minorticklen": 0,
    }  # fmt: skip
