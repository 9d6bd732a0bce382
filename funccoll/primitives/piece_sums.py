"""The sum of pieces of one array: the gradients of slices, gathers and splits of a value, added up.

Each piece alone would be an array of the whole shape, zero outside the piece (`scatter_add`). A sum of these would take as
many passes over the whole shape as there are pieces. Here all pieces are added into one array, at the cost of the pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType
from .batch_rules import batch_each
from .indexing import Piece, Recipe, getitem_p, realize
from .shaping import fit

__all__ = ["accumulate", "accumulate_p", "divide_operands", "regions"]


def accumulate(start: Any, pieces: Sequence[Piece]) -> Any:
    """Add pieces of one shape, in the given order, into zeros or into a copy of `start`."""
    values = [piece.value for piece in pieces]
    arrays = [array for piece in pieces for array in piece.arrays]
    starts = [] if start is None else [start]
    recipes = tuple(piece.recipe for piece in pieces)
    return bind(accumulate_p, *starts, *values, *arrays, shape=pieces[0].shape, recipes=recipes, started=bool(starts))


def divide_operands(
    operands: Sequence[Any], recipes: Sequence[Recipe], started: bool
) -> tuple[Any, list[tuple[Any, Sequence[Any], Recipe]]]:
    """Split the operands of `accumulate` into the array to start from (or None) and (piece, its index arrays, its recipe)."""
    start, rest = (operands[0], operands[1:]) if started else (None, operands)
    return start, list(_pieces(rest, recipes))


def _pieces(operands: Sequence[Any], recipes: Sequence[Recipe]) -> Iterator[tuple[Any, Sequence[Any], Recipe]]:
    first = len(recipes)
    for value, recipe in zip(operands, recipes, strict=False):
        last = first + sum(entry[0] == "array" for entry in recipe)
        yield value, operands[first:last], recipe
        first = last


def _infer_accumulate(
    *operands: ArrayType, shape: tuple[int, ...], recipes: tuple[Recipe, ...], started: bool
) -> list[ArrayType]:
    return [ArrayType(shape, operands[0].dtype)]


@functools.lru_cache(maxsize=1 << 14)
def _region(recipe: Recipe) -> tuple:
    """Return the index of a recipe without arrays. The ellipsis makes it a view, also of a single element."""
    return (*realize(recipe, ()), ...)


@functools.lru_cache(maxsize=1 << 10)
def _divide_up(shape: tuple[int, ...], recipes: tuple[Recipe, ...]) -> bool:
    """True if each element of the shape is in one region."""
    if any(entry[0] == "array" for recipe in recipes for entry in recipe):
        return False
    taken = np.zeros(shape, np.bool_)
    for recipe in recipes:
        region = taken[_region(recipe)]
        if region.any():
            return False
        region[...] = True
    return bool(taken.all())


def regions(shape: tuple[int, ...], recipes: tuple[Recipe, ...], started: bool) -> list[tuple]:
    """Return where the pieces are if they divide the result up; else nothing."""
    return [] if started or not _divide_up(shape, recipes) else [*map(_region, recipes)]


def _accumulate(*operands: np.ndarray, shape: tuple[int, ...], recipes: tuple[Recipe, ...], started: bool) -> np.ndarray:
    start, pieces = divide_operands(operands, recipes, started)
    if start is None and _divide_up(shape, recipes):  # the sums with 0, in one pass over memory instead of three
        out = np.empty(shape, operands[0].dtype)
        for value, _, recipe in pieces:
            np.add(value, out.dtype.type(0), out=out[_region(recipe)])
        return out
    out = np.zeros(shape, operands[0].dtype) if start is None else np.array(start)
    for value, arrays, recipe in pieces:
        if arrays:
            np.add.at(out, realize(recipe, arrays), value)  # indices may repeat
        else:
            region = out[_region(recipe)]
            np.add(region, value, out=region)
    return out


def _read(ct: Any, value: Any, arrays: Sequence[Any], recipe: Recipe) -> Any:
    return fit(bind(getitem_p, ct, *arrays, recipe=recipe), value)


def _accumulate_vjp(
    cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, shape: Any, recipes: Any, started: bool
) -> list[Any]:
    _, pieces = divide_operands(inputs, recipes, started)
    reads = [partial(_read, cts[0], *piece) for piece in pieces]
    return [*([cts[0]] if started else []), *reads, *(None for _, arrays, _ in pieces for _ in arrays)]


def _batch(
    primitive: Primitive,
    values: Sequence[Any],
    batched: Sequence[bool],
    size: int,
    *,
    shape: tuple[int, ...],
    recipes: tuple[Recipe, ...],
    started: bool,
) -> Any:
    """Batch a sum. Slices get the batch as their first dimension; index arrays take one equation for each element."""
    if any(entry[0] == "array" for recipe in recipes for entry in recipe):
        return batch_each(primitive, values, batched, size, shape=shape, recipes=recipes, started=started)
    # An unbatched piece broadcasts. The array to start from has the result's shape.
    values = [*values]
    if started and not batched[0]:
        values[0] = np.broadcast_to(values[0], (size, *shape))
    shifted = tuple((("slice", None, None, None), *recipe) for recipe in recipes)
    return bind(primitive, *values, shape=(size, *shape), recipes=shifted, started=started)


accumulate_p = Primitive("accumulate", _infer_accumulate, _accumulate, _accumulate_vjp, batch=_batch)
