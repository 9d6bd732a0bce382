"""Checks of values that only the GPU knows, such as indices in an array. No kernel can raise an exception.

A check keeps the greatest value that it has seen in a word of the GPU's memory. When the host reads values, it compares the
words with their limits. So a value that depends on an invalid one is never read without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...errors import Source

__all__ = ["DeferredChecks"]

_CHUNK = 256
"""The number of words that are allocated, and read, at a time. Their addresses stay, because a CUDA graph may hold them."""

_GREATEST = np.iinfo(np.int64).max


class _Check(NamedTuple):
    limit: int
    describe: Callable[[int], Exception]
    source: Source | None


class DeferredChecks:
    """The checks of one GPU. `cupy` is the module."""

    def __init__(self, cupy: Any):
        self._cupy = cupy
        self._chunks: list[Any] = []
        self._checks: list[_Check] = []

    def below(self, limit: int, describe: Callable[[int], Exception], source: Source | None) -> Callable[[Any], None]:
        """Return a function that notes an array of integers. None of them may be `limit` or more.

        `describe` makes the exception for the greatest one. Noting takes three small kernels, and does not wait.
        """
        cupy, number = self._cupy, len(self._checks)
        if number % _CHUNK == 0:
            self._chunks.append(cupy.full(_CHUNK, -1, np.int64))
        word = self._chunks[-1][number % _CHUNK]
        self._checks.append(_Check(limit, describe, source))

        def note(values: Any) -> None:
            if values.dtype == np.uint64:  # beside int64, it would become a float
                values = cupy.minimum(values, np.uint64(_GREATEST)).astype(np.int64)
            cupy.maximum(word, values.max(), out=word)

        return note

    def raise_failed(self) -> None:
        """Wait for the current stream, and raise the exception of the first check that has failed since the last call."""
        for k, chunk in enumerate(self._chunks):
            first = k * _CHUNK
            for seen, check in zip(chunk.get().tolist(), self._checks[first : first + _CHUNK], strict=False):
                if seen >= check.limit:
                    for each in self._chunks:
                        each.fill(-1)
                    error = check.describe(seen)
                    if check.source is not None:
                        error.add_note(check.source.as_note)
                    raise error
