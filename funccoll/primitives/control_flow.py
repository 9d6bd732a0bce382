"""Primitives that run programs: scan, while_loop, cond.

Their programs have no captured constants. The values that a body captures are its first operands. Types are exact: a carry
has one type, `varying` included, at the beginning and the end of an iteration. `transforms/control.py` finds it by tracing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import evaluate
from ..core.ir import Primitive, Program
from ..core.types import ArrayType
from ..errors import DTypeError, ShapeError, VaryingError

__all__ = ["cond_p", "require_same_decision", "scan_p", "while_p"]


def require_same_decision(programs: Sequence[Program], varying: frozenset[str], what: str) -> None:
    """Raise VaryingError for a collective over an axis along which devices may differ in whether they run it."""
    for program in programs:
        for eqn in program.collectives():
            axes = [a for a in eqn.axes() if a in varying]
            if axes:
                raise VaryingError(
                    f"{eqn.primitive.name} over axis {axes[0]!r} inside a {what} varies over it: some devices would take "
                    f"part and others not, and wait for ever. Make it equal on all of them, for example with "
                    f'fc.all_reduce(x, {axes[0]!r}, op="max").',
                    eqn.source,
                )


def _check_operands(name: str, types: Sequence[ArrayType], program: Program) -> None:
    wanted = [v.type for v in program.inputs]
    for number, (found, type) in enumerate(zip(types, wanted, strict=True)):
        if found != type and not (found.shape == () and found == type.vary(())):  # a literal fits any varying
            raise ShapeError(f"{name}: operand {number} has type {found}, its body takes {type}.")


# ---------------------------------------------------------------- scan


def _infer_scan(*xs: ArrayType, body: Program, consts: int, carry: int, length: int, reverse: bool) -> list[ArrayType]:
    first = consts + carry
    for x in xs[first:]:
        if x.shape[:1] != (length,):
            raise ShapeError(f"scan of length {length} over an array of type {x}.")
    elements = [ArrayType(x.shape[1:], x.dtype, x.varying) for x in xs[first:]]
    _check_operands("scan", [*xs[:first], *elements], body)
    outs = [a.type for a in body.outputs]
    for v, out in zip(body.inputs[consts:first], outs, strict=False):
        if v.type != out and not (out.shape == () and out == v.type.vary(())):
            raise DTypeError(f"scan: a carry enters its body as {v.type} and leaves it as {out}.")
    carries = [v.type for v in body.inputs[consts:first]]
    return [*carries, *(ArrayType((length, *t.shape), t.dtype, t.varying) for t in outs[carry:])]


def _scan(*xs: Any, body: Program, consts: int, carry: int, length: int, reverse: bool) -> list[Any]:
    fixed, state, rows = list(xs[:consts]), list(xs[consts : consts + carry]), xs[consts + carry :]
    stacked = [np.empty((length, *a.type.shape), a.type.dtype) for a in body.outputs[carry:]]
    for i in reversed(range(length)) if reverse else range(length):
        outs, _ = evaluate(body, (), [*fixed, *state, *(x[i] for x in rows)])
        state = outs[:carry]
        for y, out in zip(stacked, outs[carry:], strict=True):
            y[i] = out
    return [*(state if length else map(np.array, state)), *stacked]


scan_p = Primitive("scan", _infer_scan, _scan, multiple=True, kind="control")
"""Operands: the captures of the body, the carry, the arrays scanned over their first dimension. Source: JAX's scan."""


# ---------------------------------------------------------------- while


def _infer_while(*xs: ArrayType, test: Program, body: Program, test_consts: int, body_consts: int) -> list[ArrayType]:
    carry = xs[test_consts + body_consts :]
    _check_operands("while_loop's condition", [*xs[:test_consts], *carry], test)
    _check_operands("while_loop", [*xs[test_consts : test_consts + body_consts], *carry], body)
    varying = test.outputs[0].type.varying
    require_same_decision([test, body], varying, "while_loop whose condition")
    types = [v.type for v in body.inputs[body_consts:]]
    for type, out in zip(types, [a.type for a in body.outputs], strict=True):
        if type != out and not (out.shape == () and out == type.vary(())):
            raise DTypeError(f"while_loop: a carry enters its body as {type} and leaves it as {out}.")
        if varying - type.varying:
            raise VaryingError(f"while_loop: a carry of type {type} does not vary over {sorted(varying)}; its condition does.")
    return types


def _while(*xs: Any, test: Program, body: Program, test_consts: int, body_consts: int) -> list[Any]:
    for_test, for_body = list(xs[:test_consts]), list(xs[test_consts : test_consts + body_consts])
    state = list(map(np.array, xs[test_consts + body_consts :]))
    while evaluate(test, (), [*for_test, *state])[0][0]:
        state, _ = evaluate(body, (), [*for_body, *state])
    return state


while_p = Primitive("while", _infer_while, _while, multiple=True, kind="control")
"""Operands: the captures of the condition, the captures of the body, the carry. Source: JAX's while_loop."""


# ---------------------------------------------------------------- cond


def _infer_cond(index: ArrayType, *xs: ArrayType, branches: tuple[Program, ...]) -> list[ArrayType]:
    if index != ArrayType((), np.dtype(np.int32), index.varying):
        raise DTypeError(f"cond: the index of the branch has type {index}, it must be an int32 scalar.")
    require_same_decision(branches, index.varying, "cond whose predicate")
    for branch in branches:
        _check_operands("cond", xs, branch)
    types = [a.type for a in branches[0].outputs]
    for branch in branches[1:]:
        if [a.type for a in branch.outputs] != types:
            raise DTypeError(f"cond: its branches return {types} and {[a.type for a in branch.outputs]}.")
    if any(index.varying - type.varying for type in types):
        raise VaryingError(f"cond: results of types {types} do not vary over {sorted(index.varying)}, as its index does.")
    return types


def _cond(index: Any, *xs: Any, branches: tuple[Program, ...]) -> list[Any]:
    outs, _ = evaluate(branches[int(index)], (), xs)
    return list(map(np.array, outs))


cond_p = Primitive("cond", _infer_cond, _cond, multiple=True, kind="control")
"""Operands: the number of the branch, an int32 scalar within bounds, and the operands of every branch. Source: JAX's switch."""
