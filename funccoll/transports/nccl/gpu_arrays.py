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
        """True when the stream has come to it. Raises when the GPU has failed."""
        ...


class NcclGpu(Protocol):
    """This process's GPU, or a fake: memory, and the current stream.

    Its arrays have `reshape`, `transpose`, assignment to slices and division by a number, in the order of the stream.
    """

    bus_id: str
    """The PCI bus id, or what names a partition of a GPU: equal in two processes when they use the same."""

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
        """Return a C-contiguous array of a value, which may be a scalar or a view: itself where it is one."""
        ...

    def address(self, array: Any) -> int:
        """Return the address of an array's first element."""
        ...

    def wait(self) -> None:
        """Wait until all that was enqueued so far has ended."""
        ...

    def stream(self) -> int:
        """Return the current stream's pointer, when it waits for the stream that was current in the call before."""
        ...

    def record(self) -> GpuEvent:
        """Record an event in the current stream."""
        ...

    def begin_watch(self) -> None:
        """Let the calling thread ask for events of this GPU, also while other threads capture graphs: it ends no capture."""
        ...
