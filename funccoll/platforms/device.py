"""Devices of a process, for the compiler: the place of their arrays, and the execution of compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..core.ir import Program

if TYPE_CHECKING:
    from .array_library import ArrayLibrary

__all__ = ["Copies", "Device", "GpuDevice", "Run"]

Copies = Any
"""The values of a variable that a process holds: one array, or a list in the order of `mesh.copy_coordinates` if there are
several."""

Run = Callable[..., Sequence[Copies]]
"""A compiled program, from the copies of each input to those of each output."""


class Device(Protocol):
    """The device, or devices, on which a process computes. All differences between host memory and a GPU are here."""

    @property
    def library(self) -> ArrayLibrary:
        """Return the library of the blocks, which computes between collectives."""
        ...

    @property
    def allocate(self) -> Callable[[tuple[int, ...], np.dtype], Any]:
        """Return the function that makes a C-contiguous array with undefined values, of (shape, dtype). It may raise
        MemoryError.

        Large operands of collectives are computed into it, because peers may read it in place.
        """
        ...

    def new_block(self, value: Any) -> Any:
        """Return a copy of an array (of NumPy or of the library) in memory from `allocate`, as the block of an Array."""
        ...

    def wait(self) -> None:
        """Wait until the results of all calls so far are there. Raise their errors."""
        ...

    def record(self, run: Run, program: Program) -> Run:
        """Return a compiled program in the form that is executed: itself, or a recording that is replayed."""
        ...

    def execution(self, run: Run) -> str:
        """Say how calls of a program from `record` are executed. If they could be recorded and are not, say why."""
        ...


class GpuDevice:
    """This process's GPU, for collectives of several processes.

    `gpu` has `allocate`, `library` and `wait`. `check` raises the errors of calls so far, after a wait for the GPU. `settle`
    waits for the GPU, if that takes more than `gpu.wait`.
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
