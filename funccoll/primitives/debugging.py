"""Primitives that show values and change none: reports, in order and never removed, and the copies for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType
from .batch_rules import batch_all

__all__ = ["DebugReport", "DevicePlace", "debug_report_p", "snapshot_p"]


@dataclass(frozen=True)
class DevicePlace:
    """A device of a mesh: its rank there, and its coordinates."""

    rank: int
    coordinates: Mapping[str, int]

    def __str__(self) -> str:
        where = ", ".join(f"{axis}={n}" for axis, n in self.coordinates.items())
        return f"rank {self.rank}" + (f" ({where})" if len(self.coordinates) > 1 else "")


class DebugReport(Protocol):
    """A function of values that runs with the program, for its effect. `debug.py` makes it.

    Texts of programs show its `__qualname__`.
    """

    per_element: bool
    """True if vmap reports each element of a batch, False if it reports the batch at once."""

    def __call__(self, values: Sequence[np.ndarray], place: DevicePlace | None) -> None:
        """Report one device's values. `place` is None unless a mesh has several devices."""
        ...


def _infer(*xs: ArrayType, report: DebugReport) -> list[ArrayType]:
    return []


def _report(*xs: np.ndarray, report: DebugReport) -> list[np.ndarray]:
    report([np.asarray(x) for x in xs], None)
    return []


def _batch(
    primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, report: DebugReport
) -> list[Any]:
    if not report.per_element:
        return bind(primitive, *values, report=report)
    for i in range(size):
        bind(primitive, *(x[i] if b else x for x, b in zip(values, batched, strict=True)), report=report)
    return []


# It has no results, so no gradient passes through it. Passes keep all of them, in the order in which they were traced.
debug_report_p = Primitive("debug_report", _infer, _report, batch=_batch, multiple=True, kind="debug")

# A report reads this copy. A value's last use decides which memory is used again, and reports must not change that.
snapshot_p = Primitive("snapshot", lambda x: [x], lambda x: np.array(x), batch=batch_all)
