"""Drafts of groups: which equations kernels compute, whether groups fit one domain, and the equation of a group.

Views add or remove dimensions of size 1, or repeat elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.ir import Atom, Equation, Literal, Program, Var
from ...core.types import bfloat16
from ...kernels.native import ptx_code
from ...kernels.native.compiled_groups import kernel_of
from ...kernels.native.group import FusedGroup, GroupNumber, GroupStep, GroupValue
from ...kernels.native.group_kernel import fits, rows_of
from ...kernels.native.machine_code import why_not
from ...kernels.native.operations import OPERATIONS, UNSIGNED
from ...primitives.elementwise import convert_p, resolve, stop_gradient_p, where_p
from ...primitives.fused import fused_p
from ...primitives.reductions import REDUCTIONS
from ...primitives.shaping import broadcast_to_p, reshape_p

__all__ = [
    "VIEWS",
    "GroupDraft",
    "GroupPlan",
    "draft_of",
    "fused_equation",
    "in_order",
    "is_reduction",
    "merged",
    "row_length",
    "steps_of",
    "with_aliases",
]

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
_WHOLE_FLOATS = np.dtype(np.float32), np.dtype(np.float64)
_SIGNED = np.dtype(np.int32), np.dtype(np.int64)
_REDUCTIONS = {REDUCTIONS[name] for name in ("sum", "max", "min")}
VIEWS = {reshape_p, broadcast_to_p, stop_gradient_p}
_FASTER_BY_NUMPY = {"power", "general_root", "float_power", "cbrt"}


@dataclass
class GroupDraft:
    """A group while it grows.

    - `sizes`: the sizes of its domain's axes.
    - `axes`: for each value that a member reads or makes, the axes of its dimensions of more than one element.
    """

    members: list[int]
    sizes: tuple[int, ...]
    axes: dict[Var, tuple[int, ...]]
    reductions: list[tuple[Var, tuple[int, ...]]] = field(default_factory=list)
    """The results of reductions, and the axes that they reduce."""


@dataclass
class GroupPlan:
    """Members and results of a group, from which its equation is made.

    - `equations`: its members, in the order of the program.
    - `outputs`: the values that something outside reads.
    - `source`: the line that stands for it.
    - `for_gpu`: a GPU computes it.
    """

    equations: list[Equation]
    draft: GroupDraft
    outputs: list[Var]
    source: Any
    for_gpu: bool = False


def _long(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of more than one element."""
    return tuple(d for d, n in enumerate(shape) if n != 1)


def draft_of(i: int, eqn: Equation) -> GroupDraft | None:
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
        if steps_of(eqn) is None:
            return None
        long = _long(x.type.shape)
        sizes = tuple(x.type.shape[d] for d in long)
        dims = eqn.params["dims"]
        kept_axes = tuple(k for k, d in enumerate(long) if d not in dims)
        places = {x: tuple(range(len(long))), out: kept_axes}
        reductions = [(out, tuple(k for k, d in enumerate(long) if d in dims))]
    else:
        if primitive not in VIEWS and steps_of(eqn) is None:
            return None
        long = _long(shape)
        sizes = tuple(shape[d] for d in long)
        axis_of = {d: k for k, d in enumerate(long)}
        places = {out: tuple(range(len(long)))}
        for a in eqn.inputs:
            lead = len(shape) - a.type.ndim
            places[a] = tuple(axis_of[lead + d] for d in _long(a.type.shape))
    axes = {a: found for a, found in places.items() if type(a) is Var}
    return GroupDraft([i], sizes, axes, reductions)


def merged(first: GroupDraft, second: GroupDraft) -> GroupDraft | None:
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
        return GroupDraft(
            first.members + second.members,
            outer.sizes,
            {**moved, **outer.axes},
            outer.reductions + reductions,
        )
    return None


