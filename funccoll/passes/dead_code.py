"""Dead code: equations, operands of collectives and constants that no output needs."""

from __future__ import annotations

from ..ir import Equation, Program, Var
from ..primitives.higher import optimization_barrier_p

__all__ = ["dead_code"]


def dead_code(program: Program) -> Program:
    """Remove everything that neither an output nor an effect needs."""
    live: set[Var] = {a for a in program.outputs if type(a) is Var}
    kept: list[Equation] = []
    for eqn in reversed(program.equations):
        wanted = [v in live for v in eqn.outputs]
        if eqn.primitive.kind != "effect" and not any(wanted):
            continue
        if not all(wanted) and (eqn.primitive.kind == "collective" or eqn.primitive is optimization_barrier_p):
            operands = zip(eqn.inputs, wanted, strict=False)  # one for each output; a barrier's tokens stand behind them
            eqn = eqn.replace(
                inputs=(*(a for a, w in operands if w), *eqn.inputs[len(wanted) :]),
                outputs=tuple(v for v, w in zip(eqn.outputs, wanted, strict=True) if w),
            )
        live.update(a for a in eqn.inputs if type(a) is Var)
        kept.append(eqn)
    constants = tuple((v, value) for v, value in program.constants if v in live)
    return program.replace(equations=tuple(reversed(kept)), constants=constants)
