"""Groups of collectives: those that need nothing computed between them stand side by side, to be executed in one call.

Compute that needs no result of a group comes before it, the rest after it. Collectives keep their order, and so do equations
that show values. A bucket of gradients ends its group, and the group stands where the bucket is reduced in the backward pass.
Its gradients may still be in the caches there. Measured, that is a little faster than reducing all buckets in one call at the
end (ddp.py). This pass runs before buffers are planned, because memory is free after its last use in the order that runs.
"""

from __future__ import annotations

from ...core.ir import Equation, Program, Var

__all__ = ["group_collectives"]


def group_collectives(program: Program) -> Program:
    """Reorder the equations so that collectives stand in groups."""
    order: list[Equation] = []
    group: list[Equation] = []
    after: list[Equation] = []
    results: set[Var] = set()  # the outputs of `group`
    later: set[Var] = set()  # the outputs of `after`
    reported = False  # by `after`
    for eqn in program.equations:
        inputs = {a for a in eqn.inputs if type(a) is Var}
        bucket = group[-1].bucket if group else 0
        if eqn.bodies and eqn.communicates:  # a loop's collectives are groups of its own
            order += [*group, *after, eqn]
            group, after, results, later, reported = [], [], set(), set(), False
            continue
        if (eqn.primitive.communicates and inputs & later) or (bucket and eqn.bucket != bucket):
            order += group
            order += after
            group, after, results, later, reported = [], [], set(), set(), False
        if eqn.primitive.communicates:
            group.append(eqn)
            results.update(eqn.outputs)
        elif inputs & results or inputs & later or (reported and eqn.reports):
            after.append(eqn)
            later.update(eqn.outputs)
            reported = reported or eqn.reports
        else:
            order.append(eqn)
    return program.replace(equations=(*order, *group, *after))
