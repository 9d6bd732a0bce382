"""Counter-based random words, NumPy's Philox4x64-10 (Salmon et al., SC 2011), and draws that take an unknown number of them.

A key is uint64[2]. The top word of Philox's 256-bit counter separates the uses of one key: 0 for bits, 1 for fold_in, 2 for
split, 3 and 4 for gamma. Keys may have leading dimensions, for `vmap`. Then each key draws for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.ir import Primitive
from ..core.types import ArrayType
from ..errors import ShapeError, UnsupportedError
from .batch_rules import batch_all

__all__ = [
    "BITS",
    "FOLD_IN",
    "SPLIT",
    "check_data",
    "check_key",
    "fold_in_p",
    "log_gamma_p",
    "random_bits_p",
    "random_order_p",
    "split_p",
]

_UINT64 = np.dtype(np.uint64)
BITS, FOLD_IN, SPLIT, _GAMMA, _SMALL_GAMMA = range(5)
"""The purposes of a key: the top words of the counter."""


def _philox(key: np.ndarray, purpose: int, number: int = 0) -> np.random.Philox:
    return np.random.Philox(counter=np.array([0, 0, number, purpose], np.uint64), key=key)


def _words(key: np.ndarray, count: int, purpose: int, number: int = 0) -> np.ndarray:
    return _philox(key, purpose, number).random_raw(count)


def check_key(key: ArrayType) -> None:
    """Raise ShapeError unless it is the type of one key."""
    if key.shape != (2,) or key.dtype != _UINT64:
        raise ShapeError(f"a random key has type u64[2], not {key}: make one with fc.random.key(seed).")


def check_data(data: ArrayType) -> None:
    """Raise ShapeError unless it is a type that can be folded into one key."""
    if data.shape or data.dtype.kind not in "iu":
        raise ShapeError(f"random.fold_in takes an integer scalar, not {data}.")


def _each(key: np.ndarray, draw: Callable[..., np.ndarray], shape: Sequence[int], *data: np.ndarray) -> np.ndarray:
    """Stack `draw(key, *data)` for each key. Each result has this shape."""
    if key.ndim == 1:
        return draw(key, *data).reshape(shape)
    lead = key.shape[:-1]
    flat = [x.reshape(-1, *x.shape[len(lead) :]) for x in (key, *data)]
    drawn = [draw(*each).reshape(shape) for each in zip(*flat, strict=True)]
    if drawn:
        dtype = drawn[0].dtype
    else:
        dtype = data[0].dtype if data and data[0].dtype.kind == "f" else _UINT64
    return np.array(drawn, dtype).reshape(*lead, *shape)


def _infer_bits(key: ArrayType, *, shape: tuple[int, ...]) -> list[ArrayType]:
    return [ArrayType((*key.shape[:-1], *shape), _UINT64)]


def _bits(key: np.ndarray, *, shape: tuple[int, ...]) -> np.ndarray:
    return _each(key, lambda key: _words(key, math.prod(shape), BITS), shape)


random_bits_p = Primitive("random_bits", _infer_bits, _bits, batch=batch_all)


def _infer_fold_in(key: ArrayType, data: ArrayType) -> list[ArrayType]:
    return [key]


def _fold_in(key: np.ndarray, data: np.ndarray) -> np.ndarray:
    return _each(key, lambda key, data: _words(key, 2, FOLD_IN, int(data) & (1 << 64) - 1), (2,), data)


fold_in_p = Primitive("random_fold_in", _infer_fold_in, _fold_in, batch=batch_all)


def _infer_split(key: ArrayType, *, num: int) -> list[ArrayType]:
    return [ArrayType((*key.shape[:-1], num, 2), _UINT64)]


def _split(key: np.ndarray, *, num: int) -> np.ndarray:
    return _each(key, lambda key: _words(key, 2 * num, SPLIT), (num, 2))


split_p = Primitive("random_split", _infer_split, _split, batch=batch_all)


def _infer_order(values: ArrayType) -> list[ArrayType]:
    return [ArrayType(values.shape, np.dtype(np.int64))]


random_order_p = Primitive(
    "random_order", _infer_order, lambda values: np.argsort(values, axis=-1, kind="stable"), batch=batch_all
)
"""The order of values along the last dimension. For random words it is a random order."""


def _infer_log_gamma(key: ArrayType, a: ArrayType) -> list[ArrayType]:
    return [a]


def _unit(words: np.ndarray) -> np.ndarray:
    """Return words as float64 in (0, 1]."""
    return 1 - (words >> np.uint64(11)) * 2.0**-53


def _log_gamma(key: np.ndarray, a: np.ndarray) -> np.ndarray:
    return _each(key, _draw_log_gamma, a.shape[key.ndim - 1 :], a)


def _draw_log_gamma(key: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Draw logarithms of gamma variates of shape `a` (float64). At most one in 20 is rejected, and draws more words.

    Source: Marsaglia and Tsang, "A simple method for generating gamma variables", 2000.
    """
    a = a.reshape(-1)
    d = np.where(a < 1, a + 1, a) - 1 / 3
    out = np.where(a == 0, -np.inf, np.where(a == np.inf, np.inf, np.nan))
    left = np.flatnonzero((a > 0) & (a < np.inf))
    stream = _philox(key, _GAMMA)
    with np.errstate(all="ignore"):
        while left.size:
            u, radius, angle = _unit(stream.random_raw(3 * left.size).reshape(3, -1))
            x = np.sqrt(-2 * np.log(radius)) * np.cos(2 * math.pi * angle)  # Box and Muller's normal variate
            scale = d[left]
            v = (1 + x / np.sqrt(9 * scale)) ** 3
            log_v = np.log(v)  # NaN below 0, which accepts nothing
            accepted = np.log(u) < 0.5 * x * x + scale * (1 - v + log_v)
            out[left[accepted]] = np.log(scale[accepted]) + log_v[accepted]
            left = left[~accepted]
        if (a < 1).any():  # gamma(a) = gamma(a + 1) u ** (1 / a)
            u = _unit(_words(key, a.size, _SMALL_GAMMA))
            out = np.where((a > 0) & (a < 1), out + np.log(u) / a, out)
    return out


def _log_gamma_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    def refused() -> Any:
        raise UnsupportedError(
            "random.gamma, beta and dirichlet have no gradient in their parameters, because samples are accepted or rejected. "
            "Use fc.stop_gradient(a) if the gradient does not matter, or the gradient of the density's logarithm."
        )

    return [None, refused]


log_gamma_p = Primitive("random_log_gamma", _infer_log_gamma, _log_gamma, _log_gamma_vjp, batch=batch_all)
