"""Fusion: elementwise operations and reductions become groups, which one kernel computes in one pass over memory.

A group lies between two borders (collectives, control flow), and all its values vary alike. So groups are equal on every mesh,
what several devices share is computed once, and no collective waits for more than it reads.

Each equation begins as a group of its own. A group merges with one that reads its results, then with one that reads a large
value that it reads, too, if

- both fit one domain (`kernels/native/group.py`): the axes of one are axes of the other, in the same order;
- no path leads from one to the other through equations outside;
- reductions whose results the group reads all reduce the innermost axes.

Views add or remove dimensions of size 1, or repeat elements. They belong to both sides: a kernel reads their operands, and the
equations stay for readers outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...config import FUSE
from ...core.ir import Equation, Program, Var
from ...kernels.native.operations import FUNCTIONS
from ...primitives.fused import fused_p
from .group_drafts import VIEWS, GroupDraft, GroupPlan, draft_of, fused_equation, in_order, is_reduction, merged, with_aliases
from .rematerialize import rematerialize

__all__ = ["fuse"]

_LARGEST = 128
"""Equations of a group: larger ones take long to compile."""
_SAVED_BY_CALL = 400
_SAVED_BY_ELEMENT = 0.25
_SAVED_BY_REDUCTION = 2000
_LEAST_SAVED = 2000
"""Nanoseconds that a group should save in each call, so that some thousand calls pay for its compilation. Groups with an
elementary function save less, too: its bits should depend neither on shapes nor on its neighbours. NumPy's reductions of large
operands take 1.3 to 20 times as long as a kernel's."""
_LARGE = 4096
"""Elements of an operand that is worth reading once instead of twice."""


def fuse(program: Program, everything: bool = False, for_gpu: bool = False) -> Program:
    """Return the program with groups in place of their equations. Bodies of control flow are left alone.

    With `everything`, groups that save little become kernels, too. Groups are the same for a GPU, but there no result takes
    the memory of an operand.
    """
    if FUSE.read() == "0":
        return program
    read_later = {a for a in program.outputs if type(a) is Var}
    intervals: list[list[Equation]] = [[]]
    for eqn in program.equations:
        if eqn.primitive.communicates or eqn.primitive.kind == "control":
            intervals += [[eqn], []]
        else:
            intervals[-1].append(eqn)
    after: list[Equation] = []
    plans: dict[Equation, GroupPlan] = {}
    for interval in reversed(intervals):
        fused = _fuse_interval(program, interval, read_later, plans, everything, for_gpu)
        read_later.update(a for eqn in interval for a in eqn.inputs if type(a) is Var)
        after[:0] = fused
    if not plans:
        return program
    after = [with_aliases(eqn, for_gpu) if eqn.primitive is fused_p else eqn for eqn in rematerialize(program, after, plans)]
    return program.replace(equations=tuple(after), before_fusion=program.unfused())


def _fuse_interval(
    program: Program,
    equations: Sequence[Equation],
    read_later: set[Var],
    plans: dict[Equation, GroupPlan],
    everything: bool,
    for_gpu: bool,
) -> Sequence[Equation]:
    """Fuse what lies between two borders. `read_later`: the variables that are read behind it. `plans` gets the groups.

    Reports are not borders, so that what a rank shows changes no bits.
    """
    reports = [eqn for eqn in equations if eqn.primitive.kind == "debug"]
    shown = {a for eqn in reports for a in eqn.inputs if type(a) is Var}
    alike: dict[frozenset[str], list[Equation]] = {}
    if len(equations) == 1 and (equations[0].communicates or equations[0].primitive.kind == "control"):
        return equations
    for eqn in equations:
        if eqn.primitive.kind != "debug":
            alike.setdefault(eqn.outputs[0].type.varying, []).append(eqn)
    ordered: list[Equation] = []
    for varying in sorted(alike, key=lambda v: (len(v), sorted(v))):  # as code generation orders them
        elsewhere = {a for v, own in alike.items() if v != varying for e in own for a in e.inputs if type(a) is Var}
        ordered += _Fusion(program, alike[varying], read_later | elsewhere | shown, plans, everything, for_gpu).result()
    if not any(eqn.primitive is fused_p for eqn in ordered):
        return equations
    return _with_reports(ordered, reports)


def _with_reports(equations: Sequence[Equation], reports: Sequence[Equation]) -> list[Equation]:
    """Return equations with reports among them, each as early as what it shows is known, and in their order."""
    missing = {v for eqn in equations for v in eqn.outputs}
    found: list[Equation] = []
    waiting = [*reports]
    for eqn in (None, *equations):
        if eqn is not None:
            found.append(eqn)
            missing.difference_update(eqn.outputs)
        while waiting and missing.isdisjoint(a for a in waiting[0].inputs if type(a) is Var):
            found.append(waiting.pop(0))
    return found


