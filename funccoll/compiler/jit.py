"""jit: from a Python function to something that runs on a mesh. The only file that names all stages.

    fn --trace--> TracedFunction (typed program) --lower--> Lowered (after the passes) --compile--> Compiled
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import numpy as np
import optree

from ..arrays.array import Array, device_type_of, shape_and_dtype
from ..arrays.array_layout import NO_MESH, layout_of
from ..dtype_promotion import MODES as PROMOTIONS
from ..dtype_promotion import Mode, as_strict, recorded
from ..errors import (
    DeviceError,
    DTypeError,
    OutSpecsError,
    ShardingError,
    Source,
    TraceError,
    VaryingError,
    current_source,
    hide_frames,
    user_frames,
)
from ..global_draws import watched_draws
from ..ir import Traced, current_interpreter
from ..keywords import explains_keywords
from ..mesh import Mesh, Sharding
from ..named_scopes import outside_scopes
from ..ops.elementwise import scalar_type
from ..ops.registry import as_traceable
from ..primitives.collectives.varying import pvary
from ..pytree_paths import names_below, path_name
from ..runtime.codegen import require_devices
from ..runtime.job.world import backend_of, on_device
from ..runtime.recorder import compiling
from ..tracing.trace import Evaluation, flatten_outputs, sharding_of, stage, value_type
from ..tracing.tracer import check_alive
from ..types import ArrayType
from .arguments import AUTO, Arguments, Options, Static, broadcast_specs, check_specs
from .callers import Caller, Dispatch
from .choose_schedules import check_algorithms
from .debug_modes import MODES
from .dispatcher import Dispatcher, clear_dispatchers
from .eager_execution import evaluation_on, operations_on
from .garbage_collection import without_garbage_collection
from .output_layouts import layout_of_argument, output_layouts, sharding_of_result
from .program_calls import ProgramCall, moved, sum_of
from .signature import Signature
from .stages import Compiled, Lowered, TracedFunction, redistribution

__all__ = ["Compiled", "Jitted", "Lowered", "TracedFunction", "clear_caches", "jit"]

logger = logging.getLogger("funccoll")

Params = ParamSpec("Params")
R = TypeVar("R")

_LeafType = tuple[tuple[int, ...], np.dtype, type | None]
"""Global shape, dtype, and the Python type of a weak scalar."""

class Jitted(Dispatch, Generic[Params, R]):
    """A function that is traced and compiled once for each structure, types and shardings of its arguments."""

    callers: list[Caller]

    def __init__(self, fn: Callable[Params, R], mesh: Mesh, in_specs: Any, out_specs: Any, options: Options):
        super().__init__()
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.mesh = mesh
        self.in_specs = in_specs
        self.out_specs = out_specs
        self._options = options
        self._arguments = Arguments(fn, mesh, in_specs, options)
        self._name = self._arguments.name
        code = getattr(fn, "__code__", None)
        self._source = code and Source(code.co_filename, code.co_firstlineno, self._name)
        self._widened: set[Source | None] = set()  # lines of which it has warned
        self._draws = False  # from NumPy's global random state: it has warned of that
        self._plain = not (options.static_argnums or options.static_argnames)
        self.dispatcher = Dispatcher(self.callers)

    def __reduce__(self) -> Any:  # an object of C is copied by it alone; what was compiled stays behind
        return type(self), (self.fn, self.mesh, self.in_specs, self.out_specs, self._options)

    # ------------------------------------------------------------ calling

    if TYPE_CHECKING:

        def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> R:
            """Run on global values: NumPy arrays (equal on all processes), numbers, Arrays, and pytrees of them."""
            ...

    def call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it with arguments that do not fit its callers: pytrees, numbers, and what it has not met."""
        try:
            if self._plain and not kwargs:
                given: Any = args
                leaves, treedef = optree.tree_flatten(given)
                result = self.dispatcher.call_quickly(leaves, treedef)
                if result is not NotImplemented:
                    return result
            return self._slow_call(args, kwargs)
        except BaseException as error:  # costs nothing where there is none, other than user_frames
            hide_frames(error)
            raise

    def _slow_call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        dynamic, static = self._arguments.split(args, kwargs)
        leaves, treedef = optree.tree_flatten(dynamic)
        if any(isinstance(leaf, Traced) for leaf in leaves):
            return self._inside_trace(args, kwargs, dynamic, static)
        target, leaves = self._on_their_device(leaves, treedef, static)
        types = tuple(self._leaf_type(leaf, treedef, i, static) for i, leaf in enumerate(leaves))
        if MODES.eager:
            return target._run_eagerly(leaves, dynamic, static, treedef, types)
        signature = (target.mesh.device_type, treedef, types, static)
        if self._arguments.auto:
            signature = (*signature, tuple(leaf.sharding if type(leaf) is Array else None for leaf in leaves))
        if MODES.non_finite is not None:
            signature = (*signature, MODES.non_finite)
        compiled: Compiled | None = self.dispatcher.find(signature)
        if compiled is None:
            with compiling(self._name):
                compiled = target._trace(dynamic, static, treedef, types).lower().compile()
            self.dispatcher.keep(signature, compiled)
            if logger.isEnabledFor(logging.DEBUG):  # a fingerprint reads every move of every schedule
                logger.debug("compiled %s: %s", self._name, compiled.fingerprint[:12])
        return self.dispatcher.call(compiled, args, leaves, treedef) if self._plain and not kwargs else compiled.execute(leaves)

    def _run_eagerly(
        self, leaves: Sequence[Any], dynamic: tuple, static: Static, treedef: optree.PyTreeSpec, types: Sequence[_LeafType]
    ) -> Any:
        """Call the function, of which each operation runs at once, on the devices of this process."""
        require_devices(self.mesh)
        if self.mesh.device_type != "cpu":
            raise DeviceError(f"{self._name} is called on a GPU: fc.debug.disable_jit is for CPUs. Pass NumPy arrays.")
        shardings = self._arguments.shardings(dynamic, static)
        inputs = []
        for leaf, (shape, dtype, _), sharding in zip(leaves, types, shardings, strict=True):
            layout = layout_of(shape, dtype, sharding)
            if type(leaf) is Array and leaf.sharding.mesh == self.mesh:
                same = leaf.layout.same(layout)
                leaf = leaf if same else redistribution(leaf.layout, layout, current_source()).execute((leaf,))
                inputs.append(leaf.take_copies())
            else:
                inputs.append(layout.split(backend_of(self.mesh).library.asarray(leaf)))
        evaluation = evaluation_on(self.mesh, inputs)
        signature = self._trace(dynamic, static, treedef, types, evaluation).signature
        results = [
            Array(layout, [*map(np.array, copies)] if isinstance(copies, list) else np.array(copies))
            for layout, copies in zip(signature.out_layouts, evaluation.outputs, strict=True)
        ]
        return signature.out_tree.unflatten(results)

    def clear_cache(self) -> None:
        """Drop all compiled programs, and the memory that they use between calls; calls compile anew."""
        self.dispatcher.clear()

    def check_options(self) -> None:
        """Raise for options that can fit no call: an axis, a position or a name that does not exist."""
        self._arguments.check()
        for what, specs in (("in_specs", self.in_specs), ("out_specs", self.out_specs)):
            check_specs(specs, self.mesh, what, self._name)

    def _inside_trace(self, args: tuple, kwargs: dict[str, Any], dynamic: tuple, static: Static) -> Any:
        if self.mesh is NO_MESH:
            with as_strict(self._name, self._options.dtype_promotion):
                return self.fn(*args, **kwargs)  # inlined: there is nothing to shard
        given: Any = dynamic
        leaves, treedef = optree.tree_flatten(given)
        for leaf in leaves:
            check_alive(leaf)
        trace = current_interpreter()
        if not trace.calls_meshes:
            around = "another function with a mesh", "a traced function (by fc.jit, fc.vmap, fc.jvp ...)"
            inside = around[not trace.axis_sizes]
            raise TraceError(
                f"{self._name}, a jitted function with a mesh, was called with traced arrays, inside {inside}. It takes whole "
                "(global) arrays, which have values, or are traced by fc.grad, fc.value_and_grad or fc.vjp alone. Inside "
                f"another trace call the plain function, {self._name}.fn: put everything into the one function that is jitted."
            )
        types = tuple(self._leaf_type(leaf, treedef, i, static) for i, leaf in enumerate(leaves))
        shardings = tuple(map(sharding_of, leaves))
        for i, (leaf, (shape, dtype, _), sharding) in enumerate(zip(leaves, types, shardings, strict=True)):
            where = functools.partial(self._arguments.describe, treedef, i, static)
            if self.mesh.device_type == "cuda" or (not isinstance(leaf, Traced) and device_type_of(leaf) == "cuda"):
                raise DeviceError(f"{where()} is on a GPU: gradients around jitted functions with a mesh are for CPUs.")
            if sharding is not None and sharding.mesh != self.mesh:
                given = ArrayType(shape, dtype)
                raise ShardingError(
                    f"{where()}, of type {given}, is split as {sharding.spec!r} over {sharding.mesh!r}, and {self._name} is "
                    f"jitted for {self.mesh!r}: functions that are called in one gradient have one mesh."
                )
        key = ("gradient", treedef, types, static, shardings if self._arguments.auto else ())
        made: tuple[ProgramCall, optree.PyTreeSpec] | None = self.dispatcher.find(key)
        if made is None:
            traced = self._trace(dynamic, static, treedef, types)
            s = traced.signature
            call = ProgramCall(self._name, traced.program, s.in_layouts, s.out_layouts, self.mesh, self._source, s.names)
            made = call, s.out_tree
            self.dispatcher.keep(key, made)
        call, out_tree = made
        values = [x if s is not None else as_traceable(x) for x, s in zip(leaves, shardings, strict=True)]
        outs = call.bind(values)
        for out, layout in zip(outs, call.out_layouts, strict=True):
            out.weak = layout.weak
        return out_tree.unflatten(outs)

    def _leaf_type(self, leaf: Any, treedef: optree.PyTreeSpec, position: int, static: Static) -> _LeafType:
        shape, dtype = shape_and_dtype(leaf, lambda: self._arguments.describe(treedef, position, static))
        return shape, dtype, scalar_type(leaf)

    @functools.cached_property
    def _for_gpus(self) -> Jitted:
        """The same function on GPUs."""
        return Jitted(self.fn, on_device(self.mesh, "cuda"), self.in_specs, self.out_specs, self._options)

    def _on_their_device(
        self, leaves: Sequence[Any], treedef: optree.PyTreeSpec, static: Static
    ) -> tuple[Jitted, Sequence[Any]]:
        """The function on the devices where its arguments are, which are arrays of Array's, NumPy's or CuPy's afterwards.

        Raises: DeviceError where some arrays are on a GPU and others in host memory.
        """
        places = [device_type_of(leaf) for leaf in leaves]
        if self.mesh.device_type == "cpu" and "cuda" not in places:
            return self, leaves
        name = functools.partial(self._arguments.describe, treedef, static=static)
        if self.mesh.device_type == "cpu":
            for i, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
                if place == "cpu" and getattr(leaf, "shape", ()) != ():  # scalars go along
                    raise DeviceError(
                        f"{name(i)} is in host memory, and {name(places.index('cuda'))} on a GPU: a call runs where all "
                        "its arrays are. Move one of them: fc.device_put(x, mesh, spec, device=\"cuda\"), cupy.asarray(x)."
                    )
        target = self if self.mesh.device_type == "cuda" else self._for_gpus
        library = backend_of(target.mesh).library
        self.dispatcher.array_types.add(library.array_type)
        return target, [
            library.asarray(leaf, name(i)) if place == "cuda" and type(leaf) is not Array else leaf
            for i, (leaf, place) in enumerate(zip(leaves, places, strict=True))
        ]

    # ------------------------------------------------------------ stages

    def trace(self, *args: Any, **kwargs: Any) -> TracedFunction:
        """Return the typed program for arguments like these; only shapes, dtypes and shardings are read.

        Arguments may be arrays or anything with `.shape` and `.dtype`. Arrays that are split over the mesh in another way
        than `in_specs` says are redistributed in a call: the program does not show it, `.collectives()` does.
        """
        with user_frames():
            dynamic, static = self._arguments.split(args, kwargs)
            leaves, treedef = optree.tree_flatten(dynamic)
            target, leaves = self._on_their_device(leaves, treedef, static)
            types = [self._leaf_type(leaf, treedef, i, static) for i, leaf in enumerate(leaves)]
            return target._trace(dynamic, static, treedef, types).called_with(leaves)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Return `trace(...).lower()`."""
        with user_frames():
            return self.trace(*args, **kwargs).lower()

    def _trace(
        self, dynamic: tuple, static: Static, treedef: optree.PyTreeSpec, types: Sequence[_LeafType],
        evaluation: Evaluation | None = None,
    ) -> TracedFunction:  # fmt: skip
        arguments = self._arguments
        shardings = arguments.shardings(dynamic, static)
        layouts, parameters = [], arguments.parameters(treedef.num_children, static)
        values: Any = dynamic
        names, leaves = names_below(parameters, treedef), optree.tree_leaves(values)
        for i, (name, leaf, (shape, dtype, _), sharding) in enumerate(zip(names, leaves, types, shardings, strict=True)):
            if not shape and sharding.spec:
                arguments.check_number(dynamic, treedef, i, sharding.spec, static)
            sharding.shard_shape(shape, f"{name} of {self._name}", passed=not isinstance(leaf, (Array, Traced)))
            layouts.append(layout_of(shape, dtype, sharding))
        out: dict[str, Any] = {}

        def flat(*tracers: Any) -> list[Any]:
            positional, keywords = arguments.merge(treedef.unflatten(tracers), static)
            function: Any = self.fn
            result = function(*positional, **keywords)
            values, tree = flatten_outputs(result, self._name)
            out["tree"] = tree
            specs = broadcast_specs(self.out_specs, tree.unflatten(values), "out_specs", self._name)
            out["shardings"] = shardings = [None if spec is AUTO else Sharding(self.mesh, spec) for spec in specs]
            out["weak"] = [scalar_type(v) for v in values]
            return [
                v if s is None else self._check_output(v, s, tree, i)
                for i, (v, s) in enumerate(zip(values, shardings, strict=True))
            ]

        weak = [w for _, _, w in types]
        quiet = self._draws or evaluation is not None or self.mesh.process  # below: one of the processes of a job warns
        draws = None if quiet else watched_draws(self._name, self._source)
        # The program does not depend on the named scopes around its first call.
        with (
            without_garbage_collection() if evaluation is None else nullcontext(), outside_scopes(), draws or nullcontext(),
            recorded(self._name, self._options.dtype_promotion) as widenings,
        ):  # fmt: skip
            try:
                program, captured = stage(
                    flat, [x.type for x in layouts], weak=weak, axis_sizes=self.mesh.shape, label=self._name,
                    evaluation=evaluation,
                )  # fmt: skip
            except VaryingError as error:
                if self.in_specs is None and layouts and error.equal_operand is not None:
                    raise self._forgotten_in_specs(error, *error.equal_operand) from None
                raise
        self._draws = self._draws or bool(draws and draws.found)
        if not self.mesh.process:  # the processes of a job trace the same lines: the first one alone warns
            widenings.warn(self._widened)
        check_algorithms(program, self.mesh)
        for value in captured:
            if isinstance(value, Traced):
                raise TraceError(
                    f"{self._name} uses a traced array of an enclosing function. Pass it as an argument, or call the "
                    f"plain function ({self._name}.fn) there."
                )
        if None in out["shardings"]:
            found = output_layouts(program, [layout_of_argument(x.sharding, len(x.shape)) for x in layouts])
            out["shardings"] = [
                s or sharding_of_result(found[i], a.type, self.mesh, self._name, path_name("result", out["tree"], i))
                for i, (s, a) in enumerate(zip(out["shardings"], program.outputs, strict=True))
            ]
        out_layouts = tuple(
            layout_of(s.global_shape(a.type.shape), a.type.dtype, s, w)
            for a, s, w in zip(program.outputs, out["shardings"], out["weak"], strict=True)
        )
        donated = arguments.donated(dynamic, static)
        signature = Signature(
            self._name, self.mesh, treedef, tuple(layouts), tuple(parameters), out["tree"], out_layouts, donated, self._source,
            tuple(widenings.found.values()),
        )  # fmt: skip
        return TracedFunction(program, signature)

    def _forgotten_in_specs(self, error: VaryingError, stated: str, axes: str) -> VaryingError:
        """The error about a collective's equal operand in words for a function whose arguments are whole by default."""
        told = VaryingError(
            f"{stated}. No in_specs were given to fc.jit, so every argument of {self._name} is whole on each device: was "
            f"in_specs=P({axes}) forgotten? If not, drop the collective.", error.source,
        )  # fmt: skip
        return told.with_traceback(error.__traceback__)

    def _check_output(self, value: Any, sharding: Sharding, tree: optree.PyTreeSpec, position: int) -> Any:
        """Return the output, varying over exactly its spec's axes. Raises OutSpecsError when it varies over more."""
        type = value_type(value)
        where = path_name("result", tree, position)
        extra = type.varying - sharding.varying
        if extra:
            axes = ", ".join(map(repr, sorted(extra)))
            given = " (out_specs was not given)" if self.out_specs is None else ""
            origin = getattr(value, "source", None)
            made = f", made at {origin}" if origin else ""
            raise OutSpecsError(
                f"out_specs of {self._name}: {where}, of type {type}{made}, has the spec {sharding.spec!r}{given}, which "
                f"says that it is equal on all devices along {axes}; it varies over {axes}. Reduce or gather it first "
                f"(fc.all_reduce, fc.all_gather over {axes}), or name {axes} in its out_spec."
            )
        sharding.global_shape(type.shape, f"{where} of {self._name}")
        missing = [a for a in self.mesh.axis_names if a in sharding.varying - type.varying]
        return pvary(value, missing) if missing else value

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _Bound(self, instance)

    def __repr__(self) -> str:
        return f"<fc.jit {self._name} on {self.mesh!r}, in_specs={self.in_specs!r}, out_specs={self.out_specs!r}>"


