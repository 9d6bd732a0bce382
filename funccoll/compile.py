"""jit: from a Python function to something that runs on a mesh. The only file that names all stages.

    fn --trace--> Traced (typed program) --lower--> Lowered (after the passes) --compile--> Compiled
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, overload

import numpy as np
import optree

from .arrays import Array, Layout, layout_of, to_numpy
from .errors import PytreeError, ShapeError, ShardingError, TraceError, VaryingError
from .ir import Program, Traced, current_interpreter
from .mesh import Mesh, P, Sharding
from .passes import plan_buffers, run_passes
from .primitives.collective import pvary
from .report import CollectiveTable, cost_analysis
from .runtime.local import compile_local
from .tracing import flatten_outputs, stage, value_type
from .types import check_dtype

__all__ = ["Compiled", "Jitted", "Lowered", "TracedFunction", "jit"]

logger = logging.getLogger("funccoll")

Params = ParamSpec("Params")
R = TypeVar("R")

_NO_MESH = Mesh({}, (0,))


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, P)


def _broadcast_specs(specs: Any, tree: Any, mesh: Mesh, what: str, name: str) -> list[Sharding]:
    """One Sharding for each leaf of `tree`, from specs that are a pytree prefix of it (JAX's rule)."""
    for spec in optree.tree_leaves(specs, is_leaf=_is_spec, none_is_leaf=True):  # type: ignore[arg-type]
        if not _is_spec(spec):
            raise ShardingError(f"{what} of {name}: {spec!r} is no partition spec; write fc.P({spec!r}), fc.P(), ...")
    concrete = optree.tree_map(lambda s: P() if s is None else s, specs, is_leaf=_is_spec, none_is_leaf=True)  # type: ignore[arg-type]
    try:
        flat = optree.broadcast_prefix(concrete, tree, is_leaf=lambda x: isinstance(x, P))
    except ValueError as error:
        raise PytreeError(
            f"{what} of {name} does not fit: the specs {concrete!r} must be a prefix of the structure "
            f"{optree.tree_structure(tree)}. {error}"
        ) from None
    return [Sharding(mesh, s) for s in flat]  # type: ignore[arg-type]


def _path(name: str, treedef: optree.PyTreeSpec, position: int) -> str:
    """How a user would write one leaf of the arguments: `batch["x"]`."""
    path = treedef.paths()[position]
    return name + "".join(f"[{p!r}]" for p in path)


@dataclass(frozen=True)
class _Signature:
    """What a compiled function expects and returns, beside the program."""

    name: str
    mesh: Mesh
    in_tree: optree.PyTreeSpec
    in_layouts: tuple[Layout, ...]
    out_tree: optree.PyTreeSpec
    out_layouts: tuple[Layout, ...]
    donated: tuple[bool, ...]


class _Stage:
    """What all stages have in common."""

    def __init__(self, program: Program, signature: _Signature):
        self.program, self.signature = program, signature

    @property
    def mesh(self) -> Mesh:
        """The mesh it was made for."""
        return self.signature.mesh

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of program, mesh and specs: equal on every machine for equal programs."""
        import hashlib

        layouts = (*self.signature.in_layouts, *self.signature.out_layouts)
        specs = ";".join(repr(layout.sharding.spec) for layout in layouts)
        return hashlib.sha256(f"{self.program.fingerprint}|{specs}".encode()).hexdigest()

    def as_text(self) -> str:
        """The program, printed like a jaxpr."""
        return self.program.text()

    def collectives(self) -> CollectiveTable:
        """The program's collectives: which, over what, how many bytes, from which line of yours."""
        return CollectiveTable(self.program)

    def cost_analysis(self) -> dict[str, float]:
        """Estimates for one device and one call: flops, bytes accessed, collectives and their bytes."""
        return cost_analysis(self.program)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.signature.name} on {self.mesh!r}: {len(self.program.equations)} equations>"

    def _repr_html_(self) -> str:
        return self.program._repr_html_()


class TracedFunction(_Stage):
    """A function as a typed program, as it was written."""

    def lower(self) -> Lowered:
        """Run the passes."""
        check = os.environ.get("FUNCCOLL_CHECK") == "1"
        if check:
            self.program.check()
        return Lowered(run_passes(self.program, check), self.signature)


class Lowered(_Stage):
    """The program after the passes."""

    def compile(self) -> Compiled:
        """Make it executable on this process's devices."""
        return Compiled(self.program, self.signature)


