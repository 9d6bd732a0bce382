"""reduce: the root gets the reduction of all devices' values, the others get zeros.

Cost: at least ⌈log₂ p⌉α + nβ + n(p−1)/p γ (Chan et al. 2007); it is the transpose of broadcast. On one host the root
reads all values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.types import ArrayType
from ..primitives.combining import Shards
from ..primitives.operand_rules import check_op, communicate, together
from .all_reduce import gradient_of_reduction, tangents_of_reduction
from .record import Combine, Lowering, collective, in_axis_order

__all__ = ["reduce_p"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], root: int, op: str, size: int) -> ArrayType:
    check_op("reduce", x, op)
    return x


def _reference(shards: Shards, *, root: int, op: str, combine: Combine = in_axis_order, **_: Any) -> list[Any]:
    return [combine(i, shards, op) if i == root else np.zeros_like(s) for i, s in enumerate(shards)]


def _vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, root, op, algorithm, **along: Any) -> list[Any]:
    def from_root(values: list[Any]) -> list[Any]:
        return communicate("broadcast", *values, root=root, **along)

    results = outs if op in ("sum", "mean") else from_root(list(outs))
    return gradient_of_reduction(together(cts, from_root), inputs, results, op=op, **along)


def _jvp(
    tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, root, op, algorithm, **along: Any
) -> list[Any]:
    if op in ("sum", "mean"):
        return together(tangents, lambda present: bind(reduce_p, *present, root=root, op=op, algorithm=algorithm, **along))
    results = communicate("broadcast", *outs, root=root, **along)
    parts = tangents_of_reduction(tangents, inputs, results, op=op, **along)
    return together(parts, lambda present: communicate("reduce", *present, root=root, op="sum", **along))


def _lower(*, root: int, op: str) -> Lowering:
    return Lowering("reduce", op=op, root=root)


reduce_p = collective("reduce", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, jvp=_jvp)
