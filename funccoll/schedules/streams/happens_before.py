"""The happens-before graph of instructions in streams, its levels, and its clocks.

A node's *clock* for a stream is the number of that stream's instructions that are done when the node is done
(Lamport 1978; Mattern 1989). Node b comes after the i-th node of stream a exactly when b's clock for a is above i.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from .symmetry import Symmetry, clock_dtype, symmetry_of

__all__ = ["HappensBefore", "concat_ranges", "transitively_reduced"]

_ROWS_BYTES = 1 << 28
"""Bytes of clocks at a time: columns are independent of each other, so they are computed in blocks."""


def concat_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indices start, start + 1, ..., start + length - 1 of every range, one range after the other."""
    total = int(lengths.sum())
    if not total:
        return np.zeros(0, np.int64)
    ends = np.cumsum(lengths)
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)


class HappensBefore:
    """Streams of nodes. Stream s has the nodes start[s] ... start[s + 1] - 1, each after the one before it.

    Node i also comes after the nodes target[ptr[i]:ptr[i + 1]]. There are `channels` streams for each rank, side by side.
    """

    def __init__(self, start: np.ndarray, ptr: np.ndarray, target: np.ndarray, channels: int = 1):
        self.start, self.ptr, self.target, self.channels = start, ptr, target, channels
        self.streams = len(start) - 1
        self.nodes = int(start[-1])

    @cached_property
    def stream(self) -> np.ndarray:
        """The stream of each node."""
        return np.repeat(np.arange(self.streams, dtype=np.int32), np.diff(self.start))

    @cached_property
    def has_previous(self) -> np.ndarray:
        """True for nodes that have another before them in their stream."""
        out = np.ones(self.nodes, bool)
        out[self.start[:-1][np.diff(self.start) > 0]] = False
        return out

    # ------------------------------------------------------------ levels

    @cached_property
    def order(self) -> tuple[np.ndarray, np.ndarray]:
        """(nodes level by level, the end of each level). Nodes on or behind a cycle are left out (Kahn 1962)."""
        waiting = np.diff(self.ptr).astype(np.int64) + self.has_previous
        by_target = np.argsort(self.target, kind="stable")
        reader = np.repeat(np.arange(self.nodes), np.diff(self.ptr))[by_target]
        first = np.searchsorted(self.target[by_target], np.arange(self.nodes + 1))
        has_next = np.zeros(self.nodes, bool)
        has_next[np.flatnonzero(self.has_previous) - 1] = True
        front = np.flatnonzero(waiting == 0)
        levels, ends, done = [], [], 0
        while len(front):
            levels.append(front)
            done += len(front)
            ends.append(done)
            freed = reader[concat_ranges(first[front], first[front + 1] - first[front])]
            freed = np.concatenate([freed, front[has_next[front]] + 1])
            np.subtract.at(waiting, freed, 1)
            front = np.unique(freed[waiting[freed] == 0])
        return np.concatenate(levels) if levels else np.zeros(0, np.int64), np.array(ends, np.int64)

    @cached_property
    def level(self) -> np.ndarray:
        """The level of each node, -1 on or behind a cycle."""
        nodes, ends = self.order
        out = np.full(self.nodes, -1, np.int64)
        out[nodes] = np.searchsorted(ends, np.arange(len(nodes)), side="right")
        return out

    def levels_of(self, nodes: np.ndarray) -> np.ndarray:
        """Return the level of some nodes. If all ranks look alike, so do their levels."""
        if self._symmetry is None:
            return self.level[nodes]
        return self._symmetry.level[nodes % self._symmetry.per_rank]

    @property
    def is_acyclic(self) -> bool:
        """True if every node can run."""
        return self._symmetry is not None or len(self.order[0]) == self.nodes

    def stuck(self) -> dict[int, list[int]]:
        """Return the nodes on cycles, each with those among them that it waits for."""
        left = set(np.flatnonzero(self.level < 0).tolist())
        edges = {n: [m for m in self.before(n) if m in left] for n in left}
        waited_for: dict[int, int] = dict.fromkeys(left, 0)
        for out in edges.values():
            for m in out:
                waited_for[m] += 1
        drop = [n for n, count in waited_for.items() if not count]
        while drop:  # if no stuck node waits for a node, it is behind a cycle, not on one
            for m in edges.pop(drop.pop()):
                waited_for[m] -= 1
                if not waited_for[m]:
                    drop.append(m)
        return edges

    def before(self, node: int) -> list[int]:
        """Return the nodes directly before one."""
        out = self.target[self.ptr[node] : self.ptr[node + 1]].tolist()
        return [*out, node - 1] if self.has_previous[node] else out

    # ------------------------------------------------------------ clocks

    def knows(self, node: np.ndarray, stream: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Return True for queries whose `count` first nodes of `stream` are done when `node` is. Needs an acyclic graph."""
        if self._symmetry is not None:
            return self._symmetry.clock(node, stream) >= count
        out = np.zeros(len(node), bool)
        order = np.argsort(stream, kind="stable")
        asked = stream[order]
        for low, high, clocks in self._clock_blocks(asked):
            mine = order[np.searchsorted(asked, low) : np.searchsorted(asked, high)]
            out[mine] = clocks[node[mine], stream[mine] - low] >= count[mine]
        return out

    def _clock_blocks(self, asked: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the blocks of columns [low, high) that are asked for, with the clocks [nodes, high - low]."""
        dtype = clock_dtype(self.start)
        width = max(1, min(self.streams, _ROWS_BYTES // (max(1, self.nodes) * dtype.itemsize)))
        own = (np.arange(self.nodes) - self.start[self.stream] + 1).astype(dtype)
        steps = self._steps()
        for low in range(0, self.streams, width):
            high = min(self.streams, low + width)
            if np.searchsorted(asked, low) == np.searchsorted(asked, high):
                continue
            clocks = np.zeros((self.nodes, high - low), dtype)
            for nodes, chained, layers in steps:
                clocks[chained] = clocks[chained - 1]
                for before in layers:  # np.maximum.reduceat along the first axis is 90 times slower
                    here = nodes[: len(before)]
                    clocks[here] = np.maximum(clocks[here], clocks[before])
                inside = nodes[(self.stream[nodes] >= low) & (self.stream[nodes] < high)]
                clocks[inside, self.stream[inside] - low] = own[inside]
            yield low, high, clocks

    def _steps(self) -> list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]:
        """Levels, each as its nodes (most awaited nodes first), those with a previous one, the first, second, ... awaited."""
        ordered, ends = self.order
        waits = np.diff(self.ptr)
        out = []
        for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            nodes = ordered[begin:end]
            nodes = nodes[np.argsort(-waits[nodes], kind="stable")]
            many = [int((waits[nodes] > j).sum()) for j in range(int(waits[nodes[0]]))]
            layers = [self.target[self.ptr[nodes[:n]] + j] for j, n in enumerate(many)]
            out.append((nodes, nodes[self.has_previous[nodes]], layers))
        return out

    @cached_property
    def _symmetry(self) -> Symmetry | None:
        return symmetry_of(self.start, self.ptr, self.target, self.channels)

    def typical(self) -> tuple[np.ndarray, np.ndarray]:
        """(ptr, target) of the nodes that stand for all: those of rank 0 alone if all ranks look alike."""
        if self._symmetry is None:
            return self.ptr, self.target
        return self.ptr[: self._symmetry.per_rank + 1], self._symmetry.targets

    def everywhere(self, values: np.ndarray) -> np.ndarray:
        """Repeat values for the waits of `typical` for all waits."""
        if self._symmetry is None:
            return values
        out = np.tile(values, self._symmetry.p)
        if self._symmetry.order is not None:
            moved = np.empty_like(out)
            moved[self._symmetry.order] = out
            return moved
        return out


def transitively_reduced(graph: HappensBefore, trivial: np.ndarray) -> np.ndarray:
    """Return a mask of the graph's waits that are needed: not implied by the node's other waits and its predecessor.

    `trivial` marks the nodes without a predecessor: they imply no other wait. Source: Aho, Garey, Ullman 1972.
    """
    ptr, target = graph.typical()
    n = len(ptr) - 1
    stream = graph.stream[target]
    count = target - graph.start[stream] + 1
    # Every wait, paired with every other node directly before its own.
    waits = np.diff(ptr)
    telling = ~trivial[target]
    tellers = np.concatenate([[0], np.cumsum(telling)])
    first, last = tellers[ptr[:-1]], tellers[ptr[1:]]
    told = np.flatnonzero(telling)
    node = np.repeat(np.arange(n), waits)
    pairs = (last - first)[node]
    which = np.repeat(np.arange(len(target)), pairs)
    other = told[concat_ranges(first[node], pairs)]
    keep = other != which
    which, by = which[keep], target[other[keep]]
    chained = np.flatnonzero(graph.has_previous[:n][node])
    which, by = np.concatenate([which, chained]), np.concatenate([by, node[chained] - 1])
    implied = np.zeros(len(target), bool)
    implied[which[graph.knows(by, stream[which], count[which])]] = True
    return graph.everywhere(~implied)
