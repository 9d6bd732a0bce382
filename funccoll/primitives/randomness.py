"""Counter-based random bits: NumPy's Philox4x64-10 (Salmon et al., SC 2011).

A key is uint64[2]. The top word of Philox's 256-bit counter keeps the uses of one key apart: 0 for bits, 1 for
fold_in, 2 for split.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ShapeError
from ..ir import Primitive
from ..types import ArrayType, type_of

__all__ = ["BITS", "FOLD_IN", "SPLIT", "fold_in_p", "random_bits_p", "split_p"]

_UINT64 = np.dtype(np.uint64)
BITS, FOLD_IN, SPLIT = 0, 1, 2
"""The purposes of a key: the top words of the counter."""


def _words(key: Any, count: int, purpose: int, number: int = 0) -> np.ndarray:
    counter, key = np.array([0, 0, number, purpose], np.uint64), np.asarray(key)
    _check_key(type_of(key))  # outside a trace no type rule ran
    return np.random.Philox(counter=counter, key=key).random_raw(count)


def _check_key(key: ArrayType) -> None:
    if key.shape != (2,) or key.dtype != _UINT64:
        raise ShapeError(f"a random key has type u64[2], not {key}: make one with fc.random.key(seed).")


def _infer_bits(key: ArrayType, *, shape: tuple[int, ...]) -> list[ArrayType]:
    _check_key(key)
    return [ArrayType(shape, _UINT64)]


def _bits(key: np.ndarray, *, shape: tuple[int, ...]) -> np.ndarray:
    return _words(key, math.prod(shape), BITS).reshape(shape)


random_bits_p = Primitive("random_bits", _infer_bits, _bits)


def _check_data(data: ArrayType) -> None:
    if data.shape or data.dtype.kind not in "iu":
        raise ShapeError(f"random.fold_in takes an integer scalar, not {data}.")


def _infer_fold_in(key: ArrayType, data: ArrayType) -> list[ArrayType]:
    _check_key(key)
    _check_data(data)
    return [ArrayType((2,), _UINT64)]


def _fold_in(key: np.ndarray, data: np.ndarray) -> np.ndarray:
    _check_data(type_of(data))
    return _words(key, 2, FOLD_IN, int(data) & (1 << 64) - 1)


fold_in_p = Primitive("random_fold_in", _infer_fold_in, _fold_in)


def _infer_split(key: ArrayType, *, num: int) -> list[ArrayType]:
    _check_key(key)
    return [ArrayType((num, 2), _UINT64)]


split_p = Primitive("random_split", _infer_split, lambda key, *, num: _words(key, 2 * num, SPLIT).reshape(num, 2))
