"""Operators and methods of Arrays that compute on the global value, as those of NumPy's arrays."""

from __future__ import annotations

import operator
from typing import Any

from ..core.interpreter import Traced
from ..errors import user_frames

__all__ = ["add_operators"]

_eager = user_frames(every=True)


def _binary(cls: type, function: Any, reflected: bool = False) -> Any:
    @_eager
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, Traced):
            return NotImplemented
        mine, other = self._whole(), other._whole() if isinstance(other, cls) else other
        return function(other, mine) if reflected else function(mine, other)

    return method


def _method(name: str) -> Any:
    @_eager
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._whole(), name)(*args, **kwargs)

    method.__doc__ = f"`np.ndarray.{name}` of the global value, as a NumPy array; on GPUs CuPy's."
    method.__name__ = name
    return method


def _unary(function: Any) -> Any:
    @_eager
    def method(self: Any) -> Any:
        return function(self._whole())

    return method


def add_operators(cls: type) -> None:
    """Give the class of Arrays the operators and methods of NumPy's arrays."""
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
        function = getattr(operator, f"{name}_" if name in ("and", "or") else name)
        setattr(cls, f"__{name}__", _binary(cls, function))
        setattr(cls, f"__r{name}__", _binary(cls, function, reflected=True))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(cls, f"__{name}__", _binary(cls, getattr(operator, name)))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(cls, f"__{name}__", _unary(getattr(operator, name)))
    for name in (
        "all",
        "any",
        "argmax",
        "argmin",
        "clip",
        "copy",
        "cumsum",
        "diagonal",
        "dot",
        "flatten",
        "max",
        "mean",
        "min",
        "nonzero",
        "prod",
        "ravel",
        "repeat",
        "reshape",
        "round",
        "squeeze",
        "std",
        "sum",
        "swapaxes",
        "take",
        "tobytes",
        "trace",
        "transpose",
        "var",
    ):
        setattr(cls, name, _method(name))
