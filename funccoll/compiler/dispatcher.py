"""Dispatcher: from the signature of a call to what executes it, with quick ways for calls like those before.

    call -> a caller by position -> a caller by tree -> a quick key -> the whole signature -> nothing: it is compiled, and kept
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.array import Array
from ..core.weak_values import WeakValues
from .callers import MOST_CALLERS, Caller
from .debug_modes import MODES

if TYPE_CHECKING:
    import optree

    from .stages import Compiled

__all__ = ["Dispatcher", "clear_dispatchers"]

CACHE_SIZE = 512
"""The most executables that one jitted function keeps."""

_NUMBERS = frozenset((bool, int, float, complex))
_DISPATCHERS: WeakValues[int, Dispatcher] = WeakValues()


class Dispatcher:
    """The executables of one jitted function by the signatures of its calls, and the quick ways to programs among them.

    To read a whole signature takes most of a call's time. So the first call of a program opens quick ways to it, for
    positional arguments: a caller of arrays (see `callers.py`), or of the leaves of one pytree; and a key of the leaves'
    types, which numbers have as well, and signatures that were met longer ago. Quick ways know nothing of debugging modes
    nor of what is dropped: both close all of them.
    """

    def __init__(self, callers: list[Caller]):
        """`callers`: those by position, which the jitted function tries before anything else (see `Dispatch`)."""
        self.callers = callers
        self.array_types: set[type] = {Array, np.ndarray}
        """Types of arrays that have quick keys; CuPy's is added when it is met."""
        self._by_tree: list[tuple[optree.PyTreeSpec, Caller]] = []
        self._by_quick_key: dict[tuple, Callable[[Sequence[Any]], Any]] = {}
        self._executables: dict[Hashable, Any] = {}  # what was used last stands last
        self._closings = 0
        _DISPATCHERS[id(self)] = self

    # ------------------------------------------------------------ the whole signature

    def find(self, signature: Hashable) -> Any:
        """Return what executes calls of a signature; None where it is not compiled yet."""
        found = self._executables.pop(signature, None)
        if found is not None:
            self._executables[signature] = found
        return found

    def keep(self, signature: Hashable, executable: Any) -> None:
        """Keep what executes calls of a signature. When there are too many, the quarter used longest ago is dropped.

        Quick calls leave no mark. So a quarter earlier all calls are made to go the slow way once, which moves what they
        use to the end.
        """
        if len(self._executables) >= CACHE_SIZE:
            for each in list(self._executables)[: CACHE_SIZE // 4]:
                self._executables.pop(each, None)
        if len(self._executables) == CACHE_SIZE - CACHE_SIZE // 4:
            self.close_quick_ways()
        self._executables[signature] = executable

    @property
    def executables(self) -> list[Any]:
        """All that is kept, in the order of use: a `Compiled` for each signature of calls, and what gradients call."""
        return list(self._executables.values())

    # ------------------------------------------------------------ quick ways

    def call_quickly(self, leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> Any:
        """Call the program to which the flattened positional arguments have a quick way; NotImplemented without one."""
        for tree, caller in self._by_tree:
            if tree == treedef and (result := caller(leaves)) is not NotImplemented:
                return result
        key = self._quick_key(leaves, treedef)
        execute = self._by_quick_key.get(key) if key is not None else None
        return NotImplemented if execute is None else execute(leaves)

    def call(self, program: Compiled, args: tuple[Any, ...], leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> Any:
        """Call a program with positional arguments, given flattened as well, and open quick ways to it for others alike."""
        key = self._quick_key(leaves, treedef)  # before a donated Array gets another layout
        if key is None:
            return program.execute(leaves)
        caller, closings = program.caller(leaves), self._closings
        result = program.execute(leaves)
        if closings == self._closings:  # only after it has run: a deleted Array raises, and a callback may change a mode
            self._by_quick_key[key] = program.execute
            if caller is not None and {Array, np.ndarray}.issuperset(map(type, args)):
                self.callers[:] = caller, *self.callers[: MOST_CALLERS - 1]
            elif caller is not None:
                self._by_tree[:] = (treedef, caller), *self._by_tree[: MOST_CALLERS - 1]
        return result

    def _quick_key(self, leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> tuple | None:
        """The quick key of leaves that are Arrays, NumPy or CuPy arrays, and numbers, also NumPy's; None for others."""
        key: list[Any] = [treedef]
        array_types = self.array_types
        for leaf in leaves:
            kind = type(leaf)
            if kind is Array:
                key.append(leaf.layout)
            elif kind in array_types:
                key.append((kind, leaf.shape, leaf.dtype))
            elif kind in _NUMBERS and (kind is not int or -(1 << 63) <= leaf < 1 << 63):
                key.append(kind)
            elif issubclass(kind, np.generic):
                key.append((kind, leaf.dtype))
            else:
                return None
        return tuple(key)

    # ------------------------------------------------------------ what is forgotten

    def close_quick_ways(self) -> None:
        """Make all calls go by their whole signature once more."""
        self._closings += 1
        self.callers.clear()
        self._by_tree.clear()
        self._by_quick_key.clear()

    def clear(self) -> None:
        """Drop everything, and with it the memory that programs use between calls."""
        self._executables.clear()
        self.close_quick_ways()


def clear_dispatchers() -> None:
    """Drop what all jitted functions have compiled."""
    for dispatcher in _DISPATCHERS.values():
        dispatcher.clear()


def _close_all_quick_ways() -> None:
    for dispatcher in _DISPATCHERS.values():
        dispatcher.close_quick_ways()


MODES.changed.append(_close_all_quick_ways)
