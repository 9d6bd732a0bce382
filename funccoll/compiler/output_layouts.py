"""The layouts of a program's results (`out_specs=fc.AUTO`), read off its equations.

Arguments' specs say which mesh axes split each dimension. Each primitive's rule says to which dimension of its result a
dimension of an operand goes. An axis over which a value varies is in one of three states:

- it *splits* a dimension: the devices' blocks, side by side along it, are the global value;
- it is *lost*: each device computed a sum over the split dimension, its order, or an index into it from its own block alone;
- it is neither: devices hold copies (`pvary`), or their own numbers (`axis_index`), which take any operand's layout.

A wrong layout is worse than none. If a rule leaves room for doubt, the axis is lost until a collective over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.ir import Atom, Equation, Primitive, Program, Var
from ..core.mesh import Mesh
from ..core.partition_spec import P
from ..core.sharding import Sharding
from ..core.types import ArrayType
from ..errors import OutSpecsError
from ..primitives.control_flow import cond_p, scan_p, while_p
from ..primitives.higher_order import checkpoint_p, custom_vjp_p
from .layout_rules import DimensionLayout, Part, Rule, merged, rule_of, without

__all__ = ["CONTROL_RULES", "layout_of_argument", "output_layouts", "sharding_of_result"]


def layout_of_argument(sharding: Sharding, ndim: int) -> DimensionLayout:
    """The layout of an argument."""
    return DimensionLayout(tuple(sharding.dim_axes(d) for d in range(ndim)))


def sharding_of_result(layout: DimensionLayout, type: ArrayType, mesh: Mesh, name: str, where: str) -> Sharding:
    """Return the sharding of a result; `where` is its place in what the function `name` returns.

    Raises OutSpecsError if it varies over an axis, and no dimension is known to be split by it.
    """
    rows = list(layout.rows)
    while rows and not rows[-1]:
        rows.pop()
    spec = P(*rows)
    axis = next((a for a in mesh.axis_names if a in type.varying - set(spec.axes)), None)
    if axis is None:
        return Sharding(mesh, spec)
    loss = layout.lost.get(axis)
    why = "each device has made it for itself" if loss is None else loss.what
    if loss is not None and loss.source is not None:
        why += f", at {loss.source}"
    by_hand = f"fc.P({axis!r}) puts the devices' blocks side by side along dimension 0"
    if not type.shape:
        by_hand = f"x[None] with fc.P({axis!r}) has one number from each device"
    raise OutSpecsError(
        f"out_specs of {name}: fc.AUTO cannot derive which dimension of {where}, of type {type}, {axis!r} splits: {why}. "
        f"Reduce or gather it first (fc.all_reduce, fc.all_gather over {axis!r}), or write its spec "
        f"instead of fc.AUTO: {by_hand}."
    )


def output_layouts(program: Program, inputs: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    """Return the layouts of a program's outputs, from those of its inputs."""
    known: dict[Var, DimensionLayout] = dict(zip(program.inputs, inputs, strict=True))

    def read(atom: Atom) -> DimensionLayout:
        found = known.get(atom) if isinstance(atom, Var) else None
        return DimensionLayout(((),) * atom.type.ndim) if found is None else found

    for eqn in program.equations:
        made = _rule(eqn.primitive)(eqn, [read(a) for a in eqn.inputs])
        for v, layout in zip(eqn.outputs, made, strict=True):
            known[v] = without(layout, set(layout.axes) - v.type.varying)
    return [read(a) for a in program.outputs]


def _inner(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    return output_layouts(eqn.params["program"], ins)


def _joined_layouts(eqn: Equation, *states: Sequence[DimensionLayout], chosen_by: DimensionLayout | None = None) -> Any:
    """Return layouts that are one or the other; `chosen_by` is the scalar that decides."""
    chosen: list[Part] = [] if chosen_by is None else [(chosen_by, ())]
    return [merged(eqn, len(x[0].rows), [*chosen, *((y, range(len(y.rows))) for y in x)]) for x in zip(*states, strict=True)]


def _cond(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    results = [output_layouts(branch, ins[1:]) for branch in eqn.params["branches"]]
    return _joined_layouts(eqn, *results, chosen_by=ins[0])


def _scan(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    first = eqn.params["consts"] + eqn.params["carry"]
    consts, carry = ins[: eqn.params["consts"]], ins[eqn.params["consts"] : first]
    what = "the loop runs over each device's block of the split dimension"
    rows = [merged(eqn, len(x.rows) - 1, [(x, [what, *range(len(x.rows) - 1)])]) for x in ins[first:]]
    while True:
        outs = output_layouts(eqn.params["body"], [*consts, *carry, *rows])
        joined = _joined_layouts(eqn, carry, outs[: len(carry)])
        if joined == carry:
            stacked = [DimensionLayout(((), *x.rows), x.lost) for x in outs[len(carry) :]]
            return [*carry, *stacked]
        carry = joined


def _while(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    first, last = eqn.params["test_consts"], eqn.params["test_consts"] + eqn.params["body_consts"]
    carry = ins[last:]
    while True:
        (decision,) = output_layouts(eqn.params["test"], [*ins[:first], *carry])
        outs = output_layouts(eqn.params["body"], [*ins[first:last], *carry])
        joined = _joined_layouts(eqn, carry, outs, chosen_by=decision)
        if joined == carry:
            return joined
        carry = joined


CONTROL_RULES: dict[Primitive, Rule] = {
    checkpoint_p: _inner,
    custom_vjp_p: _inner,
    cond_p: _cond,
    scan_p: _scan,
    while_p: _while,
}


def _rule(primitive: Primitive) -> Rule:
    return CONTROL_RULES.get(primitive) or rule_of(primitive)
