"""Whole programs on a simulated GPU: CuPy's fake computes, `cuda_simulation` runs the kernel, `CupyGpu` drives both.

It puts fakes in the places of modules, so it is a process of its own. Programs use the public interface, meshes with
device="cuda". Each is called three times: kernel by kernel, captured as a CUDA graph, and replayed with other arguments.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import numpy as np

import funccoll as fc
from funccoll.config import FUSE
from funccoll.job.handshake import installation
from funccoll.kernels.kernel_context import WORD
from tests.support.fakes import cuda_simulation, fake_cuda, fake_cupy
from tests.support.fakes.fake_cublas import FakeCublas
from tests.support.fakes.thread_order import SHARED_WITH_OTHERS

sys.modules.update(fake_cuda.modules())

from funccoll.platforms.gpu import cublas, cupy_gpu
from funccoll.platforms.gpu.captured_program import CapturedProgram
from funccoll.transports.cuda import virtual_devices

os.environ[FUSE] = "0"  # a GPU computes as NumPy does, one operation at a time
installation.cache_clear()  # ranks compare it


def install(simulated: cuda_simulation.SimulatedGpu) -> None:
    """Let `CupyGpu` launch the kernel in the simulator."""

    def load_kernel(combines: Any, cc: Any, scope: Any) -> tuple[str, bytes]:
        code = repr((combines, scope)).encode()

        def run(grid: Any, contexts: int, table: int) -> None:
            words = grid[0] * WORD.size
            rows = np.ndarray((words,), np.int64, (ctypes.c_int64 * words).from_address(contexts))
            simulated.launch_at(combines, grid[0], rows, table, scope)

        fake_cuda.Module.kernels[code] = {"run_blocks": run}
        return "run_blocks", code

    host_words = cupy_gpu.CupyGpu.host_words

    def noted(gpu: Any, count: int) -> tuple[np.ndarray, int]:
        words, address = host_words(gpu, count)
        SHARED_WITH_OTHERS[address] = address + words.nbytes
        simulated.host.append(words)
        return words, address

    cupy_gpu.CupyGpu.host_words = noted
    vars(cupy_gpu).update(load_kernel=load_kernel, CupyKernels=fake_cupy.Kernels)
    vars(cublas).update(find_library=lambda version: FakeCublas())


class PublicInterface(cuda_simulation.Simulated):
    """Both kinds of meshes, and what graphs do; every second program is launched, if it is one collective."""

    replays = launches = 0

    def mesh(self, axes: dict[str, int]) -> Any:
        return fc.make_mesh(axes, device="cuda")

    def __call__(self, fn: Any, axes: Any, args: Any, in_specs: Any, out_specs: Any) -> None:
        self.programs += 1
        virtual_devices.LAUNCHED_BYTES = 0 if self.programs % 2 else 1 << 25
        meshes = fc.make_mesh(axes), self.mesh(axes)
        runs = [fc.jit(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs) for mesh in meshes]
        rolled = fc.tree.map(lambda x: np.roll(np.asarray(x), 1), args)
        calls = [args, args, rolled, args]
        results = [[fc.tree.leaves(run(*given)) for given in calls] for run in runs]  # read when all have been called
        for wanted, found in zip(*results, strict=True):
            for w, f in zip(wanted, found, strict=True):
                assert w.dtype == f.dtype
                for device, (want, have) in enumerate(zip(w.shards, f.shards, strict=True)):
                    bits = [np.ascontiguousarray(x).tobytes() for x in (want, have.get())]
                    assert bits[0] == bits[1], (fn, axes, device, want, have.get())
        for compiled in runs[1].dispatcher.executables:
            if not isinstance(compiled._run, CapturedProgram):
                self.launches += 1
                assert compiled.execution == "one launch"
                continue
            assert compiled._run.why_not is None, compiled._run.why_not
            self.replays += compiled._run.is_captured


def main(case: str, n: int, seed: int, *names: str) -> None:
    """Run a case of `process_cases` on n devices."""
    gpu = cuda_simulation.SimulatedGpu(seed)
    install(gpu)
    same = PublicInterface(gpu)
    cuda_simulation.run_case(case, n, same, *names)
    assert same.replays + same.launches == same.programs, (same.replays, same.launches, same.programs)
    assert same.replays and (same.launches or case != "collectives"), (case, same.launches)
