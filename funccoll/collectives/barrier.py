"""barrier: no device continues before all have arrived. It has no operands: every pass keeps this effect in its place.

Cost: at least ⌈log₂ p⌉α and no bytes; dissemination attains it (Hensgen, Finkel and Manber 1988).
"""

from __future__ import annotations

from ..core.types import ArrayType
from .record import AxisGroups, CollectivePrimitive, Lowering

__all__ = ["barrier_p"]


def _infer(*, axes: tuple[str, ...], size: int, algorithm: str | None, groups: AxisGroups = ()) -> list[ArrayType]:
    return []


def _lower() -> Lowering:
    return Lowering("barrier")


barrier_p = CollectivePrimitive("barrier", _infer, list, multiple=True, kind="effect", lower=_lower)
