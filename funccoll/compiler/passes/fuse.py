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

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...config import FUSE
from ...core.ir import Atom, Equation, Literal, Program, Var
from ...core.types import bfloat16
from ...kernels.native.compiled_groups import kernel_of
from ...kernels.native.group import FusedGroup, GroupNumber, GroupStep, GroupValue
from ...kernels.native.group_kernel import fits
from ...kernels.native.machine_code import why_not
from ...kernels.native.operations import FUNCTIONS, OPERATIONS, UNSIGNED
from ...primitives.elementwise import convert_p, resolve, stop_gradient_p, where_p
from ...primitives.fused import fused_p
from ...primitives.reductions import REDUCTIONS
from ...primitives.shaping import broadcast_to_p, reshape_p

__all__ = ["fuse"]

_KINDS = {
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.float16): "half",
    bfloat16: "bfloat",
    np.dtype(np.int32): "i32",
    np.dtype(np.int64): "i64",
    np.dtype(np.uint32): "i32",
    np.dtype(np.uint64): "i64",
    np.dtype(np.bool_): "bool",
}
"""Kinds say nothing of signs: operations do."""
_REDUCTIONS = {REDUCTIONS[name] for name in ("sum", "max", "min")}
_VIEWS = {reshape_p, broadcast_to_p, stop_gradient_p}
_FASTER_BY_NUMPY = {"power", "general_root", "float_power", "cbrt"}
_LARGEST = 128
"""Equations of a group: larger ones take long to compile."""
_SAVED_BY_CALL = 400
_SAVED_BY_ELEMENT = 0.25
_LEAST_SAVED = 2000
"""Nanoseconds that a group should save in each call, so that some thousand calls pay for its compilation. Groups with an
elementary function save less, too: its bits should depend neither on shapes nor on its neighbours."""
_LARGE = 4096
"""Elements of an operand that is worth reading once instead of twice."""


@dataclass
class _Draft:
    """A group while it grows.

    - `sizes`: the sizes of its domain's axes.
    - `axes`: for each value that a member reads or makes, the axes of its dimensions of more than one element.
    """

    members: list[int]
    sizes: tuple[int, ...]
    axes: dict[Var, tuple[int, ...]]
    reductions: list[tuple[Var, tuple[int, ...]]] = field(default_factory=list)
    """The results of reductions, and the axes that they reduce."""


def fuse(program: Program) -> Program:
    """Return the program with groups in place of their equations. Bodies of control flow are left alone."""
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
    for interval in reversed(intervals):
        fused = _fuse_interval(program, interval, read_later)
        read_later.update(a for eqn in interval for a in eqn.inputs if type(a) is Var)
        after[:0] = fused
    if not any(eqn.primitive is fused_p for eqn in after):
        return program
    return program.replace(equations=tuple(after), before_fusion=program)


