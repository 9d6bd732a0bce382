"""Neighbours: collectives that need nothing computed between them are put side by side, to be executed in one call.

Compute that needs no result of such a group comes before it, the rest after it. Collectives keep their order. It runs before
buffers are planned: what may be overwritten depends on the order in which things run.
"""

from __future__ import annotations

from ..ir import Equation, Program, Var

__all__ = ["group_collectives"]


def group_collectives(program: Program) -> Program:
    """The same equations, in another order."""
    order: list[Equation] = []
    group: list[Equation] = []
    after: list[Equation] = []
    results: set[Var] = set()  # of the group
    later: set[Var] = set()  # of what comes after it
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
