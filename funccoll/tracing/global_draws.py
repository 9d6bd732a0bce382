"""Draws from NumPy's global random state while a function is traced: their numbers are constants of the program.

`np.random.normal()` in a traced function runs once, so every call gets the same numbers. A draw does not call funccoll, but it
moves the state. The state is compared whenever an array or a number from outside enters the program. Draws of generators
(`np.random.default_rng`), of Python's `random`, and readings of clocks leave no mark there. Nor does a normal number that NumPy
kept from the draw before.
"""

from __future__ import annotations

import ctypes
import threading
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..errors import Source, traced_source, warn_at

__all__ = ["GlobalRandomWarning", "note_constant", "watched_draws"]

_STATE = 624 * 4 + 4
"""Bytes of the Mersenne twister's state in memory: its words, and the position in them."""


class GlobalRandomWarning(UserWarning):
    """A traced function drew from NumPy's global random state, once for each jitted function that does it.

    The numbers are drawn while tracing, and every call uses the same ones. Use `fc.random` with a key that you pass as an
    argument.
    """


class watched_draws:
    """Context manager: warns once of draws inside, while a function of this name is traced; `found` says whether it did.

    The warning points at the line that uses the numbers, if there is one. Otherwise it points at `source`, as for
    `if np.random.rand() < 0.5:`.
    """

    __slots__ = ("found", "memory", "name", "seen", "source", "token")

    def __init__(self, name: str, source: Source | None):
        self.name, self.source, self.found = name, source, False
        numpy_random: Any = np.random  # (NumPy's stubs do not know get_bit_generator)
        generator = numpy_random.get_bit_generator()
        known = isinstance(generator, np.random.MT19937)  # another generator, set by the user, has other bytes
        self.memory = (ctypes.c_char * (_STATE if known else 0)).from_address(generator.ctypes.state_address)
        self.seen = self.memory.raw  # in 0.1 us; np.random.get_state takes 70

    def __enter__(self) -> watched_draws:
        self.token = _WATCHED.set(self)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _WATCHED.reset(self.token)
        if error is None and self.has_moved:
            self.warn(self.source)

    @property
    def has_moved(self) -> bool:
        """True if a draw came since the state was last read, in a function that is not known to draw."""
        return not self.found and self.memory.raw != self.seen

    def warn(self, source: Source | None) -> None:
        """Warn at this line."""
        self.found = True
        other = " (or another thread does)" if threading.active_count() > 1 else ""
        warn_at(
            source,
            GlobalRandomWarning,
            f"{self.name} draws from NumPy's global random state (np.random) while it is traced{other}: the numbers become "
            "constants, the same in every call. Pass a key, and draw with fc.random.normal(key, shape) and the like, or draw "
            "outside and pass the numbers as an argument.",
        )


_WATCHED: ContextVar[watched_draws | None] = ContextVar("funccoll_watched_draws", default=None)


def note_constant() -> None:
    """Warn if NumPy's global random state has moved, when a value from outside enters a program."""
    watched = _WATCHED.get()
    if watched is not None and watched.has_moved:
        watched.warn(traced_source())
