"""Tensors of torch as NumPy arrays over the same memory, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..errors import DTypeError

__all__ = ["as_array", "as_tensor", "dtype_of"]

_DTYPES = {
    torch.bool: np.dtype(np.bool_), torch.uint8: np.dtype(np.uint8), torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16), torch.int32: np.dtype(np.int32), torch.int64: np.dtype(np.int64),
    torch.uint16: np.dtype(np.uint16), torch.uint32: np.dtype(np.uint32), torch.uint64: np.dtype(np.uint64),
    torch.float16: np.dtype(np.float16), torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64), torch.complex128: np.dtype(np.complex128),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
_BFLOAT16 = _DTYPES[torch.bfloat16]
_from_numpy: Callable[[Any], torch.Tensor] = torch.from_numpy


def dtype_of(dtype: torch.dtype, what: str = "the tensor") -> np.dtype:
    """Return NumPy's dtype of a torch dtype; raise DTypeError for one that NumPy and ml_dtypes lack."""
    found = _DTYPES.get(dtype)
    if found is None:
        supported = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise DTypeError(f"{what} has dtype {dtype}, which funccoll does not support. Supported: {supported}.")
    return found


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return an array over a dense CPU tensor's memory, with its strides; a conjugated or negated view is copied."""
    if tensor.dtype is torch.bfloat16:  # NumPy does not know it
        return tensor.detach().view(torch.int16).numpy().view(_BFLOAT16)
    try:
        return tensor.numpy()
    except RuntimeError:
        return tensor.detach().resolve_conj().resolve_neg().numpy()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over an array's memory, which lives as long as the tensor, its views and its storage.

    The array becomes writeable: torch has no tensors that are not.
    """
    if not array.flags.writeable:  # one with gaps, of a tensor, could not be made so
        array.flags.writeable = True
    if array.dtype == _BFLOAT16:
        return _from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return _from_numpy(array)
