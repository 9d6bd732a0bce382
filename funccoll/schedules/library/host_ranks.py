"""The ranks of each host, as tables, for algorithms that distinguish hosts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["HostRanks"]


class HostRanks:
    """`hosts[r]` is the host of rank r, numbered from 0. Hosts may have different numbers of ranks, in any order.

    The l-th rank of a host (its *local* number) is the l-th in the order of ranks.
    """

    def __init__(self, hosts: Sequence[int]):
        self.host = np.array(hosts, np.int64)
        """[p] the host of each rank."""
        self.size = np.bincount(self.host)
        """[h] ranks of each host."""
        self.count, self.least, self.most = len(self.size), int(self.size.min()), int(self.size.max())
        p = len(self.host)
        order = np.argsort(self.host, kind="stable")
        self.local = np.empty(p, np.int64)
        """[p] the local number of each rank."""
        self.local[order] = np.arange(p) - np.repeat(np.cumsum(self.size) - self.size, self.size)
        self.ranks = np.full((self.count, self.most), -1)
        """[h, most] the l-th rank of each host, -1 beyond its last."""
        self.ranks[self.host, self.local] = np.arange(p)

    def neighbour(self, ranks: np.ndarray, step: int) -> np.ndarray:
        """Return the ranks `step` further on, on the same hosts."""
        host = self.host[ranks]
        return self.ranks[host, (self.local[ranks] + step) % self.size[host]]

    def with_neighbours(self, step: int) -> np.ndarray:
        """Return the ranks whose neighbour `step` further on is another rank, to which no smaller step leads."""
        return np.flatnonzero(self.size[self.host] > step)

    def by_size(self, ranks: np.ndarray) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """Return the ranks by the size of their hosts.

        Each entry has columns, too: the first ranks of their hosts, the second ones, ...
        """
        size = self.size[self.host[ranks]]
        alike = [ranks[size == q] for q in np.unique(size)]
        return [(some, list(self.ranks[self.host[some], : self.size[self.host[some[0]]]].T)) for some in alike]

    def lane_members(self) -> np.ndarray:
        """[most, h] the ranks of each lane: on each host the l-th rank. A host with fewer ranks has another one, in turn."""
        lane = np.arange(self.most)[:, None]
        return self.ranks[np.arange(self.count), lane % self.size]

    def served(self, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ranks of other hosts that ranks serve, and share a lane with, as columns (row of `ranks`, rank served).

        A rank's lanes are its local number l, and l + q, l + 2q, ..., if its host has q ranks and others have more.
        """
        host, q = self.host[ranks][:, None, None], self.size[self.host[ranks]][:, None, None]
        other = (host + np.arange(1, self.count)) % self.count
        lane = self.local[ranks][:, None, None] + np.arange(-(-self.most // self.least))[:, None] * q
        found = np.where(lane < self.most, self.ranks[other, np.minimum(lane, self.most - 1)], -1)
        row = np.broadcast_to(np.arange(len(ranks))[:, None, None], found.shape)
        return row[found >= 0], found[found >= 0]

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ([h, runs] local number, [h, runs] count) of the runs of consecutive ranks of each host.

        Counts are padded with 0.
        """
        begins = [np.flatnonzero(np.diff(row[:q], prepend=-2) != 1) for row, q in zip(self.ranks, self.size)]
        shape = self.count, max(map(len, begins))
        first, count = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for i, at in enumerate(begins):
            first[i, : len(at)], count[i, : len(at)] = at, np.diff(at, append=self.size[i])
        return first, count
