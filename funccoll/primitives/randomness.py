"""Counter-based random bits: NumPy's Philox4x64-10 (Salmon et al., SC 2011).

A key is uint64[2]; `keys` is the shape of a stack of them, each of which is used alone. The top word of Philox's 256-bit
counter keeps the uses of one key apart: 0 for bits, 1 for fold_in, 2 for split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ShapeError
from ..ir import Primitive
from ..types import ArrayType, type_of
from .batch_rules import batch_all

__all__ = ["BITS", "FOLD_IN", "SPLIT", "fold_in_p", "random_bits_p", "split_p"]

_UINT64 = np.dtype(np.uint64)
BITS, FOLD_IN, SPLIT = 0, 1, 2
"""The purposes of a key: the top words of the counter."""


def _words(key: np.ndarray, count: int, purpose: int, number: int = 0) -> np.ndarray:
    return np.random.Philox(counter=np.array([0, 0, number, purpose], np.uint64), key=key).random_raw(count)


def _of_each(keys: tuple[int, ...], shape: tuple[int, ...], words: Callable[[tuple[int, ...]], np.ndarray]) -> np.ndarray:
    """The words of each key of a stack, by its position."""
    if not keys:
        return words(()).reshape(shape)
    out = np.empty((*keys, math.prod(shape)), np.uint64)
    for position in np.ndindex(keys):
        out[position] = words(position)
    return out.reshape((*keys, *shape))


def _check_key(key: ArrayType, keys: tuple[int, ...]) -> None:
    if key.shape != (*keys, 2) or key.dtype != _UINT64:
        raise ShapeError(f"a random key has type u64[2], not {key}: make one with fc.random.key(seed).")


def _batch_keys(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, **params: Any) -> Any:
    return batch_all(primitive, values, batched, size, **params | {"keys": (size, *params.get("keys", ()))})


# ---------------------------------------------------------------- bits


def _infer_bits(key: ArrayType, *, shape: tuple[int, ...], keys: tuple[int, ...] = ()) -> list[ArrayType]:
    _check_key(key, keys)
    return [ArrayType((*keys, *shape), _UINT64)]


def _bits(key: np.ndarray, *, shape: tuple[int, ...], keys: tuple[int, ...] = ()) -> np.ndarray:
    _check_key(type_of(key), keys)  # outside a trace no type rule ran
    return _of_each(keys, shape, lambda i: _words(key[i], math.prod(shape), BITS))


random_bits_p = Primitive("random_bits", _infer_bits, _bits, batch=_batch_keys)


# ---------------------------------------------------------------- fold_in


def _infer_fold_in(key: ArrayType, data: ArrayType, *, keys: tuple[int, ...] = ()) -> list[ArrayType]:
    _check_key(key, keys)
    if data.shape != keys or data.dtype.kind not in "iu":
        raise ShapeError(f"random.fold_in takes an integer scalar, not {data}.")
    return [ArrayType((*keys, 2), _UINT64)]


def _fold_in(key: np.ndarray, data: np.ndarray, *, keys: tuple[int, ...] = ()) -> np.ndarray:
    _infer_fold_in(type_of(key), type_of(data), keys=keys)
    return _of_each(keys, (2,), lambda i: _words(key[i], 2, FOLD_IN, int(data[i]) & (1 << 64) - 1))


fold_in_p = Primitive("random_fold_in", _infer_fold_in, _fold_in, batch=_batch_keys)


# ---------------------------------------------------------------- split


def _infer_split(key: ArrayType, *, num: int, keys: tuple[int, ...] = ()) -> list[ArrayType]:
    _check_key(key, keys)
    return [ArrayType((*keys, num, 2), _UINT64)]


def _split(key: np.ndarray, *, num: int, keys: tuple[int, ...] = ()) -> np.ndarray:
    _check_key(type_of(key), keys)
    return _of_each(keys, (num, 2), lambda i: _words(key[i], 2 * num, SPLIT))


split_p = Primitive("random_split", _infer_split, _split, batch=_batch_keys)