class Compiled(_Stage):
    """An executable program: call it with arguments of the types it was compiled for."""

    def __init__(self, program: Program, signature: _Signature):
        super().__init__(program, signature)
        self._run = compile_local(program, signature.mesh, plan_buffers(program))
        self._single = signature.out_tree.is_leaf()
        self._inputs = tuple(zip(signature.in_layouts, signature.donated, strict=True))

    def __call__(self, *args: Any) -> Any:
        """Run on positional arguments of the structure, shapes and dtypes it was compiled for."""
        leaves, treedef = optree.tree_flatten(args)
        signature = self.signature
        if treedef != signature.in_tree:
            raise PytreeError(
                f"{signature.name} was compiled for arguments of structure {signature.in_tree}, and called with {treedef}."
            )
        for i, (leaf, layout) in enumerate(zip(leaves, signature.in_layouts, strict=True)):
            shape, dtype = np.shape(leaf), check_dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)
            if shape != layout.shape or dtype != layout.dtype:
                raise ShapeError(
                    f"{_path('args', treedef, i)} of {signature.name} is {dtype}{list(shape)}, and it was compiled for "
                    f"{layout.dtype}{list(layout.shape)}."
                )
        return self.execute(leaves)

    def execute(self, leaves: Sequence[Any]) -> Any:
        """Run on flat arguments that are known to fit."""
        inputs = []
        for leaf, (layout, donated) in zip(leaves, self._inputs, strict=True):
            if type(leaf) is Array:
                if leaf.layout is layout or leaf.layout == layout:
                    inputs.append(leaf.take_copies(donated))
                    continue
                value = np.asarray(leaf)
                if donated:
                    leaf.take_copies(delete=True)
            else:
                value = to_numpy(leaf)
            inputs.append(layout.split(value))
        outputs = self._run(*inputs)
        if self._single:
            return Array(self.signature.out_layouts[0], outputs[0])
        return self.signature.out_tree.unflatten(map(Array, self.signature.out_layouts, outputs))


@dataclass
class _Options:
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()


