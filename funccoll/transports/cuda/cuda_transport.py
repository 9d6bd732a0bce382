"""The GPU of this process, or a sentence that says why there is none, and the transports of meshes on it."""

from __future__ import annotations

import functools
import os
from typing import Any

from ...core.mesh import Mesh
from ...errors import DeviceError
from ...runtime.transport import Transport
from ..shm.shm_transport import SharedMemoryTransport
from .virtual_devices import Gpu, VirtualGpuTransport

__all__ = ["IMPLEMENTATION", "current_gpu", "gpu_transport", "missing", "use_own"]


def missing(cupy: Any) -> str | None:
    """The reason why no GPU can be used through this CuPy, with the remedy; None if one can."""
    runtime = cupy.cuda.runtime
    driver, built = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if not driver:
        return 'this machine has no NVIDIA driver (libcuda.so.1): run where there is one, or leave out device="cuda"'
    if driver // 1000 < built // 1000:
        return (
            f"the driver is for CUDA {_version(driver)} and CuPy is built for CUDA {_version(built)}: "
            f"pip install 'funccoll[cuda{driver // 1000}]', or install a newer driver"
        )
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"the driver cannot be used: {error}; nvidia-smi says more"
    if not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f" that CUDA_VISIBLE_DEVICES={visible!r} shows"
        return f'this machine has no GPU{why}: run where there is one, or leave out device="cuda"'
    return None


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def use_own(cupy: Any, rank: int) -> int:
    """Make a rank's GPU the current one of this thread, and return its number: the program's choice, else one for each in turn.

    The first GPU does not count as a choice, because CuPy begins with it.
    """
    chosen = cupy.cuda.Device().id or rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(chosen).use()
    return chosen


@functools.lru_cache(maxsize=1)
def current_gpu(rank: int | None = None) -> Gpu:
    """Return this process's GPU through CuPy: the current one, or that of a rank of a job.

    Raises: DeviceError with what is missing, and the remedy.
    """
    try:
        import cupy  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise DeviceError(
            "device=\"cuda\" needs CuPy, which is not installed: pip install 'funccoll[cuda13]' (with a driver for CUDA 12: "
            "'funccoll[cuda12]'). `funccoll doctor` lists all parts."
        ) from None
    except ImportError as error:
        raise DeviceError(
            f"CuPy cannot be imported: {str(error).strip().splitlines()[0]} Install the one for this driver's CUDA: "
            "pip install 'funccoll[cuda13]' or 'funccoll[cuda12]'."
        ) from error
    problem = missing(cupy)
    if problem is not None:
        raise DeviceError(f'device="cuda" cannot be used: {problem}. `funccoll doctor` lists all parts.')
    if rank is not None:
        use_own(cupy, rank)
    from ...platforms.gpu.cupy_gpu import CupyGpu

    return CupyGpu()


def gpu_transport(mesh: Mesh, host: Transport | None) -> Transport:
    """Return the transport of a mesh on GPUs, beside its `host` transport.

    Raises: DeviceError if no GPU can be used.
    """
    if mesh.is_fully_addressable:
        return VirtualGpuTransport(current_gpu())
    from .job_gpus import JobGpuTransport  # here: a process alone needs no NCCL

    assert isinstance(host, SharedMemoryTransport)
    return JobGpuTransport(mesh, host, current_gpu(mesh.process))


IMPLEMENTATION = gpu_transport
