"""Code generation: a program as Python functions over the values that this process holds.

A value that varies over some axes is held once for each coordinate along them that this process plays: what several
virtual devices share is computed once. Compute between collectives becomes straight-line Python functions ("segments"),
called once per copy; collectives are calls into the mesh's transport.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.array_order import in_c_order
from ...core.ir import Atom, Equation, Literal, Program, Var, eager
from ...core.mesh import Mesh, copy_coordinates
from ...core.types import is_inexact, types_text
from ...errors import MeshError, Source, UnsupportedError, hide_frames
from ...platforms.blas import keep_threads
from ...platforms.device import Copies
from ...platforms.float_environment import run_in_context
from ...primitives.control_flow import cond_p, scan_p, while_p
from ...primitives.debugging import DevicePlace, snapshot_p
from ...primitives.varying import axis_index_p, own_slice_p, pvary_p
from ...runtime.collective_call import CollectiveCall, bind_arguments
from ...runtime.recorder import register
from ...runtime.transport import CollectiveExecutable, Transport
from ..passes.buffers import Buffers
from .bad_index import SegmentOperands
from .loop_code import Picks, cond_source, each_source, scan_source, while_source
from .non_finite import Given, NonFinite, operation_check
from .recorded_program import Part, RecordedProgram, SegmentParts, collective_part

if TYPE_CHECKING:
    from ...schedules.schedule import Schedule

__all__ = ["GeneratedProgram", "compile_program", "require_devices"]


def _quiet_context() -> contextvars.Context:
    """A context in which NumPy's floating-point warnings are off, as in every compiled program (`run_in_context`).

    Running in a copy of it costs 0.05 µs, `np.errstate` 0.7 µs: as much as three small operations.
    """
    context = contextvars.Context()  # an empty one: a copy would keep the present trace alive
    context.run(np.seterr, all="ignore")
    return context


_QUIET = functools.lru_cache(maxsize=1)(_quiet_context)


def require_devices(mesh: Mesh) -> None:
    """Raise MeshError for an abstract mesh."""
    if mesh.is_abstract:
        raise MeshError(
            f"{mesh!r} has no devices to run on: it can be traced and lowered. Use fc.make_mesh({dict(mesh.shape)}) to run."
        )


@dataclass(frozen=True)
class GeneratedProgram:
    """A program as Python functions.

    `run` takes the copies of each input, and returns a tuple with the copies of each output, which own their memory: none
    shares with an argument. `executables` are the collectives that it calls, in order.
    """

    run: Callable[..., Any]
    executables: Sequence[CollectiveExecutable]
    _transport: Transport
    _left: dict[int, int]
    """By thread, the progress word of a call that an exception has just left: see `_Builder.driver`."""
    _sources: Mapping[Any, Sequence[Source | None]]
    """The user's lines of each segment, by its code: one for each line after the head."""
    identity: str = ""
    """The text of the program that must be equal on all processes."""
    unconditional: Sequence[CollectiveExecutable] = ()
    """Those of `executables` that each call reaches: in no branch, nor in a loop that may have no iteration."""
    _recorded: RecordedProgram | None = None
    """The same in a profile; it is registered as long as it lives."""
    _segments: Mapping[Any, SegmentOperands] = field(default_factory=dict)
    """By their code."""
    whole: CollectiveExecutable | None = None
    """The one of `executables` which is all of the program; None where more is computed."""

    def note_exception(self, error: BaseException, complete: bool = False) -> None:
        """Add the user's line to an exception of compute, and tell the transport how far the program was when it left.

        It may come after a `complete` run, too.
        """
        if self.executables:
            try:
                self._transport.note_exception(self.executables, len(self.executables) if complete else self._progress(), error)
            except BaseException:
                self._transport.lose_progress()
                raise
        source = self._source(error)
        if source is not None and getattr(error, "source", None) is not source:
            error.add_note(source.as_note)
            if isinstance(error, IndexError) and (note := self._bad_index(error)):
                error.add_note(note)
        hide_frames(error)

    def _source(self, error: BaseException) -> Source | None:
        """The user's line whose computation raised; None where the exception does not come from a segment."""
        trace = error.__traceback__
        while trace is not None:
            sources = self._sources.get(trace.tb_frame.f_code, ())
            if 0 <= trace.tb_lineno - 2 < len(sources):  # the head, before them, and the return, after them, are not the user's
                return sources[trace.tb_lineno - 2]
            trace = trace.tb_next
        return None

    def _bad_index(self, error: BaseException) -> str:
        """The note about the device and the argument of an index out of bounds; "" where they are not known."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code not in self._segments:
            trace = trace.tb_next
        return "" if trace is None else self._segments[trace.tb_frame.f_code].note(trace.tb_frame, trace.tb_lineno - 2)

    def _progress(self) -> int:
        """The number of complete calls of a program that an exception leaves in this thread.

        One that has not left the driver's `try` came last, from making Arrays of the results; or it is an interrupt at the
        driver's entry, which counts as one.
        """
        if self.whole is not None:
            return int(self.whole.completed_last_call)
        word = self._left.pop(get_ident(), len(self.executables))
        return word if word >= 0 else ~word + self.executables[~word].completed_last_call


def compile_program(
    program: Program, mesh: Mesh, buffers: Buffers, schedules: Mapping[Equation, Schedule], transport: Transport,
    name: str = "", search: NonFinite | None = None, arguments: Mapping[Atom, str] = MappingProxyType({}),
    results_are_arrays: bool = False,
) -> GeneratedProgram:  # fmt: skip
    """Compile a program that has gone through the passes. Processes whose programs are equal but for the name do not meet.

    `search`: check each operation for NaN and inf, with the names of `arguments`, by variable; no operand may be overwritten.
    `results_are_arrays`: what it returns becomes Arrays, which are read-only.
    """
    builder = _Builder(
        program, mesh, buffers, schedules, transport, name, search=search, arguments=arguments,
        results_are_arrays=results_are_arrays,
    )  # fmt: skip
    run = builder.build()
    calls = builder.calls
    if run is None:
        (whole,) = calls
        return GeneratedProgram(whole.function, calls, transport, {}, {}, builder.known_identity, calls, whole=whole)
    quiet, original = _QUIET(), run

    def execute(*copies: Copies) -> Sequence[Copies]:
        return run_in_context(quiet, run, *copies)

    def execute_in_users(*copies: Copies) -> Sequence[Copies]:
        """Reports use what the caller's context holds, such as NumPy's print options."""
        with eager():
            context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        return run_in_context(context, run, *copies)

    def replace(other: Callable[..., Any]) -> None:
        nonlocal run
        run = other

    recorded = transport.device.record(execute_in_users if any(eqn.reports for eqn in program.equations) else execute, program)
    profiled = RecordedProgram(program.label, builder.parts, original, replace)
    register(profiled)
    return GeneratedProgram(
        recorded, calls, transport, builder.left, builder.sources, builder.known_identity, builder.unconditional, profiled,
        builder.segments_of,
    )  # fmt: skip


class _Names:
    """Objects that generated code refers to, each under a name of its own."""

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


class _Builder:
    def __init__(
        self, program: Program, mesh: Mesh, buffers: Buffers, schedules: Mapping[Equation, Schedule], transport: Transport,
        name: str, inside: bool = False, fixed: Mapping[str, int] = MappingProxyType({}), search: NonFinite | None = None,
        arguments: Mapping[Atom, str] = MappingProxyType({}), outer_types: str = "", results_are_arrays: bool = False,
    ):  # fmt: skip
        """`inside`: a program of control flow, which another one calls. `fixed`: the coordinates at which it runs, along axes
        that `mesh` lacks then. `outer_types`: the types of the arguments of the outermost one."""
        self.inside, self.fixed, self.search, self.argument_names = inside, fixed, search, arguments
        self.given = Given()
        self.argument_types = outer_types if inside else types_text([var.type for var in program.inputs])
        self.program, self.mesh, self.buffers, self.schedules, self.transport = program, mesh, buffers, schedules, transport
        self.device = transport.device
        self.name_on_all, self.results_are_arrays = name, results_are_arrays
        # Ranks may show different values: their programs have the same fingerprint, and communicate at the same places.
        before = itertools.accumulate((eqn.communicates for eqn in program.equations), initial=0)
        self.places = dict(zip(program.equations, before, strict=False))
        self.names = _Names()
        self.variables: dict[Var, str] = {}
        self.constants = {v: self.names.of(self.device.library.upload(value), "c") for v, value in program.constants}
        self.steps: list[tuple[list[str], set[Var]]] = []  # lines, and the variables they read
        self.readers = self._readers()
        self.segments = 0
        self.call_steps: dict[int, int] = {}  # the number of executables that a step calls
        self.loop_steps: set[int] = set()
        self.left: dict[int, int] = {}
        """See `GeneratedProgram`."""
        self.calls: list[CollectiveExecutable] = []
        self.unconditional: list[CollectiveExecutable] = []
        """Those of `calls` that each execution reaches."""
        self.sources: dict[Any, list[Source | None]] = {}
        """By code of a segment, the user's line of each of its equations."""
        self.segments_of: dict[Any, SegmentOperands] = {}
        """By its code."""
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
        if var in self.constants:
            return self.constants[var]
        return self.variables.setdefault(var, f"v{len(self.variables)}")

    def count(self, varying: frozenset[str]) -> int:
        return len(copy_coordinates(self.mesh, varying))

    def mapping(self, source: frozenset[str], target: frozenset[str]) -> tuple[int, ...]:
        """Index of the copy of a `source` value that each copy of a `target` value reads."""
        position = {tuple(sorted(c.items())): i for i, c in enumerate(copy_coordinates(self.mesh, source))}
        return tuple(
            position[tuple(sorted((a, n) for a, n in c.items() if a in source))]
            for c in copy_coordinates(self.mesh, target)
        )

    def device_index(self, axes: tuple[str, ...], varying: frozenset[str]) -> Copies:
        """Position of each copy along `axes`, the first axis outermost (int32)."""
        along = Mesh({a: self.program.axis_sizes[a] for a in axes})
        coordinates = copy_coordinates(self.mesh, varying)
        out = [np.int32(along.position({a: {**self.fixed, **c}[a] for a in axes})) for c in coordinates]
        return out if len(out) > 1 else out[0]

    # ------------------------------------------------------------ the program

    def build(self) -> Callable[..., Any] | None:
        """Emit segments and groups of collectives in turn; return the function that runs the program.

        None where the program is one call of `calls`.
        """
        report = next((eqn for eqn in self.program.equations if eqn.primitive.kind == "debug"), None)
        if report is not None and self.device.library.array_type is not np.ndarray:
            raise UnsupportedError(
                "fc.debug shows values of programs on CPUs, and this one runs on a GPU. Return the value, or run the step on "
                "NumPy arrays.",
                report.source,
            )
        pending: dict[frozenset[str], list[Equation]] = {}
        group: list[Equation] = []
        for eqn in self.program.equations:
            if eqn.primitive.communicates:
                self.flush(pending)
                group.append(eqn)
            elif eqn.primitive.kind == "control":
                self.flush(pending)
                self.collectives(group)
                group = []
                self.control(eqn)
            elif eqn.primitive.kind == "debug":
                self.flush(pending)
                self.collectives(group)
                group = []
                self.report(eqn)
            else:
                self.collectives(group)
                group = []
                pending.setdefault(eqn.outputs[0].type.varying, []).append(eqn)
        self.collectives(group)
        self.flush(pending)
        outputs = [self.output(a) for a in self.program.outputs]
        if len(self.calls) == len(self.steps) == 1 and self.calls[0].returns_tuple and self.calls[0].is_native:
            (call,) = self.calls
            if outputs == [self.name(out) for out in call.outputs] and self.program.inputs == call.inputs:
                return None
        source = self.driver(outputs)
        exec(compile(source, "<funccoll program>", "exec"), self.names.namespace)
        run = self.names.namespace["run"]
        run.__doc__ = source
        return run

    def flush(self, pending: dict[frozenset[str], list[Equation]]) -> None:
        """Emit the segments gathered so far, those that vary less first: without a collective a value only varies more."""
        for varying in sorted(pending, key=lambda v: (len(v), sorted(v))):
            self.segment(varying, pending[varying])
        pending.clear()

    def driver(self, outputs: list[str]) -> str:
        """The function that calls segments and collectives, dropping every value after its last reader.

        It keeps a progress word: before the first call 0, then ~number of the last one that it has begun, which says itself
        whether it is complete. A step of control flow counts as complete from its beginning, when the word becomes the number
        of calls up to its end: what an exception leaves in an iteration may follow on the calls of an earlier one.
        """
        kept = {a for a in self.program.outputs if type(a) is Var}
        last_reader = {var: i for i, (_, reads) in enumerate(self.steps) for var in reads}
        last: dict[int, list[str]] = {}
        for var, i in last_reader.items():
            if var not in kept:
                last.setdefault(i, []).append(self.variables[var])
        calls, keeps_word = 0, bool(self.calls) and not self.inside
        lines = ["done = 0"] if keeps_word else []
        # One device computes as the user's own code does. Several must compute alike, in one process or in many.
        if self.mesh.size > 1 and not self.inside and any(eqn.primitive.blas for eqn, _ in self.program.executed()):
            keep = keep_threads()
            lines += [f"{self.names.of(keep, 'f')}()"] if keep else []
        for i, (step, _) in enumerate(self.steps):
            if keeps_word and self.call_steps.get(i):
                lines.append(f"done = {calls + self.call_steps[i] if i in self.loop_steps else f'~{calls}'}")
            calls += self.call_steps.get(i, 0)
            lines += step
            if i in last:
                lines.append(f"del {', '.join(sorted(last[i]))}")
        lines.append(f"return ({''.join(f'{o}, ' for o in outputs)})")
        if keeps_word:
            left, thread = self.names.of(self.left, "left"), self.names.of(get_ident, "f")
            lines = ["try:", *(f"    {line}" for line in lines)]
            lines += ["except BaseException:", f"    {left}[{thread}()] = done", "    raise"]
        parameters, body = ", ".join(self.name(v) for v in self.program.inputs), "\n    ".join(lines)
        return f"def run({parameters}):\n    {body}\n"

    def output(self, atom: Atom) -> str:
        if isinstance(atom, Literal):
            return self.names.of(self.device.library.upload(atom.value), "c")
        if atom not in self.buffers.borrowed:
            return self.crossing(atom)
        return self.each_copy(self.names.of(self.device.library.copy, "f", "copy"), atom)

    def crossing(self, var: Var) -> str:
        """The expression of a value that leaves this program, or enters one of control flow."""
        return self.in_c_order(var) if var in self.buffers.strided else self.name(var)

    def in_c_order(self, var: Var) -> str:
        """The expression of a value in C order."""
        return self.each_copy(self.names.of(in_c_order, "f"), var)

    def each_copy(self, function: str, var: Var) -> str:
        """The expression of a function of one block, called for each copy of a value."""
        name = self.name(var)
        return f"{function}({name})" if self.count(var.type.varying) == 1 else f"[*map({function}, {name})]"

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

        self.parts.append((namespace, function, SegmentParts(found, marked)))
        self.steps.append(([self.call_segment(function, arguments, returned, len(results), count)], reads))

    def check(
        self, eqn: Equation, operands: Sequence[str], arguments: dict[str, tuple[str, bool]], varying: frozenset[str]
    ) -> str:
        """The statement that looks for NaN and inf in what an equation of a segment has computed; empty without a search."""
        inexact = any(is_inexact(v.type.dtype) for v in eqn.outputs)
        if self.search is None or eqn.primitive in (pvary_p, snapshot_p) or not inexact:
            return ""
        places = self.device_places(varying)
        name = self.names.of(places if len(places) > 1 else places[0], "d", ("places", varying))
        arguments[f"p{name}"] = (name, len(places) > 1)
        function = self.names.of(operation_check(self.search, eqn, self.argument_names, self.given), "k", ("check", eqn))
        results, given = ("".join(f"{n}, " for n in names) for names in (map(self.name, eqn.outputs), operands))
        return f"; {function}(({results}), ({given}), p{name})"

    def check_results(self, eqn: Equation) -> None:
        """Emit the search in the results of a collective, on each device that has a copy."""
        axes = frozenset().union(*(a.type.varying for a in (*eqn.inputs, *eqn.outputs)))
        places = self.device_places(axes)
        check = operation_check(self.search or NonFinite(), eqn, self.argument_names, self.given)
        atoms = [*eqn.outputs, *eqn.inputs]
        picks = [None if self.count(a.type.varying) == 1 else self.mapping(a.type.varying, axes) for a in atoms]
        count = len(eqn.outputs)

        def look(*values: Copies) -> None:
            for device, place in enumerate(places):
                own = [v if p is None else v[p[device]] for v, p in zip(values, picks, strict=True)]
                check(own[:count], own[count:], place)

        given = [self.names.of(a.value, "c") if isinstance(a, Literal) else self.name(a) for a in atoms]
        reads = {a for a in atoms if type(a) is Var and a not in self.constants}
        self.steps.append(([f"{self.names.of(look, 'k')}({', '.join(given)})"], reads))

    def device_places(self, varying: frozenset[str]) -> list[DevicePlace | None]:
        """The first device that has each copy of a value; None on a mesh of one."""
        whole, own = Mesh(self.program.axis_sizes), dict(self.fixed)
        if not self.mesh.is_fully_addressable:
            (own,) = copy_coordinates(self.mesh, frozenset(self.mesh.axis_names))
        found = [{**dict.fromkeys(whole.axis_names, 0), **own, **c} for c in copy_coordinates(self.mesh, varying)]
        coordinates = [{axis: each[axis] for axis in whole.axis_names} for each in found]
        return [DevicePlace(whole.position(c), c) if whole.size > 1 else None for c in coordinates]

    def places_of_copies(self, varying: frozenset[str]) -> list[DevicePlace | None]:
        """The device of each copy; None of a value that all devices of this process have."""
        several = self.count(varying) > 1 or not self.mesh.is_fully_addressable
        return self.device_places(varying) if several else [None]

    def argument(self, atom: Var, varying: frozenset[str]) -> tuple[str, bool]:
        name = self.name(atom)
        have = self.count(atom.type.varying)
        if have == 1:
            return name, False
        if atom.type.varying == varying:
            return name, True
        take = operator.itemgetter(*self.mapping(atom.type.varying, varying))  # of two or more
        return f"{self.names.of(take, 'm', ('map', atom.type.varying, varying))}({name})", True

    def call(
        self, eqn: Equation, operands: list[str], varying: frozenset[str], arguments: dict[str, tuple[str, bool]]
    ) -> str:
        """The expression of one equation inside a segment."""
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
        if eqn.primitive.in_place:
            reuse = self.buffers.reuse
            operands.append(f"out=({''.join(f'{operands[k] if v in reuse else None}, ' for k, v in enumerate(eqn.outputs))})")
        elif k is not None:
            operands.append(f"out={operands[k]}")
        elif eqn.outputs[0] in self.buffers.published:
            type = eqn.outputs[0].type
            empty, dtype = self.names.of(self.device.allocate, "f", "allocate"), self.names.of(type.dtype, "t", type.dtype)
            operands.append(f"out={empty}({type.shape}, {dtype})")
        library = self.device.library
        specialises = library.specialises or eqn.primitive.in_place
        types = [atom.type for atom in (*eqn.inputs, *eqn.outputs)] if specialises else ()
        key = (eqn.primitive, *sorted(eqn.params.items()), *types)
        return f"{self.names.of(library.compute(eqn), 'f', key)}({', '.join(operands)})"

    def drop_dead(self, lines: list[str], equations: list[Equation], results: list[Var]) -> list[str]:
        """Delete large intermediates after their last use, so that their memory serves the next ones."""
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
        if count == 1:
            return f"{returned} = {function}({', '.join(e for e, _ in arguments.values())})"
        # No comprehensions: each is a scope, for which Python's compiler copies the names of all values of the driver.
        repeat = self.names.of(itertools.repeat, "f", "repeat")
        each = [e if many else f"{repeat}({e}, {count})" for e, many in arguments.values()]
        calls = f"map({', '.join([function, *each])})" if each else f"({f'{function}(), ' * count})"
        return f"{returned} = {f'[*{calls}]' if results == 1 else f'zip(*{calls})'}"

    # ------------------------------------------------------------ collectives

    @property
    def known_identity(self) -> str:
        """The program's text that must be equal on all processes; empty where one plays all devices."""
        return self._identity("")

    def identity(self, eqn: Equation) -> str:
        """The text that must be equal on all processes: the program's fingerprint, its hosts, and the collective's place."""
        return self._identity(f" {self.places[eqn]}")

    def _identity(self, place: str) -> str:
        if self.mesh.is_fully_addressable:  # none are compared, and the fingerprint reads all equations and constants
            return place
        hosts = f" {self.mesh.hosts}" if self.mesh.hosts else ""
        return f"{self.program.fingerprint}{place} {self.name_on_all}{hosts}"

    def collectives(self, group: list[Equation]) -> None:
        """Emit a group of adjacent collectives."""
        if not group:
            return
        make = functools.partial(
            CollectiveCall.of_equation, mesh=self.mesh, program=self.program, argument_types=self.argument_types
        )
        calls = [make(eqn, self.schedules[eqn], self.identity(eqn)) for eqn in group]
        for call in self.transport.compile(calls, self.mesh, self.results_are_arrays and self._is_whole(calls)):
            self.calls.append(call)
            self.unconditional.append(call)
            self.call_steps[len(self.steps)] = 1
            left = ", ".join(map(self.name, call.outputs)) + ("," if call.returns_tuple and call.outputs else "")
            function = self.names.of(call.function, "f")
            if not call.is_recorded:
                part = collective_part([e for e in group if not {*e.outputs}.isdisjoint(call.outputs)] or group)
                self.parts.append((self.names.namespace, function, part))
            right = f"{function}({', '.join(map(self.name, call.inputs))})"
            arranged = [f"; {self.name(v)} = {self.in_c_order(v)}" for v in call.outputs if v in self.buffers.arranged]
            self.steps.append(([(f"{left} = {right}" if left else right) + "".join(arranged)], set(call.inputs)))
        for eqn in group if self.search is not None else ():
            self.check_results(eqn)

    def _is_whole(self, calls: Sequence[CollectiveCall]) -> bool:
        """True where these collectives are all of the program: nothing writes into their results before they are Arrays."""
        if self.inside or len(calls) < len(self.program.equations):
            return False
        _, inputs, outputs = bind_arguments(calls)
        return inputs == self.program.inputs and outputs == self.program.outputs

    # ------------------------------------------------------------ reports

    def report(self, eqn: Equation) -> None:
        """Emit the call of a report, once for each device that this process plays, in the order of their ranks."""
        everywhere = frozenset(self.mesh.axis_names)
        places = self.device_places(everywhere)
        report = eqn.params["report"]
        picks = [
            None if isinstance(a, Literal) or self.count(a.type.varying) == 1 else self.mapping(a.type.varying, everywhere)
            for a in eqn.inputs
        ]

        def call(*values: Copies) -> None:
            for device, place in enumerate(places):
                own = [v if p is None else v[p[device]] for v, p in zip(values, picks, strict=True)]
                report([np.asarray(v) for v in own], place)

        function = f"report{len(self.steps)}"
        parameters = ", ".join(f"x{k}" for k in range(len(eqn.inputs)))
        self.define(function, f"def {function}({parameters}):\n    {self.names.of(call, 'r')}({parameters})\n")
        self.sources[self.names.namespace[function].__code__] = [eqn.source]
        given = [self.names.of(a.value, "c") if isinstance(a, Literal) else self.name(a) for a in eqn.inputs]
        reads = {a for a in eqn.inputs if type(a) is Var and a not in self.constants}
        self.steps.append(([f"{function}({', '.join(given)})"], reads))

    # ------------------------------------------------------------ control flow

    def control(self, eqn: Equation) -> None:
        """Emit the call of a function that runs the programs of control flow, which are compiled like this one."""
        calls = len(self.calls)
        step, left = len(self.steps), ", ".join(map(self.name, eqn.outputs))
        function = self.control_function(eqn, f"{eqn.primitive.name}{step}")
        self.call_steps[step] = len(self.calls) - calls
        self.loop_steps.add(step)
        upload = self.device.library.upload
        given = [self.names.of(upload(a.value), "c") if isinstance(a, Literal) else self.crossing(a) for a in eqn.inputs]
        call = f"{function}({', '.join(given)})"
        reads = {a for a in eqn.inputs if type(a) is Var and a not in self.constants}
        self.steps.append(([f"{left}, = {call}" if left else call], reads))

    def control_function(self, eqn: Equation, function: str) -> str:
        """Compile control flow; returns the name of its function."""
        decision = {while_p: eqn.params.get("test", self.program).outputs, cond_p: eqn.inputs}.get(eqn.primitive, ())[:1]
        decided = decision[0].type.varying if decision else frozenset()
        if self.count(decided) > 1:
            return self.each_decision(eqn, function, decided)
        calls = len(self.calls)
        programs = {name: self.names.of(self.program_inside(eqn, name, body), "p") for name, body in eqn.bodies.items()}
        note = self.decision(eqn, self.calls[calls:])
        if eqn.primitive is scan_p:
            stacked = eqn.outputs[eqn.params["carry"] :]
            dtypes = [self.names.of(v.type.dtype, "t", v.type.dtype) for v in stacked]
            empty = self.names.of(self.device.library.namespace.empty, "f")
            source = scan_source(function, eqn, self.count, programs["body"], empty, dtypes)
        elif eqn.primitive is while_p:
            source = while_source(function, eqn, programs["test"], programs["body"], note)
        else:
            branches = tuple(self.names.namespace[name] for name in programs.values())
            source = cond_source(function, eqn, self.names.of(branches, "p"), note)
        return self.define(function, source)

    def decision(self, eqn: Equation, calls: Sequence[CollectiveExecutable]) -> str:
        """The name of the function that takes note of what control flow decides; empty where no ranks must decide alike."""
        if eqn.primitive is scan_p or not calls:
            return ""
        kind = "loop" if eqn.primitive is while_p else "branch"
        note = self.transport.decision(calls, kind, eqn.source, f"{self.identity(eqn)} {kind}")
        return self.names.of(note, "d") if note is not None else ""

    def define(self, function: str, source: str) -> str:
        exec(compile(source, f"<funccoll {function}>", "exec"), self.names.namespace)
        return function

    def each_decision(self, eqn: Equation, function: str, decided: frozenset[str]) -> str:
        """Compile control flow that devices decide differently: once for each coordinate along the axes of the decision.

        Coordinates share it where nothing in it asks for them.
        """
        coordinates = copy_coordinates(self.mesh, decided)
        inner = [e for body in eqn.bodies.values() for e, _ in body.executed()]
        asked = any(e.primitive in (axis_index_p, own_slice_p) and decided.intersection(e.axes()) for e in inner)
        alike = not asked and not eqn.reports and self.search is None  # these name the device
        rest = Mesh({a: n for a, n in self.mesh.shape.items() if a not in decided})
        functions: list[Callable[..., Any]] = []
        for fixed in coordinates[:1] if alike else coordinates:
            part = _Builder(
                self.program, rest, self.buffers, self.schedules, self.transport, self.name_on_all, True,
                {**self.fixed, **fixed}, self.search, outer_types=self.argument_types,
            )  # fmt: skip
            functions.append(part.names.namespace[part.control_function(eqn, function)])
            self.calls += part.calls
            self.sources.update(part.sources)
            self.segments_of.update({} if alike else part.segments_of)
            self.parts += part.parts
        run = self.names.of(tuple(functions * len(coordinates) if alike else functions), "p")
        operands, results = ([self.picks(a.type.varying, coordinates) for a in atoms] for atoms in (eqn.inputs, eqn.outputs))
        sizes = [self.count(v.type.varying) for v in eqn.outputs]
        return self.define(function, each_source(function, run, operands, results, sizes))

    def picks(self, varying: frozenset[str], decisions: Sequence[Mapping[str, int]]) -> Picks:
        """The copies of a value that go with each copy of a decision, at these coordinates."""
        copies = list(enumerate(copy_coordinates(self.mesh, varying)))
        table = [tuple(k for k, c in copies if all(c[a] == n for a, n in at.items() if a in c)) for at in decisions]
        if len(table[0]) == len(copies):
            return Picks(None, False)
        many = len(table[0]) > 1
        chosen = tuple(table) if many else tuple(k for (k,) in table)
        return Picks(self.names.of(chosen, "m", ("picks", chosen)), many)

    def program_inside(self, eqn: Equation, name: str, body: Program) -> Callable[..., Any]:
        """Compile a program of control flow."""
        plan = self.buffers.bodies[body]
        name = f"{self.identity(eqn)} {name}"
        inner = _Builder(
            body, self.mesh, plan, self.schedules, self.transport, name, True, self.fixed, self.search,
            outer_types=self.argument_types,
        )  # fmt: skip
        run = inner.build() or inner.calls[0].function
        self.calls += inner.calls
        if eqn.primitive is scan_p and eqn.params["length"]:
            self.unconditional += inner.unconditional
        self.sources.update(inner.sources)
        self.segments_of.update(inner.segments_of)
        self.parts += inner.parts
        return run
