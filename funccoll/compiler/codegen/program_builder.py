"""Emission of a program's code: the function that calls its segments, collectives, reports and control flow in turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ...collectives.record import is_ragged
from ...core.array_order import in_c_order
from ...core.ir import Atom, Equation, Literal, Program, Var
from ...core.mesh import Mesh, copy_coordinates
from ...core.types import types_text
from ...errors import PlannedError, UnsupportedError
from ...platforms.blas import keep_threads
from ...platforms.device import Copies
from ...primitives.control_flow import cond_p, scan_p, while_p
from ...primitives.varying import axis_index_p, own_slice_p
from ...runtime.collective_call import CollectiveCall, bind_arguments
from ...runtime.transport import CollectiveExecutable, Transport
from ..passes.buffers import Buffers
from ..passes.overlap import MOST_IN_FLIGHT, MemoryUse, joins
from .calls_in_flight import CallInFlight, Event, check_flights
from .loop_code import Picks, cond_source, each_source, scan_source, while_source
from .non_finite import NonFinite, operation_check
from .recorded_program import collective_part
from .segments import SegmentBuilder

if TYPE_CHECKING:
    from ...schedules.schedule import Schedule

__all__ = ["ProgramBuilder"]


class ProgramBuilder(SegmentBuilder):
    """Emits segments and collectives in turn, and the function that runs them all."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        buffers: Buffers,
        schedules: Mapping[Equation, Schedule],
        transport: Transport,
        name: str,
        inside: bool = False,
        fixed: Mapping[str, int] = MappingProxyType({}),
        search: NonFinite | None = None,
        arguments: Mapping[Atom, str] = MappingProxyType({}),
        outer_types: str = "",
        results_are_arrays: bool = False,
        overlaps: bool = False,
    ):
        """Begin a program.

        - `inside`: a program of control flow, which another one calls.
        - `fixed`: see `SegmentBuilder`.
        - `outer_types`: the types of the arguments of the outermost program.
        - `overlaps`: its order is that of `passes.overlap`, so started collectives are in flight while others run.
        """
        super().__init__(program, mesh, buffers, transport.device, fixed, search, arguments)
        self.inside, self.schedules, self.transport = inside, schedules, transport
        self.argument_types = outer_types if inside else types_text([var.type for var in program.inputs])
        self.name_on_all, self.results_are_arrays = name, results_are_arrays
        # Ranks may show different values: their programs have one fingerprint, and communicate at the same places.
        before = itertools.accumulate((eqn.communicates for eqn in program.equations), initial=0)
        self.places = dict(zip(program.equations, before, strict=False))
        self.call_steps: dict[int, int] = {}  # the number of executables that a step calls
        self.loop_steps: set[int] = set()
        self.left: dict[int, int] = {}
        """See `GeneratedProgram`."""
        self.calls: list[CollectiveExecutable] = []
        self.unconditional: list[CollectiveExecutable] = []
        """The `calls` that each execution reaches."""
        self.overlaps, self.use = overlaps, MemoryUse(program, buffers) if overlaps else None
        self.flights: list[CallInFlight] = []
        self.starts_calls = False
        """True if it starts calls, or a program of its control flow does."""
        self.contents: dict[int, Sequence[Equation]] = {}
        """The equations that a step runs."""

    # ------------------------------------------------------------ the program

    def build(self) -> Callable[..., Any] | None:
        """Emit segments and groups of collectives in turn; return the function that runs the program.

        None if the program is one call of `calls`.
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
            if group and not (eqn.primitive.communicates and self.joins(group, eqn)):
                self.collectives(group)
                group = []
            if needed := self.needed(eqn):
                self.flush(pending)
                for flight in needed:
                    self.take(flight)
            if eqn.primitive.communicates:
                self.flush(pending)
                group.append(eqn)
            elif eqn.primitive.kind == "control":
                self.flush(pending)
                self.control(eqn)
            elif eqn.primitive.kind == "debug":
                self.flush(pending)
                self.report(eqn)
            else:
                if self.overwrites(eqn, pending):
                    self.flush(pending)
                pending.setdefault(eqn.outputs[0].type.varying, []).append(eqn)
        self.collectives(group)
        self.flush(pending)
        for flight in self.in_flight:
            self.take(flight)
        self.call_plainly()
        outputs = [self.output(a) for a in self.program.outputs]
        if (
            len(self.calls) == sum(bool(lines) for lines, _ in self.steps) == 1
            and self.calls[0].returns_tuple
            and self.calls[0].is_native
        ):
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
            step = len(self.steps)
            self.segment(varying, pending[varying])
            if len(self.steps) > step:
                self.contents[step] = pending[varying]
        pending.clear()

    def driver(self, outputs: list[str]) -> str:
        """Return the function that calls segments and collectives, dropping every value after its last reader.

        It keeps a progress word: 0 before the first call, then ~number of the last one that began. Whether that call is
        complete, the call itself knows. A started one counts as complete, unless it failed. A
        step of control flow counts as complete from its beginning, when the word becomes the number of calls up to its end. An
        exception in one iteration may come after the calls of earlier iterations.
        """
        kept = {a for a in self.program.outputs if type(a) is Var}
        last_reader = {var: i for i, (_, reads) in enumerate(self.steps) for var in reads}
        last: dict[int, list[str]] = {}
        for var, i in last_reader.items():
            if var not in kept:
                last.setdefault(i, []).append(self.variables[var])
        calls, keeps_word = 0, bool(self.calls) and not self.inside
        ends, starts = keeps_word and self.starts_calls, {flight.start: flight for flight in self.flights}
        lines = ["done = 0"] if keeps_word else []
        lines += ["started = {}"] if self.flights or ends else []
        # One device computes as the user's own code does. Several must compute alike, in one process or in many.
        if self.mesh.size > 1 and not self.inside and any(eqn.primitive.blas for eqn, _ in self.program.executed()):
            keep = keep_threads()
            lines += [f"{self.names.of(keep, 'f')}()"] if keep else []
        for i, (step, _) in enumerate(self.steps):
            if keeps_word and self.call_steps.get(i) and i not in starts:
                lines.append(f"done = {calls + self.call_steps[i] if i in self.loop_steps else f'~{calls}'}")
            calls += self.call_steps.get(i, 0)
            lines += step
            if keeps_word and i in starts:
                lines.append(f"done = {calls}")
            if i in last:
                lines.append(f"del {', '.join(sorted(last[i]))}")
        lines.append(f"return ({''.join(f'{o}, ' for o in outputs)})")
        if keeps_word:
            left, thread = self.names.of(self.left, "left"), self.names.of(get_ident, "f")
            lines = ["try:", *(f"    {line}" for line in lines)]
            if ends:
                end = self.names.of(functools.partial(self.transport.end_started, self.calls), "f")
                lines += [
                    "except BaseException as error:",
                    f"    {left}[{thread}()] = {end}(error, done, started)",
                    "    raise",
                ]
            else:
                lines += ["except BaseException:", f"    {left}[{thread}()] = done", "    raise"]
        parameters, body = ", ".join(self.name(v) for v in self.program.inputs), "\n    ".join(lines)
        return f"def run({parameters}):\n    {body}\n"

    def output(self, atom: Atom) -> str:
        """Return the expression of a result that owns its memory."""
        if isinstance(atom, Literal):
            return self.names.of(self.device.library.upload(atom.value), "c")
        if atom not in self.buffers.borrowed:
            return self.crossing(atom)
        return self.each_copy(self.names.of(self.device.library.copy, "f", "copy"), atom)

    def crossing(self, var: Var) -> str:
        """Return the expression of a value that leaves this program, or enters a program of control flow."""
        return self.in_c_order(var) if var in self.buffers.strided else self.name(var)

    def in_c_order(self, var: Var) -> str:
        """Return the expression of a value in C order."""
        return self.each_copy(self.names.of(in_c_order, "f"), var)

    def each_copy(self, function: str, var: Var) -> str:
        """Return the expression of a function of one block, called for each copy of a value."""
        name = self.name(var)
        return f"{function}({name})" if self.count(var.type.varying) == 1 else f"[*map({function}, {name})]"

    # ------------------------------------------------------------ collectives

    @property
    def known_identity(self) -> str:
        """Return the program's text that must be equal on all processes; empty if one process plays all devices."""
        return self._identity("")

    def identity(self, eqn: Equation) -> str:
        """Return the text that must be equal on all processes: the program's fingerprint, its hosts, the collective's place."""
        return self._identity(f" {self.places[eqn]}")

    def _identity(self, place: str) -> str:
        if self.mesh.is_fully_addressable:  # nothing is compared, and the fingerprint reads all equations and constants
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
        for eqn in group:
            if is_ragged(eqn) and not self.transport.has_ragged:
                raise PlannedError(
                    f"{eqn.primitive.name} on {self.mesh!r}: ragged collectives are planned for GPUs of several processes."
                    " They run between CPUs, and between virtual devices of one GPU.",
                    eqn.source,
                )
        calls = [make(eqn, self.schedules[eqn], self.identity(eqn)) for eqn in group]
        for call in self.transport.compile(calls, self.mesh, self.results_are_arrays and self._is_whole(calls)):
            starts = self.overlaps and group[0].started and call.runs_in_background and call.agreement is not None
            own = [e for e in group if not {*e.outputs}.isdisjoint(call.outputs)] or group
            for flight in self.in_flight:
                if not {*flight.call.outputs}.isdisjoint(call.inputs):
                    self.take(flight)
            while starts and self.in_flight and self.bytes_in_flight(call) > MOST_IN_FLIGHT:
                self.take(self.in_flight[0])
            number = len(self.calls)
            self.calls.append(call)
            self.unconditional.append(call)
            step = len(self.steps)
            self.call_steps[step] = 1
            self.contents[step] = own
            left = ", ".join(map(self.name, call.outputs)) + ("," if call.returns_tuple and call.outputs else "")
            function = self.names.of(call.function, "f")
            if not call.is_recorded:
                self.parts.append((self.names.namespace, function, collective_part(own)))
            operands = ", ".join(map(self.name, call.inputs))
            right = f"{function}({operands})"
            arranged = [f"; {self.name(v)} = {self.in_c_order(v)}" for v in call.outputs if v in self.buffers.arranged]
            reads = {v for v in call.inputs if v in self.variables}  # a table of sizes may be a constant
            line = (f"{left} = {right}" if left else right) + "".join(arranged)
            if starts:
                start = self.names.of(call.start, "f", ("start", call))
                self.flights.append(CallInFlight(number, call, own, left, line, step))
                line = f"started[{number}] = {start}({operands}{', ' * bool(operands)}function={function})"
            self.steps.append(([line], reads))
        for eqn in group if self.search is not None else ():
            self.check_results(eqn)

    # ------------------------------------------------------------ started collectives

    @property
    def in_flight(self) -> list[CallInFlight]:
        """The started calls whose results are not taken yet."""
        return [flight for flight in self.flights if flight.take is None]

    def bytes_in_flight(self, call: CollectiveExecutable) -> int:
        """Return the bytes of the calls in flight, and of one more."""
        return sum(v.type.nbytes for c in (call, *(f.call for f in self.in_flight)) for v in (*c.inputs, *c.outputs))

    def joins(self, group: Sequence[Equation], eqn: Equation) -> bool:
        """True if a collective is executed in one call with the group before it."""
        return not self.overlaps or (joins(group, eqn) and not self.needed(eqn))

    def needed(self, eqn: Equation) -> list[CallInFlight]:
        """Return the calls in flight that must end before an equation: it reads a result, or writes to memory of an operand.

        Control flow with collectives notes decisions with them, so all earlier ones come first.
        """
        if self.use is None or not (flying := self.in_flight):
            return []
        if eqn.bodies and eqn.communicates:
            return flying
        written = self.use.written(eqn)
        return [
            f
            for f in flying
            if not {*f.call.outputs}.isdisjoint(eqn.inputs) or (written and not written.isdisjoint(self.use.of(f.call.inputs)))
        ]

    def overwrites(self, eqn: Equation, pending: Mapping[frozenset[str], Sequence[Equation]]) -> bool:
        """True if an equation writes to memory that pending ones read which vary otherwise, and may come after it."""
        if self.use is None or not (written := self.use.written(eqn)):
            return False
        varying = eqn.outputs[0].type.varying
        others = (e for v, equations in pending.items() if v != varying for e in equations)
        return any(not written.isdisjoint(self.use.of(e.inputs)) for e in others)

    def take(self, flight: CallInFlight) -> None:
        """Emit the wait for a call, which gives its results."""
        flight.take = len(self.steps)
        assigned = f"{flight.left} = " if flight.left else ""
        work = f"started[{flight.number}]"
        self.steps.append(([f"{assigned}{work}.result()", f"del {work}"], set()))

    def call_plainly(self) -> None:
        """Emit plain calls in place of starts behind which nothing runs, and prove the order of the others."""
        for flight in [*self.flights]:
            assert flight.take is not None
            runs = (step for step in self.contents if flight.start < step < flight.take)
            if all(self.call_steps.get(step) for step in runs):
                self.flights.remove(flight)
                self.steps[flight.start] = ([flight.plain], self.steps[flight.start][1])
                self.steps[flight.take] = ([], set())
        self.starts_calls = self.starts_calls or bool(self.flights)
        if self.flights:
            starts, takes = ({getattr(f, what): f for f in self.flights} for what in ("start", "take"))
            events: list[Event] = []
            for step in range(len(self.steps)):
                kind = "take" if step in takes else "start" if step in starts else "run"
                events.append((kind, self.contents.get(step, ()), takes.get(step) or starts.get(step)))
            check_flights(self.program, self.buffers, events)

    def _is_whole(self, calls: Sequence[CollectiveCall]) -> bool:
        """True if these collectives are the whole program: their results are not written to before they are Arrays."""
        if self.inside or len(calls) < len(self.program.equations):
            return False
        _, inputs, outputs = bind_arguments(calls)
        return inputs == self.program.inputs and outputs == self.program.outputs

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
        self.contents[len(self.steps)] = [eqn]
        self.steps.append(([f"{function}({', '.join(given)})"], reads))

    # ------------------------------------------------------------ control flow

    def control(self, eqn: Equation) -> None:
        """Emit the call of a function that runs the programs of control flow. They are compiled like this one."""
        calls = len(self.calls)
        step, left = len(self.steps), ", ".join(map(self.name, eqn.outputs))
        function = self.control_function(eqn, f"{eqn.primitive.name}{step}")
        self.call_steps[step] = len(self.calls) - calls
        self.loop_steps.add(step)
        upload = self.device.library.upload
        given = [self.names.of(upload(a.value), "c") if isinstance(a, Literal) else self.crossing(a) for a in eqn.inputs]
        call = f"{function}({', '.join(given)})"
        reads = {a for a in eqn.inputs if type(a) is Var and a not in self.constants}
        self.contents[step] = [eqn]
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
        """Return the name of the function that notes decisions of control flow; empty if no ranks must decide alike."""
        if eqn.primitive is scan_p or not calls:
            return ""
        kind = "loop" if eqn.primitive is while_p else "branch"
        note = self.transport.decision(calls, kind, eqn.source, f"{self.identity(eqn)} {kind}")
        return self.names.of(note, "d") if note is not None else ""

    def define(self, function: str, source: str) -> str:
        """Compile a function of generated code; returns its name."""
        exec(compile(source, f"<funccoll {function}>", "exec"), self.names.namespace)
        return function

    def each_decision(self, eqn: Equation, function: str, decided: frozenset[str]) -> str:
        """Compile control flow that devices decide differently: once for each coordinate along the axes of the decision.

        Coordinates share it if nothing in it depends on them.
        """
        coordinates = copy_coordinates(self.mesh, decided)
        inner = [e for body in eqn.bodies.values() for e, _ in body.executed()]
        asked = any(e.primitive in (axis_index_p, own_slice_p) and decided.intersection(e.axes()) for e in inner)
        alike = not asked and not eqn.reports and self.search is None  # these texts name the device
        rest = Mesh({a: n for a, n in self.mesh.shape.items() if a not in decided})
        functions: list[Callable[..., Any]] = []
        for fixed in coordinates[:1] if alike else coordinates:
            part = ProgramBuilder(
                self.program,
                rest,
                self.buffers,
                self.schedules,
                self.transport,
                self.name_on_all,
                True,
                {**self.fixed, **fixed},
                self.search,
                outer_types=self.argument_types,
            )
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
        """Return the copies of a value that belong to each copy of a decision, at these coordinates."""
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
        inner = ProgramBuilder(
            body,
            self.mesh,
            plan,
            self.schedules,
            self.transport,
            name,
            True,
            self.fixed,
            self.search,
            outer_types=self.argument_types,
            overlaps=self.overlaps,
        )
        run = inner.build() or inner.calls[0].function
        self.calls += inner.calls
        self.starts_calls = self.starts_calls or inner.starts_calls
        if eqn.primitive is scan_p and eqn.params["length"]:
            self.unconditional += inner.unconditional
        self.sources.update(inner.sources)
        self.segments_of.update(inner.segments_of)
        self.parts += inner.parts
        return run
