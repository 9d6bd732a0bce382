"""The IR: variables, equations, programs and their checker. `interpreter` gives their operations a meaning."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FunccollError, Source, VaryingError
from .types import ArrayType, type_of

if TYPE_CHECKING:
    from ..draw.drawing import Drawing

__all__ = [
    "Atom",
    "Equation",
    "Literal",
    "Primitive",
    "Program",
    "Var",
]


class Var:
    """A value in a program. It is assigned once. Its identity is the object's."""

    __slots__ = ("type",)

    def __init__(self, type: ArrayType):
        self.type = type

    def __repr__(self) -> str:
        return f"Var({self.type})"


class Literal:
    """A scalar constant inside an equation. It fits any `varying`, because it is equal on every device."""

    __slots__ = ("type", "value")

    def __init__(self, value: np.ndarray):
        self.value = value
        self.type = ArrayType((), value.dtype)

    def __repr__(self) -> str:
        return repr(self.value.item())


Atom = Var | Literal

# Numeric kernels take arrays; a primitive with one output returns an array, else a sequence.
Kernel = Callable[..., Any]
# (cotangents of the outputs, inputs, outputs, **params) -> one cotangent or None for each input.
VjpRule = Callable[..., Sequence[Any]]
# (tangents of the inputs, None for zero, inputs, outputs, **params) -> one tangent or None for each output.
JvpRule = Callable[..., Sequence[Any]]
# (primitive, values, which of them are batched, batch size, **params) -> the output, or a list if the primitive is multiple.
BatchRule = Callable[..., Any]


@dataclass(frozen=True, eq=False, slots=True)
class Primitive:
    """One operation, with everything about it in this record.

    `infer(*types, **params)` gives the output types. It checks the inputs and raises the user's errors.
    `reference(*arrays, **params)` is the written definition, in NumPy. For a collective it takes one operand's shards on the
    devices of one group, and returns the result's shards. `vjp` consists of public operations, so it can be differentiated
    again. None means that no gradient flows.
    """

    name: str
    infer: Callable[..., Sequence[ArrayType]]
    reference: Kernel
    vjp: VjpRule | None = None
    jvp: JvpRule | None = None
    """The forward derivative. Without a rule it is the transpose of `vjp`, which is linear in its cotangents."""
    batch: BatchRule | None = None
    """The rule of `vmap`: it binds something in place of the primitive. The batch is the first dimension of batched values,
    and of all outputs."""
    multiple: bool = False
    """Outputs are a sequence (else exactly one value)."""
    kind: str = "compute"
    """compute | local (depends on the device, moves nothing) | collective | effect | control (runs programs) | higher |
    fence (an identity) | call (of a program on a mesh, on global values) | debug (shows values)."""
    view: bool = False
    """The output may share memory with an input."""
    ufunc: np.ufunc | None = None
    """The NumPy ufunc of this primitive. It can write into a dead operand's buffer."""
    blas: bool = False
    """NumPy computes it with BLAS, and BLAS's number of threads decides the bits."""

    @property
    def communicates(self) -> bool:
        """True if devices exchange data or wait for each other."""
        return self.kind in ("collective", "effect")

    def __post_init__(self) -> None:
        _PRIMITIVES[self.name] = self

    def __reduce__(self) -> Any:
        return primitive_named, (self.name,)  # passes compare identities: a copy, also in another process, is the same object

    def __repr__(self) -> str:
        return self.name


_PRIMITIVES: dict[str, Primitive] = {}


def primitive_named(name: str) -> Primitive:
    """Return the primitive that a program's text calls `name`."""
    return _PRIMITIVES[name]


def find_primitive(name: str) -> Primitive | None:
    """Return the primitive of this name, if there is one."""
    return _PRIMITIVES.get(name)


