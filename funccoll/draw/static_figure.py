"""The static renderer: a scene as SVG or PNG by matplotlib, through its object-oriented interface.

Equal scenes give equal bytes: matplotlib's own defaults apply, whatever you have set, and your settings are put back.
"""

from __future__ import annotations

import io
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from .page_layout import (
    LABEL_SIZE,
    LEGEND_SIZE,
    NOTE_SIZE,
    PANEL_TITLE_SIZE,
    TICK_SIZE,
    TITLE_SIZE,
    missing,
    visible_ticks,
    wrapped,
)
from .scene import Arrows, Axis, Boxes, Cells, Curve, LegendEntry, Mark, Panel, Points, Scene, Texts
from .themes import Theme

__all__ = ["page", "png_bytes", "svg_text"]

_FONT = "DejaVu Sans"  # in every installation of matplotlib
_EDGE = 0.14  # inches around everything
_TITLE = 8.5  # inches that a panel's title may take; a longer one is cut to the page
_RENDERING = threading.Lock()
"""Held while matplotlib's settings are ours. All threads share them."""
_LINE = 1.35  # of a text's size, from line to line


def svg_text(scene: Scene, theme: Theme, inline: bool = False) -> str:
    """Return the scene as SVG: a file with outlines as texts, or smaller, with plain texts, for use inline in HTML.

    Raises MissingPackageError without matplotlib.
    """
    with _own_settings("none" if inline else "path"):
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        buffer = io.StringIO()
        metadata = {"Date": None, "Title": scene.title}
        FigureCanvasSVG(page(scene, theme)).print_svg(buffer, metadata=metadata)
        text = buffer.getvalue()
    if not inline:
        return text
    text = text[text.index("<svg") :].replace(f"'{_FONT}'", f"'{_FONT}', Verdana, Arial, sans-serif")
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)


