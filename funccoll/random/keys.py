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
    """Make a key from a seed.

    Args:
        seed: An integer from 0 to 2^128 - 1.

    Returns:
        A key: a uint64 array of shape (2,).

    Raises:
        ShapeError: If `seed` is not such an integer.

    Example:
        >>> print(fc.random.key(7))
        [7 0]
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 128:
        raise ShapeError(f"random.key takes an integer from 0 to 2^128 - 1, not {seed!r}.")
    return np.array([int(seed) & (1 << 64) - 1, int(seed) >> 64], np.uint64)


def split(key: UInt64[Any, "2"], num: int = 2) -> UInt64[Any, "{num} 2"]:
    """Make new keys from a key. Do not use the old one again.

    Args:
        key: A key.
        num: The number of new keys, known while tracing.

    Returns:
        A uint64 array of shape (num, 2). Unpack it to get the keys.

    Raises:
        ShapeError: If `num` is not an integer of at least 0.

    Example:
        >>> a, b = fc.random.split(fc.random.key(0))
        >>> print(fc.random.normal(a, (2,)).round(3), fc.random.normal(b, (2,)).round(3))
        [-1.225 -0.167] [-1.336  0.981]
    """
    if isinstance(num, bool) or not isinstance(num, (int, np.integer)) or num < 0:
        raise ShapeError(f"random.split: num must be an integer, at least 0, not {num!r}.")
    return bind(split_p, usable(key), num=int(num))


def fold_in(key: UInt64[Any, "2"], data: Integer[Any, ""] | int) -> UInt64[Any, "2"]:
    """Make a new key from a key and an integer, such as a step number or a device's index.

    Args:
        key: A key.
        data: An integer scalar, traced or not.

    Returns:
        A key of shape (2,).

    Raises:
        ShapeError: If `data` is not an integer scalar.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> draw = lambda key: fc.random.uniform(fc.random.fold_in(key, fc.axis_index("data")), (1,))
        >>> print(fc.jit(draw, mesh=mesh, out_specs=P("data"))(fc.random.key(0)).shape)
        (2,)
    """
    data = as_traceable(data)
    check_data(value_type(data))
    return bind(fold_in_p, usable(key), data)


def usable(key: Any) -> Any:
    """Check one key and return it. The primitives take several keys, for `vmap`."""
    key = as_traceable(key)
    check_key(value_type(key))
    return key


def shape_of_draw(shape: Any) -> tuple[int, ...]:
    """Return the shape you ask for, as a tuple."""
    dims = (shape,) if isinstance(shape, (int, np.integer)) else shape
    if not isinstance(dims, (tuple, list)) or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in dims):
        raise ShapeError(f"random: a shape is a tuple of integers, at least 0, not {shape!r}.")
    return tuple(map(int, dims))


def bits(key: UInt64[Any, "2"], shape: int | Sequence[int] = ()) -> UInt64[Any, "..."]:
    """Draw uniform random 64-bit words.

    Args:
        key: A key.
        shape: The shape of the result.

    Returns:
        A uint64 array of `shape`.

    Example:
        >>> print(fc.random.bits(fc.random.key(0), (2,)))
        [ 213000021201967259 4455796210202625458]
    """
    return bind(random_bits_p, usable(key), shape=shape_of_draw(shape))
