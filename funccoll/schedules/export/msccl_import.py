"""MSCCL's XML to proved schedules.

A level of the graph of steps becomes a round of moves. In it a message is one move from place to place. If sends are buffered,
what is overwritten between a send and its receive goes through further scratch.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...errors import ScheduleError, Source
from ..collective import KINDS, Collective
from ..moves import Batch
from ..schedule import Schedule
from .msccl_format import COLLECTIVES, OPERATIONS, MscclProgram
from .msccl_graph import StepGraph, StepNode
from .msccl_parser import parse_msccl

__all__ = ["from_msccl_xml"]

_MOST_LINES = 10_000
"""The most moves of a schedule that is proved once more to find the line of a fault."""


def from_msccl_xml(text_or_path: str | os.PathLike[str]) -> Schedule:
    """Read an algorithm in MSCCL's XML, and prove that it is the collective that it names.

    `fc.schedules.register` makes the schedule an algorithm that your program can name. Consecutive `re` steps to one
    destination are one fold, which is rounded once. A rooted collective's root is the attribute `root` (funccoll's own), else
    the only rank with an input or an output.

    Source: see `funccoll.schedules.export.msccl_format`.

    Args:
        text_or_path: The XML (it begins with "<"), or the path of a file.

    Returns:
        A `Schedule`.

    Raises:
        ScheduleError: If the file is not well-formed MSCCL XML, is too large, deadlocks, has a race, or its proof fails. Also
            if ranks add in different orders, because their sums would differ in the last bits. The message has the line.

    Example:
        >>> schedule = fc.schedules.build("all_gather", 2, "ring")
        >>> print(fc.schedules.from_msccl_xml(schedule.to_msccl_xml()))
        <Schedule ring for all_gather on 2 ranks: 1 round, 4 moves, 1 chunk per block>
    """
    program, name = parse_msccl(text_or_path)
    return _Importer(program, name).schedule()


class _RunMove(NamedTuple):
    """A move of a run of chunks, in the round of its level."""

    level: int
    channel: int
    by: int
    destination: int
    sources: tuple[int, ...]
    chunks: int
    line: int


class _Importer:
    def __init__(self, program: MscclProgram, name: str):
        self.program, self.name, self.p = program, name, program.nranks
        self.graph = StepGraph(program, name)
        self.channel = self.graph.channel
        self._place()

    # ------------------------------------------------------------ places

    def _place(self) -> None:
        """Find the collective, and the place of every cell."""
        program, kind = self.program, KINDS[self.program.kind]
        channels = program.channels if self._channels_are_disjoint() else 1
        if not channels > 1:
            self.channel = [0] * len(self.channel)
        root = self._root() if kind.rooted else 0
        self.collective = c = Collective(program.kind, self.p, root, (), program.parts // channels, channels).check()
        self.rows: dict[str, list[int]] = {}
        for letter, first, stop in (("i", 0, c.input_chunks), ("o", c.input_chunks, c.input_chunks + c.output_chunks)):
            at = c.blocks_of_rows[first:stop] * c.parts + c.parts_of_rows[first:stop]
            rows = np.empty(stop - first, np.int64)
            rows[at] = np.arange(first, stop)
            self.rows[letter] = rows.tolist()
        self.first_scratch = c.input_chunks + c.output_chunks
        self.scratch = max(gpu.chunks["s"] for gpu in program.gpus)
        self._shadow: dict[int, int] = {}  # rank -> first row of a copy of the cells that it may write, and we may not
        if program.in_place and program.kind in ("gather", "scatter"):
            self.graph.fail(f'{COLLECTIVES[program.kind]} in place is not read: write it out of place (inplace="0")')
        for rank in range(self.p):
            if self._needs_shadow(rank):
                self._shadow[rank] = self._more_scratch(max(c.input_chunks, c.output_chunks))

    def _channels_are_disjoint(self) -> bool:
        """Return True if every channel has its own parts of the blocks, and its own scratch, as our channels have."""
        program, n = self.program, self.program.channels
        if n == 1 or program.parts % n or program.in_place:
            return False
        own: dict[tuple[int, int], int] = {}  # (rank, scratch chunk) -> channel
        block_of = 0
        for rank, gpu in enumerate(program.gpus):
            for block in gpu.blocks:
                for node in self.graph.nodes[self.graph.start[block_of] : self.graph.start[block_of + 1]]:
                    for letter, offset in (cell for cells in self.graph.accesses(node) for cell in cells):
                        if letter == "s":
                            if own.setdefault((rank, offset), block.channel) != block.channel:
                                return False
                        elif offset % program.parts // (program.parts // n) != block.channel:
                            return False
                block_of += 1
        return True

    def _root(self) -> int:
        """Return the root: the one the program names, or the only rank with an input or output."""
        if self.program.root is not None:
            return self.program.root
        letter = "i" if KINDS[self.program.kind].name in ("broadcast", "scatter") else "o"
        having = [rank for rank, gpu in enumerate(self.program.gpus) if gpu.chunks[letter]]
        return having[0] if len(having) == 1 else 0

    def _needs_shadow(self, rank: int) -> bool:
        """Return True if a rank writes places that we only read, or that are not an output of ours."""
        c, program = self.collective, self.program
        if program.in_place:
            return program.kind == "reduce_scatter" or not bool(c.has_output(rank))
        letters = ["i"] if bool(c.has_output(rank)) else ["i", "o"]
        sizes = program.gpus[rank].chunks
        return any((rank, letter, offset) in self.graph.writes for letter in letters for offset in range(sizes[letter]))

    def _more_scratch(self, chunks: int) -> int:
        """Return the first row of further scratch."""
        row = self.first_scratch + self.scratch
        self.scratch += chunks
        return row

    def _row(self, rank: int, letter: str, offset: int) -> int:
        """Return the row of a cell, as `StepGraph.cells` gives it."""
        c = self.collective
        if letter == "s":
            return self.first_scratch + offset
        shadow = self._shadow.get(rank)
        if shadow is not None and (letter == "i" or self.program.in_place or not bool(c.has_output(rank))):
            return shadow + offset
        return self.rows[letter][offset]

    # ------------------------------------------------------------ moves

    def schedule(self) -> Schedule:
        """Return the schedule, proved. A failed proof names the line of the XML."""
        moves = [*self._before(), *self._moves()]
        moves += self._after(1 + max((m.level for m in moves), default=0))
        found = self._schedule_of(moves, lines=False)
        try:
            found.prove()
        except ScheduleError:
            if len(moves) <= _MOST_LINES:
                self._schedule_of(moves, lines=True).prove()
            raise
        return found

    def _schedule_of(self, moves: Sequence[_RunMove], lines: bool) -> Schedule:
        """Return the schedule of moves. With `lines` each move has its own line, which takes longer to prove."""
        groups: defaultdict[tuple[int, int, int, int], list[_RunMove]] = defaultdict(list)
        for number, move in enumerate(moves):
            groups[move.level, move.channel, len(move.sources), number if lines else 0].append(move)
        rounds = {level: i for i, level in enumerate(sorted({key[0] for key in groups}))}
        batches = tuple(
            Batch(
                np.array([[m.destination] for m in same], np.int32),
                np.array([m.sources for m in same], np.int32),
                np.array([m.chunks for m in same], np.int32),
                np.array([m.by for m in same], np.int32),
                channel,
                rounds[level],
                Source(self.name, same[0].line, "MSCCL XML") if lines else None,
            )
            for (level, channel, _, _), same in sorted(groups.items())
        )
        return Schedule(self.collective, self.program.name or "msccl", batches, self.scratch)

    def _moves(self) -> Iterator[_RunMove]:
        """Yield the moves of all nodes."""
        for block, (first, stop) in enumerate(pairwise(self.graph.start)):
            for i in range(first, stop):
                node = self.graph.nodes[i]
                if node.part in ("receive", "local") and not node.replaced:
                    yield from self._moves_of(i, node, self.channel[block])

    def _moves_of(self, i: int, node: StepNode, channel: int) -> Iterator[_RunMove]:
        step, does = node.step, OPERATIONS[node.step.type]
        target = self._run(node.rank, step.destination, step.count)
        if node.part == "local":
            sources = [self._run(node.rank, s.source, s.count) for s in (*node.folded, step)]
            operands = [target, *sources] if does.reduces else sources
        else:
            received = yield from self._received(i, node.partner, channel)
            operands = [self._run(node.rank, step.source, step.count)] * does.reads + [received]
            if step.type == "rrs":
                target = self._slot(node)
        yield from self._pieces(self.graph.level[i], channel, node.rank, target, operands, step.line)

    def _received(self, receive: int, send: int, channel: int) -> Generator[_RunMove, None, list[int]]:
        """Find the places of what a node receives: the source of the send, if it is still there, else a copy in scratch."""
        sender = self.graph.nodes[send]
        step = sender.step
        if step.type == "rrs":
            return self._slot(self.graph.nodes[send - 1])
        start = step.source if step.type == "s" else step.destination
        sent, taken = self.graph.level[send], self.graph.level[receive]
        cells = self.graph.cells(sender.rank, start, step.count)
        source = [self._row(sender.rank, *c) * self.p + sender.rank for c in cells]
        written = (at for c in cells for at in self.graph.writes.get((sender.rank, *c), ()))
        if not self.graph.buffered or not any(sent < at <= taken for at in written):
            return source
        row = self._more_scratch(step.count)
        copy = [(row + k) * self.p + self.graph.nodes[receive].rank for k in range(step.count)]
        yield from self._pieces(sent, channel, self.graph.nodes[receive].rank, copy, [source], step.line)
        return copy

    def _slot(self, node: StepNode) -> list[int]:
        if node.slot < 0:
            node.slot = self._more_scratch(node.step.count)
        return [(node.slot + k) * self.p + node.rank for k in range(node.step.count)]

    def _run(self, rank: int, start: tuple[str, int], count: int) -> list[int]:
        """Return the places of a run of chunks."""
        if start[1] < 0:
            return []
        return [self._row(rank, *cell) * self.p + rank for cell in self.graph.cells(rank, start, count)]

    def _pieces(
        self, level: int, channel: int, by: int, target: Sequence[int], operands: Sequence[Sequence[int]], line: int
    ) -> Iterator[_RunMove]:
        """Yield a move as runs that are contiguous everywhere and stay within blocks."""
        columns = [target, *operands]
        first, parts = 0, self.collective.chunks
        for i in range(1, len(target) + 1):
            joined = i < len(target) and all(col[i] == col[i - 1] + self.p for col in columns)
            if not joined or (parts > 1 and any(self._begins_block(col[i]) for col in columns)):
                yield _RunMove(level, channel, by, target[first], tuple(col[first] for col in operands), i - first, line)
                first = i

    def _begins_block(self, place: int) -> bool:
        row = place // self.p
        c = self.collective
        return row < self.first_scratch and (row if row < c.input_chunks else row - c.input_chunks) % c.chunks == 0

    def _before(self) -> Iterator[_RunMove]:
        """Yield copies of the inputs to where the program changes them."""
        program, c = self.program, self.collective
        letter = "o" if program.in_place else "i"
        for rank in range(self.p):
            if program.in_place or rank in self._shadow:
                shift = self.graph.in_place_shift(rank, "i") if program.in_place else 0
                for channel in range(c.channels):
                    rows = [(i, row) for i, row in enumerate(self.rows["i"]) if c.parts_of_rows[row] // c.chunks == channel]
                    into = [self._row(rank, letter, i + shift) * self.p + rank for i, _ in rows]
                    yield from self._pieces(-1, channel, rank, into, [[row * self.p + rank for _, row in rows]], program.line)

    def _after(self, level: int) -> Iterator[_RunMove]:
        """Yield copies of results from where the program leaves them to the outputs."""
        program = self.program
        for rank, shadow in self._shadow.items():
            if program.in_place and bool(self.collective.has_output(rank)):
                shift = shadow + self.graph.in_place_shift(rank, "o")
                target = [row * self.p + rank for row in self.rows["o"]]
                source = [(shift + i) * self.p + rank for i in range(len(target))]
                yield from self._pieces(level, 0, rank, target, [source], program.line)