class Jitted(Generic[Params, R]):
    """A function that is traced and compiled once for each structure, types and shardings of its arguments."""

    def __init__(self, fn: Callable[Params, R], mesh: Mesh, in_specs: Any, out_specs: Any, options: _Options):
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.mesh = mesh
        self.in_specs = in_specs
        self.out_specs = out_specs
        self._options = options
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._cache: dict[Any, Compiled] = {}
        self._fast: dict[tuple, Compiled] = {}

    # ------------------------------------------------------------ calling

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> R:
        """Run on global values: NumPy arrays (equal on all processes), numbers, Arrays, and pytrees of them."""
        if not kwargs:
            key = []
            for arg in args:
                kind = type(arg)
                if kind is Array:
                    key.append(arg.layout)  # type: ignore[attr-defined]
                elif kind is np.ndarray:
                    key.append((arg.shape, arg.dtype))  # type: ignore[attr-defined]
                else:
                    break
            else:
                compiled = self._fast.get(tuple(key))
                if compiled is not None:
                    return compiled.execute(args)
        return self._slow_call(args, kwargs)

    def _slow_call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        dynamic, static = self._split(args, kwargs)
        leaves, treedef = optree.tree_flatten(dynamic)
        if any(isinstance(leaf, Traced) for leaf in leaves):
            return self._inside_trace(args, kwargs)
        shapes = tuple(self._leaf_type(leaf, treedef, i) for i, leaf in enumerate(leaves))
        key = (treedef, shapes, static)
        try:
            compiled = self._cache.get(key)
        except TypeError:
            raise TraceError(f"a static argument of {self._name} is not hashable: {dict(static)!r}.") from None
        if compiled is None:
            compiled = self._cache[key] = self._trace(dynamic, static, leaves, treedef, shapes).lower().compile()
            logger.debug("compiled %s: %s", self._name, compiled.fingerprint[:12])
        if not kwargs and not static and all(type(a) in (Array, np.ndarray) for a in args):
            fast_key = tuple(a.layout if type(a) is Array else (a.shape, a.dtype) for a in args)
            self._fast[fast_key] = compiled
        return compiled.execute(leaves)

    def _inside_trace(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.mesh is _NO_MESH:
            return self.fn(*args, **kwargs)  # inlined: there is nothing to shard
        inside = "another traced function" if current_interpreter().axis_sizes else "fc.grad, fc.vjp or a traced function"
        raise TraceError(
            f"{self._name}, a jitted function with a mesh, was called with traced arrays, inside {inside}. "
            f"It takes global arrays. Differentiate or compose inside the jitted step, with the plain function "
            f"({self._name}.fn)."
        )

    def _leaf_type(self, leaf: Any, treedef: optree.PyTreeSpec, position: int) -> tuple[tuple[int, ...], np.dtype]:
        if not isinstance(leaf, (Array, np.ndarray, np.generic)):
            what = _path(self._name + " argument ", treedef, position)
            leaf = to_numpy(leaf, what)
        return leaf.shape, check_dtype(leaf.dtype, f"an argument of {self._name}")

    # ------------------------------------------------------------ stages

    def trace(self, *args: Any, **kwargs: Any) -> TracedFunction:
        """The typed program for arguments like these; only shapes and dtypes are looked at.

        Arguments may be arrays or anything with `.shape` and `.dtype`.
        """
        dynamic, static = self._split(args, kwargs)
        leaves, treedef = optree.tree_flatten(dynamic)
        shapes = []
        for i, leaf in enumerate(leaves):
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                shapes.append((tuple(leaf.shape), check_dtype(np.dtype(leaf.dtype), f"an argument of {self._name}")))
            else:
                shapes.append(self._leaf_type(leaf, treedef, i))
        return self._trace(dynamic, static, leaves, treedef, tuple(shapes))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """`trace(...).lower()`."""
        return self.trace(*args, **kwargs).lower()

    def _trace(
        self, dynamic: tuple, static: tuple, leaves: Sequence[Any], treedef: optree.PyTreeSpec, shapes: tuple
    ) -> TracedFunction:
        shardings = self._in_shardings(dynamic, static)
        layouts = []
        for i, ((shape, dtype), sharding) in enumerate(zip(shapes, shardings, strict=True)):
            sharding.shard_shape(shape, self._argument_name(treedef, i))
            layouts.append(layout_of(shape, dtype, sharding))
        out: dict[str, Any] = {}

        def flat(*tracers: Any) -> list[Any]:
            positional, keywords = self._merge(treedef.unflatten(tracers), static)
            result = self.fn(*positional, **keywords)
            values, tree = flatten_outputs(result, self._name)
            out["tree"] = tree
            out["shardings"] = _broadcast_specs(self.out_specs, tree.unflatten(values), self.mesh, "out_specs", self._name)
            return [self._check_output(v, s, tree, i) for i, (v, s) in enumerate(zip(values, out["shardings"], strict=True))]

        program, captured = stage(flat, [x.type for x in layouts], axis_sizes=self.mesh.shape, label=self._name)
        for value in captured:
            if isinstance(value, Traced):
                raise TraceError(
                    f"{self._name} uses a traced array of an enclosing function. Pass it as an argument, or call the "
                    f"plain function ({self._name}.fn) there."
                )
        out_layouts = tuple(
            layout_of(s.global_shape(a.type.shape), a.type.dtype, s)
            for a, s in zip(program.outputs, out["shardings"], strict=True)
        )
        donated = self._donated(dynamic)
        signature = _Signature(self._name, self.mesh, treedef, tuple(layouts), out["tree"], out_layouts, donated)
        return TracedFunction(program, signature)

    def _check_output(self, value: Any, sharding: Sharding, tree: optree.PyTreeSpec, position: int) -> Any:
        """The output varying over exactly its spec's axes, or an error when it varies over more."""
        type = value_type(value)
        where = _path("result", tree, position)
        extra = type.varying - sharding.varying
        if extra:
            axes = ", ".join(map(repr, sorted(extra)))
            raise VaryingError(
                f"out_specs of {self._name}: {where}, of type {type}, has the spec {sharding.spec!r}, which says that it is "
                f"equal on all devices along {axes}, and its type does not prove that. Reduce or gather it first "
                f"(fc.all_reduce, fc.all_gather over {axes}), or name {axes} in its out_spec."
            )
        sharding.global_shape(type.shape, f"{where} of {self._name}")
        missing = [a for a in self.mesh.axis_names if a in sharding.varying - type.varying]
        return pvary(value, missing) if missing else value

    # ------------------------------------------------------------ arguments

    @functools.cached_property
    def _python_signature(self) -> inspect.Signature | None:
        try:
            return inspect.signature(self.fn)
        except (TypeError, ValueError):
            return None

    def _split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, tuple]:
        """(dynamic positional arguments, static ones as (position or name, value))."""
        options = self._options
        static: list[tuple[Any, Any]] = []
        if kwargs:
            named = {k: v for k, v in kwargs.items() if k not in options.static_argnames}
            static += sorted((k, v) for k, v in kwargs.items() if k in options.static_argnames)
            args = self._positional(args, named, {k for k, _ in static})
        numbers = {n % len(args) for n in options.static_argnums if -len(args) <= n < len(args)}
        if options.static_argnames and self._python_signature is not None:
            parameters = list(self._python_signature.parameters)[: len(args)]
            numbers |= {i for i, p in enumerate(parameters) if p in options.static_argnames}
        static += [(i, args[i]) for i in sorted(numbers)]
        return tuple(a for i, a in enumerate(args) if i not in numbers), tuple(static)

    def _positional(self, args: tuple, named: dict[str, Any], static: set[str]) -> tuple:
        """Keyword arguments in the places of their parameters."""
        if not named:
            return args
        signature = self._python_signature
        if signature is None:
            raise TraceError(f"{self._name} was called with keywords {sorted(named)}, and has no signature to place them.")
        rest = [p for n, p in signature.parameters.items() if n not in static]
        try:
            bound = signature.replace(parameters=rest).bind(*args, **named)
        except TypeError as error:
            raise TraceError(f"{self._name}: {error}.") from None
        bound.apply_defaults()
        if bound.kwargs:
            raise TraceError(
                f"{self._name}: the keyword-only argument(s) {sorted(bound.kwargs)} have no place in in_specs. Make them "
                "positional, or static with static_argnames."
            )
        return bound.args

    def _merge(self, dynamic: tuple, static: tuple) -> tuple[list[Any], dict[str, Any]]:
        merged = list(dynamic)
        for position, value in static:
            if isinstance(position, int):
                merged.insert(position, value)
        return merged, {k: v for k, v in static if isinstance(k, str)}

    def _in_shardings(self, dynamic: tuple, static: tuple) -> list[Sharding]:
        specs = self.in_specs
        if isinstance(specs, list):
            specs = tuple(specs)
        if isinstance(specs, tuple) and not isinstance(specs, P):
            numbers = {k for k, _ in static if isinstance(k, int)}
            if len(specs) == len(dynamic) + len(numbers):
                specs = tuple(s for i, s in enumerate(specs) if i not in numbers)
            if len(specs) != len(dynamic):
                raise PytreeError(
                    f"in_specs of {self._name} has {len(specs)} entries, and it was called with {len(dynamic)} "
                    "argument(s) that are not static: give one spec (or pytree of specs) for each."
                )
        return _broadcast_specs(specs, dynamic, self.mesh, "in_specs", self._name)

    def _argument_name(self, treedef: optree.PyTreeSpec, position: int) -> str:
        path = treedef.paths()[position]
        names = [] if self._python_signature is None else list(self._python_signature.parameters)
        numbers = set(self._options.static_argnums)
        names = [n for i, n in enumerate(names) if i not in numbers and n not in self._options.static_argnames]
        first = names[path[0]] if path and isinstance(path[0], int) and path[0] < len(names) else f"argument {path[:1]}"
        return f"{first}{''.join(f'[{p!r}]' for p in path[1:])} of {self._name}"

    def _donated(self, dynamic: tuple) -> tuple[bool, ...]:
        out: list[bool] = []
        for i, arg in enumerate(dynamic):
            out += [i in self._options.donate_argnums] * len(optree.tree_leaves(arg))
        return tuple(out)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<fc.jit {self._name} on {self.mesh!r}, in_specs={self.in_specs!r}, out_specs={self.out_specs!r}>"


