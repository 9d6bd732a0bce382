"""Symbolic execution: runs rounds of moves on expressions instead of numbers. Moves without meaning raise an error."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ...errors import ScheduleError
from ..moves import Batch, Places
from ..runs import expand
from .expressions import Expressions

__all__ = ["SymbolicExecutor", "shortest_cycle"]


class SymbolicExecutor:
    """Rounds of moves run on expressions. `holds` has each place's expression, or -1 before the first write.

    Single moves are numbered as they run. `writer` has the number of the last one that wrote each place, -1 for none. With the
    table of a proof, an expression equal to one of the proof has the same number.
    """

    def __init__(self, places: Places, name: str, expressions: Expressions | None = None):
        self.places, self.name = places, name
        self.collective = places.collective
        self.expressions = Expressions(self.collective) if expressions is None else expressions
        self.holds = np.full(places.size, -1, np.int32 if places.size < 2**30 else np.int64)
        self.holds[: self.expressions.leaves] = np.arange(self.expressions.leaves)
        self.writer = np.full(places.size, -1, np.int32 if places.size < 2**27 else np.int64)
        self.moves = 0
        self._history: list[tuple[int, Batch]] = []  # first number, batch
        self._static = len(self.collective.parts_of_rows) * self.collective.nranks

    def run(self, batches: Sequence[Batch]) -> None:
        """Run rounds in order."""
        start = 0
        for i in range(1, len(batches) + 1):
            if i == len(batches) or batches[i].round != batches[start].round:
                self.round(batches[start:i])
                start = i

    def round(self, batches: Sequence[Batch]) -> None:
        """Run the moves of one round. They must be independent of each other."""
        p = self.collective.nranks
        before = self.moves
        work = []
        for batch in batches:
            dst, src, row = expand(batch, p)
            number = np.arange(self.moves, self.moves + len(row))
            self._history.append((self.moves, batch))
            self.moves += len(row)
            work.append((batch, dst, src, number))
        for _, _, src, number in work:
            self._check_written(src, number)
        if self.moves - before > 1:
            self._check_independent(work, before)
        else:
            for _, dst, _, number in work:
                if dst.shape[1] > 1 and self._repeats(dst):
                    self._write_race(work, before)
                self.writer[dst] = number[:, None]
        results = [self._evaluate(batch, dst, src, number) for batch, dst, src, number in work]
        for (_, dst, _, _), value in zip(work, results, strict=True):
            self.holds[dst] = value[:, None]

    def _evaluate(self, batch: Batch, dst: np.ndarray, src: np.ndarray, number: np.ndarray) -> np.ndarray:
        ids = self.holds[src]
        table = self.expressions
        parts = table.parts(ids)
        rows = np.minimum(dst, self._static - 1) // self.collective.nranks
        into = np.where(dst < self._static, self.collective.parts_of_rows[rows], parts[:, :1])
        wrong = (parts != parts[:, :1]).any(axis=1) | (into != parts[:, :1]).any(axis=1)
        if wrong.any():
            self._different_lengths(int(number[np.argmax(wrong)]), dst[np.argmax(wrong)], src[np.argmax(wrong)])
        if ids.shape[1] == 1:
            return ids[:, 0]
        if not self.collective.meaning.reduces:
            kind = self.collective.kind
            raise self.error(int(number[0]), f"it combines {ids.shape[1]} sources, and {kind} only copies.")
        return table.fold(ids, number)

    def _check_written(self, src: np.ndarray, number: np.ndarray) -> None:
        empty = self.holds[src] < 0
        if empty.any():
            i, j = np.argwhere(empty)[0]
            raise self.error(
                int(number[i]),
                f"it reads {self.places.place(int(src[i, j]))}, which nothing has written before this round. Read it in a "
                "round after the one that writes it, or read another place.",
            )

    def _different_lengths(self, number: int, dst: np.ndarray, src: np.ndarray) -> None:
        texts = [f"{self.places.place(c)} (holding {self.expressions.text(int(self.holds[c]))})" for c in src]
        to = ", ".join(str(self.places.place(c)) for c in dst)
        raise self.error(
            number,
            f"it mixes chunks that are different parts of the data: from {', '.join(texts)} to {to}. Their lengths may "
            "differ. Combine and copy equal chunk numbers (of a block).",
        )

    # ------------------------------------------------------------ independence within a round

    def _check_independent(self, work: list[tuple[Batch, np.ndarray, np.ndarray, np.ndarray]], before: int) -> None:
        for _, dst, _, number in work:
            self.writer[dst] = number[:, None]
        for _, dst, src, number in work:
            twice = self.writer[dst] != number[:, None]
            if twice.any() or (dst.shape[1] > 1 and self._repeats(dst)):
                self._write_race(work, before)
            other = self.writer[src]
            clash = (other >= before) & (other != number[:, None])
            if clash.any():
                i, j = np.argwhere(clash)[0]
                self._read_race(work, before, int(number[i]), int(other[i, j]), int(src[i, j]))

    @staticmethod
    def _repeats(dst: np.ndarray) -> bool:
        ordered = np.sort(dst, axis=1)
        return bool((ordered[:, 1:] == ordered[:, :-1]).any())

    def _write_race(self, work: list, before: int) -> None:
        first: dict[int, int] = {}
        for _, dst, _, number in work:
            for row, n in zip(dst.tolist(), number.tolist(), strict=True):
                for place in row:
                    if place in first:
                        text = f"also {self.describe(first[place])}" if first[place] != n else "the same move, twice,"
                        raise self.error(
                            n,
                            f"race: {text} writes {self.places.place(place)} in the same round; the moves of a round happen at "
                            "the same time. Write to different places, or yield one after the other.",
                        )
                    first[place] = n

    def _read_race(self, work: list, before: int, reader: int, writer: int, place: int) -> None:
        """Raise the error for a move that reads what another of the round writes. In a cycle of them none can go first."""
        after: dict[int, list[tuple[int, int]]] = {}  # a move -> those that overwrite what it reads
        for _, _, src, number in work:
            writers = self.writer[src]
            for i, j in np.argwhere((writers >= before) & (writers != number[:, None])).tolist():
                after.setdefault(int(number[i]), []).append((int(writers[i, j]), int(src[i, j])))
        cycle = shortest_cycle({n: [w for w, _ in out] for n, out in after.items()})
        if cycle is None:
            raise self.error(
                reader,
                f"race: it reads {self.places.place(place)}, which {self.describe(writer)} writes in the same round; the moves "
                "of a round happen at the same time. Yield them one after the other, or write to another place.",
            )
        lines = []
        for n, nxt in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            where = next(self.places.place(c) for w, c in after[n] if w == nxt)
            lines.append(f"  {self.describe(nxt)} must wait until {self.describe(n)} has read {where}")
        if len(lines) > 8:
            lines = [*lines[:4], f"  ... and {len(lines) - 5} more, each for the next, until", lines[-1]]
        text = "\n".join(lines)
        raise self.error(
            cycle[0],
            f"deadlock: in this round moves overwrite what others read, in a cycle, so that none can go first:\n{text}\n"
            'Write to "scratch" (or read one buffer and write the other) so that no move overwrites what a partner reads.',
        )

    # ------------------------------------------------------------ words

    def batch_of(self, number: int) -> tuple[Batch, int]:
        """Return the batch of a move, and its first number."""
        firsts = [first for first, _ in self._history]
        at = int(np.searchsorted(firsts, number, side="right")) - 1
        return self._history[at][1], firsts[at]

    def describe(self, number: int) -> str:
        """Return a move as text."""
        batch, first = self.batch_of(number)
        dst, src, _ = expand(batch, self.collective.nranks)
        i = number - first

        def side(codes: np.ndarray) -> str:
            places = [self.places.place(c) for c in codes[:4]]
            more = f", ... ({len(codes)} in all)" if len(codes) > 4 else ""
            return ", ".join(f"{b}[{c}]@{r}" for r, b, c in places) + more

        return f"{side(dst[i])} := {side(src[i])}"

    def error(self, number: int, what: str) -> ScheduleError:
        """Return the error about one move, at its line."""
        batch, _ = self.batch_of(number)
        move = f"the move {self.describe(number)} of round {batch.round}"
        return ScheduleError(f"{self.name} for {self.collective}: {move} is wrong: {what}", batch.source)


def shortest_cycle(graph: dict[int, list[int]]) -> list[int] | None:
    """Return a shortest cycle of a small graph, or None."""
    best: list[int] | None = None
    for start in graph:
        parent = {start: start}
        queue = deque([start])
        while queue and start in parent:
            here = queue.popleft()
            for there in graph.get(here, ()):
                if there == start:
                    path = [here]
                    while path[-1] != start:
                        path.append(parent[path[-1]])
                    if best is None or len(path) < len(best):
                        best = path[::-1]
                    queue.clear()
                    break
                if there not in parent:
                    parent[there] = here
                    queue.append(there)
        if best is not None and len(best) == 2:
            break
    return best
