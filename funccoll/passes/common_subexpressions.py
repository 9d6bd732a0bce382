"""Common subexpressions: equal operations on equal operands are computed once, collectives included."""

from __future__ import annotations

from ..ir import Atom, Equation, Literal, Program, Var
from .rewrite import resolve, substitute

__all__ = ["common_subexpressions"]


def _key(eqn: Equation) -> tuple:
    operands = tuple((a.value.dtype, a.value.tobytes()) if isinstance(a, Literal) else a for a in eqn.inputs)
    return eqn.primitive, operands, tuple(sorted(eqn.params.items()))


def common_subexpressions(program: Program) -> Program:
    """Replace the outputs of repeated equations by those of the first one."""
    seen: dict[tuple, tuple[Var, ...]] = {}
    env: dict[Var, Atom] = {}
    kept: list[Equation] = []
    for eqn in program.equations:
        eqn = substitute(eqn, env)
        if eqn.primitive.kind != "effect":
            first = seen.setdefault(_key(eqn), eqn.outputs)
            if first is not eqn.outputs:
                env.update(zip(eqn.outputs, first, strict=True))
                continue
        kept.append(eqn)
    return program.replace(equations=tuple(kept), outputs=tuple(resolve(a, env) for a in program.outputs))