def _fuse_interval(program: Program, equations: Sequence[Equation], read_later: set[Var]) -> Sequence[Equation]:
    """Fuse what lies between two borders. `read_later`: the variables that are read behind it.

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
        ordered += _Fusion(program, alike[varying], read_later | elsewhere | shown).result()
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

    def __init__(self, program: Program, equations: list[Equation], read_outside: set[Var]):
        self.program, self.equations, self.read_outside = program, equations, read_outside
        self.maker = {v: i for i, eqn in enumerate(equations) for v in eqn.outputs}
        self.readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(equations):
            for a in dict.fromkeys(a for a in eqn.inputs if type(a) is Var):
                self.readers.setdefault(a, []).append(i)
        self.group_of: dict[int, _Draft] = {}
        self.merged: list[_Draft] = []
        """The groups of several equations."""
        self.replaced: set[int] = set()
        """Equations that groups compute, and nothing else needs."""

    def result(self) -> list[Equation]:
        """Return the equations, with groups, in an order in which each reads what is known."""
        for i, eqn in enumerate(self.equations):
            draft = _draft(i, eqn)
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

    def merge(self, first: _Draft, second: _Draft) -> None:
        """Merge two groups if that is possible."""
        if first is second or len(first.members) + len(second.members) > _LARGEST:
            return
        merged = _merged(first, second)
        if merged is None or not _in_order(merged, self.readers):
            return
        if self.path(first, second) or self.path(second, first):
            return
        merged.members.sort()
        self.merged = [d for d in self.merged if d is not first and d is not second] + [merged]
        for i in merged.members:
            self.group_of[i] = merged

    def path(self, first: _Draft, second: _Draft) -> bool:
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

    def last_before(self, draft: _Draft) -> int:
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

    def equation(self, draft: _Draft) -> tuple[_Draft, Equation] | None:
        """Return the equation of a group; None if it is not worth a kernel."""
        equations, members = self.equations, {*draft.members}
        chosen = [i for i in draft.members if equations[i].primitive not in _VIEWS]
        elements = max((a.type.size for i in chosen for a in (*equations[i].inputs, *equations[i].outputs)), default=0)
        saved = (len(chosen) - 1) * (_SAVED_BY_CALL + _SAVED_BY_ELEMENT * elements)
        if saved < _LEAST_SAVED and not any(equations[i].primitive.name in FUNCTIONS for i in chosen):
            return None
        views = {equations[i].outputs[0]: equations[i].inputs[0] for i in members.difference(chosen)}
        outside = members.difference(chosen)
        for i in sorted(outside, reverse=True):  # the views that something outside reads
            if not self.is_read(equations[i].outputs[0], members - outside):
                outside.remove(i)
        outputs = [v for i in chosen if self.is_read(v := equations[i].outputs[0], members - outside)]
        described = _described(equations, chosen, views, draft, outputs)
        if described is None or why_not() is not None:  # asked late, because it loads LLVM
            return None
        inputs, group = described
        needed, body = {*outputs}, []
        for i in reversed(draft.members):
            if not needed.isdisjoint(equations[i].outputs):
                body.append(equations[i])
                needed.update(a for a in equations[i].inputs if type(a) is Var)
        program = self.program.replace(
            constants=(), inputs=tuple(inputs), equations=tuple(reversed(body)), outputs=tuple(outputs), label="fused"
        )
        params = {"body": program, "group": group, "aliases": tuple(sorted(kernel_of(group).aliases))}
        self.replaced.update(members - outside)
        return draft, Equation(fused_p, tuple(inputs), tuple(outputs), params, equations[chosen[0]].source)

    def is_read(self, v: Var, inside: set[int]) -> bool:
        """True if something outside a group reads a value."""
        return v in self.read_outside or any(r not in inside for r in self.readers.get(v, ()))

    def ordered(self, groups: Sequence[tuple[_Draft, Equation]]) -> list[Equation]:
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


def _long(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of more than one element."""
    return tuple(d for d, n in enumerate(shape) if n != 1)


def _draft(i: int, eqn: Equation) -> _Draft | None:
    """Return the group of one equation; None if no kernel computes it."""
    primitive = eqn.primitive
    if primitive.multiple or primitive.kind != "compute":
        return None
    (out,) = eqn.outputs
    if any(a.type.dtype not in _KINDS or not a.type.size for a in (*eqn.inputs, out)):
        return None
    shape = out.type.shape
    places: dict[Atom, tuple[int, ...]]
    reductions: list[tuple[Var, tuple[int, ...]]] = []
    if primitive is reshape_p:
        (x,) = eqn.inputs
        kept = tuple(x.type.shape[d] for d in _long(x.type.shape))
        if kept != tuple(shape[d] for d in _long(shape)):
            return None
        sizes, places = kept, {x: tuple(range(len(kept))), out: tuple(range(len(kept)))}
    elif primitive in _REDUCTIONS:
        (x,) = eqn.inputs
        if _steps(eqn) is None:
            return None
        long = _long(x.type.shape)
        sizes = tuple(x.type.shape[d] for d in long)
        dims = eqn.params["dims"]
        kept_axes = tuple(k for k, d in enumerate(long) if d not in dims)
        places = {x: tuple(range(len(long))), out: kept_axes}
        reductions = [(out, tuple(k for k, d in enumerate(long) if d in dims))]
    else:
        if primitive not in _VIEWS and _steps(eqn) is None:
            return None
        long = _long(shape)
        sizes = tuple(shape[d] for d in long)
        axis_of = {d: k for k, d in enumerate(long)}
        places = {out: tuple(range(len(long)))}
        for a in eqn.inputs:
            lead = len(shape) - a.type.ndim
            places[a] = tuple(axis_of[lead + d] for d in _long(a.type.shape))
    axes = {a: found for a, found in places.items() if type(a) is Var}
    return _Draft([i], sizes, axes, reductions)


