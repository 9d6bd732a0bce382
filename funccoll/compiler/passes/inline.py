"""Inlining: the functions of higher primitives replace them. Only plain equations are left."""

from __future__ import annotations

from ...collectives.arg_reduce import winner_p
from ...core.ir import Atom, Equation, Program, Var
from ...primitives.elementwise import stop_gradient_p
from ...primitives.higher_order import checkpoint_name_p, checkpoint_p, custom_vjp_p, grad_hook_p
from ...primitives.varying import pvary_p
from .rewrite import resolve, substitute

__all__ = ["inline", "with_arguments"]


def inline(program: Program) -> Program:
    """Replace higher primitives by plain equations.

    custom_vjp and checkpoint become their functions, and grad_hook one pvary for each operand. stop_gradient, checkpoint_name
    and winner become their first operand.
    """
    env: dict[Var, Atom] = {}
    out: list[Equation] = []
    extra: list = []
    for eqn in program.equations:
        eqn = substitute(eqn, env)
        if eqn.primitive in (stop_gradient_p, checkpoint_name_p, winner_p):
            env[eqn.outputs[0]] = eqn.inputs[0]
        elif eqn.primitive is grad_hook_p:
            axes = tuple(a for a in program.axis_sizes if a in eqn.params["axes"])
            for atom, var in zip(eqn.inputs, eqn.outputs, strict=True):
                out.append(Equation(pvary_p, (atom,), (var,), {"axes": axes}, eqn.source))
        elif eqn.primitive in (custom_vjp_p, checkpoint_p):
            body = inline(with_arguments(eqn.params["program"], eqn.inputs))
            extra.extend(body.constants)
            out.extend(body.equations)
            env.update(zip(eqn.outputs, body.outputs, strict=True))
        else:
            out.append(eqn)
    outputs = tuple(resolve(a, env) for a in program.outputs)
    return program.replace(equations=tuple(out), outputs=outputs, constants=(*program.constants, *extra))


def with_arguments(program: Program, arguments: tuple[Atom, ...]) -> Program:
    """Return the body with `arguments` for its inputs, and with new variables: it may be inlined more than once."""
    env: dict[Var, Atom] = dict(zip(program.inputs, arguments, strict=True))
    equations = []
    for eqn in program.equations:
        eqn = substitute(eqn, env)
        outputs = tuple(Var(v.type) for v in eqn.outputs)
        env.update(zip(eqn.outputs, outputs, strict=True))
        equations.append(eqn.replace(outputs=outputs))
    outputs = tuple(resolve(a, env) for a in program.outputs)
    return program.replace(inputs=(), equations=tuple(equations), outputs=outputs)
