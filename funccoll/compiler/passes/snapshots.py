"""Snapshots: reports read copies of the values that they show. The copies are made next to the values.

A value's last use decides which memory is written again. That decides how results lie in memory, and the bits of sums depend on
it. With a copy, a report is not a later use. So the rest of the program runs as it does without reports.
"""

from __future__ import annotations

from ...core.ir import Equation, Program, Var
from ...primitives.debugging import snapshot_p

__all__ = ["snapshots"]


def snapshots(program: Program) -> Program:
    """Add a copy of each value that a report shows, right after the equation that makes it."""
    shown = [a for e in program.equations if e.primitive.kind == "debug" for a in e.inputs if isinstance(a, Var)]
    if not shown:
        return program
    copies = {v: Var(v.type) for v in shown}
    sources = {a: e.source for e in reversed(program.equations) if e.primitive.kind == "debug" for a in e.inputs}

    def copied(values: tuple[Var, ...]) -> list[Equation]:
        return [Equation(snapshot_p, (v,), (copies[v],), {}, sources[v]) for v in values if v in copies]

    equations = [*copied(program.inputs)]
    constants = {v for v, _ in program.constants}
    for eqn in program.equations:
        if eqn.primitive.kind == "debug":
            read = (a if a in constants else copies[a] if isinstance(a, Var) else a for a in eqn.inputs)
            eqn = eqn.replace(inputs=tuple(read))
        equations += [eqn, *copied(eqn.outputs)]
    return program.replace(equations=tuple(equations))
