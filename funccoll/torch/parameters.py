"""Parameters of a torch module: the places of their gradients, and the order of their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import ModuleError, ShapeError
from .tensor_memory import HostMemory
from .tensors import dtype_of

__all__ = ["ADDED", "BEGUN", "USED", "GradientSlot", "array_order"]

USED, BEGUN, ADDED = 1, 2, 4
"""Bits of `GradientSlot.new`: there is a new gradient; it is a new tensor; one pass has added it to a reduced gradient."""

_STRIDED = torch.strided
_REDUCED = "_funccoll_reduced"
"""Attribute of a reduced gradient: its version at that time."""


class GradientSlot:
    """A parameter, with all that the reduction of its gradient needs."""

    def __init__(self, name: str, parameter: torch.nn.Parameter, sparse: bool, memory: HostMemory):
        self.name, self.parameter, self.sparse, self.memory = name, parameter, sparse, memory
        self.shape, self.torch_dtype = parameter.shape, parameter.dtype
        self.dtype = dtype_of(parameter.dtype, f"parameter {name!r}")
        self.order = array_order(parameter)
        """The dimensions by falling strides if memory is dense in another order than C's. Gradients have the same order."""
        self.inverse = None if self.order is None else np.argsort(self.order).tolist()
        self.block_shape = tuple(self.shape if self.order is None else [self.shape[d] for d in self.order])
        self.new = 0
        """Bits of the gradient that `local` returned last; 0 if it was still the result of the reduction before."""
        self._read = memory.reader(parameter.dtype)
        self._copies = not sparse and memory.copies(parameter)
        self._block: Any = None
        self._zeros: Any = None

    def local(self) -> Any:
        """Return this rank's gradient: an array in the order of its memory, zeros if there is none, or a sparse tensor."""
        gradient = self.parameter.grad
        if gradient is None:
            self.new, self._block = 0, None
            return self.zeros()
        reduced = getattr(gradient, _REDUCED, None)
        if reduced is None:
            self.new = USED | BEGUN
        else:  # more writes than one may be zero_grad(set_to_none=False), or clip it
            since = gradient._version - reduced
            self.new = 0 if since == 0 else USED | ADDED if since == 1 else USED
        if self.sparse:
            self.new &= USED  # autograd adds it to a new tensor
            return gradient
        if gradient.dtype is not self.torch_dtype or gradient.layout is not _STRIDED:
            raise self._refusal(gradient)
        if self.order is not None:
            if gradient.shape != self.shape:
                raise self._refusal(gradient)
            gradient = gradient.permute(self.order)
        block = self._read(gradient)
        writes = self._copies and block is not None and not gradient.requires_grad and block.flags.c_contiguous
        if block is None:
            block = self.memory.as_array(gradient)
        if block.shape != self.block_shape:  # quicker than a tensor's shape
            raise self._refusal(gradient)
        self._block = block if writes else None
        return block

    def _refusal(self, gradient: torch.Tensor) -> Exception:
        """Make the error of a gradient that cannot be reduced."""
        if gradient.shape != self.shape or gradient.dtype is not self.torch_dtype:
            return ShapeError(
                f"the gradient of {self.name!r} is {gradient.dtype}{list(gradient.shape)}, and the parameter was "
                f"{self.torch_dtype}{list(self.shape)} when it was wrapped. Wrap the module again after such a change."
            )
        return ModuleError(
            f"the gradient of {self.name!r} is sparse, as only those of embeddings with sparse=True are expected to be. "
            "Make it dense in a hook of the parameter."
        )

    def zeros(self) -> Any:
        """Return the value that stands for no gradient; None if it is sparse."""
        if self._zeros is None and not self.sparse:
            self._zeros = self.memory.upload(np.zeros(self.block_shape, self.dtype))
        return self._zeros

    def take(self, result: Any) -> None:
        """Make a reduced block the gradient."""
        gradient: Any = self.parameter.grad
        if self._block is not None and gradient is not None:  # it may have been taken away in flight
            self.memory.write(self._block, result)
            self._block = None
        else:
            gradient = result if self.sparse else self.memory.new_tensor(result)
            if self.inverse is not None:
                gradient = gradient.permute(self.inverse)
            self.parameter.grad = gradient
        setattr(gradient, _REDUCED, gradient._version)


def array_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions by falling strides of a tensor that is dense in another order than C's; else None."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    return order if tensor.permute(order).is_contiguous() else None
