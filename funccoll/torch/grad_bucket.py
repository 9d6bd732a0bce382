"""Buckets of gradients for torch's communication hooks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ShapeError

__all__ = ["GradBucket"]


class GradBucket:
    """Gradients of one dtype that are reduced together. They lie in one flat tensor. The interface is torch's."""

    def __init__(self, index: int, is_last: bool, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]):
        self._index, self._is_last, self._buffer, self._parameters = index, is_last, buffer, list(parameters)

    def index(self) -> int:
        """Return the bucket's number: 0 is reduced first."""
        return self._index

    def is_last(self) -> bool:
        """Return True for the bucket that is reduced last."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return this rank's gradients, undivided: a dense tensor of one dimension. A hook may write into it."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the buffer, one for each parameter, contiguous in its shape."""
        parts = torch.split(self._buffer, [p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer, perhaps by a tensor of another dtype. Raise ShapeError if the shape differs."""
        if buffer.shape != self._buffer.shape:
            raise ShapeError(
                f"GradBucket.set_buffer: bucket {self._index} has a buffer of shape {list(self._buffer.shape)}, and was given "
                f"{list(buffer.shape)}. Keep what is compressed to another shape in variables of the hook."
            )
        self._buffer = buffer
