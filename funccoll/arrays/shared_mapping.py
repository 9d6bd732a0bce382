"""Blocks of Arrays as users see them: read-only views. Memory that other processes see is shown at an address of its own."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from ..core.c_extension import extension

__all__ = ["SharedMapping", "read_only"]


class SharedMapping(mmap.mmap):
    """Memory that other processes see, mapped twice: for the runtime, and read-only as `reading`.

    Users get only arrays of `reading`, which the system protects. NumPy's flag is not enough, because
    `torch.from_dlpack(arr.local)` ignores it. A write into that tensor would change the results and arguments of other ranks.
    """

    __slots__ = ("reading", "shift")

    reading: mmap.mmap
    shift: int
    """The distance in bytes from an address here to that of the same byte in `reading`."""


if extension is not None:
    extension.use_mapping(SharedMapping)


class _Alias:
    """A description, for NumPy, of an array at another address than its block. The block lives as long as the array."""

    __slots__ = ("__array_interface__", "_block")

    def __init__(self, block: np.ndarray, shift: int):
        interface = block.__array_interface__
        self._block = block
        self.__array_interface__ = {**interface, "data": (interface["data"][0] + shift, True)}


def read_only(block: Any) -> Any:
    """Return a new view of a block that cannot be written to."""
    if not isinstance(block, (np.ndarray, np.generic)):
        return block  # CuPy has no flag for it
    if type(block) is not np.ndarray:
        block = np.asarray(block)
    if extension is not None:
        return extension.read_only(block)
    base = block.base
    while type(base) is np.ndarray:
        base = base.base
    if type(base) is SharedMapping:
        alias = np.asarray(_Alias(block, base.shift))
        return alias if alias.dtype == block.dtype else alias.view(block.dtype)  # NumPy has no name for bfloat16
    view = block.view()  # the caller may change its shape and dtype
    view.flags.writeable = False
    return view
