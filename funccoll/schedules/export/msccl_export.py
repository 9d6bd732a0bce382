"""Schedules to MSCCL's XML.

The schedule's proved rounds of messages become steps. Each rank has one thread block for each direction of each connection and
channel, and one for local work. So a thread block never waits in a send for data of a receive behind it. The file needs no
buffering: every send can wait for its receive. A fold of k operands is a copy and k - 1 reductions. It is one `rrc` if its only
other operand is received for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...errors import ScheduleError
from ..streams.happens_before import HappensBefore, transitively_reduced
from .access_order import AccessOrder
from .msccl_format import (
    COLLECTIVES,
    MOST_COUNT,
    MOST_NODES,
    MOST_OFFSET,
    MOST_PEERS,
    MOST_STEPS,
    MOST_THREAD_BLOCKS,
    OPERATIONS,
    MscclGpu,
    MscclProgram,
    MscclStep,
    ThreadBlock,
    own_cells,
)

if TYPE_CHECKING:
    from ..schedule import Schedule

__all__ = ["to_msccl_xml"]

_LOCAL, _RECEIVE, _SEND = range(3)
_Key = tuple[int, int, int]
"""(channel, role, peer) of a thread block. It orders a rank's thread blocks."""
_Cell = tuple[str, int]


def to_msccl_xml(schedule: Schedule) -> str:
    """Return the schedule as MSCCL XML; see `Schedule.to_msccl_xml`."""
    if schedule.kind not in COLLECTIVES:
        raise ScheduleError(
            f"{schedule.kind} has no MSCCL XML: MSCCL's runtimes have {', '.join(COLLECTIVES)}. `to_json` writes any schedule."
        )
    return _Exporter(schedule).program().text()


@dataclass(slots=True)
class _Piece:
    """A step, its thread block, and the numbers of the steps that it waits for."""

    key: _Key
    step: MscclStep
    waits: list[int] = field(default_factory=list)


class _Fused(NamedTuple):
    """A fold, into a target, of a local operand and of what is received from `sender`."""

    sender: int
    local: int
    target: int


