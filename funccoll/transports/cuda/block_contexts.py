"""The contexts of a launch's blocks, with their code, in the memory of the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels.kernel_context import WORD

if TYPE_CHECKING:
    from .virtual_devices import Gpu

__all__ = ["block_contexts"]

_SPINS = 1 << 10
"""Tries of a wait before the failure word is read."""
_OWN_WORDS = 4
"""Words of a block behind the contexts: its base, its sequence hash, and two of contention."""


def block_contexts(gpu: Gpu, codes: Sequence[np.ndarray], words: Mapping[int, int | Sequence[int]]) -> Any:
    """A new array of int64 that begins with the contexts of blocks with this code.

    `words` gives words of the context, by number: one value for all blocks, or one for each.
    """
    # In a row: every block's context, its own words, its code.
    count = len(codes)
    starts = np.cumsum([count * (WORD.size + _OWN_WORDS), *map(len, codes)])
    array = gpu.allocate((int(starts[-1]),), np.dtype(np.int64))
    at, values = gpu.address(array), np.zeros(int(starts[-1]), np.int64)
    contexts = values[: count * WORD.size].reshape(count, WORD.size)
    own = at + 8 * (count * WORD.size + _OWN_WORDS * np.arange(count))
    contexts[:, WORD.code], contexts[:, WORD.code_words] = at + 8 * starts[:-1], [len(code) for code in codes]
    contexts[:, WORD.bases], contexts[:, WORD.sequence_hashes], contexts[:, WORD.contention] = own, own + 8, own + 16
    contexts[:, WORD.spins], contexts[:, WORD.instruction_budget] = _SPINS, -1
    for word, value in words.items():
        contexts[:, word] = value
    values[starts[0] :] = np.concatenate(codes)
    gpu.upload(array, values)
    return array
