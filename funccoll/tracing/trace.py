"""Tracing: the interpreter that records equations, and staging a function to a Program."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import optree

from ..core.interpreter import Interpreter, Traced, as_array, current_interpreter, leaked, reports_off, starts, use_interpreter
from ..core.ir import Atom, Equation, Literal, Primitive, Program, Var, infer
from ..core.pytree_paths import path_name
from ..core.sharding import Sharding
from ..core.types import ArrayType, check_dtype, type_of
from ..errors import (
    ConcretizationError,
    FunccollError,
    ShardingError,
    Source,
    TraceError,
    current_source,
    raised_at,
    registration_remedy,
    traced_source,
    user_frames,
)
from ..primitives.shard_map_call import ShardMapCall
from ..primitives.varying import pvary_p
from .future import Future
from .global_draws import note_constant
from .tracer import Tracer

__all__ = [
    "Trace",
    "as_bucket",
    "detached",
    "documented_as",
    "flatten_outputs",
    "label_of",
    "require_function",
    "sharding_of",
    "split_value",
    "stage",
    "value_type",
]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Evaluation:
    """The values of a trace in which each operation also runs when it is recorded (`fc.debug.disable_jit`)."""

    run: Callable[[Equation, Sequence[Any]], Sequence[Any]]
    """Runs an equation on the values of its operands."""
    differing: Callable[[ArrayType, Any], Sequence[tuple[str, np.ndarray]]]
    """The devices that have a copy of a value, by name, and the copies. A value that is equal on all devices has one copy."""
    inputs: Sequence[Any]
    """The values of the traced function's inputs."""
    reports: bool = True
    """True if reports also run; in a function that is differentiated they run when it is evaluated."""
    outputs: Sequence[Any] = ()
    """The values of its results, after it is traced."""


