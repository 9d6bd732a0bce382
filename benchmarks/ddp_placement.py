"""Where a program reduces its buckets of gradients: as funccoll compiles it, or otherwise, to measure what that takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from funccoll import passes
from funccoll.compiler import stages
from funccoll.ir import Program
from funccoll.passes.combine import combine


@contextlib.contextmanager
def placed(placement: str) -> Iterator[None]:
    """Compile with another placement of collectives: "early", "grouped", or "as compiled"."""
    kept = passes.PASSES, stages.group_collectives
    try:
        if placement == "early":
            passes.PASSES = tuple(p for p in passes.PASSES if p is not combine)
            stages.group_collectives = lambda program: program
        elif placement == "early, updates too":
            passes.PASSES = tuple(p for p in passes.PASSES if p is not combine)
            stages.group_collectives = hoist
        yield
    finally:
        passes.PASSES, stages.group_collectives = kept


def hoist(program: Program) -> Program:
    """Move what needs a collective's result right behind the last collective that it needs."""
    slots: dict = {}
    order: list[list] = [[]]
    for eqn in program.equations:
        slot = max((slots.get(a, 0) for a in eqn.inputs if not hasattr(a, "value")), default=0)
        if eqn.primitive.communicates:
            order[-1].append(eqn)
            order.append([])
            slots.update(dict.fromkeys(eqn.outputs, len(order) - 1))
        elif slot:
            order[slot].append(eqn)
            slots.update(dict.fromkeys(eqn.outputs, slot))
        else:
            order[-1].append(eqn)
    return program.replace(equations=tuple(e for part in order for e in part))
