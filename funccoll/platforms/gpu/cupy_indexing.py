"""Indexing through CuPy: reads, and updates in a fixed order.

CuPy wraps an index that is out of range. Here the next read of values by the host raises IndexError, as in NumPy
(`deferred_checks`). The tracer has checked static indices.

If positions repeat, CuPy's own updates race. Its additions are atomic operations in any order, and it sets any of the values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.ir import Atom, Equation
from ...core.types import ArrayType
from ...primitives.indexing import Recipe, getitem_p, index_add_p, index_set_p, realize, result_shape, scatter_p
from ...primitives.piece_sums import accumulate_p, divide_operands
from .deferred_checks import DeferredChecks

__all__ = ["CupyIndexing"]

Compute = Callable[..., Any]


class CupyIndexing:
    """The primitives of indexing. `kernels` has `scatter_add` (`CupyLibrary`)."""

    def __init__(self, cupy: Any, kernels: Any, checks: DeferredChecks):
        self._cupy, self._kernels, self._checks = cupy, kernels, checks
        self.rules: dict[Any, Callable[[Equation], Compute]] = {
            getitem_p: self._getitem,
            scatter_p: self._scatter,
            accumulate_p: self._accumulate,
            index_add_p: self._index_add,
            index_set_p: self._index_set,
        }

    # ------------------------------------------------------------ primitives

    def _getitem(self, eqn: Equation) -> Compute:
        recipe: Recipe = eqn.params["recipe"]
        if len(eqn.inputs) == 1:
            index = realize(recipe, ())
            return lambda x: x[index]
        note = self._notes(eqn, eqn.inputs[0].type.shape, recipe, _types(eqn.inputs[1:]))

        def getitem(x: Any, *arrays: Any) -> Any:
            note(arrays)
            return x[realize(recipe, arrays)]

        return getitem

    def _scatter(self, eqn: Equation) -> Compute:
        cupy, shape, dtype = self._cupy, eqn.params["shape"], eqn.outputs[0].type.dtype
        add = self._adding(eqn, shape, eqn.params["recipe"], _types(eqn.inputs[1:]))

        def scatter(value: Any, *arrays: Any) -> Any:
            out = cupy.zeros(shape, dtype)
            add(out, value, arrays)
            return out

        return scatter

    def _accumulate(self, eqn: Equation) -> Compute:
        cupy, shape, dtype = self._cupy, eqn.params["shape"], eqn.outputs[0].type.dtype
        recipes, started = eqn.params["recipes"], eqn.params["started"]
        _, pieces = divide_operands(eqn.inputs, recipes, started)
        adds = [self._adding(eqn, shape, recipe, _types(arrays)) for _, arrays, recipe in pieces]

        def accumulate(*operands: Any) -> Any:
            start, pieces = divide_operands(operands, recipes, started)
            out = cupy.zeros(shape, dtype) if start is None else start.copy()
            for add, (value, arrays, _) in zip(adds, pieces, strict=True):
                add(out, value, arrays)
            return out

        return accumulate

    def _index_add(self, eqn: Equation) -> Compute:
        add = self._adding(eqn, eqn.inputs[0].type.shape, eqn.params["recipe"], _types(eqn.inputs[2:]))

        def index_add(x: Any, value: Any, *arrays: Any) -> Any:
            out = x.copy()
            add(out, value, arrays)
            return out

        return index_add

    def _index_set(self, eqn: Equation) -> Compute:
        cupy, shape, types = self._cupy, eqn.inputs[0].type.shape, _types(eqn.inputs[2:])
        places = _Places(cupy, shape, eqn.params["recipe"], types)
        note = self._notes(eqn, shape, eqn.params["recipe"], types)
        index = realize(eqn.params["recipe"], ()) if not types else None

        def index_set(x: Any, value: Any, *arrays: Any) -> Any:
            out = x.copy()
            if index is not None:
                out[index] = value
            elif places.updates:
                note(arrays)
                rows, values = places.of(value.astype(out.dtype, copy=False), arrays)
                # The last update of a row wins. It has the greatest number, in any order of atomic operations.
                last = cupy.full(places.count, -1, np.int64)
                cupy.maximum.at(last, rows, cupy.arange(rows.size, dtype=np.int64))
                out.reshape(places.count, places.width)[rows] = values[last[rows]]
            return out

        return index_set

    # ------------------------------------------------------------ parts

    def _adding(
        self, eqn: Equation, shape: tuple[int, ...], recipe: Recipe, types: Sequence[ArrayType]
    ) -> Callable[[Any, Any, Any], None]:
        """Return a function that adds values to an array in place, in the order of the updates."""
        cupy, kernels = self._cupy, self._kernels
        places = _Places(cupy, shape, recipe, types)
        note = self._notes(eqn, shape, recipe, types)
        index = (*realize(recipe, ()), ...) if not types else None  # the ellipsis makes it a view, also of one element

        def add(out: Any, value: Any, arrays: Sequence[Any]) -> None:
            if index is not None:  # no position repeats
                region = out[index]
                cupy.add(region, value, out=region)
            elif places.updates:
                note(arrays)
                rows, values = places.of(value.astype(out.dtype, copy=False), arrays)
                order = cupy.argsort(rows)  # CuPy's is stable
                kernels.scatter_add(out.reshape(places.count, places.width), rows[order], order, values)

        return add

    def _notes(
        self, eqn: Equation, shape: tuple[int, ...], recipe: Recipe, types: Sequence[ArrayType]
    ) -> Callable[[Sequence[Any]], None]:
        """Return a function that notes arrays of indices. None of them may be out of its dimension's range."""
        consuming = [entry for entry in recipe if entry[0] != "new"]
        sizes = [n for n, entry in zip(shape, consuming, strict=False) if entry[0] == "array"]
        notes = [
            self._checks.below(n, functools.partial(_out_of_range, size=n), eqn.source) if t.size else None
            for n, t in zip(sizes, types, strict=True)
        ]

        def note(arrays: Sequence[Any]) -> None:
            for each, indices in zip(notes, arrays, strict=True):
                if each is not None:
                    # -1 is the last position, as 0 is the first: ~i counts from the end.
                    each(indices if indices.dtype.kind == "u" else self._cupy.maximum(indices, self._cupy.invert(indices)))

        return note


