"""The interactive renderer: a scene as plotly's JSON. Viewers need plotly for it, and this process does not."""

from __future__ import annotations

import html
import math
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
from .plotly_traces import DPI, POINT, Area, legend_trace, mark_traces, plotly_number
from .scene import Axis, Panel, Scene
from .themes import Theme

__all__ = ["plotly_figure", "plotly_json"]

_WIDEST = 1000.0
"""Pixels: a notebook's column."""
_FONT = "Arial, Helvetica, sans-serif"


def plotly_figure(scene: Scene, theme: Theme) -> Any:
    """Return the scene as a plotly.graph_objects.Figure. Raises MissingPackageError without plotly."""
    try:
        import plotly.graph_objects as objects
    except ImportError as error:
        raise missing("plotly", error) from error
    return objects.Figure(plotly_json(scene, theme))


def plotly_json(scene: Scene, theme: Theme) -> dict[str, Any]:
    """Return the scene as plotly's data and layout."""
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    page = _Page(scene)
    owners: list[int] = []
    for number, panel in enumerate(scene.panels):
        place = 0 if scene.steps else number
        before = len(traces)
        suffix = str(place + 1) if place else ""
        for order, mark in enumerate(panel.marks, 1):
            for trace in mark_traces(mark, Area(panel, *page.pixels(place)), theme):
                trace.update({"xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "showlegend": False})
                if trace["type"] != "heatmap":  # heatmaps are below all others
                    trace["zorder"] = order
                traces.append(trace)
        if number == place:
            page.add_axes(layout, panel, place, theme)
        owners += [number] * (len(traces) - before)
    for entry in scene.legend:
        traces.append(legend_trace(entry, theme))
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


class _Page:
    """Places of titles, panels, legend and slider in pixels."""

    def __init__(self, scene: Scene):
        self.scene = scene
        panels = scene.panels[:1] if scene.steps else scene.panels
        self.columns = max(1, min(scene.columns, len(panels)))
        self.rows = [range(i, min(i + self.columns, len(panels))) for i in range(0, len(panels), self.columns)]
        self.left = [max(_left(panels[i]) for i in range(j, len(panels), self.columns)) for j in range(self.columns)]
        inner = [max(panels[i].width for i in range(j, len(panels), self.columns)) * DPI for j in range(self.columns)]
        right = 24.0
        self.width = max(560.0, min(_WIDEST, sum(inner) + sum(self.left) + right * self.columns))
        room = self.width - sum(self.left) - right * self.columns
        self.inner = [room * w / sum(inner) for w in inner]
        self.right = right
        text = self.width - 30
        self.title = wrapped(scene.title, text, lambda t: estimated_width(t, TITLE_SIZE) * DPI)
        self.notes = [line for n in scene.notes for line in wrapped(n, text, lambda t: estimated_width(t, NOTE_SIZE) * DPI)]
        self.top = (len(self.title) * TITLE_SIZE + len(self.notes) * NOTE_SIZE) * 1.4 * POINT + 16
        self.heights = [max(panels[i].height for i in row) * DPI for row in self.rows]
        self.gaps = [24.0 + (22 if any(panels[i].x.label or panels[i].x.ticks for i in row) else 0) for row in self.rows]
        self.heads = [22.0 if any(panels[i].title for i in row) else 4.0 for row in self.rows]
        legend = sum(estimated_width(e.text, LEGEND_SIZE) * DPI + 62 for e in scene.legend)
        self.legend = math.ceil(legend / (self.width - 20)) * 24.0 + 6 if scene.legend else 0.0
        self.slider = 74.0 if scene.steps else 0.0
        self.middle = sum(self.heights) + sum(self.gaps) + sum(self.heads)
        self.height = self.top + self.middle + self.slider + self.legend + 8

    def area(self, place: int) -> tuple[float, float, float, float]:
        """Return (left, right, bottom, top) of a panel's area as parts of the page. The plot area is the whole page."""
        row, column = divmod(place, self.columns)
        x = sum(self.left[: column + 1]) + sum(self.inner[:column]) + self.right * column
        y = self.top + sum(self.heads[: row + 1]) + sum(self.heights[:row]) + sum(self.gaps[:row])
        w, h = self.width, self.height
        return x / w, (x + self.inner[column]) / w, 1 - (y + self.heights[row]) / h, 1 - y / h

    def pixels(self, place: int) -> tuple[float, float]:
        """Return the size of a panel's area."""
        left, right, bottom, top = self.area(place)
        return (right - left) * self.width, (top - bottom) * self.height

    def add_axes(self, layout: dict[str, Any], panel: Panel, place: int, theme: Theme) -> None:
        suffix = str(place + 1) if place else ""
        left, right, bottom, top = self.area(place)
        inner_width, inner_height = (pixels / DPI for pixels in self.pixels(place))
        x = _axis(panel.x, inner_width, True, theme)
        layout[f"xaxis{suffix}"] = {**x, "domain": [left, right], "anchor": f"y{suffix}"}
        if self.scene.shared_x and place:
            layout[f"xaxis{suffix}"]["matches"] = "x"
        layout[f"yaxis{suffix}"] = {
            **_axis(panel.y, inner_height, False, theme),
            "domain": [bottom, top],
            "anchor": f"x{suffix}",
        }
        if panel.title and not self.scene.steps:
            layout.setdefault("annotations", []).append(
                {
                    "text": f"<b>{html.escape(panel.title)}</b>",
                    "x": left,
                    "y": top,
                    "xref": "paper",
                    "yref": "paper",
                    "xanchor": "left",
                    "yanchor": "bottom",
                    "showarrow": False,
                    "font": {"size": 12, "color": theme.colour("ink")},
                }
            )

    def headings(self, theme: Theme) -> list[dict[str, Any]]:
        """Return the title and the notes. plotly's own title does not know where its second line ends."""
        out, y = [], 10.0
        for lines, size, role, form in ((self.title, TITLE_SIZE, "ink", "<b>{}</b>"), (self.notes, NOTE_SIZE, "muted", "{}")):
            for line in lines:
                out.append(
                    {
                        "text": form.format(html.escape(line)),
                        "x": 0,
                        "y": 1,
                        "xref": "paper",
                        "yref": "paper",
                        "xshift": 12,
                        "yshift": -round(y),
                        "xanchor": "left",
                        "yanchor": "top",
                        "showarrow": False,
                        "borderpad": 0,
                        "font": {"size": round(size * POINT), "color": theme.colour(role)},
                    }
                )
                y += size * 1.4 * POINT
        return out

    def layout(self, theme: Theme) -> dict[str, Any]:
        ink = theme.colour("ink")
        return {
            "width": round(self.width),
            "height": round(self.height),
            "margin": {"l": 0, "r": 0, "t": 0, "b": 0, "pad": 0},
            "paper_bgcolor": theme.surface,
            "plot_bgcolor": theme.surface,
            "font": {"family": _FONT, "size": 12, "color": ink},
            "hovermode": "closest",
            "barmode": "overlay",
            "bargap": 0,
            "hoverlabel": {"align": "left", "bgcolor": theme.band, "bordercolor": theme.grid, "font": {"color": ink}},
            "showlegend": bool(self.scene.legend),
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 0,
                "yanchor": "bottom",
                "xanchor": "left",
                "itemclick": False,
                "itemdoubleclick": False,
                "font": {"size": round(LEGEND_SIZE * POINT), "color": ink},
            },
        }


def _left(panel: Panel) -> float:
    """Return the pixels for the tick labels and the label of a panel's y axis."""
    widest = max((estimated_width(t, TICK_SIZE) * DPI for _, t in panel.y.ticks), default=0.0)
    return widest + (34 if panel.y.label else 14)


def _axis(axis: Axis, inches: float, horizontal: bool, theme: Theme) -> dict[str, Any]:
    ticks = visible_ticks(axis, inches, horizontal)
    ends = [math.log10(axis.lower), math.log10(axis.upper)] if axis.log else [axis.lower, axis.upper]
    return {
        "type": "log" if axis.log else "linear",
        "range": ends[::-1] if axis.reversed else ends,
        "title": {
            "text": html.escape(axis.label),
            "standoff": 6,
            "font": {"size": round(LABEL_SIZE * POINT), "color": theme.colour("muted")},
        },
        "tickmode": "array",
        "tickvals": [plotly_number(v) for v, _ in ticks],
        "ticktext": [html.escape(t) for _, t in ticks],
        "tickfont": {"size": round(TICK_SIZE * POINT), "color": theme.colour("ink")},
        "showgrid": axis.grid,
        "gridcolor": theme.colour("grid"),
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "ticklabelstandoff": 4,
    }


def _slider(scene: Scene, theme: Theme, owners: list[int], first: int, page: _Page) -> dict[str, Any]:
    steps = [
        {"method": "restyle", "label": html.escape(name), "args": [{"visible": [owner in (-1, i) for owner in owners]}]}
        for i, name in enumerate(scene.steps)
    ]
    y = (page.legend + page.slider) / page.height
    return {
        "active": first,
        "steps": steps,
        "x": page.left[0] / page.width,
        "len": 1 - (page.left[0] + 24) / page.width,
        "y": y,
        "yanchor": "top",
        "pad": {"t": 2, "b": 0},
        "currentvalue": {"prefix": "", "font": {"size": 13}},
        "tickcolor": theme.colour("muted"),
        "bgcolor": theme.colour("grid"),
        "bordercolor": theme.colour("grid"),
        "activebgcolor": theme.colour("accent"),
        "font": {"size": 10, "color": theme.colour("ink")},
        "minorticklen": 0,
    }
