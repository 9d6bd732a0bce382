"""inclusive_scan: each device gets the reduction of the values of all devices up to it, in axis order.

Cost: at least ⌈log₂ p⌉α, and at least nβ, but not both at once. Kogge and Stone's ⌈log₂ p⌉ rounds move n bytes each. A chain
moves n bytes in all, in more rounds. On one host each device reads the values up to its own, or its part of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import primitive_named
from ..core.types import ArrayType
from ..errors import UnsupportedError
from ..primitives.combining import Shards, fold, identity_of
from ..primitives.operand_rules import check_op, communicate, together
from ..primitives.reductions import product_of_others
from ..primitives.varying import axis_size
from .axis_groups import group_index, peers, ranks_by_position
from .record import AxisGroups, Combine, Lowering, are_uneven, collective

__all__ = ["gradient_of_scan", "inclusive_scan_p", "prefixes", "require_scan", "tangents_of_scan"]


def require_scan(name: str, x: ArrayType, op: str) -> None:
    """Raise UnsupportedError for a mean, and DTypeError if the dtype lacks the reduction."""
    if op == "mean":
        raise UnsupportedError(
            f'{name}: op="mean" has no scan, because a mean of means is not the mean. Use op="sum", and divide by the number '
            "of devices that were added, such as fc.axis_index(axis) + 1."
        )
    check_op(name, x, op)


def _infer(x: ArrayType, *, axes: tuple[str, ...], op: str, reverse: bool, size: int) -> ArrayType:
    require_scan("inclusive_scan", x, op)
    return x


def prefixes(shards: Shards, op: str) -> list[Any]:
    """Return the left folds of one shard, of two, ...: the first one is a copy, NaNs included."""
    found = [np.array(shards[0])]
    for n, shard in enumerate(shards[1:], 2):
        # A 16-bit float is rounded once, so that fold begins anew. In other dtypes a partial result has the same bits.
        found.append(fold(shards[:n] if shard.dtype.itemsize == 2 else [found[-1], shard], op))
    return found


def _reference(shards: Shards, *, op: str, reverse: bool, combine: Combine | None = None, **_: Any) -> list[Any]:
    if combine is not None:
        return [combine(i, shards, op) for i in range(len(shards))]
    step = -1 if reverse else 1
    return prefixes(shards[::step], op)[::step]


# ---------------------------------------------------------------- derivatives, of both scans


def gradient_of_scan(
    name: str, cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, op: str, reverse: bool, **params: Any
) -> list[Any]:
    """The vjp of a scan. That of a sum is the same scan in the other direction.

    For max, min and prod each device gathers the values of its group, weighs them by its cotangent, and a reduce_scatter adds
    the parts. If groups have different sizes, both are among all devices along the axes.
    """
    if op == "sum":
        scan = primitive_named(name)
        return together(cts, lambda present: bind(scan, *present, op=op, reverse=not reverse, **params))
    parts = [
        None if ct is None else ct * _derivatives(name, x, out, op=op, reverse=reverse, **params)
        for ct, x, out in zip(cts, inputs, outs, strict=True)
    ]
    along = _reach(**params)
    added = together(parts, lambda present: communicate("reduce_scatter", *present, **along, dim=0, op="sum"))
    return [None if y is None else np.reshape(y, x.shape) for y, x in zip(added, inputs, strict=True)]


def tangents_of_scan(
    name: str, tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, op: str, **params: Any
) -> list[Any]:
    """The jvp of a scan."""
    if op == "sum":
        return together(tangents, lambda present: bind(primitive_named(name), *present, op=op, **params))
    return [
        None
        if t is None
        else np.sum(_gathered(t, **params) * _derivatives(name, x, out, op=op, **params), axis=0, dtype=x.dtype)
        for t, x, out in zip(tangents, inputs, outs, strict=True)
    ]


def _reach(*, axes: tuple[str, ...], size: int, groups: AxisGroups = (), **_: Any) -> dict[str, Any]:
    """The parameters of collectives that reach all devices of each group: those of the groups if these have one size."""
    if are_uneven(groups):
        return {"axes": axes, "size": axis_size(axes)}
    return {"axes": axes, "size": size} | ({"groups": groups} if groups else {})


def _gathered(x: Any, **params: Any) -> Any:
    return communicate("all_gather", x, **_reach(**params), dim=0, stack=True)[0]


def _derivatives(
    name: str, x: Any, out: Any, *, op: str, reverse: bool, axes: tuple[str, ...], groups: AxisGroups = (), **params: Any
) -> Any:
    """The derivatives of this device's result in the values that it gathers, along a new first dimension."""
    every = _gathered(x, axes=axes, groups=groups, **params)
    p = every.shape[0]

    def along_devices(table: Any) -> Any:
        return np.reshape(table, (p, *(1,) * x.ndim))

    place = group_index(groups, axes)
    device = along_devices(ranks_by_position(groups) if are_uneven(groups) else np.arange(p, dtype=np.int32))
    before, after = (place, device) if reverse else (device, place)
    counts = before <= after if name == "inclusive_scan" else before < after
    if are_uneven(groups):
        counts &= along_devices(peers(groups, axes))
    if op == "prod":
        others = product_of_others(np.where(counts, every, identity_of(op, x.dtype)), 0)
        return np.where(counts, others, np.zeros((), x.dtype))
    hit = (counts & ((every == out) | (np.isnan(every) & np.isnan(out)))).astype(x.dtype)
    ties = np.sum(hit, axis=0, dtype=x.dtype)
    return hit / np.maximum(ties, np.ones((), x.dtype))


def _vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], **params: Any) -> list[Any]:
    return gradient_of_scan("inclusive_scan", cts, inputs, outs, **params)


def _jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], **params: Any) -> list[Any]:
    return tangents_of_scan("inclusive_scan", tangents, inputs, outs, **params)


def _lower(*, op: str, reverse: bool) -> Lowering:
    return Lowering("inclusive_scan", op=op, reverse=reverse)


inclusive_scan_p = collective("inclusive_scan", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, jvp=_jvp)
