"""What is published about each algorithm: who sends and receives how many bytes in which round.

Plain functions of the number of ranks p, written from the papers and not from funccoll: nothing here imports it. Each
returns `Traffic(sent, received)`, int arrays [rounds, p] of bytes for a vector (or p blocks together) of n bytes; n must be
divisible by what the formula divides by. Rounds in which nothing moves between ranks are left out.

References: [TRG] Thakur, Rabenseifner, Gropp 2005. [PY] Patarasuk, Yuan 2009. [B] Bruck, Ho, Kipnis, Upfal,
Weathersby 1997. [T] Träff, arXiv 2410.14234. [J] Jeaugey, arXiv 2506.20252. [C] Chan, Heimlich, Purkayastha,
van de Geijn 2007. [VdG] Barnett, Gupta, Payne, Shuler, van de Geijn, Watts 1994. [SST] Sanders, Speck, Träff 2009.
[HFM] Hensgen, Finkel, Manber 1988. [PG] Pješivac-Grbović et al. 2007. [TH] Träff, Hunold 2020.
[K] Karonis et al. 2000. [ST] Sanders, Träff 2006. [KS] Kogge, Stone 1973. [BK] Brent, Kung 1982. [Bl] Blelloch 1990.
Many give sums for powers of two only; where p is arbitrary, the counts are of what the text describes for that p.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Traffic(NamedTuple):
    """Bytes by round and rank."""

    sent: np.ndarray
    received: np.ndarray

    def then(self, other: Traffic) -> Traffic:
        """One after the other."""
        return Traffic(np.concatenate([self.sent, other.sent]), np.concatenate([self.received, other.received]))

    def transposed(self) -> Traffic:
        """Everything in the opposite direction and order."""
        return Traffic(self.received[::-1], self.sent[::-1])

    def without_empty(self) -> Traffic:
        """Without rounds in which nothing is sent."""
        some = self.sent.any(axis=1)
        return Traffic(self.sent[some], self.received[some])


def log2_ceil(p: int) -> int:
    """⌈log₂ p⌉, counted."""
    rounds = 0
    while 2**rounds < p:
        rounds += 1
    return rounds


def log2_floor(p: int) -> int:
    """⌊log₂ p⌋, counted."""
    return log2_ceil(p + 1) - 1


def regular(p: int, rounds) -> Traffic:
    """Every rank sends and receives as much as the others: `rounds` are the bytes of one."""
    sizes = np.array([b for b in rounds if b], dtype=np.int64)
    table = np.tile(sizes[:, None], (1, p))
    return Traffic(table, table.copy())


def nothing(p: int) -> Traffic:
    """No round."""
    return regular(p, [])


# ---------------------------------------------------------------- all_gather and reduce_scatter


def neighbours(p: int, n: int) -> Traffic:
    """p−1 rounds of n/p: ring [PY], pairwise exchange [TRG]."""
    return regular(p, [n // p] * (p - 1))


def bruck_all_gather(p: int, n: int) -> Traffic:
    """Round k: 2ᵏ blocks, in the last round p − 2ᵏ [B, section 4; one port]."""
    return regular(p, [min(2**k, p - 2**k) * n // p for k in range(log2_ceil(p))])


def circulant_reduce_scatter(p: int, n: int) -> Traffic:
    """Round k: s(k) − s(k+1) blocks with s(0) = p, s(k+1) = ⌈s(k)/2⌉, so s(k) = ⌈p/2ᵏ⌉ [T, algorithm 1]."""
    s = [math.ceil(p / 2**k) for k in range(log2_ceil(p) + 1)]
    return regular(p, [(a - b) * n // p for a, b in pairwise(s)])


def doubling_all_gather(p: int, n: int) -> Traffic:
    """Round k: 2ᵏ n/p [TRG, 4.1]; powers of two."""
    return regular(p, [2**k * n // p for k in range(log2_floor(p))])


def pat_all_gather(p: int, n: int) -> Traffic:
    """Bruck's dimensions from the far one: for powers of two 1, 2, 4, ... blocks [J, section 2].

    For other p: dimension k carries the blocks at those distances below p whose lowest bit that is set is k.
    """
    counts = [sum(1 for b in range(1, p) if b % 2**k == 0 and b // 2**k % 2 == 1) for k in reversed(range(log2_ceil(p)))]
    return regular(p, [c * n // p for c in counts])


def hierarchical_all_gather(p: int, n: int, hosts: int, ranks_per_host: int) -> Traffic:
    """Blocks of equal local ranks across hosts, circulant [T]; then h blocks from each other rank of the host [TH]."""
    across = circulant_reduce_scatter(hosts, n // ranks_per_host).transposed() if hosts > 1 else nothing(1)
    return regular(p, [*across.sent[:, 0], *[n // ranks_per_host] * (ranks_per_host - 1)])


def direct_reduce_scatter(p: int, n: int) -> Traffic:
    """p−1 blocks at once: the pairwise exchange of [TRG] as one step."""
    return regular(p, [(p - 1) * n // p])


def hierarchical_reduce_scatter(p: int, n: int, hosts: int, ranks_per_host: int) -> Traffic:
    """The transpose of the all_gather, all that comes from the host's own ranks at once [TH]."""
    across = circulant_reduce_scatter(hosts, n // ranks_per_host) if hosts > 1 else nothing(1)
    return regular(p, [(ranks_per_host - 1) * n // ranks_per_host, *across.sent[:, 0]])


# ---------------------------------------------------------------- all_reduce


def two_shot_all_reduce(p: int, n: int) -> Traffic:
    """A reduce_scatter and an all_gather in one step: 2n(p−1)/p, the least that any algorithm can send [PY]."""
    return regular(p, [2 * (p - 1) * n // p])


def one_shot_all_reduce(p: int, n: int) -> Traffic:
    """Everything from everyone."""
    return regular(p, [(p - 1) * n])


def ring_all_reduce(p: int, n: int) -> Traffic:
    """2(p−1) rounds of n/p [PY]; a bidirectional one sends as much, in halves."""
    return regular(p, [n // p] * (2 * (p - 1)))


def _with_extras(p: int, n: int, middle) -> Traffic:
    """[TRG] with MPICH's step for other p: of the first 2r ranks the even ones send all of n, and get all back.

    `middle` are the bytes of one of the p' = p − r ranks between.
    """
    size = 2 ** log2_floor(p)
    r = p - size
    even, odd = np.zeros(p, np.int64), np.zeros(p, np.int64)
    even[0 : 2 * r : 2], odd[1 : 2 * r : 2] = n, n
    rest = np.array([0 if rank < 2 * r and rank % 2 == 0 else 1 for rank in range(p)])
    between = np.array([b * rest for b in middle], dtype=np.int64).reshape(-1, p)
    inner = Traffic(between, between.copy())
    if not r:
        return inner
    return Traffic(even[None], odd[None]).then(inner).then(Traffic(odd[None], even[None]))


def recursive_doubling_all_reduce(p: int, n: int) -> Traffic:
    """log₂ p' exchanges of all of n [TRG, 4.5]."""
    return _with_extras(p, n, [n] * log2_floor(p))


def rabenseifner_all_reduce(p: int, n: int) -> Traffic:
    """n/2, n/4, ..., n/p', and back [TRG, 4.5]."""
    halves = [n // 2**k for k in range(1, log2_floor(p) + 1)]
    return _with_extras(p, n, halves + halves[::-1])


def circulant_all_reduce(p: int, n: int) -> Traffic:
    """reduce_scatter and its transpose [T, algorithm 2]."""
    there = circulant_reduce_scatter(p, n)
    return there.then(there.transposed())


def hierarchical_all_reduce(p: int, n: int, hosts: int, ranks_per_host: int) -> Traffic:
    """n(q−1)/q at once inside, an all_reduce of n/q across, n/q from each other rank inside [TH]."""
    across = circulant_all_reduce(hosts, n // ranks_per_host).sent[:, 0] if hosts > 1 else []
    return regular(p, [(ranks_per_host - 1) * n // ranks_per_host, *across, *[n // ranks_per_host] * (ranks_per_host - 1)])


# ---------------------------------------------------------------- all_to_all


def bruck_all_to_all(p: int, n: int) -> Traffic:
    """Round k: the blocks for distances whose bit k is set, [B, section 3]: n/2 for powers of two."""
    return regular(p, [sum(j >> k & 1 for j in range(p)) * n // p for k in range(log2_ceil(p))])


def hierarchical_all_to_all(p: int, n: int, hosts: int, ranks_per_host: int) -> Traffic:
    """h blocks from each other rank of the host, then q blocks from each other host's equal rank [TH]."""
    return regular(p, [*[n // ranks_per_host] * (ranks_per_host - 1), *[n // hosts] * (hosts - 1)])


# ---------------------------------------------------------------- with a root; rank 0 is the root in what follows


def at_root(traffic: Traffic, root: int) -> Traffic:
    """The same with another root: ranks are counted from it."""
    return Traffic(np.roll(traffic.sent, root, axis=1), np.roll(traffic.received, root, axis=1))


def _messages(p: int, rounds) -> Traffic:
    """From lists of (source, destination, bytes)."""
    sent, received = np.zeros((2, len(rounds), p), np.int64)
    for k, messages in enumerate(rounds):
        for source, destination, size in messages:
            sent[k, source] += size
            received[k, destination] += size
    return Traffic(sent, received)


def flat_broadcast(p: int, n: int) -> Traffic:
    """n to every other rank."""
    return _messages(p, [[(0, v, n) for v in range(1, p)]]) if p > 1 else nothing(p)


def flat_scatter(p: int, n: int) -> Traffic:
    """n/p to every other rank."""
    return flat_broadcast(p, n // p)


def _binomial(p: int, size) -> list:
    """⌈log₂ p⌉ rounds [C, minimum-spanning tree; TRG]: v's parent is v without its lowest bit 2ᵏ, the largest 2ᵏ first."""
    rounds = []
    for k in reversed(range(log2_ceil(p))):
        rounds.append([(v - 2**k, v, size(v, k)) for v in range(p) if v % 2 ** (k + 1) == 2**k])
    return rounds


def binomial_broadcast(p: int, n: int) -> Traffic:
    """n over every edge."""
    return _messages(p, _binomial(p, lambda v, k: n))


def binomial_scatter(p: int, n: int) -> Traffic:
    """Over the edge to v, the blocks of v's subtree: 2ᵏ, or what there is up to p."""
    return _messages(p, _binomial(p, lambda v, k: len(range(v, min(v + 2**k, p))) * n // p))


def scatter_allgather_broadcast(p: int, n: int) -> Traffic:
    """A scatter, then an all_gather among all [VdG]; of 2⌈log₂ p⌉ rounds when that is logarithmic [TRG; T]."""
    return binomial_scatter(p, n).then(circulant_reduce_scatter(p, n).transposed())


def chain_broadcast(p: int, n: int, chunks: int) -> Traffic:
    """Chunk c reaches the v-th rank in round c + v − 1: p + chunks − 2 rounds [PG, "pipeline"]."""
    rounds = [[] for _ in range(p + chunks - 2 if p > 1 else 0)]
    for v in range(1, p):
        for c in range(chunks):
            rounds[c + v - 1].append((v - 1, v, n // chunks))
    return _messages(p, rounds)


def _inside(hosts: int, ranks_per_host: int, size: int, first: int = 0) -> list:
    """From the first rank of each host, from host `first` on, to the others of its host."""
    return [(h * ranks_per_host, h * ranks_per_host + v, size) for h in range(first, hosts) for v in range(1, ranks_per_host)]


def hierarchical_broadcast(p: int, n: int, hosts: int, ranks_per_host: int) -> Traffic:
    """A binomial tree of the hosts' first ranks; the root's neighbours read at once, the others at last [K]."""
    between = _binomial(hosts, lambda v, k: n)
    tree = [[(a * ranks_per_host, b * ranks_per_host, n) for a, b, _ in step] for step in between] or [[]]
    tree[0] += _inside(1, ranks_per_host, n)
    return _messages(p, [*tree, _inside(hosts, ranks_per_host, n, 1)]).without_empty()


def hierarchical_reduce(p: int, n: int, hosts: int, ranks_per_host: int) -> Traffic:
    """Inside all hosts first, then up the tree of the hosts' first ranks."""
    tree = [[(b * ranks_per_host, a * ranks_per_host, n) for a, b, _ in step] for step in _binomial(hosts, lambda v, k: n)]
    return _messages(p, [[(b, a, n) for a, b, n in _inside(hosts, ranks_per_host, n)], *reversed(tree)]).without_empty()


def hierarchical_scatter(p: int, n: int, hosts: int, ranks_per_host: int) -> Traffic:
    """q blocks to the first rank of each other host, from where the others get theirs."""
    first = [(0, h * ranks_per_host, ranks_per_host * n // p) for h in range(1, hosts)]
    return _messages(p, [first + _inside(1, ranks_per_host, n // p), _inside(hosts, ranks_per_host, n // p, 1)]).without_empty()


def hierarchical_gather(p: int, n: int, hosts: int, ranks_per_host: int) -> Traffic:
    """The opposite direction; where hosts have one rank, all at once."""
    last = [(h * ranks_per_host, 0, ranks_per_host * n // p) for h in range(1, hosts)]
    return _messages(p, [[(b, a, s) for a, b, s in _inside(hosts, ranks_per_host, n // p)], last]).without_empty()


def two_tree_rounds(p: int, chunks: int) -> tuple[int, int]:
    """(least, most) rounds of a broadcast of `chunks` chunks, an even number.

    At most 2h + 2k − 2 with k chunks a tree and trees of height h = ⌈log₂ p⌉: every chunk waits one round at most
    at every rank, and one for its tree's turn [SST, section 3]. At least chunks − 1 + ⌈log₂ p⌉, for every algorithm
    with one port [Johnsson, Ho 1989].
    """
    return chunks - 1 + log2_ceil(p), 2 * log2_ceil(p) + chunks - 2


# ---------------------------------------------------------------- scans


def one_shot_scan(p: int, n: int) -> Traffic:
    """Every rank gets the vectors of those before it, by the definition of MPI_Scan and MPI_Exscan."""
    return _messages(p, [[(s, r, n) for r in range(p) for s in range(r)]]).without_empty()


def two_shot_scan(p: int, n: int, own: int) -> Traffic:
    """Owner c of a chunk reads it from one rank after the other, and what it wrote before; result r goes to rank r."""
    rounds = []
    for r in range(1 - own, p):
        read = r if own else r - 1
        before = r > 1 - own
        step = [(read, c, n // p) for c in range(p)] + [(c, r, n // p) for c in range(p)]
        rounds.append(step + [(r - 1, c, n // p) for c in range(p) if before])
    return _messages(p, [[(s, d, size) for s, d, size in step if s != d] for step in rounds]).without_empty()


def chain_scan(p: int, n: int, chunks: int = 1) -> Traffic:
    """Rank v gets chunk c in round c + v − 1, as in a pipelined broadcast [ST, linear pipeline]."""
    return chain_broadcast(p, n, chunks)


def kogge_stone_scan(p: int, n: int, first: int = 0) -> Traffic:
    """Round k: from each rank to the one 2ᵏ after it; among the ranks from `first` on [KS]."""
    rounds = [[(r - 2**k, r, n) for r in range(first + 2**k, p)] for k in range(log2_ceil(p - first))]
    return _messages(p, rounds)


def shifted_kogge_stone_scan(p: int, n: int) -> Traffic:
    """To the next rank, then an inclusive scan without the first one."""
    shift = _messages(p, [[(r - 1, r, n) for r in range(1, p)]] if p > 1 else [])
    return shift.then(kogge_stone_scan(p, n, 1)) if p > 1 else shift


def _halves(p: int, d: int) -> list[tuple[int, int]]:
    """The last ranks of both halves of every block of 2d ranks; the second half may be cut off by p, but not empty."""
    return [(b + d - 1, min(b + 2 * d, p) - 1) for b in range(0, p - d, 2 * d)]


def blelloch_inclusive_scan(p: int, n: int) -> Traffic:
    """Sums of whole blocks up, then from each whole block's end to the middle of the next one, far ones first [BK]."""
    levels = [2**k for k in range(log2_ceil(p))]
    up = [[(left, right, n) for left, right in _halves(p, d) if right - left == d] for d in levels]
    down = [[(left, left + d, n) for left in range(2 * d - 1, p - d, 2 * d)] for d in reversed(levels)]
    return _messages(p, [*up, *down]).without_empty()


def blelloch_exclusive_scan(p: int, n: int) -> Traffic:
    """Sums of first halves up; then second halves get the first half's, and first halves what is before their block [Bl]."""
    levels = [2**k for k in range(log2_ceil(p))]
    up = [[(left, right, n) for left, right in _halves(p, d) if right - left == d and right < p - 1] for d in levels]
    down = [[(left, right, n) for left, right in _halves(p, d)] for d in levels]
    back = [[(right, left, n) for left, right in _halves(p, d) if left >= d] for d in levels]
    return _messages(p, [*up, *(a + b for a, b in zip(reversed(down), reversed(back)))]).without_empty()


def hierarchical_scan(p: int, n: int, hosts: int, ranks_per_host: int, own: int) -> Traffic:
    """Totals of hosts but the last, an exclusive scan of them among last ranks, and then every host's scan inside [ST]."""
    q = ranks_per_host
    if q == 1:
        return kogge_stone_scan(p, n) if own else shifted_kogge_stone_scan(p, n)

    def inside(host: int) -> list[tuple[int, int, int]]:
        ranks = range(host * q, host * q + q)
        return [(s, r, n) for r in ranks for s in ranks if s < r]

    if hosts == 1:
        return _messages(p, [inside(0)])
    last = [h * q + q - 1 for h in range(hosts)]
    totals = [(r, last[h], n) for h in range(hosts - 1) for r in range(h * q, last[h])]
    shift = [(last[h - 1], last[h], n) for h in range(1, hosts)]
    doubling = [[(last[h - 2**k], last[h], n) for h in range(1 + 2**k, hosts)] for k in range(log2_ceil(hosts - 1))]
    end = [m for h in range(1, hosts) for m in (*inside(h), *((last[h], r, n) for r in range(h * q, last[h])))]
    return _messages(p, [totals + inside(0), shift, *doubling, end])


# ---------------------------------------------------------------- barrier


def dissemination_messages(p: int) -> int:
    """⌈log₂ p⌉ rounds with one message from and to every rank [HFM]."""
    return log2_ceil(p)


EXPECTED = {
    ("all_reduce", "two_shot"): two_shot_all_reduce,
    ("all_reduce", "one_shot"): one_shot_all_reduce,
    ("all_reduce", "ring"): ring_all_reduce,
    ("all_reduce", "bidirectional_ring"): ring_all_reduce,
    ("all_reduce", "recursive_doubling"): recursive_doubling_all_reduce,
    ("all_reduce", "rabenseifner"): rabenseifner_all_reduce,
    ("all_reduce", "circulant"): circulant_all_reduce,
    ("all_reduce", "hierarchical"): hierarchical_all_reduce,
    ("all_gather", "direct"): neighbours,
    ("all_gather", "ring"): neighbours,
    ("all_gather", "bruck"): bruck_all_gather,
    ("all_gather", "circulant"): lambda p, n: circulant_reduce_scatter(p, n).transposed(),
    ("all_gather", "recursive_doubling"): doubling_all_gather,
    ("all_gather", "pat"): pat_all_gather,
    ("all_gather", "hierarchical"): hierarchical_all_gather,
    ("reduce_scatter", "direct"): direct_reduce_scatter,
    ("reduce_scatter", "ring"): neighbours,
    ("reduce_scatter", "bruck"): lambda p, n: bruck_all_gather(p, n).transposed(),
    ("reduce_scatter", "circulant"): circulant_reduce_scatter,
    ("reduce_scatter", "recursive_halving"): lambda p, n: doubling_all_gather(p, n).transposed(),
    ("reduce_scatter", "pat"): lambda p, n: pat_all_gather(p, n).transposed(),
    ("reduce_scatter", "hierarchical"): hierarchical_reduce_scatter,
    ("all_to_all", "direct"): neighbours,
    ("all_to_all", "bruck"): bruck_all_to_all,
    ("all_to_all", "hierarchical"): hierarchical_all_to_all,
    ("broadcast", "flat"): flat_broadcast,
    ("broadcast", "binomial"): binomial_broadcast,
    ("broadcast", "scatter_allgather"): scatter_allgather_broadcast,
    ("broadcast", "pipelined_chain"): chain_broadcast,
    ("reduce", "flat"): lambda p, n: flat_broadcast(p, n).transposed(),
    ("reduce", "binomial"): lambda p, n: binomial_broadcast(p, n).transposed(),
    ("reduce", "scatter_allgather"): lambda p, n: scatter_allgather_broadcast(p, n).transposed(),
    ("reduce", "pipelined_chain"): lambda p, n, chunks: chain_broadcast(p, n, chunks).transposed(),
    ("gather", "flat"): lambda p, n: flat_scatter(p, n).transposed(),
    ("gather", "binomial"): lambda p, n: binomial_scatter(p, n).transposed(),
    ("scatter", "flat"): flat_scatter,
    ("scatter", "binomial"): binomial_scatter,
    ("broadcast", "hierarchical"): hierarchical_broadcast,
    ("reduce", "hierarchical"): hierarchical_reduce,
    ("gather", "hierarchical"): hierarchical_gather,
    ("scatter", "hierarchical"): hierarchical_scatter,
    ("inclusive_scan", "one_shot"): one_shot_scan,
    ("inclusive_scan", "two_shot"): lambda p, n: two_shot_scan(p, n, 1),
    ("inclusive_scan", "linear"): chain_scan,
    ("inclusive_scan", "pipelined_chain"): chain_scan,
    ("inclusive_scan", "kogge_stone"): kogge_stone_scan,
    ("inclusive_scan", "blelloch"): blelloch_inclusive_scan,
    ("inclusive_scan", "hierarchical"): lambda p, n, **levels: hierarchical_scan(p, n, own=1, **levels),
    ("exclusive_scan", "one_shot"): one_shot_scan,
    ("exclusive_scan", "two_shot"): lambda p, n: two_shot_scan(p, n, 0),
    ("exclusive_scan", "linear"): chain_scan,
    ("exclusive_scan", "pipelined_chain"): chain_scan,
    ("exclusive_scan", "kogge_stone"): shifted_kogge_stone_scan,
    ("exclusive_scan", "blelloch"): blelloch_exclusive_scan,
    ("exclusive_scan", "hierarchical"): lambda p, n, **levels: hierarchical_scan(p, n, own=0, **levels),
}
"""The table's algorithms, but for the two trees (a bound), permute and the barrier."""
