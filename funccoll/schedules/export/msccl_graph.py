"""The steps of an MSCCL program as a graph: their order, deadlocks, races, and levels.

Each step comes after the one before it in its thread block, after the step that it waits for, and a receive after its send. A
cycle is a deadlock. Two accesses to one place that the graph does not order are a race.

Sends are taken as the runtime's, which buffer: a send does not wait for its receive. If the program works without buffers
(every file of ours does), send and receive have one level.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from ...errors import ScheduleError, Source
from ..proof.symbolic import shortest_cycle
from ..streams.happens_before import HappensBefore
from .msccl_format import OPERATIONS, MscclProgram, MscclStep

__all__ = ["StepGraph", "StepNode"]

_MOST_ACCESSES = 1 << 20
"""The most chunks of all steps of a program that is read."""


@dataclass(slots=True)
class StepNode:
    """One half of a step on a rank: it receives, works locally, or sends."""

    rank: int
    step: MscclStep
    part: str
    """"receive", "local", "send" or "nop"."""
    partner: int = -1
    """The node of the other side of a message."""
    slot: int = -1
    """Scratch for the result of an `rrs`, which has no place of its own."""
    folded: list[MscclStep] = field(default_factory=list)
    """Steps `re` before this one that are one fold with it."""
    replaced: bool = False
    """True for an `re` that belongs to the fold of a later one."""


class StepGraph:
    """The nodes of a program, thread block after thread block: those of block b are start[b] ... start[b + 1] - 1.

    `level` has the level of each node. `buffered` is True if the program needs sends that do not wait. `writes` has, for each
    cell (rank, buffer, chunk), the levels at which it is written. Raises ScheduleError for deadlocks and races.
    """

    def __init__(self, program: MscclProgram, name: str):
        self.program, self.name = program, name
        self._collect()
        self._match()
        self._level()
        self._check_races()

    def _collect(self) -> None:
        """Collect the nodes, thread block after thread block."""
        self.nodes: list[StepNode] = []
        self.start, self.channel = [0], []
        waits: list[tuple[int, int, int, int]] = []  # node, rank, thread block, step
        last: dict[tuple[int, int, int], int] = {}  # (rank, thread block, step) -> its last node
        for rank, gpu in enumerate(self.program.gpus):
            for number, block in enumerate(gpu.blocks):
                for index, step in enumerate(block.steps):
                    if step.depends is not None and step.depends[0] != number:
                        waits.append((len(self.nodes), rank, *step.depends))
                    does = OPERATIONS[step.type]
                    parts = ["receive"] * does.receives + ["send"] * does.sends
                    for part in parts or ["nop" if step.type == "nop" else "local"]:
                        self.nodes.append(StepNode(rank, step, part))
                    last[rank, number, index] = len(self.nodes) - 1
                    if step.type == "re":
                        self._fold_with_previous(block.steps, index)
                self.start.append(len(self.nodes))
                self.channel.append(block.channel)
        self.waits = [(node, last[rank, tb, s]) for node, rank, tb, s in waits]

    def _fold_with_previous(self, steps: Sequence[MscclStep], index: int) -> None:
        """Join an `re` to the one before it as one fold, if both have one destination and no step waits for that one."""
        node, step = self.nodes[-1], steps[index]
        if not index:
            return
        before = steps[index - 1]
        same = (before.type, before.destination, before.count) == ("re", step.destination, step.count)
        # A fold that reads its own destination again stays separate.
        if same and not before.awaited and not _overlap(step.source, step.destination, step.count):
            previous = self.nodes[-2]
            node.folded, previous.replaced = [*previous.folded, before], True

    def _match(self) -> None:
        """Find the receive of every send: the k-th send of a connection matches the k-th receive."""
        sides: dict[str, defaultdict[tuple[int, int, int], list[int]]] = {}
        sides |= {"send": defaultdict(list), "receive": defaultdict(list)}
        first = 0
        for rank, gpu in enumerate(self.program.gpus):
            for block in gpu.blocks:
                stop = self.start[first + 1]
                for i in range(self.start[first], stop):
                    part = self.nodes[i].part
                    if part in sides:
                        ends = (rank, block.send) if part == "send" else (block.receive, rank)
                        sides[part][(*ends, block.channel)].append(i)
                first += 1
        for connection in sides["send"].keys() | sides["receive"].keys():
            sent, received = (sides[part].get(connection, []) for part in ("send", "receive"))
            for s, r in zip(sent, received, strict=False):
                self.nodes[s].partner, self.nodes[r].partner = r, s
                counts = self.nodes[s].step.count, self.nodes[r].step.count
                if counts[0] != counts[1]:
                    self.fail(f"a send of {counts[0]} chunks is paired with a receive of {counts[1]}", s, r)
            if len(sent) != len(received):
                more, what, verb = (sent, "send", "receive") if len(sent) > len(received) else (received, "receive", "send")
                i = more[min(len(sent), len(received))]
                src, dst, channel = connection
                self.fail(
                    f"deadlock: gpu {src} sends {len(sent)} times to gpu {dst} over channel {channel}, which receives "
                    f"{len(received)} times: there is no {verb} for this {what}",
                    i,
                )

    def _level(self) -> None:
        """Find the level of every node, without buffers if the program works so."""
        nodes = self.nodes
        edges = [*self.waits, *((r, nodes[r].partner) for r in range(len(nodes)) if nodes[r].part == "receive")]
        edges.sort()
        reader, target = (np.array(x, np.int64) for x in zip(*edges)) if edges else (np.zeros(0, np.int64),) * 2
        ptr = np.concatenate([[0], np.cumsum(np.bincount(reader, minlength=len(nodes)))])
        self._graph = HappensBefore(np.array(self.start), ptr, target)
        if len(self._graph.order[0]) < len(nodes):
            cycle = shortest_cycle(self._graph.stuck()) or []
            lines = ", ".join(str(nodes[i].step.line) for i in cycle[:12]) + (", ..." if len(cycle) > 12 else "")
            self.fail(f"deadlock: steps wait for each other in a cycle (lines {lines})", *cycle[:1])
        joined = self._rendezvous_levels(edges)
        self.buffered = joined is None
        self.level: list[int] = self._graph.level.tolist() if joined is None else joined

    def _rendezvous_levels(self, edges: Sequence[tuple[int, int]]) -> list[int] | None:
        """Return levels in which a send and its receive are one. None if that would be a deadlock."""
        nodes = self.nodes
        whole = [n.partner if n.part == "receive" else i for i, n in enumerate(nodes)]
        after: list[list[int]] = [[] for _ in nodes]
        waiting = [0] * len(nodes)
        first = set(self.start)
        chain = ((i, i - 1) for i in range(len(nodes)) if i not in first)
        for reader, target in (*edges, *chain):
            a, b = whole[reader], whole[target]
            if a != b:
                after[b].append(a)
                waiting[a] += 1
        level = [0] * len(nodes)
        front = [i for i in range(len(nodes)) if whole[i] == i and not waiting[i]]
        done = 0
        while front:
            i = front.pop()
            done += 1
            for j in after[i]:
                level[j] = max(level[j], level[i] + 1)
                waiting[j] -= 1
                if not waiting[j]:
                    front.append(j)
        if done < sum(whole[i] == i for i in range(len(nodes))):
            return None
        return [level[whole[i]] for i in range(len(nodes))]

    # ------------------------------------------------------------ accesses

    def accesses(self, node: StepNode) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """Return the cells that a node reads and writes on its rank."""
        step, does = node.step, OPERATIONS[node.step.type]
        if node.part == "send":
            start = step.source if step.type == "s" else step.destination
            return ([] if step.type == "rrs" else self.cells(node.rank, start, step.count)), []
        reads = self.cells(node.rank, step.source, step.count) if does.reads else []
        writes = self.cells(node.rank, step.destination, step.count) if does.writes else []
        return (reads + writes if step.type == "re" else reads), writes

    def cells(self, rank: int, start: tuple[str, int], count: int) -> list[tuple[str, int]]:
        """Return the cells of a run. In place, input and output are cells of one buffer."""
        letter, offset = start
        if self.program.in_place and letter != "s":
            offset += self.in_place_shift(rank, letter)
            letter = "o"
        return [(letter, offset + i) for i in range(count)]

    def in_place_shift(self, rank: int, letter: str) -> int:
        """Return the offset of a buffer in the larger one that contains it as this rank's block."""
        small = {"all_gather": "i", "reduce_scatter": "o"}.get(self.program.kind)
        return rank * self.program.parts if letter == small else 0

    def _check_races(self) -> None:
        """Raise a ScheduleError for accesses to one cell, one of them a write, that the graph does not order."""
        if sum(node.step.count for node in self.nodes) > _MOST_ACCESSES:
            self.fail(f"its steps move more than {_MOST_ACCESSES:,} chunks in all")
        writer: dict[tuple[int, str, int], int] = {}
        readers: defaultdict[tuple[int, str, int], list[int]] = defaultdict(list)
        pairs: set[tuple[int, int]] = set()
        self.writes: defaultdict[tuple[int, str, int], list[int]] = defaultdict(list)
        for i in self._graph.order[0].tolist():
            node = self.nodes[i]
            reads, writes = self.accesses(node)
            for cell in ((node.rank, *c) for c in reads):
                if cell in writer:
                    pairs.add((i, writer[cell]))
                readers[cell].append(i)
            for cell in ((node.rank, *c) for c in writes):
                pairs.update((i, reader) for reader in readers.pop(cell, ()) if reader != i)
                if cell in writer:
                    pairs.add((i, writer[cell]))
                writer[cell] = i
                self.writes[cell].append(self.level[i])
        if not pairs:
            return
        later, earlier = (np.array(x, np.int64) for x in zip(*pairs))
        stream = self._graph.stream[earlier]
        ordered = self._graph.knows(later, stream, earlier - self._graph.start[stream] + 1)
        if not ordered.all():
            a, b = min((int(e), int(i)) for i, e, known in zip(later, earlier, ordered, strict=True) if not known)
            self.fail(
                "race: two steps of one gpu use the same chunk, one of them writes it, and nothing orders them (depid, deps)",
                a,
                b,
            )

    def fail(self, what: str, *nodes: int) -> NoReturn:
        """Raise the error, at the line of the last of some nodes."""
        lines = [self.nodes[i].step.line for i in nodes]
        where = f", line{'s' * (len(lines) > 1)} {' and '.join(map(str, lines))}" if lines else ""
        raise ScheduleError(
            f"MSCCL XML{where}: {what}.", Source(self.name, lines[-1] if lines else self.program.line, "MSCCL XML")
        )


def _overlap(a: tuple[str, int], b: tuple[str, int], count: int) -> bool:
    return a[0] == b[0] and abs(a[1] - b[1]) < count
