"""Steps of optimizers as equations.

A step is one equation in the user's program, for all parameters of a dtype. So programs are short, and types and layouts follow
the parameters. What runs are the equations of its rule, which fuse with each other and with what comes before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.ir import Atom, Equation, Literal, Program, Var
from ..core.types import ArrayType
from ..errors import at_source
from ..primitives.elementwise import convert_p
from ..primitives.optimizers import RULES, optimizer_step_p, step_of_leaf, wide_dtype
from ..tracing.trace import stage
from .passes.inline import with_arguments
from .passes.rewrite import resolve, substitute

__all__ = ["expand_steps"]


def expand_steps(program: Program) -> Program:
    """Replace the steps of optimizers by the equations of their rules, leaf by leaf."""
    if not any(eqn.primitive is optimizer_step_p for eqn in program.equations):
        return program
    env: dict[Var, Atom] = {}
    out: list[Equation] = []
    for eqn in program.equations:
        eqn = substitute(eqn, env)
        if eqn.primitive is optimizer_step_p:
            equations, results = _expanded(eqn, program.axis_sizes)
            out += equations
            env.update(zip(eqn.outputs, results, strict=True))
        else:
            out.append(eqn)
    return program.replace(equations=tuple(out), outputs=tuple(resolve(a, env) for a in program.outputs))


def _expanded(eqn: Equation, axis_sizes: Mapping[str, int]) -> tuple[list[Equation], list[Atom]]:
    """Return the equations of a step, and what they have in the place of its results."""
    leaves = eqn.params["leaves"]
    stop = (2 + RULES[eqn.params["rule"]].moments) * leaves
    wide = wide_dtype(eqn.inputs[0].type.dtype)
    equations: list[Equation] = []
    scalars: list[Var | np.ndarray] = []
    for a in eqn.inputs[stop:]:
        if isinstance(a, Literal):
            scalars.append(a.value.astype(wide))
        elif a.type.dtype == wide:
            scalars.append(a)
        else:
            converted = Var(ArrayType((), wide, a.type.varying))
            scalars.append(converted)
            equations.append(Equation(convert_p, (a,), (converted,), {"dtype": wide}, eqn.source))
    given = [s for s in scalars if isinstance(s, Var)]
    rules: dict[tuple[ArrayType, ...], Program] = {}
    made: list[Sequence[Atom]] = []
    for i in range(leaves):
        arrays = eqn.inputs[i:stop:leaves]
        types = tuple(a.type for a in arrays)
        if types not in rules:
            rules[types] = _traced(eqn, types, scalars, axis_sizes)
        body = with_arguments(rules[types], (*arrays, *given))
        equations += body.equations
        made.append(body.outputs)
    return equations, [atom for column in zip(*made, strict=True) for atom in column]


def _traced(
    eqn: Equation, types: Sequence[ArrayType], scalars: Sequence[Var | np.ndarray], axis_sizes: Mapping[str, int]
) -> Program:
    """Return a rule as a program of one leaf's arrays, and of the scalars that are not constants."""

    def step(*operands: Any) -> list[Any]:
        rest = iter(operands[len(types) :])
        given = [next(rest) if isinstance(s, Var) else s for s in scalars]
        return step_of_leaf(eqn.params["rule"], eqn.params["decay"], operands[: len(types)], given)

    with at_source(eqn.source):
        operands = [*types, *(s.type for s in scalars if isinstance(s, Var))]
        program, _ = stage(step, operands, axis_sizes=axis_sizes, label=eqn.params["rule"])
    return program
