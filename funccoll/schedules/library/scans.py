"""inclusive_scan and exclusive_scan: each rank gets the reduction over the ranks up to it, or before it, in their order.

Nothing is commuted, so every algorithm is right for any associative op. Rank 0 gets nothing from an exclusive scan. A scan from
the last rank (`reverse`) is the same algorithm, of ranks that are counted from the other end.

In the docstrings n is `nbytes`, the bytes of one rank's vector. α, β and γ are those of `all_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..moves import Move
from ..registry import algorithm
from .combinators import Rounds, own_copy, powers, split

# ---------------------------------------------------------------- one rank after the other


@algorithm("inclusive_scan", name="one_shot")
def inclusive_one_shot(p: int) -> Rounds:
    """Rank r reads the vectors of ranks 0 to r, in their order, and combines them itself.

    Rounds: 1.
    Bytes: rank r receives rn and sends (p−1−r)n.
    Cost: (p−1)(α + nβ + nγ).
    For: ranks that share memory, and short vectors; partial results are never written.
    Source: the definition of MPI_Scan; as the "one-shot" all_reduce.
    """
    yield [Move((r, "output", 0), [(i, "input", 0) for i in range(r + 1)]) for r in range(p)]


@algorithm("inclusive_scan", name="two_shot", chunks=lambda p: p)
def inclusive_two_shot(p: int) -> Rounds:
    """Rank c combines chunk c of all ranks, in their order, and writes each result to the rank that it is for.

    Rounds: p. No rank waits for another between them.
    Bytes: each rank sends at most 2n(p−1)/p and receives at most 2n(p−1)/p; on one host 3pn bytes of memory traffic in all.
    Cost: at most 3(p−1)α + 3n(p−1)/p β + n(p−1)/p γ.
    For: ranks that share memory, and long vectors: all ranks combine equally much, and each vector is read once.
    Source: funccoll; as the "two-shot" all_reduce.
    """
    c = np.arange(p)
    yield [Move((0, "output", c), (0, "input", c), by=c)]
    for r in range(1, p):
        yield [Move((r, "output", c), [(r - 1, "output", c), (r, "input", c)], by=c)]


@algorithm("inclusive_scan", name="linear")
def inclusive_linear(p: int) -> Rounds:
    """Rank r adds its vector to the result of rank r − 1.

    Rounds: p − 1.
    Bytes: each rank but the last sends n, each but the first receives n.
    Cost: (p−1)(α + nβ + nγ).
    For: the fewest bytes and combines of all, on few ranks; neighbours only.
    Source: Open MPI's "linear" MPI_Scan.
    """
    yield from _inclusive_chain(p, 1)


@algorithm("inclusive_scan", name="pipelined_chain", chunks=8)
def inclusive_pipelined_chain(p: int, chunks: int) -> Rounds:
    """The linear scan of chunks that follow each other from rank to rank.

    Rounds: p + chunks − 2.
    Bytes: each rank but the last sends n, each but the first receives n; n/chunks a round.
    Cost: (p + chunks − 2)(α + n/chunks (β + γ)); with the best number of chunks (√((p−2)α) + √(n(β+γ)))².
    For: the longest vectors; neighbours only.
    Source: the linear pipeline in Sanders and Träff, "Parallel prefix (scan) algorithms for MPI", 2006.
    """
    yield from _inclusive_chain(p, chunks)


@algorithm("exclusive_scan", name="one_shot")
def exclusive_one_shot(p: int) -> Rounds:
    """Rank r reads the vectors of the ranks before it, in their order, and combines them itself.

    Rounds: 1.
    Bytes: rank r receives rn and sends (p−1−r)n.
    Cost: (p−1)(α + nβ) + (p−2)nγ.
    For: ranks that share memory, and short vectors; partial results are never written.
    Source: the definition of MPI_Exscan; as the "one-shot" all_reduce.
    """
    yield [Move((r, "output", 0), [(i, "input", 0) for i in range(r)]) for r in range(1, p)]


@algorithm("exclusive_scan", name="two_shot", chunks=lambda p: p)
def exclusive_two_shot(p: int) -> Rounds:
    """Rank c combines chunk c of all ranks but the last, in their order, and writes each result to the rank that it is for.

    Rounds: p − 1. No rank waits for another between them.
    Bytes: each rank sends at most 2n(p−1)/p and receives at most 2n(p−1)/p; on one host 3(p−1)n bytes of memory traffic in all.
    Cost: at most 3(p−1)α + 3n(p−1)/p β + n(p−2)/p γ.
    For: ranks that share memory, and long vectors: all ranks combine equally much, and each vector is read once.
    Source: funccoll; as the "two-shot" all_reduce.
    """
    c = np.arange(p)
    for r in range(1, p):
        before = [(r - 1, "output", c)] if r > 1 else []
        yield [Move((r, "output", c), [*before, (r - 1, "input", c)], by=c)]


@algorithm("exclusive_scan", name="linear")
def exclusive_linear(p: int) -> Rounds:
    """Rank r adds its vector to its result, and sends the sum to rank r + 1, whose result it is.

    Rounds: p − 1.
    Bytes: each rank but the last sends n, each but the first receives n.
    Cost: (p−1)(α + nβ) + (p−2)nγ.
    For: the fewest bytes and combines of all, on few ranks; neighbours only.
    Source: Open MPI's "linear" MPI_Exscan.
    """
    yield from _exclusive_chain(p, 1)


@algorithm("exclusive_scan", name="pipelined_chain", chunks=8)
def exclusive_pipelined_chain(p: int, chunks: int) -> Rounds:
    """The linear scan of chunks that follow each other from rank to rank.

    Rounds: p + chunks − 2.
    Bytes: each rank but the last sends n, each but the first receives n; n/chunks a round.
    Cost: at most (p + chunks − 2)(α + n/chunks (β + γ)).
    For: the longest vectors; neighbours only.
    Source: the linear pipeline in Sanders and Träff, "Parallel prefix (scan) algorithms for MPI", 2006.
    """
    yield from _exclusive_chain(p, chunks)


def _inclusive_chain(p: int, chunks: int) -> Rounds:
    if p == 1:
        yield [own_copy(p, chunks)]
    for t in range(p + chunks - 2 if p > 1 else 0):
        rank, chunk = _wave(p, chunks, t)
        before = np.where(rank == 1, "input", "output")
        step = split((rank, "output", chunk), [(rank - 1, before, chunk), (rank, "input", chunk)])
        yield [*step, Move((0, "output", 0), (0, "input", 0), chunks)] if not t else step


def _exclusive_chain(p: int, chunks: int) -> Rounds:
    for t in range(p + chunks - 2 if p > 1 else 0):
        rank, chunk = _wave(p, chunks, t)
        second, later = rank == 1, rank > 1
        step = [Move((rank[second], "output", chunk[second]), (0, "input", chunk[second]))]
        to, chunk = rank[later], chunk[later]
        sent = [(to - 1, "output", chunk), (to - 1, "input", chunk)]
        yield [*step, Move((to, "output", chunk), sent, by=to - 1)]


def _wave(p: int, chunks: int, t: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranks that get a chunk in round t of a pipeline, and the chunks."""
    rank = np.arange(max(1, t - chunks + 2), min(p - 1, t + 1) + 1)
    return rank, t + 1 - rank


