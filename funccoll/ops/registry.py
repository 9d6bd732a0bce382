"""The table of NumPy functions that can be traced, and how tracers dispatch to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..core.interpreter import Traced, as_array
from ..errors import FunccollError, InPlaceError, ShapeError, UnsupportedError
from ..primitives.elementwise import UFUNCS

__all__ = [
    "FUNCTIONS",
    "INSTEAD",
    "as_operand",
    "call_function",
    "dims",
    "has_traced",
    "implements",
    "instead",
    "is_traced",
    "normalize_dim",
    "refuse_out",
    "supported_functions",
]

F = TypeVar("F", bound=Callable[..., Any])

FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""NumPy function -> its traced form, with NumPy's signature."""


def implements(*functions: Callable[..., Any]) -> Callable[[F], F]:
    """Register a function as the traced form of NumPy functions."""

    def register(f: F) -> F:
        FUNCTIONS.update(dict.fromkeys(functions, f))
        return f

    return register


def supported_functions() -> list[str]:
    """Return the names of the NumPy functions and ufuncs that traced functions can use, sorted.

    Returns:
        A list of strings such as `np.add` and `np.linalg.norm`.

    Example:
        >>> names = fc.supported_functions()
        >>> print("np.einsum" in names, "np.random.rand" in names)
        True False
    """
    ufuncs = {f"np.{u.__name__}" for u in (*UFUNCS, np.divmod, np.matmul, np.modf)}
    ufuncs |= {f"np.{name}" for name in ("vecdot", "matvec", "vecmat") if hasattr(np, name)}  # NumPy 2.1 and 2.2
    return sorted({qualified_name(f) for f in FUNCTIONS} | ufuncs)


def qualified_name(function: Callable[..., Any]) -> str:
    """Return a NumPy function's name as users write it, such as `np.linalg.norm`."""
    return f"{getattr(function, '__module__', 'numpy')}.{function.__name__}".replace("numpy", "np", 1)


INSTEAD = {
    "geomspace": "np.exp(np.linspace(np.log(x), np.log(y), n))",
    "ldexp": "x * 2.0 ** y",
    "polyder": "x[:-1] * np.arange(x.size - 1, 0, -1)",
    "polymul": "np.convolve(x, y)",
    "ravel_multi_index": "x * n + y",
    "sort_complex": "np.sort(x)",
    "union1d": "fc.unique(np.concatenate([x, y]), size=n)",
    "unravel_index": "np.divmod(x, n)",
}
"""Expressions for NumPy functions that are not traced. In their plainest calls they compute the same; n is a static number.

A name is listed for its meaning. Functions that are only spelled alike mislead (np.tile for np.quantile).
"""


def instead(name: str) -> str:
    """Return a sentence with the expression to write in place of a NumPy function, or the page to look at."""
    expression = INSTEAD.get(name)
    return "fc.supported_functions() lists what can be traced." if expression is None else f"Write {expression} in its place."


_CHOOSE = "Use np.where(condition, x, y), or a mask to multiply by."
_SHAPE_FROM_VALUES = {
    **dict.fromkeys((np.nonzero, np.flatnonzero, np.argwhere, np.compress, np.extract), _CHOOSE),
    np.unique: "Use fc.unique(x, size=n).",
    np.trim_zeros: "Return the array, and compute it outside the traced function.",
}
_IN_PLACE = {np.fill_diagonal, np.put, np.put_along_axis, np.place, np.putmask, np.copyto}


def call_function(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the table's entry for a NumPy function, as `__array_function__` of a tracer.

    If there is none, the error says what to write.
    """
    implementation = FUNCTIONS.get(function)
    name = qualified_name(function)
    if implementation is None:
        if function in _SHAPE_FROM_VALUES:
            remedy = _SHAPE_FROM_VALUES[function]
            raise UnsupportedError(f"{name} of a traced array has a shape that depends on values. {remedy}")
        if function is np.copyto and not isinstance(args[0], Traced):
            raise InPlaceError(
                "a traced value cannot be written into a NumPy array. Use fc.full(shape, x) in place of np.full(shape, x), "
                "fc.at(a)[index].set(x) in place of np.copyto."
            )
        if function in _IN_PLACE:
            raise InPlaceError(
                f"{name} writes into its argument, and traced values never change. Use x = fc.at(x)[index].set(v)."
            )
        raise UnsupportedError(
            f"{name} cannot be traced by funccoll. {instead(function.__name__)} If its argument does not depend on the "
            "traced inputs, compute it outside the traced function."
        )
    if kwargs.get("out") is not None:
        raise InPlaceError(f"{name}(..., out=...) writes into an array; use the returned value instead.")
    try:
        return implementation(*args, **kwargs)
    except FunccollError:
        raise
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the arguments did not fit the signature
            what = str(error).rpartition("() ")[2]
            raise UnsupportedError(f"{name} while tracing: {what}. Leave it out; the other arguments can be traced.") from None
        raise UnsupportedError(f"{_shown(name, args, kwargs)}: {error}.") from error
    except (ValueError, IndexError) as error:
        raise ShapeError(f"{_shown(name, args, kwargs)}: {error}.") from error


def _shown(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a call as messages show it, with the types of arrays."""

    def show(value: Any) -> str:
        return str(value.type) if isinstance(value, Traced) else f"{value!r:.40}"

    return f"{name}({', '.join([*map(show, args), *(f'{k}={show(v)}' for k, v in kwargs.items())])})"


def refuse_out(out: Any) -> None:
    """Raise an InPlaceError if `out` was given by position."""
    if out is not None:
        raise InPlaceError("out= writes into an array; use the returned value instead.")


def is_traced(x: Any) -> bool:
    """Return True for a tracer.

    Type checkers do not narrow by it: tracers have NumPy's interface, but `Traced` does not state it.
    """
    return isinstance(x, Traced)


def as_operand(x: Any) -> Any:
    """Return a tracer or Python scalar as it is, and anything else as an array of a supported dtype."""
    if isinstance(x, Traced) or type(x) in (int, float, complex, bool):
        return x
    if isinstance(x, (list, tuple)) and has_traced(x):
        return np.stack([as_traceable(v) for v in x])
    return as_array(x)


def as_traceable(x: Any) -> Any:
    """Return the same as `as_operand`, with Python scalars as arrays too."""
    x = as_operand(x)
    return x if isinstance(x, Traced) else np.asarray(x)


def has_traced(x: Any) -> bool:
    """Return True for a tracer, a slice with a traced bound, and lists and tuples that hold one."""
    if isinstance(x, slice):
        return has_traced((x.start, x.stop, x.step))
    return any(map(has_traced, x)) if isinstance(x, (list, tuple)) else isinstance(x, Traced)


def normalize_dim(axis: Any, ndim: int, what: str = "axis") -> int:
    """Return a dimension counted from either end as 0 to ndim - 1. Raises NumPy's AxisError if there is no such dimension."""
    return int(np.lib.array_utils.normalize_axis_index(axis, ndim, what))


def dims(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return NumPy's `axis` argument (None, an int, a tuple) as sorted dimensions."""
    if axis is None:
        return tuple(range(ndim))
    return tuple(sorted(np.lib.array_utils.normalize_axis_tuple(axis, ndim)))
