"""broadcast, reduce, gather and scatter: collectives with a root.

In the docstrings n is `nbytes`: the bytes of one vector for broadcast and reduce, of p blocks for gather and scatter. α, β and
γ are those of `all_reduce`. Ranks are counted from the root.
"""

from __future__ import annotations

import numpy as np

from ..moves import Move
from ..registry import algorithm
from . import trees
from .combinators import Rounds, accumulate, all_ranks, alongside, circulant, own_copy, spread

# ---------------------------------------------------------------- broadcast


@algorithm("broadcast", name="flat")
def broadcast_flat(p: int, root: int) -> Rounds:
    """Every rank reads the root's vector.

    Rounds: 1.
    Bytes: the root sends n(p−1), the others receive n.
    Cost: (p−1)(α + nβ) on the root's one port.
    For: ranks that share memory; very few ranks.
    Source: the "linear" or "flat tree" algorithm of Open MPI.
    """
    yield [Move((np.arange(p), "output", 0), (root, "input", 0))]


@algorithm("broadcast", name="binomial")
def broadcast_binomial(p: int, root: int) -> Rounds:
    """Ranks with the vector send it to the rank half of the remaining distance away: 2ᵏ ranks have it after k rounds.

    Rounds: ⌈log₂ p⌉.
    Bytes: n for every rank it serves: the root sends n⌈log₂ p⌉, the others receive n.
    Cost: ⌈log₂ p⌉(α + nβ).
    For: short vectors.
    Source: Thakur, Rabenseifner and Gropp 2005; MPICH.
    """
    yield from _broadcast(trees.binomial(p, root), root)


@algorithm("broadcast", name="scatter_allgather", chunks=lambda p: p)
def broadcast_scatter_allgather(p: int, root: int) -> Rounds:
    """A binomial scatter of p chunks, then an all_gather of them (circulant).

    Rounds: 2⌈log₂ p⌉.
    Bytes: the root sends 2n(p−1)/p; the others send at most that, and receive at most 2n(p−1)/p.
    Cost: 2⌈log₂ p⌉α + 2n(p−1)/p β.
    For: medium and long vectors.
    Source: Barnett, Gupta, Payne, Shuler, van de Geijn and Watts 1994; Thakur, Rabenseifner and Gropp 2005.
    """
    own = Move((root, "output", root), (root, "input", root))
    yield from alongside([own], trees.scatter_along(trees.binomial(p, root), p, root, whole=True))
    yield from spread(circulant(p), all_ranks(p))


@algorithm("broadcast", name="pipelined_chain", chunks=8)
def broadcast_pipelined_chain(p: int, root: int, chunks: int) -> Rounds:
    """The chunks follow each other from rank to rank.

    Rounds: p + chunks − 2.
    Bytes: each rank but the last sends n, each but the root receives n; n/chunks a round.
    Cost: (p + chunks − 2)(α + n/chunks β); with the best number of chunks (√((p−2)α) + √(nβ))².
    For: the longest vectors, on few ranks; neighbours only.
    Source: Pješivac-Grbović, Angskun, Bosilca, Fagg, Gabriel and Dongarra 2007; Open MPI's "pipeline".
    """
    yield from _broadcast(trees.chain(p, root, chunks), root, chunks)


@algorithm("broadcast", name="double_binary_tree", chunks=8)
def broadcast_double_binary_tree(p: int, root: int, chunks: int) -> Rounds:
    """Two binary trees carry every other one of `chunks` chunks each. A rank has children in at most one of them.

    Rounds: at most 2⌈log₂ p⌉ + chunks − 2, one more if `chunks` is odd.
    Bytes: each rank sends at most n, each but the root receives n; at most n/chunks a round.
    Cost: at most (2⌈log₂ p⌉ + chunks − 2)(α + n/chunks β); with the best number of chunks
    2⌈log₂ p⌉α + nβ + √(8⌈log₂ p⌉nαβ).
    For: medium and long vectors on many ranks.
    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL.
    """
    yield from _broadcast(trees.double_binary(p, root, chunks), root, chunks)


def _broadcast(rounds: list[trees.Edges], root: int, chunks: int = 1) -> Rounds:
    own = Move((root, "output", 0), (root, "input", 0), chunks)
    yield from alongside([own], trees.broadcast_along(rounds, root))


# ---------------------------------------------------------------- reduce


@algorithm("reduce", name="flat")
def reduce_flat(p: int, root: int) -> Rounds:
    """The root reads every rank's vector, in the order of ranks.

    Rounds: 1.
    Bytes: the root receives n(p−1), the others send n.
    Cost: (p−1)(α + nβ + nγ).
    For: ranks that share memory; very few ranks. Partial sums are never written.
    Source: the "linear" algorithm of Open MPI.
    """
    yield [Move((root, "output", 0), [(i, "input", 0) for i in range(p)])]


@algorithm("reduce", name="binomial")
def reduce_binomial(p: int, root: int) -> Rounds:
    """The transpose of the binomial broadcast: the rank at distance 1 is added, then that at 2, 4, ...

    Rounds: ⌈log₂ p⌉.
    Bytes: n for every rank that is added: the root receives n⌈log₂ p⌉, the others send n.
    Cost: ⌈log₂ p⌉(α + nβ + nγ).
    For: short vectors.
    Source: Thakur, Rabenseifner and Gropp 2005; MPICH.
    """
    yield from _reduce(trees.binomial(p, root), p, root)


