"""Devices of a process, as the compiler sees them: where their arrays are, and how compiled programs run there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..core.ir import Program

if TYPE_CHECKING:
    from .array_library import ArrayLibrary

__all__ = ["Copies", "Device", "GpuDevice", "Run"]

Copies = Any
"""The values that a process holds of a variable: one array where there is one, else a list in the order of
`mesh.copy_coordinates`."""

Run = Callable[..., Sequence[Copies]]
"""A compiled program: from the copies of each input to those of each output."""


class Device(Protocol):
    """The device, or devices, on which a process computes: what differs between host memory and a GPU."""

    @property
    def library(self) -> ArrayLibrary:
        """The library of the blocks, which computes between collectives."""
        ...

    @property
    def allocate(self) -> Callable[[tuple[int, ...], np.dtype], Any]:
        """The function that makes a C-contiguous array with undefined values, of (shape, dtype). It raises MemoryError.

        Large operands of collectives are computed into it: peers may read it in place.
        """
        ...

    def new_block(self, value: Any) -> Any:
        """Return a copy of an array, of NumPy's or of the library's, in memory from `allocate`: the block of an Array."""
        ...

    def wait(self) -> None:
        """Wait until the results of all calls so far are there. Raises what went wrong in them."""
        ...

    def record(self, run: Run, program: Program) -> Run:
        """Return a compiled program as it is executed: itself, or a recording of it that is replayed."""
        ...

    def execution(self, run: Run) -> str:
        """Return how calls of a program from `record` are executed, in words; and why not recorded, where they might be."""
        ...


class GpuDevice:
    """This process's GPU, on which collectives of several processes run.

    gpu: it, with `allocate`, `library` and `wait`. check: raises what has gone wrong in calls so far, after the GPU was waited
    for. settle: waits for the GPU, where that takes more than `gpu.wait`.
    """

    def __init__(self, gpu: Any, check: Callable[[], None], settle: Callable[[], None] | None = None):
        self.gpu, self.check, self._settle = gpu, check, settle or gpu.wait

    @property
    def library(self) -> ArrayLibrary:
        """See `Device`."""
        return self.gpu.library

    @property
    def allocate(self) -> Callable[..., Any]:
        """See `Device`."""
        return self.gpu.allocate

    def new_block(self, value: Any) -> Any:
        """See `Device`."""
        block = self.library.upload(value) if isinstance(value, (np.ndarray, np.generic)) else value
        return self.library.copy(block) if block is value else block

    def wait(self) -> None:
        """See `Device`."""
        self._settle()
        self.check()
        self.library.check()

    def record(self, run: Run, program: Program) -> Run:
        """See `Device`."""
        return run

    def execution(self, run: Run) -> str:
        """See `Device`."""
        return "kernel by kernel: the hosts agree before each collective, which a CUDA graph could not do"