class Trace:
    """The interpreter that records: one for each function that is being traced."""

    def __init__(
        self,
        parent: Interpreter,
        axis_sizes: Mapping[str, int] | None = None,
        calls_meshes: bool = False,
        evaluation: Evaluation | None = None,
    ):
        self.parent = parent
        self.evaluation = evaluation
        self.unrolls = evaluation is not None
        self.values: dict[Var, Any] = {}
        """The values of variables in an evaluation."""
        self.calls_meshes = calls_meshes
        self.shardings: dict[Var, Sharding] = {}
        """The shardings of global values that are split over a mesh. Only calls of functions with that mesh take them."""
        self.axis_sizes = parent.axis_sizes if axis_sizes is None else axis_sizes
        self.equations: list[Equation] = []
        self.buckets = 0  # the number of the last bucket
        self.futures: list[Future] = []
        """The started collectives that are not done yet."""
        self.open = True
        self.label = "a function"
        self._captured: list[tuple[Var, Any]] = []
        self._known: dict[int, tuple[Var, Any, Any]] = {}  # id -> variable, value, an object that keeps the id alive
        self._pvaried: dict[tuple[Var, frozenset[str]], Var] = {}

    def bind(self, primitive: Primitive, values: Sequence[Any], params: Mapping[str, Any]) -> Any:
        """Record one equation. An operation on constants alone is computed at once."""
        if primitive.kind == "compute" and not any(isinstance(v, Traced) for v in values):
            return primitive.reference(*map(as_array, values), **params)
        atoms: Sequence[Atom] = [v.variable if isinstance(v, Tracer) and v.frame is self else self._atom(v) for v in values]
        source = traced_source()
        if self.shardings and primitive.kind != "call":
            self._require_whole(primitive, values, atoms)
        if primitive.kind == "compute":
            atoms = self._unify(atoms, source)
        types = infer(primitive, [a.type for a in atoms], params, atoms)
        outputs = tuple([Var(t) for t in types])
        eqn = Equation(primitive, tuple(atoms), outputs, params, source)
        if primitive.kind == "collective" and primitive.communicates and starts() is not None:
            eqn = eqn.replace(started=starts())
        if primitive.kind in ("debug", "control", "higher") and reports_off():
            if primitive.kind == "debug":
                return []
            eqn = eqn.without_reports()
        self.equations.append(eqn)
        if self.evaluation is not None:
            self._evaluate(eqn, self.evaluation)
        if primitive.kind == "call":
            self._note_shardings(params["call"], outputs)
        tracers = [Tracer(self, var, source) for var in outputs]
        return tracers if primitive.multiple else tracers[0]

    def _evaluate(self, eqn: Equation, evaluation: Evaluation) -> None:
        """Set the values of an equation's outputs."""
        if evaluation.reports or eqn.primitive.kind != "debug":
            operands = [self.values[a] for a in eqn.inputs if isinstance(a, Var)]
            eqn = eqn if evaluation.reports else eqn.without_reports()
            self.values.update(zip(eqn.outputs, evaluation.run(eqn, operands), strict=True))

    def values_of(self, values: Sequence[Any]) -> list[Any]:
        """Return the values, in the evaluation, of operands of this trace."""
        atoms = [v.variable if isinstance(v, Tracer) and v.frame is self else self._atom(v) for v in values]
        return [a.value if isinstance(a, Literal) else self.values[a] for a in atoms]

    def copies(self, var: Var) -> Sequence[tuple[str, np.ndarray]]:
        """Return the values of a variable in an evaluation, with the devices that have them; nothing without an evaluation."""
        known = self.evaluation is not None and var in self.values
        return self.evaluation.differing(var.type, self.values[var]) if known and self.evaluation is not None else ()

    def _atom(self, value: Any) -> Atom:
        """Return the atom of a value from outside this trace: a constant, or an outer trace's array."""
        if isinstance(value, Tracer):
            if not value.frame.open:
                raise leaked(value)
            return self.capture(value)
        if self.calls_meshes and sharding_of(value) is not None:
            return self.capture(value)
        note_constant()
        array = as_array(value)
        return Literal(_frozen(array)) if array.ndim == 0 else self.capture(array, value)

    def capture(self, value: Any, owner: Any = None) -> Var:
        """Return the variable that stands for a captured value. The same object is captured once for each value that it has."""
        owner = value if owner is None else owner
        known = self._known.get(id(owner))
        if known is None or (isinstance(value, np.ndarray) and _changed(known[1], value)):
            value = _frozen(value) if isinstance(value, np.ndarray) else value
            known = self._known[id(owner)] = (Var(value_type(value)), value, owner)
            self._captured.append(known[:2])
            if self.evaluation is not None:
                self.values[known[0]] = value.frame.values[value.variable] if isinstance(value, Tracer) else value
            sharding = sharding_of(value)
            if sharding is not None:
                self.shardings[known[0]] = sharding
        return known[0]

    def _require_whole(self, primitive: Primitive, values: Sequence[Any], atoms: Sequence[Atom]) -> None:
        """Raise a ShardingError if an operation other than a call on a mesh takes a global value that is split."""
        for value, atom in zip(values, atoms, strict=True):
            sharding = self.shardings.get(atom) if isinstance(atom, Var) else None
            if sharding is not None:
                raise split_value(f"{primitive.name} takes", atom.type, sharding, getattr(value, "source", None))

    def _note_shardings(self, call: ShardMapCall, outputs: Sequence[Var]) -> None:
        if not self.calls_meshes:
            raise TraceError(
                f"the gradient of {call.name}, a jitted function with a mesh, is taken inside {self.label}, which is traced "
                f"otherwise (by fc.jit, fc.vmap, fc.jvp or control flow). Put all of it inside one jitted function, and call "
                f"the plain function, {call.name}.fn, there."
            )
        for var, layout in zip(outputs, call.out_layouts, strict=True):
            if layout.sharding.varying:
                self.shardings[var] = layout.sharding

    def constant(self, value: np.ndarray, owner: Any, weak: type | None) -> Tracer:
        """Return a concrete value as a traced array that is equal on all devices. For arguments see `capture` and `Tracer`."""
        return Tracer(self, self.capture(value, owner), current_source(), weak)

    def _unify(self, atoms: Sequence[Atom], source: Source | None) -> Sequence[Atom]:
        """Make operands vary over the same axes; each value is pvary'd once."""
        first: frozenset[str] | None = None
        for atom in atoms:
            if type(atom) is Var:
                if first is None:
                    first = atom.type.varying
                elif atom.type.varying != first:
                    break
        else:
            return atoms
        wanted = frozenset().union(*(a.type.varying for a in atoms))
        return [self._insert_pvary(a, wanted, source) if isinstance(a, Var) else a for a in atoms]

    def _insert_pvary(self, var: Var, wanted: frozenset[str], source: Source | None) -> Var:
        if var.type.varying == wanted:
            return var
        wide = self._pvaried.get((var, wanted))
        if wide is None:
            wide = self._pvaried[var, wanted] = Var(var.type.vary(wanted))
            axes = tuple(a for a in self.axis_sizes if a in wanted - var.type.varying)
            self.equations.append(Equation(pvary_p, (var,), (wide,), {"axes": axes}, source))
            if self.evaluation is not None:
                self._evaluate(self.equations[-1], self.evaluation)
        return wide

    def finish(self, inputs: Sequence[Var], outputs: Sequence[Any], label: str) -> tuple[Program, list[Any]]:
        """Close the trace. Returns the program, and the captured values in the order of its constants.

        Raises TraceError for a future that is not done.
        """
        if self.futures:
            raise self.futures[0].never_done()
        atoms = tuple(v.variable if isinstance(v, Tracer) and v.frame is self else self._atom(v) for v in outputs)
        self.open = False
        if self.evaluation is not None:
            self.evaluation.outputs = [a.value if isinstance(a, Literal) else self.values[a] for a in atoms]
        constants = tuple(self._captured)
        program = Program(dict(self.axis_sizes), constants, tuple(inputs), tuple(self.equations), atoms, label)
        return program, [value for _, value in constants]