class _Exporter:
    def __init__(self, schedule: Schedule):
        self.schedule, self.collective = schedule, schedule.collective
        self.streams = schedule.messages().verify()
        self.p = schedule.nranks
        self.own_rows = schedule.places.rows  # rows from here on are staging
        c = self.collective
        self.letters, self.offsets = [], []
        for letter, rows in (("i", slice(0, c.input_chunks)), ("o", slice(c.input_chunks, c.input_chunks + c.output_chunks))):
            self.letters += [letter] * (rows.stop - rows.start)
            self.offsets += (c.blocks_of_rows[rows] * c.parts + c.parts_of_rows[rows]).tolist()
        scratch = self.streams.schedule.places.rows - len(self.letters)
        self.letters += ["s"] * scratch
        self.offsets += range(scratch)
        self.ranks: list[list[_Piece]] = [[] for _ in range(self.p)]

    def program(self) -> MscclProgram:
        """Return the program of all ranks."""
        self.collective.check_exportable("XML for MSCCL")
        self._collect()
        self._compact_scratch()
        graph, blocks = self._graph()
        gpus = [self._gpu(rank, graph, blocks) for rank in range(self.p)]
        c = self.collective
        root = c.root if c.meaning.rooted else None
        program = MscclProgram(self.schedule.algorithm, c.kind, self.p, root, c.parts, c.channels, gpus)
        self._check_limits(program)
        return program

    # ------------------------------------------------------------ steps

    def _collect(self) -> None:
        """Collect the steps of all ranks. Each rank's are in an order that keeps what its places hold."""
        for sends, combines in self.streams.rounds():
            sent = [x for i in sends for x in self._message(i)]
            folds = [x for i in combines for x in self._cut(i)]
            fused = self._fused(sent, folds)
            for message in sent:
                sender, receiver, channel, src, dst, n = message
                fold = fused.get(dst)
                at = (self._at(src), self._at(fold.target if fold else dst), n)
                self.ranks[sender].append(_Piece((channel, _SEND, receiver), MscclStep("s", *at)))
                if fold is None:
                    self.ranks[receiver].append(_Piece((channel, _RECEIVE, sender), MscclStep("r", *at)))
            for rank, channel, dsts, srcs, n in folds:
                self.ranks[rank] += self._fold(rank, channel, dsts, srcs, n, fused)

    def _message(self, i: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield (sender, receiver, channel, source, destination, chunks) of each piece of a message."""
        for _, channel, (dst,), (src,), n in self._cut(i):
            yield src % self.p, dst % self.p, channel, src, dst, n

    def _cut(self, i: int) -> Iterator[tuple[int, int, list[int], list[int], int]]:
        """Yield (rank, channel, destinations, sources, chunks) of each piece of an instruction."""
        s = self.streams
        dsts, srcs = s.operands(i)
        rank, channel = int(s.stream[i]) // s.schedule.channels, int(s.part[i]) // self.collective.chunks
        for at, n in self._pieces([*dsts, *srcs], int(s.count[i])):
            yield rank, channel, [x + at * self.p for x in dsts], [x + at * self.p for x in srcs], n

    def _pieces(self, places: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
        """Yield (first chunk, chunks) of the pieces of runs from these places on.

        Pieces are contiguous in memory and short enough.
        """
        rows = [place // self.p for place in places]
        start = 0
        for i in range(1, count + 1):
            whole = i < count and i - start < MOST_COUNT
            if not whole or any(self.offsets[r + i] != self.offsets[r + i - 1] + 1 for r in rows):
                yield start, i - start
                start = i

    def _fused(self, sent: list, combines: list) -> dict[int, _Fused]:
        """Return the receives that are one step, `rrc`, with a fold, by staging place.

        All that comes over a connection in the round must be folded so, in the order in which it comes.
        """
        folds = {}
        for order, (_, channel, dsts, srcs, n) in enumerate(combines):
            staged = [x for x in srcs if x // self.p >= self.own_rows]
            if len(srcs) == 2 and len(staged) == 1:
                local = srcs[0] if staged[0] == srcs[1] else srcs[1]
                folds[staged[0]] = (order, channel, n, local, dsts[0])
        found: dict[int, _Fused] = {}
        connection = itemgetter(0, 1, 2)
        for (sender, _, _), same in groupby(sorted(sent, key=connection), key=connection):
            arriving = [(dst, channel, n) for _, _, channel, _, dst, n in same]
            here = [folds[dst] for dst, channel, n in arriving if dst in folds and folds[dst][1:3] == (channel, n)]
            if len(here) == len(arriving) and [x[0] for x in here] == sorted(x[0] for x in here):
                found |= {dst: _Fused(sender, *fold[3:]) for (dst, _, _), fold in zip(arriving, here, strict=True)}
        return found

    def _fold(
        self, rank: int, channel: int, dsts: list[int], srcs: list[int], n: int, fused: dict[int, _Fused]
    ) -> Iterator[_Piece]:
        """Add the steps of destinations := left fold of the sources on one rank."""
        key = (channel, _LOCAL, -1)

        def step(type: str, src: int, dst: int) -> _Piece:
            return _Piece(key, MscclStep(type, self._at(src), self._at(dst), n))

        staged = next((x for x in srcs if x in fused), None)
        target = dsts[0]
        if staged is not None:
            sender, local, target = fused[staged]
            yield _Piece((channel, _RECEIVE, sender), MscclStep("rrc", self._at(local), self._at(target), n))
        else:
            inside = next((d for d in dsts if d in srcs), None)
            target = target if inside is None else inside
            at = srcs.index(target) if target in srcs else -1
            if at > 1:  # the fold needs it after its first operands
                target = self._extra(rank, n)
            elif at == 1:
                srcs = [srcs[1], srcs[0], *srcs[2:]]  # every op commutes
            if srcs[0] != target:
                yield step("cpy", srcs[0], target)
            for src in srcs[1:]:
                yield step("re", src, target)
        for dst in dsts:
            if dst != target:
                yield step("cpy", target, dst)

    def _extra(self, rank: int, n: int) -> int:
        """Return a place for n further chunks of scratch."""
        row = len(self.letters)
        first = self.offsets[-1] + 1 if self.letters[-1] == "s" else 0
        self.letters += ["s"] * n
        self.offsets += range(first, first + n)
        return row * self.p + rank

    def _at(self, place: int) -> _Cell:
        row = place // self.p
        return self.letters[row], self.offsets[row]

    def _compact_scratch(self) -> None:
        """Number the chunks of scratch that are used, of all ranks together, from 0 on."""
        steps = [piece.step for pieces in self.ranks for piece in pieces]
        cells = [(x, step.count) for step in steps for x in (step.source, step.destination) if x[0] == "s"]
        used = sorted({offset + i for (_, offset), n in cells for i in range(n)})
        number = {offset: i for i, offset in enumerate(used)}
        for step in steps:
            for side in ("source", "destination"):
                letter, offset = getattr(step, side)
                if letter == "s":
                    setattr(step, side, (letter, number[offset]))

    # ------------------------------------------------------------ dependencies

    def _graph(self) -> tuple[HappensBefore, list[list[tuple[_Key, list[_Piece]]]]]:
        """Return the steps of all ranks as a graph, without implied waits, and each rank's thread blocks."""
        blocks, number, start = [], {}, [0]
        for pieces in self.ranks:
            by_key: defaultdict[_Key, list[_Piece]] = defaultdict(list)
            for piece in pieces:
                by_key[piece.key].append(piece)
            blocks.append(sorted(by_key.items()))
            for _, own in blocks[-1]:
                number |= {id(piece): start[-1] + i for i, piece in enumerate(own)}
                start.append(start[-1] + len(own))
        for pieces in self.ranks:
            self._hazards(pieces, number)
        ordered = [piece for rank in blocks for _, own in rank for piece in own]
        waits = [sorted(piece.waits) for piece in ordered]
        ptr = np.concatenate([[0], np.cumsum([len(w) for w in waits])]).astype(np.int64)
        target = np.array([w for some in waits for w in some], np.int64)
        graph = HappensBefore(np.array(start), ptr, target)
        keep = transitively_reduced(graph, (np.diff(ptr) == 0) & ~graph.has_previous)
        ptr = np.concatenate([[0], np.cumsum(keep)])[ptr]
        return HappensBefore(graph.start, ptr, target[keep]), blocks

    def _hazards(self, pieces: list[_Piece], number: dict[int, int]) -> None:
        """Note the steps of other thread blocks that each must wait for."""
        order: AccessOrder[int] = AccessOrder()
        keys = {number[id(piece)]: piece.key for piece in pieces}
        for piece in pieces:
            step, does = piece.step, OPERATIONS[piece.step.type]
            reads = _cells(step.source, step.count) if does.reads else []
            writes = _cells(step.destination, step.count) if does.writes else []
            before = order.add(number[id(piece)], reads, writes)
            piece.waits = [b for b in before if keys[b] != piece.key]

    def _gpu(self, rank: int, graph: HappensBefore, blocks: list[list[tuple[_Key, list[_Piece]]]]) -> MscclGpu:
        """Return a rank's thread blocks, with `nop`s for waits of more than one step."""
        first = sum(map(len, blocks[:rank]))
        out, where, waits = [], {}, []
        for i, ((channel, role, peer), pieces) in enumerate(blocks[rank]):
            block = ThreadBlock(peer if role == _SEND else -1, peer if role == _RECEIVE else -1, channel)
            for j, piece in enumerate(pieces):
                node = int(graph.start[first + i]) + j
                awaited = graph.target[graph.ptr[node] : graph.ptr[node + 1]].tolist()
                for wait in awaited[:-1]:
                    waits.append((MscclStep("nop", ("i", -1), ("o", -1), 0), wait))
                    block.steps.append(waits[-1][0])
                waits += [(piece.step, wait) for wait in awaited[-1:]]
                where[node] = i, len(block.steps), piece.step
                block.steps.append(piece.step)
            out.append(block)
        for step, wait in waits:
            tb, index, awaited = where[wait]
            step.depends, awaited.awaited = (tb, index), True
        c = self.collective
        ends = [cell[1] + s.count for block in out for s in block.steps for cell in own_cells(s) if cell[0] == "s"]
        sizes = {"i": c.input_chunks, "o": c.output_chunks if c.has_output(rank) else 0, "s": max(ends, default=0)}
        return MscclGpu(sizes, out)

    # ------------------------------------------------------------ limits

    def _check_limits(self, program: MscclProgram) -> None:
        """Raise a ScheduleError for a program that no runtime of MSCCL reads."""
        for rank, gpu in enumerate(program.gpus):
            steps = [len(block.steps) for block in gpu.blocks]
            peers = [
                sum(block.channel == c and getattr(block, side) >= 0 for block in gpu.blocks)
                for c in range(program.channels)
                for side in ("send", "receive")
            ]
            for number, most, what in (
                (len(gpu.blocks), MOST_THREAD_BLOCKS, "thread blocks"),
                (max(peers, default=0), MOST_PEERS, "thread blocks that send, or receive, over one channel"),
                (max(steps, default=0), MOST_STEPS, "steps in a thread block"),
                (1 + self.p + len(steps) + sum(steps), MOST_NODES, "XML elements"),
                (max(gpu.chunks.values()), MOST_OFFSET + 1, "chunks in a buffer"),
            ):
                if number > most:
                    raise ScheduleError(
                        f"{self.schedule.algorithm} for {self.collective} needs {number:,} {what} on rank {rank}, and MSCCL's "
                        f"runtimes take at most {most:,}. Take fewer ranks, chunks or channels, or another algorithm."
                    )


def _cells(first: _Cell, count: int) -> list[_Cell]:
    letter, offset = first
    return [(letter, offset + i) for i in range(count)]
