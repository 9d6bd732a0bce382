"""Modes of debugging. They change how jitted functions are compiled, so a change makes all of these look up programs again."""

from __future__ import annotations

from collections.abc import Callable

from ..config import DEBUG
from ..core.interpreter import check_eagerly
from .codegen.non_finite import NonFinite, eager_check

__all__ = ["MODES", "asked_for"]


def asked_for(word: str) -> bool:
    """True if FUNCCOLL_DEBUG, words with commas between them, has this one."""
    return word in DEBUG.read().lower().replace(" ", "").split(",")


class DebugModes:
    """The modes of this process, in all of its threads."""

    def __init__(self) -> None:
        self._non_finite: NonFinite | None = None
        self._eager = False
        self.changed: list[Callable[[], None]] = []
        """Called with every change, because fast paths do not know modes."""

    @property
    def non_finite(self) -> NonFinite | None:
        """The search for NaN and inf; None without one."""
        return self._non_finite or (NonFinite() if asked_for("nans") else None)

    def search(self, wanted: NonFinite | None) -> NonFinite | None:
        """Begin or end a search for NaN and inf; returns the previous one."""
        before, self._non_finite = self._non_finite, wanted
        check_eagerly(None if wanted is None else eager_check(wanted))
        for forget in self.changed:
            forget()
        return before

    @property
    def eager(self) -> bool:
        """True while jitted functions run each operation when it is called."""
        return self._eager

    def run_eagerly(self, wanted: bool) -> bool:
        """Begin or end eager execution; returns the previous mode."""
        before, self._eager = self._eager, wanted
        for forget in self.changed:
            forget()
        return before


MODES = DebugModes()
