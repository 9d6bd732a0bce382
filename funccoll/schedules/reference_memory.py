"""Reference memory: the values that the reference interpreter works on, and the arithmetic of executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.types import is_inexact
from ..primitives.combining import fold
from .chunk_layout import Index

__all__ = ["ReferenceMemory", "reference_memory"]


def reference_memory(size: int, dtype: Any, op: str, nranks: int) -> ReferenceMemory:
    """Return memory for `size` elements among `nranks` ranks. Its combines apply `op`."""
    return (_Mean if op == "mean" else ReferenceMemory)(size, np.dtype(dtype), op, nranks)


class ReferenceMemory:
    """A flat memory, poisoned at first.

    `read` returns a view, or another value that `combine` and `write` take; `combine` returns a new one.
    """

    def __init__(self, size: int, dtype: np.dtype, op: str, nranks: int):
        self.op, self.nranks = op, nranks
        self.poison_value = _poison_value(dtype)
        self.numbers = np.full(size, self.poison_value)

    def read(self, index: Index) -> Any:
        """Return the values at an index."""
        return self.numbers[index]

    def combine(self, values: Sequence[Any]) -> Any:
        """Return the left fold of values, and a copy of a single one."""
        return fold(values, self.op) if len(values) > 1 else values[0].copy()

    def write(self, index: Index, value: Any) -> None:
        """Write a value at an index."""
        self.numbers[index] = value

    def poison(self, index: Index) -> None:
        """Overwrite the values at an index with poison."""
        self.numbers[index] = self.poison_value

    def store_input(self, start: int, values: np.ndarray) -> None:
        """Write one rank's input from an element on."""
        self.numbers[start : start + values.size] = values.reshape(-1)

    def read_output(self, start: int, stop: int, folds_one: bool) -> np.ndarray:
        """Return one rank's reduced output. Max and min of a single rank (`folds_one`) give the canonical NaN too."""
        output = self.numbers[start:stop].copy()
        return fold([output], self.op) if folds_one and self.op in ("max", "min") else output


class _Mean(ReferenceMemory):
    """Memory for means. It counts the ranks in every element. The combine that completes a sum divides it."""

    def __init__(self, size: int, dtype: np.dtype, op: str, nranks: int):
        super().__init__(size, dtype, op, nranks)
        self.ranks = np.zeros(size, np.int64)

    def read(self, index: Index) -> Any:
        return _Value(self.numbers[index], self.ranks[index])

    def combine(self, values: Sequence[_Value]) -> _Value:
        if len(values) == 1:
            return values[0].copy()
        ranks = sum(v.ranks for v in values)
        numbers = [v.numbers for v in values]
        total = fold(numbers, "sum")
        return _Value(np.where(ranks == self.nranks, fold(numbers, "mean", self.nranks), total), ranks)

    def write(self, index: Index, value: _Value) -> None:
        self.numbers[index], self.ranks[index] = value.numbers, value.ranks

    def store_input(self, start: int, values: np.ndarray) -> None:
        super().store_input(start, values)
        self.ranks[start : start + values.size] = 1


class _Value:
    __slots__ = ("numbers", "ranks")

    def __init__(self, numbers: np.ndarray, ranks: Any):
        self.numbers, self.ranks = numbers, ranks

    def copy(self) -> _Value:
        return _Value(self.numbers.copy(), np.copy(self.ranks))


def _poison_value(dtype: np.dtype) -> Any:
    """Return a value that shows in every result it reaches: NaN, or an unlikely integer."""
    if is_inexact(dtype):
        return np.asarray(np.nan, dtype)
    return np.asarray(0x5A5A5A5A5A5A5A5B).astype(dtype)
