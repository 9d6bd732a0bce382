"""A Python function on a mesh, as `fc.jit` gets it: where its arguments are, their types, and its program for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import optree

from ..arrays.array import Array
from ..arrays.array_layout import ArrayLayout, layout_of
from ..arrays.array_like import device_type_of, shape_and_dtype
from ..core.dtype_promotion import recorded
from ..core.interpreter import Traced, current_interpreter
from ..core.ir import Equation
from ..core.mesh import Mesh
from ..core.named_scopes import outside_scopes
from ..core.pytree_paths import names_below, path_name
from ..core.sharding import Sharding
from ..errors import DeviceError, OutSpecsError, Source, TraceError, VaryingError
from ..job.job_context import on_device, transport_of
from ..ops.elementwise import scalar_type
from ..primitives.varying import pvary
from ..tracing.global_draws import watched_draws
from ..tracing.trace import Evaluation, flatten_outputs, stage, value_type
from .arguments import AUTO, Arguments, Options, Static, broadcast_specs, check_specs
from .choose_schedules import check_algorithms
from .garbage_collection import without_garbage_collection
from .output_layouts import layout_of_argument, output_layouts, sharding_of_result
from .signature import Signature
from .stages import TracedFunction

__all__ = ["FunctionOnMesh", "LeafType"]

LeafType = tuple[tuple[int, ...], np.dtype, type | None]
"""Global shape, dtype, and the Python type of a weak scalar."""


class FunctionOnMesh:
    """A function with its mesh, specs and options. It is traced for the arguments of a call.

    Arguments come as `Arguments.split` returns them, `dynamic` and `static` ones; `leaves` and `treedef` are the former, flat.
    """

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, options: Options):
        self.fn, self.mesh, self.in_specs, self.out_specs, self.options = fn, mesh, in_specs, out_specs, options
        self.arguments = Arguments(fn, mesh, in_specs, options)
        self.name = self.arguments.name
        code = getattr(fn, "__code__", None)
        self.source = code and Source(code.co_filename, code.co_firstlineno, self.name)
        self._widened: set[Source | None] = set()  # lines that it warned of
        self._draws = False  # True after a warning of draws from NumPy's global random state

    def check_options(self) -> None:
        """Raise for options that can fit no call: an axis, a position or a name that does not exist."""
        self.arguments.check()
        for what, specs in (("in_specs", self.in_specs), ("out_specs", self.out_specs)):
            check_specs(specs, self.mesh, what, self.name)

    @functools.cached_property
    def _on_gpus(self) -> FunctionOnMesh:
        """The same function on GPUs."""
        return FunctionOnMesh(self.fn, on_device(self.mesh, "cuda"), self.in_specs, self.out_specs, self.options)

    def on_device_of(
        self, leaves: Sequence[Any], treedef: optree.PyTreeSpec, static: Static
    ) -> tuple[FunctionOnMesh, Sequence[Any]]:
        """Return the function on the devices of its arguments, and these as Arrays, NumPy or CuPy arrays.

        Raises DeviceError if some arrays are on a GPU and others in host memory.
        """
        places = [device_type_of(leaf) for leaf in leaves]
        if self.mesh.device_type == "cpu" and "cuda" not in places:
            return self, leaves
        name = functools.partial(self.arguments.describe, treedef, static=static)
        if self.mesh.device_type == "cpu":
            for i, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
                if place == "cpu" and getattr(leaf, "shape", ()) != ():  # scalars are copied along
                    raise DeviceError(
                        f"{name(i)} is in host memory, and {name(places.index('cuda'))} on a GPU: a call runs where all "
                        'its arrays are. Move one of them: fc.device_put(x, mesh, spec, device="cuda"), cupy.asarray(x).'
                    )
        target = self if self.mesh.device_type == "cuda" else self._on_gpus
        library = transport_of(target.mesh).device.library
        return target, [
            library.asarray(leaf, name(i)) if place == "cuda" and type(leaf) is not Array else leaf
            for i, (leaf, place) in enumerate(zip(leaves, places, strict=True))
        ]

    def types_of(self, leaves: Sequence[Any], treedef: optree.PyTreeSpec, static: Static) -> tuple[LeafType, ...]:
        """Return the types of the arguments. Raises for an argument that is not an array."""
        return tuple(
            (*shape_and_dtype(leaf, lambda i=i: self.arguments.describe(treedef, i, static)), scalar_type(leaf))
            for i, leaf in enumerate(leaves)
        )

    def layouts(
        self, dynamic: tuple, static: Static, treedef: optree.PyTreeSpec, types: Sequence[LeafType]
    ) -> list[ArrayLayout]:
        """Return the layouts in which it takes these arguments. Raises ShardingError if a spec does not split one evenly."""
        arguments, found = self.arguments, list[ArrayLayout]()
        values: Any = dynamic
        names = names_below(arguments.parameters(treedef.num_children, static), treedef)
        leaves, shardings = optree.tree_leaves(values), arguments.shardings(dynamic, static)
        for i, (name, leaf, (shape, dtype, _), sharding) in enumerate(zip(names, leaves, types, shardings, strict=True)):
            if not shape and sharding.spec:
                arguments.check_number(dynamic, treedef, i, sharding.spec, static)
            given = "Array" if type(leaf) is Array else "" if isinstance(leaf, Traced) else "value"
            sharding.check_even(shape, f"{name} of {self.name}", given)
            found.append(layout_of(shape, dtype, sharding))
        return found

    def trace(
        self,
        dynamic: tuple,
        static: Static,
        treedef: optree.PyTreeSpec,
        types: Sequence[LeafType],
        evaluation: Evaluation | None = None,
    ) -> TracedFunction:
        """Return its program for arguments of these types; with `evaluation`, each operation also runs as it is traced."""
        arguments, layouts = self.arguments, self.layouts(dynamic, static, treedef, types)
        parameters = arguments.parameters(treedef.num_children, static)
        out: dict[str, Any] = {}

        def flat(*tracers: Any) -> list[Any]:
            positional, keywords = arguments.merge(treedef.unflatten(tracers), static)
            function: Any = self.fn
            result = function(*positional, **keywords)
            values, tree = flatten_outputs(result, self.name)
            out["tree"] = tree
            specs = broadcast_specs(self.out_specs, tree.unflatten(values), "out_specs", self.name)
            out["shardings"] = shardings = [None if spec is AUTO else Sharding(self.mesh, spec) for spec in specs]
            out["weak"] = [scalar_type(v) for v in values]
            return [
                v if s is None else self._check_output(v, s, tree, i)
                for i, (v, s) in enumerate(zip(values, shardings, strict=True))
            ]

        weak = [w for _, _, w in types]
        quiet = self._draws or evaluation is not None or self.mesh.process  # below, only one of the processes of a job warns
        draws = None if quiet else watched_draws(self.name, self.source)
        # The program does not depend on the named scopes around its first call.
        with (
            without_garbage_collection() if evaluation is None else nullcontext(),
            outside_scopes(),
            draws or nullcontext(),
            recorded(self.name, self.options.dtype_promotion) as widenings,
        ):
            try:
                program, captured = stage(
                    flat,
                    [x.type for x in layouts],
                    weak=weak,
                    axis_sizes=self.mesh.shape,
                    label=self.name,
                    evaluation=evaluation,
                )
            except VaryingError as error:
                if self.in_specs is None and layouts and error.equal_operand is not None:
                    raise self._forgotten_in_specs(error, *error.equal_operand) from None
                raise
        self._draws = self._draws or bool(draws and draws.found)
        if not self.mesh.process:  # the processes of a job trace the same lines: only the first one warns
            widenings.warn(self._widened)
        check_algorithms(program, self.mesh)
        for value in captured:
            if isinstance(value, Traced):
                raise TraceError(
                    f"{self.name} uses a traced array of an enclosing function. Pass it as an argument, or call the "
                    f"plain function ({self.name}.fn) there."
                )
        if None in out["shardings"]:
            found = output_layouts(program, [layout_of_argument(x.sharding, len(x.shape)) for x in layouts])
            out["shardings"] = [
                s or sharding_of_result(found[i], a.type, self.mesh, self.name, path_name("result", out["tree"], i))
                for i, (s, a) in enumerate(zip(out["shardings"], program.outputs, strict=True))
            ]
        out_layouts = tuple(
            layout_of(s.global_shape(a.type.shape), a.type.dtype, s, w)
            for a, s, w in zip(program.outputs, out["shardings"], out["weak"], strict=True)
        )
        donated = arguments.donated(dynamic, static)
        signature = Signature(
            self.name,
            self.mesh,
            treedef,
            tuple(layouts),
            tuple(parameters),
            out["tree"],
            out_layouts,
            donated,
            self.source,
            tuple(widenings.found.values()),
            self.options.overlap,
        )
        return TracedFunction(program, signature)

    def _forgotten_in_specs(self, error: VaryingError, stated: str, axes: str) -> VaryingError:
        """Return the error about a collective's equal operand in words for a function whose arguments are whole by default."""
        told = VaryingError(
            f"{stated}. No in_specs were given to fc.jit, so every argument of {self.name} is whole on each device: was "
            f"in_specs=P({axes}) forgotten? If not, drop the collective.",
            error.source,
        )
        return told.with_traceback(error.__traceback__)

    def _check_output(self, value: Any, sharding: Sharding, tree: optree.PyTreeSpec, position: int) -> Any:
        """Return the output, varying over exactly its spec's axes. Raises OutSpecsError if it varies over more."""
        type = value_type(value)
        where = path_name("result", tree, position)
        extra = type.varying - sharding.varying
        if extra:
            axes = ", ".join(map(repr, sorted(extra)))
            given = " (out_specs was not given)" if self.out_specs is None else ""
            origin = getattr(value, "source", None)
            made = f", made at {origin}" if origin else ""
            traced: Sequence[Equation] = getattr(current_interpreter(), "equations", ())
            in_groups = any("groups" in eqn.params and not extra.isdisjoint(eqn.axes()) for eqn in traced)
            why = " (a collective in groups has a result for each group)" if in_groups else ""
            raise OutSpecsError(
                f"out_specs of {self.name}: {where}, of type {type}{made}, has the spec {sharding.spec!r}{given}, which "
                f"says that it is equal on all devices along {axes}; it varies over {axes}{why}. Reduce or gather it first "
                f"(fc.all_reduce, fc.all_gather over {axes}), or name {axes} in its out_spec."
            )
        sharding.global_shape(type.shape, f"{where} of {self.name}")
        missing = [a for a in self.mesh.axis_names if a in sharding.varying - type.varying]
        return pvary(value, missing) if missing else value
