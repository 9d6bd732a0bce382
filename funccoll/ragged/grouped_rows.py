"""Ragged collectives among groups of devices along an axis (`groups=`): which rows each pair of devices exchanges.

Each is one `ragged_all_to_all` along the whole axis, in which devices of different groups send each other nothing. So groups
may have any sizes, all devices check one table, and gradients and proofs are those of that collective.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..collectives.axis_groups import checked_groups, group_index, ranks_by_position
from ..core.interpreter import bind
from ..ops.indexing import getitem
from ..primitives.varying import axis_index_p, axis_size

__all__ = ["GroupedRows", "grouped_rows"]


class GroupedRows:
    """Groups of positions along axes, and the tables of collectives among them.

    `size` is the number of ranks of the largest group.
    """

    def __init__(self, groups: tuple[tuple[int, ...], ...], axes: tuple[str, ...]):
        self.groups, self._axes, self.size = groups, axes, max(map(len, groups))
        p = axis_size(axes)
        self.rank = ranks_by_position(groups)
        """Each device's rank in its group."""
        group = np.zeros(p, np.int64)
        self._members = np.zeros((p, self.size), np.int64)
        self._is_member = np.zeros((p, self.size), np.int64)
        for number, places in enumerate(groups):
            group[list(places)] = number
            self._members[list(places), : len(places)] = places
            self._is_member[list(places), : len(places)] = 1
        self._together = (group[:, None] == group).astype(np.int64)
        self._before = self._together * (self.rank[:, None] > self.rank)  # (rank, rank): the second comes first

    def pairs(self, sizes: Any) -> Any:
        """Return rows by (position, position) from rows by (position, rank in its group)."""
        return np.take(sizes, self.rank, axis=1) * self._together

    def table(self, pairs: Any, starts: Any = None, places: Any = None, expected: Any = None) -> Any:
        """Return the table of a `ragged_all_to_all` in which these rows move.

        Without `starts` and `places`, blocks lie in the order of ranks, without gaps. `expected` are sizes by (position, rank)
        that all members of a group must have told alike; the call raises if they did not.
        """
        if starts is None:
            starts = np.sum(pairs[:, None, :] * self._before, axis=2)
        if places is None:
            places = np.sum(pairs[None, :, :] * self._before[:, :, None], axis=1)
        wanted = np.transpose(pairs)
        if expected is not None:  # what each device has told of its own rows
            own = np.sum(expected * (np.arange(self.size) == self.rank[:, None]), axis=1)
            wanted = own[:, None] * self._together
        return np.stack([starts, pairs, places, wanted], axis=1)

    def of_members(self, values: Any) -> Any:
        """Return the values of this device's group by rank, from those of all positions; 0 after the last one."""
        mine = bind(axis_index_p, axes=self._axes)
        return np.take(values, getitem(self._members, mine)) * getitem(self._is_member, mine)

    def from_members(self, pairs: Any) -> Any:
        """Return the rows that this device gets from each rank of its group; 0 after the last one."""
        mine = bind(axis_index_p, axes=self._axes)
        return self.of_members(getitem(np.transpose(pairs), mine))

    def my_rank(self) -> Any:
        """Return this device's rank in its group."""
        return group_index(self.groups, self._axes)


def grouped_rows(name: str, groups: Any, axes: tuple[str, ...]) -> GroupedRows | None:
    """Return the groups of a call, None if all devices along the axes are one in order.

    Raises:
        ShapeError: If the groups do not have each position exactly once.
    """
    found = checked_groups(name, groups, axes)
    return GroupedRows(found, axes) if found else None
