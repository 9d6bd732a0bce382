"""Our own kernels for functions that CuPy lacks, on CuPy's arrays. Importing this module needs CuPy.

Tests run the kernels in a simulator, and this module on a fake of CuPy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import function  # pyright: ignore[reportMissingImports]

from ...kernels.cuda_compiler import THREADS
from ...kernels.cuda_compute import load_compute_kernel
from ...kernels.cuda_groups import load_group
from ...kernels.native.gpu_group import gpu_group
from ...kernels.native.group import FusedGroup
from ...kernels.native.thread_text import THREADS_OF_BLOCK

__all__ = ["CupyKernels"]

_BLOCKS_OF_MULTIPROCESSOR = 8
"""The most blocks of a launch for each multiprocessor: as many threads as one holds. Each thread then does several tasks."""


class CupyKernels:
    """Our own kernels on CuPy's current device and stream. Launches are asynchronous, and a graph can capture them.

    The first launch of each kernel, dtype and device loads machine code, so it must come before a capture.
    """

    def random_words(self, out: Any, key: Any, number: Any, purpose: int) -> None:
        """Fill `out`, uint64 and C-contiguous, with the words of NumPy's Philox for a counter [0, 0, number, purpose].

        `key` is uint64[2]. `number` is a 64-bit integer of shape (), or None for 0. See `primitives.randomness`.
        """
        assert out.dtype == key.dtype == np.uint64, (out.dtype, key.dtype)
        assert key.shape == (2,), key.shape
        assert number is None or (number.shape, number.dtype.itemsize) == ((), 8), (number.shape, number.dtype)
        assert all(array.flags.c_contiguous for array in (out, key))
        where = 0 if number is None else number.data.ptr
        self._launch("random_words", None, -(-out.size // 4), out.data.ptr, out.size, key.data.ptr, where, purpose)

    def scatter_add(self, out: Any, rows: Any, order: Any, values: Any) -> None:
        """Add `values` of shape (n, width) to rows of `out` in the order of the updates, with the bits of `np.add.at`.

        A stable sort has sorted `rows` (int64[n], each from 0 to below out's rows). `order` (int64[n]) has the numbers of the
        updates in that order. A NaN that an addition gives is the canonical one. All arrays are C-contiguous, without
        overlap.
        """
        count, width = values.shape
        assert out.dtype == values.dtype, (out.dtype, values.dtype)
        assert out.shape[1:] == (width,), (out.shape, values.shape)
        assert rows.dtype == order.dtype == np.int64, (rows.dtype, order.dtype)
        assert rows.shape == order.shape == (count,), (rows.shape, order.shape, values.shape)
        assert all(array.flags.c_contiguous for array in (out, rows, order, values))
        places = [array.data.ptr for array in (out, rows, order, values)]
        self._launch("scatter_add", values.dtype, values.size, *places, count, width)

    def copy_blocks(self, table: Any, pieces: Any) -> None:
        """Copy arrays. `table` (int64[n, 2]) has the address of each, and of its copy; these do not overlap.

        `pieces` (int64[m, 3]) comes from `pieces_of` for the arrays' sizes. Neither may change until the copies are made.
        """
        assert table.dtype == pieces.dtype == np.int64, (table.dtype, pieces.dtype)
        assert all(array.flags.c_contiguous for array in (table, pieces))
        self._launch("copy_blocks", None, THREADS * len(pieces), table.data.ptr, pieces.data.ptr, len(pieces))

    def group(self, group: FusedGroup, arrays: Sequence[Any]) -> None:
        """Compute a group (`kernels/native`). `arrays` are its inputs, its outputs, and a workspace, all C-contiguous."""
        launches, most = _load_group(group, cupy.cuda.Device().id)
        arguments = tuple(np.int64(array.data.ptr) for array in arrays)
        for kernel, blocks in launches:
            kernel((min(blocks, most),), (THREADS_OF_BLOCK,), arguments)

    def load_copies(self) -> None:
        """Load the kernel of `copy_blocks` before a capture."""
        _load("copy_blocks", None, cupy.cuda.Device().id)

    def _launch(self, name: str, dtype: np.dtype | None, tasks: int, *arguments: int) -> None:
        """Launch a kernel for a number of tasks, one for each thread. Launch nothing for 0 tasks."""
        if tasks:
            kernel, most = _load(name, dtype, cupy.cuda.Device().id)
            kernel((min(-(-tasks // THREADS), most),), (THREADS,), tuple(map(np.int64, arguments)))


@functools.cache
def _load(name: str, dtype: np.dtype | None, number: int) -> tuple[Any, int]:
    """Return a kernel for the current device, and the most blocks that are worth a launch there."""
    cc, most = _about(number)
    symbol, code = load_compute_kernel(name, dtype, cc)
    module = function.Module()
    module.load(code)
    return module.get_function(symbol), most


@functools.cache
def _load_group(group: FusedGroup, number: int) -> tuple[list[tuple[Any, int]], int]:
    """Return a group's kernels for the current device, each with the blocks of its launch, and the most that are worth one."""
    cc, most = _about(number)
    made, module = gpu_group(group), function.Module()
    module.load(load_group(made, cc))
    return [(module.get_function(launch.name), launch.blocks) for launch in made.launches], most


def _about(number: int) -> tuple[tuple[int, int], int]:
    """Return the compute capability of a device, and the most blocks of a launch there."""
    device = cupy.cuda.Device(number)
    capability = str(device.compute_capability)
    most = _BLOCKS_OF_MULTIPROCESSOR * int(device.attributes["MultiProcessorCount"])
    return (int(capability[:-1]), int(capability[-1])), most
