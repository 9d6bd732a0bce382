"""Reports on a program: the table of its collectives, and estimates of its cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..collectives.record import AxisGroups, lowering, operands_of
from ..core.display import html_table, text_table
from ..core.ir import Equation, Program
from ..core.mesh import shown_groups
from ..core.types import dtype_name
from ..errors import Source
from ..primitives.linalg import einsum_p, matmul_p
from ..runtime.collective_call import NATIVE_ALGORITHMS

__all__ = ["CollectiveRow", "CollectiveTable", "cost_analysis", "flops"]


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of a program.

    `nbytes` is what one device contributes. `schedule` is the algorithm's name, "" if it is not chosen yet. `times` is how
    often it runs in a call, None if that depends on values.
    """

    kind: str
    op: str
    axes: tuple[str, ...]
    size: int
    operands: int
    dtype: str
    nbytes: int
    schedule: str
    source: Source | None
    times: int | None = 1
    groups: AxisGroups = ()
    """The positions along the axes that form groups, () if all devices along them do. `size` is then that of the largest."""

    @property
    def over(self) -> str:
        """The axes, and the groups along them, as text."""
        return ",".join(self.axes) + (f" in {shown_groups(self.groups)}" if self.groups else "")


class CollectiveTable:
    """The collectives of programs that run in a row: `.rows`, printed as text or HTML."""

    HEAD = ("collective", "axes", "devices", "arrays", "dtype", "bytes/device", "schedule", "from")
    _RIGHT = ("devices", "arrays", "bytes/device")

    def __init__(self, programs: Iterable[Program]):
        self.rows = [
            _row(e, program, times) for program in programs for e, times in program.executed() if e.primitive.communicates
        ]

    def cells(self) -> list[tuple[str, ...]]:
        """The rows as strings."""
        return [
            (
                f"{r.kind} {r.op}".strip() + ("" if r.times == 1 else f" × {'?' if r.times is None else r.times}"),
                r.over,
                str(r.size),
                str(r.operands),
                r.dtype,
                f"{r.nbytes:,}",
                r.schedule,
                str(r.source or ""),
            )
            for r in self.rows
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[CollectiveRow]:
        return iter(self.rows)

    def __repr__(self) -> str:
        return text_table(self.HEAD, self.cells(), self._RIGHT)

    def _repr_html_(self) -> str:
        return html_table(self.HEAD, self.cells(), self._RIGHT)


def _row(eqn: Equation, program: Program, times: int | None) -> CollectiveRow:
    axes, operands = eqn.axes(), operands_of(eqn)
    dtypes = sorted({dtype_name(a.type.dtype) for a in operands})
    groups = eqn.params.get("groups", ())
    size = max(map(len, groups)) if groups else math.prod(program.axis_sizes[a] for a in axes)
    return CollectiveRow(
        eqn.primitive.name,
        lowering(eqn).op,
        axes,
        size,
        len(operands),
        ",".join(dtypes),
        sum(a.type.nbytes for a in operands),
        _schedule(eqn.params["algorithm"]),
        eqn.source,
        times,
        groups,
    )


def _schedule(algorithm: str | None) -> str:
    return f"{algorithm} (native: not proved)" if algorithm in NATIVE_ALGORITHMS else algorithm or ""


def flops(eqn: Equation) -> float:
    """Estimate the floating-point operations of an equation of compute on one device; see `cost_analysis`."""
    if eqn.primitive is matmul_p:
        return 2.0 * math.prod(eqn.outputs[0].type.shape) * eqn.inputs[0].type.shape[-1]
    if eqn.primitive is einsum_p:
        left, _ = eqn.params["subscripts"].split("->")
        sizes: dict[str, int] = {}
        for term, atom in zip(left.split(","), eqn.inputs, strict=True):
            sizes.update(zip(term, atom.type.shape, strict=True))
        return float(len(eqn.inputs)) * math.prod(sizes.values())
    if eqn.primitive.name.startswith("reduce_") and eqn.primitive.kind == "compute":
        return float(eqn.inputs[0].type.size)
    return float(eqn.outputs[0].type.size) if eqn.primitive.ufunc is not None else 0.0


def cost_analysis(programs: Iterable[Program]) -> dict[str, float]:
    """Estimate the cost on one device of one call of programs that run in a row.

    - `flops`: one for each element of an elementwise result or reduced operand, two for each multiply-add of a product. The
      body of a loop counts once for each iteration, or once if their number depends on values. Each branch counts as if it were
      taken.
    - `bytes accessed`: all operands and results of equations that are not views.
    - `collectives`: their number.
    - `collective bytes`: what one device contributes to them.
    """
    cost: dict[str, Any] = {"flops": 0.0, "bytes accessed": 0.0, "collectives": 0.0, "collective bytes": 0.0}
    for eqn, found in (each for program in programs for each in program.executed()):
        times = 1 if found is None else found
        if eqn.primitive.communicates:
            cost["collectives"] += times
            cost["collective bytes"] += times * sum(a.type.nbytes for a in operands_of(eqn))
        elif eqn.primitive.kind == "compute":
            cost["flops"] += times * flops(eqn)
        if not eqn.primitive.view and eqn.primitive.kind not in ("control", "debug"):
            cost["bytes accessed"] += times * sum(a.type.nbytes for a in (*eqn.inputs, *eqn.outputs))
    return cost
