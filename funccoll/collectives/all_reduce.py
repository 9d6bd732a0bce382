"""all_reduce: every device gets the reduction of all devices' values.

Cost: at least ⌈log₂ p⌉α + 2n(p−1)/p β + n(p−1)/p γ (Chan et al. 2007), a reduce_scatter and an all_gather in a row. On
one host each device reads its part of all values and writes the result to all: 2pn bytes of memory traffic, the minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import primitive_named
from ..core.types import ArrayType
from ..primitives.combining import OPS_OF_COPIES, Shards
from ..primitives.operand_rules import check_op, communicate, together
from ..primitives.reductions import product_of_others
from ..primitives.varying import axis_size, spread
from .axis_groups import peers
from .record import AxisGroups, Combine, Lowering, OfCopies, collective, in_axis_order

__all__ = ["all_reduce_p", "gradient_of_reduction", "tangents_of_reduction"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], op: str, size: int) -> ArrayType:
    check_op("all_reduce", x, op)
    return x.vary(x.varying - set(axes))


def _reference(shards: Shards, *, op: str, combine: Combine = in_axis_order, **_: Any) -> list[Any]:
    return [combine(0, shards, op)]


def _winners(x: Any, out: Any, **along: Any) -> tuple[Any, Any]:
    """(1 if this device's element is the extremum, else 0; the number of devices with it). NaNs are equal here."""
    hit = ((x == out) | (np.isnan(x) & np.isnan(out))).astype(x.dtype)
    (count,) = communicate("all_reduce", hit, op="sum", **along)
    return hit, count


def _others(x: Any, axes: tuple[str, ...], size: int, groups: AxisGroups = ()) -> Any:
    """The product of the other devices' values. In groups of any sizes all devices' values are gathered, others' as ones."""
    p = axis_size(axes)
    (gathered,) = communicate("all_gather", x, axes=axes, dim=0, stack=True, size=p)
    if groups:
        is_peer = np.reshape(peers(groups, axes), (p, *(1,) * x.ndim))
        others = product_of_others(np.where(is_peer, gathered, np.ones((), x.dtype)), 0)
        return others[bind(primitive_named("axis_index"), axes=axes)]
    return bind(primitive_named("own_slice"), product_of_others(gathered, 0), axes=axes, dim=0, stack=True, size=p)


def _weighted(ct: Any, x: Any, out: Any, op: str, along: dict[str, Any]) -> Any:
    """A cotangent, or a tangent, times the derivative in this device's value."""
    if op == "prod":
        return ct * _others(x, **along)
    hit, count = _winners(x, out, **along)
    return ct * hit / count


def gradient_of_reduction(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, op, **along: Any) -> list[Any]:
    """The vjp of a reduction, on devices that all have its result and whole cotangent. `along` are axes, size and groups."""
    if op in ("sum", "mean"):
        return spread(cts, op=op, **along)
    return [
        None if ct is None else partial(_weighted, ct, x, out, op, along) for ct, x, out in zip(cts, inputs, outs, strict=True)
    ]


def tangents_of_reduction(
    tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, op, **along: Any
) -> list[Any]:
    """Each device's part of the tangents of a max, min or product. All devices have the result; the parts are to be summed."""
    return [None if t is None else _weighted(t, x, out, op, along) for t, x, out in zip(tangents, inputs, outs, strict=True)]


def _vjp(
    cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, algorithm, op: str, groups: AxisGroups = (), **along: Any
) -> list[Any]:
    if not groups:
        return gradient_of_reduction(cts, inputs, outs, op=op, **along)
    along["groups"] = groups
    linear = op in ("sum", "mean")
    whole = together(cts, lambda present: communicate("all_reduce", *present, op=op if linear else "sum", **along))
    return whole if linear else gradient_of_reduction(whole, inputs, outs, op=op, **along)


def _jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, op: str, algorithm, **along: Any) -> list[Any]:
    if op in ("sum", "mean"):
        return together(tangents, lambda present: bind(all_reduce_p, *present, op=op, algorithm=algorithm, **along))
    parts = tangents_of_reduction(tangents, inputs, outs, op=op, **along)
    return together(parts, lambda present: communicate("all_reduce", *present, **along, op="sum"))


def _lower(*, op: str) -> Lowering:
    return Lowering("all_reduce", op=op)


def _of_copies(*, op: str) -> OfCopies:
    return "left out" if op in OPS_OF_COPIES else "refused"


all_reduce_p = collective(
    "all_reduce", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, of_copies=_of_copies, jvp=_jvp
)
