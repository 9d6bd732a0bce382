"""The GPU of a process, as NCCL's transport uses it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ...platforms.array_library import ArrayLibrary

__all__ = ["GpuEvent", "NcclGpu"]


class GpuEvent(Protocol):
    """A place in a stream."""

    @property
    def done(self) -> bool:
        """True once the stream has reached it. Raises if the GPU has failed."""
        ...


class NcclGpu(Protocol):
    """This process's GPU, or a fake: memory, and the current stream.

    Its arrays have `reshape`, `transpose`, assignment to slices and division by a number, in the order of the stream.
    """

    bus_id: str
    """The PCI bus id, or the name of a partition of a GPU. It is equal in two processes that use the same one."""

    @property
    def library(self) -> ArrayLibrary:
        """The library of its arrays."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new C-contiguous array with undefined values. Raises MemoryError."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array of zeros."""
        ...

    def contiguous(self, value: Any) -> Any:
        """Return a C-contiguous array of a value: a copy of a scalar or a view, or the array itself."""
        ...

    def address(self, array: Any) -> int:
        """Return the address of an array's first element."""
        ...

    def wait(self) -> None:
        """Wait until all that was enqueued so far has ended."""
        ...

    def stream(self) -> int:
        """Return the current stream's pointer, after that stream waits for the one that was current in the call before."""
        ...

    def record(self) -> GpuEvent:
        """Record an event in the current stream."""
        ...

    def begin_watch(self) -> None:
        """Let the calling thread query events of this GPU, even while other threads capture graphs: that does not end a
        capture."""
        ...
