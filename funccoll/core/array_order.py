"""The order of elements in memory: the one rule for every array that crosses a border of a program.

The bits of NumPy's sums and products depend on the strides of their operands. Borders are where transports differ: a process
receives a result in new memory, and a virtual device reads the memory of another one. So arguments, captured constants,
operands and results of control flow, results of collectives and results of programs lie in C order, on every transport. Between
borders an array has the strides that NumPy gives it, which depend on nothing else than the operands.
"""

from __future__ import annotations

from typing import Any

__all__ = ["in_c_order"]


def in_c_order(array: Any) -> Any:
    """Return an array of NumPy's or CuPy's as a new array of its shape would lie: itself, or a view or copy of it.

    The new array is C-contiguous and aligned, and its dimensions of size 1 have the usual strides, too.
    """
    flags = array.flags
    if not flags.c_contiguous or not getattr(flags, "aligned", True):
        return array.copy()
    shape = array.shape
    if 1 not in shape or len(shape) == 1:
        return array
    usual = array.reshape(-1).reshape(shape)
    return array if usual.strides == array.strides else usual