# ---------------------------------------------------------------- Kogge and Stone


@algorithm("inclusive_scan", name="kogge_stone")
def inclusive_kogge_stone(p: int) -> Rounds:
    """Rank r gets the partial result of rank r − 1, then that of r − 2, r − 4, ...: each covers twice as many ranks.

    Rounds: ⌈log₂ p⌉.
    Bytes: in the round of distance d, ranks 0 to p − 1 − d send n; n⌈log₂ p⌉ at most.
    Cost: ⌈log₂ p⌉(α + nβ + nγ).
    For: short vectors.
    Source: Kogge and Stone 1973; Hillis and Steele, "Data parallel algorithms", 1986; MPI's recursive doubling.
    """
    yield from _doubling(np.arange(p), ("input", 0), ("output", 0), 0)


@algorithm("exclusive_scan", name="kogge_stone")
def exclusive_kogge_stone(p: int) -> Rounds:
    """Every rank sends its vector to the next one. Then ranks 1 to p − 1 run the inclusive scan of what they have.

    Rounds: 1 + ⌈log₂(p−1)⌉.
    Bytes: n for every rank but the last, then those of an inclusive scan on p − 1 ranks.
    Cost: (1 + ⌈log₂(p−1)⌉)(α + nβ) + ⌈log₂(p−1)⌉nγ.
    For: short vectors.
    Source: Kogge and Stone 1973, after a shift by one rank.
    """
    yield from _shifted_doubling(np.arange(p), (np.full(p, "input"), np.zeros(p, int)), ("output", 0), 0)


