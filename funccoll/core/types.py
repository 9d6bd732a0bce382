"""The type of a value in a program: its shape, its dtype, and the mesh axes over which it may vary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import DTypeError, registration_remedy, without_value

__all__ = [
    "ArrayType",
    "bfloat16",
    "check_dtype",
    "dtype_name",
    "exported",
    "is_inexact",
    "refuse_objects",
    "type_of",
    "types_text",
    "wide_dtype",
]

bfloat16 = np.dtype(ml_dtypes.bfloat16)
"""The 16-bit float with float32's exponent, as a NumPy dtype."""

_NAMES = {np.dtype(np.bool_): "bool", bfloat16: "bf16"}
for _kind, _letter in (("int", "i"), ("uint", "u")):
    _NAMES.update({np.dtype(f"{_kind}{b}"): f"{_letter}{b}" for b in (8, 16, 32, 64)})
_NAMES.update({np.dtype(f"float{b}"): f"f{b}" for b in (16, 32, 64)})
_NAMES.update({np.dtype(f"complex{b}"): f"c{b}" for b in (64, 128)})

_INEXACT = {d for d in _NAMES if d.kind in "fc" or d == bfloat16}


_TEXT = ": text is not an array. Make it a static argument (static_argnames) or leave it out"
_REMEDIES = {
    "U": _TEXT,
    "S": _TEXT,
    "O": ": it holds Python objects. Pass arrays and numbers, and pytrees of them",
    "M": ": convert it with .astype(np.int64)",
    "m": ": convert it with .astype(np.int64)",
    "g": ": convert it with .astype(np.float64)",
    "G": ": convert it with .astype(np.complex128)",
    "V": ": pass the fields as a dict of arrays",
}
"""Remedies for unsupported dtypes, by their character or kind."""


def dtype_name(dtype: np.dtype) -> str:
    """Return the short name for printed programs: f32, bf16, i64, bool, ..."""
    return _NAMES.get(dtype, str(dtype))


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which sums are added: float32 for 16-bit floats, in which a sum of ones would stop at 256 or 2048."""
    return np.dtype(np.float32) if dtype in (np.float16, bfloat16) else dtype


def is_inexact(dtype: np.dtype) -> bool:
    """True for floats and complex numbers, which have gradients."""
    return dtype in _INEXACT


def check_dtype(dtype: np.dtype, what: str = "value") -> np.dtype:
    """Return `dtype` in native byte order. Raise DTypeError if it is not supported."""
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    if native not in _NAMES:
        remedy = _REMEDIES.get(native.char) or _REMEDIES.get(native.kind, "")
        raise DTypeError(
            f"{what} has dtype {dtype}, which funccoll does not support{remedy}. Supported: bool, int8 to int64, uint8 to "
            "uint64, float16, bfloat16, float32, float64, complex64, complex128."
        )
    return native


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The type of a value in a program: shape, dtype, and the mesh axes over which it varies.

    A value that does not vary over an axis has the same bits on all devices along it. JAX calls this VMA (varying manual axes).

    Args:
        shape: The sizes of the dimensions on one device.
        dtype: The element type, a NumPy dtype.
        varying: The mesh axes along which devices may hold different values.

    Example:
        >>> print(fc.ArrayType((2, 3), np.dtype(np.float32), frozenset({"data"})))
        f32[2,3]{data}
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    varying: frozenset[str] = frozenset()

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements on one device."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on one device."""
        return self.size * self.dtype.itemsize

    def vary(self, axes: Iterable[str]) -> ArrayType:
        """Return the same type, varying over exactly `axes`."""
        return ArrayType(self.shape, self.dtype, frozenset(axes))

    def __str__(self) -> str:
        varying = "{" + ",".join(sorted(self.varying)) + "}" if self.varying else ""
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]{varying}"


_HOSTS = (1, 3)
"""DLPack's kDLCPU and kDLCUDAHost."""


def types_text(types: Iterable[ArrayType]) -> str:
    """Return types in a row as text. Equal neighbours stand once, with their number."""
    rows = [(f"{dtype_name(t.dtype)}{list(t.shape)}", len([*same])) for t, same in itertools.groupby(types)]
    return ", ".join(text if count == 1 else f"{count} of {text}" for text, count in rows)


def exported(value: Any) -> Any:
    """Return an array of another library as a NumPy array by DLPack, and anything else unchanged.

    DLPack does not change a torch tensor; `__array__` would forbid to resize it later. The result is valid until a resize.
    """
    if not hasattr(value, "__dlpack__") or hasattr(type(value), "__array_interface__"):
        return value
    try:
        return np.from_dlpack(value) if int(value.__dlpack_device__()[0]) in _HOSTS else value
    except (TypeError, RuntimeError, BufferError, ValueError):
        if not hasattr(value, "__array__"):
            raise
        return value  # DLPack lacks the dtype, or NumPy's protocol explains better why it cannot be read


def refuse_objects(value: object, array: np.ndarray) -> None:
    """Raise DTypeError for an object that NumPy turned into `array` without knowing its content."""
    if array.dtype == object and not isinstance(value, np.ndarray):
        raise DTypeError(
            f"a value is {without_value(value)}, which is not an array. Pass arrays and numbers, and "
            f"pytrees of them.{registration_remedy(value)}"
        )


def type_of(value: object) -> ArrayType:
    """Return the type of a concrete value (an ndarray, a NumPy scalar, a Python scalar). It varies over nothing."""
    array = np.asarray(exported(value))
    refuse_objects(value, array)
    return ArrayType(array.shape, check_dtype(array.dtype))