@contextmanager
def as_bucket() -> Iterator[None]:
    """Mark the collectives that are traced in a block as those of one bucket of gradients."""
    trace = current_interpreter()
    if not isinstance(trace, Trace):  # after the trace, uses of its arrays raise
        yield
        return
    begin = len(trace.equations)
    yield
    trace.buckets += 1
    for i, eqn in enumerate(trace.equations[begin:], begin):
        if eqn.primitive.communicates:
            trace.equations[i] = eqn.replace(bucket=trace.buckets)


def _frozen(array: np.ndarray) -> np.ndarray:
    """Return a read-only copy in C order. Neither a later write by the user nor the order of its memory changes the program."""
    array = np.array(array, order="C")
    array.flags.writeable = False
    return array


def _changed(captured: np.ndarray, array: np.ndarray) -> bool:
    """True if the user wrote to an array, or reshaped it in place, after it was captured."""
    if captured.shape != array.shape or captured.dtype != array.dtype:
        return True
    return array.flags.writeable and captured.tobytes() != array.tobytes()


def value_type(value: Any) -> ArrayType:
    """Return the type of a tracer or a concrete value; for an Array, that of its global value."""
    if isinstance(value, Traced):
        return value.type
    return type_of(value) if sharding_of(value) is None else ArrayType(value.shape, value.dtype)


def sharding_of(value: Any) -> Sharding | None:
    """Return how a global value (an Array, or traced) is split over a mesh; None if it is whole."""
    if isinstance(value, np.ndarray):
        return None
    found = value.frame.shardings.get(value.variable) if isinstance(value, Tracer) else getattr(value, "sharding", None)
    return found if isinstance(found, Sharding) and found.varying else None


def split_value(use: str, type: ArrayType, sharding: Sharding, source: Source | None = None) -> ShardingError:
    """Return the error for a use of a split value that only functions on its mesh can take."""
    made = f", made at {source}" if source else ""
    return ShardingError(
        f"{use} an Array {type} that is split as {sharding.spec!r} over {sharding.mesh!r}{made}. In a gradient around "
        "jitted functions with a mesh, split arrays can only be arguments of such functions; everything else needs whole "
        "arrays, P(). Do it inside the jitted function, or make the array whole first with fc.redistribute(x, fc.P())."
    )


def detached(value: Any) -> Any:
    """Return a plain array as a copy: the user may write to it, or to the array that it is a view of."""
    return np.array(value) if isinstance(value, np.ndarray) else value


def require_function(what: str, fn: Any) -> None:
    """Raise a TraceError that names the use if `fn` is not callable."""
    if not callable(fn):
        raise TraceError(f"{what} takes a function, not {fn!r:.60}.")


def label_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function in messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def documented_as(description: str, fn: Callable[..., Any]) -> Callable[[F], F]:
    """Decorator for the result of a transformation of `fn`: it gets the name, the signature and a docstring of `fn`.

    In the description `{name}` stands for the function. Errors show no frame of funccoll. Source: JAX.
    """

    def decorate(made: F) -> F:
        made = cast(F, user_frames()(made))
        functools.update_wrapper(made, fn)
        name = made.__name__ = label_of(fn)
        own = None if isinstance(fn, functools.partial) else fn.__doc__  # a partial has its class's docstring
        made.__doc__ = description.replace("{name}", name) + (f"\n\nDocumentation of {name}:\n\n{own}" if own else "")
        return made

    return decorate


