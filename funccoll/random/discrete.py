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
    """Draw booleans that are True with probability `p`.

    Args:
        key: A key, from `fc.random.key` or `split`.
        p: Probabilities, a scalar or an array.
        shape: The shape of the result. `p` must broadcast to it. None takes the shape of `p`.

    Returns:
        An array of booleans.

    Raises:
        ShapeError: If `p` is known and outside of [0, 1], or does not broadcast to `shape`.

    Example:
        >>> print(fc.random.bernoulli(fc.random.key(0), 0.5, (4,)))
        [ True  True  True False]
    """
    p = as_traceable(p)
    if not is_traced(p) and not np.all((p >= 0) & (p <= 1)):
        raise ShapeError(f"random.bernoulli: p={p} is not a probability: it must be from 0 to 1.")
    return uniform(key, broadcast_draw("bernoulli", shape, p=p)) < p


def randint(key: UInt64[Any, "2"], shape: Shape, minval: Any, maxval: Any, dtype: Any = np.int64) -> Integer[Any, "..."]:
    """Draw uniform integers from `minval` to `maxval` - 1.

    Each takes 128 random bits. A value's probability is off by less than one part in 2^64, whatever the range. If traced
    bounds leave no integer, or do not fit into the dtype, the result is not defined.

    Args:
        key: A key, from `fc.random.key` or `split`.
        shape: The shape of the result.
        minval: The least integer, a scalar or an array that broadcasts to `shape`.
        maxval: The greatest integer plus 1. It has the same form.
        dtype: The dtype of the result, an integer dtype.

    Returns:
        An array of `shape` and `dtype`.

    Raises:
        DTypeError: If `dtype`, `minval` or `maxval` is not an integer.
        ShapeError: If known bounds leave no integer, or do not fit into `dtype`.

    Example:
        >>> print(fc.random.randint(fc.random.key(0), (5,), 0, 10))
        [0 2 1 5 5]
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
    # Everything is modulo 2^64, in vectors, because NumPy warns if a scalar wraps around.
    low, high = (np.reshape(np.broadcast_to(x.astype(np.uint64), shape), -1) for x in (low, high))
    first, second = bits(key, (2, math.prod(shape)))
    count = high - low  # 0 for all words
    offset = np.where(count == 0, first, _scaled(first, second, count))
    return np.reshape((low + offset).astype(asked), shape)


_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def _product(x: Any, y: Any) -> tuple[Any, Any]:
    """Return (upper, lower word) of the product of words."""
    (a, b), (c, d) = ((v >> _HALF, v & _LOW) for v in (x, y))
    low, left, right = b * d, a * d, b * c
    middle = (low >> _HALF) + (left & _LOW) + (right & _LOW)
    return a * c + (left >> _HALF) + (right >> _HALF) + (middle >> _HALF), (middle << _HALF) | (low & _LOW)


def _scaled(first: Any, second: Any, count: Any) -> Any:
    """Return ⌊count · w / 2^128⌋ of numbers w of two words."""
    (upper, lower), (below, _) = _product(first, count), _product(second, count)
    return upper + (lower > ~below).astype(np.uint64)


def categorical(key: UInt64[Any, "2"], logits: Any, axis: int = -1, shape: Shape | None = None) -> Integer[Any, "..."]:
    """Draw categories with the probabilities softmax(logits) along `axis`.

    Each is the category with the largest sum of its logit and a Gumbel variate, in float64.

    Args:
        key: A key, from `fc.random.key` or `split`.
        logits: Real numbers. A logit of -inf excludes a category.
        axis: The dimension of the categories.
        shape: The shape of the result. The logits' shape without `axis` must broadcast to it, and None takes that one.

    Returns:
        An int64 array of categories, from 0.

    Raises:
        ShapeError: If there is no category, or the logits do not broadcast to `shape`.

    Example:
        >>> print(fc.random.categorical(fc.random.key(0), np.log([0.1, 0.2, 0.7]), shape=(6,)))
        [0 2 2 2 1 2]
    """
    logits = np.moveaxis(as_traceable(logits), axis, -1).astype(np.float64)
    if not logits.shape[-1]:
        raise ShapeError(f"random.categorical: logits of shape {tuple(logits.shape)} have no category along axis {axis}.")
    shape = broadcast_draw("categorical", shape, logits=logits[..., 0])
    return np.argmax(logits + gumbel(key, (*shape, logits.shape[-1]), np.float64), axis=-1)


def permutation(key: UInt64[Any, "2"], x: Any, axis: int = 0) -> Shaped[Any, "..."]:
    """Return integers in random order, or the parts of an array along `axis`.

    It sorts random 64-bit words. All orders are equally likely, except if words are equal, with probability n² / 2^65.

    Args:
        key: A key, from `fc.random.key` or `split`.
        x: A known integer n, for the integers from 0 to n - 1, or an array.
        axis: The array's dimension whose parts are reordered.

    Returns:
        An int64 array of shape (n,), or an array like `x`.

    Raises:
        ShapeError: If `x` is negative, or neither a known integer nor an array with dimensions.

    Example:
        >>> print(fc.random.permutation(fc.random.key(0), 5))
        [0 2 1 4 3]
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
    """Return the parts of an array along `axis` in random order. The array itself stays as it is.

    This is `permutation` for arrays alone.

    Args:
        key: A key, from `fc.random.key` or `split`.
        x: An array.
        axis: The dimension whose parts are reordered.

    Returns:
        An array like `x`.

    Raises:
        ShapeError: If `x` has no dimension.

    Example:
        >>> print(fc.random.shuffle(fc.random.key(0), np.array([1.5, 2.5, 3.5])))
        [1.5 3.5 2.5]
    """
    if not np.ndim(x):
        raise ShapeError(f"random.shuffle: x={x} is not an array; fc.random.permutation takes integers.")
    return permutation(key, x, axis)


