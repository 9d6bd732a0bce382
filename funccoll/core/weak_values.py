"""Mappings that do not keep their values alive."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Hashable, Mapping
from typing import ClassVar, Generic, TypeVar

__all__ = ["WeakValues"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_FEW = 16


class WeakValues(Generic[K, V]):
    """A mapping whose entries end with their values.

    Unlike a mapping of `weakref`, it runs no Python when a value dies. A signal handler might run there, and Python drops the
    handler's exceptions, so a Ctrl-C would be lost. Entries of dead values are removed when others are added.
    """

    lock: ClassVar = threading.RLock()
    """Held by a thread that adds an entry to any mapping."""

    def __init__(self) -> None:
        self._entries: dict[K, weakref.ref[V]] = {}
        self._most = _FEW

    def __setitem__(self, key: K, value: V) -> None:
        with WeakValues.lock:
            if len(self._entries) >= self._most:
                for each, found in list(self._entries.items()):
                    if found() is None and self._entries.get(each) is found:
                        del self._entries[each]
                self._most = 2 * len(self._entries) + _FEW
            self._entries[key] = weakref.ref(value)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        found = self._entries.get(key)
        return None if found is None else found()

    def update(self, entries: Mapping[K, V]) -> None:
        """Add entries."""
        for key, value in entries.items():
            self[key] = value

    def values(self) -> list[V]:
        """Return the values that are alive, in the order of their keys' first entries."""
        return [value for found in list(self._entries.values()) if (value := found()) is not None]

    def __len__(self) -> int:
        return len(self.values())


def _in_child() -> None:
    """Make a new lock in a forked child, because a thread that is gone may hold the old one. The entries are whole."""
    WeakValues.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
