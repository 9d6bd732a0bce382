"""A rank of a job whose ranks share one GPU, by the kernel over peer memory: `funccoll run -n 2 torch_gpu_shared.py`.

The kernel is simulated, on the memory of CuPy's fake; everything else is as in `torch_gpu_cases`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch

import funccoll as fc
from funccoll.kernels.kernel_context import WORD
from tests.support.cases import torch_gpu_cases as cases
from tests.support.fakes import fake_cuda, fake_nccl, peer_simulation


def install(simulated: peer_simulation.PeerSimulatedGpu) -> None:
    """Let `CupyGpu` launch the kernel in the simulator, and map the simulator's segments; all ranks name one GPU."""
    cases.begin()
    fake_cuda.Device.pci_bus_id = "0000:07:00.0"
    from funccoll.platforms.gpu import cupy_gpu

    def load_kernel(combines: Any, cc: Any, scope: Any) -> tuple[str, bytes]:
        code = repr((scope, [(op, dtype.name) for op, dtype in combines])).encode()

        def run(grid: Any, address: int, table: int) -> None:
            words = (ctypes.c_int64 * (grid[0] * WORD.size)).from_address(address)
            simulated.launch_at(combines, grid[0], np.ctypeslib.as_array(words), table, scope)

        fake_cuda.Module.kernels[code] = {"run": run}
        return "run", code

    cases.put(cupy_gpu, load_kernel=load_kernel)
    for name in ("segment", "free_segment", "open_segment", "close_segment"):
        setattr(cupy_gpu.CupyGpu, name, lambda self, *arguments, call=getattr(simulated, name): call(*arguments))


def main() -> None:
    """Train modules of several buckets and of one, of two dtypes, as on the CPU."""
    install(peer_simulation.PeerSimulatedGpu(7 + fc.rank()))
    for dtype, steps, options in ((torch.float32, 2, {"bucket_cap_mb_list": [1e-6]}), (torch.bfloat16, 1, {})):
        pair = cases.Pair(functools.partial(cases.mlp, 4, 2, dtype), dtype, **options)
        for step in range(steps):
            pair.backward(step)
            pair.same()
            pair.update()
        memory: Any = pair.there._memory
        assert memory.mesh.transport.shares_gpus and not fake_nccl._calls
    print("trained", flush=True)
