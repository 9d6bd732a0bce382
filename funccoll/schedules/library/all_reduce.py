"""all_reduce: every rank gets the sum (or product, minimum, ...) of all ranks' vectors.

In the docstrings n is `nbytes`, the bytes of one rank's vector. α is the time to start a message, β the time per byte, and γ
the time per reduced byte. A rank sends one message at a time and receives one at a time, both at once (one port, full duplex).
"""

from __future__ import annotations

import numpy as np

from ..moves import Move
from ..registry import algorithm
from .combinators import (
    Group,
    Pattern,
    Rounds,
    accumulate,
    all_ranks,
    circulant,
    doubling,
    own_copy,
    ring,
    spread,
    together,
)
from .trees import broadcast_along, double_binary, reduce_along


@algorithm("all_reduce", chunks=lambda p: p)
def two_shot(p: int) -> Rounds:
    """Rank r reads chunk r of every rank, in the order of ranks, and writes the sum to every rank.

    Rounds: 1.
    Bytes: each rank sends and receives 2n(p−1)/p; on one host 2pn bytes of memory traffic in all, the minimum.
    Cost: 2(p−1)α + 2n(p−1)/p β + n(p−1)/p γ.
    For: ranks that share memory; partial sums are never written, and the order of the sum is that of a loop over ranks.
    Source: funccoll; as two steps, the "two-shot" custom all-reduce of NVIDIA TensorRT-LLM and vLLM.
    """
    r = np.arange(p)
    everywhere = [((r + i) % p, "output", r) for i in range(p)]
    yield [Move(everywhere, [(i, "input", r) for i in range(p)])]


@algorithm("all_reduce")
def one_shot(p: int) -> Rounds:
    """Every rank reads all vectors, in the order of ranks, and adds them itself.

    Rounds: 1.
    Bytes: each rank sends and receives n(p−1).
    Cost: (p−1)α + n(p−1)β + n(p−1)γ.
    For: the shortest vectors, on few ranks with direct access to each other's memory: no rank waits for a result.
    Source: NVIDIA TensorRT-LLM and vLLM ("one-shot" custom all-reduce).
    """
    yield [Move((np.arange(p), "output", 0), [(i, "input", 0) for i in range(p)])]


@algorithm("all_reduce", name="ring", chunks=lambda p: p)
def ring_(p: int) -> Rounds:
    """A ring reduce_scatter, then a ring all_gather. In both, data go from r to r + 1.

    Rounds: 2(p−1).
    Bytes: each rank sends and receives 2n(p−1)/p, the minimum.
    Cost: 2(p−1)α + 2n(p−1)/p β + n(p−1)/p γ.
    For: long vectors; neighbours only, so it suits every network that has a ring in it.
    Source: Patarasuk and Yuan 2009; NCCL.
    """
    yield from _there_and_back(ring(p, 1), ring(p, -1), p)


@algorithm("all_reduce", chunks=lambda p: 2 * p)
def bidirectional_ring(p: int) -> Rounds:
    """Two rings at once, half of the vector one way round and half the other.

    Rounds: 2(p−1).
    Bytes: each rank sends and receives 2n(p−1)/p, half to and from either neighbour; n/2p in each of 2 messages a round.
    Cost: 4(p−1)α + 2n(p−1)/p β + n(p−1)/p γ on one port, 2(p−1)α + n(p−1)/p β + n(p−1)/p γ on two.
    For: long vectors where the links to both neighbours work at the same time, such as tori.
    Source: the collectives of TPU pods, in Austin et al., "How to Scale Your Model", Google 2025.
    """
    if p == 1:
        yield [own_copy(p, 2)]
    halves = all_ranks(p), all_ranks(p, first=p)
    ways = ring(p, 1), ring(p, -1)
    yield from together(*(accumulate(way, half, "output") for way, half in zip(ways, halves)))
    yield from together(*(spread(way, half) for way, half in zip(reversed(ways), halves)))


@algorithm("all_reduce")
def recursive_doubling(p: int) -> Rounds:
    """Ranks that differ in bit 0 of their numbers, then 1, 2, ... exchange their sums of everything so far.

    The p − p' ranks beyond p' = 2^⌊log₂ p⌋ are folded into a neighbour first and get the result from it last.
    Rounds: log₂ p; 2 + log₂ p' if p is not a power of two.
    Bytes: each rank sends and receives n a round; n log₂ p, at most n(1 + log₂ p') otherwise.
    Cost: log₂ p (α + nβ + nγ); (2 + log₂ p')α + (2 + log₂ p')nβ + (1 + log₂ p')nγ otherwise.
    For: short vectors.
    Source: Thakur, Rabenseifner and Gropp 2005; MPICH.
    """
    if p == 1:
        yield [own_copy(p)]
    survivors, kept, extra = _power_of_two_of(p)
    if len(extra):
        yield _fold_extras(survivors, kept, extra, "scratch", 1)
    frm = ("scratch", 0) if len(extra) else ("input", 0)
    bits = len(survivors).bit_length() - 1
    for k in range(bits):
        other = survivors[np.arange(len(survivors)) ^ (1 << k)]
        # Two chunks of scratch in turn: no move writes what a partner reads in this round.
        to = ("output", 0) if k == bits - 1 else ("scratch", 1 - k % 2)
        yield [Move((survivors, *to), [(survivors, *frm), (other, *frm)])]
        frm = to
    if len(extra):
        yield [Move((extra, "output", 0), (kept, "output", 0))]


