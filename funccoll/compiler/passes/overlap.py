"""Overlap: the order in which compute runs while started collectives are in flight.

A start moves up to where its operands are ready. What reads a result, and what that makes, moves down: it runs when another
collective needs it, or at the end, in the order of the calls. Collectives keep their order, and so do reports: all ranks run
them in one.

The pass comes last, when kernels are made and memory is planned. So kernels, and the order of values in memory, are the same
with it and without it, and so are the bits. In return the order must fit the plan. An equation that takes an operand's memory
comes after all other readers of that memory, and after the end of a call in flight that reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ...core.ir import Atom, Equation, Program, Var
from .buffers import Buffers, memory_of
from .rewrite import at_all_depths

__all__ = ["MOST_IN_FLIGHT", "MemoryUse", "joins", "overlap"]

MOST_IN_FLIGHT = 1 << 28
"""Bytes of operands and results that started collectives of a program may have in flight on a device. Beyond it the oldest
ones are waited for before another one starts."""
_LARGE = 1 << 20
"""Bytes from which a started collective is a call of its own. Smaller neighbours share one, because each has its cost."""


class MemoryUse:
    """The memory that equations read, and what they write besides new memory: numbers of storage classes."""

    def __init__(self, program: Program, buffers: Buffers):
        self._reuse, self._number = buffers.reuse, memory_of(program, buffers)

    def of(self, atoms: Iterable[Atom]) -> set[int]:
        """Return the memory of values."""
        return {self._number[a] for a in atoms if type(a) is Var}

    def written(self, eqn: Equation) -> set[int]:
        """Return the memory of operands that an equation overwrites."""
        return self.of(eqn.inputs[self._reuse[v]] for v in eqn.outputs if v in self._reuse)


def joins(group: Sequence[Equation], eqn: Equation) -> bool:
    """True if a collective becomes a part of the call of adjacent collectives before it. Calls are started as a whole."""
    if group[-1].started != eqn.started:
        return False
    if not eqn.started:
        return True
    small = sum(_nbytes(e) for e in group) < _LARGE and _nbytes(eqn) < _LARGE
    return group[-1].bucket == eqn.bucket and (small or not _made(group).isdisjoint(eqn.inputs))


def _made(group: Sequence[Equation]) -> set[Var]:
    return {v for eqn in group for v in eqn.outputs}


def _nbytes(eqn: Equation) -> int:
    return sum(a.type.nbytes for a in eqn.inputs)


def overlap(program: Program, buffers: Buffers, starts: Callable[[Equation], bool]) -> tuple[Program, Buffers]:
    """Return a program in the order in which started collectives overlap with compute, and its plan of memory.

    Args:
        program: The program in the order that runs without started collectives.
        buffers: Its plan. It stays valid.
        starts: True for the collectives to start; they are marked (`Equation.started`), and no others.
    """
    mark = at_all_depths(functools.partial(_marked, starts=starts))
    return _overlapped(program.replace(before_fusion=mark(program.unfused())), buffers, starts)


def _marked(program: Program, starts: Callable[[Equation], bool]) -> Program:
    marked = (
        eqn.replace(started=True if starts(eqn) else None)
        if eqn.primitive.communicates and starts(eqn) != bool(eqn.started)
        else eqn
        for eqn in program.equations
    )
    return program.replace(equations=tuple(marked))


def _overlapped(program: Program, buffers: Buffers, starts: Callable[[Equation], bool]) -> tuple[Program, Buffers]:
    bodies = dict(buffers.bodies)

    def body_of(body: Program) -> Program:
        made, plan = _overlapped(body, buffers.bodies[body], starts)
        bodies.update(plan.bodies)
        bodies[made] = plan
        return made

    marked = _marked(program, starts)
    equations = [eqn.with_bodies(body_of) if eqn.communicates else eqn for eqn in marked.equations]
    made, plan = marked.replace(equations=tuple(equations)), replace(buffers, bodies=bodies)
    if any(eqn.started for eqn in equations):
        use = MemoryUse(made, plan)
        made = made.replace(equations=tuple(_Scheduler().of(_moved_up(equations, use))))
    return made, plan


class _Unit:
    """Equations that run together: one, or the collectives of one call that is started."""

    def __init__(self, equations: Sequence[Equation], use: MemoryUse):
        self.equations = equations
        self.outputs = _made(equations)
        self.inputs = {a for eqn in equations for a in eqn.inputs if type(a) is Var} - self.outputs
        self.memory = use.of(self.inputs)
        self.written = set[int]().union(*map(use.written, equations))
        self.starts = equations[0].started
        self.communicates = any(eqn.communicates for eqn in equations)
        self.reports = any(eqn.reports for eqn in equations)
        self.nbytes = sum(v.type.nbytes for v in (*self.inputs, *self.outputs))


def _moved_up(equations: Sequence[Equation], use: MemoryUse) -> list[_Unit]:
    """Return units, with the starts where their operands are ready. Results of collectives are ready where these stood.

    A collective that reads a result of the one before it is started with that one.
    """
    groups: list[list[Equation]] = []
    for eqn in equations:
        if groups and eqn.started and joins(groups[-1], eqn) and not _made(groups[-1]).isdisjoint(eqn.inputs):
            groups[-1].append(eqn)
        else:
            groups.append([eqn])
    units = [_Unit(group, use) for group in groups]
    maker = {v: i for i, unit in enumerate(units) for v in unit.outputs}
    behind: list[list[_Unit]] = [[] for _ in range(len(units) + 1)]
    """By place, the units that stand there. Place n is behind the first n units as they were."""
    last = 0  # the place of the last unit that communicates
    for i, unit in enumerate(units):
        place = i + 1
        if unit.starts:
            place = max([last, *(maker[v] + 1 for v in unit.inputs if v in maker)])
        if unit.communicates:
            last = place
        behind[place].append(unit)
    return [unit for some in behind for unit in some]


class _Scheduler:
    """The order of units while it is made: those that run, and those that are deferred because calls are in flight."""

    def __init__(self) -> None:
        self.done: list[_Unit] = []
        self.deferred: list[_Unit] = []
        self.flying: list[_Unit] = []
        self._note_changes()

    def of(self, units: Sequence[_Unit]) -> list[Equation]:
        """Return the equations in their order."""
        for unit in units:
            if not unit.communicates:
                self.run_or_defer(unit)
                continue
            self.run_needed(unit)
            self.done.append(unit)
            if unit.starts:
                self.flying.append(unit)
                while len(self.flying) > 1 and sum(u.nbytes for u in self.flying) > MOST_IN_FLIGHT:
                    self.end_calls(self.flying[1:])
            else:
                self.end_calls([])  # it runs when all calls in flight have ended
            self._note_changes()
        while self.flying:
            self.end_calls(self.flying[1:])
        return [eqn for unit in self.done for eqn in unit.equations]

    def run_or_defer(self, unit: _Unit) -> None:
        """Run a unit, or defer it if it waits for deferred ones, or for the end of a call in flight."""
        if unit.inputs & self._made or unit.written & self._read or (unit.reports and self._reports):
            self.deferred.append(unit)
            self._made |= unit.outputs
            self._read |= unit.memory
            self._reports |= unit.reports
        else:
            self.done.append(unit)

    def run_needed(self, unit: _Unit) -> None:
        """Run the deferred units that must come before one that communicates. Calls whose results they read end."""
        inputs, written, reports = {*unit.inputs}, set[int](), unit.reports
        needed: set[_Unit] = set()
        for u in reversed(self.deferred):
            if inputs & u.outputs or written & u.memory or (reports and u.reports):
                needed.add(u)
                inputs |= u.inputs
                written |= u.written
                reports = reports or u.reports
        self.done += [u for u in self.deferred if u in needed]
        self.deferred = [u for u in self.deferred if u not in needed]
        self.flying = [u for u in self.flying if not (inputs & u.outputs or written & u.memory)]

    def end_calls(self, flying: list[_Unit]) -> None:
        """Leave these calls in flight, and run the deferred units that wait for no other one."""
        self.flying, deferred, self.deferred = flying, self.deferred, []
        self._note_changes()
        for unit in deferred:
            self.run_or_defer(unit)

    def _note_changes(self) -> None:
        """Note anew what calls in flight and deferred units make and read."""
        pending = [*self.flying, *self.deferred]
        self._made = {v for u in pending for v in u.outputs}
        self._read = {m for u in pending for m in u.memory}
        self._reports = any(u.reports for u in self.deferred)
