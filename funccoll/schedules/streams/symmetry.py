"""Graphs that look alike from every rank: the clocks of one rank stand for all."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

__all__ = ["Symmetry", "clock_dtype", "symmetry_of"]


def clock_dtype(start: np.ndarray) -> np.dtype:
    """Return the integer dtype that holds the numbers of instructions of streams."""
    return np.dtype(np.int16 if int(np.diff(start).max(initial=0)) < 2**15 else np.int32)


class Symmetry:
    """A graph that looks alike from every rank, up to a rotation of the ranks or an exclusive or of their numbers.

    Rings, Bruck's algorithm and all direct exchanges are of the first sort, recursive doubling of the second. One rank's clocks
    then stand for all, so time and memory fall by a factor of p.
    """

    def __init__(
        self, start: np.ndarray, ptr: np.ndarray, targets: np.ndarray, channels: int, xor: bool, order: np.ndarray | None
    ):
        self.p, self.channels, self.xor = (len(start) - 1) // channels, channels, xor
        self.per_rank = int(start[channels])
        self.ptr = ptr[: self.per_rank + 1]
        self.targets = targets
        """The targets of rank 0's waits, in an order that is the same for all ranks."""
        self.order = order
        """The same order as indices into all waits; None when they are in it already."""
        self.level = np.full(self.per_rank, -1, np.int64)
        self.clocks = np.zeros((self.per_rank, self.p, channels), clock_dtype(start))
        """The clock of each node of rank 0 for each stream."""
        self.acyclic = self._run(start[: channels + 1].tolist())

    def _run(self, start: list[int]) -> bool:
        """Level and clock of each node; False when nodes wait for each other in a cycle."""
        n = self.per_rank
        stream = [s for s, (a, b) in enumerate(pairwise(start)) for _ in range(b - a)]
        before: list[list[tuple[int, int]]] = []
        readers: list[list[int]] = [[] for _ in range(n)]
        ptr, targets = self.ptr.tolist(), self.targets.tolist()
        for i in range(n):
            shifted = [divmod(t, n)[::-1] for t in targets[ptr[i] : ptr[i + 1]]]
            before.append([*shifted, (i - 1, 0)] if i > start[stream[i]] else shifted)
            for j, _ in before[i]:
                readers[j].append(i)
        missing = [len(b) for b in before]
        ready = [i for i in range(n) if not missing[i]]
        ranks = np.arange(self.p)
        done = 0
        while ready:
            i = ready.pop()
            done += 1
            row = self.clocks[i]
            self.level[i] = 1 + max((self.level[j] for j, _ in before[i]), default=-1)
            for j, shift in before[i]:
                seen = self.clocks[j]
                if shift:
                    seen = seen[ranks ^ shift] if self.xor else np.roll(seen, shift, axis=0)
                np.maximum(row, seen, out=row)
            row[0, stream[i]] = i - start[stream[i]] + 1
            for j in readers[i]:
                missing[j] -= 1
                if not missing[j]:
                    ready.append(j)
        return done == n

    def clock(self, node: np.ndarray, stream: np.ndarray) -> np.ndarray:
        """The clock of each node for each stream."""
        mine, rank = node // self.per_rank, stream // self.channels
        away = mine ^ rank if self.xor else (rank - mine) % self.p
        return self.clocks[node % self.per_rank, away, stream % self.channels]


def symmetry_of(start: np.ndarray, ptr: np.ndarray, target: np.ndarray, channels: int) -> Symmetry | None:
    """Return the symmetry of a graph's streams (see `HappensBefore`), or None."""
    p = (len(start) - 1) // channels
    nodes = int(start[-1])
    lengths = np.diff(start).reshape(p, channels)
    waits = np.diff(ptr)
    if not nodes or (lengths != lengths[0]).any() or (waits.reshape(p, -1) != waits[: nodes // p]).any():
        return None
    per_rank = nodes // p
    rank = np.repeat(np.arange(p, dtype=target.dtype), int(ptr[per_rank]))
    for xor in (False, True) if p & (p - 1) == 0 else (False,):
        if xor:
            away, node = np.divmod(target, per_rank)
            key = ((away ^ rank) * per_rank + node).reshape(p, -1)
        else:
            key = ((target - rank * per_rank) % nodes).reshape(p, -1)
        order = None
        if (key != key[0]).any():
            order = np.lexsort((key.reshape(-1), np.repeat(np.arange(nodes), waits)))
            key = key.reshape(-1)[order].reshape(p, -1)
        if (key == key[0]).all():
            found = Symmetry(start, ptr, key[0], channels, xor, order)
            return found if found.acyclic else None
    return None
