"""Groups of collectives: those that need nothing computed between them are put side by side, to be executed in one call.

Compute that needs no result of a group comes before it, the rest after it. Collectives keep their order. This pass runs
before buffers are planned, because memory is free after its last use in the order that runs.
"""

from __future__ import annotations

from ..ir import Equation, Program, Var

__all__ = ["group_collectives"]


def group_collectives(program: Program) -> Program:
    """Reorder the equations so that collectives stand in groups."""
    order: list[Equation] = []
    group: list[Equation] = []
    after: list[Equation] = []
    results: set[Var] = set()  # the outputs of `group`
    later: set[Var] = set()  # the outputs of `after`
    for eqn in program.equations:
        inputs = {a for a in eqn.inputs if type(a) is Var}
        if eqn.primitive.communicates:
            if inputs & later:
                order += group
                order += after
                group, after, results, later = [], [], set(), set()
            group.append(eqn)
            results.update(eqn.outputs)
        elif inputs & results or inputs & later:
            after.append(eqn)
            later.update(eqn.outputs)
        else:
            order.append(eqn)
    return program.replace(equations=(*order, *group, *after))
