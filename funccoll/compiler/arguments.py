"""The arguments of a jitted function: which are static or donated, and how each is split over the mesh."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree

from ..core.dtype_promotion import Mode
from ..core.mesh import Mesh
from ..core.partition_spec import P
from ..core.pytree_differences import classes_at_difference, prefix_difference
from ..core.pytree_paths import names_below, parameter_names, signature_of
from ..core.sharding import Sharding
from ..errors import PytreeError, ShardingError, TraceError
from ..tracing.trace import sharding_of

__all__ = ["AUTO", "Arguments", "Options", "Static", "broadcast_specs", "check_specs", "flatten_specs"]

Static = tuple[tuple[int | str, Any, Any], ...]
"""Static arguments: (position or name, the key of the value by `distinct`, value)."""


def distinct(value: Any) -> Any:
    """A key that distinguishes values that Python calls equal: 1, 1.0 and True, 0.0 and -0.0, in tuples too."""
    if type(value) is tuple:
        return tuple(map(distinct, value))
    return type(value), repr(value) if type(value) in (float, complex) else value


@dataclass(frozen=True, eq=False)
class _Default:
    """A parameter that a call omits before one that it names: its default is the value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return type(other) is _Default and self.value is other.value  # it need not be hashable

    def __hash__(self) -> int:
        return id(self.value)


class _Auto:
    """The type of AUTO."""

    def __repr__(self) -> str:
        return "fc.AUTO"

    def __reduce__(self) -> str:
        return "AUTO"  # a copy is the same object, also in another process


AUTO = _Auto()
"""In place of a spec. An argument that is an Array is split as its own sharding says; any other is whole. A result is split as
the program says (`output_layouts`)."""

_OF = {"in_specs": "arguments", "out_specs": "results"}


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, P)


def broadcast_specs(specs: Any, tree: Any, what: str, name: str) -> list[Any]:
    """Return one spec (a P, or AUTO) for each leaf of `tree`, from specs that are a pytree prefix of it (JAX's rule)."""
    concrete = optree.tree_map(lambda s: P() if s is None else s, specs, is_leaf=_is_spec, none_is_leaf=True)
    try:
        return optree.broadcast_prefix(concrete, tree, is_leaf=lambda x: isinstance(x, P))
    except ValueError:
        if what == "in_specs" and type(concrete) is not tuple and type(tree) is tuple:
            one = f"({concrete!r},)"
            shown = one if len(one) <= 60 else "(" + {dict: "{...}", list: "[...]"}.get(type(concrete), "...") + ",)"
            raise PytreeError(
                f"in_specs of {name} is the {type(concrete).__name__} {concrete!r:.60}, and must be a tuple with one entry "
                f"for each argument, {len(tree)} here. If these are the specs of one argument, write in_specs={shown}."
            ) from None
        trees = optree.tree_structure(concrete, is_leaf=lambda x: isinstance(x, P)), optree.tree_structure(tree)
        difference = prefix_difference(*trees, what, f"the {_OF[what]} have")
        remedy = "Give one P for each array, or one P for a whole tuple, list or dict of them."
        for kind in classes_at_difference(*trees):
            remedy = getattr(kind, "specs_remedy", remedy)
        raise PytreeError(f"{what} of {name} does not fit: {difference}. {remedy}") from None


def check_specs(specs: Any, mesh: Mesh, what: str, name: str) -> None:
    """Raise for a spec that fits no call: one that is not a `P`, or names an axis that the mesh lacks."""
    for spec in optree.tree_leaves(specs, is_leaf=_is_spec, none_is_leaf=True):
        if spec is AUTO:
            continue
        _check_spec(spec, f"{what} of {name}")
        mesh.check_axes(() if spec is None else spec.axes, what=f"axis in {spec!r} ({what} of {name}),")


def _check_spec(spec: Any, where: str) -> None:
    if not _is_spec(spec):
        example = f"fc.P({spec!r})" if isinstance(spec, str) else "fc.P('axis') or fc.P()"
        raise ShardingError(f"{where}: {spec!r:.80} is not a partition spec; write {example}.")


def flatten_specs(specs: Any, where: str) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the specs (a P, or AUTO) of a pytree of them, and its structure. Raises ShardingError for another leaf."""
    leaves, treedef = optree.tree_flatten(specs, is_leaf=_is_spec, none_is_leaf=True)
    for spec in leaves:
        if spec is not AUTO:
            _check_spec(spec, where)
    return [P() if spec is None else spec for spec in leaves], treedef


@dataclass(frozen=True)
class Options:
    """Options of a jitted function: arguments by position in its Python signature, or by name; the others as `jit` has them."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    dtype_promotion: Mode = "standard"
    overlap: bool | None = None


