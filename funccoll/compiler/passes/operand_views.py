"""Operand views: kernels of groups read slices and transposes from the memory that these view, so that nothing copies them.

A kernel takes arrays in C order. It reads a view by constant strides, if its rows lie in the viewed memory as they are: of
length `LEAST_ROW` or more, and not reversed. Other views are copied when the kernel is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ...core.ir import Atom, Equation, Program, Var
from ...kernels.native.group import FusedGroup
from ...kernels.native.group_kernel import fits, rows_of
from ...primitives.fused import fused_p
from ...primitives.indexing import getitem_p, realize
from ...primitives.shaping import reshape_p, transpose_p
from .group_drafts import with_aliases

__all__ = ["LEAST_ROW", "MemoryLayout", "layout_of", "operand_views"]

LEAST_ROW = 32
"""Elements of a row that a kernel reads as fast as a copy."""


def operand_views(program: Program) -> Program:
    """Return the program in which groups read the memory that their operands view."""
    makers = {v: eqn for eqn in program.equations for v in eqn.outputs}
    equations: list[Equation] = []
    for eqn in program.equations:
        found = eqn
        for k, a in enumerate(eqn.inputs if eqn.primitive is fused_p else ()):
            if type(a) is Var and (chain := _views(a, makers)):
                found = _reading(found, k, chain)
        equations.append(eqn if found is eqn else with_aliases(found))
    if equations == [*program.equations]:
        return program
    return program.replace(equations=_without_unread_views(program, equations))


def _views(a: Var, makers: Mapping[Var, Equation]) -> list[Equation]:
    """Return the equations that make a value as a view of another one, from the first on."""
    chain: list[Equation] = []
    base: Atom = a
    while type(base) is Var and (eqn := makers.get(base)) is not None and _is_view(eqn):
        chain.insert(0, eqn)
        base = eqn.inputs[0]
    while chain and chain[0].primitive is reshape_p:  # the reshaped value lies in C order, as well
        del chain[0]
    return chain if chain and type(chain[0].inputs[0]) is Var else []


def _is_view(eqn: Equation) -> bool:
    """True for slices, transposes, and reshapes that add or remove dimensions of size 1."""
    if eqn.primitive is getitem_p:
        return all(entry[0] != "array" for entry in eqn.params["recipe"])
    if eqn.primitive is reshape_p:
        before, after = ([n for n in v.type.shape if n != 1] for v in (eqn.inputs[0], eqn.outputs[0]))
        return before == after
    return eqn.primitive is transpose_p


def _reading(eqn: Equation, k: int, chain: list[Equation]) -> Equation:
    """Return the equation of a group that reads the memory of a chain of views as its operand `k`; as it was if it cannot."""
    group: FusedGroup = eqn.params["group"]
    base = chain[0].inputs[0]
    _, strides, offset = layout_of(base.type.shape, partial(_viewed, chain))
    number = group.inputs[k]
    value = replace(group.values[number], strides=strides, offset=offset)
    viewing = replace(group, values=(*group.values[:number], value, *group.values[number + 1 :]))
    if not fits(viewing) or rows_of(viewing)[1] < min(rows_of(group)[1], LEAST_ROW):
        return eqn
    # The body has the views. It reads memory of a name of its own: another operand may be the same.
    body: Program = eqn.params["body"]
    inner = Var(base.type)
    steps: list[Equation] = []
    last: Var = inner
    for step in chain:
        out = body.inputs[k] if step is chain[-1] else Var(step.outputs[0].type)
        steps.append(step.replace(inputs=(last,), outputs=(out,)))
        last = out
    body = body.replace(inputs=(*body.inputs[:k], inner, *body.inputs[k + 1 :]), equations=(*steps, *body.equations))
    inputs = (*eqn.inputs[:k], base, *eqn.inputs[k + 1 :])
    return eqn.replace(inputs=inputs, params={**eqn.params, "body": body, "group": viewing})


class MemoryLayout(NamedTuple):
    """How a view lies in memory: its shape, and in elements its strides along dimensions of more than one and its beginning."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def layout_of(shape: Sequence[int], view: Callable[[np.ndarray], np.ndarray]) -> MemoryLayout:
    """Return how a view of an array of this shape lies in its memory."""
    # One byte stands for memory of any size: views read nothing.
    memory = as_strided(np.zeros(1, np.int8), shape, [math.prod(shape[d + 1 :]) for d in range(len(shape))])
    found = view(memory)
    begins = [x.__array_interface__["data"][0] for x in (memory, found)]
    strides = tuple(s for s, n in zip(found.strides, found.shape, strict=True) if n != 1)
    return MemoryLayout(found.shape, strides, begins[1] - begins[0])


def _viewed(chain: Sequence[Equation], memory: np.ndarray) -> np.ndarray:
    """Return the view of a chain of equations."""
    for step in chain:
        if step.primitive is getitem_p:
            memory = memory[(*realize(step.params["recipe"], ()), ...)]  # an array also if it has no dimensions
        else:
            memory = step.primitive.reference(memory, **step.params)
    return memory


def _without_unread_views(program: Program, equations: list[Equation]) -> tuple[Equation, ...]:
    """Return equations without the views that nothing reads any more."""
    read = {a for a in program.outputs if type(a) is Var}
    kept: list[Equation] = []
    for eqn in reversed(equations):
        if _is_view(eqn) and read.isdisjoint(eqn.outputs):
            continue
        read.update(a for a in eqn.inputs if type(a) is Var)
        kept.append(eqn)
    return tuple(reversed(kept))