def _tuple(value: Any) -> tuple:
    return (value,) if isinstance(value, (int, str)) else tuple(value)


@overload
def jit(fn: Callable[Params, R], /, **options: Any) -> Jitted[Params, R]: ...
@overload
def jit(fn: None = None, /, **options: Any) -> Callable[[Callable[Params, R]], Jitted[Params, R]]: ...
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
) -> Any:
    """Compile a function whose body sees one device's shard, to run on every device of `mesh`.

    Args:
        fn: a pure function of arrays and pytrees of them, in NumPy and funccoll's collectives.
        mesh: from `make_mesh` (or `abstract_mesh`, to trace and lower only); without one, a single device.
        in_specs: for each argument, how the global value is split: a pytree prefix of `P`s.
        out_specs: the same for the result. An output may be claimed equal along an axis (the axis is not
            named) only when its type proves it.
        donate_argnums: arguments whose Arrays are given up; using them later raises.
        static_argnums, static_argnames: arguments that are part of the program (hashable); a new value compiles anew.

    Returns: a function with the same signature, from global values to `Array`s, with the stages
    `.trace(*args)`, `.lower()`, `.compile()`. Floating-point exceptions are silent inside, as in JAX.

    Raises: ShardingError, VaryingError, PytreeError, TraceError; each names the argument, shapes and axes.
    """

    def decorate(f: Callable[..., Any]) -> Jitted:
        if not callable(f):
            raise TraceError(f"fc.jit takes a function, not {f!r}. Options are keywords: @fc.jit(mesh=mesh, ...).")
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ShardingError(f"fc.jit: mesh must be a mesh (fc.make_mesh({{...}})), not {mesh!r}.")
        options = _Options(_tuple(static_argnums), _tuple(static_argnames), _tuple(donate_argnums))
        both = set(options.static_argnums) & set(options.donate_argnums)
        if both:
            raise TraceError(f"fc.jit: argument(s) {sorted(both)} are both static and donated.")
        return Jitted(f, _NO_MESH if mesh is None else mesh, in_specs, out_specs, options)

    return decorate if fn is None else decorate(fn)
