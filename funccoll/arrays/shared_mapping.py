"""Blocks of Arrays as users see them: read-only views, and of memory that other processes see at an address of its own."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from ..core.c_extension import extension

__all__ = ["SharedMapping", "read_only"]


class SharedMapping(mmap.mmap):
    """Memory that other processes see, mapped twice: here, for the runtime, and as `reading`, which nothing can write.

    Users get arrays of `reading` alone, which the system protects. NumPy's flag would not do: `torch.from_dlpack(arr.local)`
    takes no notice of it, and what is written into the tensor would be in the results of other ranks, and in their arguments.
    """

    __slots__ = ("reading", "shift")

    reading: mmap.mmap
    shift: int
    """The bytes from an address here to that of the same byte in `reading`."""


if extension is not None:
    extension.use_mapping(SharedMapping)


class _Alias:
    """The description, for NumPy, of an array at another address than that of the block, which lives as long as the array."""

    __slots__ = ("__array_interface__", "_block")

    def __init__(self, block: np.ndarray, shift: int):
        interface = block.__array_interface__
        self._block = block
        self.__array_interface__ = {**interface, "data": (interface["data"][0] + shift, True)}


def read_only(block: Any) -> Any:
    """Return a new view of a block that nothing can write into."""
    if not isinstance(block, (np.ndarray, np.generic)):
        return block  # of CuPy, which has no flag for that
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
    view = block.view()  # its shape and dtype are the caller's to change
    view.flags.writeable = False
    return view