def png_bytes(scene: Scene, theme: Theme, dpi: float = 150, colours: int = 0, most: float = math.inf) -> bytes:
    """Return the scene as PNG, at most `most` pixels wide, with `colours` in a palette if given.

    Raises MissingPackageError without matplotlib.
    """
    with _own_settings():
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = page(scene, theme)
        figure.set_dpi(min(dpi, most / figure.get_figwidth()))
        canvas, buffer = FigureCanvasAgg(figure), io.BytesIO()
        if not colours:
            canvas.print_png(buffer, metadata={"Software": None, "Title": scene.title})
            return buffer.getvalue()
        from PIL import Image  # matplotlib's own

        canvas.draw()
        image = Image.fromarray(_rgb(canvas))
        image.quantize(colours, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
        return buffer.getvalue()


def _rgb(canvas: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


@contextmanager
def _own_settings(svg_texts: str = "path") -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise missing("matplotlib", error) from error
    # matplotlib.style would do it, but imports pyplot. The backend is yours, and rc_context does not put it back.
    own: Any = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    with _RENDERING, matplotlib.rc_context({**own, "svg.hashsalt": "funccoll", "svg.fonttype": svg_texts}):
        yield


@lru_cache(maxsize=4096)
def _measured(text: str, size: float, bold: bool = False) -> float:
    """Return the width of a text in inches."""
    from matplotlib.textpath import text_to_path

    return text_to_path.get_text_width_height_descent(text, _font(size, bold), ismath=False)[0] / 72


@lru_cache(maxsize=64)
def _font(size: float, bold: bool = False) -> Any:
    from matplotlib.font_manager import FontProperties

    return FontProperties(family=[_FONT], size=size, weight="bold" if bold else "normal")


# ---------------------------------------------------------------- the page


def page(scene: Scene, theme: Theme) -> Any:
    """Return the scene as a matplotlib Figure without a canvas."""
    from matplotlib.figure import Figure

    panels = scene.static_panels
    columns = max(1, min(scene.columns, len(panels)))
    margins = [_margins(p) for p in panels]
    rows = [range(i, min(i + columns, len(panels))) for i in range(0, len(panels), columns)]
    in_column = [range(j, len(panels), columns) for j in range(columns)]
    lefts = [max(margins[i][0] for i in column) for column in in_column]
    titles = [min(_measured(p.title, PANEL_TITLE_SIZE, True), _TITLE) for p in panels]
    widths = [
        left + max(max(panels[i].width + margins[i][1], titles[i] + 0.15) for i in column)
        for left, column in zip(lefts, in_column, strict=True)
    ]
    width = max(sum(widths), 4.6) + 2 * _EDGE
    room = width - 2 * _EDGE
    title = wrapped(scene.title, room, lambda t: _measured(t, TITLE_SIZE, True))
    notes = [line for note in scene.notes for line in wrapped(note, room, lambda t: _measured(t, NOTE_SIZE))]
    legend = _legend_rows(scene.legend, room)
    head = (len(title) * TITLE_SIZE + len(notes) * NOTE_SIZE) * _LINE / 72 + 0.08
    heights = [max(margins[i][2] + panels[i].height + margins[i][3] for i in row) for row in rows]
    foot = len(legend) * LEGEND_SIZE * 1.7 / 72 + (0.06 if legend else 0)
    height = head + sum(heights) + foot + 2 * _EDGE
    figure = Figure(figsize=(width, height), facecolor=theme.surface)

    def text(x: float, y: float, words: str, size: float, role: str, bold: bool = False) -> None:
        figure.text(
            x / width, y / height, words, color=theme.colour(role), fontproperties=_font(size, bold), va="top", parse_math=False
        )

    y = height - _EDGE
    for line in title:
        text(_EDGE, y, line, TITLE_SIZE, "ink", True)
        y -= TITLE_SIZE * _LINE / 72
    for line in notes:
        text(_EDGE, y, line, NOTE_SIZE, "muted")
        y -= NOTE_SIZE * _LINE / 72
    y = height - _EDGE - head
    for row, tall in zip(rows, heights, strict=True):
        x = _EDGE
        for j, i in enumerate(row):
            panel, (_, _, top, _) = panels[i], margins[i]
            at = (x + lefts[j], y - top - panel.height, panel.width, panel.height)
            if panel.title:
                text(at[0], y - 0.03, _cut(panel.title, room), PANEL_TITLE_SIZE, "ink", True)
            axes = figure.add_axes((at[0] / width, at[1] / height, at[2] / width, at[3] / height))
            _panel(axes, panel, theme)
            x += widths[j]
        y -= tall
    _legend(figure, legend, theme, y - 0.06, width, height)
    return figure


def _margins(panel: Panel) -> tuple[float, float, float, float]:
    """Return the room around the area of a panel, in inches: left, right, top, bottom."""
    ys = [_measured(text, TICK_SIZE) for _, text in visible_ticks(panel.y, panel.height, False)]
    xs = visible_ticks(panel.x, panel.width, True)
    left = max(ys, default=0.0) + 0.1 + (LABEL_SIZE * 1.5 / 72 if panel.y.label else 0)
    right = 0.16
    if xs:
        end = xs[-1]
        over = _measured(end[1], TICK_SIZE) / 2 - (1 - _part(panel.x, end[0])) * panel.width
        right = max(right, over + 0.04)
        left = max(left, _measured(xs[0][1], TICK_SIZE) / 2 - _part(panel.x, xs[0][0]) * panel.width)
    bottom = 0.1 + (TICK_SIZE * 1.5 / 72 if xs else 0) + (LABEL_SIZE * 1.5 / 72 if panel.x.label else 0)
    top = PANEL_TITLE_SIZE * 1.6 / 72 if panel.title else 0.02
    over, above = (  # for labels that are longer than their axis
        (_measured(axis.label, LABEL_SIZE) - length) / 2 for axis, length in ((panel.x, panel.width), (panel.y, panel.height))
    )
    return max(left, over + 0.03), max(right, over + 0.03), max(top, above + 0.03), max(bottom, above + 0.03)


def _cut(title: str, room: float) -> str:
    """Return a panel's title, cut if it is wider than the page."""
    if _measured(title, PANEL_TITLE_SIZE, True) <= room - 1.0:
        return title
    fits = (n for n in range(len(title), 0, -1) if _measured(title[:n] + "…", PANEL_TITLE_SIZE, True) <= room - 1.0)
    return title[: next(fits, 0)] + "…"


def _part(axis: Axis, value: float) -> float:
    """Return the place of a value on its axis, from 0 to 1."""
    if axis.log:
        return math.log(value / axis.lower) / math.log(axis.upper / axis.lower)
    return (value - axis.lower) / (axis.upper - axis.lower)


def _legend_rows(entries: Sequence[LegendEntry], room: float) -> list[list[tuple[float, LegendEntry]]]:
    rows: list[list[tuple[float, LegendEntry]]] = []
    x = math.inf
    for entry in entries:
        wide = 0.31 + _measured(entry.text, LEGEND_SIZE) + 0.15
        if x + wide > room:
            rows.append([])
            x = 0.0
        rows[-1].append((x, entry))
        x += wide
    return rows


def _legend(
    figure: Any, rows: list[list[tuple[float, LegendEntry]]], theme: Theme, top: float, width: float, height: float
) -> None:
    if not rows:
        return
    tall = LEGEND_SIZE * 1.7 / 72
    axes = figure.add_axes((0, (top - tall * len(rows)) / height, 1, tall * len(rows) / height))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(len(rows), 0))
    area = Panel(Axis(0, width), Axis(0, len(rows)), (), width, tall * len(rows))
    for i, row in enumerate(rows):
        for x, entry in row:
            x, y = x + _EDGE, i + 0.5
            sample = _sample(entry, x, y)
            _MARKS[type(sample)](axes, sample, area, theme, 2.0)
            axes.text(
                x + 0.31,
                y,
                entry.text,
                color=theme.colour("ink"),
                fontproperties=_font(LEGEND_SIZE),
                va="center",
                parse_math=False,
            )


def _sample(entry: LegendEntry, x: float, y: float) -> Mark:
    """The mark that stands for an entry, from x on around y."""
    match entry.sample:
        case "box":
            return Boxes([x], [x + 0.24], [y - 0.34], [y + 0.34], [entry.colour], [""])
        case "arrow" | "ring":
            ring = entry.sample == "ring"
            return Arrows([x], [y], [x + (0.19 if ring else 0.24)], [y], [entry.colour], [ring], [1.3], [""])
        case "dot" | "diamond" | "bar":
            return Points([x + 0.12], [y], [entry.colour], [""], entry.sample)
    return Curve([x, x + 0.24], [y, y], entry.colour, 2.4, entry.sample == "dash")


# ---------------------------------------------------------------- panels and marks


def _panel(axes: Any, panel: Panel, theme: Theme) -> None:
    axes.set_facecolor(theme.surface)
    for side in axes.spines.values():
        side.set_visible(False)
    both = (axes.xaxis, panel.x, panel.width, True), (axes.yaxis, panel.y, panel.height, False)
    for axis, spec, inches, horizontal in both:
        ends = (spec.upper, spec.lower) if spec.reversed else (spec.lower, spec.upper)
        if spec.log:
            (axes.set_xscale if horizontal else axes.set_yscale)("log")
        (axes.set_xlim if horizontal else axes.set_ylim)(*ends)
        axis.set_ticks([], minor=True)
        shown = visible_ticks(spec, inches, horizontal)
        axis.set_ticks([v for v, _ in shown], [t for _, t in shown], fontproperties=_font(TICK_SIZE), parse_math=False)
        axis.set_tick_params(length=0, labelcolor=theme.colour("ink"), pad=3)
        axis.set_label_text(spec.label, color=theme.colour("muted"), fontproperties=_font(LABEL_SIZE), parse_math=False)
        axis.labelpad = 3
        if spec.grid:
            axis.grid(True, color=theme.colour("grid"), linewidth=0.6)
            axes.set_axisbelow(True)
    for number, mark in enumerate(panel.marks):
        _MARKS[type(mark)](axes, mark, panel, theme, 2.0 + number)


def _inches_per_unit(panel: Panel) -> tuple[float, float]:
    return panel.width / (panel.x.upper - panel.x.lower), panel.height / (panel.y.upper - panel.y.lower)


def _boxes(axes: Any, mark: Boxes, panel: Panel, theme: Theme, order: float) -> None:
    from matplotlib.collections import PolyCollection

    corners = zip(mark.x0, mark.x1, mark.y0, mark.y1, strict=True)
    fills = [theme.colour(f) for f in mark.fill]
    edge: Any = fills if mark.edge == "fill" else theme.colour(mark.edge) if mark.edge else "none"
    axes.add_collection(
        PolyCollection(
            [((a, c), (b, c), (b, d), (a, d)) for a, b, c, d in corners],
            facecolors=fills,
            edgecolors=edge,
            linewidths=0.7 if mark.edge else 0.0,
            zorder=order,
        ),
        autolim=False,
    )
    sx, sy = _inches_per_unit(panel)
    for i, text in enumerate(mark.text):
        wide, tall = abs(mark.x1[i] - mark.x0[i]) * sx, abs(mark.y1[i] - mark.y0[i]) * sy
        middle = (mark.x0[i] + mark.x1[i]) / 2, (mark.y0[i] + mark.y1[i]) / 2
        _inside(axes, *middle, text, wide, tall, theme.text_on(mark.fill[i]), order)


def _inside(axes: Any, x: float, y: float, text: str, wide: float, tall: float, colour: str, order: float) -> None:
    """Draw a text in a box, in the largest size that fits. Draws none if none does."""
    lines = text.split("\n")
    for size in (8.0, 7.0, 6.0, 5.0, 4.5) if text else ():
        least = max(map(len, lines)) * size * 0.25 / 72  # a quick answer for the many boxes that are far too small
        fits = len(lines) * size * 1.2 / 72 <= tall and least < wide
        if fits and all(_measured(t, size) <= wide - 0.03 for t in lines):
            axes.text(
                x,
                y,
                text,
                color=colour,
                fontproperties=_font(size),
                ha="center",
                va="center_baseline",
                zorder=order + 0.5,
                parse_math=False,
                linespacing=1.15,
            )
            return


def _cells(axes: Any, mark: Cells, panel: Panel, theme: Theme, order: float) -> None:
    x0, x1, y0, y1, fill, text = [], [], [], [], [], []
    for i, row in enumerate(mark.values):
        for j, value in enumerate(row):
            if value is not None:
                gap = 0.03
                x0.append(j - 0.5 + gap)
                x1.append(j + 0.5 - gap)
                y0.append(i - 0.5 + gap)
                y1.append(i + 0.5 - gap)
                fill.append(f"s{value:.4f}")
                text.append(mark.text[i][j])
    _boxes(axes, Boxes(x0, x1, y0, y1, fill, text, text), panel, theme, order)


def _arrows(axes: Any, mark: Arrows, panel: Panel, theme: Theme, order: float) -> None:
    from matplotlib.collections import LineCollection, PolyCollection

    if not len(mark):
        return
    sx, sy = _inches_per_unit(panel)
    lines, heads, colours = [], [], [theme.colour(c) for c in mark.colour]
    rings: list[int] = []
    for i, (x0, y0, x1, y1) in enumerate(zip(mark.x0, mark.y0, mark.x1, mark.y1, strict=True)):
        dx, dy = (x1 - x0) * sx, (y1 - y0) * sy
        length = math.hypot(dx, dy) or 1.0
        ux, uy = dx / length, dy / length
        if mark.combines[i]:
            rings.append(i)
            lines.append(((x0, y0), (x1, y1)))
            heads.append(())
            continue
        long, half = 0.065 + 0.02 * mark.width[i], 0.022 + 0.011 * mark.width[i]
        bx, by = x1 - ux * long / sx, y1 - uy * long / sy
        lines.append(((x0, y0), (bx, by)))
        heads.append(((x1, y1), (bx - uy * half / sx, by + ux * half / sy), (bx + uy * half / sx, by - ux * half / sy)))
    axes.add_collection(
        LineCollection(lines, colors=colours, linewidths=list(mark.width), capstyle="butt", zorder=order), autolim=False
    )
    tips = [(h, c) for h, c in zip(heads, colours, strict=True) if h]
    if tips:
        polygons, fills = zip(*tips, strict=True)
        axes.add_collection(PolyCollection(polygons, facecolors=fills, edgecolors="none", zorder=order), autolim=False)
    if rings:
        xs, ys = [mark.x1[i] for i in rings], [mark.y1[i] for i in rings]
        edges = [colours[i] for i in rings]
        axes.scatter(
            xs,
            ys,
            s=30,
            marker="o",
            facecolors=theme.surface,
            edgecolors=edges,
            linewidths=1.1,
            zorder=order + 0.1,
            clip_on=False,
        )
        axes.scatter(xs, ys, s=17, marker="+", c=edges, linewidths=1.0, zorder=order + 0.2, clip_on=False)


def _curve(axes: Any, mark: Curve, panel: Panel, theme: Theme, order: float) -> None:
    axes.plot(
        list(mark.x),
        list(mark.y),
        color=theme.colour(mark.colour),
        linewidth=mark.width,
        linestyle=(0, (3, 2)) if mark.dash else "solid",
        solid_capstyle="round",
        zorder=order,
        scalex=False,
        scaley=False,
    )


_SYMBOLS = {"dot": "o", "diamond": "D", "bar": "|"}


def _points(axes: Any, mark: Points, panel: Panel, theme: Theme, order: float) -> None:
    axes.scatter(
        list(mark.x),
        list(mark.y),
        c=[theme.colour(c) for c in mark.colour],
        s=mark.size**2,
        marker=_SYMBOLS[mark.symbol],
        linewidths=1.2 if mark.symbol == "bar" else 0.0,
        zorder=order,
        clip_on=False,
    )


def _texts(axes: Any, mark: Texts, panel: Panel, theme: Theme, order: float) -> None:
    for x, y, text in zip(mark.x, mark.y, mark.text, strict=True):
        axes.text(
            x,
            y,
            text,
            color=theme.colour(mark.colour),
            fontproperties=_font(mark.size, mark.bold),
            ha=mark.align,
            va="center",
            zorder=order,
            parse_math=False,
        )


_MARKS: dict[type[Mark], Callable[[Any, Any, Panel, Theme, float], None]] = {
    Boxes: _boxes,
    Cells: _cells,
    Arrows: _arrows,
    Curve: _curve,
    Points: _points,
    Texts: _texts,
}
