"""Closed programs, for control flow: values that a traced function captures become its first operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.interpreter import bind
from ..core.ir import Atom, Equation, Literal, Program, Var
from ..errors import at_source
from ..primitives.varying import pvary_p
from .trace import value_type

__all__ = ["closed", "with_same_operands"]


def closed(program: Program, captured: Sequence[Any], hoist: bool = True) -> tuple[Program, list[Any]]:
    """Return the program with what it captures as its first inputs, and their values.

    With `hoist`, values that depend only on these are computed before the loop. A pvary of them always is: its gradient is then
    summed over devices once, and not in every iteration.
    """
    known: dict[Atom, Any] = {var: value for (var, _), value in zip(program.constants, captured, strict=True)}
    kept: list[Equation] = []
    for eqn in program.equations:
        plain = eqn.primitive is pvary_p or (hoist and eqn.primitive.kind == "compute")
        if plain and all(type(a) is Literal or a in known for a in eqn.inputs):
            with at_source(eqn.source):
                values = [a.value if isinstance(a, Literal) else known[a] for a in eqn.inputs]
                outs = bind(eqn.primitive, *values, **eqn.params)
            known.update(zip(eqn.outputs, outs if eqn.primitive.multiple else [outs], strict=True))
        else:
            kept.append(eqn)
    used = {a for eqn in kept for a in eqn.inputs} | set(program.outputs)
    consts = [var for var in known if var in used]
    made = program.replace(constants=(), inputs=(*consts, *program.inputs), equations=tuple(kept))
    return made, [known[var] for var in consts]


def with_same_operands(programs: Sequence[tuple[Program, Sequence[Any]]]) -> tuple[list[Program], list[Any]]:
    """Return branches that all take, as first operands, what any of them captures.

    Branches are given as programs and captured values.
    """
    made = [closed(program, captured, hoist=False) for program, captured in programs]
    everything = [x for _, consts in made for x in consts]
    branches = []
    for k, (program, consts) in enumerate(made):
        before = sum(len(other) for _, other in made[:k])
        first = [Var(value_type(x)) for x in everything]
        first[before : before + len(consts)] = program.inputs[: len(consts)]
        branches.append(program.replace(inputs=(*first, *program.inputs[len(consts) :])))
    return branches, everything