def _doubling(ranks: np.ndarray, start: tuple[str, int], result: tuple[str, int], slot: int, begun: bool = False) -> Rounds:
    """Yield an inclusive scan among `ranks`, from the place `start` of each to `result`.

    Partial results are in `slot` and the next chunk of scratch in turn, so that no rank writes what others read. With `begun`,
    the first rank has its result already.
    """
    if len(ranks) == 1 and not begun:
        yield [Move((ranks, *result), (ranks, *start))]
    for k, d in enumerate(powers(len(ranks))):
        member = np.arange(d, len(ranks))
        to, own = ("scratch", slot + (k + 1) % 2), start if not k else ("scratch", slot + k % 2)
        is_done, other = member < 2 * d, member - d
        has_all = (other < d) & (begun or k > 0)  # that rank's result is complete
        step = split(
            (ranks[member], np.where(is_done, result[0], to[0]), np.where(is_done, result[1], to[1])),
            [
                (ranks[other], np.where(has_all, result[0], own[0]), np.where(has_all, result[1], own[1])),
                (ranks[member], *own),
            ],
        )
        yield [*step, Move((ranks[0], *result), (ranks[0], *start))] if not (k or begun) else step


def _shifted_doubling(ranks: np.ndarray, start: tuple[Any, Any], result: tuple[str, int], slot: int) -> Rounds:
    """Yield an exclusive scan among `ranks`: each passes on its vector, then all but the first run an inclusive scan.

    `start` has the buffer and the chunk of each rank's vector.
    """
    if len(ranks) > 1:
        after, to = ranks[1:], (np.full(len(ranks) - 1, "scratch"), np.full(len(ranks) - 1, slot))
        to[0][0], to[1][0] = result
        buffer, chunk = start
        yield split((after, *to), [(ranks[:-1], buffer[:-1], chunk[:-1])])
        yield from _doubling(after, ("scratch", slot), result, slot, begun=True)


# ---------------------------------------------------------------- Blelloch


@algorithm("inclusive_scan", name="blelloch")
def inclusive_blelloch(p: int) -> Rounds:
    """Blocks of 2, 4, 8, ... ranks are combined in their last ranks, and then the prefixes in between, the far ones first.

    Rounds: ⌊log₂ p⌋, and ⌊log₂(p/3)⌋ + 1 more from 3 ranks on.
    Bytes: at most p − 1 messages of n on the way up, and fewer than p down; each rank sends at most n⌊log₂ p⌋.
    Cost: at most (2⌊log₂ p⌋)(α + nβ + nγ).
    For: fewer than 2p combines in all, where Kogge and Stone's scan has p log₂ p.
    Source: Blelloch, "Prefix sums and their applications", 1990; the inclusive form is Brent and Kung 1982.
    """
    rank = np.arange(p)
    combined = np.zeros(p, bool)

    def step(last: np.ndarray, d: int) -> list[Move]:
        before, own = (np.where(combined[r], "output", "input") for r in (last - d, last))
        moves = split((last, "output", 0), [(last - d, before, 0), (last, own, 0)])
        combined[last] = True
        return moves

    first = [Move((0, "output", 0), (0, "input", 0))]
    for d in powers(p):
        last = rank[(rank + 1) % (2 * d) == 0]
        if len(last):
            yield [*first, *step(last, d)]
            first = []
    if first:
        yield first
    for d in reversed(powers(p)):
        last = rank[((rank + 1) % (2 * d) == d) & (rank >= 2 * d)]
        if len(last):
            yield step(last, d)


@algorithm("exclusive_scan", name="blelloch")
def exclusive_blelloch(p: int) -> Rounds:
    """Blocks of 2, 4, 8, ... ranks are combined in their last ranks. Then each block's two halves get what is before them.

    Rounds: 2⌈log₂ p⌉ − 1.
    Bytes: the last rank of a block's first half sends n up, sends n to the second half, and gets n from there.
    Cost: (2⌈log₂ p⌉ − 1)(α + nβ) + (2⌈log₂ p⌉ − 2)nγ.
    For: fewer than 2p combines in all, where Kogge and Stone's scan has p log₂ p.
    Source: Blelloch, "Prefix sums and their applications", 1990; here for any p, without the identity.
    """
    rank = np.arange(p)
    combined = np.zeros(p, bool)
    for d in powers(p):
        last = rank[((rank + 1) % (2 * d) == 0) & (rank < p - 1)]  # nothing is after the last rank's block
        if len(last):
            halves = [(r, np.where(combined[r], "scratch", "input"), 0) for r in (last - d, last)]
            yield split((last, "scratch", 0), halves)
            combined[last] = True
    at = np.zeros(p, int)  # the chunk of scratch with what is before the block of a rank: 1 or 2 in turn; 0 for nothing
    for d in reversed(powers(p)):
        begin = np.arange(0, p - d, 2 * d)
        left, right = begin + d - 1, np.minimum(begin + 2 * d, p) - 1
        total, nothing = np.where(combined[left], "scratch", "input"), begin == 0
        before = at[right]
        at[right] = at[left] = np.where(before == 1, 2, 1)
        at[left[nothing]] = 0
        to_right = _final_or(right - left == 1, right, at[right])
        later = ~nothing
        step = split(_rows(to_right, nothing), [(left[nothing], total[nothing], 0)])
        if later.any():
            step += split(_rows(to_right, later), [(right[later], "scratch", before[later]), (left[later], total[later], 0)])
            step += split(
                _rows(_final_or(np.full(len(left), d == 1), left, at[left]), later), [(right[later], "scratch", before[later])]
            )
        yield step