def choice(
    key: UInt64[Any, "2"], a: Any, shape: Shape = (), replace: bool = True, p: Any = None, axis: int = 0
) -> Shaped[Any, "..."]:
    """Draw elements of an array along `axis`, or integers.

    If you draw without replacement, elements come in the order of drawing them one after another.

    Sources: Gumbel-top-k (Vieira, 2014) without replacement with `p`; inversion with replacement.

    Args:
        key: A key, from `fc.random.key` or `split`.
        a: An array, or a known integer n for the integers from 0 to n - 1.
        shape: The shape of the draw, in place of the dimension `axis`.
        replace: False draws no element twice.
        p: The probabilities of the elements, of shape (n,). None makes them equal. Known ones must be at least 0 and sum to 1.
            Traced ones are divided by their sum.
        axis: The array's dimension to draw along.

    Returns:
        An array of the elements.

    Raises:
        ShapeError: If the elements do not suffice, or `p` does not fit.

    Example:
        >>> print(fc.random.choice(fc.random.key(0), np.array([10.0, 20.0, 30.0]), (4,)))
        [10. 10. 10. 20.]
        >>> print(fc.random.choice(fc.random.key(0), 5, (5,), replace=False))
        [0 2 1 4 3]
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
    """Return probabilities in float64. Known ones are checked."""
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
    return p.astype(np.float64)  # only ratios matter below, so they are not divided by their sum


def _position(total: Any, u: Any) -> Any:
    """Return the first position at which an increasing vector is greater than u, and at most the last one, by bisection."""
    found = np.zeros(tuple(u.shape), np.int64)
    step = 1 << max(total.shape[0] - 1, 0).bit_length()
    while step := step // 2:
        further = found + step
        inside = np.minimum(further, total.shape[0] - 1)
        found = np.where((further < total.shape[0]) & (_taken(total, inside - 1, 0) <= u), further, found)
    return found


def _taken(x: Any, index: Any, dim: int) -> Any:
    """Return np.take, also of a constant by a traced index."""
    return bind(getitem_p, x, index, recipe=(*(("slice", None, None, None),) * dim, ("array",)))
