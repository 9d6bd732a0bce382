"""The table of a plan's messages, as the stream interpreter reads it, and their requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...errors import FunccollError
from ...kernels.kernel_context import LIBRARY_WORD, MESSAGE, WORD
from .transit import Message

__all__ = ["MessageLibrary", "MessageTable"]


class MessageLibrary(Protocol):
    """The interface of a message-passing library to plans."""

    words: np.ndarray
    """The table about it: `kernels.kernel_context.LibraryRecord`."""
    piece_bytes: int
    """The size in bytes of messages that travel fastest, if a larger message can be cut."""
    allows_threads: bool
    """True if several threads may call it at the same time."""

    def datatype(self, nbytes: int, rows: int, stride: int) -> tuple[int, int]:
        """Return (count, handle of the datatype) of rows of bytes."""
        ...

    def requests(self, count: int) -> np.ndarray:
        """Return handles of this many inactive requests."""
        ...

    def error_text(self, code: int) -> str:
        """Return the library's words for an error code."""
        ...


class MessageTable:
    """The messages of one plan: their rows and requests. The words of a context point to them."""

    rows: np.ndarray | None = None
    """A row for each message, as kernels read it; None without messages."""

    def __init__(self, messages: Sequence[Message], library: MessageLibrary | None, context: np.ndarray):
        if not messages:
            return
        assert library is not None, "ranks of several hosts have a library that passes messages"
        self._library, rows = library, np.zeros((len(messages), MESSAGE.size // 8), np.int64)
        for row, m in zip(rows, messages, strict=True):
            function = LIBRARY_WORD.isend if m.sends else LIBRARY_WORD.irecv
            row[:7] = function, m.slot, m.offset, *library.datatype(m.nbytes, m.rows, m.stride), m.peer, m.hash
        self.rows, self._requests = rows, library.requests(len(messages))
        self._words = library.words.copy()  # a flag and a status for each plan: other threads test messages of theirs
        tables = ((WORD.messages, rows), (WORD.requests, self._requests), (WORD.library, self._words))
        for word, table in tables:
            context[word] = table.ctypes.data

    def fault(self, name: str, words: Sequence[int]) -> FunccollError:
        """The error for a message that the library rejects."""
        what = self._library.error_text(int(words[WORD.library_error]))
        return FunccollError(f"{name}: a message between this rank and rank {words[WORD.peer]} failed: {what}.")
