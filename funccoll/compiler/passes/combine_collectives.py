"""Combine small collectives of one kind into one operation with several operands.

The depth of a collective is the length of the longest chain of collectives before it. Two at one depth are independent: a path
from one to the other would make the second one deeper. So all at one depth may be merged, and no dependency is crossed. A
collective after a fence is deeper than all before it. Barriers are never crossed either. A bucket of gradients is never
combined: its size is the user's, and it is reduced as soon as its last gradient is ready. Nor is a ragged collective, which has
a table of its own, nor one that you started, which would wait for another's operands.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ...collectives.record import is_ragged
from ...core.ir import Equation, Program, Var
from ...core.types import ArrayType

__all__ = ["COMBINE_BYTES", "combine"]

COMBINE_BYTES = 1 << 20
"""Bytes per device up to which collectives are merged: beyond it, bandwidth outweighs latency."""


def _key(eqn: Equation) -> tuple:
    dtypes = {a.type.dtype for a in eqn.inputs}
    # `varying` must agree too: then the same groups of devices take part.
    return eqn.primitive, tuple(sorted(eqn.params.items())), frozenset(dtypes), eqn.inputs[0].type.varying, eqn.bucket


def nbytes(eqn: Equation) -> int:
    """Return the bytes that one device contributes."""
    return sum(a.type.nbytes for a in eqn.inputs)


def combine(program: Program, limit: int = COMBINE_BYTES) -> Program:
    """Merge collectives into groups of at most `limit` bytes, each at the place of its last member."""
    out: list[Equation] = []
    region: list[Equation] = []
    for eqn in program.equations:
        if eqn.primitive.kind == "effect" or (eqn.bodies and eqn.communicates):
            out += [*_combine_region(region, limit), eqn]
            region = []
        else:
            region.append(eqn)
    return program.replace(equations=(*out, *_combine_region(region, limit)))


def _combine_region(equations: list[Equation], limit: int) -> list[Equation]:
    depth: dict[Var, tuple[int, int]] = {}  # fences and collectives before it: a second run merges nothing of the first
    open_groups: dict[tuple, list[Equation]] = {}
    groups: list[list[Equation]] = []
    sizes: dict[int, int] = {}
    for eqn in equations:
        level = max((depth.get(a, (0, 0)) for a in eqn.inputs if type(a) is Var), default=(0, 0))
        if eqn.primitive.kind == "collective":
            if nbytes(eqn) <= limit and not is_ragged(eqn) and eqn.started is None:
                key = (level, *_key(eqn))
                group = open_groups.get(key)
                if group is None or sizes[id(group)] + nbytes(eqn) > limit:
                    group = open_groups[key] = []
                    groups.append(group)
                    sizes[id(group)] = 0
                group.append(eqn)
                sizes[id(group)] += nbytes(eqn)
            level = level[0], level[1] + 1
        elif eqn.primitive.kind == "fence":
            level = level[0] + 1, level[1]
        depth.update(dict.fromkeys(eqn.outputs, level))
    merged = {e: group for group in groups if len(group) > 1 for e in group}
    return _order(equations, merged) if merged else equations


def _order(equations: list[Equation], merged: dict[Equation, list[Equation]]) -> list[Equation]:
    """Return the equations in the given order, but each merged group at its last member, and readers after it.

    An equation that shows values also waits for all that did so before it.
    """
    order = {eqn: Var(ArrayType((), np.dtype(np.bool_))) for eqn in equations if eqn.reports}
    last_report: Var | None = None
    waiting_for: dict[Var, list[Equation]] = defaultdict(list)
    missing: dict[Equation, int] = {}
    delayed: set[Var] = set()
    out: list[Equation] = []
    seen: dict[int, int] = defaultdict(int)

    def results(eqn: Equation) -> tuple[Var, ...]:
        return (*eqn.outputs, order[eqn]) if eqn in order else eqn.outputs

    def emit(eqn: Equation) -> list[Equation]:
        """Append an equation; return the readers that waited only for it."""
        out.append(eqn)
        ready = []
        for var in results(eqn):
            delayed.discard(var)
            for reader in waiting_for.pop(var, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    ready.append(reader)
        return ready

    def visit(eqn: Equation) -> None:
        ready = [eqn]  # a stack, because a chain of readers may be as long as the program
        while ready:
            eqn = ready.pop()
            group = merged.get(eqn)
            if group is not None:
                seen[id(group)] += 1
                if seen[id(group)] < len(group):
                    continue
                eqn = group[0].replace(
                    inputs=tuple(a for e in group for a in e.inputs), outputs=tuple(v for e in group for v in e.outputs)
                )
            ready += reversed(emit(eqn))

    for eqn in equations:
        blocked = {a for a in eqn.inputs if type(a) is Var and a in delayed}
        if eqn in order:
            if last_report in delayed:
                blocked.add(last_report)
            last_report = order[eqn]
        if eqn in merged:
            delayed.update(eqn.outputs)
        if blocked:
            delayed.update(results(eqn))
            missing[eqn] = len(blocked)
            for var in blocked:
                waiting_for[var].append(eqn)
        else:
            visit(eqn)
    return out
