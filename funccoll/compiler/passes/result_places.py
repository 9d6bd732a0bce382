"""Result places: kernels of groups write results where they are parts of a larger array, so that nothing copies them there.

These are the operands of a concatenation, and the gradients of slices that divide an array up (`accumulate`). All must be
results of one group that nothing else reads, and their rows must lie in the array as they are, as in `operand_views`.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from ...core.ir import Equation, Program, Var
from ...kernels.native.group import GroupNumber, GroupStep
from ...kernels.native.group_kernel import fits, rows_of
from ...primitives.fused import fused_p
from ...primitives.piece_sums import accumulate_p, regions
from ...primitives.shaping import concatenate_p
from .group_drafts import with_aliases
from .operand_views import LEAST_ROW, layout_of
from .rewrite import use_counts

__all__ = ["result_places"]


def result_places(program: Program) -> Program:
    """Return the program in which groups write the arrays that their results are parts of."""
    made = {v: eqn for eqn in program.equations if eqn.primitive is fused_p for v in eqn.outputs}
    if not made:
        return program
    uses = use_counts(program)
    equations: dict[Equation, Equation] = {eqn: eqn for eqn in program.equations}
    first = dict(made)
    """The equation of each group before it changed."""
    for eqn in program.equations:
        parts = _parts(eqn)
        groups = {made[v] for v, _ in parts if v in made and uses[v] == 1}
        if len(groups) != 1 or any(v not in made or uses[v] != 1 for v, _ in parts):
            continue
        (group,) = groups
        written = _writing(group, eqn, parts)
        if written is None:
            continue
        origin = first[parts[0][0]]
        del equations[eqn]
        equations[origin] = written
        made.update(dict.fromkeys(written.outputs, written))
        first[eqn.outputs[0]] = origin
    if len(equations) == len(program.equations):
        return program
    return program.replace(equations=tuple(equations.values()))


def _parts(eqn: Equation) -> list[tuple[Any, tuple]]:
    """Return the operands of which the result consists, and where they are in it; nothing for other equations."""
    if eqn.primitive not in (accumulate_p, concatenate_p):
        return []
    if any(type(a) is not Var or a.type.dtype != eqn.outputs[0].type.dtype for a in eqn.inputs):
        return []
    if eqn.primitive is accumulate_p:
        return [*zip(eqn.inputs, regions(**eqn.params), strict=False)]
    begin, ahead = 0, (slice(None),) * eqn.params["dim"]
    found = []
    for v in eqn.inputs:
        end = begin + v.type.shape[eqn.params["dim"]]
        found.append((v, (*ahead, slice(begin, end))))
        begin = end
    return found


def _writing(eqn: Equation, array: Equation, parts: list[tuple[Any, tuple]]) -> Equation | None:
    """Return the equation of a group that writes the result of `array`, instead of its parts; None if it cannot."""
    group, (out,) = eqn.params["group"], array.outputs
    places = eqn.params.get("places", tuple(range(len(eqn.outputs))))
    if len(group.outputs) != len(places):  # results that are numbers
        return None
    values, steps, outputs = [*group.values], [*group.steps], [*group.outputs]
    writes = [eqn.outputs[n] for n in places]
    for v, region in parts:
        n = places.index(eqn.outputs.index(v))
        number = outputs[n]
        value = values[number]
        memory = layout_of(out.type.shape, operator.itemgetter(region))
        if memory.shape != v.type.shape or value.strides or value.axes != tuple(range(len(group.sizes))):
            return None
        if array.primitive is accumulate_p and v.type.dtype.kind not in "iu":  # a sum begins with 0, and so loses -0
            values.append(value)
            steps.append(GroupStep("add", (number, GroupNumber(value.kind, 0.0)), number := len(values) - 1))
        values[number] = replace(value, strides=memory.strides, offset=memory.offset)
        outputs[n], writes[n] = number, out
    placed = replace(group, values=tuple(values), steps=tuple(steps), outputs=tuple(outputs))
    if len(set(outputs)) < len(outputs) or not fits(placed) or rows_of(placed)[1] < min(rows_of(group)[1], LEAST_ROW):
        return None
    results = tuple(dict.fromkeys(writes))
    body = eqn.params["body"]
    body = body.replace(equations=(*body.equations, array), outputs=results)
    params = {**eqn.params, "body": body, "group": placed, "places": tuple(map(results.index, writes))}
    return with_aliases(eqn.replace(outputs=results, params=params))
