"""Where a program reduces its buckets of gradients: as funccoll compiles it, or otherwise, to measure what that takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from funccoll.compiler import generate, passes
from funccoll.compiler.passes.group_collectives import group_collectives
from funccoll.core.ir import Equation, Literal, Program, Var

PLACEMENTS = ("grouped", "early", "early, updates too")
"""All buckets after the backward pass, like other collectives; each where its last gradient is made, which is what funccoll
compiles; and then what needs a bucket's results, too: the update of its parameters."""


@contextlib.contextmanager
def placed(placement: str) -> Iterator[None]:
    """Compile with this placement of buckets."""
    kept = passes.PASSES, generate.group_collectives
    try:
        if placement == "grouped":
            passes.PASSES = (_without_buckets, *passes.PASSES)
        elif placement == "early, updates too":
            generate.group_collectives = lambda program: _with_early_readers(group_collectives(program))
        yield
    finally:
        passes.PASSES, generate.group_collectives = kept


def _without_buckets(program: Program) -> Program:
    """The program as if its collectives were not buckets."""
    return program.replace(equations=tuple(eqn.replace(bucket=0) for eqn in program.equations))


def _with_early_readers(program: Program) -> Program:
    """Move what needs a collective's result to where everything that it reads is known."""
    made: dict[Var, int] = {}  # by variable, the number of collectives after which it is made
    reduced: set[Var] = set()
    order: list[list[Equation]] = [[]]
    for eqn in program.equations:
        inputs = {a for a in eqn.inputs if not isinstance(a, Literal)}
        early = not eqn.primitive.communicates and not inputs.isdisjoint(reduced)
        part = max(made.get(a, 0) for a in inputs) if early else len(order) - 1
        order[part].append(eqn)
        if eqn.primitive.communicates:
            order.append([])
            part += 1
        if early or eqn.primitive.communicates:
            reduced.update(eqn.outputs)
        made.update(dict.fromkeys(eqn.outputs, part))
    return program.replace(equations=tuple(eqn for part in order for eqn in part))
