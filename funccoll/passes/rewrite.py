"""What every pass needs: substituting atoms, and counting uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..ir import Atom, Equation, Program, Var

__all__ = ["definitions", "substitute", "use_counts"]


def substitute(eqn: Equation, env: Mapping[Var, Atom]) -> Equation:
    """The equation with its inputs replaced through `env`."""
    if not any(a in env for a in eqn.inputs if type(a) is Var):
        return eqn
    return eqn.replace(inputs=tuple(resolve(a, env) for a in eqn.inputs))


def resolve(atom: Atom, env: Mapping[Var, Atom]) -> Atom:
    """What an atom stands for after a rewrite."""
    return env.get(atom, atom) if type(atom) is Var else atom


def use_counts(program: Program) -> Counter[Var]:
    """How often each variable is read; being an output of the program counts."""
    uses: Counter[Var] = Counter(a for e in program.equations for a in e.inputs if type(a) is Var)
    uses.update(a for a in program.outputs if type(a) is Var)
    return uses


def definitions(program: Program) -> dict[Var, tuple[Equation, int]]:
    """Variable -> the equation that defines it, and which of its outputs it is."""
    return {v: (e, i) for e in program.equations for i, v in enumerate(e.outputs)}
