"""Indexing of traced arrays: `x[i]`, np.take, np.take_along_axis, `fc.at(x)[i]`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import Traced, bind
from ..core.types import is_inexact, type_of
from ..errors import DTypeError, MissingMethodError, ShapeError, UnsupportedError, user_frames
from ..primitives.indexing import INDEX_UPDATES, Recipe, getitem_p, index_add_p, index_set_p
from .elementwise import astype, result_dtype
from .registry import as_operand, as_traceable, implements, normalize_dim, refuse_out

__all__ = ["at", "getitem", "take"]


def _sequence(item: Sequence[Any]) -> Any:
    """Return a list in an index as an array. An empty one has no dtype of its own."""
    array = as_traceable(item)
    return array if array.size else array.astype(np.int64)


def _consumes(item: Any) -> int:
    """Return the number of dimensions that an item of an index consumes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, np.ndarray) and item.dtype == np.bool_ else 1


def recipe_of(shape: tuple[int, ...], index: Any) -> tuple[Recipe, list[Any]]:
    """Split a user's index into a static recipe and its integer-array operands. Bounds that are known are checked."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [_sequence(i) if isinstance(i, (list, tuple)) else i for i in items]
    expanded: list[Any] = []
    for item in items:
        known_mask = isinstance(item, np.ndarray) and item.dtype == np.bool_
        if isinstance(item, (bool, np.bool_)) or (known_mask and not item.ndim):
            raise UnsupportedError("indexing with one boolean cannot be traced; use None for a new dimension.")
        if known_mask:
            start = sum(1 for i in expanded if i is not None and i is not Ellipsis)
            if any(i is Ellipsis for i in expanded):
                start += len(shape) - sum(map(_consumes, items))
            if shape[start : start + item.ndim] != item.shape:
                raise ShapeError(f"a mask of shape {item.shape} does not fit dimension {start} onwards of shape {shape}.")
            expanded.extend(item.nonzero())  # a mask known while tracing becomes its positions
        elif getattr(item, "dtype", None) == np.bool_:
            raise UnsupportedError(
                "indexing with a traced boolean mask has a shape that depends on values. Use np.where(mask, x, 0), or "
                "multiply by the mask."
            )
        else:
            expanded.append(item)
    consumed = sum(1 for i in expanded if i is not None and i is not Ellipsis)
    ellipses = sum(1 for i in expanded if i is Ellipsis)
    if ellipses > 1 or consumed > len(shape):
        raise ShapeError(f"index {index!r}: too many indices for an array of shape {shape}.")
    if not ellipses:
        expanded.append(Ellipsis)
    entries: list[tuple] = []
    arrays: list[Any] = []
    dim = 0
    for item in expanded:
        if item is None:
            entries.append(("new",))
            continue
        if item is Ellipsis:
            entries.extend([("slice", None, None, None)] * (len(shape) - consumed))
            dim += len(shape) - consumed
            continue
        n = shape[dim]
        if isinstance(item, slice):
            if any(isinstance(b, Traced) for b in (item.start, item.stop, item.step)):
                raise UnsupportedError(
                    "a slice with traced bounds has a size that depends on values. Use "
                    "x[start + np.arange(size)] with a fixed size."
                )
            # Python ints keep a recipe hashable, and it prints the same everywhere.
            try:
                bounds = [None if b is None else operator.index(b) for b in (item.start, item.stop, item.step)]
            except TypeError:
                raise ShapeError(f"the slice {item!r} of dimension {dim}: bounds are integers or None.") from None
            if bounds[2] == 0:
                raise ShapeError(f"the slice {item!r} of dimension {dim}: the step must not be 0.")
            entries.append(("slice", *bounds))
        elif isinstance(item, (int, np.integer)):
            if not -n <= item < n:
                raise ShapeError(f"index {int(item)} is out of bounds for dimension {dim} of shape {shape}.")
            entries.append(("int", int(item)))
        else:
            array = as_traceable(item)
            if array.dtype.kind not in "iu":
                remedy = " Convert it: .astype(np.int32)." if is_inexact(array.dtype) else ""
                raise ShapeError(f"index of dtype {array.dtype}: indices are integers, slices, None, ... or masks.{remedy}")
            if isinstance(array, np.ndarray) and array.size and not (-n <= array.min() and array.max() < n):
                raise ShapeError(f"an index array has values outside dimension {dim} (size {n}) of shape {shape}.")
            entries.append(("array",))
            arrays.append(array)
        dim += 1
    while entries and entries[-1] == ("slice", None, None, None):
        entries.pop()
    return tuple(entries), arrays


def getitem(x: Any, index: Any) -> Any:
    """Return `x[index]`, with basic and integer-array indexing."""
    recipe, arrays = recipe_of(tuple(x.shape), index)
    return bind(getitem_p, x, *arrays, recipe=recipe) if recipe else x


@implements(np.take)
def take(a: Any, indices: Any, axis: int | None = None, out: Any = None, mode: str = "raise") -> Any:
    """np.take."""
    refuse_out(out)
    if mode not in ("raise", "wrap", "clip"):
        raise UnsupportedError(f"np.take(mode={mode!r}) cannot be traced.")
    a, indices = as_traceable(a), as_traceable(indices)
    if axis is None:
        a, axis = np.ravel(a), 0
    dim = normalize_dim(axis, a.ndim)
    if mode == "wrap":
        indices = np.remainder(indices, a.shape[dim])
    elif mode == "clip":
        indices = np.clip(indices, 0, a.shape[dim] - 1)
    return getitem_traced(a, (slice(None),) * dim + (indices,))


def getitem_traced(x: Any, index: Any) -> Any:
    """Return `x[index]` if only the index may be traced."""
    recipe, arrays = recipe_of(tuple(x.shape), index)
    return bind(getitem_p, x, *arrays, recipe=recipe)


@implements(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> Any:
    """np.take_along_axis."""
    arr, indices = as_traceable(arr), as_traceable(indices)
    if axis is None:
        arr, axis = np.ravel(arr), 0
    dim = normalize_dim(axis, arr.ndim)
    if indices.ndim != arr.ndim:
        raise ShapeError(f"np.take_along_axis: shapes {arr.shape} and {indices.shape} differ in their dimensions.")
    full = [
        indices if d == dim else np.arange(arr.shape[d]).reshape([-1 if e == d else 1 for e in range(arr.ndim)])
        for d in range(arr.ndim)
    ]
    return getitem_traced(arr, tuple(full))


class _At:
    """`fc.at(x)[index]`: functional updates of one region of an array, and reads of it."""

    __slots__ = ("index", "x")

    def __init__(self, x: Any, index: Any = None):
        self.x, self.index = x, index

    def __getitem__(self, index: Any) -> _At:
        return _At(self.x, (index,))

    def __getattr__(self, name: str) -> Any:
        raise MissingMethodError(
            f"fc.at(x)[index].{name} does not exist: there are .set, .add, .multiply, .min and .max of a value, and .get."
        )

    def _update(self, primitive: Any, value: Any) -> Any:
        x = as_traceable(self.x)
        value = as_operand(value)
        common = result_dtype(x, value)
        if not np.can_cast(common, x.dtype, "same_kind"):
            raise DTypeError(f"fc.at(x): a value of dtype {common} does not fit into an array of {x.dtype}.")
        value = astype(value, x.dtype) if hasattr(value, "dtype") else np.asarray(value, x.dtype)
        recipe, arrays = recipe_of(tuple(x.shape), self._given())
        operands = (x, value, *arrays)
        if not any(isinstance(v, Traced) for v in operands):  # outside a trace nothing else checks shapes
            primitive.infer(*map(type_of, operands), recipe=recipe)
        return bind(primitive, *operands, recipe=recipe)

    def _given(self) -> Any:
        if self.index is None:
            raise UnsupportedError("fc.at(x) needs an index: fc.at(x)[i].set(v).")
        return self.index[0]

    @user_frames()
    def set(self, value: Any) -> Any:
        """Return a copy of x with x[index] = value. If an index repeats, it is not defined which value stays."""
        return self._update(index_set_p, value)

    @user_frames()
    def add(self, value: Any) -> Any:
        """Return a copy of x with `value` added at the index. Repeated indices add up."""
        return self._update(index_add_p, value)

    @user_frames()
    def multiply(self, value: Any) -> Any:
        """Return a copy of x, multiplied by `value` at the index. If an index repeats, all its values are factors."""
        return self._update(INDEX_UPDATES[np.multiply], value)

    @user_frames()
    def max(self, value: Any) -> Any:
        """Return a copy of x with np.maximum(x[index], value) at the index. If an index repeats, its largest value counts."""
        return self._update(INDEX_UPDATES[np.maximum], value)

    @user_frames()
    def min(self, value: Any) -> Any:
        """Return a copy of x with np.minimum(x[index], value) at the index. If an index repeats, its smallest value counts."""
        return self._update(INDEX_UPDATES[np.minimum], value)

    @user_frames()
    def get(self, mode: str | None = None, fill_value: Any = None) -> Any:
        """Return x[index].

        Args:
            mode: The meaning of integers out of bounds, as in JAX: "clip" takes the nearest place, "wrap" the place modulo the
                size, and "fill" `fill_value`.
            fill_value: By default NaN, for integers the smallest number, and for unsigned ones the largest.
        """
        x, index = as_traceable(self.x), self._given()
        if mode is None:
            return getitem_traced(x, index)
        if mode not in _MODES:
            raise UnsupportedError(f"fc.at(x)[index].get(mode={mode!r}): the modes are {', '.join(map(repr, _MODES))}.")
        items = _each_dimension(tuple(x.shape), index)
        places = [_MODES[mode](item, x.shape[dim]) if dim is not None else item for item, dim in items]
        if mode == "fill":
            widths = [(0, 0)] * x.ndim
            for _, dim in items:
                if dim is not None:
                    widths[dim] = (0, 1)  # the place for indices out of bounds
            x = np.pad(x, widths, constant_values=_filler(x.dtype) if fill_value is None else fill_value)
        elif any(dim is not None and x.shape[dim] == 0 for _, dim in items):
            raise ShapeError(f"fc.at(x)[index].get(mode={mode!r}): an array of shape {tuple(x.shape)} has no place to choose.")
        return getitem_traced(x, tuple(places))


def _counted(i: Any, n: int) -> Any:
    """Return an index counted from the front. Negative ones count from the end."""
    return np.where(i < 0, i + n, i)


_MODES: dict[str, Any] = {
    "clip": lambda i, n: np.clip(_counted(i, n), 0, n - 1),
    "wrap": lambda i, n: np.remainder(i, max(n, 1)),
    "fill": lambda i, n: np.where((i < -n) | (i >= n), n, _counted(i, n)),
}


def _filler(dtype: np.dtype) -> Any:
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
    return dtype.kind == "b" or np.nan


def _each_dimension(shape: tuple[int, ...], index: Any) -> list[tuple[Any, int | None]]:
    """Return the items of an index, each integer (array) with its dimension. Other items have None."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [_sequence(i) if isinstance(i, (list, tuple)) else i for i in items]
    out: list[tuple[Any, int | None]] = []
    dim = 0
    for item in items:
        number = isinstance(item, (int, np.integer)) and not isinstance(item, bool)
        place: Any = np.asarray(item, np.int64) if number else item
        is_place = hasattr(place, "dtype") and place.dtype.kind in "iu"
        out.append((place.astype(np.int64) if is_place else place, dim if is_place else None))
        dim += len(shape) - sum(map(_consumes, items)) if item is Ellipsis else _consumes(item)
    return out


def at(x: Any) -> _At:
    """Start a functional update: `fc.at(x)[idx].set(v)` returns a new array.

    It works on NumPy arrays and inside traced functions. There are `.set(v)`, `.add(v)`, `.multiply(v)`, `.min(v)` and
    `.max(v)`. `.get(mode)` reads: `mode` is "clip", "wrap" or "fill", for indices out of bounds. `idx` is any basic or
    integer-array index, and `v` broadcasts to the region.

    Source: JAX's `x.at[idx]`.

    Args:
        x: An array.

    Returns:
        An object to index. Then call one of these methods.

    Example:
        >>> x = np.zeros(4)
        >>> print(fc.at(x)[1].set(5.0), fc.at(x)[np.array([0, 0, 3])].add(1.0))
        [0. 5. 0. 0.] [2. 0. 0. 1.]
        >>> print(fc.at(np.arange(4.0))[np.array([1, 9])].get("clip"))
        [1. 3.]
    """
    return _At(x)
