"""Kernels with one fault each, simulated: `said` of each is how the simulator refuses it.

Most would give the right bits where threads happen to run one after another.
"""

from __future__ import annotations

import inspect
import linecache
import re
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.kernels import block
from funccoll.transports.cuda.virtual_devices import VirtualGpuTransport
from tests.support.cases.process_cases import virtual
from tests.support.fakes.cuda_simulation import MEMORY, SimulatedGpu

SOURCE = inspect.getsource(block.run)


def source(text: str) -> AbstractContextManager[Any]:
    """A fault in the text of `block.run`, for as long as the context."""
    assert text != SOURCE
    file = f"<fault {hash(text)}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file  # where the simulator finds it
    scope = dict(vars(block))
    exec(compile(text, file, "exec"), scope)
    return mock.patch.object(block, "run", scope["run"])


def without_barrier(number: int) -> AbstractContextManager[Any]:
    found = list(re.finditer(r" barrier\(\)", SOURCE))
    assert len(found) == 4
    at = found[number]
    return source(f"{SOURCE[: at.start()]} pass{SOURCE[at.end() :]}")


def memory(name: str, other: str) -> AbstractContextManager[Any]:
    """One memory operation in the place of another."""
    return mock.patch.dict(MEMORY, {name: MEMORY[other]})


LAST = SOURCE.rindex("        barrier()\n")
FAULTS: dict[str, AbstractContextManager[Any]] = {
    **{f"without barrier {number}": without_barrier(number) for number in range(4)},
    "two barriers": source(
        SOURCE[:LAST]
        + "        if thread == 0:\n            barrier()\n        else:\n            barrier()\n"
        + SOURCE[LAST + len("        barrier()\n") :]
    ),
    "a thread leaves": source(SOURCE[:LAST] + "        if thread == 1:\n            break\n" + SOURCE[LAST:]),
    "a plain store for the release": memory("store_release_gpu", "store"),
    "a plain load for the acquire": memory("load_acquire_gpu", "load"),
    "a report for the GPU alone": memory("store_release_sys", "store_release_gpu"),
    "a release in shared memory": source(
        SOURCE.replace("store(context + CONTEXT.status", "store_release(context + CONTEXT.status")
    ),
}


def run() -> None:
    """An all_reduce that goes well, and one of which a block never comes, so that the other reports it."""
    gpu = SimulatedGpu(1)
    mesh = Mesh({"d": 2}, virtual({"d": 2}).devices, transport=VirtualGpuTransport(gpu))
    step = fc.jit(lambda x: fc.all_reduce(x, "d", algorithm="ring"), mesh=mesh, in_specs=P("d"), out_specs=P())
    x = np.arange(40, dtype=np.float32)
    for _ in range(8):  # some waits read exactly what they wait for, and not a later release
        assert np.array_equal(np.asarray(step(x)), x[:20] + x[20:])
    gpu.absent = {1}
    step(x)


def said(fault: AbstractContextManager[Any]) -> str:
    """The assertion that ends a run with the fault."""
    try:
        with fault:
            run()
    except AssertionError as error:
        return str(error)
    return "nothing"