def in_order(draft: GroupDraft, is_read: Callable[[Var], bool]) -> bool:
    """True if reductions whose results the group reads all reduce the innermost axes, which all values have or lack."""
    rows = {axes for v, axes in draft.reductions if axes and is_read(v)}
    if not rows:
        return True
    if len(rows) > 1:
        return False
    (row,) = rows
    if row != tuple(range(len(draft.sizes) - len(row), len(draft.sizes))):
        return False
    extents = [*draft.axes.values(), *(axes for _, axes in draft.reductions)]
    return all(len([k for k in axes if k >= row[0]]) in (0, len(row)) for axes in extents)


def is_reduction(eqn: Equation) -> bool:
    """True for the reductions that kernels have."""
    return eqn.primitive in _REDUCTIONS


def steps_of(eqn: Equation) -> tuple[str, list[np.dtype], np.dtype] | None:
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
    """True if kernels have the conversion. Of floats to integers they have those that one instruction makes."""
    truncates = source in _WHOLE_FLOATS and to in _SIGNED
    return source == to or to.kind not in "iu" or source.kind in "iub" or truncates


def _conversion(source: np.dtype, to: np.dtype) -> str:
    """Return the operation that converts: from numbers without sign it takes one of its own, unless it drops bits."""
    if source.kind != "u" or to == np.bool_ or (to.kind in "iu" and to.itemsize <= source.itemsize):
        return "convert"
    return f"{_computed(to)}_of_unsigned"


def _number(value: np.ndarray, dtype: np.dtype) -> int | float | bool:
    """Return a literal in a dtype; numbers without sign by the number with sign of the same bits."""
    value = value.astype(dtype)
    return (value.view(f"i{dtype.itemsize}") if dtype.kind == "u" else value).item()


def fused_equation(program: Program, plan: GroupPlan) -> Equation | None:
    """Return the equation of a group; None if no kernel computes it. What no output needs is left out.

    Its parameter `aliases` is missing (`with_aliases`): the kernel's text takes some time.
    """
    draft, outputs = plan.draft, plan.outputs
    needed, body = {*outputs}, []
    for eqn in reversed(plan.equations):
        if not needed.isdisjoint(eqn.outputs):
            body.insert(0, eqn)
            needed.update(a for a in eqn.inputs if type(a) is Var)
    described = _described(body, draft, outputs)
    why = ptx_code.why_no_ptx if plan.for_gpu else why_not
    if described is None or why() is not None:  # asked late, because it loads LLVM
        return None
    inputs, group = described
    inner = program.replace(constants=(), inputs=tuple(inputs), equations=tuple(body), outputs=tuple(outputs), label="fused")
    return Equation(fused_p, tuple(inputs), tuple(outputs), {"body": inner, "group": group}, plan.source)


def with_aliases(eqn: Equation, for_gpu: bool = False) -> Equation:
    """Return the equation of a group with all parameters. An operand that it has twice is not written to, nor any on a GPU."""
    if for_gpu:
        return eqn.replace(params={**eqn.params, "aliases": ()})
    places = eqn.params.get("places", range(len(eqn.outputs)))
    found = kernel_of(eqn.params["group"]).aliases
    aliases = sorted((places[n], k) for n, k in found if eqn.inputs.count(eqn.inputs[k]) == 1)
    return eqn.replace(params={**eqn.params, "aliases": tuple(aliases)})


def row_length(eqn: Equation) -> int:
    """Return the elements of a row of a group's kernel."""
    return rows_of(eqn.params["group"])[1]


def _described(equations: Sequence[Equation], draft: GroupDraft, outputs: Sequence[Var]) -> tuple[list[Var], FusedGroup] | None:
    """Return a group's operands, and its description for a kernel; None if a kernel cannot have it."""
    views = {eqn.outputs[0]: eqn.inputs[0] for eqn in equations if eqn.primitive in VIEWS}
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

    for eqn in equations:
        if eqn.primitive in VIEWS:
            continue
        described = steps_of(eqn)
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
