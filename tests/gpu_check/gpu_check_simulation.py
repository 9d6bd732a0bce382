"""Trials of `gpu-check` on a GPU that is CuPy's fake, with simulated kernels: the whole way to a GPU, without one.

`main("MODULE:FUNCTION", ARGUMENTS, DTYPE...)` runs one; the dtypes are those of `process_cases.table`. With "trials" in the
place of MODULE:FUNCTION the arguments are a list of trials, each [MODULE:FUNCTION, ARGUMENTS]. Nothing is timed, and a fused
kernel of CuPy's is not simulated. It puts fakes in the places of modules, so it is a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from funccoll.kernels import cuda_compiler
from funccoll.kernels.cuda import Combine, Scope
from funccoll.kernels.cuda_compiler import Kernel, Operations
from funccoll.kernels.kernel_context import WORD
from tests.gpu_check import gpu_trial
from tests.support.cases import process_cases
from tests.support.cases.collective_cases import dtypes_of
from tests.support.fakes import cuda_simulation, fake_cuda, fake_cupy
from tests.support.fakes.fake_cublas import FakeCublas


def load_kernel(combines: Sequence[Combine], cc: tuple[int, int], scope: Scope) -> tuple[str, bytes]:
    """A kernel whose "machine code" is its combines: launched, the simulator executes it on the contexts at its address."""
    code = repr((scope, [(op, dtype.name) for op, dtype in combines])).encode()

    def run(grid: Any, address: int, table: int) -> None:
        words = (ctypes.c_int64 * (grid[0] * WORD.size)).from_address(address)
        GPU.launch_at(combines, grid[0], np.ctypeslib.as_array(words), table, scope)

    fake_cuda.Module.kernels[code] = {"run": run}
    return "run", code


def compile_template(template: Any, arguments: int, cc: tuple[int, int]) -> Kernel:
    """A kernel of a template, whose "machine code" is its number: launched, the simulator executes it."""
    operations = Operations(cuda_simulation.MACHINE, cuda_simulation.MEMORY)
    kernel = template(operations)

    def run(grid: Any, *given: int) -> None:
        assert len(given) == arguments
        launch = cuda_simulation.Launch(kernel, grid[0], cuda_simulation.THREADS, ordered=False)  # some have faults
        launch.step(0, grid[0], *given)
        GPU.steps += 1

    code = f"kernel {len(fake_cuda.Module.kernels)}".encode()
    fake_cuda.Module.kernels[code] = {"simulated": run}
    return Kernel("simulated", code, "", "")


def fake_cupy_array(x: np.ndarray) -> Any:
    """`cupy.asarray` of a host array."""
    block = fake_cupy.empty(x.shape, x.dtype)
    block.set(np.asarray(x, order="C"))
    return block


GPU = cuda_simulation.SimulatedGpu(1)


def fake_a_gpu() -> None:
    """Put the fakes in the places of CuPy and of the kernel."""
    sys.modules.update(fake_cuda.modules())
    fake_cupy.cuda.runtime.memGetInfo = lambda: (fake_cupy.free_bytes, fake_cupy.free_bytes)
    kernels: Any = importlib.import_module("funccoll.platforms.gpu.cupy_kernels")
    kernels.CupyKernels = fake_cupy.Kernels
    cupy_gpu: Any = importlib.import_module("funccoll.platforms.gpu.cupy_gpu")
    cupy_gpu.load_kernel = load_kernel
    cublas: Any = importlib.import_module("funccoll.platforms.gpu.cublas")
    cublas.find_library = lambda version: FakeCublas()
    blocks: Any = importlib.import_module("funccoll.kernels.cuda")
    blocks.compile_template = cuda_compiler.compile_template = compile_template
    cuda_compiler.THREADS = cuda_simulation.THREADS
    probe: Any = importlib.import_module("tests.gpu_check.gpu_probe")
    probe.barrier_sync = lambda: cuda_simulation.barrier
    gpu_trial.driver = lambda: "CUDA 13.0"
    gpu_trial.gpu_seconds = lambda call, times: [(call(), 1e-3)[1] for _ in range(2)]


def early_release() -> None:
    """The ping-pong of a GPU whose blocks release a word before what they wrote can be seen."""
    memory = cuda_simulation.MEMORY
    name = "store_release_gpu"
    kept, memory[name] = memory[name], lambda address, value: cuda_simulation.store(address, value + 1)
    try:
        importlib.import_module("tests.gpu_check.gpu_probe").ping_pong(4, 0, 12)
    finally:
        memory[name] = kept


def main(function: str, arguments: list[Any], *names: str) -> None:
    fake_a_gpu()
    dtypes: Any = [np.dtype(name) for name in names]
    process_cases.FEW[:] = dtypes
    process_cases.dtypes_of = lambda case: [d for d in dtypes_of(case) if d in dtypes]
    vars(fake_cupy)["asarray"] = fake_cupy_array
    for trial, given in arguments if function == "trials" else [(function, arguments)]:
        function = gpu_trial.function_of(trial)
        if trial.startswith("gpu_speed:"):
            vars(sys.modules[function.__module__])["_fused"] = lambda most, nbytes: [1e-6] * 3
        function(*given)
    print(f"{GPU.steps} steps of the simulator")