@dataclass(frozen=True, eq=False, slots=True)
class Equation:
    """`outputs = primitive[params] inputs`, and the user's line of it."""

    primitive: Primitive
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    params: Mapping[str, Any]
    source: Source | None
    bucket: int = 0
    """The number of the bucket of gradients that it reduces (`grad_hook`), else 0. Passes leave it in its place."""
    started: bool | None = None
    """True for a collective that is started, and ends before the first equation that reads its results. False for one that ends
    before anything else runs. None leaves that to the compiler."""

    def replace(self, **changes: Any) -> Equation:
        """Return a copy with some fields changed."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return Equation(**{**fields, **changes})

    def axes(self) -> tuple[str, ...]:
        """The mesh axes of this equation (empty for plain compute)."""
        return self.params.get("axes", ())

    @property
    def bodies(self) -> dict[str, Program]:
        """The programs that an equation of control flow runs, by name."""
        if self.primitive.kind != "control":
            return {}
        found = {name: value for name, value in self.params.items() if isinstance(value, Program)}
        return found or {f"branch {i}": branch for i, branch in enumerate(self.params["branches"])}

    def with_bodies(self, rewrite: Callable[[Program], Program]) -> Equation:
        """Return the equation with its programs rewritten."""
        if self.primitive.kind != "control":
            return self
        params = {name: rewrite(value) if isinstance(value, Program) else value for name, value in self.params.items()}
        if "branches" in self.params:
            params["branches"] = tuple(map(rewrite, self.params["branches"]))
        return self.replace(params=params)

    @property
    def communicates(self) -> bool:
        """True if devices exchange data or wait for each other, also within control flow."""
        return self.primitive.communicates or any(e.communicates for body in self.bodies.values() for e in body.equations)

    @property
    def has_effects(self) -> bool:
        """True if it does more than compute results. It is kept, and never merged with another equation."""
        return self.primitive.kind in ("effect", "debug") or any(
            e.has_effects for body in self.bodies.values() for e in body.equations
        )

    @property
    def reports(self) -> bool:
        """True if it shows values, also in a program of its parameters. Such equations keep their order."""
        if self.primitive.kind not in ("control", "higher"):
            return self.primitive.kind == "debug"
        programs = [*self.bodies.values()] or [v for v in self.params.values() if isinstance(v, Program)]
        return any(e.reports for program in programs for e in program.equations)

    def without_reports(self) -> Equation:
        """Return the equation with programs that show nothing."""
        if not self.reports:
            return self
        if self.primitive.kind == "control":
            return self.with_bodies(Program.without_reports)
        params = {k: v.without_reports() if isinstance(v, Program) else v for k, v in self.params.items()}
        return self.replace(params=params)

    @property
    def times(self) -> int | None:
        """The number of times that its programs run; None if that depends on values."""
        return self.params["length"] if self.primitive.name == "scan" else 1 if self.primitive.name == "cond" else None


_FIELDS = ("primitive", "inputs", "outputs", "params", "source", "bucket", "started")


@dataclass(frozen=True, eq=False)
class Program:
    """A typed, single-assignment program over one device's values, equal on all devices of the mesh."""

    axis_sizes: Mapping[str, int]
    constants: tuple[tuple[Var, np.ndarray], ...]
    inputs: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]
    label: str = field(default="program")
    before_fusion: Program | None = field(default=None, repr=False)
    """The program whose equations are groups here. Its fingerprint is this one's: what a rank shows changes groups' outputs."""

    def replace(self, **changes: Any) -> Program:
        """Return a copy with some fields changed."""
        names = ("axis_sizes", "constants", "inputs", "equations", "outputs", "label", "before_fusion")
        return Program(**{**{name: getattr(self, name) for name in names}, **changes})

    def check(self, derived: set[Equation] | None = None) -> Program:
        """Derive every type again and check single assignment. Return self, or raise FunccollError.

        Equations in `derived` are skipped. The others are added to it.
        """
        derived = set() if derived is None else derived
        known: set[Var] = {var for var, _ in self.constants}
        for var in self.inputs:
            _check_new(var, known)
        for var, value in self.constants:
            _check_same(type_of(value), var.type.vary(()), "constant")
        for number, eqn in enumerate(self.equations):
            where = f"equation {number} ({eqn.primitive.name})"
            for atom in eqn.inputs:
                if isinstance(atom, Var) and atom not in known:
                    raise FunccollError(f"{where} reads a variable that is not defined yet.", eqn.source)
            if eqn not in derived:
                for body in eqn.bodies.values():
                    body.check(derived)
                types = infer(eqn.primitive, [a.type for a in eqn.inputs], eqn.params, eqn.inputs)
                if len(types) != len(eqn.outputs):
                    raise FunccollError(f"{where} has {len(eqn.outputs)} outputs, its rule {len(types)}.", eqn.source)
                for var, type in zip(eqn.outputs, types, strict=True):
                    _check_same(type, var.type, where, eqn.source)
                derived.add(eqn)
            for var in eqn.outputs:
                _check_new(var, known)
        for atom in self.outputs:
            if isinstance(atom, Var) and atom not in known:
                raise FunccollError("an output of the program is not defined.")
        return self

    def has_parts_of(self, other: Program) -> bool:
        """Return True if it has the very constants, inputs, equations and outputs of another program, which is checked."""
        mine = self.constants, self.inputs, self.equations, self.outputs
        theirs = other.constants, other.inputs, other.equations, other.outputs
        return all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(mine, theirs, strict=True))

    def unfused(self) -> Program:
        """Return the program before equations became groups, at all depths."""
        if self.before_fusion is not None:
            return self.before_fusion
        if not any(eqn.bodies for eqn in self.equations):
            return self
        return self.replace(equations=tuple(eqn.with_bodies(Program.unfused) for eqn in self.equations))

    def without_reports(self) -> Program:
        """Return the program without the equations that show values, at all depths, and without the operands of these alone."""
        if not any(eqn.reports for eqn in self.equations):
            return self
        shown: set[Var] = set()
        live: set[Atom] = set(self.outputs)
        kept: list[Equation] = []
        for eqn in reversed(self.equations):
            inner = eqn.without_reports()
            only = eqn.reports or not shown.isdisjoint(eqn.outputs)  # it reports, or reports read it
            pure = eqn.primitive.kind == "debug" or not (inner.has_effects or inner.communicates)
            if only and pure and live.isdisjoint(eqn.outputs):
                shown.update(a for a in eqn.inputs if isinstance(a, Var))
                continue
            kept.append(inner)
            live.update(eqn.inputs)
        constants = tuple((v, value) for v, value in self.constants if v in live or v not in shown)
        return self.replace(equations=tuple(reversed(kept)), constants=constants)

    @cached_property
    def names(self) -> dict[Var, str]:
        """Short names (a, b, ..., z, aa, ...) in order of definition."""
        from .program_text import variable_names

        return variable_names(self)

    def text(self, sources: bool = True) -> str:
        """Return the program as text, like a jaxpr. `sources=False` gives the canonical text for fingerprints."""
        from .program_text import program_text

        return program_text(self, sources)

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the canonical text and of the captured constants' bytes: no ids, no file:line, no reports."""
        program = self.unfused().without_reports()
        digest = hashlib.sha256(program.text(sources=False).encode())
        for _, value in program.constants:
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def collectives(self) -> list[Equation]:
        """Return the equations that communicate, in program order, with those of control flow."""
        return [eqn for eqn, _ in self.executed() if eqn.primitive.communicates]

    def executed(self, times: int | None = 1) -> Iterator[tuple[Equation, int | None]]:
        """Yield the equations at all depths of control flow, with the number of times that each runs (None if values decide).

        Each branch counts as if it were taken.
        """
        for eqn in self.equations:
            yield eqn, times
            if eqn.primitive.kind == "control":
                inner = None if times is None or eqn.times is None else times * eqn.times
                for body in eqn.bodies.values():
                    yield from body.executed(inner)

    def draw(self, **options: Any) -> Drawing:
        """Draw the equations as a graph, by `fc.draw.program`."""
        from ..draw import program

        return program(self, **options)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from .display import program_table

        return program_table(self)


def _check_new(var: Var, known: set[Var]) -> None:
    if var in known:
        raise FunccollError("a variable is assigned twice.")
    known.add(var)


def _check_same(derived: ArrayType, stated: ArrayType, where: str, source: Source | None = None) -> None:
    if derived != stated:
        raise FunccollError(f"{where}: the stated type is {stated}, its rule gives {derived}.", source)


def infer(
    primitive: Primitive, types: Sequence[ArrayType], params: Mapping[str, Any], atoms: Sequence[Atom]
) -> Sequence[ArrayType]:
    """Return the output types of an equation. Compute needs one `varying` for all operands that are not literals."""
    if primitive.kind != "compute":
        return primitive.infer(*types, **params)
    varying: frozenset[str] | None = None
    for atom in atoms:
        if isinstance(atom, Literal):
            continue
        if varying is None:
            varying = atom.type.varying
        elif varying != atom.type.varying:
            raise VaryingError(
                f"{primitive.name}: operands vary over {sorted(varying)} and {sorted(atom.type.varying)}; a pvary is missing."
            )
    outs = primitive.infer(*types, **params)
    return [ArrayType(t.shape, t.dtype, varying) for t in outs] if varying else outs
