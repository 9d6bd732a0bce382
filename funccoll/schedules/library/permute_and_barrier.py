"""permute: named pairs of ranks. barrier: no rank goes on before all have arrived.

In the docstrings n is `nbytes`, the bytes of one rank's block; α and β are those of `all_reduce`.
"""

from __future__ import annotations

import numpy as np

from ..moves import Move
from ..registry import algorithm
from .combinators import Rounds, own_copy, powers


@algorithm("permute")
def direct(p: int, pairs: tuple[tuple[int, int], ...]) -> Rounds:
    """Every destination reads its source.

    Rounds: 1, or none without pairs.
    Bytes: each source sends n, each destination receives n.
    Cost: α + nβ.
    For: every permutation; each rank sends once and receives once at most.
    Source: collective-permute of XLA; MPI_Sendrecv.
    """
    if pairs:
        source, destination = np.array(pairs).T
        yield [Move((destination, "output", 0), (source, "input", 0))]


@algorithm("barrier")
def dissemination(p: int) -> Rounds:
    """In round k rank r receives a token from r − 2ᵏ, and with it those that r − 2ᵏ has received.

    The token is a sum in which ranks may count more than once. Each round has its own chunk of scratch.
    Rounds: ⌈log₂ p⌉.
    Bytes: none; each rank sends and receives one message a round.
    Cost: ⌈log₂ p⌉α.
    For: every p.
    Source: Hensgen, Finkel and Manber 1988.
    """
    if p == 1:
        yield [own_copy(p)]
    r = np.arange(p)
    token = ("input", 0)
    for k, distance in enumerate(powers(p)):
        to = ("output", 0) if 2 * distance >= p else ("scratch", k)
        yield [Move((r, *to), [(r, *token), ((r - distance) % p, *token)])]
        token = to
