"""Launches that end in the middle, in Numba's simulator: what the host is told. `python cuda_statuses.py CASE...` prints it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from cuda_simulation import SimulatedGpu
from process_cases import virtual

import funccoll as fc
from funccoll import P
from funccoll.mesh import Mesh
from funccoll.runtime.cuda.virtual_devices import VirtualGpuBackend


def told(action: Any) -> None:
    """Print what an action is told."""
    try:
        found = action()
    except fc.FunccollError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("nothing", *([] if found is None else [np.asarray(found).tolist()]))


def run(case: str) -> None:
    """One collective that goes well, one that does not, and what comes after it."""
    print(f"-- {case}")
    gpu = SimulatedGpu(1)
    gpu.max_blocks = 2
    backend = VirtualGpuBackend(gpu)
    n = 3 if case == "too many" else 2
    mesh = Mesh({"d": n}, virtual({"d": n}).devices, backend=backend)
    step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    x = np.arange(2.0 * n)
    told(lambda: step(x))
    if case == "too many":
        return
    told(backend.check)
    if case == "absent":
        gpu.absent = {1}
    elif case == "word":
        backend.reports._ended[0] = 1
    step(x)
    gpu.absent = set()
    told(backend.check)
    told(lambda: step(x))
    told(backend.check)


if __name__ == "__main__":
    sys.setswitchinterval(1e-5)  # the simulator's threads wait for each other by polling
    for case in sys.argv[1:]:
        run(case)
