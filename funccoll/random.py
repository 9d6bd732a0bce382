"""Counter-based randomness: pure functions of a key, the same values on any number of processes.

    key = fc.random.key(0)
    first, second = fc.random.split(key)
    x = fc.random.normal(first, (4, 8))
    mine = fc.random.fold_in(key, fc.axis_index("data"))     # different on each device, inside a traced function

A key (uint64, shape (2,)) is used once; split it or fold numbers into it for more. Source: Philox4x64-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), NumPy's implementation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DTypeError, ShapeError
from .ir import bind
from .ops.registry import as_traceable
from .primitives.elementwise import broadcast_shapes
from .primitives.randomness import fold_in_p, random_bits_p, split_p
from .types import bfloat16

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Integer, UInt64

__all__ = ["bernoulli", "bits", "fold_in", "key", "normal", "split", "uniform"]


def key(seed: int) -> UInt64[np.ndarray, "2"]:
    """A key, uint64 of shape (2,), from an integer seed (0 to 2^128 - 1)."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 128:
        raise ShapeError(f"random.key takes an integer from 0 to 2^128 - 1, not {seed!r}.")
    return np.array([int(seed) & (1 << 64) - 1, int(seed) >> 64], np.uint64)


def split(key: UInt64[Any, "2"], num: int = 2) -> UInt64[Any, "{num} 2"]:
    """`num` new keys, shape (num, 2); unpack them: `a, b = split(key)`."""
    if isinstance(num, bool) or not isinstance(num, (int, np.integer)) or num < 0:
        raise ShapeError(f"random.split: num must be an integer, at least 0, not {num!r}.")
    return bind(split_p, as_traceable(key), num=int(num))


def fold_in(key: UInt64[Any, "2"], data: Integer[Any, ""] | int) -> UInt64[Any, "2"]:
    """A new key from a key and an integer scalar (a step number, a device's index, ...)."""
    return bind(fold_in_p, as_traceable(key), as_traceable(data))


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    dims = (shape,) if isinstance(shape, (int, np.integer)) else shape
    if not isinstance(dims, (tuple, list)) or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in dims):
        raise ShapeError(f"random: a shape is a tuple of integers, at least 0, not {shape!r}.")
    return tuple(map(int, dims))


def bits(key: UInt64[Any, "2"], shape: int | Sequence[int] = ()) -> UInt64[Any, "..."]:
    """Uniform random 64-bit words, uint64 of `shape`."""
    return bind(random_bits_p, as_traceable(key), shape=_shape(shape))


# Binary digits of each float: a multiple of 2^-digits below 1 is not rounded up to 1.
_DIGITS = {np.dtype(np.float64): 53, np.dtype(np.float32): 24, np.dtype(np.float16): 11, bfloat16: 8}


def _unit(words: Any, dtype: np.dtype, digits: int) -> Any:
    """Words as floats in [0, 1), every value a multiple of 2^-digits."""
    return (words >> np.uint64(64 - digits)).astype(dtype) * np.asarray(2.0**-digits, dtype)


def _float(dtype: Any) -> tuple[np.dtype, np.dtype]:
    """(dtype to compute in, dtype of the result)."""
    asked = np.dtype(dtype)
    if asked not in _DIGITS:
        raise DTypeError(f"random: dtype must be a real float, not {asked}.")
    return (np.dtype(np.float64) if asked == np.float64 else np.dtype(np.float32)), asked


def uniform(
    key: UInt64[Any, "2"],
    shape: int | Sequence[int] = (),
    dtype: Any = np.float32,
    minval: Any = 0.0,
    maxval: Any = 1.0,
) -> Float[Any, "..."]:
    """Uniform floats in [minval, maxval), of `shape` and `dtype`."""
    compute, asked = _float(dtype)
    unit = _unit(bits(key, shape), compute, _DIGITS[asked])
    if type(minval) is float and type(maxval) is float and (minval, maxval) == (0.0, 1.0):
        return unit.astype(asked)
    low, high = as_traceable(minval).astype(compute), as_traceable(maxval).astype(compute)
    out, low, high = ((unit * (high - low) + low).astype(asked), low.astype(asked), high.astype(asked))
    return np.where(out < high, out, low)  # the sum can round up to maxval


def normal(
    key: UInt64[Any, "2"], shape: int | Sequence[int] = (), dtype: Any = np.float32
) -> Float[Any, "..."]:
    """Standard normal floats of `shape` and `dtype`. Source: Box and Muller, 1958."""
    compute, asked = _float(dtype)
    words = bits(key, (2, *_shape(shape)))
    digits = _DIGITS[compute]
    radius = np.sqrt(-2 * np.log(1 - _unit(words[0], compute, digits)))  # 1 - u is in (0, 1]
    angle = np.asarray(2 * math.pi, compute) * _unit(words[1], compute, digits)
    return (radius * np.cos(angle)).astype(asked)


def bernoulli(
    key: UInt64[Any, "2"], p: Any = 0.5, shape: int | Sequence[int] | None = None
) -> Bool[Any, "..."]:
    """Booleans that are True with probability `p`; `shape` defaults to p's, which must broadcast to it."""
    p = as_traceable(p)
    shape = tuple(p.shape) if shape is None else _shape(shape)
    if broadcast_shapes("random.bernoulli", [tuple(p.shape), shape]) != shape:
        raise ShapeError(f"random.bernoulli: p of shape {tuple(p.shape)} does not broadcast to shape {shape}.")
    return uniform(key, shape) < p
