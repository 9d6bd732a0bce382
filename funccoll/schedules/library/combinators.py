"""Components of the algorithms: patterns that look the same from every rank, their transposes, and groups of ranks.

An all_gather pattern becomes moves in two ways. `spread` copies blocks along it. `accumulate` runs it backwards and adds where
`spread` copies. The transpose of an all_gather is a reduce_scatter with the same rounds and bytes, and both together are an
all_reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..moves import Move

__all__ = [
    "Group",
    "Pattern",
    "accumulate",
    "all_ranks",
    "alongside",
    "bruck",
    "circulant",
    "doubling",
    "log2_ceil",
    "own_block",
    "own_copy",
    "pat",
    "powers",
    "ring",
    "split",
    "spread",
    "together",
    "wrapped",
]

Rounds = Iterator[list[Move]]


def log2_ceil(p: int) -> int:
    """Return ⌈log₂ p⌉."""
    return (p - 1).bit_length()


def powers(p: int) -> list[int]:
    """Return the ⌈log₂ p⌉ powers of two below p, ascending."""
    return [1 << k for k in range(log2_ceil(p))]


# ---------------------------------------------------------------- patterns


class Pattern(NamedTuple):
    """An all_gather among `size` members that looks the same from each of them.

    In a step (skip, blocks) every member m gets from member m + skip the blocks m + b, for each b of `blocks` (ascending
    int64[], 0 < b < size). Sums are modulo `size`; in a `cube` they are bitwise exclusive or. In the first step each passes on
    its own block, and only that.
    """

    size: int
    steps: list[tuple[int, np.ndarray]]
    cube: bool = False

    def plus(self, a: Any, b: Any) -> Any:
        """Return a + b among the members."""
        return a ^ b if self.cube else (a + b) % self.size

    def minus(self, a: Any, b: Any) -> Any:
        """Return a − b among the members."""
        return a ^ b if self.cube else (a - b) % self.size


def ring(p: int, skip: int) -> Pattern:
    """Return p − 1 steps, in each a block from the neighbour at distance `skip` (1 or −1)."""
    return Pattern(p, [(skip, np.array([skip * t % p])) for t in range(1, p)])


def bruck(p: int) -> Pattern:
    """Return ⌈log₂ p⌉ steps: everything from distance 1, 2, 4, ..., the last step only what is still missing."""
    return Pattern(p, [(d, np.arange(d, min(2 * d, p))) for d in powers(p)])


def circulant(p: int) -> Pattern:
    """Return ⌈log₂ p⌉ steps whose distances come from halving p, rounded up, again and again: half of what there will be."""
    steps = []
    there = p
    while there > 1:
        before = (there + 1) // 2
        steps.append((before, np.arange(before, there)))
        there = before
    return Pattern(p, steps[::-1])


def pat(p: int) -> Pattern:
    """Return ⌈log₂ p⌉ steps: Bruck's with the dimensions reversed, the far ones first, when there is only one block to send."""
    return Pattern(p, [(d, np.arange(d, p, 2 * d)) for d in reversed(powers(p))])


def doubling(p: int) -> Pattern:
    """Return log₂ p exchanges with the member that differs in bit 0, 1, 2, ...; p is a power of two."""
    return Pattern(p, [(d, np.arange(d, 2 * d)) for d in powers(p)], cube=True)


# ---------------------------------------------------------------- groups and their blocks


class Group(NamedTuple):
    """Several groups of ranks that run one pattern side by side.

    Member m of group g is rank `ranks[g, m]`, and its block b is chunk `chunks[g, b]`, or −1 if there is no such block. A rank
    may be in several groups.
    """

    ranks: np.ndarray
    chunks: np.ndarray

    @property
    def consecutive(self) -> bool:
        """True if the blocks of each group are consecutive chunks."""
        return bool((np.diff(self.chunks, axis=1) == 1).all())


def all_ranks(p: int, first: int = 0) -> Group:
    """Return all ranks as one group. Block b is chunk `first` + b."""
    return Group(np.arange(p)[None], first + np.arange(p)[None])


def wrapped(start: np.ndarray, count: Any, size: int) -> list[tuple[Any, Any]]:
    """Return runs of `count` blocks that continue at 0 after block size − 1, as one or two lists of (start, count).

    If a run does not wrap around, its second count is 0 (a Move skips rows with count 0).
    """
    ahead = size - start
    if np.all(count <= ahead):
        return [(start, count)]
    return [(start, np.minimum(count, ahead)), (0, np.maximum(count - ahead, 0))]


