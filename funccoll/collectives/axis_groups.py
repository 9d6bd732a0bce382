"""Groups along the axes of a collective: `groups=` of the public functions, checked, and a device's place in them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.mesh import shown_groups
from ..core.partition_spec import axes_in_words
from ..errors import PlannedError, ShapeError
from ..ops.indexing import getitem
from ..primitives.varying import axis_index_p, axis_size
from .record import AxisGroups, are_uneven

__all__ = ["checked_groups", "group_index", "group_sizes", "largest", "peers", "ranks_by_position"]


def checked_groups(name: str, groups: Any, axes: tuple[str, ...], equal: str = "") -> AxisGroups:
    """Return the groups of a call as tuples, () if all devices along the axes are one group in order.

    Args:
        name: The public function.
        groups: What the user gave.
        axes: The axes along which the positions count.
        equal: What depends on the size of a group, for collectives whose groups must have one size.

    Raises:
        ShapeError: If the groups do not have each position exactly once, or a group is empty.
        PlannedError: If sizes differ and must not.
    """
    if groups is None:
        return ()
    size, over = axis_size(axes), axes_in_words(axes)
    try:
        found = tuple([tuple([operator.index(place) for place in group]) for group in groups])
    except TypeError:
        raise ShapeError(
            f"{name}: groups={groups!r:.80} must be lists of positions along {over}, such as [[0, 1], [2, 3]]."
        ) from None
    counts = Counter(place for group in found for place in group)
    wrong = {
        "is not a position along it": [place for place in counts if not 0 <= place < size],
        "is in them more than once": [place for place, count in counts.items() if count > 1],
        "is in none of them": [place for place in range(size) if place not in counts],
    }
    for what, places in wrong.items():
        if places:
            raise ShapeError(
                f"{name} over {over} (size {size}) in groups {shown_groups(found)}: position {places[0]} {what}. Each position "
                f"from 0 to {size - 1} must be in exactly one group; give a device that does not take part a group of its own."
            )
    sizes = [len(group) for group in found]
    if 0 in sizes:
        raise ShapeError(f"{name} over {over} in groups {shown_groups(found)}: group {sizes.index(0)} is empty. Leave it out.")
    if equal and are_uneven(found):
        raise PlannedError(
            f"{name} over {over} in groups {shown_groups(found)}: the groups have sizes {', '.join(map(str, sizes))}, and "
            f"{equal}, which must have one shape on all devices. Use groups of one size, or fc.ragged, whose groups have any."
        )
    return () if found == (tuple(range(size)),) else found


def largest(groups: AxisGroups, axes: Sequence[str]) -> int:
    """Return the number of ranks of the largest group: the size of the collective."""
    return max(map(len, groups)) if groups else axis_size(axes)


def _of_device(table: np.ndarray, axes: tuple[str, ...]) -> Any:
    """Return this device's entry of a table by positions along the axes: an int32 scalar."""
    return getitem(table, bind(axis_index_p, axes=axes))


def group_index(groups: AxisGroups, axes: tuple[str, ...]) -> Any:
    """Return this device's rank in its group."""
    return _of_device(ranks_by_position(groups), axes) if groups else bind(axis_index_p, axes=axes)


def group_sizes(groups: AxisGroups, axes: tuple[str, ...]) -> Any:
    """Return the number of ranks of this device's group."""
    return _of_device(np.array([len(groups[group]) for group, _ in _places(groups)], np.int32), axes)


def peers(groups: AxisGroups, axes: tuple[str, ...]) -> Any:
    """Return, by positions along the axes, True for the devices of this device's group."""
    numbers = np.array([number for number, _ in _places(groups)], np.int32)
    return numbers == _of_device(numbers, axes)


def ranks_by_position(groups: AxisGroups) -> np.ndarray:
    """Return each device's rank in its group, by positions along the axes."""
    return np.array([rank for _, rank in _places(groups)], np.int32)


def _places(groups: AxisGroups) -> list[tuple[int, int]]:
    """Return (group, rank in it) by position."""
    found = {place: (number, rank) for number, group in enumerate(groups) for rank, place in enumerate(group)}
    return [found[place] for place in range(len(found))]
