"""The record of a collective: a primitive that also says how one call of it is lowered to a schedule.

Passes, runtimes, selection and reports read this record, so none of them needs a collective's name or parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..core.interpreter import bind
from ..core.ir import Atom, Equation, JvpRule, Primitive, primitive_named
from ..core.types import ArrayType
from ..errors import VaryingError
from ..primitives.combining import Shards, fold
from ..primitives.operand_rules import batch_operands, linear_each
from .pair_blocks import Reading, batch_rows

if TYPE_CHECKING:
    pass

__all__ = [
    "AxisGroups",
    "CollectivePrimitive",
    "Combine",
    "Lowering",
    "OfCopies",
    "are_uneven",
    "collective",
    "in_axis_order",
    "is_ragged",
    "left_out",
    "lowering",
    "operands_of",
    "pvaried",
    "ragged_collective",
    "refused",
]

AxisGroups = tuple[tuple[int, ...], ...]
"""Positions along a collective's axes that form groups, in the order of their ranks. A collective among all devices has no such
parameter."""

Combine = Callable[[int, Shards, str], Any]
"""(place in the group that gets the result, every device's contribution in axis order, op) -> the reduction."""


def are_uneven(groups: AxisGroups) -> bool:
    """True if groups have different sizes. Their schedules then run as one, side by side."""
    return len({*map(len, groups)}) > 1


def in_axis_order(place: int, shards: Shards, op: str) -> Any:
    """The left fold: the order in which a reference combines if no schedule gives another one."""
    return fold(shards, op)


@dataclass(frozen=True)
class Lowering:
    """One call of a collective in terms of schedules: the kind and its options, and how arrays are cut into blocks."""

    kind: str
    """The name in `schedules.collective.KINDS`."""
    op: str = ""
    """The reduction; empty if data only move."""
    root: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    reverse: bool = False
    """A scan from the last rank to the first."""
    cut_dim: int = 0
    """The dimension along which a device's input is cut into p blocks, if it is."""
    concat_dim: int = 0
    """The dimension along which p blocks of output are concatenated, if they are."""
    stack: bool = False
    """Blocks are concatenated along a new dimension, which the operand does not have yet."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the schedule, besides the kind and the ranks."""
        return {"root": self.root, "pairs": self.pairs, "reverse": self.reverse}

    def input_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of an operand, with the new dimension if there is one."""
        return (*shape[: self.concat_dim], *(1,) * self.stack, *shape[self.concat_dim :])


OfCopies = Literal["refused", "left out", "pvaried"]
"""The rule of a call along an axis over which its operand is equal on all devices.

- refused: the call raises, because it would combine p copies, which is seldom meant.
- left out: the axis changes nothing. The call is one over the other axes, or returns the operand itself.
- pvaried: a pvary makes the operand vary first; each device sends its own copy.
"""


def refused(**params: Any) -> OfCopies:
    """The rule of most collectives: the call raises."""
    return "refused"


def left_out(**params: Any) -> OfCopies:
    """The rule of a collective that gives each device a value that all of them have."""
    return "left out"


def pvaried(**params: Any) -> OfCopies:
    """The rule of a collective that moves values between devices and combines none."""
    return "pvaried"


@dataclass(frozen=True, eq=False, slots=True, repr=False, kw_only=True)
class CollectivePrimitive(Primitive):
    """A primitive that communicates.

    The `reference` of a reduction also takes `combine` (a `Combine`; by default `in_axis_order`). A runtime passes the order of
    the schedule by it.
    """

    lower: Callable[..., Lowering]
    """Maps the collective's own parameters to its lowering."""
    of_copies: Callable[..., OfCopies] = refused
    """Maps the collective's own parameters to the rule of a call along an axis over which its operand does not vary."""
    pairs: Mapping[int, Reading] | None = None
    """Of a ragged collective, whose second operand is a table of sizes: how a table of so many dimensions is read. The
    `reference` then takes the blocks that move after the shards."""


def collective(
    name: str,
    *,
    infer: Callable[..., ArrayType],
    reference: Callable[..., list[Any]],
    vjp: Callable[..., list[Any]],
    lower: Callable[..., Lowering],
    of_copies: Callable[..., OfCopies] = refused,
    gives_own_block: bool = False,
    jvp: JvpRule | None = None,
    dims: Sequence[str] = (),
) -> CollectivePrimitive:
    """Make the record of a collective with operands. The type rule `infer` takes one of them at a time.

    Args:
        name: The name of the primitive. Its parameter `groups`, if it has one, makes each result vary over the axes.
        infer: The type rule.
        reference: The values, in NumPy.
        vjp: The gradient rule.
        lower: Maps parameters to the `Lowering`.
        of_copies: Maps parameters to the rule for operands that do not vary.
        gives_own_block: Each device gets its own block of one value, as `own_slice` does without communication.
        jvp: The forward derivative. Without it the collective is linear.
        dims: The parameters that count an operand's dimensions.
    """

    def infer_each(
        *xs: ArrayType, axes: tuple[str, ...], algorithm: str | None, groups: AxisGroups = (), **params: Any
    ) -> list[ArrayType]:
        for x in xs:
            _require_varying(name, x, axes, gives_own_block)
        outs = [infer(x, axes=axes, **params) for x in xs]
        return [out.vary(out.varying | set(axes)) for out in outs] if groups else outs  # groups have results of their own

    return CollectivePrimitive(
        name,
        infer_each,
        reference,
        vjp,
        jvp or linear_each(name),
        batch_operands(*dims),
        multiple=True,
        kind="collective",
        lower=lower,
        of_copies=of_copies,
    )


def ragged_collective(
    name: str,
    *,
    infer: Callable[..., list[ArrayType]],
    reference: Callable[..., list[Any]],
    vjp: Callable[..., list[Any]],
    lower: Callable[..., Lowering],
    pairs: Mapping[int, Reading],
    require_linear: Callable[..., None] | None = None,
) -> CollectivePrimitive:
    """Make the record of a ragged collective, whose operands are the rows and a table of sizes.

    It is linear in the rows. `require_linear` raises for parameters with which it is not.
    """

    def jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Any, **params: Any) -> list[Any]:
        if require_linear is not None:
            require_linear(params["op"])
        return [None] if tangents[0] is None else bind(primitive_named(name), tangents[0], inputs[1], **params)

    return CollectivePrimitive(
        name, infer, reference, vjp, jvp, batch_rows, multiple=True, kind="collective", lower=lower, pairs=pairs
    )


