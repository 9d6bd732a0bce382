"""Batches of loops and branches: the programs of control flow become programs of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind, evaluate
from ..core.ir import Program
from ..ops.registry import as_traceable
from ..primitives.batch_rules import repeated
from ..primitives.control_flow import cond_p, scan_p, while_p
from .batched_evaluation import RULES, batched_program, evaluate_batched
from .closed_programs import closed, with_same_operands
from .trace import stage, value_type

__all__: list[str] = []


def _batch(values: Sequence[Any], batched: Sequence[bool], wanted: Sequence[bool], size: int) -> list[Any]:
    """Return the values, those that are wanted as a batch as one."""
    flags = zip(values, batched, wanted, strict=True)
    return [repeated(as_traceable(x), size) if w and not b else x for x, b, w in flags]


def _batch_scan(
    values: Sequence[Any],
    batched: Sequence[bool],
    size: int,
    *,
    body: Program,
    consts: int,
    carry: int,
    length: int,
    reverse: bool,
) -> list[Any]:
    first, flags = consts + carry, list(batched)
    stacked = [True] * (len(body.outputs) - carry)
    while True:  # a carry is also batched if an iteration makes it so
        staged, captured, found = batched_program(body, flags, size, [*flags[consts:first], *stacked])
        if found[:carry] == flags[consts:first]:
            break
        flags[consts:first] = found[:carry]
    program, kept = closed(staged, captured)
    init = _batch(values[consts:first], batched[consts:first], flags[consts:first], size)
    rows = [np.moveaxis(x, 0, 1) if b else x for x, b in zip(values[first:], batched[first:], strict=True)]
    outs = bind(
        scan_p,
        *kept,
        *values[:consts],
        *init,
        *rows,
        body=program,
        consts=len(kept) + consts,
        carry=carry,
        length=length,
        reverse=reverse,
    )
    results = _batch(outs[:carry], flags[consts:first], [True] * carry, size)
    return [*results, *(np.moveaxis(y, 1, 0) for y in outs[carry:])]


def _chosen(decision: Any, yes: Any, no: Any) -> Any:
    """Choose each element of a batch from one of two batches."""
    return np.where(np.reshape(decision, (*decision.shape, *(1,) * (yes.ndim - 1))), yes, no)


def _batch_cond(values: Sequence[Any], batched: Sequence[bool], size: int, *, branches: tuple[Program, ...]) -> list[Any]:
    index, operands, flags = values[0], values[1:], batched[1:]
    every = [True] * len(branches[0].outputs)
    if not batched[0]:
        programs, consts = with_same_operands([batched_program(branch, flags, size, every)[:2] for branch in branches])
        return bind(cond_p, index, *consts, *operands, branches=tuple(programs))
    results = [_batch(*evaluate_batched(branch, (), operands, flags, size), every, size) for branch in branches]
    chosen = results[0]
    for k, others in enumerate(results[1:], 1):
        chosen = [_chosen(index == k, other, x) for other, x in zip(others, chosen, strict=True)]
    return chosen


def _batch_while(
    values: Sequence[Any],
    batched: Sequence[bool],
    size: int,
    *,
    test: Program,
    body: Program,
    test_consts: int,
    body_consts: int,
) -> list[Any]:
    first = test_consts + body_consts
    flags = list(batched[first:])
    while True:
        condition, for_condition, (decides,) = batched_program(test, [*batched[:test_consts], *flags], size)
        wanted = [True] * len(flags) if decides else flags
        step, for_step, found = batched_program(body, [*batched[test_consts:first], *wanted], size, wanted)
        if found == flags:  # the condition takes what the body returns
            break
        flags = found
    for_test, for_body, init = (
        values[:test_consts],
        values[test_consts:first],
        _batch(values[first:], batched[first:], flags, size),
    )
    if decides:  # until all elements are done; finished ones keep their carry

        def any_goes(*xs: Any) -> list[Any]:
            return [np.any(evaluate(condition, for_condition, xs)[0][0])]

        def go_on(*xs: Any) -> list[Any]:
            going = evaluate(condition, for_condition, [*xs[:test_consts], *xs[first:]])[0][0]
            new, _ = evaluate(step, for_step, xs[test_consts:])
            return [_chosen(going, a, b) for a, b in zip(new, xs[first:], strict=True)]

        inner = [*map(value_type, for_test), *map(value_type, for_body), *map(value_type, init)]
        staged = [
            stage(any_goes, [*inner[:test_consts], *inner[first:]], label=test.label),
            stage(go_on, inner, label=body.label),
        ]
        for_body = [*for_test, *for_body]
    else:
        staged = [(condition, for_condition), (step, for_step)]
    (new_test, more_test), (new_body, more_body) = (closed(*each) for each in staged)
    outs = bind(
        while_p,
        *more_test,
        *for_test,
        *more_body,
        *for_body,
        *init,
        test=new_test,
        body=new_body,
        test_consts=len(more_test) + len(for_test),
        body_consts=len(more_body) + len(for_body),
    )
    return _batch(outs, flags, [True] * len(flags), size)


RULES.update({scan_p: _batch_scan, cond_p: _batch_cond, while_p: _batch_while})
