"""Segments: the compute of a program between its collectives as straight-line Python functions, called once per copy."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.ir import Atom, Equation, Literal, Program, Var
from ...core.mesh import Mesh, copy_coordinates
from ...core.types import is_inexact
from ...errors import Source
from ...platforms.device import Copies, Device
from ...platforms.native_product import is_packed, packed_product
from ...primitives.debugging import DevicePlace, snapshot_p
from ...primitives.fused import KERNELS
from ...primitives.varying import axis_index_p, own_slice_p, pvary_p
from ..passes.buffers import Buffers
from .bad_index import SegmentOperands
from .fused_calls import described, fused_call, fused_functions
from .non_finite import Given, NonFinite, operation_check
from .recorded_program import Part, SegmentParts
from .transposed_products import by_transpose, is_faster_by_transpose

__all__ = ["SegmentBuilder"]


class _Names:
    """Objects that generated code refers to, each under its own name."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}
        self._known: dict[Any, str] = {}

    def of(self, thing: Any, prefix: str, key: Any = None) -> str:
        key = id(thing) if key is None else key
        if key not in self._known:
            name = f"{prefix}{len(self._known)}"
            self._known[key] = name
            self.namespace[name] = thing
        return self._known[key]


class SegmentBuilder:
    """Emits segments, as steps of the function that runs a program.

    `fixed`: the coordinates at which it runs, along axes that `mesh` then lacks.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        buffers: Buffers,
        device: Device,
        fixed: Mapping[str, int],
        search: NonFinite | None,
        arguments: Mapping[Atom, str],
    ):
        self.program, self.mesh, self.buffers, self.device = program, mesh, buffers, device
        self.fixed, self.search, self.argument_names = fixed, search, arguments
        self.given = Given()
        self.names = _Names()
        self.variables: dict[Var, str] = {}
        self.constants = {v: self.names.of(device.library.upload(value), "c") for v, value in program.constants}
        self.steps: list[tuple[list[str], set[Var]]] = []  # lines, and the variables they read
        self.readers = self._readers()
        self.segments = 0
        self.sources: dict[Any, list[Source | None]] = {}
        """By code of a segment, the user's line of each of its equations."""
        self.segments_of: dict[Any, SegmentOperands] = {}
        """The operands of each segment, by its code."""
        self.kernels = fused_functions(program) if device.library.array_type is np.ndarray else {}
        self.makers = {v: eqn for eqn in program.equations for v in eqn.outputs}
        self.parts: list[tuple[dict[str, Any], str, Part | SegmentParts]] = []
        """The functions that a profile records: where the code finds them, their names and definitions."""

    def _readers(self) -> dict[Var, set[Equation | None]]:
        readers: dict[Var, set[Equation | None]] = {}
        for eqn in self.program.equations:
            for atom in eqn.inputs:
                if type(atom) is Var:
                    readers.setdefault(atom, set()).add(eqn)
        for atom in self.program.outputs:
            if type(atom) is Var:
                readers.setdefault(atom, set()).add(None)
        return readers

    # ------------------------------------------------------------ names and copies

    def name(self, var: Var) -> str:
        """Return the name of a variable in generated code."""
        if var in self.constants:
            return self.constants[var]
        return self.variables.setdefault(var, f"v{len(self.variables)}")

    def count(self, varying: frozenset[str]) -> int:
        """Return the number of copies of a value that varies over these axes."""
        return len(copy_coordinates(self.mesh, varying))

    def mapping(self, source: frozenset[str], target: frozenset[str]) -> tuple[int, ...]:
        """Return the index of the copy of a `source` value that each copy of a `target` value reads."""
        position = {tuple(sorted(c.items())): i for i, c in enumerate(copy_coordinates(self.mesh, source))}
        return tuple(
            position[tuple(sorted((a, n) for a, n in c.items() if a in source))] for c in copy_coordinates(self.mesh, target)
        )

    def device_index(self, axes: tuple[str, ...], varying: frozenset[str]) -> Copies:
        """Return the position of each copy along `axes`, the first axis outermost (int32)."""
        along = Mesh({a: self.program.axis_sizes[a] for a in axes})
        coordinates = copy_coordinates(self.mesh, varying)
        out = [np.int32(along.position({a: {**self.fixed, **c}[a] for a in axes})) for c in coordinates]
        return out if len(out) > 1 else out[0]

    # ------------------------------------------------------------ segments

    def segment(self, varying: frozenset[str], equations: list[Equation]) -> None:
        """Compile equations that vary alike into one function, and call it for each copy."""
        inside = set(equations)
        defined = {v for e in equations for v in e.outputs}
        lines: list[str] = []
        arguments: dict[str, tuple[str, bool]] = {}  # parameter -> (driver expression, True for a list)
        reads: set[Var] = set()
        count = self.count(varying)

        def use(atom: Atom, eqn: Equation) -> str:
            if isinstance(atom, Literal):
                key = ("literal", eqn.primitive, atom.type.dtype, atom.value.tobytes())
                return self.names.of(self.device.library.literal(atom.value, eqn), "c", key)
            name = self.name(atom)
            if atom not in defined and atom not in self.constants:
                reads.add(atom)
                arguments[name] = self.argument(atom, varying)
            return name

        for eqn in equations:
            operands = [use(a, eqn) for a in eqn.inputs]
            if eqn.primitive in KERNELS and self.kernels:
                function = self.kernels[described(eqn)]
                allocate = self.device.allocate
                lines.append(fused_call(eqn, function, operands, self.name, self.names.of, allocate, self.buffers))
                continue
            left = ", ".join(self.name(v) for v in eqn.outputs) + ("," if eqn.primitive.multiple else "")
            check = self.check(eqn, operands, arguments, varying)
            lines.append(f"{left} = {self.call(eqn, operands, varying, arguments)}{check}")
        results = [v for e in equations for v in e.outputs if not self.readers.get(v, set()) <= inside]
        if not results:
            return
        function = f"segment{self.segments}"
        self.segments += 1
        lines = self.drop_dead(lines, equations, results)
        returned = ", ".join(self.name(v) for v in results)
        body = "\n    ".join([*lines, f"return {returned}"])
        source = f"def {function}({', '.join(arguments)}):\n    {body}\n"
        exec(compile(source, f"<funccoll {function}>", "exec"), self.names.namespace)
        self.sources[self.names.namespace[function].__code__] = found = [eqn.source for eqn in equations]
        namespace, sources, known = self.names.namespace, self.sources, self.segments_of
        segment = SegmentOperands(equations, arguments, self.places_of_copies(varying), self.argument_names, self.makers)
        known[namespace[function].__code__] = segment

        def marked(starts: Sequence[int]) -> Callable[..., Any]:
            begins = {*starts}
            body = "\n    ".join([f"_next(); {line}" if i in begins else line for i, line in enumerate(lines)])
            text = f"def marked({', '.join(['_next', *arguments])}):\n    {body}\n    return {returned}\n"
            made: dict[str, Any] = {}
            exec(compile(text, f"<funccoll {function}>", "exec"), namespace, made)
            sources[made["marked"].__code__], known[made["marked"].__code__] = found, segment
            return made["marked"]

        counts = [len(eqn.params["body"].equations) if eqn.primitive in KERNELS else 1 for eqn in equations]
        self.parts.append((namespace, function, SegmentParts(found, counts, marked)))
        self.steps.append(([self.call_segment(function, arguments, returned, len(results), count)], reads))

    def check(
        self, eqn: Equation, operands: Sequence[str], arguments: dict[str, tuple[str, bool]], varying: frozenset[str]
    ) -> str:
        """Return the statement that searches the results of an equation for NaN and inf; empty without a search."""
        inexact = any(is_inexact(v.type.dtype) for v in eqn.outputs)
        if self.search is None or eqn.primitive in (pvary_p, snapshot_p) or not inexact:
            return ""
        places = self.device_places(varying)
        name = self.names.of(places if len(places) > 1 else places[0], "d", ("places", varying))
        arguments[f"p{name}"] = (name, len(places) > 1)
        function = self.names.of(operation_check(self.search, eqn, self.argument_names, self.given), "k", ("check", eqn))
        results, given = ("".join(f"{n}, " for n in names) for names in (map(self.name, eqn.outputs), operands))
        return f"; {function}(({results}), ({given}), p{name})"

    def device_places(self, varying: frozenset[str]) -> list[DevicePlace | None]:
        """Return the first device that has each copy of a value; None on a mesh of one."""
        whole, own = Mesh(self.program.axis_sizes), dict(self.fixed)
        if not self.mesh.is_fully_addressable:
            (own,) = copy_coordinates(self.mesh, frozenset(self.mesh.axis_names))
        found = [{**dict.fromkeys(whole.axis_names, 0), **own, **c} for c in copy_coordinates(self.mesh, varying)]
        coordinates = [{axis: each[axis] for axis in whole.axis_names} for each in found]
        return [DevicePlace(whole.position(c), c) if whole.size > 1 else None for c in coordinates]

    def places_of_copies(self, varying: frozenset[str]) -> list[DevicePlace | None]:
        """Return the device of each copy; None for a value that all devices of this process have."""
        several = self.count(varying) > 1 or not self.mesh.is_fully_addressable
        return self.device_places(varying) if several else [None]

    def argument(self, atom: Var, varying: frozenset[str]) -> tuple[str, bool]:
        """Return the expression of an argument of a segment, and True if it has one value for each copy."""
        name = self.name(atom)
        have = self.count(atom.type.varying)
        if have == 1:
            return name, False
        if atom.type.varying == varying:
            return name, True
        take = operator.itemgetter(*self.mapping(atom.type.varying, varying))  # of two or more
        return f"{self.names.of(take, 'm', ('map', atom.type.varying, varying))}({name})", True

    def call(self, eqn: Equation, operands: list[str], varying: frozenset[str], arguments: dict[str, tuple[str, bool]]) -> str:
        """Return the expression of one equation inside a segment."""
        if eqn.primitive is pvary_p:
            return operands[0]
        if eqn.primitive in (axis_index_p, own_slice_p):
            axes = eqn.axes()
            index = self.device_index(axes, varying)
            if eqn.primitive is axis_index_p:  # a value; own_slice takes a Python index
                upload = self.device.library.upload
                index = list(map(upload, index)) if isinstance(index, list) else upload(index)
            name = self.names.of(index, "i", (eqn.primitive, axes, varying))
            arguments[f"p{name}"] = (name, isinstance(index, list))
            operands.append(f"p{name}")
            if eqn.primitive is axis_index_p:
                return operands[0]
            params = {k: eqn.params[k] for k in ("dim", "stack", "size")}
            function: Any = functools.partial(eqn.primitive.reference, **params)
            return f"{self.names.of(function, 'f', (eqn.primitive, *params.items()))}({', '.join(operands)})"
        k = self.buffers.reuse.get(eqn.outputs[0])
        if k is not None:
            operands.append(f"out={operands[k]}")
        elif eqn.outputs[0] in self.buffers.published:
            type = eqn.outputs[0].type
            empty, dtype = self.names.of(self.device.allocate, "f", "allocate"), self.names.of(type.dtype, "t", type.dtype)
            operands.append(f"out={empty}({type.shape}, {dtype})")
        library = self.device.library
        types = [atom.type for atom in (*eqn.inputs, *eqn.outputs)] if library.specialises else ()
        key = (eqn.primitive, *sorted(eqn.params.items()), *types)
        if library.array_type is np.ndarray and is_packed(eqn, math.prod(self.program.axis_sizes.values())):
            return f"{self.names.of(packed_product, 'f')}({', '.join(operands)})"
        if library.array_type is np.ndarray and is_faster_by_transpose(eqn, self.makers):
            return f"{self.names.of(by_transpose, 'f')}({', '.join(operands)})"
        return f"{self.names.of(library.compute(eqn), 'f', key)}({', '.join(operands)})"

    def drop_dead(self, lines: list[str], equations: list[Equation], results: list[Var]) -> list[str]:
        """Delete large intermediates after their last use, so that the next ones can take their memory."""
        last: dict[Var, int] = {}
        for i, eqn in enumerate(equations):
            last.update((a, i) for a in (*eqn.inputs, *eqn.outputs) if type(a) is Var)
        keep = {*results, *self.constants}
        out = list(lines)
        for var, i in last.items():
            if var not in keep and var.type.nbytes >= 4096:
                out[i] += f"; del {self.name(var)}"
        return out

    def call_segment(
        self, function: str, arguments: Mapping[str, tuple[str, bool]], returned: str, results: int, count: int
    ) -> str:
        """Return the statement that calls a segment for each copy."""
        if count == 1:
            return f"{returned} = {function}({', '.join(e for e, _ in arguments.values())})"
        # No comprehensions: each is a scope, and Python's compiler copies the names of all the driver's values for it.
        repeat = self.names.of(itertools.repeat, "f", "repeat")
        each = [e if many else f"{repeat}({e}, {count})" for e, many in arguments.values()]
        calls = f"map({', '.join([function, *each])})" if each else f"({f'{function}(), ' * count})"
        return f"{returned} = {f'[*{calls}]' if results == 1 else f'zip(*{calls})'}"
