"""Pauses of Python's search for cycles of objects, during tracing and compiling."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_garbage_collection"]


class _Pause:
    """The pause of this process. Only a pause that found the search enabled enables it again."""

    on = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """Pause the search: passes make many objects that live on, and each search would visit them all."""
        if not gc.isenabled():  # the user's choice, or another thread's pause
            yield
            return
        try:
            self.on = True
            gc.disable()
            yield
        finally:
            gc.enable()
            self.on = False

    def in_child(self) -> None:
        """End the pause in a forked child, because the thread that began it may not exist there."""
        if self.on:
            gc.enable()


_PAUSE = _Pause()
without_garbage_collection = _PAUSE.around
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_PAUSE.in_child)
