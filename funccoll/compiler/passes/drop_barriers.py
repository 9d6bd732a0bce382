"""Removal of optimization barriers: they kept repeated computation in place, and the order of execution is settled now."""

from __future__ import annotations

from ...core.ir import Atom, Equation, Program, Var
from ...primitives.higher_order import optimization_barrier_p
from .rewrite import resolve, substitute

__all__ = ["drop_barriers"]


def drop_barriers(program: Program) -> Program:
    """Replace the results of each barrier by its operands."""
    env: dict[Var, Atom] = {}
    kept: list[Equation] = []
    for eqn in program.equations:
        eqn = substitute(eqn, env)
        if eqn.primitive is optimization_barrier_p:
            env.update(zip(eqn.outputs, eqn.inputs, strict=False))
        else:
            kept.append(eqn)
    if not env:
        return program
    return program.replace(equations=tuple(kept), outputs=tuple(resolve(a, env) for a in program.outputs))
