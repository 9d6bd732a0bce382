"""Forward derivatives of control flow: its programs also carry tangents along."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

from ...core.interpreter import bind
from ...core.ir import Equation, Program
from ...primitives.control_flow import cond_p, scan_p, while_p
from ...tracing.closed_programs import closed, with_same_operands
from ...tracing.trace import stage
from .backward import zeros
from .forward import RULES, push_forward

__all__: list[str] = []


def _with_tangents(program: Program, flags: Sequence[bool], wanted: Sequence[bool]) -> tuple[Program, list[Any], list[bool]]:
    """Return a program from inputs, and tangents of those in `flags`, to outputs and their tangents.

    The program returns the tangents that are `wanted`, as zeros if need be, and all others that exist. This function also
    returns what it captures, and which outputs have tangents.
    """
    gives: list[bool] = []

    def forward(*values: Any) -> list[Any]:
        given = iter(values[len(program.inputs) :])
        tangents = [next(given) if f else None for f in flags]
        outs, found = push_forward(program, (), values[: len(program.inputs)], tangents)
        gives[:] = [t is not None or w for t, w in zip(found, wanted, strict=True)]
        filled = [zeros(a.type) if t is None else t for a, t in zip(program.outputs, found, strict=True)]
        return [*outs, *compress(filled, gives)]

    types = [v.type for v in program.inputs]
    return *stage(forward, [*types, *compress(types, flags)], label=program.label), gives


def _until_settled(body: Program, flags: list[bool], carry: slice) -> tuple[Program, list[Any], list[bool]]:
    """Return the body of a loop with tangents. `flags` grow by the carries to which an iteration gives a tangent."""
    count = carry.stop - carry.start
    rest = [False] * (len(body.outputs) - count)
    while True:
        staged, captured, gives = _with_tangents(body, flags, [*flags[carry], *rest])
        if gives[:count] == flags[carry]:
            return staged, captured, gives
        flags[carry] = gives[:count]


def _of_carry(tangents: Sequence[Any], flags: Sequence[bool], body: Program, carry: slice) -> list[Any]:
    """Return the tangents of a carry that enters, zeros if there are none."""
    triples = zip(tangents[carry], body.inputs[carry], flags[carry], strict=True)
    return [zeros(v.type) if t is None else t for t, v, f in triples if f]


def _regrouped(program: Program, groups: Sequence[int], flags: Sequence[bool], outputs: int, gives: Sequence[bool]) -> Program:
    """Return the program with the tangents of each group of inputs right after it, and those of carries after the carries."""
    count = len(flags)
    inputs, tangents = program.inputs[:count], iter(program.inputs[count:])
    paired = [(v, next(tangents) if f else None) for v, f in zip(inputs, flags, strict=True)]
    ordered, start = [], 0
    for stop in groups:
        ordered += [v for v, _ in paired[start:stop]] + [t for _, t in paired[start:stop] if t is not None]
        start = stop
    total = len(gives)
    pushed = sum(gives[:outputs])
    outs = program.outputs
    order = (*outs[:outputs], *outs[total : total + pushed], *outs[outputs:total], *outs[total + pushed :])
    return program.replace(inputs=tuple(ordered), outputs=order)


def _push_scan(eqn: Equation, values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    body, consts, carry = (eqn.params[k] for k in ("body", "consts", "carry"))
    first, flags = consts + carry, [t is not None for t in tangents]
    staged, captured, gives = _until_settled(body, flags, slice(consts, first))
    program, kept = closed(_regrouped(staged, (consts, first, len(flags)), flags, carry, gives), captured)
    operands = [
        *values[:consts],
        *(t for t in tangents[:consts] if t is not None),
        *values[consts:first],
        *_of_carry(tangents, flags, body, slice(consts, first)),
        *values[first:],
        *(t for t in tangents[first:] if t is not None),
    ]
    pushed = sum(flags[consts:first])
    outs = bind(
        scan_p,
        *kept,
        *operands,
        body=program,
        consts=len(kept) + consts + sum(flags[:consts]),
        carry=carry + pushed,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    stacked = len(body.outputs) - carry
    results = [*outs[:carry], *outs[carry + pushed : carry + pushed + stacked]]
    found = iter([*outs[carry : carry + pushed], *outs[carry + pushed + stacked :]])
    return results, [next(found) if g else None for g in gives]


def _push_while(eqn: Equation, values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    test, body, test_consts, body_consts = (eqn.params[k] for k in ("test", "body", "test_consts", "body_consts"))
    first = test_consts + body_consts
    mine = list(tangents[test_consts:])
    flags, carry = [t is not None for t in mine], slice(body_consts, len(body.inputs))
    staged, captured, gives = _until_settled(body, flags, carry)
    program, kept = closed(_regrouped(staged, (body_consts, len(flags)), flags, len(body.outputs), gives), captured)
    pushed = program.inputs[len(program.inputs) - sum(flags[carry]) :]
    condition = test.replace(inputs=(*test.inputs, *pushed))
    outs = bind(
        while_p,
        *values[:test_consts],
        *kept,
        *values[test_consts:first],
        *(t for t in mine[:body_consts] if t is not None),
        *values[first:],
        *_of_carry(mine, flags, body, carry),
        test=condition,
        body=program,
        test_consts=test_consts,
        body_consts=len(kept) + body_consts + sum(flags[:body_consts]),
    )
    found = iter(outs[len(body.outputs) :])
    return outs[: len(body.outputs)], [next(found) if g else None for g in gives]


def _push_cond(eqn: Equation, values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    branches, flags = eqn.params["branches"], [t is not None for t in tangents[1:]]
    gives = [False] * len(eqn.outputs)
    while True:  # each branch returns the tangents that any branch has
        made = [_with_tangents(branch, flags, gives) for branch in branches]
        every = [any(each) for each in zip(*(found for _, _, found in made), strict=True)]
        if every == gives:
            break
        gives = every
    programs, consts = with_same_operands([(program, captured) for program, captured, _ in made])
    given = [t for t in tangents[1:] if t is not None]
    outs = bind(cond_p, values[0], *consts, *values[1:], *given, branches=tuple(programs))
    found = iter(outs[len(eqn.outputs) :])
    return outs[: len(eqn.outputs)], [next(found) if g else None for g in gives]


RULES.update({scan_p: _push_scan, while_p: _push_while, cond_p: _push_cond})
