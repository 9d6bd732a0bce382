"""The thread that owns communicators of a rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import MeshError, Source

__all__ = ["ThreadOwnership", "freed_mesh"]


def freed_mesh(source: Source | None = None) -> MeshError:
    """Return the error of a use of a mesh whose group was freed."""
    return MeshError("the group of this mesh was freed. Make another one with fc.group, and a mesh of it.", source)


class ThreadOwnership:
    """The right to call collectives over some communicators.

    Attributes: `numbers` of the communicators; `entries`, their entries in the table of the job; `words`, one int64 with the
    identifier of the thread that owns them all. It is 0 if that is unknown, or if no thread may call any more.
    """

    def __init__(self, numbers: frozenset[int], entries: tuple[int, ...]):
        self.numbers, self.entries = numbers, entries
        self.words = np.zeros(1, np.int64)
        self.has_ended = False
        """True once the communicators were freed."""
        self.view: Any = memoryview(self.words)  # type: ignore[arg-type]  # (NumPy's stubs: an array is a buffer)

    @property
    def thread(self) -> int | None:
        """The thread, or None if `words` has 0."""
        return self.view[0] or None

    @thread.setter
    def thread(self, identifier: int | None) -> None:
        self.view[0] = identifier or 0

    def end(self) -> None:
        """Free the communicators: no thread may call any more."""
        self.has_ended, self.thread = True, None
