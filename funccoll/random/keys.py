"""Keys, and the words that are drawn with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.interpreter import bind
from ..errors import ShapeError
from ..ops.registry import as_traceable
from ..primitives.randomness import check_data, check_key, fold_in_p, random_bits_p, split_p
from ..tracing.trace import value_type

if TYPE_CHECKING:
    from jaxtyping import Integer, UInt64

__all__ = ["bits", "fold_in", "key", "shape_of_draw", "split", "usable"]


def key(seed: int) -> UInt64[np.ndarray, "2"]:
    """A key, uint64 of shape (2,), from an integer seed (0 to 2^128 - 1)."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 128:
        raise ShapeError(f"random.key takes an integer from 0 to 2^128 - 1, not {seed!r}.")
    return np.array([int(seed) & (1 << 64) - 1, int(seed) >> 64], np.uint64)


def split(key: UInt64[Any, "2"], num: int = 2) -> UInt64[Any, "{num} 2"]:
    """`num` new keys, shape (num, 2); unpack them: `a, b = split(key)`."""
    if isinstance(num, bool) or not isinstance(num, (int, np.integer)) or num < 0:
        raise ShapeError(f"random.split: num must be an integer, at least 0, not {num!r}.")
    return bind(split_p, usable(key), num=int(num))


def fold_in(key: UInt64[Any, "2"], data: Integer[Any, ""] | int) -> UInt64[Any, "2"]:
    """A new key from a key and an integer scalar (a step number, a device's index, ...)."""
    data = as_traceable(data)
    check_data(value_type(data))
    return bind(fold_in_p, usable(key), data)


def usable(key: Any) -> Any:
    """One key, checked: the primitives take several, for `vmap`."""
    key = as_traceable(key)
    check_key(value_type(key))
    return key


def shape_of_draw(shape: Any) -> tuple[int, ...]:
    """The shape that is asked for, as a tuple."""
    dims = (shape,) if isinstance(shape, (int, np.integer)) else shape
    if not isinstance(dims, (tuple, list)) or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in dims):
        raise ShapeError(f"random: a shape is a tuple of integers, at least 0, not {shape!r}.")
    return tuple(map(int, dims))


def bits(key: UInt64[Any, "2"], shape: int | Sequence[int] = ()) -> UInt64[Any, "..."]:
    """Uniform random 64-bit words, uint64 of `shape`."""
    return bind(random_bits_p, usable(key), shape=shape_of_draw(shape))
