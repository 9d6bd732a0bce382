"""A hash of a global value, by which ranks compare what each of them was given: cheap, and of a large value by samples."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

__all__ = ["value_hash"]

_WHOLE, _RUNS, _RUN = 1 << 17, 128, 64
"""Bytes up to which a value is hashed whole; of a larger one the hash reads that many runs of that many elements."""


def value_hash(value: np.ndarray) -> int:
    """A hash of an array's values in C order, at least 1. One of more than 128 KiB is read at 128 places.

    CRC-32 is enough, because ranks err and do not cheat, and takes a thirtieth of the time of blake2.
    """
    if value.nbytes > _WHOLE:
        between = _RUNS - 1
        step = (value.size - _RUN) // between
        if value.flags.c_contiguous:
            flat = value.reshape(-1)
            value = np.concatenate([flat[: between * step].reshape(between, step)[:, :_RUN], flat[None, -_RUN:]])
        else:
            starts = np.append(np.arange(between) * step, value.size - _RUN)
            value = value[np.unravel_index(starts[:, None] + np.arange(_RUN), value.shape)]
    buffer: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return zlib.crc32(buffer) or 1
