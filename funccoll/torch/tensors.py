"""Conversion of torch tensors to NumPy arrays over the same memory, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..errors import DTypeError

__all__ = ["as_array", "as_tensor", "dtype_of", "reader_of"]

_DTYPES = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}
_COMPLEX = torch.complex64, torch.complex128
_BFLOAT16 = _DTYPES[torch.bfloat16]
_capsule: Any = getattr(torch._C, "_to_dlpack_versioned", None)
"""Torch has it from 2.9 on. NumPy makes only read-only arrays of the older capsules."""
_from_dlpack: Callable[[Any], np.ndarray] = np.from_dlpack if _capsule else lambda exported: exported.tensor.detach().numpy()
_from_numpy: Callable[[Any], torch.Tensor] = torch.from_numpy


def dtype_of(dtype: torch.dtype, what: str = "the tensor") -> np.dtype:
    """Return NumPy's dtype of a torch dtype. Raise DTypeError if NumPy and ml_dtypes lack it."""
    found = _DTYPES.get(dtype)
    if found is None:
        supported = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise DTypeError(f"{what} has dtype {dtype}, which funccoll does not support. Supported: {supported}.")
    return found


class _Exported:
    """A tensor with NumPy's protocol. DLPack does not change it; `tensor.numpy()` would forbid to resize its storage later."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __dlpack__(self, *, dl_device: Any = None, copy: Any = None, max_version: Any = None, stream: Any = None) -> Any:
        return _capsule(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return an array over a dense CPU tensor's memory, with its strides. A conjugated or negated view is copied.

    The tensor does not change, and you may resize it later. Raise TypeError, RuntimeError or BufferError for other tensors.
    """
    array = reader_of(tensor.dtype)(tensor)
    return _read_other(tensor) if array is None else array


def reader_of(dtype: torch.dtype) -> Callable[[torch.Tensor], np.ndarray | None]:
    """Return the function that makes arrays over tensors of one dtype. It returns None if the values are elsewhere."""
    return _read_complex if dtype in _COMPLEX else _read_bfloat16 if dtype is torch.bfloat16 else _read


def _read(tensor: torch.Tensor) -> np.ndarray | None:
    return None if tensor.is_neg() or not tensor.data_ptr() else _from_dlpack(_Exported(tensor))


def _read_complex(tensor: torch.Tensor) -> np.ndarray | None:
    return None if tensor.is_conj() else _read(tensor)


def _read_bfloat16(tensor: torch.Tensor) -> np.ndarray | None:
    array = None if tensor.is_neg() else _read(tensor.detach().view(torch.int16))  # NumPy does not know it
    return None if array is None else array.view(_BFLOAT16)


def _read_other(tensor: torch.Tensor) -> np.ndarray:
    """Read an empty tensor, one whose memory has other values, or a subclass or transform with its values elsewhere."""
    if tensor.numel() and not tensor.data_ptr():
        return tensor.numpy()
    bits = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        return _from_dlpack(_Exported(bits.view(torch.int16))).view(_BFLOAT16)
    return _from_dlpack(_Exported(bits))


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over an array's memory, which lives as long as the tensor, its views and its storage.

    The array becomes writeable, because torch has no read-only tensors.
    """
    if not array.flags.writeable:  # NumPy could not make an array with gaps, of a tensor, writeable
        array.flags.writeable = True
    if array.dtype == _BFLOAT16:
        return _from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return _from_numpy(array)
