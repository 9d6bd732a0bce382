"""all_gather: every rank gets every rank's block. reduce_scatter, its transpose: rank r gets the sum of all blocks r.

In the docstrings n is `nbytes`, the bytes of p blocks. A block has n/p. α, β and γ are those of `all_reduce`.
"""

from __future__ import annotations

import numpy as np

from ..moves import Move
from ..registry import algorithm
from .combinators import (
    Pattern,
    Rounds,
    accumulate,
    all_ranks,
    alongside,
    bruck,
    circulant,
    doubling,
    own_block,
    own_copy,
    pat,
    ring,
    spread,
)

# ---------------------------------------------------------------- all_gather


@algorithm("all_gather", name="direct")
def all_gather_direct(p: int) -> Rounds:
    """Rank r reads the blocks of r + 1, r + 2, ... where they are.

    Rounds: p−1.
    Bytes: each rank sends and receives n(p−1)/p, the minimum.
    Cost: (p−1)α + n(p−1)/p β.
    For: ranks that share memory, or a full crossbar: no rank waits for what another must receive first.
    Source: the pairwise exchange of MPICH and Open MPI.
    """
    r = np.arange(p)
    pulls = ([Move((r, "output", (r + i) % p), ((r + i) % p, "input", 0))] for i in range(1, p))
    yield from alongside([own_block(p)], pulls)


@algorithm("all_gather", name="ring")
def all_gather_ring(p: int) -> Rounds:
    """Rank r gets from r − 1 the block that r − 1 got in the round before.

    Rounds: p−1.
    Bytes: each rank sends and receives n(p−1)/p, the minimum.
    Cost: (p−1)α + n(p−1)/p β.
    For: long blocks; neighbours only.
    Source: Thakur, Rabenseifner and Gropp 2005; NCCL.
    """
    yield from _gathered(ring(p, -1))


@algorithm("all_gather", name="bruck")
def all_gather_bruck(p: int) -> Rounds:
    """Rank r gets from r + 1, r + 2, r + 4, ... all the blocks that they have. Blocks go to their final places.

    Rounds: ⌈log₂ p⌉.
    Bytes: each rank sends and receives n(p−1)/p, the minimum; 2ᵏ blocks in round k, in the last one p − 2ᵏ.
    Cost: ⌈log₂ p⌉α + n(p−1)/p β.
    For: short blocks on any p.
    Source: Bruck, Ho, Kipnis, Upfal and Weathersby 1997.
    """
    yield from _gathered(bruck(p))


@algorithm("all_gather", name="circulant")
def all_gather_circulant(p: int) -> Rounds:
    """Rank r gets from r + s as many blocks as it has, or one less. The distances s come from halving p, rounded up.

    Rounds: ⌈log₂ p⌉.
    Bytes: each rank sends and receives n(p−1)/p, the minimum.
    Cost: ⌈log₂ p⌉α + n(p−1)/p β.
    For: any length on any p.
    Source: Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv 2410.14234.
    """
    yield from _gathered(circulant(p))


@algorithm("all_gather", name="recursive_doubling", power_of_two=True)
def all_gather_recursive_doubling(p: int) -> Rounds:
    """Ranks that differ in bit 0 of their numbers, then 1, 2, ... exchange everything they have.

    Rounds: log₂ p.
    Bytes: each rank sends and receives n(p−1)/p, the minimum; n2ᵏ/p in round k.
    Cost: log₂ p α + n(p−1)/p β.
    For: short and medium blocks on a power of two of ranks; every message is one run of consecutive blocks.
    Source: Thakur, Rabenseifner and Gropp 2005.
    """
    yield from _gathered(doubling(p))


@algorithm("all_gather", name="pat")
def all_gather_pat(p: int) -> Rounds:
    """Bruck's algorithm with its distances in the opposite order: far ranks first, while there is little to send.

    Rounds: ⌈log₂ p⌉ (its variant for bounded buffers, with more rounds, is not built).
    Bytes: each rank sends and receives n(p−1)/p, the minimum.
    Cost: ⌈log₂ p⌉α + n(p−1)/p β.
    For: short and medium blocks on any p, where far links are slow or shared: most bytes go to near ranks.
    Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", arXiv 2506.20252; NCCL.
    """
    yield from _gathered(pat(p))


