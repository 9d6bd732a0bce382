"""Operands of collectives: one array as a rank or device has it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["Operand"]


@dataclass(frozen=True)
class Operand:
    """One array of a collective: shapes of this rank's input and output, and the dimensions that are cut and joined."""

    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: np.dtype
    dim: int = 0
    concat_dim: int = 0
    argument: int | None = None
    """Its input, where calls bind it: argument `argument` of the group, or result ~argument.

    None for one that is not passed: it has no elements, or the machine's code does not bind arguments."""

    @property
    def size(self) -> int:
        """Elements of the input."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the input."""
        return self.size * self.dtype.itemsize
