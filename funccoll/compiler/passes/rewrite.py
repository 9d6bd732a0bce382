"""Helpers of passes: substitution of atoms, definitions and uses of variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from ...core.ir import Atom, Equation, Program, Var

__all__ = ["at_all_depths", "definitions", "resolve", "substitute", "use_counts"]


def at_all_depths(rewrite: Callable[[Program], Program]) -> Callable[[Program], Program]:
    """Return the rewrite of a program and of the programs that its control flow runs, the outer one first."""

    def everywhere(program: Program) -> Program:
        program = rewrite(program)
        if not any(eqn.primitive.kind == "control" for eqn in program.equations):
            return program
        return program.replace(equations=tuple(eqn.with_bodies(everywhere) for eqn in program.equations))

    return everywhere


def substitute(eqn: Equation, env: Mapping[Var, Atom]) -> Equation:
    """Return the equation with its inputs replaced through `env`."""
    if not any(a in env for a in eqn.inputs if type(a) is Var):
        return eqn
    return eqn.replace(inputs=tuple(resolve(a, env) for a in eqn.inputs))


def resolve(atom: Atom, env: Mapping[Var, Atom]) -> Atom:
    """Return the atom that replaces this one in `env`, or this one."""
    return env.get(atom, atom) if type(atom) is Var else atom


def use_counts(program: Program) -> Counter[Var]:
    """Count how often each variable is read; an output of the program counts as a read."""
    uses: Counter[Var] = Counter(a for e in program.equations for a in e.inputs if type(a) is Var)
    uses.update(a for a in program.outputs if type(a) is Var)
    return uses


def definitions(program: Program) -> dict[Var, tuple[Equation, int]]:
    """Variable -> the equation that defines it, and its position among the outputs."""
    return {v: (e, i) for e in program.equations for i, v in enumerate(e.outputs)}
