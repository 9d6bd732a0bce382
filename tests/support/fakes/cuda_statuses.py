"""Launches that end in the middle, simulated: what the host is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.transports.cuda.virtual_devices import VirtualGpuTransport
from tests.support.cases.process_cases import virtual
from tests.support.fakes.cuda_simulation import SimulatedGpu


def said(action: Callable[[], Any]) -> str:
    """What an action is told."""
    try:
        found = action()
    except fc.FunccollError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing" if found is None else f"nothing {np.asarray(found).tolist()}"


def told(case: str) -> list[str]:
    """What is told by one collective that goes well, one that does not, and what comes after it."""
    gpu = SimulatedGpu(1)
    gpu.max_blocks = 2
    transport = VirtualGpuTransport(gpu)
    n = 3 if case == "too many" else 2
    mesh = Mesh({"d": n}, virtual({"d": n}).devices, transport=transport)
    step = fc.jit(lambda x: fc.all_reduce(x, "d", algorithm="ring"), mesh=mesh, in_specs=P("d"), out_specs=P())
    x = np.arange(2.0 * n)
    found = [said(lambda: step(x))]
    if case == "too many":
        return found
    found.append(said(transport.device.check))
    if case == "absent":
        gpu.absent = {1}
    elif case == "word":
        transport.device.reports._ended[0] = 1
    step(x)
    gpu.absent = set()
    return [*found, said(transport.device.check), said(lambda: step(x)), said(transport.device.check)]