class _Fusion:
    """The fusion of equations that vary alike."""

    def __init__(
        self,
        program: Program,
        equations: list[Equation],
        read_outside: set[Var],
        plans: dict[Equation, GroupPlan],
        everything: bool,
        for_gpu: bool,
    ):
        self.program, self.equations, self.read_outside, self.plans = program, equations, read_outside, plans
        self.everything, self.for_gpu = everything, for_gpu
        self.maker = {v: i for i, eqn in enumerate(equations) for v in eqn.outputs}
        self.readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(equations):
            for a in dict.fromkeys(a for a in eqn.inputs if type(a) is Var):
                self.readers.setdefault(a, []).append(i)
        self.group_of: dict[int, GroupDraft] = {}
        self.merged: list[GroupDraft] = []
        """The groups of several equations."""
        self.replaced: set[int] = set()
        """Equations that groups compute, and nothing else needs."""

    def result(self) -> list[Equation]:
        """Return the equations, with groups, in an order in which each reads what is known."""
        for i, eqn in enumerate(self.equations):
            draft = draft_of(i, eqn)
            if draft is None:
                continue
            self.group_of[i] = draft
            for a in eqn.inputs * 2:  # what one operand's group forbids, because a path leads through another's, is open then
                if type(a) is Var and (made := self.group_of.get(self.maker.get(a, -1))) is not None:
                    self.merge(made, self.group_of[i])
        for reading in list(self.readers.items()):
            self.merge_readers(*reading)
        drafts = {id(d): d for d in self.group_of.values()}
        groups = [made for d in drafts.values() if (made := self.equation(d)) is not None]
        return self.ordered(groups) if groups else self.equations

    def merge_readers(self, value: Var, readers: Sequence[int]) -> None:
        """Merge groups that read the same large value."""
        if value.type.size < _LARGE:
            return
        found = [i for i in readers if i in self.group_of]
        for i in found[1:]:
            self.merge(self.group_of[found[0]], self.group_of[i])

    # ------------------------------------------------------------ merging

    def merge(self, first: GroupDraft, second: GroupDraft) -> None:
        """Merge two groups if that is possible."""
        if first is second or len(first.members) + len(second.members) > _LARGEST:
            return
        both = merged(first, second)
        inside = {*first.members, *second.members}
        if both is None or not in_order(both, lambda v: any(r in inside for r in self.readers.get(v, ()))):
            return
        if self.path(first, second) or self.path(second, first):
            return
        both.members.sort()
        self.merged = [d for d in self.merged if d is not first and d is not second] + [both]
        for i in both.members:
            self.group_of[i] = both

    def path(self, first: GroupDraft, second: GroupDraft) -> bool:
        """True if a path leads from one group to the other through equations outside."""
        last, inside, targets = self.last_before(second), {*first.members}, {*second.members}
        if last < first.members[0]:
            return False
        seen: set[int] = set()
        todo = [r for i in first.members for r in self.next(i) if r not in inside and r not in targets]
        while todo:
            i = todo.pop()
            if i in seen or i > last:
                continue
            group = self.group_of.get(i)
            for k in (i,) if group is None else group.members:
                seen.add(k)
                for r in self.next(k):
                    if r in targets:
                        return True
                    todo.append(r)
        return False

    def last_before(self, draft: GroupDraft) -> int:
        """Return the last equation from which a path may lead to a group.

        An equation leads to later ones, and those of a group wait for each other.
        """
        last = draft.members[-1]
        for other in sorted(self.merged, key=lambda d: d.members[0]):
            if other.members[0] > last:
                break
            last = max(last, other.members[-1])
        return last

    def next(self, i: int) -> Iterable[int]:
        """Return the equations that read the results of one."""
        return (r for v in self.equations[i].outputs for r in self.readers.get(v, ()))

    # ------------------------------------------------------------ equations of groups

    def equation(self, draft: GroupDraft) -> tuple[GroupDraft, Equation] | None:
        """Return the equation of a group; None if it is not worth a kernel."""
        equations, members = self.equations, {*draft.members}
        chosen = [i for i in draft.members if equations[i].primitive not in VIEWS]
        elements = max((a.type.size for i in chosen for a in (*equations[i].inputs, *equations[i].outputs)), default=0)
        saved = (len(chosen) - 1) * (_SAVED_BY_CALL + _SAVED_BY_ELEMENT * elements)
        large = (i for i in chosen if equations[i].inputs and equations[i].inputs[0].type.size >= _LARGE)
        saved += _SAVED_BY_REDUCTION * sum(is_reduction(equations[i]) for i in large)
        least = 0 if self.everything else _LEAST_SAVED
        if saved < least and not any(equations[i].primitive.name in FUNCTIONS for i in chosen):
            return None
        outside = members.difference(chosen)
        for i in sorted(outside, reverse=True):  # the views that something outside reads
            if not self.is_read(equations[i].outputs[0], members - outside):
                outside.remove(i)
        outputs = [v for i in chosen if self.is_read(v := equations[i].outputs[0], members - outside)]
        plan = GroupPlan([equations[i] for i in draft.members], draft, outputs, equations[chosen[0]].source, self.for_gpu)
        eqn = fused_equation(self.program, plan)
        if eqn is None:
            return None
        self.plans[eqn] = plan
        self.replaced.update(members - outside)
        return draft, eqn

    def is_read(self, v: Var, inside: set[int]) -> bool:
        """True if something outside a group reads a value."""
        return v in self.read_outside or any(r not in inside for r in self.readers.get(v, ()))

    def ordered(self, groups: Sequence[tuple[GroupDraft, Equation]]) -> list[Equation]:
        """Return the equations with groups in place of their members, in an order in which each reads what is known."""
        first = {draft.members[0]: eqn for draft, eqn in groups}
        nodes: list[Equation] = []
        for i, eqn in enumerate(self.equations):
            nodes += [first[i]] if i in first else []
            nodes += [eqn] if i not in self.replaced else []
        made = {v: node for node in nodes for v in node.outputs}
        out: dict[Equation, None] = {}
        begun: set[Equation] = set()
        for node in nodes:  # depth first, so that the order of the program is kept where it can be
            todo = [node]
            while todo:
                top = todo[-1]
                waits = [made[a] for a in top.inputs if type(a) is Var and a in made and made[a] not in out]
                if waits and top not in out:
                    if top in begun:
                        raise AssertionError("groups wait for each other")
                    begun.add(top)
                    todo += waits
                else:
                    out.setdefault(todo.pop())
        return list(out)