@algorithm("all_reduce", chunks=lambda p: 1 << (p.bit_length() - 1))
def rabenseifner(p: int) -> Rounds:
    """A reduce_scatter by recursive halving, then an all_gather by recursive doubling.

    The p − p' ranks beyond p' = 2^⌊log₂ p⌋ are folded into a neighbour first and get the result from it last.
    Rounds: 2 log₂ p; 2 + 2 log₂ p' if p is not a power of two.
    Bytes: each rank sends and receives 2n(p−1)/p; at most 2n(p'−1)/p' + n otherwise.
    Cost: 2 log₂ p α + 2n(p−1)/p β + n(p−1)/p γ; otherwise (2 + 2 log₂ p')α + (2 + 2(p'−1)/p')nβ + (1 + (p'−1)/p')nγ.
    For: medium and long vectors on a power of two of ranks.
    Source: Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005; MPICH.
    """
    if p == 1:
        yield [own_copy(p)]
    survivors, kept, extra = _power_of_two_of(p)
    size = len(survivors)
    if len(extra):
        yield _fold_extras(survivors, kept, extra, "output", size)
    group = Group(survivors[None], np.arange(size)[None])
    yield from accumulate(doubling(size), group, "output", started=len(extra) > 0)
    yield from spread(doubling(size), group)
    if len(extra):
        yield [Move((extra, "output", 0), (kept, "output", 0), size)]


@algorithm("all_reduce", name="circulant", chunks=lambda p: p)
def circulant_(p: int) -> Rounds:
    """A reduce_scatter over distances that come from halving p again and again, then its transpose, an all_gather.

    Rounds: 2⌈log₂ p⌉.
    Bytes: each rank sends and receives 2n(p−1)/p, the minimum.
    Cost: 2⌈log₂ p⌉α + 2n(p−1)/p β + n(p−1)/p γ.
    For: any length on any p: rounds and bytes are both the least possible of what does not pipeline.
    Source: Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv 2410.14234.
    """
    yield from _there_and_back(circulant(p), circulant(p), p)


@algorithm("all_reduce", chunks=8)
def double_binary_tree(p: int, chunks: int) -> Rounds:
    """A reduction up two binary trees, then a broadcast down them. Each tree carries every other one of `chunks` chunks.

    A rank has children in at most one of the trees, so both ports of all ranks are in use. h = ⌈log₂ p⌉ below.
    Rounds: at most 2(2h + chunks − 2), two more if `chunks` is odd.
    Bytes: each rank sends and receives at most 2n (rank 0, the root, n).
    Cost: at most (2h + chunks − 2)(2α + 2n/chunks β + n/chunks γ); with the best number of chunks
    4hα + 2nβ + 2√(8hnαβ) + its γ.
    For: medium and long vectors on many ranks: latency is logarithmic, and bytes are nearly the minimum.
    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL.
    """
    if p == 1:
        yield [own_copy(p, chunks)]
    rounds = double_binary(p, 0, chunks)
    yield from reduce_along(rounds, p, chunks, root=None)
    yield from broadcast_along(rounds, root=None)


# ---------------------------------------------------------------- shared


def _there_and_back(there: Pattern, back: Pattern, p: int) -> Rounds:
    """Yield reduce_scatter as the transpose of `there`, with sums in the outputs, then all_gather along `back`."""
    if p == 1:
        yield [own_copy(p)]
    yield from accumulate(there, all_ranks(p), "output")
    yield from spread(back, all_ranks(p))


def _power_of_two_of(p: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (survivors, kept, extra): a power of two of ranks, the first of which are `kept`, each folding in one of `extra`.

    As in MPICH, the even ones of the first 2(p − p') ranks are the extra ones. The odd ones next to them stay.
    """
    size = 1 << (p.bit_length() - 1)
    extra = 2 * np.arange(p - size)
    return np.concatenate([extra + 1, np.arange(2 * len(extra), p)]), extra + 1, extra


def _fold_extras(survivors: np.ndarray, kept: np.ndarray, extra: np.ndarray, buffer: str, count: int) -> list[Move]:
    """Fold the survivors' vectors into `buffer`. Those of the kept ranks have an extra rank's added."""
    alone = survivors[len(kept) :]
    return [
        Move((kept, buffer, 0), [(extra, "input", 0), (kept, "input", 0)], count),
        Move((alone, buffer, 0), (alone, "input", 0), count),
    ]
