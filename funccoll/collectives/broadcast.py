"""broadcast: every device gets the value of the root.

Cost: at least ⌈log₂ p⌉α + nβ (Chan et al. 2007). On one host every device reads the root's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import primitive_named
from ..core.types import ArrayType
from ..primitives.combining import Shards
from ..primitives.operand_rules import communicate, together
from .record import Lowering, collective, left_out

__all__ = ["broadcast_p"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], root: int, size: int) -> ArrayType:
    return x.vary(x.varying - set(axes))


def _reference(shards: Shards, *, root: int, **_: Any) -> list[Any]:
    return [shards[root]]


def _vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, root, algorithm, **along: Any) -> list[Any]:
    if "groups" in along:  # each device of a group has a cotangent of its own
        return together(cts, lambda present: communicate("reduce", *present, root=root, op="sum", **along))

    def on_root(ct: Any) -> Any:
        return np.where(bind(primitive_named("axis_index"), axes=along["axes"]) == root, ct, np.zeros((), ct.dtype))

    return [None if ct is None else partial(on_root, ct) for ct in cts]


def _lower(*, root: int) -> Lowering:
    return Lowering("broadcast", root=root)


broadcast_p = collective("broadcast", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, of_copies=left_out)
