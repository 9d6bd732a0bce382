"""Futures: collectives that a traced function has started, and whose results it does not have yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.types import ArrayType
from ..errors import Source, TraceError

if TYPE_CHECKING:
    from .trace import Trace

__all__ = ["Future"]


def _not_an_array(self: Future, *args: Any, **kwargs: Any) -> Any:
    raise self.used_as_array()


class Future:
    """A collective that has been started: `fc.all_reduce_start` and its like return one, and `fc.done` takes it.

    It exists while a function is traced. It is not an array: every use of it as one raises a TraceError. `fc.done` takes it
    once, in the function, loop body or branch in which it was started. `types` are the types of the arrays of the result.
    """

    def __init__(self, name: str, result: Any, types: list[ArrayType], trace: Trace, source: Source | None):
        self.types = types
        self._name, self._result, self._trace, self._source = name, result, trace, source
        trace.futures.append(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result, if it is one array."""
        return self._only_type().shape

    @property
    def dtype(self) -> Any:
        """The dtype of the result, if it is one array."""
        return self._only_type().dtype

    @property
    def type(self) -> ArrayType:
        """The type of the result, if it is one array: shape, dtype, and the axes over which it varies."""
        return self._only_type()

    def _only_type(self) -> ArrayType:
        if len(self.types) != 1:
            raise AttributeError  # `__getattr__` says it
        return self.types[0]

    def take(self, trace: Any) -> Any:
        """Return the result, once. Raises TraceError in another trace than the one that started it."""
        if self._trace is not trace:
            there, here = self._trace.label, getattr(trace, "label", "no traced function")
            raise TraceError(
                f"fc.done: the {self} belongs to the trace of {there}, and this is {here}. Call fc.done in the function, loop "
                "body or branch that started it, and pass the result on.",
            )
        if not any(future is self for future in trace.futures):
            raise TraceError(f"fc.done: the {self} is done already. Call fc.done once, and keep its result.")
        trace.futures = [future for future in trace.futures if future is not self]
        result, self._result = self._result, None
        return result

    def used_as_array(self) -> TraceError:
        """Return the error of a use as an array."""
        return TraceError(f"the {self} is used as an array. Take its result first: fc.done(h).")

    def never_done(self, returned: bool = False) -> TraceError:
        """Return the error of a function that ends before `fc.done`."""
        label = self._trace.label
        how = f"{label} returns it" if returned else f"{label} ends without it"
        return TraceError(
            f"the {self} is never done: {how}. Call fc.done(h) in {label}, and use or return the result.", self._source
        )

    def __str__(self) -> str:
        return f"fc.Future of {self._name}_start{f' at {self._source}' if self._source else ''}"

    def __repr__(self) -> str:
        return f"<{self}: {', '.join(map(str, self.types))}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols that other libraries look for
            raise AttributeError(name)
        if name in ("shape", "dtype", "type"):
            raise AttributeError(f"the {self} is of {len(self.types)} arrays, which have no {name} in common; see its types.")
        raise AttributeError(f"the {self} has no attribute {name!r}: it is not an array. Take its result first: fc.done(h).")

    __array_ufunc__ = __array_function__ = _not_an_array
    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = __index__ = __complex__ = _not_an_array
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _not_an_array
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _not_an_array
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = _not_an_array
    __rshift__ = __rrshift__ = __divmod__ = __rdivmod__ = __neg__ = __pos__ = __abs__ = __invert__ = _not_an_array
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _not_an_array
    __hash__ = object.__hash__

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: it has no values."""
        raise self.used_as_array()
