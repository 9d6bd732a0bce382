"""Common subexpressions: equal operations on equal operands are computed once, collectives included."""

from __future__ import annotations

from ...core.ir import Atom, Equation, Literal, Program, Var
from ...primitives.control_flow import scan_p
from .rewrite import resolve, substitute

__all__ = ["common_subexpressions"]


def _key(eqn: Equation) -> tuple:
    operands = tuple((a.value.dtype, a.value.tobytes()) if isinstance(a, Literal) else a for a in eqn.inputs)
    return eqn.primitive, operands, tuple(sorted(eqn.params.items()))


def common_subexpressions(program: Program) -> Program:
    """Replace the outputs of repeated equations by those of the first one, and stack nothing twice in a scan."""
    seen: dict[tuple, tuple[Var, ...]] = {}
    env: dict[Var, Atom] = {}
    kept: list[Equation] = []
    for eqn in program.equations:
        eqn = substitute(eqn, env)
        if not eqn.has_effects:
            first = seen.setdefault(_key(eqn), eqn.outputs)
            if first is not eqn.outputs:
                env.update(zip(eqn.outputs, first, strict=True))
                continue
        kept.append(_stack_once(eqn, env) if eqn.primitive is scan_p else eqn)
    return program.replace(equations=tuple(kept), outputs=tuple(resolve(a, env) for a in program.outputs))


def _stack_once(eqn: Equation, env: dict[Var, Atom]) -> Equation:
    """Return the scan without results that repeat another one; `env` then maps them to that one.

    A gradient needs what its function returns: its residuals are often among the results.
    """
    body, carry = eqn.params["body"], eqn.params["carry"]
    first: dict[Atom, Var] = {}
    for var, atom in zip(eqn.outputs[carry:], body.outputs[carry:], strict=True):
        if type(atom) is Var and first.setdefault(atom, var) is not var:
            env[var] = first[atom]
    keep = [v not in env for v in eqn.outputs]
    if all(keep):
        return eqn
    body = body.replace(outputs=tuple(a for a, k in zip(body.outputs, keep, strict=True) if k))
    outputs = tuple(v for v, k in zip(eqn.outputs, keep, strict=True) if k)
    return eqn.replace(outputs=outputs, params={**eqn.params, "body": body})