def _merged(first: _Draft, second: _Draft) -> _Draft | None:
    """Return two groups as one; None if their domains differ."""
    for inner, outer in ((second, first), (first, second)):
        to: dict[int, int] = {}
        small, large = (inner.axes, outer.axes) if len(inner.axes) <= len(outer.axes) else (outer.axes, inner.axes)
        for v in small:
            if v in large:
                for k, m in zip(inner.axes[v], outer.axes[v], strict=True):
                    if to.setdefault(k, m) != m:
                        return None
        if len(to) != len(inner.sizes):
            continue
        targets = [to[k] for k in range(len(inner.sizes))]
        if any(a >= b for a, b in itertools.pairwise(targets)):
            return None
        moved = {v: tuple(to[k] for k in axes) for v, axes in inner.axes.items()}
        reductions = [(v, tuple(to[k] for k in axes)) for v, axes in inner.reductions]
        return _Draft(
            first.members + second.members,
            outer.sizes,
            {**moved, **outer.axes},
            outer.reductions + reductions,
        )
    return None


def _in_order(draft: _Draft, readers: Mapping[Var, Sequence[int]]) -> bool:
    """True if reductions whose results the group reads all reduce the innermost axes, which all values have or lack."""
    inside = {*draft.members}
    rows = {axes for v, axes in draft.reductions if axes and any(r in inside for r in readers.get(v, ()))}
    if not rows:
        return True
    if len(rows) > 1:
        return False
    (row,) = rows
    if row != tuple(range(len(draft.sizes) - len(row), len(draft.sizes))):
        return False
    extents = [*draft.axes.values(), *(axes for _, axes in draft.reductions)]
    return all(len([k for k in axes if k >= row[0]]) in (0, len(row)) for axes in extents)


def _steps(eqn: Equation) -> tuple[str, list[np.dtype], np.dtype] | None:
    """Return the operation of an equation, and the dtypes of its operands and result; None if no kernel has it."""
    primitive, dtypes = eqn.primitive, [a.type.dtype for a in eqn.inputs]
    if primitive.name in _FASTER_BY_NUMPY:
        return None
    out = eqn.outputs[0].type.dtype
    if primitive in _REDUCTIONS:
        if (primitive is not REDUCTIONS["sum"] and (dtypes[0] != out or out == np.bool_)) or out.kind == "u":
            return None
        return (primitive.name, [out], out) if _converts(dtypes[0], out) else None
    if primitive is convert_p:
        return (_conversion(dtypes[0], out), dtypes, out) if _converts(dtypes[0], out) else None
    if primitive.name not in OPERATIONS:
        return None
    if primitive.ufunc is not None:
        *loop, made = resolve(primitive.ufunc, tuple(dtypes))
        if made != out or any(d not in _KINDS for d in loop):
            return None
    elif primitive is where_p:
        loop = dtypes
        if loop[0] != np.bool_:
            return None
    else:
        loop = dtypes
    computed = loop[1:] if primitive is where_p else loop
    name = primitive.name
    if any(d.kind == "u" for d in computed):
        if name not in UNSIGNED or any(d.kind != "u" for d in computed):  # NumPy compares numbers with and without sign
            return None
        name = UNSIGNED[name]
    found = OPERATIONS[name]
    if any(_computed(d) not in found.kinds for d in computed) or not all(map(_converts, dtypes, loop)):
        return None
    return name, list(loop), out


