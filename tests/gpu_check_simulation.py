"""A trial of `gpu-check` on a GPU that is CuPy's fake, with kernels in Numba's simulator: the whole way to a GPU, without one.

`python gpu_check_simulation.py MODULE:FUNCTION ARGUMENTS DTYPE...` runs it; the dtypes are those of `process_cases.table`.
Nothing is timed, and a fused kernel of CuPy's is not simulated. It sets NUMBA_ENABLE_CUDASIM, so it is a process of
its own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import cuda_simulation  # first: it sets NUMBA_ENABLE_CUDASIM
import fake_cuda
import fake_cupy
import gpu_trial
import numpy as np
import process_cases
from collective_cases import dtypes_of
from fake_cublas import FakeCublas

from funccoll.kernels import frame as fields
from funccoll.kernels.cuda import Combine


def load_kernel(combines: Sequence[Combine], cc: tuple[int, int]) -> tuple[str, bytes]:
    """A kernel whose "machine code" is its combines: launched, the simulator executes it on the frames at its address."""
    code = repr([(op, dtype.name) for op, dtype in combines]).encode()

    def run(grid: Any, address: int) -> None:
        words = (ctypes.c_int64 * (grid[0] * fields.FRAME_WORDS)).from_address(address)
        GPU.launch(combines, grid[0], np.ctypeslib.as_array(words))

    fake_cuda.Module.kernels[code] = run
    return "run", code


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
    kernels: Any = importlib.import_module("funccoll.runtime.cuda.cupy_kernels")
    kernels.CupyKernels = fake_cupy.Kernels
    cupy_gpu: Any = importlib.import_module("funccoll.runtime.cuda.cupy_gpu")
    cupy_gpu.load_kernel = load_kernel
    cublas: Any = importlib.import_module("funccoll.runtime.cuda.cublas")
    cublas.find_library = lambda version: FakeCublas()
    gpu_trial.driver = lambda: "CUDA 13.0"
    gpu_trial.gpu_seconds = lambda call, times: [(call(), 1e-3)[1] for _ in range(2)]


def main(function: str, arguments: str, *names: str) -> None:
    sys.setswitchinterval(1e-5)  # the simulator's threads wait for each other by polling
    fake_a_gpu()
    dtypes: Any = [np.dtype(name) for name in names]
    process_cases.FEW[:] = dtypes
    process_cases.dtypes_of = lambda case: [d for d in dtypes_of(case) if d in dtypes]
    vars(fake_cupy)["asarray"] = fake_cupy_array
    module, _, name = function.partition(":")
    found = importlib.import_module(module)
    if module == "gpu_speed":
        found._fused = lambda most, nbytes: [1e-6] * 3
    getattr(found, name)(*json.loads(arguments))
    print(f"{GPU.steps} steps of the simulator")


if __name__ == "__main__":
    main(*sys.argv[1:])