class Arguments:
    """The arguments of a jitted function before it is traced: its signature, specs and options."""

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, in_specs: Any, options: Options):
        self.fn, self.mesh, self.in_specs, self.options = fn, mesh, in_specs, options
        self.name = getattr(fn, "__name__", type(fn).__name__)
        specs = optree.tree_leaves(in_specs, is_leaf=_is_spec, none_is_leaf=True)
        self.auto = any(spec is AUTO for spec in specs)
        """True if arguments decide how they are split."""

    def check(self) -> None:
        """Raise for static or donated arguments that the function does not have."""
        if self.signature is None:
            return
        parameters = self.signature.parameters
        kinds = {p.kind for p in parameters.values()}
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            for option in ("static_argnums", "donate_argnums"):
                for n in getattr(self.options, option):
                    if not -len(parameters) <= n < len(parameters):
                        raise TraceError(
                            f"fc.jit: {option} names argument {n}, and {self.name} has {len(parameters)}: "
                            f"{', '.join(parameters) or 'none'}."
                        )
        for name in self.options.static_argnames:
            if name not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
                raise TraceError(
                    f"fc.jit: static_argnames names {name!r}, and {self.name} has the arguments: "
                    f"{', '.join(parameters) or 'none'}."
                )

    @functools.cached_property
    def signature(self) -> inspect.Signature | None:
        """The function's Python signature, or None if it has none."""
        return signature_of(self.fn)

    def _resolve(self, numbers: tuple[int, ...], count: int) -> set[int]:
        """Return positions from the front.

        Negative ones count from the end of the signature, or with *args from the end of the call's `count`.
        """
        if self.signature is not None:
            kinds = [p.kind for p in self.signature.parameters.values()]
            if inspect.Parameter.VAR_POSITIONAL not in kinds:
                count = sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)
        return {n + count if n < 0 else n for n in numbers}

    def split(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Static]:
        """Return dynamic positional arguments, and the static ones."""
        options = self.options
        if any(k not in options.static_argnames for k in kwargs):
            args, kwargs = self._positional(args, kwargs)
        numbers = {n for n in self._resolve(options.static_argnums, len(args)) if 0 <= n < len(args)}
        defaults = {i for i, a in enumerate(args) if type(a) is _Default}
        if options.static_argnames and self.signature is not None:
            parameters = list(self.signature.parameters)[: len(args)]
            numbers |= {i for i, p in enumerate(parameters) if p in options.static_argnames}
        static = [*((i, args[i]) for i in sorted(numbers - defaults)), *sorted(kwargs.items())]
        for where, value in static:
            try:
                hash(value)
            except TypeError:
                name = parameter_names(self.signature, len(args))[where] if isinstance(where, int) else where
                raise TraceError(
                    f"the static argument {name} of {self.name} is not hashable: {value!r}. A static argument is part "
                    "of the compiled program; pass a tuple, a string, a number or a frozen dataclass."
                ) from None
        kept = [(k, distinct(v), v) for k, v in static] + [(i, None, args[i]) for i in defaults]
        kept.sort(key=lambda entry: (type(entry[0]) is str, entry[0]))
        numbers |= defaults
        return tuple(a for i, a in enumerate(args) if i not in numbers), tuple(kept)

    def _positional(self, args: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return keyword arguments in the places of their parameters; static ones without a place stay keywords."""
        if self.signature is None:
            raise TraceError(f"{self.name} was called with keywords {sorted(named)}, and has no signature to place them.")
        try:
            bound = self.signature.bind(*args, **named)
        except TypeError as error:
            raise TraceError(f"{self.name}: {error}.") from None
        parameters, given = self.signature.parameters, bound.arguments
        places = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        while places and places[-1] not in given:  # the function supplies its own defaults
            places.pop()
        positional = [given[n] if n in given else _Default(parameters[n].default) for n in places]
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += given.get(name, ())
        keywords = {k: v for k, v in named.items() if k not in places}
        dynamic = sorted(set(keywords) - set(self.options.static_argnames))
        if dynamic:
            raise TraceError(
                f"{self.name}: the keyword-only argument(s) {dynamic} have no place in in_specs. Make them "
                "positional, or static with static_argnames."
            )
        return tuple(positional), keywords

    def merge(self, dynamic: Any, static: Static) -> tuple[list[Any], dict[str, Any]]:
        """Return the call's positional and keyword arguments again."""
        merged = list(dynamic)
        for where, _, value in static:
            if isinstance(where, int):
                merged.insert(where, value.value if type(value) is _Default else value)
        return merged, {where: value for where, _, value in static if isinstance(where, str)}

    def _positions(self, count: int, static: Static) -> list[int]:
        """Return positions in the call of `count` dynamic arguments."""
        numbers = {where for where, _, _ in static if isinstance(where, int)}
        return [i for i in range(count + len(numbers)) if i not in numbers]

    def shardings(self, dynamic: tuple, static: Static) -> list[Sharding]:
        """Return one Sharding for each array of the dynamic arguments."""
        specs = tuple(self.in_specs) if isinstance(self.in_specs, list) else self.in_specs
        if isinstance(specs, tuple) and not isinstance(specs, P):
            positions = self._positions(len(dynamic), static)
            full = {len(dynamic) + len(static)}
            if self.signature is not None and (self.options.static_argnums or self.options.static_argnames):
                full.add(len(self.signature.parameters))
            if len(specs) != len(dynamic) and len(specs) in full and positions and len(specs) > positions[-1]:
                specs = tuple(specs[i] for i in positions)  # specs for the static arguments too: unused
            if len(specs) != len(dynamic):
                raise PytreeError(
                    f"in_specs of {self.name} has {len(specs)} entries, and it was called with {len(dynamic)} "
                    "argument(s) that are not static: give one spec (or pytree of specs) for each."
                )
        found = broadcast_specs(specs, dynamic, "in_specs", self.name)
        if not self.auto:
            return [Sharding(self.mesh, spec) for spec in found]
        values: Any = dynamic
        leaves, treedef = optree.tree_flatten(values)
        return [
            self._own_sharding(leaf, treedef, i, static) if spec is AUTO else Sharding(self.mesh, spec)
            for i, (spec, leaf) in enumerate(zip(found, leaves, strict=True))
        ]

    def _own_sharding(self, leaf: Any, treedef: optree.PyTreeSpec, position: int, static: Static) -> Sharding:
        """Return the sharding of an argument with the spec AUTO."""
        sharding = sharding_of(leaf)
        if sharding is None:
            return Sharding(self.mesh, P())
        if sharding.mesh != self.mesh:
            raise ShardingError(
                f"in_specs of {self.name}: fc.AUTO takes {self.describe(treedef, position, static)} as it is split, as "
                f"{sharding.spec!r} over {sharding.mesh!r}, and {self.name} is jitted for {self.mesh!r}. "
                "Give it a spec, or move it with fc.device_put."
            )
        return Sharding(self.mesh, sharding.spec)

    def describe(self, treedef: optree.PyTreeSpec, position: int, static: Static) -> str:
        """Return the name of one array of the arguments in messages: `batch['x'] of step`."""
        return f"{names_below(self.parameters(treedef.num_children, static), treedef)[position]} of {self.name}"

    def check_number(self, dynamic: Any, treedef: optree.PyTreeSpec, position: int, spec: P, static: Static) -> None:
        """Raise for a number whose spec has entries, if it is in a list that was meant as an array: `[[1, 2], [3, 4]]`."""
        accessor, node = treedef.accessors()[position], dynamic
        for depth, entry in enumerate(accessor, 1):
            node = entry(node)
            if type(node) in (list, tuple) and all(getattr(x, "shape", ()) == () for x in optree.tree_leaves(node)):
                name = self.parameters(treedef.num_children, static)[accessor[0].entry] + accessor[1:depth].codify("")
                raise ShardingError(
                    f"{name} of {self.name} is a {type(node).__name__} of numbers, each of which is an argument of its own, "
                    f"and {spec!r} is for the dimensions of one array. Pass np.asarray({name})."
                )

    def parameters(self, count: int, static: Static) -> list[str]:
        """Return the names of `count` dynamic arguments: `batch`, `rest[0]`."""
        positions = self._positions(count, static)
        names = parameter_names(self.signature, max(positions, default=-1) + 1)
        return [names[p] for p in positions]

    def donated(self, dynamic: tuple, static: Static) -> tuple[bool, ...]:
        """Return flags of the arrays of the dynamic arguments: True if the caller donates the array."""
        out: list[bool] = []
        positions = self._positions(len(dynamic), static)
        count = sum(isinstance(where, int) for where, _, _ in static) + len(dynamic)
        given_up = self._resolve(self.options.donate_argnums, count)
        for call_position, arg in zip(positions, dynamic, strict=True):
            out += [call_position in given_up] * len(optree.tree_leaves(arg))
        return tuple(out)