def _computed(dtype: np.dtype) -> str:
    return {"half": "float", "bfloat": "float", "bool": "i1"}.get(_KINDS[dtype], _KINDS[dtype])


def _converts(source: np.dtype, to: np.dtype) -> bool:
    """True if kernels have the conversion: floats to integers have results that no rule fixes."""
    return source == to or to.kind not in "iu" or source.kind in "iub"


def _conversion(source: np.dtype, to: np.dtype) -> str:
    """Return the operation that converts: from numbers without sign it takes one of its own, unless it drops bits."""
    if source.kind != "u" or to == np.bool_ or (to.kind in "iu" and to.itemsize <= source.itemsize):
        return "convert"
    return f"{_computed(to)}_of_unsigned"


def _number(value: np.ndarray, dtype: np.dtype) -> int | float | bool:
    """Return a literal in a dtype; numbers without sign by the number with sign of the same bits."""
    value = value.astype(dtype)
    return (value.view(f"i{dtype.itemsize}") if dtype.kind == "u" else value).item()


def _described(
    equations: Sequence[Equation], chosen: Sequence[int], views: Mapping[Var, Atom], draft: _Draft, outputs: Sequence[Var]
) -> tuple[list[Var], FusedGroup] | None:
    """Return a group's operands, and its description for a kernel; None if there is no such kernel."""
    values: list[GroupValue] = []
    inputs: dict[Var, int] = {}
    numbers: dict[Var, int | GroupNumber] = {}
    steps: list[GroupStep] = []
    viewed: dict[tuple[int | GroupNumber, tuple[int, ...]], int] = {}

    def new(kind: str, axes: tuple[int, ...]) -> int:
        values.append(GroupValue(kind, axes))
        return len(values) - 1

    def operand(atom: Atom, dtype: np.dtype) -> int | GroupNumber:
        if type(atom) is Var and atom in views:
            found = operand(views[atom], views[atom].type.dtype)
            if draft.axes[atom] != (() if isinstance(found, GroupNumber) else values[found].axes):  # it repeats elements
                key = found, draft.axes[atom]
                if key not in viewed:
                    viewed[key] = new(_KINDS[atom.type.dtype], draft.axes[atom])
                    steps.append(GroupStep("stop_gradient", (found,), viewed[key]))
                found = viewed[key]
        elif isinstance(atom, Literal):
            return GroupNumber(_KINDS[dtype], _number(atom.value, dtype))
        else:
            if atom not in numbers:
                numbers[atom] = inputs[atom] = new(_KINDS[atom.type.dtype], draft.axes[atom])
            found = numbers[atom]
        if atom.type.dtype == dtype or isinstance(found, GroupNumber):
            return found
        converted = new(_KINDS[dtype], values[found].axes)
        steps.append(GroupStep(_conversion(atom.type.dtype, dtype), (found,), converted))
        return converted

    for i in chosen:
        eqn = equations[i]
        described = _steps(eqn)
        assert described is not None
        name, loop, dtype = described
        (out,) = eqn.outputs
        given = tuple(map(operand, eqn.inputs, loop))
        made = new(_KINDS[dtype], draft.axes[out])
        if name.startswith("reduce_") and given and not isinstance(given[0], GroupNumber):
            if values[given[0]].axes == draft.axes[out]:
                name = "stop_gradient"  # dimensions of one element
        steps.append(GroupStep(name, given, made))
        numbers[out] = made
    group = FusedGroup(
        draft.sizes,
        tuple(values),
        tuple(inputs.values()),
        tuple(steps),
        tuple(n for v in outputs if not isinstance(n := numbers[v], GroupNumber)),
    )
    return (list(inputs), group) if fits(group) else None
