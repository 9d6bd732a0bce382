"""Values of device 0, on all processes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.array import Array
from ..collectives.functions import broadcast
from ..compiler.jit import jit
from ..compiler.placement import device_put, from_local
from ..core.mesh import Mesh
from ..core.partition_spec import P

__all__ = ["on_all_devices"]


def on_all_devices(mesh: Mesh, values: Sequence[Any]) -> list[Array]:
    """Return the values of device 0 as Arrays that are whole on every device. All processes must call it, with equal types."""
    if mesh.is_fully_addressable:
        return [device_put(value, mesh, P()) for value in values]
    axes = mesh.axis_names
    blocks = [from_local(np.asarray(value)[None], mesh, P(axes)) for value in values]
    first = jit(lambda xs: [broadcast(x[0], axes, root=0) for x in xs], mesh=mesh, in_specs=(P(axes),), out_specs=P())
    return first(blocks)
