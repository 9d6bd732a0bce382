"""Dead code: equations, operands of collectives and constants that no output needs."""

from __future__ import annotations

from ..ir import Equation, Program, Var

__all__ = ["dead_code"]


def dead_code(program: Program) -> Program:
    """Remove everything that neither an output nor an effect needs."""
    live: set[Var] = {a for a in program.outputs if type(a) is Var}
    kept: list[Equation] = []
    for eqn in reversed(program.equations):
        wanted = [v in live for v in eqn.outputs]
        if eqn.primitive.kind != "effect" and not any(wanted):
            continue
        if eqn.primitive.kind == "collective" and not all(wanted):  # one operand for each output
            eqn = eqn.replace(
                inputs=tuple(a for a, w in zip(eqn.inputs, wanted, strict=True) if w),
                outputs=tuple(v for v, w in zip(eqn.outputs, wanted, strict=True) if w),
            )
        live.update(a for a in eqn.inputs if type(a) is Var)
        kept.append(eqn)
    constants = tuple((v, value) for v, value in program.constants if v in live)
    return program.replace(equations=tuple(reversed(kept)), constants=constants)
