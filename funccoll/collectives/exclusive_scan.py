"""exclusive_scan: each device gets the reduction of the values of all devices before it, in axis order.

The first device gets zeros. The public function gives it the identity of the reduction instead.

Cost: at least ⌈log₂ p⌉α, and at least nβ, but not both at once. A shift to the next device makes it an inclusive_scan on p − 1
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.types import ArrayType
from ..primitives.combining import Shards
from .inclusive_scan import gradient_of_scan, prefixes, require_scan, tangents_of_scan
from .record import Combine, Lowering, collective

__all__ = ["exclusive_scan_p"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], op: str, reverse: bool, size: int) -> ArrayType:
    require_scan("exclusive_scan", x, op)
    return x


def _reference(shards: Shards, *, op: str, reverse: bool, combine: Combine | None = None, **_: Any) -> list[Any]:
    first = len(shards) - 1 if reverse else 0
    if combine is not None:
        return [np.zeros_like(s) if i == first else combine(i, shards, op) for i, s in enumerate(shards)]
    step = -1 if reverse else 1
    before = prefixes(shards[::step][:-1], op) if len(shards) > 1 else []
    return [np.zeros_like(shards[first]), *before][::step]


def _vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], **params: Any) -> list[Any]:
    return gradient_of_scan("exclusive_scan", cts, inputs, outs, **params)


def _jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], **params: Any) -> list[Any]:
    return tangents_of_scan("exclusive_scan", tangents, inputs, outs, **params)


def _lower(*, op: str, reverse: bool) -> Lowering:
    return Lowering("exclusive_scan", op=op, reverse=reverse)


exclusive_scan_p = collective("exclusive_scan", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, jvp=_jvp)
