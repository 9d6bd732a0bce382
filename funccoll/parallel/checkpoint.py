"""Files of named arrays: the safetensors format, which torch and JAX programs can read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.types import bfloat16, dtype_name
from ..errors import CheckpointError, DTypeError

__all__ = ["read_tensors", "write_tensors"]

_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "C64": np.complex64,
}
"""The format's names of dtypes. It has no complex128."""
_WRITTEN = {np.dtype(t) for t in _TYPES.values()}


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise CheckpointError("to save and load needs safetensors: pip install 'funccoll[checkpoint]'") from None
    return safetensors


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name to a file that is complete or absent.

    They are written to a file beside it, which is renamed when all of it is on the disk. Raises DTypeError, before anything is
    written, for a dtype that the format lacks, and OSError.
    """
    library, path = _library(), Path(path)
    for name, value in tensors.items():
        if value.dtype not in _WRITTEN:
            raise DTypeError(
                f"{name} is of {dtype_name(value.dtype)}, which safetensors cannot hold. Leave it out, or convert it: of "
                "complex numbers it has complex64."
            )
    content = library.numpy.save({name: np.asarray(value, order="C") for name, value in tensors.items()})
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read arrays by name. Raises OSError, and CheckpointError for a file that is not a safetensors file."""
    library = _library()
    try:
        found = library.deserialize(Path(path).read_bytes())
    except library.SafetensorError as error:
        raise CheckpointError(f"{path} is not a file of safetensors: {error}") from None
    return {name: np.frombuffer(part["data"], _TYPES[part["dtype"]]).reshape(part["shape"]).copy() for name, part in found}