@algorithm("reduce", name="scatter_allgather", chunks=lambda p: p)
def reduce_scatter_allgather(p: int, root: int) -> Rounds:
    """The transpose of the scatter_allgather broadcast: a reduce_scatter (circulant), then a binomial gather.

    Rounds: 2⌈log₂ p⌉.
    Bytes: the root receives 2n(p−1)/p; the others receive at most that, and send at most 2n(p−1)/p.
    Cost: 2⌈log₂ p⌉α + 2n(p−1)/p β + n(p−1)/p γ.
    For: medium and long vectors.
    Source: Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005.
    """
    yield from accumulate(circulant(p), all_ranks(p), "scratch")
    own = Move((root, "output", root), (root, "scratch" if p > 1 else "input", root))
    yield from alongside([own], trees.gather_along(trees.binomial(p, root), p, root, whole=True))


@algorithm("reduce", name="pipelined_chain", chunks=8)
def reduce_pipelined_chain(p: int, root: int, chunks: int) -> Rounds:
    """Sums of the chunks follow each other from rank to rank, down to the root.

    Rounds: p + chunks − 2.
    Bytes: each rank but the root sends n, each but the last receives n; n/chunks a round.
    Cost: (p + chunks − 2)(α + n/chunks β + n/chunks γ).
    For: the longest vectors, on few ranks; neighbours only.
    Source: Pješivac-Grbović, Angskun, Bosilca, Fagg, Gabriel and Dongarra 2007; Open MPI's "pipeline".
    """
    yield from _reduce(trees.chain(p, root, chunks), p, root, chunks)


@algorithm("reduce", name="double_binary_tree", chunks=8)
def reduce_double_binary_tree(p: int, root: int, chunks: int) -> Rounds:
    """The transpose of the double_binary_tree broadcast.

    Rounds: at most 2⌈log₂ p⌉ + chunks − 2, one more if `chunks` is odd.
    Bytes: each rank receives at most n, each but the root sends n; at most n/chunks a round.
    Cost: at most (2⌈log₂ p⌉ + chunks − 2)(α + n/chunks β + n/chunks γ).
    For: medium and long vectors on many ranks.
    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL.
    """
    yield from _reduce(trees.double_binary(p, root, chunks), p, root, chunks)


def _reduce(rounds: list[trees.Edges], p: int, root: int, chunks: int = 1) -> Rounds:
    if p == 1:
        yield [own_copy(p, chunks)]
    yield from trees.reduce_along(rounds, p, chunks, root)


# ---------------------------------------------------------------- gather and scatter


@algorithm("gather", name="flat")
def gather_flat(p: int, root: int) -> Rounds:
    """The root reads every rank's block.

    Rounds: 1.
    Bytes: the root receives n(p−1)/p, the others send n/p.
    Cost: (p−1)α + n(p−1)/p β.
    For: ranks that share memory, and long blocks.
    Source: the "linear" algorithm of Open MPI.
    """
    r = np.arange(p)
    yield [Move((root, "output", r), (r, "input", 0))]


@algorithm("gather", name="binomial")
def gather_binomial(p: int, root: int) -> Rounds:
    """The transpose of the binomial scatter: blocks gather in ever larger subtrees.

    Rounds: ⌈log₂ p⌉.
    Bytes: the root receives n(p−1)/p; every other rank sends the blocks of its subtree, at most n/2 for powers of two.
    Cost: ⌈log₂ p⌉α + n(p−1)/p β.
    For: short blocks.
    Source: Chan, Heimlich, Purkayastha and van de Geijn 2007 ("minimum-spanning tree"); MPICH.
    """
    own = Move((root, "output", root), (root, "input", 0))
    yield from alongside([own], trees.gather_along(trees.binomial(p, root), p, root, whole=False))


@algorithm("scatter", name="flat")
def scatter_flat(p: int, root: int) -> Rounds:
    """Every rank reads its block from the root.

    Rounds: 1.
    Bytes: the root sends n(p−1)/p, the others receive n/p.
    Cost: (p−1)α + n(p−1)/p β.
    For: ranks that share memory, and long blocks.
    Source: the "linear" algorithm of Open MPI.
    """
    r = np.arange(p)
    yield [Move((r, "output", 0), (root, "input", r))]


@algorithm("scatter", name="binomial")
def scatter_binomial(p: int, root: int) -> Rounds:
    """Ranks with blocks send half of them on, to the rank in the middle of their destinations.

    Rounds: ⌈log₂ p⌉.
    Bytes: the root sends n(p−1)/p; every other rank receives the blocks of its subtree, at most n/2 for powers of two.
    Cost: ⌈log₂ p⌉α + n(p−1)/p β.
    For: short blocks.
    Source: Chan, Heimlich, Purkayastha and van de Geijn 2007 ("minimum-spanning tree"); MPICH.
    """
    own = Move((root, "output", 0), (root, "input", root))
    yield from alongside([own], trees.scatter_along(trees.binomial(p, root), p, root, whole=False))
