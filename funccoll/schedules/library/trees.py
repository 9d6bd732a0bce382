"""Trees of ranks: the edges that carry each chunk in each round, and the moves of broadcast, reduce, gather and scatter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..moves import Move
from .combinators import Rounds, log2_ceil, powers, split, wrapped

__all__ = ["Edges", "binomial", "broadcast_along", "chain", "double_binary", "gather_along", "reduce_along", "scatter_along"]


class Edges(NamedTuple):
    """Edges of a tree that are used in one round of a broadcast, as columns.

    `child` and `parent` are ranks. `size` is the number of ranks in the child's subtree: in a binomial tree they are child,
    child + 1, ... (mod p).
    """

    child: np.ndarray
    parent: np.ndarray
    chunk: np.ndarray | int = 0
    size: np.ndarray | int = 1


def binomial(p: int, root: int) -> list[Edges]:
    """Return ⌈log₂ p⌉ rounds, the largest subtrees first. The subtree of v is v and what differs in its trailing zero bits."""
    rounds = []
    for d in reversed(powers(p)):
        parent = np.arange(0, p - d, 2 * d)
        child = parent + d
        rounds.append(Edges((child + root) % p, (parent + root) % p, size=np.minimum(d, p - child)))
    return rounds


def chain(p: int, root: int, chunks: int) -> list[Edges]:
    """Return p + chunks − 2 rounds: the chunks follow each other from the root to root + 1, root + 2, ... (mod p)."""
    rounds = []
    for t in range(p + chunks - 2 if p > 1 else 0):
        child = np.arange(max(1, t - chunks + 2), min(p - 1, t + 1) + 1)
        rounds.append(Edges((child + root) % p, (child - 1 + root) % p, t + 1 - child))
    return rounds


# ---------------------------------------------------------------- two trees


def double_binary(p: int, root: int, chunks: int) -> list[Edges]:
    """Return at most 2⌈log₂ p⌉ + chunks − 2 rounds (one more for odd `chunks`): a pipeline down each of two trees.

    Even chunks go down one tree of the ranks, odd ones down the other. Below the root, every rank has children in one of the
    trees at most. In a round a rank sends at most one chunk, and receives at most one. Edges have two colours, and are used in
    rounds of their colour.
    """
    parent = _two_trees(p)
    colour = _two_colours(parent)
    begin = np.zeros_like(parent)
    begin[:, 0] = -1
    for _ in range(log2_ceil(p)):
        after = np.take_along_axis(begin, parent, axis=1) + 1
        begin[:, 1:] = (after + (after - colour) % 2)[:, 1:]
    tree, child = np.repeat([0, 1], p - 1), np.tile(np.arange(1, p), 2)
    begin, above = begin[tree, child], parent[tree, child]
    pieces = (chunks + 1 - tree) // 2
    rounds = []
    for t in range(int((begin + 2 * pieces - 1).max(initial=0))):
        piece, off = np.divmod(t - begin, 2)
        now = (off == 0) & (piece >= 0) & (piece < pieces)
        rounds.append(Edges((child[now] + root) % p, (above[now] + root) % p, (tree + 2 * piece)[now]))
    return rounds


def _two_trees(p: int) -> np.ndarray:
    """int64[2, p]: the parent of each rank, counted from the root, in either tree. The root's child is the tree's top.

    The first tree is numbered in order: odd ranks are its leaves. In the second they are the inner ranks. It is the mirror
    image of the first, or, if p − 1 is odd, its copy moved up by one.
    """
    last = p - 1
    rank = np.arange(p)
    low = rank & -rank
    above = (rank ^ low) | (low << 1)
    first = np.where(above > last, rank ^ low, above)
    renamed = rank % max(last, 1) + 1 if last % 2 else p - rank
    renamed[0] = 0
    second = np.zeros(p, np.int64)
    second[renamed] = renamed[first]
    return np.stack([first, second])


def _two_colours(parent: np.ndarray) -> np.ndarray:
    """int8[2, p]: 0 or 1 for the edge above each rank in either tree, so that no rank sends or receives one colour twice.

    A rank has two edges above it and at most two below, and each two must differ. Edges that must differ form paths and even
    cycles. Each is walked along in both directions from any of its edges.
    """
    p = parent.shape[1]
    below: dict[int, list[tuple[int, int]]] = {}
    for tree in (0, 1):
        for child in range(1, p):
            below.setdefault(int(parent[tree, child]), []).append((tree, child))
    sibling = {}
    for edges in below.values():
        sibling.update(zip(edges, reversed(edges)) if len(edges) == 2 else ())
    colour = np.full(parent.shape, -1, np.int8)
    for start in (edge for edges in below.values() for edge in edges):
        for paint, edge in ((0, start), (1, sibling.get(start))):
            while edge is not None and colour[edge] < 0:
                tree, child = edge
                colour[edge], colour[1 - tree, child] = paint, 1 - paint
                edge = sibling.get((1 - tree, child))
    return colour


# ---------------------------------------------------------------- moves along a tree


def broadcast_along(rounds: Iterable[Edges], root: int | None) -> Rounds:
    """Yield moves of chunks down the edges, from output to output. The root, if you name one, reads its input."""
    for child, parent, chunk, _ in rounds:
        yield split((child, "output", chunk), [(parent, np.where(parent == root, "input", "output"), chunk)])


def reduce_along(rounds: list[Edges], p: int, chunks: int, root: int | None, started: bool = False) -> Rounds:
    """Yield the transpose of a broadcast: chunks go up the edges in the opposite order, and parents add them.

    Partial sums are in scratch, and the root's in its output. If you name no root, all are in the outputs. With `started` they
    are there at the beginning.
    """
    summed = np.full((p, chunks), started)
    for child, parent, chunk, _ in reversed(rounds):
        buffer = "output" if root is None else np.where(parent == root, "output", "scratch")
        own = np.where(summed[parent, chunk], buffer, "input")
        got = np.where(summed[child, chunk], "output" if root is None else "scratch", "input")
        yield split((parent, buffer, chunk), [(parent, own, chunk), (child, got, chunk)])
        summed[parent, chunk] = True


def scatter_along(rounds: list[Edges], p: int, root: int, whole: bool) -> Rounds:
    """Yield moves in which each child gets the blocks of its subtree.

    Block b goes to chunk b of scratch, and each child's own block at last to output[0]. A child without children gets its block
    there at once. With `whole`, block b belongs in chunk b of the outputs.
    """
    through = "output" if whole else "scratch"
    for left, (child, parent, _, size) in zip(reversed(range(len(rounds))), rounds):
        frm = np.where(parent == root, "input", through)
        leaf = (size == 1) & (not whole)
        step = []
        for at, n in wrapped(child, size, p):
            to = (child, np.where(leaf, "output", through), np.where(leaf, 0, at))
            step += split(to, [(parent, frm, at)], n)
        # In the last round the parents are all ranks with children.
        inner = parent[parent != root]
        if len(inner) and not left and not whole:
            step.append(Move((inner, "output", 0), (inner, "scratch", inner)))
        yield step


def gather_along(rounds: list[Edges], p: int, root: int, whole: bool) -> Rounds:
    """Yield the transpose of a scatter: each parent gets the blocks of the child's subtree, the root in its output.

    A rank's own block is in input[0]. Ranks with children copy it from there to the others in scratch. With `whole`, the block
    of rank r is in chunk r of its scratch at the beginning.
    """
    for number, (child, parent, _, size) in enumerate(reversed(rounds)):
        to = np.where(parent == root, "output", "scratch")
        leaf = (size == 1) & (not whole)
        step = []
        for at, n in wrapped(child, size, p):
            frm = (child, np.where(leaf, "input", "scratch"), np.where(leaf, 0, at))
            step += split((parent, to, at), [frm], n)
        inner = parent[parent != root]
        if len(inner) and not number and not whole:
            step.append(Move((inner, "scratch", inner), (inner, "input", 0)))
        yield step
