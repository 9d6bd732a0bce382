"""all_to_all: block d of rank s becomes block s of rank d.

In the docstrings n is `nbytes`, the bytes of p blocks. A block has n/p. α and β are those of `all_reduce`.
"""

from __future__ import annotations

import numpy as np

from ..moves import Move
from ..registry import algorithm
from .combinators import Rounds, alongside, powers


@algorithm("all_to_all")
def direct(p: int) -> Rounds:
    """Rank r sends to r + 1, r + 2, ... in turn, and receives from r − 1, r − 2, ...

    Rounds: p−1.
    Bytes: each rank sends and receives n(p−1)/p, the minimum.
    Cost: (p−1)α + n(p−1)/p β.
    For: all but the shortest blocks.
    Source: the pairwise exchange of Thakur, Rabenseifner and Gropp 2005; MPICH.
    """
    r = np.arange(p)
    pulls = ([Move((r, "output", (r - i) % p), ((r - i) % p, "input", r))] for i in range(1, p))
    yield from alongside([Move((r, "output", r), (r, "input", r))], pulls)


@algorithm("all_to_all")
def bruck(p: int) -> Rounds:
    """The block for the rank at distance j travels the powers of two that j is the sum of, together with others.

    Rounds: ⌈log₂ p⌉.
    Bytes: in round k each rank sends and receives one block for each j < p whose bit k is set: n/2 if p is a power of
    two, so (n/2) log₂ p in all; never more than n/2 a round.
    Cost: ⌈log₂ p⌉(α + n/2 β).
    For: the shortest blocks.
    Source: Bruck, Ho, Kipnis, Upfal and Weathersby 1997; MPICH.
    """
    r = np.arange(p)[:, None]
    yield from alongside([Move((r, "output", r), (r, "input", r))], _bruck_rounds(p, r))


def _bruck_rounds(p: int, r: np.ndarray) -> Rounds:
    for d in powers(p):
        blocks = np.flatnonzero(np.arange(p) & d)
        hops = np.bitwise_count(blocks & (d - 1)).astype(np.int64)
        other = (r - d) % p
        step = []
        for first, last in ((True, True), (True, False), (False, True), (False, False)):
            some = ((hops == 0) == first) & ((blocks < 2 * d) == last)
            j, hop = blocks[some], hops[some]
            # On its way a block is in one of two halves of scratch in turn: no chunk is read and written in a round.
            frm = (other, "input", (other + j) % p) if first else (other, "scratch", (hop - 1) % 2 * p + j)
            to = (r, "output", (r - j) % p) if last else (r, "scratch", hop % 2 * p + j)
            step += [Move(to, frm)] if len(j) else []
        yield step
