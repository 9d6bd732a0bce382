"""Link matrices: the amount of data that a schedule moves from each rank to each other one."""

from __future__ import annotations

import numpy as np

from ..core.display import bytes_text, size_text
from ..schedules.model.cost import chunk_bytes
from ..schedules.schedule import Schedule
from .drawing import Drawing
from .lanes import Lanes
from .moved_data import check_schedule, columns_between, schedule_title
from .scene import Axis, Cells, LegendEntry, Panel, Scene

__all__ = ["link_matrix"]

_RANKS, _LANES, _TEXT = 64, 32, 16
"""The most ranks that are drawn one by one; the groups of a summary; the most cells in a row that have texts."""


def link_matrix(schedule: Schedule, nbytes: int | None = None, *, theme: str | None = None) -> Drawing:
    """Draw how much a schedule moves from each rank (rows) to each other one (columns), over all its rounds.

    Above 64 ranks, rows and columns are groups of ranks, and the drawing says so.

    Args:
        schedule: The schedule.
        nbytes: The bytes of the larger of one rank's input and output. Amounts are then in bytes, and without it in chunks.
        theme: "light", "dark", or None for FUNCCOLL_THEME.

    Returns:
        A `Drawing`.

    Raises:
        ScheduleError: If `nbytes` is not positive.
        DrawingError: If `schedule` is not a schedule.

    Example:
        >>> print(fc.draw.link_matrix(fc.schedules.build("all_gather", 4, "ring"), 1024))
        <Drawing: all_gather on 4 ranks: ring, 3 rounds, 1 chunk per block, 1,024 bytes; .save("drawing.svg") writes it>
    """
    check_schedule(schedule, "link_matrix")
    size = None if nbytes is None else chunk_bytes(schedule.collective, nbytes)
    lanes = Lanes.of_ranks(schedule.collective, _RANKS, _LANES)
    chunks = np.zeros((len(lanes), len(lanes)), np.int64)
    for _, _, source, destination, count in columns_between(schedule):
        np.add.at(chunks, (lanes.lane_of[source], lanes.lane_of[destination]), count)
    amounts = chunks if size is None else chunks * size
    most = float(amounts.max(initial=0))
    texts = [[_amount(a, size is not None) if a else "" for a in row] for row in amounts.tolist()]
    hover = [
        [f"{_named(lanes, i)} → {_named(lanes, j)}: {_full(a, size is not None)}" if a else "" for j, a in enumerate(row)]
        for i, row in enumerate(amounts.tolist())
    ]
    values = [[0.12 + 0.88 * a / most if a else 0.0 for a in row] for row in amounts.tolist()]
    if len(lanes) > _TEXT:
        texts = [[""] * len(lanes) for _ in lanes.range()]
    pitch = 0.5 if len(lanes) <= 8 else 0.42 if len(lanes) <= 16 else 0.2 if len(lanes) <= 32 else 0.125
    y = lanes.axis("from rank")
    x = Axis(-0.5, len(lanes) - 0.5, "to rank" if lanes.each == 1 else "to ranks", y.ticks)
    side = max(1.1, pitch * len(lanes))
    edges = -0.5, len(lanes) - 0.5
    marks = (Cells(values, texts, hover), *lanes.borders(*edges), *lanes.borders(*edges, upright=True)) if most else ()
    panel = Panel(x, y, marks, side, max(0.9, side * 0.8))
    unit = "chunks" if size is None else "bytes"
    notes = [lanes.note()] if lanes.each > 1 else []
    if most:
        total = amounts.sum().item()
        notes.append(f"In {unit}: {_full(total, size is not None)} in all, at most {_full(most, size is not None)} in a cell.")
    else:
        notes.append("Nothing moves between ranks." if chunks.sum() == 0 else "No bytes move between ranks.")
    title = schedule_title(schedule) if nbytes is None else f"{schedule_title(schedule)}, {bytes_text(nbytes)} bytes"
    legend = (LegendEntry("nothing", "band"), LegendEntry("little", "s0.1200"), LegendEntry("most", "s1.0000")) if most else ()
    legend += lanes.legend() if most else ()
    return Drawing(Scene(title, (panel,), tuple(notes), legend), theme)


def _named(lanes: Lanes, lane: int) -> str:
    return f"rank{'s' * (lanes.each > 1)} {lanes.name(lane)}"


def _amount(amount: float, is_bytes: bool) -> str:
    return size_text(round(amount)) if is_bytes else f"{amount:,}"


def _full(amount: float, is_bytes: bool) -> str:
    if is_bytes:
        return f"{bytes_text(amount)} bytes"
    return f"{amount:,.0f} chunk{'s' if amount != 1 else ''}"
