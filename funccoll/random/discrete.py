"""Integers, categories and orders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.interpreter import bind
from ..errors import DTypeError, ShapeError
from ..ops.registry import as_traceable, is_traced, normalize_dim
from ..primitives.indexing import getitem_p
from ..primitives.randomness import random_order_p
from .continuous import broadcast_draw, gumbel, uniform
from .keys import bits, shape_of_draw

if TYPE_CHECKING:
    from jaxtyping import Bool, Integer, Shaped, UInt64

__all__ = ["bernoulli", "categorical", "choice", "permutation", "randint", "shuffle"]

Shape = int | Sequence[int]


def bernoulli(key: UInt64[Any, "2"], p: Any = 0.5, shape: Shape | None = None) -> Bool[Any, "..."]:
    """Booleans that are True with probability `p`; `shape` defaults to p's, which must broadcast to it.

    A `p` outside of [0, 1] is an error where it is known.
    """
    p = as_traceable(p)
    if not is_traced(p) and not np.all((p >= 0) & (p <= 1)):
        raise ShapeError(f"random.bernoulli: p={p} is not a probability: it must be from 0 to 1.")
    return uniform(key, broadcast_draw("bernoulli", shape, p=p)) < p


def randint(key: UInt64[Any, "2"], shape: Shape, minval: Any, maxval: Any, dtype: Any = np.int64) -> Integer[Any, "..."]:
    """Uniform integers from `minval` to `maxval` - 1, of `shape` and `dtype`. Bounds are integers, and may be arrays.

    128 random bits for each: a value's probability is off by less than one part in 2^64, whatever the range. Bounds that leave
    no integer, or do not fit into the dtype, are an error where they are known; of others the result is not defined.
    """
    shape, asked = shape_of_draw(shape), np.dtype(dtype)
    if asked.kind not in "iu":
        raise DTypeError(f"random.randint: dtype must be an integer, not {asked}.")
    low, high = (as_traceable(x) for x in (minval, maxval))
    if low.dtype.kind not in "iu" or high.dtype.kind not in "iu":
        raise DTypeError(f"random.randint: minval and maxval have dtypes {low.dtype} and {high.dtype}; they must be integers.")
    if not is_traced(low) and not is_traced(high):
        limits = np.iinfo(asked)
        if not np.all(low < high) or np.min(low, initial=0) < limits.min or np.max(high, initial=0) - 1 > limits.max:
            raise ShapeError(
                f"random.randint: minval={minval} and maxval={maxval}: each minval must be less than its maxval, and the "
                f"integers from minval to maxval - 1 must fit into {asked}."
            )
    broadcast_draw("randint", shape, minval=low, maxval=high)
    # All modulo 2^64, in vectors: NumPy warns of single numbers that wrap around.
    low, high = (np.reshape(np.broadcast_to(x.astype(np.uint64), shape), -1) for x in (low, high))
    first, second = bits(key, (2, math.prod(shape)))
    count = high - low  # 0 for all words
    offset = np.where(count == 0, first, _scaled(first, second, count))
    return np.reshape((low + offset).astype(asked), shape)


_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def _product(x: Any, y: Any) -> tuple[Any, Any]:
    """(upper, lower word) of the product of words."""
    (a, b), (c, d) = ((v >> _HALF, v & _LOW) for v in (x, y))
    low, left, right = b * d, a * d, b * c
    middle = (low >> _HALF) + (left & _LOW) + (right & _LOW)
    return a * c + (left >> _HALF) + (right >> _HALF) + (middle >> _HALF), (middle << _HALF) | (low & _LOW)


def _scaled(first: Any, second: Any, count: Any) -> Any:
    """⌊count · w / 2^128⌋ of numbers w of two words."""
    (upper, lower), (below, _) = _product(first, count), _product(second, count)
    return upper + (lower > ~below).astype(np.uint64)


def categorical(key: UInt64[Any, "2"], logits: Any, axis: int = -1, shape: Shape | None = None) -> Integer[Any, "..."]:
    """Categories (int64) drawn with probabilities softmax(logits) along `axis`. A logit of -inf excludes a category.

    `shape` defaults to that of the logits without `axis`, which must broadcast to it. The largest sum of a logit and a Gumbel
    variate, in float64.
    """
    logits = np.moveaxis(as_traceable(logits), axis, -1).astype(np.float64)
    if not logits.shape[-1]:
        raise ShapeError(f"random.categorical: logits of shape {tuple(logits.shape)} have no category along axis {axis}.")
    shape = broadcast_draw("categorical", shape, logits=logits[..., 0])
    return np.argmax(logits + gumbel(key, (*shape, logits.shape[-1]), np.float64), axis=-1)


def permutation(key: UInt64[Any, "2"], x: Any, axis: int = 0) -> Shaped[Any, "..."]:
    """The integers from 0 to x - 1 in random order (int64), or an array's parts along `axis`.

    By sorting random 64-bit words: all orders are equally likely, but for words that are equal (n² / 2^65).
    """
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        if x < 0:
            raise ShapeError(f"random.permutation: x={x} must be at least 0, or an array.")
        return bind(random_order_p, bits(key, int(x)))
    x = as_traceable(x)
    if not x.ndim:
        raise ShapeError(f"random.permutation: x has type {x.dtype} and no dimension; it must be a known integer, or an array.")
    axis = normalize_dim(axis, x.ndim)
    return _taken(x, permutation(key, x.shape[axis]), axis)


def shuffle(key: UInt64[Any, "2"], x: Any, axis: int = 0) -> Shaped[Any, "..."]:
    """`permutation` of an array: its parts along `axis` in random order. The array itself stays as it is."""
    if not np.ndim(x):
        raise ShapeError(f"random.shuffle: x={x} is not an array; fc.random.permutation takes integers.")
    return permutation(key, x, axis)


def choice(
    key: UInt64[Any, "2"], a: Any, shape: Shape = (), replace: bool = True, p: Any = None, axis: int = 0
) -> Shaped[Any, "..."]:
    """Elements of `a` along `axis` (or of 0 to a - 1, for an integer), drawn at random; `shape` replaces the dimension.

    `p` are their probabilities, by default equal. Without `replace` none is drawn twice: then they come in the order in which
    they would be drawn one after another. Probabilities that are known must be at least 0, and sum to 1; others are divided by
    their sum. Sources: Gumbel-top-k (Vieira, 2014) without replacement, else inversion.
    """
    shape = shape_of_draw(shape)
    whole = isinstance(a, (int, np.integer)) and not isinstance(a, bool)
    a = a if whole else as_traceable(a)
    if not whole and not a.ndim:
        raise ShapeError("random.choice: a is a scalar; it must be an integer that is known, or an array.")
    dim = 0 if whole else normalize_dim(axis, a.ndim)
    size, count = int(a) if whole else a.shape[dim], math.prod(shape)
    if count > size and not (replace and size > 0):
        how = "" if replace else " without replacement"
        raise ShapeError(f"random.choice: {count} element(s) cannot be drawn from {size}{how}.")
    p = None if p is None else _probabilities(p, size, 0 if replace else count)
    if not replace:
        if p is None:
            found = permutation(key, size)[:count]
        else:  # the largest Gumbel variates around the logarithms of the probabilities
            logs = np.where(p > 0, np.log(np.where(p > 0, p, 1.0)), -np.inf)
            found = bind(random_order_p, -(logs + gumbel(key, size, np.float64)))[:count]
    elif p is None:
        found = randint(key, count, 0, size) if size else np.zeros(0, np.int64)
    else:
        total = np.cumsum(p)
        found = _position(total, uniform(key, count, np.float64) * total[-1])
    if whole:
        return np.reshape(found, shape)
    out = _taken(a, found, dim)
    return np.reshape(out, (*a.shape[:dim], *shape, *a.shape[dim + 1 :]))


def _probabilities(p: Any, size: int, needed: int) -> Any:
    """Probabilities in float64; those that are known are checked."""
    p = as_traceable(p)
    if tuple(p.shape) != (size,):
        raise ShapeError(f"random.choice: p has shape {tuple(p.shape)} for {size} elements; it must be ({size},).")
    if not is_traced(p):
        total, exact = float(np.sum(p, dtype=np.float64)), 1e-2 if p.dtype.itemsize == 2 else 1e-5
        if not np.all(p >= 0) or not abs(total - 1) <= exact:
            raise ShapeError(
                f"random.choice: p has values from {np.min(p)}, and sums to {total:.9g}: it must be at least 0, and sum to 1."
            )
        if np.count_nonzero(p) < needed:
            raise ShapeError(
                f"random.choice: {needed} are drawn without replacement, and {np.count_nonzero(p)} of p are greater than 0."
            )
    return p.astype(np.float64)  # not divided by their sum: only their ratios matter below


def _position(total: Any, u: Any) -> Any:
    """The first position at which an increasing vector is greater than u, by bisection; at most the last one."""
    found = np.zeros(tuple(u.shape), np.int64)
    step = 1 << max(total.shape[0] - 1, 0).bit_length()
    while step := step // 2:
        further = found + step
        inside = np.minimum(further, total.shape[0] - 1)
        found = np.where((further < total.shape[0]) & (_taken(total, inside - 1, 0) <= u), further, found)
    return found


def _taken(x: Any, index: Any, dim: int) -> Any:
    """np.take, also of a constant by a traced index."""
    return bind(getitem_p, x, index, recipe=(*(("slice", None, None, None),) * dim, ("array",)))