def flatten_outputs(result: Any, name: str, given: bool = False) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return leaves and structure of a function's result, or of values that it is `given`.

    Raises TraceError for a value that is not an array.
    """
    leaves, treedef = optree.tree_flatten(result)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Future):
            raise leaf.used_as_array() if given else leaf.never_done(returned=True)
        if isinstance(leaf, (Traced, bool, int, float, complex, np.ndarray, np.generic)):
            if isinstance(leaf, (np.ndarray, np.generic)):
                check_dtype(leaf.dtype, name if given else f"the result of {name}")
            continue
        if hasattr(leaf, "__array__"):
            continue
        where = path_name("", treedef, i)
        shown = f"{leaf!r} of type {type(leaf).__name__}"
        place = f" at result{where}" if where else ""
        raise TraceError(
            f"{f'{name}{where} is {shown}' if given else f'{name} returned {shown}{place}'}: a traced function "
            f"{'takes' if given else 'returns'} arrays, numbers, and pytrees of them (tuples, lists, dicts, None, ...)."
            f"{registration_remedy(leaf)}"
        )
    return leaves, treedef


_TRACER = re.compile(r"\bTracer\b")
_NUMPY_ALONE = (
    "  A Tracer is an array while its function is traced: operators, np.* functions, fc.nn and fc.special take it, and "
    "functions of other libraries (torch.*, jax.numpy.*) do not."
)


def _note_other_library(error: TypeError) -> None:
    """Add a note to another library's error about a traced array: what takes one, and the user's line."""
    if isinstance(error, FunccollError) or not _TRACER.search(str(error)) or _NUMPY_ALONE in getattr(error, "__notes__", ()):
        return
    error.add_note(_NUMPY_ALONE)
    if (line := raised_at(error)) is not None and line.as_note not in error.__notes__:
        error.add_note(line.as_note)


def stage(
    fn: Callable[..., Any],
    types: Sequence[ArrayType],
    *,
    weak: Sequence[type | None] | None = None,
    axis_sizes: Mapping[str, int] | None = None,
    label: str = "fn",
    shardings: Sequence[Sharding | None] | None = None,
    values: Sequence[Any] | None = None,
    evaluation: Evaluation | None = None,
) -> tuple[Program, list[Any]]:
    """Trace `fn(*tracers) -> flat list of values`. Returns the program and the values it captured.

    Captured values are concrete arrays or tracers of the enclosing trace.

    Args:
        fn: The flat function.
        types: The types of its inputs.
        weak: For each input, the type of the Python scalar that it stands for, or None.
        axis_sizes: The axes of the mesh; by default those of the enclosing trace.
        label: Its name in messages.
        shardings: For each input that is a split global value, its sharding; None for a whole one. Outside a mesh the function
            may then call jitted functions that have a mesh.
        values: The values of the inputs. Given them, operations run if those of the enclosing trace run.
        evaluation: Operations also run in it.
    """
    parent = current_interpreter()
    if values is not None and isinstance(parent, Trace) and parent.evaluation is not None:
        evaluation = replace(parent.evaluation, inputs=parent.values_of(values), reports=False, outputs=())
    outermost = not isinstance(parent, Trace) or parent.calls_meshes
    trace = Trace(parent, axis_sizes, shardings is not None and outermost and not parent.axis_sizes, evaluation)
    trace.label = label
    inputs = [Var(t) for t in types]
    if evaluation is not None:
        trace.values.update(zip(inputs, evaluation.inputs, strict=True))
    if shardings is not None:
        trace.shardings.update((v, s) for v, s in zip(inputs, shardings, strict=True) if s is not None)
    try:
        with use_interpreter(trace):
            kinds = [None] * len(inputs) if weak is None else weak
            outputs = fn(*[Tracer(trace, var, None, kind) for var, kind in zip(inputs, kinds, strict=True)])
            return trace.finish(inputs, outputs, label)
    except ValueError as error:
        if isinstance(error.__cause__, ConcretizationError):  # NumPy wraps the error of out[i] = tracer in its own
            raise error.__cause__.with_traceback(error.__traceback__) from None
        raise
    except TypeError as error:
        _note_other_library(error)
        raise
    finally:
        trace.open = False
