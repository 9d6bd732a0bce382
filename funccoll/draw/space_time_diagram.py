"""Space-time diagrams of schedules (Lamport, CACM 21(7), 1978): ranks across, rounds along, moves as arrows."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ..schedules.schedule import Schedule
from .drawing import Drawing
from .lanes import Lanes
from .moved_data import Transfer, check_schedule, columns_between, schedule_title, transfers
from .scene import Arrows, Axis, Boxes, Curve, LegendEntry, Mark, Panel, Points, Scene
from .themes import PALETTE, series

__all__ = ["space_time"]

_RANKS, _ROUNDS = 16, 40
"""The most ranks and rounds that are drawn one by one."""
_LANES, _COLUMNS = 16, 24
"""Lanes and columns of the summary form."""
_STRIPES = 4
"""The most chunks of a message that are drawn side by side. More of them are one thick arrow."""
_DENSE = 6
"""The most chunks that a rank sends in a round, on average, before arrows are thin."""
_GAP, _BOX = 0.07, 0.19
"""The part of a round before and after its arrows; the width of a sent box in inches."""


def space_time(schedule: Schedule, *, theme: str | None = None) -> Drawing:
    """Draw the moves of a schedule as arrows between ranks, round by round, coloured by the chunk that moves.

    A chunk that is combined with others at its destination has a ring there, and a copied one an arrow's head. A dot is a copy
    on one rank. The box at an arrow's beginning has the number of the chunk. Above 16 ranks, or 40 rounds, lanes are groups of
    ranks and columns groups of rounds, and the drawing says so. A wrong schedule is drawn, too.

    Args:
        schedule: The schedule.
        theme: "light", "dark", or None for FUNCCOLL_THEME.

    Returns:
        A `Drawing`.

    Raises:
        DrawingError: If `schedule` is not a schedule.

    Example:
        >>> print(fc.draw.space_time(fc.schedules.build("all_reduce", 4, "ring")))
        <Drawing: all_reduce on 4 ranks: ring, 6 rounds, 4 chunks per block; .save("drawing.svg") writes it>
    """
    check_schedule(schedule, "space_time")
    if schedule.nranks > _RANKS or schedule.nrounds > _ROUNDS:
        return Drawing(_summary(schedule), theme)
    return Drawing(_detailed(schedule), theme)


def _detailed(schedule: Schedule) -> Scene:
    moved = transfers(schedule)
    p, rounds = schedule.nranks, max(1, schedule.nrounds)
    ncolours = moved.ncolours
    height = p * (0.42 if p <= 8 else 0.34)
    width = min(max(3.6, rounds * (0.95 if rounds <= 8 else 0.6 if rounds <= 16 else 0.42)), 13.0)
    messages: defaultdict[tuple[int, int, int, int], list[Transfer]] = defaultdict(list)
    for t in moved.between:
        messages[t.round, t.hop, t.source, t.destination].append(t)
    dense = len(moved.between) > _DENSE * p * rounds
    width = max(width, 5.5) if dense else width
    lanes = Lanes.of_ranks(schedule.collective, _RANKS, _LANES)
    marks: list[Mark] = [_lines(p, rounds), *lanes.borders(0.0, float(rounds))]
    box = min(0.4, _BOX * rounds / width)
    boxes, boxed = _sent_boxes(moved.between, lanes, ncolours, box)
    if boxes is not None:
        marks.append(boxes)
    marks.append(_arrows(messages, boxed, lanes, ncolours, box, 0.7 if dense else 1.3))
    if moved.local:
        rows = sorted({(t.round, t.source): t for t in moved.local}.items())
        marks.append(
            Points(
                [r + 0.5 for (r, _), _ in rows],
                [int(lanes.lane_of[s]) for (_, s), _ in rows],
                ["muted"] * len(rows),
                [f"round {r}: rank {s} copies within its own memory" for (r, s), _ in rows],
                "dot",
                3.4,
            )
        )
    ticks = tuple((r + 0.5, str(r)) for r in range(schedule.nrounds))
    x = Axis(0.0, float(rounds), "round", ticks)
    notes = () if moved.between else ("Nothing moves between ranks.",)
    panel = Panel(x, lanes.axis(), tuple(marks), width, max(0.5, height))
    legend = _legend(moved.between, bool(moved.local), moved.names) + lanes.legend()
    return Scene(schedule_title(schedule), (panel,), notes + moved.notes, legend)


def _lines(lanes: int, columns: int) -> Mark:
    """Return a line for each lane."""
    x: list[float] = []
    y: list[float] = []
    for lane in range(lanes):
        x += [0.0, columns, float("nan")]
        y += [lane, lane, float("nan")]
    return Curve(x, y, "grid", 0.9)


def _sent_boxes(
    between: list[Transfer], lanes: Lanes, ncolours: int, wide: float
) -> tuple[Boxes | None, set[tuple[int, int, int]]]:
    """Return boxes with the names of data that a rank sends alike to all in a round."""
    sent: defaultdict[tuple[int, int, int], dict[int, set[Transfer]]] = defaultdict(lambda: defaultdict(set))
    for t in between:
        sent[t.round, t.hop, t.source][t.destination].add(t)
    rows = []
    for where, to in sorted(sent.items()):
        datas = {tuple(sorted({t.data for t in ts})) for ts in to.values()}
        if len(datas) == 1:
            rows.append((where, sorted(next(iter(to.values())), key=lambda t: t.data)))
    if not rows:
        return None, set()
    boxes = []
    for (r, hop, source), ts in rows:
        names = [t.name for t in ts]
        colours = {t.colour for t in ts}
        fill = series(ts[0].colour, ncolours) if len(colours) == 1 else "grid"
        left, lane = r + 0.5 * hop, int(lanes.lane_of[source])
        hover = f"rank {source} sends {_listed(names)}" if len(names) > 1 else ""
        boxes.append((left, left + wide, lane - 0.27, lane + 0.27, fill, hover, _short(names)))
    return Boxes.of(boxes), {where for where, _ in rows}


def _arrows(
    messages: dict[tuple[int, int, int, int], list[Transfer]],
    boxed: set[tuple[int, int, int]],
    lanes: Lanes,
    ncolours: int,
    box: float,
    thin: float,
) -> Arrows:
    rows = []
    for (r, hop, source, destination), ts in sorted(messages.items()):
        first = r + 0.5 * hop
        begin = first + (box if (r, hop, source) in boxed else _GAP)
        end = first + (0.5 if any(t.halves for t in ts) else 1.0) - max(_GAP, 0.32 * box)
        ts = sorted(ts, key=lambda t: t.data)
        several, (a, b) = len(ts) > _STRIPES, lanes.lane_of[[source, destination]].tolist()
        for i, t in enumerate(ts):
            offset = 0.0 if several else (i - (len(ts) - 1) / 2) * 0.18
            same = len({x.colour for x in ts}) == 1
            colour = series(t.colour, ncolours) if not several or same else "muted"
            names = _listed([x.name for x in (ts if several else [t])])
            hover = f"round {r}, {source} → {destination}: {names}{', combined' * t.combines}\n{t.line}".rstrip()
            width = 2.6 if several else thin
            rows.append((begin, a + offset, end, b + offset, colour, t.combines, width, hover))
            if several:
                break
    return Arrows.of(rows)


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"chunk{'s' if len(names) != 1 else ''} {', '.join(names[:most])}{more}"


def _short(names: list[str]) -> str:
    """Return names for a small box: one, a range of numbers, or how many."""
    if len(names) == 1:
        return names[0]
    if all(n.isdigit() for n in names):
        numbers = sorted(map(int, names))
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{numbers[0]}–{numbers[-1]}"
    return f"{len(names)}×"


def _legend(between: list[Transfer], local: bool, names: dict[int, str]) -> tuple[LegendEntry, ...]:
    entries = []
    if any(not t.combines for t in between):
        entries.append(LegendEntry("copied", "ink", "arrow"))
    if any(t.combines for t in between):
        entries.append(LegendEntry("combined into", "ink", "ring"))
    if local:
        entries.append(LegendEntry("copied on one rank", "muted", "dot"))
    numbers = sorted(names)
    if len(numbers) > 1:
        shown = numbers if len(numbers) <= PALETTE else sorted({numbers[round(i * (len(numbers) - 1) / 4)] for i in range(5)})
        entries += [LegendEntry(names[n], series(n, max(numbers) + 1)) for n in shown]
    return tuple(entries)


# ---------------------------------------------------------------- the summary form


def _summary(schedule: Schedule) -> Scene:
    lanes = Lanes.of_ranks(schedule.collective, _RANKS, _LANES)
    rounds = max(1, schedule.nrounds)
    every = -(-rounds // _COLUMNS)
    ncolumns = -(-rounds // every)
    table = np.zeros((2, ncolumns, len(lanes), len(lanes)), np.int64)  # combined, column, from, to: chunks
    for combined, r, source, destination, count in columns_between(schedule):
        np.add.at(table[combined, r // every], (lanes.lane_of[source], lanes.lane_of[destination]), count)
    marks: list[Mark] = [_lines(len(lanes), ncolumns)]
    most = max(1, int(table.max()))
    arrows, own = [], []
    for combined, column, a, b in np.argwhere(table).tolist():
        chunks = int(table[combined, column, a, b])
        what = "combined" if combined else "copied"
        where = f"ranks {lanes.name(a)} → {lanes.name(b)}" if lanes.each > 1 else f"rank {a} → {b}"
        last = min((column + 1) * every, rounds) - 1
        span = f"round {column * every}" if every == 1 else f"rounds {column * every}–{last}"
        hover = f"{span}: {where}, {chunks:,} chunk{'s' if chunks != 1 else ''} {what}"
        colour = "c1" if combined else "c0"
        if a == b:
            side = 0.1 if combined else -0.1
            own.append((column + 0.3, column + 0.7, a + side - 0.09, a + side + 0.09, colour, hover))
            continue
        width = 0.6 + 2.4 * (np.log1p(chunks) / np.log1p(most))
        arrows.append((column + 0.1, a, column + 0.9, b, colour, bool(combined), round(float(width), 1), hover))
    marks += [Boxes.of(own), Arrows.of(arrows)]
    names = [str(c * every) if every == 1 else f"{c * every}–{min((c + 1) * every, rounds) - 1}" for c in range(ncolumns)]
    x = Axis(0.0, float(ncolumns), "round" if every == 1 else "rounds", tuple((c + 0.5, n) for c, n in enumerate(names)))
    notes = [lanes.note()] if lanes.each > 1 else []
    if every > 1:
        notes.append(f"{rounds:,} rounds: drawn as {ncolumns} columns of {every} rounds each.")
    notes.append("The thicker an arrow, the more chunks move; a bar on a lane is what moves within it.")
    legend = [LegendEntry("copied", "c0", "arrow")] if table[0].any() else []
    legend += [LegendEntry("combined into", "c1", "ring")] if table[1].any() else []
    panel = Panel(x, lanes.axis(), tuple(marks), min(max(4.5, ncolumns * 0.62), 13.0), len(lanes) * 0.36)
    return Scene(schedule_title(schedule), (panel,), tuple(notes), tuple(legend))
