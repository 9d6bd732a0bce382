"""The place where a loss begins to differ between devices, for the error about a forgotten collective.

Devices have their own values of an argument or a captured value, a *leaf*, or of the result of an equation (`axis_index`).
Copies that were pvary'd do not count: they are equal.

A product of two such values, one of them a leaf, is taken for a sum over a dimension that the axis splits. Each device then has
a part of the sum. If only one operand were split, the shapes would not fit. So the product of a split leaf and a copy is
complete (column-parallel weights, a batch).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.ir import Atom, Equation, Program, Var
from ...core.types import ArrayType
from ...primitives.control_flow import cond_p, scan_p
from ...primitives.elementwise import convert_p, stop_gradient_p
from ...primitives.higher_order import checkpoint_name_p, checkpoint_p, custom_vjp_p, grad_hook_p
from ...primitives.indexing import getitem_p
from ...primitives.linalg import einsum_p, matmul_p
from ...primitives.reductions import REDUCTIONS
from ...primitives.shaping import broadcast_to_p, reshape_p, transpose_p
from ...primitives.varying import pvary_p

__all__ = ["Beginning", "beginning_of"]

_VIEWS = frozenset(
    [
        convert_p,
        stop_gradient_p,
        checkpoint_name_p,
        grad_hook_p,
        broadcast_to_p,
        reshape_p,
        transpose_p,
        pvary_p,
    ]
)
_REDUCTIONS = frozenset(REDUCTIONS.values())
_PRODUCTS = frozenset([matmul_p, einsum_p])


@dataclass(frozen=True)
class Leaf:
    """An argument of the function whose gradient is taken, or a captured value without a name."""

    name: str
    type: ArrayType


_Own = dict[Var, Leaf | None]
"""The values that differ between devices. Each maps to the leaf that it is, up to form and factors; None if it is computed."""
_Step = tuple[Equation, list[Leaf | None]]
"""An equation of such values, and what its operands among them are."""


@dataclass(frozen=True)
class Beginning:
    """The equation at which a loss begins to vary over an axis, and the leaf that it reads, if any.

    `partial` says that its result may be each device's part of a sum. `own_data` says that captured values differ too, such as
    a batch. If the equation is a reduction, `blocks` is the product by a split leaf that made its operand: columns of logits, a
    block on each device.
    """

    equation: Equation
    leaf: Leaf | None
    partial: bool
    own_data: bool
    blocks: Beginning | None = None


def beginning_of(program: Program, axis: str, arguments: Sequence[str]) -> Beginning | None:
    """Return where the first output begins to vary over an axis; None if only `pvary` makes it vary.

    `arguments` are the names of the program's inputs.
    """
    named = zip(program.inputs, arguments, strict=True)
    own: _Own = {v: Leaf(name, v.type) for v, name in named if axis in v.type.varying}
    steps = [*_steps(program.replace(outputs=program.outputs[:1]), axis, own)]
    if not steps:
        return None
    leaves = [leaf for _, operands in steps for leaf in operands if leaf is not None]
    own_data = not all(leaf.name for leaf in leaves)
    partial = next((step for step in steps if _is_partial(step)), None)
    blocks = None
    if partial is None and leaves and not own_data:  # only weights differ: each device reduces its block of them
        for i, step in enumerate(steps):
            if step[0].primitive in _REDUCTIONS:
                partial, blocks = step, None if any(step[1]) else _product(steps[:i])
                break
    eqn, operands = partial or next((step for step in steps if any(step[1])), steps[0])
    return Beginning(eqn, next(filter(None, operands), None), partial is not None, own_data, blocks)


def _product(steps: Sequence[_Step]) -> Beginning | None:
    """The first product of a leaf and a copy."""
    products = (Beginning(eqn, leaf, False, False) for eqn, (leaf, *_) in steps if leaf and eqn.primitive in _PRODUCTS)
    return next(products, None)


def _steps(program: Program, axis: str, own: _Own) -> Iterator[_Step]:
    """Yield the equations, except views, between own values and the program's outputs, in order and at all depths."""
    own = own | {v: Leaf("", v.type) for v, _ in program.constants if axis in v.type.varying}
    for eqn in program.equations:
        found = [own[a] for a in eqn.inputs if a in own]
        if not found and (eqn.primitive is pvary_p or any(axis in a.type.varying for a in eqn.inputs)):
            continue  # of copies
        if eqn.primitive is grad_hook_p:  # several leaves; each stays what it is
            own.update((v, own[a]) for v, a in zip(eqn.outputs, eqn.inputs, strict=True) if a in own)
            continue
        leaf = found[0] if found and all(found) and _keeps_leaves(eqn, len(found)) else None
        own.update((v, leaf) for v in eqn.outputs if axis in v.type.varying)
    path: set[Atom] = {v for v in program.outputs if v in own}
    for eqn in reversed(program.equations):
        if not path.isdisjoint(eqn.outputs):
            path.update(a for a in eqn.inputs if a in own)
    for eqn in program.equations:
        if path.isdisjoint(eqn.outputs):
            continue
        bodies = _bodies(eqn)
        for body, operands in bodies:
            pairs = zip(body.inputs, operands, strict=True)
            yield from _steps(body, axis, {v: own[a] for v, a in pairs if a in own})
        if not bodies and eqn.primitive not in _VIEWS:
            yield eqn, [own[a] for a in eqn.inputs if a in own]


def _keeps_leaves(eqn: Equation, count: int) -> bool:
    """True if the result is an operand in another form, or times copies."""
    one = eqn.primitive in _VIEWS or (eqn.primitive is getitem_p and len(eqn.inputs) == 1)
    return one or (eqn.primitive.ufunc is not None and count == 1)


def _bodies(eqn: Equation) -> list[tuple[Program, Sequence[Atom]]]:
    """The programs that an equation runs on its operands; not those of a while loop, whose carry begins as it goes on."""
    if eqn.primitive in (checkpoint_p, custom_vjp_p):
        return [(eqn.params["program"], eqn.inputs)]
    if eqn.primitive is scan_p:
        return [(eqn.params["body"], eqn.inputs)]
    return [(branch, eqn.inputs[1:]) for branch in eqn.params["branches"]] if eqn.primitive is cond_p else []


def _is_partial(step: _Step) -> bool:
    """True for a product that sums over own values, and for a read of an argument at own indices."""
    eqn, operands = step
    if len(operands) < 2 or not any(operands):
        return False
    if eqn.primitive is einsum_p:
        terms, result = eqn.params["subscripts"].split("->")
        letters = [c for term in terms.split(",") for c in set(term)]
        return any(letters.count(c) > 1 and c not in result for c in letters)
    of_argument = operands[0] is not None and bool(operands[0].name)
    return eqn.primitive is matmul_p or (eqn.primitive is getitem_p and of_argument)
