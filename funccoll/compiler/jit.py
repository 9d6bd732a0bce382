"""jit: from a Python function to something that runs on a mesh. The only file that names all stages.

fn --trace--> TracedFunction (typed program) --lower--> Lowered (after the passes) --compile--> Compiled
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import optree

from ..arrays.array import Array
from ..arrays.array_layout import NO_MESH
from ..arrays.array_like import device_type_of
from ..core.dtype_promotion import MODES as PROMOTIONS
from ..core.dtype_promotion import Mode, as_strict
from ..core.interpreter import Traced, current_interpreter
from ..core.keyword_errors import explains_keywords
from ..core.mesh import Mesh
from ..core.types import ArrayType
from ..errors import (
    DeviceError,
    DTypeError,
    ShardingError,
    TraceError,
    hide_frames,
    user_frames,
)
from ..job.job_context import transport_of
from ..ops.registry import as_traceable
from ..platforms import free_list
from ..runtime.recorder import compiling
from ..tracing.trace import sharding_of
from ..tracing.tracer import check_alive
from .arguments import Options, Static
from .debug_modes import MODES
from .dispatcher import Dispatcher, clear_dispatchers
from .eager_execution import operations_on, run_eagerly
from .fast_paths import Dispatch, FastPath
from .function_on_mesh import FunctionOnMesh
from .program_calls import ProgramCall, moved, sum_of
from .stages import Compiled, Lowered, TracedFunction, redistribution

__all__ = ["Compiled", "Jitted", "Lowered", "TracedFunction", "clear_caches", "jit"]

logger = logging.getLogger("funccoll")

Params = ParamSpec("Params")
R = TypeVar("R")


class Jitted(Dispatch, Generic[Params, R]):
    """A function that is traced and compiled once for each structure, types and shardings of its arguments."""

    fast_paths: list[FastPath]

    def __init__(self, fn: Callable[Params, R], mesh: Mesh, in_specs: Any, out_specs: Any, options: Options):
        super().__init__()
        functools.update_wrapper(self, fn)
        self.fn, self.mesh, self.in_specs, self.out_specs = fn, mesh, in_specs, out_specs
        self._function = FunctionOnMesh(fn, mesh, in_specs, out_specs, options)
        self._plain = not (options.static_argnums or options.static_argnames)
        self.dispatcher = Dispatcher(self.fast_paths)

    def __reduce__(self) -> Any:  # an object of C is copied only by this; programs are not copied
        return type(self), (self.fn, self.mesh, self.in_specs, self.out_specs, self._function.options)

    @property
    def donates(self) -> bool:
        """True if a call may reuse memory of its arguments."""
        return bool(self._function.options.donate_argnums)

    # ------------------------------------------------------------ calling

    if TYPE_CHECKING:

        def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> R:
            """Run on global values: NumPy arrays (equal on all processes), numbers, Arrays, and pytrees of them."""
            ...

    def fallback(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it with arguments that do not fit its fast paths: pytrees, numbers, and new signatures."""
        try:
            if self._plain and not kwargs:
                given: Any = args
                leaves, treedef = optree.tree_flatten(given)
                result = self.dispatcher.call_fast(leaves, treedef)
                if result is not NotImplemented:
                    return result
            return self._compile_and_call(args, kwargs)
        except BaseException as error:  # costs nothing without an exception; user_frames would
            hide_frames(error)
            raise

    def _compile_and_call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        function = self._function
        dynamic, static = function.arguments.split(args, kwargs)
        leaves, treedef = optree.tree_flatten(dynamic)
        if any(isinstance(leaf, Traced) for leaf in leaves):
            if self.mesh is not NO_MESH:
                return self._call_in_gradient(dynamic, static, leaves, treedef)
            with as_strict(function.name, function.options.dtype_promotion):
                return self.fn(*args, **kwargs)  # inlined: there is nothing to shard
        function, leaves = function.on_device_of(leaves, treedef, static)
        types = function.types_of(leaves, treedef, static)
        if MODES.eager:
            return run_eagerly(function, leaves, dynamic, static, treedef, types)
        signature = (function.mesh.device_type, treedef, types, static)
        if function.arguments.auto:
            signature = (*signature, tuple(leaf.sharding if type(leaf) is Array else None for leaf in leaves))
        if MODES.non_finite is not None:
            signature = (*signature, MODES.non_finite)
        compiled: Compiled | None = self.dispatcher.find(signature)
        if compiled is None:
            with compiling(function.name):
                compiled = function.trace(dynamic, static, treedef, types).lower().compile()
            self.dispatcher.keep(signature, compiled)
            if function.mesh.device_type != "cpu":
                self.dispatcher.array_types.add(transport_of(function.mesh).device.library.array_type)
            if logger.isEnabledFor(logging.DEBUG):  # a fingerprint reads every move of every schedule
                logger.debug("compiled %s: %s", function.name, compiled.fingerprint[:12])
        return self.dispatcher.call(compiled, args, leaves, treedef) if self._plain and not kwargs else compiled.execute(leaves)

    def _call_in_gradient(self, dynamic: tuple, static: Static, leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> Any:
        """Call it in the trace of a gradient that is taken around it, as one equation."""
        function, name = self._function, self._function.name
        for leaf in leaves:
            check_alive(leaf)
        trace = current_interpreter()
        if not trace.calls_meshes:
            around = "another function with a mesh", "a traced function (by fc.jit, fc.vmap, fc.jvp ...)"
            inside = around[not trace.axis_sizes]
            raise TraceError(
                f"{name}, a jitted function with a mesh, was called with traced arrays, inside {inside}. It takes whole "
                "(global) arrays, which have values, or are traced by fc.grad, fc.value_and_grad or fc.vjp alone. Inside "
                f"another trace call the plain function, {name}.fn: put everything into the one function that is jitted."
            )
        types = function.types_of(leaves, treedef, static)
        shardings = tuple(map(sharding_of, leaves))
        for i, (leaf, (shape, dtype, _), sharding) in enumerate(zip(leaves, types, shardings, strict=True)):
            where = functools.partial(function.arguments.describe, treedef, i, static)
            if self.mesh.device_type == "cuda" or (not isinstance(leaf, Traced) and device_type_of(leaf) == "cuda"):
                raise DeviceError(f"{where()} is on a GPU: gradients around jitted functions with a mesh are for CPUs.")
            if sharding is not None and sharding.mesh != self.mesh:
                raise ShardingError(
                    f"{where()}, of type {ArrayType(shape, dtype)}, is split as {sharding.spec!r} over {sharding.mesh!r}, and "
                    f"{name} is jitted for {self.mesh!r}: functions that are called in one gradient have one mesh."
                )
        signature = ("gradient", treedef, types, static, shardings if function.arguments.auto else ())
        made: tuple[ProgramCall, optree.PyTreeSpec] | None = self.dispatcher.find(signature)
        if made is None:
            traced = function.trace(dynamic, static, treedef, types)
            s = traced.signature
            call = ProgramCall(s.name, traced.program, s.in_layouts, s.out_layouts, s.mesh, s.source, s.names)
            made = call, s.out_tree
            self.dispatcher.keep(signature, made)
        call, out_tree = made
        values = [x if s is not None else as_traceable(x) for x, s in zip(leaves, shardings, strict=True)]
        outs = call.bind(values)
        for out, layout in zip(outs, call.out_layouts, strict=True):
            out.weak = layout.weak
        return out_tree.unflatten(outs)

    def clear_cache(self) -> None:
        """Drop this function's programs, and the memory that they use between calls; later calls compile anew."""
        self.dispatcher.clear()

    # ------------------------------------------------------------ stages

    def trace(self, *args: Any, **kwargs: Any) -> TracedFunction:
        """Return the typed program for arguments like these; nothing runs.

        Only shapes, dtypes and shardings are read, so an argument may be anything with `.shape` and `.dtype`. A call
        redistributes Arrays that are split in another way than `in_specs` say. The program does not show that; `.collectives()`
        of the lowered program does.
        """
        with user_frames():
            dynamic, static = self._function.arguments.split(args, kwargs)
            leaves, treedef = optree.tree_flatten(dynamic)
            function, leaves = self._function.on_device_of(leaves, treedef, static)
            types = function.types_of(leaves, treedef, static)
            return function.trace(dynamic, static, treedef, types).called_with(leaves)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Return the optimized program for arguments like these: `trace(*args, **kwargs).lower()`."""
        with user_frames():
            return self.trace(*args, **kwargs).lower()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _Bound(self, instance)

    def __repr__(self) -> str:
        return f"<fc.jit {self._function.name} on {self.mesh!r}, in_specs={self.in_specs!r}, out_specs={self.out_specs!r}>"


def clear_caches() -> None:
    """Drop the programs of all jitted functions, and the memory that they use between calls; later calls compile anew.

    A jitted function keeps the last 512 programs that it used, one for each structure, shapes and dtypes. One more drops a
    quarter of them. In a job each process may clear its caches at any time.
    """
    for programs in (redistribution, moved, sum_of, operations_on):
        programs.cache_clear()
    clear_dispatchers()
    free_list.trim()


class _Bound:
    """A jitted method of an instance: calls and stages take the instance as their first argument."""

    def __init__(self, jitted: Jitted, instance: Any):
        functools.update_wrapper(self, jitted.fn)
        self.jitted, self.instance = jitted, instance
        self.fn = self.__wrapped__ = types.MethodType(jitted.fn, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.jitted(self.instance, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> TracedFunction:
        """`Jitted.trace` of this instance."""
        return self.jitted.trace(self.instance, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """`Jitted.lower` of this instance."""
        return self.jitted.lower(self.instance, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<bound {self.jitted!r} of {self.instance!r}>"


def _tuple(option: str, value: Any, kind: type) -> tuple:
    """Return an option that is one number (or name), or several, as a tuple."""
    found = (value,) if isinstance(value, (int, str)) else value
    if not isinstance(found, (tuple, list)) or not all(isinstance(v, kind) and not isinstance(v, bool) for v in found):
        what = "argument positions, such as 0 or (0, 2)" if kind is int else 'argument names, such as "n" or ("n", "mode")'
        raise TraceError(f"fc.jit: {option}={value!r}: it takes {what}.")
    return tuple(found)


@overload
def jit(
    fn: Callable[Params, R],
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    dtype_promotion: Mode = "standard",
    overlap: bool | None = None,
) -> Jitted[Params, R]: ...
@overload
def jit(
    fn: None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    dtype_promotion: Mode = "standard",
    overlap: bool | None = None,
) -> Callable[[Callable[Params, R]], Jitted[Params, R]]: ...
@explains_keywords()
def jit(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    dtype_promotion: Mode = "standard",
    overlap: bool | None = None,
) -> Any:
    """Compile a function whose body sees one device's shard, to run on every device of `mesh`.

    The compiled function takes global values and returns global Arrays. `in_specs` and `out_specs` say how these are split over
    the mesh. In the body you write NumPy and funccoll's collectives. `jit` traces the body once for each structure, shapes and
    dtypes of the arguments, and for each sharding with `fc.AUTO`; other calls run the compiled program. You can write
    `@fc.jit(mesh=mesh, ...)` above a function, or call `fc.jit(fn, mesh=mesh, ...)`.

    Args:
        fn: A pure function of arrays and pytrees of arrays.
        mesh: A mesh of `fc.make_mesh`. One of `fc.abstract_mesh` traces and lowers, and does not run. None is a single device.
        in_specs: How the global arguments are split: a tuple with an entry for each argument that is not static, or one entry
            for all. An entry is a `P`, or a pytree of them that is a prefix of the argument. `P()` and None are whole on every
            device. `fc.AUTO` splits an Array of this mesh as its own sharding says, and leaves other arguments whole. An Array
            of this mesh that is split in another way is redistributed first, as `fc.redistribute` does.
        out_specs: The same for the results. You may leave an axis out only if the result does not vary over it; its type proves
            that. With `fc.AUTO` an axis that splits a dimension of an argument splits the dimension of the result to which the
            program takes it. If that is undefined, as for a sum over the split dimension, tracing raises OutSpecsError.
        donate_argnums: The positions of arguments whose memory the call may reuse. Their Arrays raise if you use them later.
        static_argnums: The positions of arguments that are Python values, not arrays. They need a hash; each new value compiles
            anew. An object whose hash is its identity stays the same value, so its attributes are read in the first call only.
        static_argnames: The same by name, for keyword arguments.
        dtype_promotion: "standard" is NumPy's rule, by which `x / np.sqrt(32)` makes a float32 `x` float64. A
            `DTypePromotionWarning` names the first line of a function that does it; `.lower(*args)` lists all of them. "strict"
            raises there instead. `.astype`, `dtype=` and Python's numbers are always allowed.
        overlap: True starts each collective as soon as its operands are ready, and compute that does not need the result runs
            meanwhile. False lets each end before anything else runs, also those that `fc.all_reduce_start` and its like start.
            None starts collectives between hosts that are predicted to take 0.1 ms or more. The bits are the same. All
            processes must pass the same.

    Returns:
        A function with the same signature. `.trace(*args)` gives its typed program, and `.lower(*args)` the optimized one,
        whose `.collectives()` lists what it communicates; neither runs anything. `.fn` is your function. Floating-point
        exceptions are silent inside, as in JAX.

    Raises:
        ShardingError: If an axis does not divide the dimension that it splits, or `fc.AUTO` gets an Array of another mesh.
        MeshError: If the mesh lacks an axis of the specs.
        OutSpecsError: If `out_specs` claim that a result is equal along an axis and its type does not prove it.
        PytreeError: If specs are not a prefix of the arguments or results.
        TraceError: If an argument or a result is not an array.
        DTypeError: If a dtype is not supported, or widened under "strict".

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> @fc.jit(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        ... def mean_square(w, x):  # x has two of the eight rows
        ...     return fc.all_reduce(np.mean((x @ w) ** 2), "data", op="mean")
        >>> print(mean_square(np.ones(3), np.ones((8, 3))))
        9.0
        >>> print(mean_square.lower(np.ones(3), np.ones((8, 3))).collectives())
        collective       axes  devices  arrays  dtype  bytes/device  schedule  from
        ---------------  ----  -------  ------  -----  ------------  --------  ----...
        all_reduce mean  data        4       1  f64               8  one_shot  ...
    """

    @user_frames()
    def decorate(f: Callable[..., Any]) -> Jitted:
        if not callable(f):
            raise TraceError(f"fc.jit takes a function, not {f!r}. Options are keywords: @fc.jit(mesh=mesh, ...).")
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ShardingError(f"fc.jit: mesh must be a mesh (fc.make_mesh({{...}})), not {mesh!r}.")
        options = Options(
            _tuple("static_argnums", static_argnums, int),
            _tuple("static_argnames", static_argnames, str),
            _tuple("donate_argnums", donate_argnums, int),
            dtype_promotion,
            overlap,
        )
        if overlap not in (None, True, False):
            raise TraceError(f"fc.jit: overlap={overlap!r}: it is True, False or None.")
        if dtype_promotion not in PROMOTIONS:
            raise DTypeError(f'fc.jit: dtype_promotion={dtype_promotion!r}: it is "standard", NumPy\'s rule, or "strict".')
        both = set(options.static_argnums) & set(options.donate_argnums)
        if both:
            raise TraceError(f"fc.jit: argument(s) {sorted(both)} are both static and donated.")
        jitted = Jitted(f, NO_MESH if mesh is None else mesh, in_specs, out_specs, options)
        jitted._function.check_options()
        return jitted

    return decorate if fn is None else decorate(fn)
