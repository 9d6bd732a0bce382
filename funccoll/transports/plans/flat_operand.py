"""Operands as libraries of collectives take them: flat memory, in which the blocks of a collective follow each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...runtime.collective_call import Operand
from ...schedules.collective import Collective

__all__ = ["FlatOperand"]


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

    def flat_input(self, value: Any, contiguous: Callable[[Any], Any]) -> Any:
        """The flat memory of an input: the array itself unless it is strided, or cut along another dimension than 0.

        `contiguous` makes a C-contiguous array of a scalar or a view, and returns any other array itself.
        """
        blocks, dim = self.collective.input_blocks, self.operand.dim
        if blocks > 1 and dim:
            shape = self.operand.shape
            value = value.reshape((*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :]))
            value = value.transpose((dim, *(d for d in range(len(shape) + 1) if d != dim)))
        flat = contiguous(value).reshape((self.input_size,))
        assert flat.dtype == self.dtype, f"an array of {flat.dtype}, and the call was compiled for {self.dtype}"
        return flat

    @property
    def is_output_flat(self) -> bool:
        """True where the elements of the output lie as in its flat memory."""
        return self.collective.output_blocks == 1 or not self.operand.concat_dim

    def shaped_output(self, flat: Any) -> Any:
        """The output of a collective from its flat memory."""
        blocks, dim, shape = self.collective.output_blocks, self.operand.concat_dim, self.operand.out_shape
        if not self.is_output_flat:
            flat = flat.reshape((blocks, *shape[:dim], shape[dim] // blocks, *shape[dim + 1 :]))
            flat = flat.transpose((*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)))
        return flat.reshape(shape)
