"""The choice of collectives that a compiled program starts, so that compute runs while they are in flight."""

from __future__ import annotations

from collections.abc import Callable

from ..core.ir import Equation, Program
from ..core.mesh import Mesh
from ..errors import FunccollError
from .choose_schedules import predicted_seconds

__all__ = ["LEAST_SECONDS", "starts_of"]

LEAST_SECONDS = 1e-4
"""Predicted seconds from which a collective is started. To hand it to another thread and back took about 150 µs with no core
idle, when that was measured on a busy machine."""


def starts_of(program: Program, mesh: Mesh, overlap: bool | None, has_idle_core: bool) -> Callable[[Equation], bool] | None:
    """Return which collectives of a program to start, equally on all processes; None if there are none.

    Those that the user started are started between hosts. On one host they are if a core is idle and they take long enough.
    With `overlap` all are, or none; with None the others are started between hosts if they take long enough.
    """
    if overlap is False:
        return None

    def is_long(eqn: Equation) -> bool:
        try:
            return predicted_seconds(eqn, mesh) >= LEAST_SECONDS
        except FunccollError:  # an algorithm whose cost is not known
            return False

    def starts(eqn: Equation) -> bool:
        if eqn.primitive.kind != "collective" or eqn.started is False:
            return False
        if overlap or (eqn.started and mesh.hosts):
            return True
        return (bool(mesh.hosts) or (eqn.started is True and has_idle_core)) and is_long(eqn)

    chosen = {eqn.outputs: starts(eqn) for eqn in program.collectives()}
    return (lambda eqn: chosen.get(eqn.outputs, False)) if any(chosen.values()) else None
