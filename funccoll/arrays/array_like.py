"""Arguments that users pass as arrays: their device type, their shape and dtype, and their value as a NumPy array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.interpreter import Traced, as_array, refuse_subclass
from ..core.types import check_dtype, exported
from ..errors import DTypeError, FunccollError, ShapeError, TraceError, argument_remedy, without_value
from .array import Array

__all__ = ["device_type_of", "shape_and_dtype", "to_numpy"]

_DLPACK_GPUS = (2, 13)
"""DLPack's kDLCUDA and kDLCUDAManaged."""


def device_type_of(x: Any) -> str:
    """Return the type of devices that hold an argument: "cuda" if DLPack or `__cuda_array_interface__` says so."""
    if type(x) is Array:
        return x.sharding.mesh.device_type
    if isinstance(x, (np.ndarray, np.generic, int, float, complex, list, tuple)):
        return "cpu"
    if hasattr(x, "__dlpack_device__"):
        try:
            return "cuda" if int(x.__dlpack_device__()[0]) in _DLPACK_GPUS else "cpu"
        except (ValueError, BufferError):  # DLPack does not know it; reading it raises
            return "cpu"
    return "cuda" if hasattr(x, "__cuda_array_interface__") else "cpu"


def to_numpy(x: Any, what: str = "x", *, is_argument: bool = False) -> np.ndarray:
    """Return anything array-like (NumPy, DLPack, `__array_interface__`, numbers, lists) as a native NumPy array.

    Args:
        x: The value.
        what: Its name in messages.
        is_argument: True for an argument of a jitted function; its errors have other remedies.
    """
    if isinstance(x, Traced):
        raise TraceError(
            f"{what} is a traced array of type {x.type}: inside a traced function it is one device's shard already. Use "
            "it as it is; device_put and from_local are for values outside."
        )
    refuse_subclass(x, what)
    try:
        array = np.asarray(exported(x))
    except FunccollError:  # an Array's own reason
        raise
    except ValueError as error:  # nested lists of different lengths
        raise ShapeError(f"{what} is not an array: {error}") from None
    except (TypeError, RuntimeError, BufferError) as error:  # a tensor on a GPU, or one that records gradients
        raise TraceError(
            f"{what} is a {type(x).__module__}.{type(x).__qualname__} that NumPy cannot read: {str(error).rstrip('.')}. "
            "Pass an array in host memory; for a torch tensor that is x.detach().cpu(), with .float() if it is bfloat16, "
            "for a CuPy array x.get()."
        ) from error
    if array.dtype == object and isinstance(x, int):
        raise DTypeError(f"{what} is {x}, which does not fit into 64 bits. Pass a float, or split it.")
    if array.dtype == object and not isinstance(x, np.ndarray):
        raise TraceError(
            f"{what} is {without_value(x)}, which is not an array. "
            f"{argument_remedy(x) if is_argument else 'Pass an array or a number.'}"
        )
    check_dtype(array.dtype, what)
    return as_array(array)


def shape_and_dtype(x: Any, what: Callable[[], str]) -> tuple[tuple[int, ...], np.dtype]:
    """Return the global shape and native dtype of an argument. If its dtype is NumPy's, nothing else is read of it.

    `what` is its name in messages. Raises DTypeError for an unsupported dtype, and TraceError for a value that is not an array.
    """
    try:
        shape, dtype = tuple(x.shape), np.dtype(x.dtype)
    except (AttributeError, TypeError):  # a number, a list, or a tensor with dtypes of its own
        array = to_numpy(x, what(), is_argument=True)
        return array.shape, array.dtype
    try:
        return shape, check_dtype(dtype)
    except DTypeError:  # raises again, with the argument's name
        return shape, check_dtype(dtype, what())
