"""The order that accesses to memory need: a write to a cell comes after earlier writes and reads of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

__all__ = ["AccessOrder"]

Item = TypeVar("Item", bound=Hashable)


class AccessOrder(Generic[Item]):
    """Takes items in a right order. It returns for each the earlier items that it has to follow."""

    def __init__(self) -> None:
        self._writer: dict[Hashable, Item] = {}
        self._readers: defaultdict[Hashable, list[Item]] = defaultdict(list)

    def add(self, item: Item, reads: Sequence[Hashable], writes: Sequence[Hashable]) -> list[Item]:
        """Return the items before this one that it conflicts with directly.

        Each appears once, in the order in which they came.
        """
        before = dict.fromkeys(self._writer[cell] for cell in (*reads, *writes) if cell in self._writer)
        before |= dict.fromkeys(reader for cell in writes for reader in self._readers[cell])
        before.pop(item, None)
        for cell in reads:
            self._readers[cell].append(item)
        for cell in writes:
            self._writer[cell], self._readers[cell] = item, []
        return list(before)
