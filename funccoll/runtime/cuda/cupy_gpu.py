"""A GPU through CuPy: memory of its pool, and launches on its current stream. Importing it needs CuPy.

It was written without a GPU, and has never run on one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import driver, function  # pyright: ignore[reportMissingImports]

from ...errors import MeshError
from ...kernels.cuda import THREADS, Combine, load_kernel

__all__ = ["CupyGpu"]


class CupyGpu:
    """The current device of CuPy. See `virtual_devices.Gpu`."""

    def __init__(self) -> None:
        device = cupy.cuda.Device()
        capability = str(device.compute_capability)
        self._cc = int(capability[:-1]), int(capability[-1])
        self.max_blocks = int(device.attributes["MultiProcessorCount"])

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """See `Gpu`."""
        try:
            return cupy.empty(shape, dtype)
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(f"the GPU has not enough memory for an array of shape {shape}, {dtype}: {error}") from None

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """See `Gpu`."""
        array = self.allocate(shape, dtype)
        array.fill(0)
        return array

    def contiguous(self, value: Any) -> Any:
        """See `Gpu`. A host value is copied."""
        return cupy.ascontiguousarray(cupy.asarray(value))

    def address(self, array: Any) -> int:
        """See `Gpu`."""
        return array.data.ptr

    def upload(self, to: Any, values: np.ndarray) -> None:
        """See `Gpu`. From pageable memory, which may change when this returns: the driver has copied it then."""
        to.set(values, stream=cupy.cuda.get_current_stream())

    def wait(self) -> None:
        """See `Gpu`."""
        cupy.cuda.get_current_stream().synchronize()

    def host_words(self, count: int) -> tuple[np.ndarray, int]:
        """See `Gpu`. All pinned memory has one address for host and kernels."""
        memory = cupy.cuda.alloc_pinned_memory(8 * count)
        words = np.frombuffer(memory, np.int64, count)
        words[:] = 0
        return words, memory.ptr

    def launch(self, combines: Sequence[Combine], blocks: int, frames: Any) -> None:
        """See `Gpu`."""
        kernel = self._function(tuple(combines))
        kernel((blocks,), (THREADS,), (np.int64(frames.data.ptr),), enable_cooperative_groups=True)

    @functools.cache  # noqa: B019  (there is one, as long as the process lives)
    def _function(self, combines: tuple[Combine, ...]) -> Any:
        (name, code), module = load_kernel(combines, self._cc), function.Module()
        module.load(code)
        found = module.get_function(name)
        if not driver.occupancyMaxActiveBlocksPerMultiprocessor(found.ptr, THREADS, 0):
            raise MeshError(f"a block of {THREADS} threads of the kernel does not fit into a multiprocessor of this GPU.")
        return found
