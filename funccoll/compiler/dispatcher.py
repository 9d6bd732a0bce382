"""Dispatcher: from the signature of a call to what executes it, with fast paths for repeated calls.

call -> a fast path by position -> one by tree -> a fast key -> the whole signature -> nothing: it is compiled, and kept
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.array import Array
from ..core.weak_values import WeakValues
from .debug_modes import MODES
from .fast_paths import MOST_FAST_PATHS, FastPath

if TYPE_CHECKING:
    import optree

    from .stages import Compiled

__all__ = ["Dispatcher", "clear_dispatchers"]

CACHE_SIZE = 512
"""The maximal number of executables that one jitted function keeps."""

_NUMBERS = frozenset((bool, int, float, complex))
_DISPATCHERS: WeakValues[int, Dispatcher] = WeakValues()


class Dispatcher:
    """The executables of one jitted function by the signatures of its calls, and the fast paths to programs among them.

    Reading a whole signature takes most of a call's time. So the first call of a program opens fast paths to it, for positional
    arguments. One kind is for arrays (see `fast_paths.py`), one for the leaves of one pytree. The third is a key of the leaves'
    types, for numbers and for signatures of earlier calls. Fast paths know neither debugging modes nor what is dropped: both
    close all of them.
    """

    def __init__(self, fast_paths: list[FastPath]):
        """`fast_paths`: those by position, which the jitted function tries first (see `Dispatch`)."""
        self.fast_paths = fast_paths
        self.array_types: set[type] = {Array, np.ndarray}
        """Types of arrays that have fast keys; CuPy's is added with its first call."""
        self._by_tree: list[tuple[optree.PyTreeSpec, FastPath]] = []
        self._by_fast_key: dict[tuple, Callable[[Sequence[Any]], Any]] = {}
        self._executables: dict[Hashable, Any] = {}  # the last used one is the last
        self._closings = 0
        _DISPATCHERS[id(self)] = self

    # ------------------------------------------------------------ the whole signature

    def find(self, signature: Hashable) -> Any:
        """Return what executes calls of a signature; None if it is not compiled yet."""
        found = self._executables.pop(signature, None)
        if found is not None:
            self._executables[signature] = found
        return found

    def keep(self, signature: Hashable, executable: Any) -> None:
        """Keep what executes calls of a signature. If there are too many, the least recently used quarter is dropped.

        Fast calls leave no record of use. So a quarter earlier, all calls go the slow way once, which moves what they use to
        the end.
        """
        if len(self._executables) >= CACHE_SIZE:
            for each in list(self._executables)[: CACHE_SIZE // 4]:
                self._executables.pop(each, None)
        if len(self._executables) == CACHE_SIZE - CACHE_SIZE // 4:
            self.close_fast_paths()
        self._executables[signature] = executable

    @property
    def executables(self) -> list[Any]:
        """All that is kept, in the order of use: a `Compiled` for each signature of calls, and the programs of gradients."""
        return list(self._executables.values())

    # ------------------------------------------------------------ fast paths

    def call_fast(self, leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> Any:
        """Call the program to which the flattened positional arguments have a fast path; NotImplemented without one."""
        for tree, fast_path in self._by_tree:
            if tree == treedef and (result := fast_path(leaves)) is not NotImplemented:
                return result
        key = self._fast_key(leaves, treedef)
        execute = self._by_fast_key.get(key) if key is not None else None
        return NotImplemented if execute is None else execute(leaves)

    def call(self, program: Compiled, args: tuple[Any, ...], leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> Any:
        """Call a program with positional arguments, also given flattened, and open fast paths to it for similar ones."""
        key = self._fast_key(leaves, treedef)  # before a donated Array gets another layout
        if key is None:
            return program.execute(leaves)
        fast_path, closings = program.fast_path(leaves), self._closings
        result = program.execute(leaves)
        if closings == self._closings:  # only after it has run: a deleted Array raises, and a callback may change a mode
            self._by_fast_key[key] = program.execute
            if fast_path is not None and {Array, np.ndarray}.issuperset(map(type, args)):
                self.fast_paths[:] = fast_path, *self.fast_paths[: MOST_FAST_PATHS - 1]
            elif fast_path is not None:
                self._by_tree[:] = (treedef, fast_path), *self._by_tree[: MOST_FAST_PATHS - 1]
        return result

    def _fast_key(self, leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> tuple | None:
        """Return the fast key of leaves that are Arrays, NumPy or CuPy arrays, and numbers, also NumPy's; None for others."""
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

    def close_fast_paths(self) -> None:
        """Make all calls use their whole signature once more."""
        self._closings += 1
        self.fast_paths.clear()
        self._by_tree.clear()
        self._by_fast_key.clear()

    def clear(self) -> None:
        """Drop everything, and thus the memory that programs use between calls."""
        self._executables.clear()
        self.close_fast_paths()


def clear_dispatchers() -> None:
    """Drop what all jitted functions have compiled."""
    for dispatcher in _DISPATCHERS.values():
        dispatcher.clear()


def _close_all_fast_paths() -> None:
    for dispatcher in _DISPATCHERS.values():
        dispatcher.close_fast_paths()


MODES.changed.append(_close_all_fast_paths)
