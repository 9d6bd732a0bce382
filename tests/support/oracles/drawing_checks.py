"""Checks of drawings: texts that do not overlap, colours with contrast, plotly's marks, the schedule's moves."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np

from funccoll.draw.drawing import Drawing
from funccoll.draw.plotly_figure import plotly_json
from funccoll.draw.scene import Arrows, Boxes, Cells, Curve, Points, Scene, Texts
from funccoll.draw.static_figure import _own_settings, page
from funccoll.draw.themes import LEAST_CONTRAST, THEMES, contrast
from funccoll.schedules.schedule import Schedule

KINDS = {Arrows: "arrows", Boxes: "boxes", Cells: "cells", Curve: "curve", Points: "points", Texts: "texts"}


def overlapping_texts(drawing: Drawing) -> list[tuple[str, str]]:
    """Pairs of texts of the static form whose extents meet, and texts that leave the page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    with _own_settings():
        figure = page(drawing.scene, THEMES["light"])
        renderer: Any = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()  # it places the ticks
        texts = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
        boxes = [t.get_window_extent(renderer) for t in texts]
    wrong = []
    for t, b in zip(texts, boxes, strict=True):
        if b.x0 < -1 or b.y0 < -1 or b.x1 > figure.bbox.x1 + 1 or b.y1 > figure.bbox.y1 + 1:
            wrong.append((t.get_text(), "the edge of the page"))
    bounds = np.array([b.extents for b in boxes]).reshape(-1, 4)
    x0, y0, x1, y1 = bounds.T
    meet = np.minimum(x1[:, None], x1) - np.maximum(x0[:, None], x0), np.minimum(y1[:, None], y1) - np.maximum(y0[:, None], y0)
    both = (meet[0] > 1) & (meet[1] > 1.5)  # a pixel or two of descent do not show
    return wrong + [(texts[i].get_text(), texts[j].get_text()) for i, j in np.argwhere(np.triu(both, 1))]


def marks_of(scene: Scene) -> Counter[str]:
    """The number of marks of each kind in all panels."""
    found: Counter[str] = Counter()
    for panel in scene.panels:
        for mark in panel.marks:
            found[KINDS[type(mark)]] += len(mark)
    return +found


def marks_of_plotly(figure: dict) -> Counter[str]:
    """The number of marks of each kind in plotly's JSON."""
    found: Counter[str] = Counter()
    for trace in figure["data"]:
        kind = trace["meta"]
        match kind:
            case "arrows":
                found[kind] += sum(x is None for x in trace["x"])
            case "cells":
                found[kind] += sum(v is not None for row in trace["z"] for v in row)
            case "curve":
                found[kind] += 1
            case "legend" | "labels":
                continue
            case _:
                found[kind] += len(trace["x"])
    return +found


def check_scene(scene: Scene) -> None:
    """Check what no scene may lack: a title, labels of axes, marks within the axes, columns of one length."""
    assert scene.title and scene.panels
    for panel in scene.panels:
        assert panel.width > 0 and panel.height > 0 and panel.x.upper > panel.x.lower and panel.y.upper > panel.y.lower
        for mark in panel.marks:
            columns = [v for v in vars(mark).values() if isinstance(v, (list, tuple)) and v]
            assert len({len(c) for c in columns}) <= 1, type(mark)
            for axis, names in ((panel.x, ("x", "x0", "x1")), (panel.y, ("y", "y0", "y1"))):
                values = [v for n in names for v in np.atleast_1d(getattr(mark, n, [])) if not np.isnan(v)]
                assert all(axis.lower - 1e-9 <= v <= axis.upper + 1e-9 for v in values), (type(mark), axis, values)


def check_colours(scene: Scene) -> None:
    """Check that every text can be read in both themes, and that what differs in colour is not alone in it."""
    for theme in THEMES.values():
        for role in ("ink", "muted"):
            assert contrast(theme.colour(role), theme.surface) >= LEAST_CONTRAST
        for panel in scene.panels:
            for mark in panel.marks:
                if isinstance(mark, Boxes):
                    for fill in mark.fill:
                        assert contrast(theme.text_on(fill), theme.colour(fill)) >= LEAST_CONTRAST
                if isinstance(mark, Texts):
                    assert contrast(theme.colour(mark.colour), theme.surface) >= LEAST_CONTRAST


def check_drawing(drawing: Drawing, validate: bool = False) -> None:
    """All checks of one drawing; `validate` lets plotly itself judge the figure."""
    check_scene(drawing.scene)
    check_colours(drawing.scene)
    assert overlapping_texts(drawing) == []
    for theme in THEMES.values():
        figure = plotly_json(drawing.scene, theme)
        assert theme.name == "dark" or json.loads(json.dumps(figure, allow_nan=False)) == figure
        assert marks_of_plotly(figure) == marks_of(drawing.scene)
    if validate:
        assert len(drawing.to_plotly().data) == len(figure["data"])


def moves_between(schedule: Schedule) -> Counter[tuple[int, int, int, bool]]:
    """(round, from rank, to rank, combined) of every chunk that a move reads from, or writes to, another rank."""
    found: Counter[tuple[int, int, int, bool]] = Counter()
    for move in schedule.moves:
        for source in move.srcs:
            if source.rank != move.by:
                found[move.round, source.rank, move.by, len(move.srcs) > 1] += 1
        for destination in move.dsts:
            if destination.rank != move.by:
                found[move.round, move.by, destination.rank, False] += 1
    return found


def arrows_between(scene: Scene) -> Counter[tuple[int, int, int, bool]]:
    """The same of the arrows of a space-time diagram; a thick one is all chunks of a message."""
    (arrows,) = (m for p in scene.panels for m in p.marks if isinstance(m, Arrows))
    found: Counter[tuple[int, int, int, bool]] = Counter()
    for x0, y0, y1, combines in zip(arrows.x0, arrows.y0, arrows.y1, arrows.combines, strict=True):
        found[int(x0), round(y0), round(y1), combines] += 1
    return found


def pairs_apart(values: list[float], apart: float) -> bool:
    """True when all values are at least `apart` from each other."""
    return all(abs(a - b) >= apart - 1e-9 for a, b in combinations(values, 2))
