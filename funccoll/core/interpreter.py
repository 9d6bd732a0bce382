"""The interpreter slot, which decides what the operations of a function mean.

The *current interpreter* gives a user's function its meaning. Every operation is `bind(primitive, *values, **params)`, and the
interpreter in the slot either computes it (eager) or records it (tracing). Source: JAX's autodidax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np

from ..errors import LeakedTracerError, MeshError, TraceError, at_source
from .ir import Atom, Equation, Literal, Primitive, Program, Var
from .types import ArrayType, check_dtype, exported, refuse_objects

__all__ = [
    "Interpreter",
    "Traced",
    "as_array",
    "bind",
    "check_eagerly",
    "current_interpreter",
    "eager",
    "evaluate",
    "leaked",
    "refuse_subclass",
    "reports_off",
    "starting",
    "starts",
    "use_interpreter",
    "without_reports",
]


class Traced:
    """Base of tracers. The IR recognises a tracer by it, without importing tracing."""

    __slots__ = ()
    type: ArrayType
    weak: Any
    """int, float or complex if it stands for a Python scalar, else None."""


class Interpreter(Protocol):
    """The meaning of operations. `axis_sizes` are the mesh axes that collectives may name."""

    axis_sizes: Mapping[str, int]
    calls_meshes: bool
    """True if values are global and jitted functions with a mesh may be called: in gradients outside of a mesh."""
    unrolls: bool
    """True if loops and branches run as Python's, because there are values."""

    def bind(self, primitive: Primitive, values: Sequence[Any], params: Mapping[str, Any]) -> Any:
        """Return one value, or a list if the primitive has several outputs."""
        ...


class Eager:
    """The interpreter outside every trace: computes with NumPy, on no mesh."""

    axis_sizes: Mapping[str, int] = {}
    calls_meshes = False
    unrolls = False
    check: Callable[[Primitive, Sequence[Any], Any], None] | None = None
    """Called with each operation's operands and result during the search for NaN and inf."""

    def bind(self, primitive: Primitive, values: Sequence[Any], params: Mapping[str, Any]) -> Any:
        """Compute with the primitive's reference."""
        for value in values:
            if isinstance(value, Traced):
                raise leaked(value)
        if primitive.kind == "higher" and "program" in params:  # a custom gradient rule: just its function
            program: Program = params["program"]
            return evaluate(program, [v for _, v in program.constants], values)[0]
        if primitive.kind == "call":
            return primitive.reference(*values, **params)
        if primitive.kind == "debug" and _QUIET.get():
            return []
        if primitive.kind not in ("compute", "control", "fence", "debug"):
            raise MeshError(
                f"{primitive.name} was called outside a mesh: collectives exist only inside a function traced "
                "by fc.jit(fn, mesh=..., in_specs=..., out_specs=...)."
            )
        result = primitive.reference(*map(as_array, values), **params)
        if self.check is not None and primitive.kind == "compute":
            self.check(primitive, values, result)
        return result


def as_array(value: Any) -> np.ndarray:
    """Return a concrete value as a native-endian array of a supported dtype. Raise DTypeError; raise TraceError for a mask."""
    refuse_subclass(value, "an operand")
    try:
        array = np.asarray(exported(value))
    except TypeError as error:
        if not hasattr(value, "__cuda_array_interface__"):
            raise
        raise TraceError(
            f"an operand is a {type(value).__module__}.{type(value).__qualname__} on a GPU that the traced function captures: "
            "pass it as an argument, or take a snapshot as a constant, fc.asarray(x)."
        ) from error
    refuse_objects(value, array)
    native = check_dtype(array.dtype)
    return array if array.dtype is native or array.dtype.isnative else array.astype(native)


