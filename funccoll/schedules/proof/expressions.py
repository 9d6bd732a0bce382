"""Hash-consed expressions: the value of a place as a tree over the ranks' input chunks.

A leaf is an input chunk of one rank. Its number is its place. A node is a left fold of two or more expressions. Its first two
operands are sorted, because every op here commutes bit by bit (a NaN that comes out is the canonical one). Nothing else may be
reordered. Equal trees have equal numbers, so equal numbers mean equal bits. Operands of a prefix reduction stay as they are: it
must be right for an op that does not commute, too.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..collective import Collective

__all__ = ["MIXED", "Expressions"]

MIXED = -2
"""The label of an expression that combines different chunks."""
_BITS = -1
_COLUMNS = ("_low", "_span", "_label", "_part", "_twice", "_ordered")


class Expressions:
    """The table of expressions: each with a label (its input chunk), a part, its ranks, and a mark if one counts twice."""

    def __init__(self, collective: Collective):
        self.p = collective.nranks
        self.leaves = collective.nranks * collective.input_chunks
        self.size = self.inherited = self.leaves
        self._parts_of_rows = collective.parts_of_rows
        self._groups, self._order, self._places = collective.groups, collective.order, collective.places_in_order
        self._known: dict[Any, int] = {}
        self._blocks: list[np.ndarray] = []  # [new nodes, k] operands of the nodes that one batch made
        self._firsts: list[int] = []  # the number of each block's first node
        # Most sets of ranks that algorithms build are intervals of the order, modulo p. The others are kept as bits.
        self._low = np.zeros(64, np.int32)  # place of the first rank in the order, or the row of `_masks`
        self._span = np.zeros(64, np.int32)  # number of ranks, or _BITS
        self._masks = np.zeros((0, -(-self.p // 8)), np.uint8)
        self._label = np.zeros(64, np.int32)
        self._part = np.zeros(64, np.int32)
        self._twice = np.zeros(64, bool)
        self._commutes = not collective.meaning.prefix
        self._step = -1 if collective.reverse else 1
        self._ordered = np.zeros(64, bool)
        self._makers: list[np.ndarray] = []

    # ------------------------------------------------------------ facts, for arrays of numbers

    def labels(self, ids: np.ndarray) -> np.ndarray:
        """Return the input chunk each expression is about, MIXED for several."""
        return self._fact(ids, self._label, ids // self.p)

    def parts(self, ids: np.ndarray) -> np.ndarray:
        """Return the part of a block whose length each expression has."""
        rows = np.minimum(ids // self.p, len(self._parts_of_rows) - 1)
        return self._fact(ids, self._part, self._parts_of_rows[rows])

    def twice(self, ids: np.ndarray) -> np.ndarray:
        """Return True for expressions in which a rank is counted more than once."""
        return self._fact(ids, self._twice, np.zeros(ids.shape, bool))

    def _fact(self, ids: np.ndarray, column: np.ndarray, of_leaf: np.ndarray) -> np.ndarray:
        node = ids >= self.leaves
        if not node.any():
            return of_leaf
        return np.where(node, column[np.where(node, ids - self.leaves, 0)], of_leaf)

    def _interval(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (place of the first rank, number of ranks) of each. _BITS ranks: the first number is a row of masks."""
        low = self._fact(ids, self._low, self._places[ids % self.p])
        return low, self._fact(ids, self._span, np.ones(ids.shape, np.int32))

    def _bits(self, low: np.ndarray, span: np.ndarray) -> np.ndarray:
        """Return the sets of ranks as rows of bits, in the order."""
        rows = span == _BITS
        first, end = np.where(rows, 0, low), np.where(rows, 0, low + span)
        round_the_end = np.where(end > self.p, end - self.p, 0)
        below = self._below
        out = below[first] ^ below[np.minimum(end, self.p)] ^ below[round_the_end]
        out[rows] = self._masks[low[rows]]
        return out

    @cached_property
    def _below(self) -> np.ndarray:
        """Row i: the bits of the first i ranks."""
        return np.packbits(np.tri(self.p + 1, self.p, -1, bool), axis=1)

    @cached_property
    def _bits_of_groups(self) -> list[np.ndarray]:
        """The bits of each group's ranks."""
        return [np.packbits(np.isin(self._order, group)) for group in self._groups]

    def complete(self, ids: np.ndarray) -> np.ndarray:
        """Return True for expressions that contain every rank, or every rank of one group and no other."""
        low, span = self._interval(ids)
        if self._groups:
            bits = self._bits(low, span)
            return np.any([(bits == group).all(axis=1) for group in self._bits_of_groups], axis=0)
        out = span == self.p
        rows = span == _BITS
        out[rows] = (self._masks[low[rows]] == self._below[-1]).all(axis=1)
        return out

    def prefixes(self, ids: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Return True for expressions of `count` ranks from the place `first` on, combined in the order of a scan."""
        low, span = self._interval(ids)
        is_there = (low == first) | (span == self.p)  # all ranks are an interval from any of them
        return is_there & (span == count) & self._fact(ids, self._ordered, np.ones(ids.shape, bool))

    def one_rank(self, ids: np.ndarray) -> np.ndarray:
        """Return a rank of each expression."""
        low, span = self._interval(ids)
        out = np.array(low)
        rows = span == _BITS
        bits: Any = self._masks[low[rows]]
        out[rows] = np.unpackbits(bits, axis=1).argmax(axis=1)
        return self._order[out]

    def nranks(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of ranks in each expression."""
        low, span = self._interval(ids)
        rows = span == _BITS
        out = np.where(rows, 0, span)
        bits: Any = self._masks[low[rows]]
        out[rows] = np.unpackbits(bits, axis=1).sum(axis=1)
        return out

    # ------------------------------------------------------------ making

    def fold(self, operands: np.ndarray, maker: np.ndarray) -> np.ndarray:
        """Return the numbers of the folds of [n, k] operands, k ≥ 2. `maker` has the move that makes each."""
        kids = operands.astype(np.int64)
        if self._commutes:
            kids[:, :2].sort(axis=1)
        ids, fresh, following = [], [], self.size
        number_of = self._known.setdefault
        for i, key in enumerate(self._keys(kids)):
            number = number_of(key, following)
            if number == following:
                following += 1
                fresh.append(i)
            ids.append(number)
        if fresh:
            self._add(kids[fresh], maker[fresh])
        return np.array(ids, np.int64)

    def _keys(self, kids: np.ndarray) -> Sequence[Any]:
        """Return the keys of nodes in the table that finds equal ones."""
        if kids.shape[1] == 2 and self.size < 2**31:
            return (kids[:, 0] << 32 | kids[:, 1]).tolist()
        width, raw = kids.itemsize * kids.shape[1], kids.tobytes()
        return [raw[i : i + width] for i in range(0, len(raw), width)]

    def _add(self, kids: np.ndarray, maker: np.ndarray) -> None:
        n, k = kids.shape
        low, span = self._interval(kids[:, 0])
        twice = self.twice(kids[:, 0])
        labels = self.labels(kids)
        ordered = self._in_order(kids) if not self._commutes else np.zeros(n, bool)
        for j in range(1, k):
            low, span, again = self._union(low, span, *self._interval(kids[:, j]))
            twice = twice | again | self.twice(kids[:, j])
        at = self.size - self.leaves
        if at + n > len(self._label):
            room = max(n, len(self._label))
            for name in _COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(room, column.dtype)]))
        self._low[at : at + n] = low
        self._span[at : at + n] = span
        self._twice[at : at + n] = twice
        self._ordered[at : at + n] = ordered
        self._label[at : at + n] = np.where((labels == labels[:, :1]).all(axis=1), labels[:, 0], MIXED)
        self._part[at : at + n] = self.parts(kids[:, 0])
        small = np.int32 if self.size < 2**31 else np.int64
        self._blocks.append(kids.astype(small))
        self._firsts.append(self.size)
        self._makers.append(maker.astype(small))
        self.size += n

    def _in_order(self, kids: np.ndarray) -> np.ndarray:
        """Return True for folds whose operands are in the order of a scan, and continue each other."""
        before, after = (kids[:, :-1], kids[:, 1:])[:: self._step]
        (low, span), (low2, _) = self._interval(before), self._interval(after)
        in_order = self._fact(kids, self._ordered, np.ones(kids.shape, bool)).all(axis=1)
        return in_order & ((span != _BITS) & (low + span == low2)).all(axis=1)

    def _union(
        self, low: np.ndarray, span: np.ndarray, low2: np.ndarray, span2: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the unions of pairs of sets, and True for pairs that overlap."""
        p = self.p
        both = (span != _BITS) & (span2 != _BITS) & (span + span2 <= p)
        behind = both & ((low + span) % p == low2)
        ahead = both & ~behind & ((low2 + span2) % p == low)
        out_low, out_span = np.where(ahead, low2, low), span + span2
        twice = np.zeros(len(low), bool)
        other = np.flatnonzero(~behind & ~ahead)
        if len(other):
            one, two = self._bits(low[other], span[other]), self._bits(low2[other], span2[other])
            twice[other] = (one & two).any(axis=1)
            out_low[other] = np.arange(len(self._masks), len(self._masks) + len(other))
            out_span[other] = _BITS
            self._masks = np.concatenate([self._masks, one | two])
        return out_low, out_span, twice

    def close(self) -> None:
        """Drop the tables that find equal expressions: no more will be made."""
        self._known.clear()
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[: self.size - self.leaves].copy())

    def extended(self) -> Expressions:
        """Return a copy of this closed table to which more can be added. Equal expressions keep their numbers."""
        out = copy.copy(self)
        out.inherited = self.size
        out._known = {}
        out._blocks, out._firsts, out._makers = list(self._blocks), list(self._firsts), list(self._makers)
        for first, block in zip(self._firsts, self._blocks, strict=True):
            out._known.update(zip(self._keys(block.astype(np.int64)), range(first, first + len(block)), strict=True))
        return out

    # ------------------------------------------------------------ reading

    def children(self, node: int) -> tuple[int, ...]:
        """Return the operands of a node. A leaf has none."""
        if node < self.leaves:
            return ()
        block = bisect_right(self._firsts, node) - 1
        return tuple(self._blocks[block][node - self._firsts[block]].tolist())

    def made_by(self, node: int) -> int:
        """Return the move that made a node first. It is -1 if this table has the node from the one that it extends."""
        if node < self.inherited:
            return -1
        block = bisect_right(self._firsts, node) - 1
        return int(self._makers[block][node - self._firsts[block]])

    def blocks(self) -> list[np.ndarray]:
        """Return the operands of all nodes, as arrays [n, k]."""
        return self._blocks

    def leaf(self, node: int) -> tuple[int, int]:
        """Return (rank, input chunk) of a leaf."""
        return node % self.p, node // self.p

    def contributions(self, node: int, limit: int = 100_000) -> list[tuple[int, int]]:
        """Return every leaf under a node, as often as it counts (at most `limit` are listed)."""
        out: list[tuple[int, int]] = []
        stack = [node]
        while stack and len(out) < limit:
            here = stack.pop()
            kids = self.children(here)
            if kids:
                stack += reversed(kids)
            else:
                out.append(self.leaf(here))
        return out

    def text(self, node: int, most: int = 12) -> str:
        """Return an expression as text, such as (x0[2] + x1[2]) + x3[2]. There x3[2] is chunk 2 of rank 3's input."""
        if len(self.contributions(node, most + 1)) > most:
            return "a fold of " + " and ".join(self.text(k, 3) if k < self.leaves else "..." for k in self.children(node)[:2])
        return self._text(node, False)

    def _text(self, node: int, inside: bool) -> str:
        kids = self.children(node)
        if not kids:
            rank, chunk = self.leaf(node)
            return f"x{rank}[{chunk}]"
        text = " + ".join(self._text(k, k >= self.leaves) for k in kids)
        return f"({text})" if inside else text
