"""Tracers: arrays without values that record the operations on them through NumPy's own protocols."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.interpreter import Traced, leaked
from ..core.ir import Var
from ..core.types import is_inexact
from ..errors import ConcretizationError, InPlaceError, MissingMethodError, Source, TraceError
from ..ops import call_function
from ..ops.elementwise import apply_ufunc, astype, call_ufunc
from ..ops.indexing import getitem
from ..ops.registry import as_operand, instead

if TYPE_CHECKING:
    from .trace import Trace

__all__ = ["Tracer", "check_alive"]


def _ufunc_operator(ufunc: np.ufunc, reflected: bool = False) -> Any:
    def operator(self: Tracer, other: Any) -> Any:
        if not isinstance(other, (Traced, int, float, complex, np.ndarray, np.generic)):
            if not hasattr(other, "__array__") and not isinstance(other, (list, tuple)):
                return NotImplemented
        other = as_operand(other)
        return apply_ufunc(ufunc, other, self) if reflected else apply_ufunc(ufunc, self, other)

    return operator


def _power(self: Tracer, exponent: Any) -> Any:
    # NumPy's own shortcuts for scalar exponents, so traced and plain results have the same bits.
    # NumPy scalars are excluded: they are not weak, and take part in promotion.
    if type(exponent) in (int, float):
        shortcuts: dict[float, np.ufunc]
        if self.dtype.kind == "c":
            whole: dict[float, np.ufunc] = {-1: np.reciprocal, 1: np.positive, 2: np.square}
            shortcuts = whole if type(exponent) is int else {0.5: np.sqrt, 1.0: np.positive}
        elif is_inexact(self.dtype):
            shortcuts = {-1.0: np.reciprocal, 0.5: np.sqrt, 1.0: np.positive, 2.0: np.square}
        else:
            shortcuts = {2: np.square} if type(exponent) is int else {}
        if exponent in shortcuts:
            return apply_ufunc(shortcuts[exponent], self)
    return apply_ufunc(np.power, self, as_operand(exponent))


def _concrete(what: str, method: str = "") -> Any:
    def refuse(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        copies = self.frame.copies(self.variable) if method else ()
        if copies:
            value = _equal_copy(what, copies)
            return getattr(value[()] if method == "__format__" else value, method)(*args, **kwargs)
        check_alive(self)
        raise ConcretizationError(
            f"{what} needs the value of a traced array of type {self.type}. While a function is traced, arrays have types "
            "and no values: the program is compiled once, for all values. " + _REMEDY.get(what, _REMEDY["float()"])
        )

    return refuse


def _equal_copy(what: str, copies: Sequence[tuple[str, np.ndarray]]) -> np.ndarray:
    """Return the value that devices share. Raises ConcretizationError if it differs between them."""
    (first, value), *others = copies
    for device, other in others:
        if not np.array_equal(value, other, equal_nan=is_inexact(value.dtype)):
            raise ConcretizationError(
                f"{what} of a value that differs between devices: {value!r:.60} at {first}, {other!r:.60} at {device}. Python "
                "can do one thing for all of them: use np.where or fc.cond, which runs a branch on each."
            )
    return np.array(value)


def _equality(ufunc: np.ufunc, otherwise: bool) -> Any:
    """Return a comparison with any value: None and strings equal no element, as in NumPy."""
    compare = _ufunc_operator(ufunc)

    def method(self: Tracer, other: Any) -> Any:
        if other is None or isinstance(other, str | bytes):
            return np.full(self.shape, otherwise)
        return compare(self, other)

    return method


_FORMAT = _concrete("a format such as f'{x:.3f}'", "__format__")
_REMEDY = {
    "float()": 'Print it with fc.debug.print("{:.3f}", x), which shows the value of each run; or compute with the array itself '
    "(operators, np.* functions), or return it; to fill a NumPy array, write out = fc.at(out)[i].set(x) in place of "
    "out[i] = x, or np.stack([...]).",
    "bool() (Python if, while, and, or, not, assert)": "Choose with np.where(condition, a, b) or "
    "fc.cond(condition, true_fun, false_fun, *args), loop with fc.while_loop(test, body, init), join conditions with &, | and "
    "~, or decide on something that is known while tracing (a shape, a static argument).",
    "index() (range, a Python index)": "Loop with fc.fori_loop(0, n, body, init) in place of range(n), or over an array's "
    "rows with fc.scan(body, init, xs); to choose one of several values, use fc.asarray(values)[i]; or pass the number as a "
    "static argument: fc.jit(..., static_argnums=...).",
    "int()": "Convert with x.astype(np.int64), and loop with fc.fori_loop(0, n, body, init) in place of range(int(n)); a "
    "number that shapes depend on is a static argument: fc.jit(..., static_argnums=...).",
    "__array__ (np.asarray, or a library that is not traced)": "Use np.* functions on the traced array itself: "
    "fc.asarray([...]) in place of np.array([...]), fc.full(shape, x) in place of np.full(shape, x), fc.at(a)[i].set(x) in "
    "place of a[i] = x, for a NumPy array a fc.asarray(a)[i] in place of a[i] and np.take(fc.asarray(a), i) in place of "
    "np.take(a, i), x.astype(dtype) in place of np.float32(x), fc.special's functions in place of scipy.special's logsumexp, "
    "softmax, polygamma and multigammaln; leave out np.asarray(x).",
}

_NEW_ARRAYS = {
    "fill": "np.full_like(x, value)",
    "sort": "np.sort(x)",
    "partition": "np.partition(x, kth)",
    "resize": "np.resize(x, shape)",
}


_DEVICE = "nothing: a call runs where its mesh and its arguments are (fc.make_mesh, fc.device_put)"
_ELSEWHERE = {
    # a method of torch's tensors: its equivalent here
    "backward": "fc.grad(loss_fn)(params), or fc.value_and_grad",
    "clone": "x itself: traced arrays never change",
    "contiguous": "x itself",
    "cpu": _DEVICE,
    "cuda": _DEVICE,
    "detach": "fc.stop_gradient(x)",
    "dim": "x.ndim",
    "expand": "np.broadcast_to(x, shape)",
    "float": "x.astype(np.float32)",
    "half": "x.astype(np.float16)",
    "long": "x.astype(np.int64)",
    "numel": "x.size",
    "numpy": "x itself: np.* functions take it, and it has no values while a function is traced",
    "permute": "np.transpose(x, axes)",
    "softmax": "fc.nn.softmax(x, axis)",
    "relu": "fc.nn.relu(x)",
    "to": "x.astype(dtype)",
    "unsqueeze": "np.expand_dims(x, axis)",
    "view": "x.reshape(shape)",
}


class Tracer(Traced):
    """An array without values: it has a shape, a dtype and `varying`, and supports NumPy's operations."""

    __slots__ = ("frame", "source", "type", "variable", "weak")
    __array_priority__ = 1000

    def __init__(self, frame: Trace, var: Var, source: Source | None = None, weak: type | None = None):
        self.frame, self.variable, self.type, self.source = frame, var, var.type, source
        self.weak = weak  # int, float or complex if it stands for a Python scalar (NEP 50)

    # ------------------------------------------------------------ attributes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on one device."""
        return self.type.shape

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        return self.type.dtype

    @property
    def varying(self) -> frozenset[str]:
        """The mesh axes along which devices may hold different values."""
        return self.type.varying

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.type.shape)

    @property
    def size(self) -> int:
        """Number of elements on one device."""
        return math.prod(self.type.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on one device."""
        return self.type.nbytes

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.type.dtype.itemsize

    def __repr__(self) -> str:
        copies = self.frame.copies(self.variable)
        if len(copies) < 2:
            return f"Tracer({self.type}{f', {copies[0][1]!r}' if copies else ''})"
        return f"Tracer({self.type}, {{{', '.join(f'{device}: {value!r}' for device, value in copies)}}})"

    def __len__(self) -> int:
        if not self.shape:
            raise TraceError(
                f"a traced number of type {self.type} has no len(), and nothing to iterate over. A shape, an axis or a count "
                "is known while tracing: pass it as a static argument, fc.jit(..., static_argnums=...). In place of range(n) "
                "stands fc.fori_loop(0, n, body, init)."
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    # ------------------------------------------------------------ NumPy's protocols

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return call_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return call_function(func, args, kwargs)

    __array__ = _concrete("__array__ (np.asarray, or a library that is not traced)", "__array__")
    __bool__ = _concrete("bool() (Python if, while, and, or, not, assert)", "__bool__")
    __index__ = _concrete("index() (range, a Python index)", "__index__")
    __int__ = _concrete("int()", "__int__")
    __float__ = _concrete("float()", "__float__")
    __complex__ = _concrete("complex()", "__complex__")
    item = _concrete(".item()", "item")
    tolist = _concrete(".tolist()", "tolist")
    tobytes = _concrete(".tobytes()", "tobytes")
    __reduce__ = _concrete("pickle")

    def __format__(self, spec: str) -> str:
        return _FORMAT(self, spec) if spec else repr(self)  # in an evaluation, the format of a number

    def __copy__(self) -> Tracer:
        return self

    def __deepcopy__(self, memo: Any) -> Tracer:
        return self  # a traced value never changes

    def __getitem__(self, index: Any) -> Any:
        return getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise InPlaceError(
            f"in-place assignment to a traced array of type {self.type}: traced values never change. Use "
            "x = fc.at(x)[index].set(value), or .add(value)."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "at":
            raise MissingMethodError("a traced array has no .at: write fc.at(x)[index].set(value).")
        if name in ("fill", "sort", "put", "partition", "resize", "setfield", "byteswap"):
            remedy = f"{_NEW_ARRAYS[name]}, or " if name in _NEW_ARRAYS else ""
            raise MissingMethodError(
                f"the array method .{name} works in place, and traced arrays never change. Use {remedy}"
                "x = fc.at(x)[index].set(value), which makes a new array."
            )
        if name in _ELSEWHERE:
            raise MissingMethodError(f"a traced array has no .{name}; here it is {_ELSEWHERE[name]}.")
        if hasattr(np.ndarray, name):
            raise MissingMethodError(f"the array attribute .{name} cannot be traced by funccoll. {instead(name)}")
        raise AttributeError(f"a traced array has no attribute {name!r}.")

    # ------------------------------------------------------------ operators

    __add__, __radd__ = _ufunc_operator(np.add), _ufunc_operator(np.add, True)
    __sub__, __rsub__ = _ufunc_operator(np.subtract), _ufunc_operator(np.subtract, True)
    __mul__, __rmul__ = _ufunc_operator(np.multiply), _ufunc_operator(np.multiply, True)
    __truediv__, __rtruediv__ = _ufunc_operator(np.divide), _ufunc_operator(np.divide, True)
    __floordiv__, __rfloordiv__ = _ufunc_operator(np.floor_divide), _ufunc_operator(np.floor_divide, True)
    __mod__, __rmod__ = _ufunc_operator(np.remainder), _ufunc_operator(np.remainder, True)
    __and__, __rand__ = _ufunc_operator(np.bitwise_and), _ufunc_operator(np.bitwise_and, True)
    __or__, __ror__ = _ufunc_operator(np.bitwise_or), _ufunc_operator(np.bitwise_or, True)
    __xor__, __rxor__ = _ufunc_operator(np.bitwise_xor), _ufunc_operator(np.bitwise_xor, True)
    __lshift__, __rlshift__ = _ufunc_operator(np.left_shift), _ufunc_operator(np.left_shift, True)
    __rshift__, __rrshift__ = _ufunc_operator(np.right_shift), _ufunc_operator(np.right_shift, True)
    __lt__, __le__ = _ufunc_operator(np.less), _ufunc_operator(np.less_equal)
    __gt__, __ge__ = _ufunc_operator(np.greater), _ufunc_operator(np.greater_equal)
    __eq__, __ne__ = _equality(np.equal, False), _equality(np.not_equal, True)
    __hash__ = None  # type: ignore[assignment]  # equal elementwise, like an ndarray
    __pow__, __rpow__ = _power, _ufunc_operator(np.power, True)

    def __matmul__(self, other: Any) -> Any:
        return np.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return np.matmul(other, self)

    def __neg__(self) -> Any:
        return apply_ufunc(np.negative, self)

    def __pos__(self) -> Any:
        return apply_ufunc(np.positive, self)

    def __abs__(self) -> Any:
        return apply_ufunc(np.absolute, self)

    def __invert__(self) -> Any:
        return apply_ufunc(np.invert, self)

    def __round__(self, ndigits: int | None = None) -> Any:
        return np.round(self, ndigits or 0)

    def __divmod__(self, other: Any) -> Any:
        return np.divmod(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return np.divmod(other, self)

    # ------------------------------------------------------------ methods

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        """The array converted to `dtype`."""
        return astype(self, dtype)

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        """The elements in another shape; one size may be -1."""
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)  # type: ignore[call-overload]

    def transpose(self, *axes: Any) -> Any:
        """The dimensions in another order (reversed by default)."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], (int, np.integer)) else axes
        return np.transpose(self, order or None)

    def copy(self, order: str = "C") -> Any:
        """Itself: a traced value never changes."""
        return self

    def flatten(self, order: str = "C") -> Any:
        """The elements in one dimension."""
        return np.ravel(self, order)  # type: ignore[call-overload]

    @property
    def T(self) -> Any:
        """The dimensions reversed."""
        return np.transpose(self)

    @property
    def mT(self) -> Any:
        """The last two dimensions swapped."""
        return np.swapaxes(self, -1, -2)

    @property
    def real(self) -> Any:
        """The real part."""
        return np.real(self)

    @property
    def imag(self) -> Any:
        """The imaginary part."""
        return np.imag(self)


def _method(function: Callable[..., Any]) -> Any:
    def method(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__doc__ = f"np.{function.__name__} of this array."
    return method


for _name in (
    "sum",
    "prod",
    "mean",
    "var",
    "std",
    "max",
    "min",
    "any",
    "all",
    "argmax",
    "argmin",
    "cumsum",
    "ravel",
    "squeeze",
    "swapaxes",
    "take",
    "clip",
    "round",
    "dot",
    "repeat",
    "trace",
    "diagonal",
    "cumprod",
    "argsort",
    "argpartition",
    "searchsorted",
    "choose",
):
    setattr(Tracer, _name, _method(getattr(np, _name)))
Tracer.conj = Tracer.conjugate = _method(np.conjugate)  # type: ignore[attr-defined]


def check_alive(value: Any) -> None:
    """Raise for a tracer after the end of its trace."""
    if isinstance(value, Tracer) and not value.frame.open:
        raise leaked(value)
