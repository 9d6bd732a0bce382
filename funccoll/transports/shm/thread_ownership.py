"""The thread of a rank to which communicators belong."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["ThreadOwnership"]


class ThreadOwnership:
    """The right to call collectives over some communicators.

    Attributes: `numbers` of the communicators; `entries`, theirs in the table of the job; `words`, one int64: the identifier of
    the thread to which all of them belong, 0 when that is not known or none may call any more.
    """

    def __init__(self, numbers: frozenset[int], entries: tuple[int, ...]):
        self.numbers, self.entries = numbers, entries
        self.words = np.zeros(1, np.int64)
        self.view: Any = memoryview(self.words)  # type: ignore[arg-type]  # (NumPy's stubs: an array is a buffer)

    @property
    def thread(self) -> int | None:
        """The thread, None where `words` has 0."""
        return self.view[0] or None

    @thread.setter
    def thread(self, identifier: int | None) -> None:
        self.view[0] = identifier or 0