def _types(atoms: Sequence[Atom]) -> list[ArrayType]:
    return [a.type for a in atoms]


def _out_of_range(index: int, size: int) -> IndexError:
    return IndexError(
        f"an array of indices holds {index} or {~index}, out of range for a dimension of size {size}. The GPU computed with a "
        "wrapped one: no result that depends on it is right."
    )


class _Places:
    """The places that an index selects: `updates` rows of the array, seen as (count, width).

    A row consists of the trailing dimensions that are selected whole.
    """

    def __init__(self, cupy: Any, shape: tuple[int, ...], recipe: Recipe, arrays: Sequence[ArrayType]):
        self._cupy = cupy
        self._region = result_shape(shape, recipe, arrays)
        lead, dim, self._recipe = 0, 0, recipe[:0]
        for k, entry in enumerate(recipe):
            if entry[0] == "new":
                continue
            if entry[0] != "slice" or slice(*entry[1:]).indices(shape[dim]) != (0, shape[dim], 1):
                lead, self._recipe = dim + 1, recipe[: k + 1]
            dim += 1
        self._lead = shape[:lead]
        self.count, self.width = math.prod(shape[:lead]), math.prod(shape[lead:])
        self.updates = math.prod(self._region) // self.width if self.width else 0

    def of(self, value: Any, arrays: Sequence[Any]) -> tuple[Any, Any]:
        """Return the row of each update (int64), and the values as (updates, width), in NumPy's order."""
        cupy = self._cupy
        rows = cupy.arange(self.count, dtype=np.int64).reshape(self._lead)[realize(self._recipe, arrays)]
        values = cupy.broadcast_to(value, self._region).reshape(self.updates, self.width)
        return rows.reshape(-1), cupy.ascontiguousarray(values)
