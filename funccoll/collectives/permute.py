"""permute: values go along pairs of a source and a destination; a device that is not a destination gets zeros.

Cost: α + nβ, one message for each pair, all at the same time (XLA's collective-permute). Each device sends and receives once at
most. On one host each destination reads its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.types import ArrayType
from ..primitives.combining import Shards
from ..primitives.operand_rules import together
from .record import Lowering, collective, pvaried

__all__ = ["permute_p"]


def _infer(x: ArrayType, *, axes: tuple[str, ...], pairs: tuple, size: int) -> ArrayType:
    return x


def _reference(shards: Shards, *, pairs: tuple[tuple[int, int], ...], **_: Any) -> list[Any]:
    out = [np.zeros_like(s) for s in shards]
    for source, destination in pairs:
        out[destination] = shards[source]
    return out


def _vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, pairs, **same: Any) -> list[Any]:
    inverse = tuple((d, s) for s, d in pairs)
    return together(cts, lambda present: bind(permute_p, *present, pairs=inverse, **same))


def _lower(*, pairs: tuple[tuple[int, int], ...]) -> Lowering:
    return Lowering("permute", pairs=pairs)


permute_p = collective("permute", infer=_infer, reference=_reference, vjp=_vjp, lower=_lower, of_copies=pvaried)
