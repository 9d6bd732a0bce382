"""Reports on overlap: what a program computes while each started collective is in flight, between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.ir import Equation, Program
from ..core.mesh import Mesh
from ..errors import Source
from .choose_overlap import starts_of
from .generate import in_execution_order
from .passes.buffers import plan_buffers
from .passes.overlap import overlap as overlapped
from .report import flops

__all__ = ["CollectiveInFlight", "collectives_in_flight"]


@dataclass(frozen=True)
class CollectiveInFlight:
    """A collective, and what runs between its start and the first operation that needs a result.

    - `equation`: the collective.
    - `until`: the line of that operation; None at the end of the program, or if it is not the user's.
    - `operations`: the number of those that run meanwhile.
    - `share`: their part of the program's arithmetic.
    """

    equation: Equation
    until: Source | None
    operations: int
    share: float


def collectives_in_flight(program: Program, mesh: Mesh, overlap: bool | None) -> list[CollectiveInFlight]:
    """Return the collectives of a program, without those in loops, that processes with idle cores start, in order.

    Those behind whose start nothing runs are plain calls, and left out.
    """
    ordered = in_execution_order(program, fused=False)
    starts = starts_of(ordered, mesh, overlap, has_idle_core=True)
    if starts is None or mesh.device_type != "cpu":
        return []
    equations = overlapped(ordered, plan_buffers(ordered, aliases=False), starts)[0].equations
    work = [flops(e) if e.primitive.kind == "compute" else 0.0 for e in equations]
    rows = [_row(equations, work, i) for i, eqn in enumerate(equations) if eqn.started]
    return [row for row in rows if row.operations]


def _row(equations: Sequence[Equation], work: Sequence[float], start: int) -> CollectiveInFlight:
    eqn = equations[start]
    readers = (i for i in range(start + 1, len(equations)) if not {*eqn.outputs}.isdisjoint(equations[i].inputs))
    end = next(readers, len(equations))
    between = [e for e in equations[start + 1 : end] if not e.communicates and not e.primitive.view]
    until = equations[end].source if end < len(equations) else None
    return CollectiveInFlight(eqn, until, len(between), sum(work[start + 1 : end]) / max(1.0, sum(work)))
