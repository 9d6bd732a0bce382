"""Kernels with one fault each, in Numba's simulator: `python cuda_simulation_faults.py` prints how it refuses each of them.

Most would give the right bits where threads happen to run one after another. Each runs in a fork: it ends the process.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable

import cuda_simulation
import numpy as np
from process_cases import virtual

import funccoll as fc
from funccoll import P
from funccoll.kernels import block
from funccoll.mesh import Mesh
from funccoll.runtime.cuda.virtual_devices import VirtualGpuBackend

MEMORY = cuda_simulation.MEMORY
SOURCE = inspect.getsource(block.run)


def source(text: str) -> Callable[[], None]:
    """A fault in the text of `block.run`."""

    def break_it() -> None:
        exec(compile(text, block.__file__, "exec"), vars(block))

    assert text != SOURCE
    return break_it


def without_barrier(number: int) -> Callable[[], None]:
    found = list(re.finditer(r" barrier\(\)", SOURCE))
    assert len(found) == 4
    at = found[number]
    return source(f"{SOURCE[: at.start()]} pass{SOURCE[at.end() :]}")


def memory(name: str, other: str) -> Callable[[], None]:
    """One memory operation in the place of another."""
    return lambda: MEMORY.update({name: MEMORY[other]})


LAST = SOURCE.rindex("        barrier()\n")
FAULTS: dict[str, Callable[[], None]] = {
    **{f"without barrier {number}": without_barrier(number) for number in range(4)},
    "two barriers": source(
        SOURCE[:LAST] + "        if thread == 0:\n            barrier()\n        else:\n            barrier()\n"
        + SOURCE[LAST + len("        barrier()\n") :]
    ),
    "a thread leaves": source(SOURCE[:LAST] + "        if thread == 1:\n            break\n" + SOURCE[LAST:]),
    "a plain store for the release": memory("store_release_gpu", "store"),
    "a plain load for the acquire": memory("load_acquire_gpu", "load"),
    "a report for the GPU alone": memory("store_release_sys", "store_release_gpu"),
    "a release in shared memory": source(SOURCE.replace("store(frame + 8 * STATUS", "store_release(frame + 8 * STATUS")),
}  # fmt: skip


def run() -> None:
    """An all_reduce that goes well, and one of which a block never comes, so that the other reports it."""
    gpu = cuda_simulation.SimulatedGpu(1)
    mesh = Mesh({"d": 2}, virtual({"d": 2}).devices, backend=VirtualGpuBackend(gpu))
    step = fc.jit(lambda x: fc.all_reduce(x, "d", algorithm="ring"), mesh=mesh, in_specs=P("d"), out_specs=P())
    x = np.arange(40, dtype=np.float32)
    for _ in range(8):  # some waits read exactly what they wait for, and not a later release
        assert np.array_equal(np.asarray(step(x)), x[:20] + x[20:])
    gpu.absent = {1}
    step(x)


def told(fault: Callable[[], None]) -> str:
    """The exit status of a process that runs with the fault, and the assertion that ended it."""
    with tempfile.TemporaryFile() as out:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, of which the fork needs none
            child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 2)
            try:
                fault()
                run()
            finally:
                os._exit(0)  # a fault that is found has ended it before
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        found = re.search(r"^AssertionError: (.*)", out.read().decode(), re.M)
        return f"{status}: {found[1] if found else 'nothing'}"


if __name__ == "__main__":
    sys.setswitchinterval(1e-5)  # the simulator's threads wait for each other by polling
    for name, fault in {"no fault": lambda: None, **FAULTS}.items():
        print(f"{name}: {told(fault)}", flush=True)