def _final_or(is_final: np.ndarray, rank: np.ndarray, chunk: np.ndarray) -> tuple[Any, Any, Any]:
    """Return the places of ranks' outputs if they are final, and of chunks of scratch."""
    return rank, np.where(is_final, "output", "scratch"), np.where(is_final, 0, chunk)


def _rows(place: tuple[Any, Any, Any], rows: np.ndarray) -> tuple[Any, Any, Any]:
    rank, buffer, chunk = place
    return rank[rows], buffer[rows], chunk[rows]


# ---------------------------------------------------------------- several hosts


@algorithm("inclusive_scan", name="hierarchical")
def inclusive_hierarchical(p: int, hosts: tuple[int, ...]) -> Rounds:
    """Each host's last rank combines the host's vectors, and these ranks run an exclusive scan. Then all add their host's.

    Hosts are runs of neighbouring ranks here: a host whose ranks are not neighbours counts as several.
    Rounds: 3 + ⌈log₂(h−1)⌉ with h > 1 hosts; 1 with one. Hosts of one rank run Kogge and Stone's scan.
    Bytes: between hosts those of an exclusive scan on h ranks.
    Cost: (1 + ⌈log₂(h−1)⌉)(α + nβ) + ⌈log₂(h−1)⌉nγ between hosts, and two one_shot scans inside.
    For: several hosts, each with memory that its ranks share.
    Source: Sanders and Träff, "Parallel prefix (scan) algorithms for MPI", 2006, for clusters of SMP nodes.
    """
    yield from _hierarchical(hosts, own=1)


@algorithm("exclusive_scan", name="hierarchical")
def exclusive_hierarchical(p: int, hosts: tuple[int, ...]) -> Rounds:
    """Each host's last rank combines the host's vectors, and these ranks run an exclusive scan. Then all add their host's.

    Hosts are runs of neighbouring ranks here: a host whose ranks are not neighbours counts as several.
    Rounds: 3 + ⌈log₂(h−1)⌉ with h > 1 hosts; 1 with one. Hosts of one rank run Kogge and Stone's scan.
    Bytes: between hosts those of an exclusive scan on h ranks.
    Cost: (1 + ⌈log₂(h−1)⌉)(α + nβ) + ⌈log₂(h−1)⌉nγ between hosts, and two one_shot scans inside.
    For: several hosts, each with memory that its ranks share.
    Source: Sanders and Träff, "Parallel prefix (scan) algorithms for MPI", 2006, for clusters of SMP nodes.
    """
    yield from _hierarchical(hosts, own=0)


def _hierarchical(hosts: Sequence[int], own: int) -> Rounds:
    """Yield a scan over runs of ranks. The ranks before a rank in its run count, and itself if `own` is 1."""
    p = len(hosts)
    begin = np.flatnonzero(np.diff(hosts, prepend=-1))
    last = np.append(begin[1:], p) - 1
    if len(begin) == p:
        yield from inclusive_kogge_stone(p) if own else exclusive_kogge_stone(p)
        return

    def inputs(ranks: range) -> list[tuple[int, str, int]]:
        return [(r, "input", 0) for r in ranks]

    def prefixes(run: int, before: list[tuple[int, str, int]]) -> list[Move]:
        """Moves of all ranks of a run, which read what is before the run, and the inputs inside."""
        first = int(begin[run])
        sources = {r: [*before, *inputs(range(first, r + own))] for r in range(first, int(last[run]) + 1)}
        return [Move((r, "output", 0), found) for r, found in sources.items() if found]

    first = prefixes(0, [])
    if len(begin) == 1:
        yield first
        return
    several = last > begin
    totals = [Move((last[h], "scratch", 0), inputs(range(begin[h], last[h] + 1))) for h in np.flatnonzero(several[:-1])]
    if totals:
        yield [*totals, *first]
        first = []
    start = np.where(several, "scratch", "input"), np.zeros(len(last), int)
    for step in _shifted_doubling(last, start, ("scratch", 1), 2):
        yield [*step, *first]
        first = []
    yield [move for h in range(1, len(last)) for move in prefixes(h, [(int(last[h]), "scratch", 1)])]
