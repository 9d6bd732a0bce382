"""Programs on values that vary over more axes than their inputs: programs of control flow inside are traced again.

The residuals of a branch are such values if devices choose different branches: they vary as the choice does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.interpreter import bind, current_interpreter, evaluate
from ...core.ir import Equation, Program
from ...core.types import ArrayType
from ...ops.registry import as_traceable
from ...primitives.control_flow import cond_p, scan_p, while_p
from ...primitives.varying import pvary, pvary_p
from ...tracing.trace import stage, value_type
from .backward import pvary_to

__all__ = ["run_varying"]


def run_varying(program: Program, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Return the outputs of a program; constants and arguments may vary over more axes than its variables."""
    interpreter = current_interpreter()

    def apply(eqn: Equation, values: list[Any]) -> Any:
        if eqn.primitive is pvary_p:
            missing = [a for a in eqn.axes() if a not in value_type(values[0]).varying]
            return pvary(values[0], missing) if missing else values[0]
        if eqn.primitive in _RULES and any(value_type(x).varying - a.type.varying for x, a in zip(values, eqn.inputs)):
            return _RULES[eqn.primitive](list(map(as_traceable, values)), **eqn.params)
        return interpreter.bind(eqn.primitive, values, eqn.params)

    return evaluate(program, constants, args, apply)[0]


def _staged(program: Program, types: Sequence[ArrayType], wanted: Sequence[ArrayType] = ()) -> tuple[Program, list[ArrayType]]:
    """Return the program on inputs of these types, and its outputs' types. The first outputs are pvary'd to those `wanted`."""
    found: list[ArrayType] = []

    def flat(*xs: Any) -> list[Any]:
        outs = [as_traceable(y) for y in run_varying(program, (), xs)]
        for k, t in enumerate(wanted):
            outs[k] = pvary_to(outs[k], t)
        found[:] = map(value_type, outs)
        return outs

    staged, _ = stage(flat, types, label=program.label)  # it has no constants, and captures nothing
    return staged, found


def _wide(values: Sequence[Any], types: Sequence[ArrayType]) -> list[Any]:
    return [pvary_to(x, t) for x, t in zip(values, types, strict=True)]


def _scan(values: Sequence[Any], *, body: Program, consts: int, carry: int, **params: Any) -> list[Any]:
    first, types = consts + carry, list(map(value_type, values))
    types[first:] = [ArrayType(t.shape[1:], t.dtype, t.varying) for t in types[first:]]
    while True:
        staged, found = _staged(body, types, types[consts:first])
        if found[:carry] == types[consts:first]:
            break
        types[consts:first] = found[:carry]
    operands = [*values[:consts], *_wide(values[consts:first], types[consts:first]), *values[first:]]
    return bind(scan_p, *operands, body=staged, consts=consts, carry=carry, **params)


def _while(values: Sequence[Any], *, test: Program, body: Program, test_consts: int, body_consts: int) -> list[Any]:
    first, types = test_consts + body_consts, list(map(value_type, values))
    while True:
        condition, (decision,) = _staged(test, [*types[:test_consts], *types[first:]])
        types[first:] = [t.vary(t.varying | decision.varying) for t in types[first:]]
        step, found = _staged(body, types[test_consts:], types[first:])
        if found == types[first:]:
            break
        types[first:] = found
    operands = [*values[:first], *_wide(values[first:], types[first:])]
    return bind(while_p, *operands, test=condition, body=step, test_consts=test_consts, body_consts=body_consts)


def _cond(values: Sequence[Any], *, branches: tuple[Program, ...]) -> list[Any]:
    index, *types = map(value_type, values)
    each = [found for _, found in (_staged(branch, types) for branch in branches)]
    wanted = [outs[0].vary(index.varying.union(*(t.varying for t in outs))) for outs in zip(*each, strict=True)]
    return bind(cond_p, *values, branches=tuple(_staged(branch, types, wanted)[0] for branch in branches))


_RULES = {scan_p: _scan, while_p: _while, cond_p: _cond}
