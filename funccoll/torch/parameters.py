"""Parameters of a torch module: where their gradients are, and how their memory is ordered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import ModuleError, ShapeError
from .tensors import as_array, as_tensor, dtype_of

__all__ = ["GradientSlot", "memory_order"]


class GradientSlot:
    """A parameter and what the reduction of its gradient needs to know."""

    def __init__(self, name: str, parameter: torch.nn.Parameter, sparse: bool):
        self.name, self.parameter, self.sparse = name, parameter, sparse
        self.shape, self.torch_dtype = parameter.shape, parameter.dtype
        self.dtype = dtype_of(parameter.dtype, f"parameter {name!r}")
        self.order = memory_order(parameter)
        """The dimensions by falling strides, where memory is dense in another order than C's: gradients have it, too."""
        self.inverse = None if self.order is None else np.argsort(self.order).tolist()
        self.block_shape = tuple(self.shape if self.order is None else [self.shape[d] for d in self.order])
        self.reduced_at = 0
        """Where the gradient was when it was reduced last."""
        self._zeros: np.ndarray | None = None

    def local(self) -> Any:
        """Return this rank's gradient: an array in the order of its memory, zeros where there is none; or a sparse tensor."""
        gradient = self.parameter.grad
        if self.sparse:
            return gradient
        if gradient is None:
            return self.zeros()
        if gradient.shape != self.shape or gradient.dtype is not self.torch_dtype:
            raise ShapeError(
                f"the gradient of {self.name!r} is {gradient.dtype}{list(gradient.shape)}, and the parameter was "
                f"{self.torch_dtype}{list(self.shape)} when it was wrapped. Wrap the module again after such a change."
            )
        if gradient.layout is not torch.strided:
            raise ModuleError(
                f"the gradient of {self.name!r} is sparse, as only those of embeddings with sparse=True are expected to be. "
                "Make it dense in a hook of the parameter."
            )
        return as_array(gradient if self.order is None else gradient.permute(self.order))

    def zeros(self) -> Any:
        """Return what counts as no gradient."""
        if self._zeros is None and not self.sparse:
            self._zeros = np.zeros(self.block_shape, self.dtype)
        return self._zeros

    def take(self, result: Any) -> None:
        """Make a reduced block the gradient."""
        gradient = result if self.sparse else as_tensor(result)
        if self.inverse is not None:
            gradient = gradient.permute(self.inverse)
        self.parameter.grad = gradient
        self.reduced_at = _address(gradient)

    def is_new(self) -> bool:
        """True unless the gradient is what the last reduction made it."""
        gradient = self.parameter.grad
        return gradient is not None and (gradient._version != 0 or _address(gradient) != self.reduced_at)


def _address(gradient: torch.Tensor) -> int:
    """The place of a gradient's values."""
    return gradient.data_ptr() if gradient.layout is torch.strided else gradient._values().data_ptr()


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions by falling strides of a tensor that is dense in another order than C's; else None."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    return order if tensor.permute(order).is_contiguous() else None
