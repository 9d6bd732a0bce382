"""Indexing primitives: read, scatter into zeros, add at, set at.

An index is a static *recipe*, one entry per item of the user's index tuple: `("int", i)`, `("slice", start, stop, step)`,
`("new",)` or `("array",)`. Each `("array",)` takes the next integer-array operand. The rules for combining them are NumPy's
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType, wide_dtype
from ..errors import DTypeError, ShapeError
from .batch_rules import batch_each, repeated
from .shaping import fit
from .tangent_rules import linear, or_zeros

__all__ = [
    "INDEX_UPDATES",
    "Piece",
    "Recipe",
    "getitem_p",
    "index_add_p",
    "index_of_batch",
    "index_set_p",
    "realize",
    "result_shape",
    "scatter_p",
]

Recipe = tuple[tuple, ...]


def realize(recipe: Recipe, arrays: Sequence[Any]) -> tuple:
    """Return the NumPy index tuple of a recipe."""
    remaining = iter(arrays)
    make = {
        "int": lambda e: e[1],
        "slice": lambda e: slice(*e[1:]),
        "new": lambda e: None,
        "array": lambda e: next(remaining),
    }
    return tuple(make[entry[0]](entry) for entry in recipe)


def result_shape(shape: tuple[int, ...], recipe: Recipe, arrays: Sequence[ArrayType]) -> tuple[int, ...]:
    """Return the shape of an indexed array. NumPy indexes an array without memory (every stride is 0)."""
    probe = np.broadcast_to(np.empty((), np.bool_), shape)
    zeros = [np.broadcast_to(np.zeros((), np.int64), a.shape) for a in arrays]
    if any(a.size for a in arrays) and 0 in shape:
        probe = np.broadcast_to(np.empty((), np.bool_), [max(n, 1) if _is_array(recipe, d) else n for d, n in enumerate(shape)])
    try:
        return probe[realize(recipe, zeros)].shape
    except IndexError as error:
        raise ShapeError(f"indexing an array of shape {shape}: {error}.") from None


def _is_array(recipe: Recipe, dim: int) -> bool:
    consuming = [e for e in recipe if e[0] != "new"]
    return dim < len(consuming) and consuming[dim][0] == "array"


def index_of_batch(
    recipe: Recipe, arrays: Sequence[Any], batched: Sequence[bool], size: int, ndim: int, of_batch: bool
) -> tuple[Recipe, list[Any], tuple[int, ...]]:
    """Replace the indices of all elements of a batch by one index. Return its recipe, its arrays, and an order of dimensions.

    `recipe` and `arrays`, some of them batched, index each element. The indexed value has `ndim` dimensions, and the batch in
    front if `of_batch`. The region transposed to the order has the batch first, then one element's region.
    """
    depth = max((np.ndim(a) - b for a, b in zip(arrays, batched, strict=True)), default=0)  # of the arrays of one element
    kinds = [entry[0] for entry in recipe]
    advanced = [i for i, kind in enumerate(kinds) if kind in ("array", "int")] if arrays else []
    # NumPy puts the arrays' dimensions in the arrays' place, or first if something stands between the arrays.
    separated = bool(advanced) and advanced[-1] - advanced[0] >= len(advanced)
    before = advanced[0] if advanced and not separated else 0
    total = 1 + depth + ndim + kinds.count("new") - kinds.count("array") - kinds.count("int")
    if not any(batched):
        first = depth if separated else 0
        return (("slice", None, None, None), *recipe), [*arrays], (first, *(d for d in range(total) if d != first))
    aligned_arrays = [
        np.reshape(a, (size, *(1,) * (depth + 1 - np.ndim(a)), *a.shape[1:])) if b else a
        for a, b in zip(arrays, batched, strict=True)
    ]
    if not of_batch:
        return recipe, aligned_arrays, (before, *(d for d in range(total) if d != before))
    # With the array of the batch in front, the dimensions of all arrays are first.
    elements = np.arange(size).reshape(size, *(1,) * depth)
    behind = 1 + depth + before
    order = (0, *range(1 + depth, behind), *range(1, 1 + depth), *range(behind, total))
    return (("array",), *recipe), [elements, *aligned_arrays], order


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(int, np.argsort(order)))


def _batch_getitem(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, recipe: Recipe) -> Any:
    x, *arrays = values
    index, arrays, order = index_of_batch(recipe, arrays, batched[1:], size, x.ndim - batched[0], batched[0])
    return np.transpose(bind(primitive, x, *arrays, recipe=index), order)


def _batch_scatter(
    primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, shape: tuple[int, ...], recipe: Recipe
) -> Any:
    v, *arrays = values
    index, arrays, order = index_of_batch(recipe, arrays, batched[1:], size, len(shape), True)
    v = np.transpose(v if batched[0] else repeated(v, size), _inverse(order))
    return bind(primitive, v, *arrays, shape=(size, *shape), recipe=index)


def _batch_update(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, recipe: Recipe) -> Any:
    x, v, *arrays = values
    x = x if batched[0] else repeated(x, size)
    index, arrays, order = index_of_batch(recipe, arrays, batched[2:], size, x.ndim - 1, True)
    if batched[1] or v.ndim:  # it broadcasts to one element's region
        shape = v.shape[1:] if batched[1] else v.shape
        v = np.reshape(v, (size if batched[1] else 1, *(1,) * (len(order) - 1 - len(shape)), *shape))
        v = np.transpose(v, _inverse(order))
    return bind(primitive, x, v, *arrays, recipe=index)


def _infer_getitem(x: ArrayType, *arrays: ArrayType, recipe: Recipe) -> list[ArrayType]:
    return [ArrayType(result_shape(x.shape, recipe, arrays), x.dtype)]


def _getitem(x: np.ndarray, *arrays: np.ndarray, recipe: Recipe) -> Any:
    return x[realize(recipe, arrays)]


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """A cotangent that is zero outside the region of an index. If you call it, it returns an array.

    The backward pass adds all pieces of one value into one array (`piece_sums`).
    """

    value: Any
    arrays: Sequence[Any]
    shape: tuple[int, ...]
    recipe: Recipe

    def __call__(self) -> Any:
        """Return the whole array: zeros, with the value added to the region."""
        return bind(scatter_p, self.value, *self.arrays, shape=self.shape, recipe=self.recipe)


def _getitem_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, recipe: Recipe) -> list[Any]:
    x, *arrays = inputs
    return [Piece(cts[0], arrays, tuple(x.shape), recipe), *(None for _ in arrays)]


getitem_p = Primitive("getitem", _infer_getitem, _getitem, _getitem_vjp, linear("getitem"), _batch_getitem, view=True)


def _infer_scatter(v: ArrayType, *arrays: ArrayType, shape: tuple[int, ...], recipe: Recipe) -> list[ArrayType]:
    return [ArrayType(shape, v.dtype)]


def _add_at(out: np.ndarray, index: Any, v: np.ndarray) -> None:
    """Compute np.add.at, with the sums of 16-bit floats rounded once."""
    wide = wide_dtype(out.dtype)
    if wide == out.dtype:
        np.add.at(out, index, v)
    else:
        total = out.astype(wide)
        np.add.at(total, index, v.astype(wide))
        out[...] = total


def _scatter(v: np.ndarray, *arrays: np.ndarray, shape: tuple[int, ...], recipe: Recipe) -> np.ndarray:
    out = np.zeros(shape, v.dtype)
    if arrays:
        _add_at(out, realize(recipe, arrays), v)  # indices may repeat
    else:
        out[realize(recipe, arrays)] = v
    return out


def _scatter_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, shape, recipe) -> list[Any]:
    _, *arrays = inputs
    return [partial(bind, getitem_p, cts[0], *arrays, recipe=recipe), *(None for _ in arrays)]


scatter_p = Primitive("scatter_add", _infer_scatter, _scatter, _scatter_vjp, linear("scatter_add"), _batch_scatter)


def _infer_update(x: ArrayType, v: ArrayType, *arrays: ArrayType, recipe: Recipe) -> list[ArrayType]:
    region = result_shape(x.shape, recipe, arrays)
    aligned = (1,) * (len(region) - len(v.shape)) + v.shape
    if len(v.shape) > len(region) or any(a not in (1, n) for a, n in zip(aligned, region, strict=True)):
        raise ShapeError(f"at[...]: a value of shape {v.shape} does not broadcast to the indexed region {region}.")
    return [x]


def _index_add(x: np.ndarray, v: np.ndarray, *arrays: np.ndarray, recipe: Recipe) -> np.ndarray:
    out = np.array(x)
    _add_at(out, realize(recipe, arrays), v)
    return out


def _region(cts: Sequence[Any], v: Any, arrays: Sequence[Any], recipe: Recipe) -> Any:
    return fit(bind(getitem_p, cts[0], *arrays, recipe=recipe), v)


def _index_add_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, recipe: Recipe) -> list[Any]:
    _, v, *arrays = inputs
    return [cts[0], partial(_region, cts, v, arrays, recipe), *(None for _ in arrays)]


def _index_add_jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, recipe: Recipe) -> list[Any]:
    (of_x, of_v, *_), (x, _, *arrays) = tangents, inputs
    return [of_x if of_v is None else bind(index_add_p, or_zeros(of_x, x), of_v, *arrays, recipe=recipe)]


index_add_p = Primitive("index_add", _infer_update, _index_add, _index_add_vjp, _index_add_jvp, _batch_update)


def _index_set(x: np.ndarray, v: np.ndarray, *arrays: np.ndarray, recipe: Recipe) -> np.ndarray:
    out = np.array(x)
    out[realize(recipe, arrays)] = v
    return out


def _index_set_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, recipe: Recipe) -> list[Any]:
    _, v, *arrays = inputs

    def elsewhere() -> Any:
        return bind(index_set_p, cts[0], np.zeros((), cts[0].dtype), *arrays, recipe=recipe)

    return [elsewhere, partial(_region, cts, v, arrays, recipe), *(None for _ in arrays)]


def _index_set_jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, recipe: Recipe) -> list[Any]:
    (of_x, of_v, *_), (x, v, *arrays) = tangents, inputs
    return [bind(index_set_p, or_zeros(of_x, x), or_zeros(of_v, v), *arrays, recipe=recipe)]


index_set_p = Primitive("index_set", _infer_update, _index_set, _index_set_vjp, _index_set_jvp, _batch_update)


# ---------------------------------------------------------------- updates that combine: min, max, multiply


def _combine_at(ufunc: np.ufunc) -> Any:
    def reference(x: np.ndarray, v: np.ndarray, *arrays: np.ndarray, recipe: Recipe) -> np.ndarray:
        out = np.array(x)
        ufunc.at(out, realize(recipe, arrays), v)
        return out

    return reference


def _index_extremum_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, recipe: Recipe) -> list[Any]:
    """Give equal shares to all elements that have the extremum, as reductions do. NaNs count as equal."""
    x, v, *arrays = inputs
    (out,) = outs
    at = partial(bind, getitem_p, recipe=recipe)

    def hits(mine: Any, best: Any) -> Any:
        return ((mine == best) | (np.isnan(mine) & np.isnan(best))).astype(out.dtype)

    def share() -> Any:
        wins = bind(index_add_p, hits(x, out), hits(v, at(out, *arrays)), *arrays, recipe=recipe)
        return cts[0] / np.maximum(wins, np.ones((), out.dtype))

    return [
        lambda: share() * hits(x, out),
        lambda: fit(at(share(), *arrays) * hits(v, at(out, *arrays)), v),
        *(None for _ in arrays),
    ]


def _index_multiply_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, recipe: Recipe) -> list[Any]:
    """Give v the product of all other factors of its element. It is 0 if another factor is 0."""
    x, v, *arrays = inputs
    at = partial(bind, getitem_p, recipe=recipe)

    def factor() -> Any:
        zero = v == 0
        safe = np.where(zero, np.ones((), v.dtype), v)
        product = at(bind(INDEX_UPDATES[np.multiply], x, safe, *arrays, recipe=recipe), *arrays) / safe
        nothing = np.zeros(x.shape, np.int64)
        zeros = at(bind(index_add_p, nothing, zero.astype(np.int64), *arrays, recipe=recipe), *arrays) - zero
        return fit(at(cts[0], *arrays) * np.where(zeros > 0, np.zeros((), x.dtype), product), v)

    return [lambda: bind(INDEX_UPDATES[np.multiply], cts[0], v, *arrays, recipe=recipe), factor, *(None for _ in arrays)]


def _infer_order(x: ArrayType, v: ArrayType, *arrays: ArrayType, recipe: Recipe) -> list[ArrayType]:
    if x.dtype.kind == "c":
        raise DTypeError("at[...].max and .min are not defined for complex numbers: they have no order.")
    return _infer_update(x, v, *arrays, recipe=recipe)


INDEX_UPDATES: dict[np.ufunc, Primitive] = {
    np.add: index_add_p,
    np.multiply: Primitive("index_multiply", _infer_update, _combine_at(np.multiply), _index_multiply_vjp, batch=batch_each),
    np.maximum: Primitive("index_max", _infer_order, _combine_at(np.maximum), _index_extremum_vjp, batch=batch_each),
    np.minimum: Primitive("index_min", _infer_order, _combine_at(np.minimum), _index_extremum_vjp, batch=batch_each),
}
"""The ufunc that combines the present value with the new one -> its update. It combines repeated indices one by one."""
