"""Arrays that the ranks of a job share, and calls at which they meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.transports.plans import planned_collective
from funccoll.transports.shm.arena import SHAREABLE

COUNT = SHAREABLE // 4 + 1000


def share_all() -> None:
    """Let this process share every result that can be shared, as large ones are."""
    planned_collective.NON_TEMPORAL = 0


def jitted(fn: Callable[..., Any], mesh: Mesh, out_specs: P = P(), **options: Any) -> Any:
    return fc.jit(fn, mesh=mesh, in_specs=P("d"), out_specs=out_specs, **options)


def meet(mesh: Mesh) -> None:
    """Return when all ranks have come here."""
    jitted(lambda x: fc.all_reduce(x, "d"), mesh)(np.zeros(mesh.size))