def _gathered(pattern: Pattern) -> Rounds:
    yield from alongside([own_block(pattern.size)], spread(pattern, all_ranks(pattern.size), from_input=True))


# ---------------------------------------------------------------- reduce_scatter


@algorithm("reduce_scatter", name="direct")
def reduce_scatter_direct(p: int) -> Rounds:
    """Rank r reads block r of every rank, in the order of ranks.

    Rounds: 1.
    Bytes: each rank sends and receives n(p−1)/p, the minimum.
    Cost: (p−1)α + n(p−1)/p β + n(p−1)/p γ.
    For: ranks that share memory; partial sums are never written, and the order of the sum is that of a loop over ranks.
    Source: funccoll; the pairwise exchange of Thakur, Rabenseifner and Gropp 2005 in one move.
    """
    r = np.arange(p)
    yield [Move((r, "output", 0), [(i, "input", r) for i in range(p)])]


@algorithm("reduce_scatter", name="ring")
def reduce_scatter_ring(p: int) -> Rounds:
    """Sums go round from r to r + 1. That of block r begins at rank r + 1 and ends at r. Transpose of the ring all_gather.

    Rounds: p−1.
    Bytes: each rank sends and receives n(p−1)/p, the minimum.
    Cost: (p−1)α + n(p−1)/p β + n(p−1)/p γ.
    For: long blocks; neighbours only.
    Source: Patarasuk and Yuan 2009; NCCL.
    """
    yield from _scattered(ring(p, 1))


@algorithm("reduce_scatter", name="bruck")
def reduce_scatter_bruck(p: int) -> Rounds:
    """The transpose of Bruck's all_gather: the distances are ..., 4, 2, 1.

    Rounds: ⌈log₂ p⌉.
    Bytes: each rank sends and receives n(p−1)/p, the minimum; p − 2ᵏ blocks in the first round, then 2ᵏ.
    Cost: ⌈log₂ p⌉α + n(p−1)/p β + n(p−1)/p γ.
    For: short blocks on any p.
    Source: the transpose of Bruck, Ho, Kipnis, Upfal and Weathersby 1997; Bernaschi, Iannello and Lauria 2003.
    """
    yield from _scattered(bruck(p))


@algorithm("reduce_scatter", name="circulant")
def reduce_scatter_circulant(p: int) -> Rounds:
    """Rank r sends the sums of blocks r + s ... to r + s. The distances s come from halving p, rounded up.

    Rounds: ⌈log₂ p⌉.
    Bytes: each rank sends and receives n(p−1)/p, the minimum.
    Cost: ⌈log₂ p⌉α + n(p−1)/p β + n(p−1)/p γ.
    For: any length on any p.
    Source: Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv 2410.14234.
    """
    yield from _scattered(circulant(p))


@algorithm("reduce_scatter", name="recursive_halving", power_of_two=True)
def reduce_scatter_recursive_halving(p: int) -> Rounds:
    """Ranks that differ in the highest bit of their numbers, then the next, ... exchange the half that the other one needs.

    Rounds: log₂ p.
    Bytes: each rank sends and receives n(p−1)/p, the minimum; n/2, n/4, ...
    Cost: log₂ p α + n(p−1)/p β + n(p−1)/p γ.
    For: short and medium blocks on a power of two of ranks; every message is one run of consecutive blocks.
    Source: Thakur, Rabenseifner and Gropp 2005.
    """
    yield from _scattered(doubling(p))


@algorithm("reduce_scatter", name="pat")
def reduce_scatter_pat(p: int) -> Rounds:
    """The transpose of pat's all_gather: near ranks first, and far ones last, when there is little left to send.

    Rounds: ⌈log₂ p⌉ (its variant for bounded buffers, with more rounds, is not built).
    Bytes: each rank sends and receives n(p−1)/p, the minimum.
    Cost: ⌈log₂ p⌉α + n(p−1)/p β + n(p−1)/p γ.
    For: short and medium blocks on any p, where far links are slow or shared.
    Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", arXiv 2506.20252; NCCL.
    """
    yield from _scattered(pat(p))


def _scattered(pattern: Pattern) -> Rounds:
    if pattern.size == 1:
        yield [own_copy(1)]
    yield from accumulate(pattern, all_ranks(pattern.size), "scratch", result=("output", 0))