def clear_caches() -> None:
    """Drop what all jitted functions have compiled, and the memory that it uses between calls; calls compile anew.

    A jitted function keeps the last 512 programs that it has used, one for each structure, shapes and dtypes; of these
    it drops a quarter when one more is compiled. In a job each process may clear its caches when it likes.
    """
    for programs in (redistribution, moved, sum_of, operations_on):
        programs.cache_clear()
    clear_dispatchers()


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
    """An option that is one number (or name), or several."""
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
) -> Any:
    """Compile a function whose body sees one device's shard, to run on every device of `mesh`.

        @fc.jit(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def mean_square(w, x):                                       # x: this device's rows
            return fc.all_reduce(np.mean((x @ w) ** 2), "data", op="mean")

    Args:
        fn: a pure function of arrays and pytrees of them, in NumPy and funccoll's collectives.
        mesh: from `make_mesh` (or `abstract_mesh`, to trace and lower only); without one, a single device.
        in_specs: how the global arguments are split: a tuple with an entry for each argument that is not static, or
            one entry for all. An entry is a `P`, or a pytree prefix of them; `P()`, or None, is whole on every device, and
            `fc.AUTO` splits an argument that is an Array of this mesh as its own sharding says, and leaves others whole.
            An Array of the same mesh that is split in another way is redistributed first (`fc.redistribute`).
        out_specs: the same for the result. An output may be claimed equal along an axis (the axis is not
            named) only when its type proves it. With `fc.AUTO` an axis that splits a dimension of an argument splits the one
            of the result to which the program takes it. Where that cannot be told (the result is a sum over the split
            dimension, is sorted along it, ...), tracing raises OutSpecsError.
        donate_argnums: arguments whose Arrays are given up; using them later raises.
        static_argnums, static_argnames: arguments that are part of the program (hashable); a new value compiles anew. An
            object whose hash is its identity stays the same value: its attributes are read in the first call alone.
        dtype_promotion: "standard" is NumPy's rule, by which `x / np.sqrt(32)` makes a float32 `x` float64. A
            `DTypePromotionWarning` names the first line of a function that does it, and `.lower(*args)` all of them.
            "strict" raises there in place of making any float wider. `.astype`, `dtype=` and Python's numbers are free.

    Returns: a function with the same signature, from global values to `Array`s. `.trace(*args)` gives the typed
    program and runs nothing, `.lower(*args)` the optimised one (`.collectives()` lists what it communicates); `.fn` is
    the plain function. It compiles once for each structure, shapes and dtypes of its arguments (with AUTO, shardings as
    well). Floating-point exceptions are silent inside, as in JAX.

    Raises: ShardingError, OutSpecsError, PytreeError, TraceError, DTypeError; each names the argument, shapes and axes.
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
        )
        if dtype_promotion not in PROMOTIONS:
            raise DTypeError(f"fc.jit: dtype_promotion={dtype_promotion!r}: it is \"standard\", NumPy's rule, or \"strict\".")
        both = set(options.static_argnums) & set(options.donate_argnums)
        if both:
            raise TraceError(f"fc.jit: argument(s) {sorted(both)} are both static and donated.")
        jitted = Jitted(f, NO_MESH if mesh is None else mesh, in_specs, out_specs, options)
        jitted.check_options()
        return jitted

    return decorate if fn is None else decorate(fn)
