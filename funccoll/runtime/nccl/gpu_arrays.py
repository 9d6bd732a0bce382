"""Arrays of a GPU as NCCL takes them: flat memory, in which the blocks of a collective follow each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ...schedules.collective import Collective
from ..array_library import ArrayLibrary
from ..plans.operand import Operand

__all__ = ["FlatOperand", "GpuEvent", "NcclGpu"]


class GpuEvent(Protocol):
    """A place in a stream, as `cupy.cuda.Event` is one."""

    @property
    def done(self) -> bool:
        """True when the stream has come to it."""
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


@dataclass(frozen=True)
class FlatOperand:
    """One operand of a collective, and the flat memory in which its blocks follow each other, each row-major."""

    operand: Operand
    collective: Collective

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        return self.operand.dtype

    @cached_property
    def elements(self) -> int:
        """Elements of one block."""
        return math.prod(self.operand.shape) // self.collective.input_blocks

    @property
    def input_size(self) -> int:
        """Elements of the flat input."""
        return self.elements * self.collective.input_blocks

    @property
    def output_size(self) -> int:
        """Elements of the flat output."""
        return self.elements * self.collective.output_blocks

    def flat_input(self, value: Any, gpu: NcclGpu) -> Any:
        """The flat memory of an input: the array itself unless it is strided, or cut along another dimension than 0."""
        blocks, dim = self.collective.input_blocks, self.operand.dim
        if blocks > 1 and dim:
            shape = self.operand.shape
            value = value.reshape((*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :]))
            value = value.transpose((dim, *(d for d in range(len(shape) + 1) if d != dim)))
        flat = gpu.contiguous(value).reshape((self.input_size,))
        assert flat.dtype == self.dtype, f"an array of {flat.dtype}, and the call was compiled for {self.dtype}"
        return flat

    def shaped_output(self, flat: Any) -> Any:
        """The output of a collective from its flat memory."""
        blocks, dim, shape = self.collective.output_blocks, self.operand.concat_dim, self.operand.out_shape
        if blocks > 1 and dim:
            flat = flat.reshape((blocks, *shape[:dim], shape[dim] // blocks, *shape[dim + 1 :]))
            flat = flat.transpose((*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)))
        return flat.reshape(shape)
