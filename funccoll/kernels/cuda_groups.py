"""Machine code of groups for GPUs: LLVM makes PTX of the text of `native/gpu_group`, and nvJitLink assembles it.

It needs no GPU.
"""

from __future__ import annotations

import hashlib

from ..config import FUSE
from ..errors import DeviceError
from .cuda_compiler import Kernel, assemble, kept_kernel
from .cuda_toolkit import load_compilers
from .native.gpu_group import GpuGroup
from .native.ptx_code import TARGET, ptx_of

__all__ = ["compile_group", "load_group"]

_OLDEST = int(TARGET[3:-1]), int(TARGET[-1])


def load_group(group: GpuGroup, cc: tuple[int, int]) -> bytes:
    """Return the machine code of a group's kernels for a compute capability, compiled once on a machine. Raise DeviceError."""
    if cc < _OLDEST:
        raise DeviceError(
            f"fused kernels need a GPU of compute capability {_OLDEST[0]}.{_OLDEST[1]}, and this one has {cc[0]}.{cc[1]}. "
            f"Unset {FUSE}: CuPy then computes each operation."
        )
    what = hashlib.sha256(group.text.encode()).hexdigest()[:32]
    return kept_kernel("group", [what], cc, lambda: compile_group(group, cc))[1]


def compile_group(group: GpuGroup, cc: tuple[int, int]) -> Kernel:
    """Compile a group's kernels for a compute capability: some tens of milliseconds. Raise DeviceError without nvJitLink."""
    ptx = ptx_of(group.text)
    try:
        load_compilers()
        code, log = assemble(ptx, cc)
    except ImportError as error:
        raise DeviceError(
            f"fused kernels of a GPU are assembled by CUDA's nvJitLink, and it is missing: {error}. "
            f"pip install 'funccoll[cuda13]' (with a driver for CUDA 12: 'funccoll[cuda12]')."
        ) from error
    return Kernel(group.launches[0].name, code, ptx, log)