def _require_varying(name: str, x: ArrayType, axes: Sequence[str], gives_own_block: bool) -> None:
    missing = [a for a in axes if a not in x.varying]
    if missing:
        over = repr(missing[0]) if len(missing) == 1 else repr(tuple(missing))
        split = f"take each device's own block with fc.own_slice(x, {over}), " if gives_own_block else ""
        stated = f"{name} over axis {over}: the operand {x} does not vary over it"
        error = VaryingError(
            f"{stated}: it is equal on all those devices, and this would combine copies of one value. Drop the collective, "
            f"{split}or use fc.pvary(x, {over}) first if copies are intended."
        )
        error.equal_operand = stated, over
        raise error


def lowering(eqn: Equation) -> Lowering:
    """The lowering of an equation that is a collective."""
    assert isinstance(eqn.primitive, CollectivePrimitive)
    return eqn.primitive.lower(**{k: v for k, v in eqn.params.items() if k not in ("axes", "groups", "size", "algorithm")})


def is_ragged(eqn: Equation) -> bool:
    """True for a collective whose blocks have the sizes of a table, its second operand."""
    return isinstance(eqn.primitive, CollectivePrimitive) and eqn.primitive.pairs is not None


def operands_of(eqn: Equation) -> tuple[Atom, ...]:
    """The operands that an equation communicates, one for each output: without the table of a ragged one."""
    return eqn.inputs[: len(eqn.outputs)] if is_ragged(eqn) else eqn.inputs
