"""The table of NumPy functions that can be traced, and the tracers' dispatch to it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..errors import FunccollError, InPlaceError, ShapeError, UnsupportedError
from ..ir import Traced, as_array
from ..primitives.elementwise import UFUNCS

__all__ = [
    "FUNCTIONS", "as_operand", "call_function", "dims", "implements", "near", "normalize_dim", "refuse_out",
    "supported_functions",
]  # fmt: skip

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
    """The NumPy functions and ufuncs that traced functions can use: `np.add`, `np.linalg.norm`, ..., sorted."""
    ufuncs = {f"np.{u.__name__}" for u in (*UFUNCS, np.divmod, np.matmul, np.modf)}
    return sorted({qualified_name(f) for f in FUNCTIONS} | ufuncs)


def qualified_name(function: Callable[..., Any]) -> str:
    """A NumPy function's name as users write it: `np.linalg.norm`."""
    return f"{getattr(function, '__module__', 'numpy')}.{function.__name__}".replace("numpy", "np", 1)


def near(name: str) -> str:
    """A sentence with supported names similar to `name`, or where to look."""
    names = {full.rpartition(".")[2]: full for full in supported_functions()}
    # A supported name inside `name` is a better match than common letters: np.sum for np.nansum.
    parts = sorted((n for n in names if len(n) > 2 and n in name), key=lambda n: (-len(n), n))
    close = list(dict.fromkeys([*parts, *difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.6)]))[:3]
    if not close:
        return "fc.supported_functions() lists what can be traced."
    return f"Supported, with a similar name: {', '.join(names[n] for n in close)}."


_SHAPE_FROM_VALUES = {np.nonzero, np.flatnonzero, np.argwhere, np.unique, np.compress, np.extract, np.trim_zeros}
_IN_PLACE = {np.fill_diagonal, np.put, np.put_along_axis, np.place, np.putmask, np.copyto}


def call_function(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`__array_function__` of a tracer: call the table's entry; raises an error with similar names if there is none."""
    implementation = FUNCTIONS.get(function)
    name = qualified_name(function)
    if implementation is None:
        if function in _SHAPE_FROM_VALUES:
            raise UnsupportedError(
                f"{name} of a traced array has a shape that depends on values. Use np.where(condition, x, y), or a mask to "
                "multiply by."
            )
        if function in _IN_PLACE:
            raise InPlaceError(
                f"{name} writes into its argument, and traced values never change. Use x = fc.at(x)[index].set(v)."
            )
        raise UnsupportedError(
            f"{name} cannot be traced by funccoll. {near(function.__name__)} If its argument does not depend on the "
            "traced inputs, compute it outside the traced function."
        )
    if kwargs.get("out") is not None:
        raise InPlaceError(f"{name}(..., out=...) writes into an array; use the returned value instead.")
    try:
        return implementation(*args, **kwargs)
    except FunccollError:
        raise
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the call did not fit the signature
            what = str(error).rpartition("() ")[2]
            raise UnsupportedError(f"{name} while tracing: {what}. Leave it out; the other arguments can be traced.") from None
        raise UnsupportedError(f"{_shown(name, args, kwargs)}: {error}.") from error
    except (ValueError, IndexError) as error:
        raise ShapeError(f"{_shown(name, args, kwargs)}: {error}.") from error


def _shown(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call as messages show it: arrays by their types."""

    def show(value: Any) -> str:
        return str(value.type) if isinstance(value, Traced) else f"{value!r:.40}"

    return f"{name}({', '.join([*map(show, args), *(f'{k}={show(v)}' for k, v in kwargs.items())])})"


def refuse_out(out: Any) -> None:
    """Raise an InPlaceError for an `out` that was given by position."""
    if out is not None:
        raise InPlaceError("out= writes into an array; use the returned value instead.")


def as_operand(x: Any) -> Any:
    """A tracer or Python scalar as it is, anything else as an array of a supported dtype."""
    if isinstance(x, Traced) or type(x) in (int, float, complex, bool):
        return x
    if isinstance(x, (list, tuple)) and _has_traced(x):
        return np.stack([as_operand(v) if isinstance(v, Traced) else np.asarray(as_operand(v)) for v in x])
    return as_array(x)


def as_traceable(x: Any) -> Any:
    """Like `as_operand`, with Python scalars as arrays too."""
    x = as_operand(x)
    return x if isinstance(x, Traced) else np.asarray(x)


def _has_traced(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(map(_has_traced, x))
    return isinstance(x, Traced)


def normalize_dim(axis: Any, ndim: int, what: str = "axis") -> int:
    """A dimension counted from either end, as 0 to ndim - 1; NumPy's AxisError otherwise."""
    return int(np.lib.array_utils.normalize_axis_index(axis, ndim, what))


def dims(axis: Any, ndim: int) -> tuple[int, ...]:
    """NumPy's `axis` argument (None, an int, a tuple) as sorted dimensions."""
    if axis is None:
        return tuple(range(ndim))
    return tuple(sorted(np.lib.array_utils.normalize_axis_tuple(axis, ndim)))
