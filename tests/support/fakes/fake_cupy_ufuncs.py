"""Ufuncs of the fake of CuPy: its loops, its choice among them, and its values where they are not NumPy's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def dtype_of(char: str) -> np.dtype:
    return BFLOAT16 if char == "E" else np.dtype(char)


def _wide(x: Any) -> Any:
    return x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind in "fV" else x


def _floor_divide(x: Any, y: Any) -> Any:
    return np.floor_divide(x, y) if x.dtype.kind in "iu" else np.floor(_wide(x) / _wide(y))


def _remainder(x: Any, y: Any) -> Any:
    return np.remainder(x, y) if x.dtype.kind in "iu" else _wide(x) - _floor_divide(x, y).astype(x.dtype) * _wide(y)


def _fmod(x: Any, y: Any) -> Any:
    return np.where(y == 0, 0, np.fmod(x.astype(np.float64), y.astype(np.float64))) if x.dtype.kind in "iu" else np.fmod(x, y)


def _power(x: Any, y: Any) -> Any:
    if x.dtype.kind != "i":
        return np.power(x, y)
    negative = np.where(x == -1, np.where(y & 1, -1, 1), np.where(x == 1, 1, 0))
    return np.where(y < 0, negative, np.power(x, np.maximum(y, 0)))


VALUES: dict[str, Callable[..., Any]] = {
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "fmod": _fmod,
    "power": _power,
    "float_power": lambda x, y: np.power(x, y) if x.dtype == np.complex64 else np.float_power(x, y),
    "where": np.where,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
}
"""Names whose values CuPy computes in another way, or NumPy lacks."""

_KINDS = ((bool, np.bool_), (int, np.integer), (float, complex, np.inexact))


def _score(kind: type) -> int:
    return next((i for i, kinds in enumerate(_KINDS) if issubclass(kind, kinds)), 3)


class Ufunc:
    """As cupy.ufunc. `array` is the class of arrays, `new` makes one, `launch` runs work."""

    def __init__(self, name: str, record: dict[str, Any], array: type, new: Callable, launch: Callable):
        self.name, self.__name__, self.types = f"cupy_{name}", name, record["types"]
        self._refused, self._at, self._array, self._new, self._launch = record["refused"], record["at"], array, new, launch
        self._loops = []
        for text in self.types:
            left, right = text.split("->")
            if "V" not in text:
                self._loops.append((text, tuple(map(dtype_of, left)), tuple(map(dtype_of, right))))
        self.nin, self.nout = len(self._loops[0][1]), len(self._loops[0][2])

    def _loop(self, operands: tuple, dtype: Any) -> tuple[tuple[np.dtype, ...], tuple[np.dtype, ...]]:
        """The first loop that fits, as CuPy chooses it."""
        dtypes = [np.dtype(type(x)) if type(x) in (bool, int, float, complex) else x.dtype for x in operands]
        weak = [type(x) if type(x) in (int, float, complex) else None for x in operands]
        strong = [_score(d.type) for d, w in zip(dtypes, weak, strict=True) if w is None]
        soft = [_score(w) for w in weak if w is not None]
        if not (soft and strong and max(strong) >= max(soft)):
            weak = [None] * len(weak)

        def fits(have: np.dtype, take: np.dtype, kind: Any) -> bool:
            if np.can_cast(have, take):
                return True
            return kind is not None and np.result_type(kind(0), take) == take

        for text, inputs, outputs in self._loops:
            if dtype is not None:
                found = all(o == dtype for o in outputs)
            else:
                found = all(map(fits, dtypes, inputs, weak))
            if found:
                if text in self._refused:
                    raise TypeError(f"{self.name} does not support {text}")
                return inputs, outputs
        raise TypeError(f"Wrong type ({dtypes}) of arguments for {self.name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, dtype, casting = kwargs.pop("out", None), kwargs.pop("dtype", None), kwargs.pop("casting", "same_kind")
        if kwargs:
            raise TypeError(f"Wrong arguments {kwargs}")
        if not self.nin <= len(args) <= self.nin + self.nout:
            raise TypeError(f"Wrong number of arguments for {self.name!r}.")
        operands = args[: self.nin]
        for x in operands:
            if not isinstance(x, (self._array, bool, int, float, complex, np.generic)):
                raise TypeError(f"Unsupported type {type(x)}")
        outs = [*args[self.nin :]] or ([*out] if isinstance(out, tuple) else [out] * (out is not None))
        inputs, outputs = self._loop(operands, None if dtype is None else np.dtype(dtype))
        shape = np.broadcast_shapes(*(x.shape for x in (*operands, *outs) if isinstance(x, self._array)))
        made = []
        for k, d in enumerate(outputs):
            given = outs[k] if k < len(outs) else None
            if given is None:
                given = self._new(shape, d)
            elif not isinstance(given, self._array):
                raise TypeError("Output arguments type must be cupy.ndarray")
            elif given.shape != shape:
                raise ValueError("Out shape is mismatched")
            elif not np.can_cast(d, given.dtype, casting):
                raise TypeError(f"Cannot cast output operand from {d!r} to {given.dtype!r} according to the rule '{casting}'")
            made.append(given)
        pairs = enumerate(zip(operands, inputs, strict=True))
        scalars = {i: d.type(x) for i, (x, d) in pairs if not isinstance(x, self._array)}

        def work() -> None:
            values = [scalars[i] if i in scalars else x.host.astype(inputs[i]) for i, x in enumerate(operands)]
            function = VALUES.get(self.__name__) or getattr(np, self.__name__)
            results = function(*map(np.asarray, values))
            for target, result, d in zip(made, results if self.nout > 1 else [results], outputs, strict=True):
                np.copyto(target.host, np.asarray(result).astype(d), casting="unsafe")

        self._launch(work)
        return made[0] if self.nout == 1 else tuple(made)

    def at(self, a: Any, indices: Any, b: Any = None) -> None:
        if self._at is None:
            raise NotImplementedError(f"`{self.name}.at` is not supported yet")
        if self._at != "max":
            raise NotImplementedError(f"the fake of CuPy has no {self.name}.at: it adds in any order")
        if a.dtype not in (np.int32, np.int64, np.float32, np.float64, np.uint32, np.uint64):
            raise TypeError("cupy.maximum.at only supports int32, int64, float32, float64, uint32, uint64 as data type")
        items, sizes = a._index(indices)
        self._launch(lambda: np.maximum.at(a.host, a._wrapped(items, sizes), b.host.astype(a.dtype)))