def _rows(group: Group, pattern: Pattern, skip: int, blocks: np.ndarray) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield transfers to members from `skip` away.

    They are columns (rank, other rank, chunk, count) of shape [groups, size, runs].
    """
    member = np.arange(pattern.size)[:, None]
    runs = group.consecutive
    begins = np.flatnonzero(np.diff(blocks, prepend=-2) != 1) if runs else np.arange(len(blocks))
    start, count = blocks[begins], np.diff(begins, append=len(blocks))
    # If a run of b is aligned to its length, the blocks m ^ b are a run too, in another order.
    start = (member ^ start) & -count if pattern.cube else (member + start) % pattern.size
    rank, other = group.ranks[:, member], group.ranks[:, pattern.plus(member, skip)]
    for at, n in wrapped(start, count, pattern.size) if runs else [(start, count)]:
        chunk = group.chunks[:, np.broadcast_to(at, start.shape)]
        yield rank, other, chunk, n if runs else np.where(chunk < 0, 0, n)


def spread(pattern: Pattern, group: Group, from_input: bool = False) -> Rounds:
    """Yield an all_gather: blocks are copied along the pattern, from output to output.

    With `from_input`, each member's own block is chunk 0 of its input until the first step is over.
    """
    for number, (skip, blocks) in enumerate(pattern.steps):
        own = from_input and number == 0
        yield [
            Move((rank, "output", chunk), (other, "input", 0) if own else (other, "output", chunk), count)
            for rank, other, chunk, count in _rows(group, pattern, skip, blocks)
        ]


def accumulate(
    pattern: Pattern, group: Group, buffer: str, *, started: bool = False, result: tuple[str, int] | None = None
) -> Rounds:
    """Yield a reduce_scatter, the transpose of the pattern: its steps backwards, with sums in place of copies.

    Partial sums of a block are in its chunk of `buffer`. The first sum reads the rank's own input, and what is sent before
    there is a sum comes from the input. With `started` there are sums at the beginning already. The last step, in which each
    member gets its own block, writes to the place `result`, if you give one.
    """
    summed = np.full(pattern.size, started)
    for left, (skip, blocks) in zip(reversed(range(len(pattern.steps))), reversed(pattern.steps)):
        mine = pattern.minus(blocks, skip)
        step = []
        for begun, sent in ((False, False), (False, True), (True, False), (True, True)):
            some = blocks[(summed[mine] == begun) & (summed[blocks] == sent)]
            for rank, other, chunk, count in _rows(group, pattern, skip, some) if len(some) else ():
                own = (other, buffer if begun else "input", chunk)
                got = (rank, buffer if sent else "input", chunk)
                to = (other, *result) if result and not left else (other, buffer, chunk)
                step.append(Move(to, [own, got], count))
        summed[mine] = True
        yield step


# ---------------------------------------------------------------- rounds


def own_copy(p: int, count: int = 1) -> Move:
    """Return moves of every rank's input to its output: all there is to do for p = 1."""
    ranks = np.arange(p)
    return Move((ranks, "output", 0), (ranks, "input", 0), count)


def own_block(p: int) -> Move:
    """Return moves of every rank's input to its block of its output."""
    r = np.arange(p)
    return Move((r, "output", r), (r, "input", 0))


def alongside(moves: list[Move], rounds: Iterable[list[Move]]) -> Rounds:
    """Yield the rounds, with `moves` in the first one. If there is no round, `moves` are one."""
    rest = iter(rounds)
    yield [*moves, *next(rest, [])]
    yield from rest


def together(*rounds: Iterable[list[Move]]) -> Rounds:
    """Yield rounds of independent data at the same time."""
    for steps in zip(*rounds, strict=True):
        yield [move for step in steps for move in step]


def split(dst: tuple[Any, Any, Any], srcs: list[tuple[Any, Any, Any]], count: Any = 1) -> list[Move]:
    """Split a Move whose buffers may be arrays of names, row by row, into Moves that name one buffer in each place."""
    columns = np.broadcast_arrays(count, *(column for place in (dst, *srcs) for column in place))
    count, columns = columns[0].reshape(-1), [c.reshape(-1) for c in columns[1:]]
    names, which = np.unique(np.stack(columns[1::3]), axis=1, return_inverse=True)
    moves = []
    for i, buffers in enumerate(names.T):
        rows = which.reshape(-1) == i
        to, *frm = ((rank[rows], str(buffer), chunk[rows]) for rank, buffer, chunk in zip(columns[::3], buffers, columns[2::3]))
        moves.append(Move(to, frm, count[rows]))
    return moves
