"""Order of elements in memory: one rule for every array that crosses a border of a program.

The bits of NumPy's sums and products depend on the strides of their operands. Transports differ at borders: a process
receives a result in new memory, and a virtual device reads the memory of another one. So on every transport these arrays lie
in C order: arguments, captured constants, operands and results of control flow, results of collectives, results of programs.
Between borders an array has NumPy's strides. They depend on the operands alone.
"""

from __future__ import annotations

from typing import Any

__all__ = ["in_c_order"]


def in_c_order(array: Any) -> Any:
    """Return an array of NumPy or CuPy in the layout of a new array with its shape: itself, or a view or copy of it.

    The layout is C-contiguous and aligned. Dimensions of size 1 have the usual strides, too.
    """
    flags = array.flags
    if not flags.c_contiguous or not getattr(flags, "aligned", True):
        return array.copy()
    shape = array.shape
    if 1 not in shape or len(shape) == 1:
        return array
    usual = array.reshape(-1).reshape(shape)
    return array if usual.strides == array.strides else usual
