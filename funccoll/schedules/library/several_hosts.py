"""Hierarchical algorithms: memory inside hosts, few bytes and messages between them.

`hosts` has the host of each rank. Hosts may have different numbers of ranks, in any order of ranks. In the docstrings there are
h hosts, of q ranks each if counts are given. n, α, β and γ are as for other algorithms of the collective.

If some host has fewer ranks, q is the least number for all_reduce, and on the other hosts only the first q ranks communicate
with other hosts. In the other collectives the ranks of a smaller host also take the lanes that it lacks, in turn.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..moves import Move
from ..registry import algorithm
from . import trees
from .all_to_all import direct
from .combinators import Group, Rounds, accumulate, alongside, circulant, own_block, own_copy, spread
from .host_ranks import HostRanks

Hosts = tuple[int, ...]


def _lanes(p: int, hosts: Hosts) -> int:
    """Return the chunks of an all_reduce: one for each host in each lane."""
    size = np.bincount(hosts)
    return len(size) * int(size.min())


# ---------------------------------------------------------------- all_reduce


@algorithm("all_reduce", chunks=_lanes)
def hierarchical(p: int, hosts: Hosts) -> Rounds:
    """A reduce_scatter inside each host, all_reduces across hosts, an all_gather inside each host.

    The vector is cut into q lanes. The l-th rank of each host adds lane l of its host's ranks; these ranks sum it across hosts
    (circulant), and the others of the host copy it.
    Rounds: 1 + 2⌈log₂ h⌉ + q − 1 (none inside if q = 1), one more if some hosts have more ranks than others.
    Bytes: each rank sends and receives 2n(p−1)/p, of it 2n(h−1)/p to and from other hosts: the minimum.
    Cost: 2(q−1)α + 2n(q−1)/q β + n(q−1)/q γ of the links inside, plus 2⌈log₂ h⌉α + 2n(h−1)/p β + n(h−1)/p γ across.
    For: hosts whose ranks are linked much faster than the hosts.
    Source: Cho, Finkler, Serrano, Kung and Hunter, "BlueConnect", 2019; Träff and Hunold, "Decomposing MPI Collectives
    for Exploiting Multi-lane Communication", 2020; with fewer lanes than ranks, the leaders of Bayatpour, Chakraborty,
    Subramoni, Lu and Panda, "Scalable Reduction Collectives with Data Partitioning-based Multi-Leader Design", 2017.
    """
    if p == 1:
        yield [own_copy(p)]
    on = HostRanks(hosts)
    h, lanes = on.count, on.least
    leaders = on.ranks[:, :lanes].reshape(-1)
    if on.most > 1:
        yield [
            Move((some, "output", on.local[some] * h), [(rank, "input", on.local[some] * h) for rank in of_host], h)
            for some, of_host in on.by_size(leaders)
        ]
    across = Group(on.ranks[:, :lanes].T, np.arange(lanes * h).reshape(lanes, h))
    yield from accumulate(circulant(h), across, "output", started=on.most > 1)
    yield from spread(circulant(h), across)
    for step in range(lanes):
        reader = np.arange(p)
        lane = (on.local + step) % lanes
        other = on.ranks[on.host, lane]
        reader, lane, other = (column[other != reader] for column in (reader, lane, other))
        if len(reader):
            yield [Move((reader, "output", lane * h), (other, "output", lane * h), h)]


# ---------------------------------------------------------------- all_gather and reduce_scatter


@algorithm("all_gather", name="hierarchical")
def all_gather_hierarchical(p: int, hosts: Hosts) -> Rounds:
    """Equal ranks of all hosts gather across hosts (circulant), then each host's ranks read from each other.

    Rounds: ⌈log₂ h⌉ + q − 1.
    Bytes: each rank sends and receives n(p−1)/p, of it n(h−1)/p to and from other hosts.
    Cost: ⌈log₂ h⌉α + n(h−1)/p β of the links across, plus (q−1)α + n(q−1)/q β of those inside.
    For: hosts whose ranks are linked much faster than the hosts: every byte enters a host once.
    Source: Träff and Hunold, "Decomposing MPI Collectives for Exploiting Multi-lane Communication", 2020.
    """
    yield from alongside([own_block(p)], _gather(HostRanks(hosts)))


def _gather(on: HostRanks) -> Rounds:
    yield from spread(circulant(on.count), Group(on.lane_members(), on.ranks.T), from_input=True)
    for step in range(1, on.most):
        reader = on.with_neighbours(step)
        other = on.neighbour(reader, step)
        row, block = on.served(other)
        yield [
            Move((reader, "output", other), (other, "input", 0)),
            Move((reader[row], "output", block), (other[row], "output", block)),
        ]


@algorithm("reduce_scatter", name="hierarchical")
def reduce_scatter_hierarchical(p: int, hosts: Hosts) -> Rounds:
    """Owners add inside each host, then equal ranks of all hosts do across hosts (circulant).

    Rounds: ⌈log₂ h⌉ + 1 (none inside if q = 1).
    Bytes: each rank sends and receives n(p−1)/p, of it n(h−1)/p to and from other hosts.
    Cost: (q−1)α + n(q−1)/q β + n(q−1)/q γ of the links inside, plus ⌈log₂ h⌉α + n(h−1)/p β + n(h−1)/p γ across.
    For: hosts whose ranks are linked much faster than the hosts: every byte leaves a host once.
    Source: Cho, Finkler, Serrano, Kung and Hunter, "BlueConnect", 2019; Träff and Hunold 2020 (as hierarchical all_gather).
    """
    on = HostRanks(hosts)
    # The sum of a lane's block for host i is chunk i of scratch, behind those of the rank's lanes before.
    chunk = on.local // on.least * on.count + on.host
    if on.most > 1 or p == 1:
        step = []
        for some, of_host in on.by_size(np.arange(p)):
            row, block = on.served(some)
            for rank, at, to in ((some, slice(None), some), (some[row], row, block)):
                place = (rank, "scratch" if on.count > 1 else "output", chunk[to])
                step.append(Move(place, [(column[at], "input", to) for column in of_host]))
        yield step
    blocks = np.where(on.ranks.T < 0, -1, chunk[on.ranks.T])
    across = Group(on.lane_members(), blocks)
    yield from accumulate(circulant(on.count), across, "scratch", started=on.most > 1, result=("output", 0))


# ---------------------------------------------------------------- all_to_all


@algorithm("all_to_all", name="hierarchical")
def all_to_all_hierarchical(p: int, hosts: Hosts) -> Rounds:
    """Inside each host, the l-th rank collects the blocks for the l-th ranks of all hosts, then equal ranks exchange.

    Rounds: h − 1 + q − 1.
    Bytes: each rank sends and receives n(q−1)/q inside its host and n(h−1)/h across, in messages of n/q and n/h.
    Cost: (q−1)α + n(q−1)/q β of the links inside, plus (h−1)α + n(h−1)/h β of those across.
    For: short blocks between many hosts: q times fewer messages across than direct, each q times as long.
    Source: Träff and Rougier, "MPI Collectives and Datatypes for Hierarchical All-to-all Communication", 2014; Tutel (Hwang
    et al. 2023).
    """
    on = HostRanks(hosts)
    if on.most == 1:
        yield from direct(p)
        return
    r = np.arange(p)
    yield from alongside([Move((r, "output", r), (r, "input", r)), *_collect(on, 0)], _exchange(on))


def _exchange(on: HostRanks) -> Rounds:
    for step in range(1, on.most):
        reader = on.with_neighbours(step)
        other = on.neighbour(reader, step)
        yield [Move((reader, "output", other), (other, "input", reader)), *_collect(on, step)]
    r = np.arange(len(on.host))[:, None]
    first, count = on.runs()
    for step in range(1, on.count):
        there = (on.host[:, None] - step) % on.count
        begin, n = first[there[:, 0]], count[there[:, 0]]
        sender = on.ranks[there, on.local[:, None] % on.size[there]]
        held = _collected(on, sender, r, begin)
        yield [Move((r, "output", np.where(n, on.ranks[there, begin], 0)), (sender, "scratch", held), n)]


def _collect(on: HostRanks, step: int) -> list[Move]:
    """Return moves to scratch of the blocks that leave the host, for the ranks that are served.

    They come from the rank `step` further on.
    """
    reader = on.with_neighbours(step) if step else np.arange(len(on.host))
    other = on.neighbour(reader, step)
    row, to = on.served(reader)
    reader, other = reader[row], other[row]
    return [Move((reader, "scratch", _collected(on, reader, to, on.local[other])), (other, "input", to))]


def _collected(on: HostRanks, rank: Any, to: Any, local: Any) -> Any:
    """Return the chunk of scratch in which `rank` collects the block for rank `to`.

    The block comes from the rank of its host with this local number.
    """
    q = on.size[on.host[rank]]
    return (on.local[to] // q * on.count + on.host[to]) * q + local


# ---------------------------------------------------------------- with a root


def _leaders(on: HostRanks, root: int) -> np.ndarray:
    """[h] the rank of each host that sends to and receives from other hosts: the root, elsewhere the first."""
    leaders = on.ranks[:, 0].copy()
    leaders[on.host[root]] = root
    return leaders


def _across(on: HostRanks, leaders: np.ndarray, root: int) -> list[trees.Edges]:
    """Return a binomial tree of the leaders."""
    tree = trees.binomial(on.count, int(on.host[root]))
    return [trees.Edges(leaders[edges.child], leaders[edges.parent]) for edges in tree]


@algorithm("broadcast", name="hierarchical")
def broadcast_hierarchical(p: int, root: int, hosts: Hosts) -> Rounds:
    """A binomial broadcast to one rank of each host, from which the others of its host read.

    Rounds: ⌈log₂ h⌉ + 1 (none inside if q = 1).
    Bytes: the root sends n⌈log₂ h⌉ to other hosts; a rank that has received sends n(q−1) inside its host.
    Cost: ⌈log₂ h⌉(α + nβ) of the links across, plus (q−1)(α + nβ) of those inside.
    For: short and medium vectors: every byte enters a host once.
    Source: Karonis, de Supinski, Foster, Gropp, Lusk and Bresnahan, "Exploiting Hierarchy in Parallel Computer Networks to
    Optimize Collective Operation Performance", 2000.
    """
    on = HostRanks(hosts)
    leaders = _leaders(on, root)
    r, leader = np.arange(p), leaders[on.host]
    near, far = r[leader == root], r[(leader != root) & (leader != r)]
    reads = [[Move((far, "output", 0), (leader[far], "output", 0))]] if len(far) else []
    across = trees.broadcast_along(_across(on, leaders, root), root)
    yield from alongside([Move((near, "output", 0), (root, "input", 0))], itertools.chain(across, reads))


@algorithm("reduce", name="hierarchical")
def reduce_hierarchical(p: int, root: int, hosts: Hosts) -> Rounds:
    """One rank of each host adds the vectors of its host, in the order of ranks; these are reduced along a binomial tree.

    Rounds: ⌈log₂ h⌉ + 1 (none inside if q = 1).
    Bytes: the root receives n⌈log₂ h⌉ from other hosts, and n(q−1) from its own.
    Cost: ⌈log₂ h⌉(α + nβ + nγ) of the links across, plus (q−1)(α + nβ + nγ) of those inside.
    For: short and medium vectors: every host sends one vector.
    Source: the transpose of the hierarchical broadcast.
    """
    on = HostRanks(hosts)
    leaders = _leaders(on, root)
    if on.most > 1 or p == 1:
        step = []
        for some, of_host in on.by_size(leaders):
            for here, buffer in ((some == root, "output"), (some != root, "scratch")):
                step.append(Move((some[here], buffer, 0), [(column[here], "input", 0) for column in of_host]))
        yield step
    yield from trees.reduce_along(_across(on, leaders, root), p, 1, root, started=on.most > 1)


@algorithm("gather", name="hierarchical")
def gather_hierarchical(p: int, root: int, hosts: Hosts) -> Rounds:
    """One rank of each host collects its host's blocks, and the root reads them from there.

    Rounds: 2 (1 on one host, or if q = 1).
    Bytes: the root receives n(p−1)/p; one rank of each other host sends nq/p, and receives n(q−1)/p.
    Cost: (h−1)α + n(h−1)/h β of the links across, plus (q−1)α + n(q−1)/p β of those inside.
    For: short blocks: one message from each other host.
    Source: Karonis et al. 2000 (as hierarchical broadcast).
    """
    r, leader, at_once = _at_once(HostRanks(hosts), root)
    yield [
        Move((root, "output", r[at_once]), (r[at_once], "input", 0)),
        Move((leader[~at_once], "scratch", r[~at_once]), (r[~at_once], "input", 0)),
    ]
    if not at_once.all():
        yield [Move((root, "output", r[~at_once]), (leader[~at_once], "scratch", r[~at_once]))]


@algorithm("scatter", name="hierarchical")
def scatter_hierarchical(p: int, root: int, hosts: Hosts) -> Rounds:
    """One rank of each host reads its host's blocks from the root, and the others of its host read theirs from there.

    Rounds: 2 (1 on one host, or if q = 1).
    Bytes: the root sends n(p−1)/p; one rank of each other host receives nq/p, and sends n(q−1)/p.
    Cost: (h−1)α + n(h−1)/h β of the links across, plus (q−1)α + n(q−1)/p β of those inside.
    For: short blocks: one message to each other host.
    Source: Karonis et al. 2000 (as hierarchical broadcast).
    """
    r, leader, at_once = _at_once(HostRanks(hosts), root)
    yield [
        Move((r[at_once], "output", 0), (root, "input", r[at_once])),
        Move((leader[~at_once], "scratch", r[~at_once]), (root, "input", r[~at_once])),
    ]
    if not at_once.all():
        yield [Move((r[~at_once], "output", 0), (leader[~at_once], "scratch", r[~at_once]))]


def _at_once(on: HostRanks, root: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ranks, the leader of each one's host, True for those whose blocks need not pass through a leader)."""
    leader = _leaders(on, root)[on.host]
    return np.arange(len(on.host)), leader, (leader == root) | (on.size[on.host] == 1)
