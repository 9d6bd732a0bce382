"""NumPy functions that order elements: sort, partition, search, and `fc.top_k` and `fc.unique`, whose sizes are known."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.interpreter import Traced, bind
from ..errors import ShapeError, UnsupportedError
from ..primitives.sorting import argpartition_p, argsort_p, partition_p, searchsorted_p, sort_p, top_k_p
from .elementwise import astype, unify
from .indexing import at, take
from .registry import as_operand, as_traceable, implements, normalize_dim

__all__ = ["top_k", "unique"]


def _along(a: Any, axis: int | None, name: str) -> tuple[Any, int]:
    """Return the array and the dimension to order. For axis=None all elements are in one dimension."""
    a = as_traceable(a)
    if axis is None:
        return np.ravel(a), 0
    if not a.ndim:
        raise ShapeError(f"{name} of a number: there is no dimension to order.")
    return a, normalize_dim(axis, a.ndim)


def _refuse_fields(order: Any, name: str) -> None:
    if order is not None:
        raise UnsupportedError(f"{name}(order=...) orders fields of structured arrays, which cannot be traced.")


@implements(np.sort)
def sort(a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: bool | None = None) -> Any:
    """np.sort: NaN comes last. Every `kind` gives the same values."""
    _refuse_fields(order, "np.sort")
    a, dim = _along(a, axis, "np.sort")
    return bind(sort_p, a, dim=dim)


@implements(np.argsort)
def argsort(a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: bool | None = None) -> Any:
    """np.argsort."""
    _refuse_fields(order, "np.argsort")
    a, dim = _along(a, axis, "np.argsort")
    return bind(argsort_p, a, dim=dim, kind="stable" if stable else kind)


def _places(kth: Any, n: int) -> tuple[int, ...]:
    if isinstance(kth, Traced):
        raise UnsupportedError("np.partition at a traced place; use np.take(np.sort(x), k, axis=-1).")
    places = tuple(int(k) for k in np.atleast_1d(kth))
    for k in places:
        if not -n <= k < n:
            raise ShapeError(f"np.partition: place {k} is out of bounds for a dimension of size {n}.")
    return tuple(sorted({k % n for k in places}))


def _partition(primitive: Any, name: str) -> Any:
    def implementation(a: Any, kth: Any, axis: int | None = -1, kind: str = "introselect", order: Any = None) -> Any:
        _refuse_fields(order, name)
        if kind != "introselect":
            raise ValueError(f"kind is 'introselect', not {kind!r}")
        a, dim = _along(a, axis, name)
        return bind(primitive, a, dim=dim, kth=_places(kth, a.shape[dim]))

    return implementation


implements(np.partition)(_partition(partition_p, "np.partition"))
implements(np.argpartition)(_partition(argpartition_p, "np.argpartition"))


@implements(np.searchsorted)
def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    """np.searchsorted."""
    if side not in ("left", "right"):
        raise UnsupportedError(f"np.searchsorted(side={side!r}): it is 'left' or 'right'.")
    a = as_traceable(a) if sorter is None else take(as_traceable(a), sorter)
    ordered, values = unify(a, as_operand(v), compares=True)
    return bind(searchsorted_p, ordered, values, side=side)


@implements(np.digitize)
def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    """np.digitize; traced bins are taken to increase."""
    side = "left" if right else "right"
    if isinstance(bins, Traced) or len(bins) < 2 or bins[0] <= bins[-1]:
        return np.searchsorted(as_traceable(bins), x, side)
    return len(bins) - np.searchsorted(as_traceable(bins)[::-1], x, side)


@implements(np.isin)
def isin(element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False, *, kind: Any = None) -> Any:
    """np.isin: a search in the sorted test elements."""
    if kind not in (None, "sort", "table"):
        raise ValueError(f"kind is 'sort', 'table' or None, not {kind!r}")
    element, tests = unify(as_operand(element), np.ravel(as_traceable(test_elements)), compares=True)
    if not tests.size:
        return np.full(element.shape, invert)
    ordered = np.sort(tests)
    found = take(ordered, np.minimum(np.searchsorted(ordered, element), tests.size - 1)) == element
    return ~found if invert else found


def top_k(x: Any, k: int) -> tuple[Any, Any]:
    """Return the k largest elements along the last dimension, the largest first, and their indices.

    If elements are equal, the first comes first. NaN counts as the largest. Both are as in `jax.lax.top_k`. Gradients flow
    through the values.

    Args:
        x: An array of shape (..., n).
        k: The number of elements, from 0 to n.

    Returns:
        `(values, indices)`, both of shape (..., k).

    Raises:
        ShapeError: If the last dimension has fewer than k elements.

    Example:
        >>> values, indices = fc.top_k(np.array([3.0, 1.0, 7.0, 5.0]), 2)
        >>> print(values, indices)
        [7. 5.] [2 3]
    """
    x = as_traceable(x)
    if not x.ndim or not 0 <= k <= x.shape[-1]:
        raise ShapeError(f"top_k: an array of shape {tuple(x.shape)} does not have {k} elements along its last dimension.")
    indices = bind(top_k_p, x, k=k)
    return np.take_along_axis(x, indices, axis=-1), indices


def unique(
    x: Any,
    size: int,
    *,
    fill_value: Any = None,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    """Return the first `size` of the sorted distinct elements. The shape of np.unique's result would depend on values.

    NaNs count as equal. The function is `jnp.unique(x, size=)`.

    Args:
        x: An array of any shape, with at least one element.
        size: The number of elements of the result.
        fill_value: The element that follows if there are fewer. None takes the smallest element of `x`.
        return_index: True returns also the index of each element's first appearance, in the flat `x`.
        return_inverse: True returns also, for each element of `x`, the position of its value.
        return_counts: True returns also how often each element appears, and 0 for fillers.

    Returns:
        An array of shape (size,), or a tuple of it and the arrays you ask for, in the order of np.unique.

    Raises:
        ShapeError: If `x` has no elements.

    Example:
        >>> print(fc.unique(np.array([3, 1, 3, 2]), 2))
        [1 2]
        >>> print(fc.unique(np.array([3, 1, 3, 2]), 4, fill_value=-1, return_counts=True))
        (array([ 1,  2,  3, -1]), array([1, 1, 2, 0]))
    """
    x = as_traceable(x)
    flat = np.ravel(x)
    if not flat.size:
        raise ShapeError(f"unique: an array of shape {tuple(x.shape)} has no elements.")
    order = bind(argsort_p, flat, dim=0, kind="stable")
    ordered = take(flat, order)
    before, after = ordered[:-1], ordered[1:]
    new = np.concatenate([np.ones(1, bool), (before != after) & ~(np.isnan(before) & np.isnan(after))])
    place = np.cumsum(new) - 1
    kept = np.minimum(place, size)  # one more place for values that do not fit
    first = np.where(new, np.arange(flat.size), 0)
    start = at(np.zeros(size + 1, np.int64))[kept].max(first)[:size]
    filler = np.arange(size) > place[-1]
    values = take(ordered, start)
    if fill_value is not None:
        values = np.where(filler, astype(as_traceable(fill_value), flat.dtype), values)
    results = [values]
    if return_index:
        results.append(take(order, start))
    if return_inverse:
        results.append(np.reshape(take(place, bind(argsort_p, order, dim=0, kind="stable")), x.shape))
    if return_counts:
        results.append(at(np.zeros(size + 1, np.int64))[kept].add(1)[:size])
    return tuple(results) if len(results) > 1 else results[0]