def refuse_subclass(value: Any, what: str) -> None:
    """Raise TraceError for a masked array and an np.matrix.

    np.asarray would drop the mask, and turn products of matrices into products of elements.
    """
    # Without numpy.ma a process has no masked arrays. Asking for np.ma would import it. Nor are there any while a thread
    # imports it.
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if masked is not None and isinstance(value, masked):
        raise TraceError(f"{what} is a masked array, and its mask would be lost. Pass x.filled(value), and the mask beside it.")
    if isinstance(value, np.matrix):
        raise TraceError(
            f"{what} is an np.matrix: its x * y is a product of matrices, and here it would be one of elements. Pass "
            "np.asarray(x), and write x @ y."
        )


def leaked(value: Any) -> LeakedTracerError:
    """Make the error of a tracer that is used outside the trace that made it."""
    origin = getattr(value, "source", None)
    made = f"made at {origin}" if origin else f"an argument of {value.frame.label}"
    return LeakedTracerError(
        f"a traced array of type {value.type}, {made}, is used after the function that made it was traced, where it has "
        "no value. Return it from the traced function instead of keeping it in a list, an attribute or a global."
    )


_EAGER = Eager()
_INTERPRETER: ContextVar[Interpreter] = ContextVar("funccoll_interpreter", default=_EAGER)


def current_interpreter() -> Interpreter:
    """The interpreter in the slot."""
    return _INTERPRETER.get()


@contextmanager
def use_interpreter(interpreter: Interpreter) -> Iterator[None]:
    """Put an interpreter into the slot for the duration of a block."""
    token = _INTERPRETER.set(interpreter)
    try:
        yield
    finally:
        _INTERPRETER.reset(token)


_QUIET: ContextVar[bool] = ContextVar("funccoll_quiet", default=False)
"""True while earlier work is computed again, which shows no values twice."""


@contextmanager
def without_reports() -> Iterator[None]:
    """Leave out reports of values in a block, which computes again."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def reports_off() -> bool:
    """True inside `without_reports`."""
    return _QUIET.get()


_STARTS: ContextVar[bool | None] = ContextVar("funccoll_starts", default=None)


@contextmanager
def starting(started: bool | None = True) -> Iterator[None]:
    """Bind collectives in a block as started ones, or as ones that are not (`Equation.started`); None changes nothing."""
    token = _STARTS.set(_STARTS.get() if started is None else started)
    try:
        yield
    finally:
        _STARTS.reset(token)


def starts() -> bool | None:
    """Return how collectives are bound here: `Equation.started`."""
    return _STARTS.get()


@contextmanager
def eager() -> Iterator[None]:
    """Compute at once in a block, even if a trace is around it."""
    with use_interpreter(_EAGER):
        yield


def check_eagerly(check: Callable[[Primitive, Sequence[Any], Any], None] | None) -> None:
    """Set the function that is called with each operation outside of every trace."""
    _EAGER.check = check


def bind(primitive: Primitive, *values: Any, **params: Any) -> Any:
    """Apply a primitive under the current interpreter."""
    return _INTERPRETER.get().bind(primitive, values, params)


def evaluate(
    program: Program,
    constants: Iterable[Any],
    args: Sequence[Any],
    apply: Callable[[Equation, list[Any]], Any] | None = None,
) -> tuple[list[Any], dict[Var, Any]]:
    """Run a program. Return its outputs and the value of every variable.

    `apply(equation, values)` gives an equation's result. By default it is bound in the current interpreter. What is bound for
    a started collective is started, too.
    """
    env: dict[Var, Any] = dict(zip(program.inputs, args, strict=True))
    env.update(zip((v for v, _ in program.constants), constants, strict=True))

    def read(atom: Atom) -> Any:
        return atom.value if isinstance(atom, Literal) else env[atom]

    if apply is None:
        interpreter = _INTERPRETER.get()
        apply = lambda eqn, values: interpreter.bind(eqn.primitive, values, eqn.params)
    for eqn in program.equations:
        with at_source(eqn.source), nullcontext() if eqn.started is None else starting(eqn.started):
            out = apply(eqn, [read(a) for a in eqn.inputs])
        env.update(zip(eqn.outputs, out if eqn.primitive.multiple else (out,), strict=True))
    return [read(a) for a in program.outputs], env
