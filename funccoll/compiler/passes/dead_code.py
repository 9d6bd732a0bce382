"""Dead code: equations, operands of collectives and constants that no output needs."""

from __future__ import annotations

from ...core.ir import Equation, Program, Var
from ...primitives.control_flow import scan_p
from ...primitives.higher_order import optimization_barrier_p

__all__ = ["dead_code", "prune_scan"]


def dead_code(program: Program) -> Program:
    """Remove everything that neither an output nor an effect needs."""
    live: set[Var] = {a for a in program.outputs if type(a) is Var}
    kept: list[Equation] = []
    for eqn in reversed(program.equations):
        wanted = [v in live for v in eqn.outputs]
        if not any(wanted) and not eqn.has_effects:
            continue
        if eqn.primitive is scan_p:
            eqn = prune_scan(eqn, wanted)
        elif not all(wanted) and (eqn.primitive.kind == "collective" or eqn.primitive is optimization_barrier_p):
            operands = zip(eqn.inputs, wanted, strict=False)  # one for each output, before a barrier's tokens
            eqn = eqn.replace(
                inputs=(*(a for a, w in operands if w), *eqn.inputs[len(wanted) :]),
                outputs=tuple(v for v, w in zip(eqn.outputs, wanted, strict=True) if w),
            )
        live.update(a for a in eqn.inputs if type(a) is Var)
        kept.append(eqn)
    constants = tuple((v, value) for v, value in program.constants if v in live)
    return program.replace(equations=tuple(reversed(kept)), constants=constants)


def prune_scan(eqn: Equation, wanted: list[bool]) -> Equation:
    """Return the scan without the results that are not wanted, and without the carries and operands that only these need."""
    body: Program = eqn.params["body"]
    consts, carry = eqn.params["consts"], eqn.params["carry"]
    keep = list(wanted)
    while True:  # a carry is also needed if a kept result reads it in a later iteration
        outputs = tuple(a for a, k in zip(body.outputs, keep, strict=True) if k)
        pruned = dead_code(body.replace(outputs=outputs))
        read = {a for e in pruned.equations for a in e.inputs} | set(outputs)
        needed = [k or v in read for k, v in zip(keep, body.inputs[consts : consts + carry], strict=False)]
        if needed == keep[:carry]:
            break
        keep[:carry] = needed
    stays = [v in read for v in body.inputs]
    stays[consts : consts + carry] = keep[:carry]
    if all(stays) and all(keep):
        return eqn
    return eqn.replace(
        inputs=tuple(a for a, s in zip(eqn.inputs, stays, strict=True) if s),
        outputs=tuple(v for v, k in zip(eqn.outputs, keep, strict=True) if k),
        params={
            **eqn.params,
            "body": pruned.replace(inputs=tuple(v for v, s in zip(body.inputs, stays, strict=True) if s)),
            "consts": sum(stays[:consts]),
            "carry": sum(keep[:carry]),
        },
    )
