"""Rematerialization: groups compute values of earlier groups again instead of reading them, if that moves fewer bytes.

A forward pass saves what its gradient reads: of gelu five arrays beside its result, all of which follow from its operand. So a
value that only later groups read is computed there, from what the first group reads or writes anyway. Bits stay the same,
because a value's instructions are the same in each group.

A value qualifies if

- it takes at most `_COST` instructions an element (tanh 20, exp 14, a quotient 4), and no reduction. The results of
  reductions are written, as they are small;
- what is not written and read any more has more bytes than what is read instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core.ir import Equation, Program, Var
from ...kernels.native.operations import OPERATIONS
from .group_drafts import VIEWS, GroupPlan, fused_equation, in_order, is_reduction, row_length, steps_of

__all__ = ["rematerialize"]

_COST = 45
_LEAST_BYTES = 1 << 16
"""Bytes of a value that is worth this. Smaller ones stay in a cache."""
_LARGEST = 160
"""Equations of a group that grows."""
_SHORT_ROW = 64
"""Elements of a row that operands which repeat along it may leave."""


def rematerialize(program: Program, equations: Sequence[Equation], plans: Mapping[Equation, GroupPlan]) -> list[Equation]:
    """Return equations in which later groups compute what earlier ones wrote for them.

    Args:
        program: The program before fusion.
        equations: The equations behind it, in their order.
        plans: What each group of them was made from.
    """
    return _Rematerialization(program, equations, plans).result()


class _Rematerialization:
    def __init__(self, program: Program, equations: Sequence[Equation], plans: Mapping[Equation, GroupPlan]):
        self.program, self.equations = program, [*equations]
        self.plans = [plans.get(eqn) for eqn in equations]
        self.position = {eqn: n for n, eqn in enumerate(program.equations)}
        self.kept = {a for a in program.outputs if type(a) is Var}
        self.readers: dict[Var, dict[int, None]] = {}
        for n, eqn in enumerate(equations):
            self._reads(n, eqn)

    def _reads(self, n: int, eqn: Equation) -> None:
        for a in eqn.inputs:
            if type(a) is Var:
                self.readers.setdefault(a, {})[n] = None

    def result(self) -> list[Equation]:
        """Try each value that a group writes for others, the cheapest first: dearer ones are computed from these."""
        for n, plan in enumerate(self.plans):
            if plan is not None:
                wanted = [v for v in plan.outputs if v.type.nbytes >= _LEAST_BYTES and v not in self.kept]
                for v in sorted(wanted, key=lambda v, plan=plan: _Cone(plan, v, set()).cost):
                    self._move(n, v)
        return [eqn for eqn, plan in zip(self.equations, self.plans, strict=True) if plan is None or plan.outputs]

    def _move(self, n: int, v: Var) -> None:
        """Compute a value of group `n` in the groups that read it, if that is worth it."""
        readers = [*self.readers.get(v, ())]
        own = self.equations[n].outputs[0].type.varying
        for r in readers:
            if self.plans[r] is None or self.equations[r].outputs[0].type.varying != own:
                return
        source = self.plans[n]
        assert source is not None
        saved = v.type.nbytes * (1 + len(readers))
        made_here = {out for eqn in source.equations for out in eqn.outputs}
        results: dict[Var, None] = {}
        grown: dict[int, tuple[GroupPlan, Equation]] = {}
        for r in readers:
            made = self._with_cone(source, v, r)
            if made is None:
                return
            grown[r] = made
            for a in made[1].inputs:
                if type(a) is Var and a not in self.equations[r].inputs:
                    saved -= a.type.nbytes
                    if a in made_here and a not in source.outputs:  # a reduction's
                        results[a] = None
        saved -= sum(out.type.nbytes for out in results)
        if saved <= 0:
            return
        smaller = replace(source, outputs=[*(o for o in source.outputs if o is not v), *results])
        if smaller.outputs:
            eqn = fused_equation(self.program, smaller)
            if eqn is None:
                return
            self._set(n, smaller, eqn)
        else:
            self.plans[n] = smaller
            for a in self.equations[n].inputs:
                self.readers.get(a, {}).pop(n, None)  # type: ignore[arg-type]
        for r, (plan, eqn) in grown.items():
            self._set(r, plan, eqn)

    def _set(self, n: int, plan: GroupPlan, eqn: Equation) -> None:
        for a in self.equations[n].inputs:
            if type(a) is Var:
                self.readers[a].pop(n, None)
        self.plans[n], self.equations[n] = plan, eqn
        self._reads(n, eqn)

    def _with_cone(self, source: GroupPlan, v: Var, r: int) -> tuple[GroupPlan, Equation] | None:
        """Return group `r` with the equations that compute a value of an earlier one; None if that is not worth it."""
        plan = self.plans[r]
        assert plan is not None
        known = {*self.equations[r].inputs, *(out for eqn in plan.equations for out in eqn.outputs)}
        cone = _Cone(source, v, known - {v})
        if cone.cost > _COST or len(plan.equations) + len(cone.equations) > _LARGEST:
            return None
        draft, to = plan.draft, dict(zip(source.draft.axes[v], plan.draft.axes[v], strict=True))
        axes = dict(draft.axes)
        for eqn in cone.equations:
            for a in (*eqn.inputs, *eqn.outputs):
                if type(a) is Var:
                    moved = tuple(to.get(k, -1) for k in source.draft.axes[a])
                    if -1 in moved or axes.setdefault(a, moved) != moved:  # it is read there along other axes, too
                        return None
        equations = sorted({*plan.equations, *cone.equations}, key=self.position.__getitem__)
        read = {a for eqn in equations for a in eqn.inputs}
        larger = replace(plan, equations=equations, draft=replace(draft, axes=axes))
        if not in_order(larger.draft, read.__contains__):
            return None
        eqn = fused_equation(self.program, larger)
        if eqn is None or row_length(eqn) < min(row_length(self.equations[r]), _SHORT_ROW):
            return None
        return larger, eqn


class _Cone:
    """The equations of a group that compute a value from what is known, and their cost for each of its elements.

    Reductions are not among them: their results are known then.
    """

    def __init__(self, plan: GroupPlan, v: Var, known: set[object]):
        self.cost = 0.0
        self.equations: list[Equation] = []
        makers = {out: eqn for eqn in plan.equations for out in eqn.outputs}
        todo: list[Var] = [v]
        seen: set[Var] = set()
        while todo:
            value = todo.pop()
            if value in seen or value in known or value not in makers:
                continue
            seen.add(value)
            eqn = makers[value]
            if is_reduction(eqn):
                if value is v:
                    self.cost = float("inf")
                continue
            self.equations.append(eqn)
            self.cost += _cost(eqn) * value.type.size / v.type.size
            todo += [a for a in eqn.inputs if type(a) is Var]


def _cost(eqn: Equation) -> int:
    """Return about how many instructions an equation takes for each element."""
    if eqn.primitive in VIEWS:
        return 0
    found = steps_of(eqn)
    assert found is not None
    return OPERATIONS[found[0]].cost if found[0] in OPERATIONS else 1
