"""Chunk tables: the contents of each rank's output after each round, found by running the moves on expressions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np

from ..errors import ScheduleError
from ..schedules.collective import REDUCTION
from ..schedules.moves import Batch, Places
from ..schedules.proof.symbolic import SymbolicExecutor
from ..schedules.runs import expand
from ..schedules.schedule import Schedule
from .drawing import Drawing
from .lanes import Lanes
from .moved_data import check_schedule, data_name, schedule_title
from .scene import Axis, Cells, LegendEntry, Panel, Scene, shown_steps

__all__ = ["chunk_table"]

_CELLS = 16
"""The most ranks, and chunks, that are drawn one by one. More are drawn as this many groups."""
_STEPS, _FEW, _SHOWN = 33, 9, 8
"""The most steps of the slider, of groups, and of the static form."""
_OTHER = 0.3
"""The shade of a chunk that holds something other than its final contents."""


def chunk_table(schedule: Schedule, *, theme: str | None = None) -> Drawing:
    """Draw the contents of each chunk of each rank's output after each round.

    Rows are ranks, columns chunks, and steps a slider. A cell names the ranks whose contributions it holds, and is darker the
    more there are. It is pale while it holds data other than its own. The static form shows the first, the last, and some
    steps between them. Above 16 ranks or chunks, cells are groups, with the part of the required contributions that they hold.
    A wrong schedule is drawn up to the wrong move.

    Args:
        schedule: The schedule.
        theme: "light", "dark", or None for FUNCCOLL_THEME.

    Returns:
        A `Drawing`.

    Raises:
        DrawingError: If `schedule` is not a schedule.

    Example:
        >>> print(fc.draw.chunk_table(fc.schedules.build("all_gather", 4, "ring")))
        <Drawing: all_gather on 4 ranks: ring, 3 rounds, 1 chunk per block; .save("drawing.svg") writes it>
    """
    check_schedule(schedule, "chunk_table")
    ranks = Lanes.of_ranks(schedule.collective, _CELLS, _CELLS)
    n = schedule.collective.output_chunks
    chunks = Lanes(n, 1) if n <= _CELLS else Lanes.of(n, _CELLS)
    steps = shown_steps(schedule.nrounds + 1, _STEPS if ranks.each == chunks.each == 1 else _FEW)
    notes = [x for x in (ranks.note(), chunks.note("chunks", "columns")) if x]
    if len(steps) <= schedule.nrounds:
        notes.append(f"{schedule.nrounds:,} rounds: drawn after {len(steps)} of them.")
    table = _ChunkContents(schedule, ranks, chunks)
    names, panels = [], []
    for rounds_done, cells in table.steps(frozenset(steps)):
        name = "at first" if rounds_done == 0 else f"after round {rounds_done - 1}"
        names.append(name)
        panels.append(_panel(cells, ranks, chunks, name))
    if table.error:
        notes.append(f"The schedule is wrong: {table.error}")
    notes.append(table.meaning())
    legend = (LegendEntry("nothing yet", "band"), *table.legend(), *ranks.legend())
    columns = 4 if len(chunks) <= 8 else 2
    shown = shown_steps(len(panels), _SHOWN if columns == 4 else 6)
    return Drawing(
        Scene(schedule_title(schedule), tuple(panels), tuple(notes), legend, columns, steps=tuple(names), shown=shown), theme
    )


def _panel(cells: Cells, ranks: Lanes, chunks: Lanes, title: str) -> Panel:
    pitch = 0.4 if len(chunks) <= 8 else 0.31
    x = Axis(-0.5, len(chunks) - 0.5, "output chunk" if chunks.each == 1 else "output chunks", chunks.axis().ticks)
    marks = (cells, *ranks.borders(x.lower, x.upper))
    return Panel(x, ranks.axis(), marks, max(0.5, pitch * len(chunks)), max(0.5, 0.27 * len(ranks)), title)


class _Counts:
    """Rounds of moves run on numbers of contributions. This is for summaries, because expressions of many ranks take long.

    `holds` has the input chunk that each place began as, or -1. `count` is how many of them it combines.
    """

    def __init__(self, places: Places):
        inputs = places.collective.input_chunks * places.collective.nranks
        self.nranks = places.collective.nranks
        self.holds = np.full(places.size, -1, np.int64)
        self.holds[:inputs] = np.arange(inputs)
        self.count = (self.holds >= 0).astype(np.int64)

    def round(self, batches: Sequence[Batch]) -> None:
        """Run the moves of one round."""
        moved = []
        for batch in batches:
            dst, src, _ = expand(batch, self.nranks)
            moved.append((dst, self.holds[src[:, 0]], self.count[src].sum(axis=1)))
        for dst, holds, count in moved:
            self.holds[dst], self.count[dst] = holds[:, None], count[:, None]


class _ChunkContents:
    """The moves run on expressions, with the cells after some rounds."""

    def __init__(self, schedule: Schedule, ranks: Lanes, chunks: Lanes):
        self.schedule, self.ranks, self.chunks = schedule, ranks, chunks
        self.collective, self.p = schedule.collective, schedule.nranks
        self.executor = SymbolicExecutor(schedule.places, schedule.algorithm) if self.single else _Counts(schedule.places)
        self.error = ""
        rank, chunk, source, label = self.collective.required()
        self.reduces = bool((source == REDUCTION).any())
        _, count = self.collective.meaning.operands(self.collective, np.arange(self.p))
        self.operands = np.maximum(count, 1)[:, None]  # by rank: those whose reduction it gets
        self.required = np.full((self.p, self.collective.output_chunks), -1, np.int64)  # rank, chunk -> leaf or label
        self.required[rank, chunk] = label if self.reduces else label * self.p + source
        self._name = lru_cache(maxsize=None)(self._name_of)

    @property
    def single(self) -> bool:
        """True if cells are single chunks of single ranks."""
        return self.ranks.each == self.chunks.each == 1

    def steps(self, wanted: frozenset[int]) -> Iterator[tuple[int, Cells]]:
        """Yield (rounds done, cells) of the wanted numbers of rounds. Ends early at a wrong move."""
        if 0 in wanted:
            yield 0, self._cells()
        for done, (_, group) in enumerate(groupby(self.schedule.batches, key=lambda b: b.round), 1):
            try:
                self.executor.round(list(group))
            except ScheduleError as error:
                self.error = error.args[0].splitlines()[0]
                return
            if done in wanted:
                yield done, self._cells()

    def _cells(self) -> Cells:
        first = self.schedule.places.first_row("output")
        rows = slice(first, first + self.collective.output_chunks)
        held = self.executor.holds.reshape(-1, self.p)[rows].T  # rank, chunk
        if isinstance(self.executor, _Counts):
            count = self.executor.count.reshape(-1, self.p)[rows].T
            return self._grouped(self._fraction(held, held // self.p, count))
        ids, table = np.where(held >= 0, held, 0), self.executor.expressions
        fraction = self._fraction(held, table.labels(ids), table.nranks(ids))
        values: list[list[float | None]] = []
        text, hover = [], []
        for rank in self.ranks.order:
            own = (self.required[rank] >= 0).tolist()
            cells = list(zip(held[rank].tolist(), fraction[rank].tolist(), own, strict=True))
            values.append([None if not o else 0.0 if h < 0 else max(0.12, f) for h, f, o in cells])
            names = [self._name(h) if h >= 0 and o else ("", "") for h, _, o in cells]
            text.append([short for short, _ in names])
            hover.append([f"rank {rank}, chunk {c}: {full}" for c, (_, full) in enumerate(names)])
        return Cells(values, text, hover)

    def _fraction(self, held: np.ndarray, label: np.ndarray, nranks: np.ndarray) -> np.ndarray:
        """Return the part of its final contents that each place holds. A place with other data has a fixed shade.

        `label` has the input chunk that a reduction is about, and `nranks` the ranks that have contributed to it.
        """
        if self.reduces:
            right, part = label == self.required, np.minimum(nranks / self.operands, 1.0)
        else:
            right, part = held == self.required, np.ones(held.shape)
        return np.where(held >= 0, np.where(right, part, _OTHER), 0.0)

    def _grouped(self, fraction: np.ndarray) -> Cells:
        """Return means over groups of ranks and chunks that have outputs."""
        own = self.required >= 0
        shape = len(self.ranks), len(self.chunks)
        total, count = np.zeros(shape), np.zeros(shape)
        i = self.ranks.lane_of[:, None]
        j = np.arange(fraction.shape[1])[None, :] // self.chunks.each
        np.add.at(total, (np.broadcast_to(i, fraction.shape), np.broadcast_to(j, fraction.shape)), fraction * own)
        np.add.at(count, (np.broadcast_to(i, fraction.shape), np.broadcast_to(j, fraction.shape)), own)
        mean = np.where(count > 0, total / np.maximum(count, 1), 0.0)
        mean[count == 0] = math.nan
        values = [[None if math.isnan(v) else v for v in row] for row in mean.tolist()]
        text = [[f"{v:.0%}" if v else "" for v in row] for row in values]
        hover = [
            [f"ranks {self.ranks.name(a)}, chunks {self.chunks.name(b)}" for b, _ in enumerate(row)]
            for a, row in enumerate(values)
        ]
        return Cells(values, text, hover)

    def _name_of(self, node: int) -> tuple[str, str]:
        """Return a short and a full text of an expression."""
        assert isinstance(self.executor, SymbolicExecutor)
        table = self.executor.expressions
        full = table.text(node)
        leaves = table.contributions(node, 4 * self.p)
        found = {rank for rank, _ in leaves}
        if not self.reduces:
            rank, label = leaves[0]
            return data_name(self.collective, rank, label), full
        group = self.collective.group_of(leaves[0][0])
        if found == {*group} and len(group) > 1:
            return "all", full
        if self.collective.groups:
            return _or_count([str(rank) for rank in self.ranks.order if rank in found], len(found)), full
        return _short(sorted(found), self.p), full

    def meaning(self) -> str:
        """Return the sentence about what cells show."""
        if not self.single:
            return "A cell shows the part of the required contributions that its chunks hold, by their number."
        if self.reduces:
            over = f" {self.p - 2}–0 are {self.p - 2}, {self.p - 1} and 0." if self.p > 2 else ""
            if self.collective.meaning.prefix:  # its ranks follow each other
                over = ""
            if self.collective.groups:
                over = ' "all" are those of the rank\'s group.'
            return f"A cell names the ranks whose contributions are in the chunk; the darker, the more of them.{over}"
        from_root = self.collective.kind in ("broadcast", "scatter") and not self.collective.groups
        what = "the part of the root's data that the chunk holds" if from_root else "the rank whose data the chunk holds"
        return f"A cell names {what}; it is pale while that is not its own."

    def legend(self) -> tuple[LegendEntry, ...]:
        """Return the meanings of shades."""
        if self.reduces or not self.single:
            return LegendEntry("a part", "s0.4000"), LegendEntry("complete", "s1.0000")
        return LegendEntry("something else", f"s{_OTHER}"), LegendEntry("its own", "s1.0000")


def _short(ranks: list[int], p: int) -> str:
    """Return ranks as runs, such as 0–2,5 or, continuing at 0, 6–1 of 8. If that is long, return their number."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    if len(runs) > 1 and runs[0][0] == 0 and runs[-1][-1] == p - 1:
        runs[0] = runs.pop() + runs[0]
    return _or_count([str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs], len(ranks))


def _or_count(names: list[str], count: int, most: int = 5) -> str:
    """Return names with commas, or the number of ranks if that is long."""
    text = ",".join(names)
    return text if len(text) <= most else f"{count}×"
