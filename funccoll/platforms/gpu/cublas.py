"""Products of matrices by cuBLAS, with our own handle, because CuPy 14.2 does not call cuBLAS while a stream is captured.

cuBLAS itself can be captured if the caller owns its workspace (its documentation, "CUDA Graphs Support"). Ours is one piece
of memory for all products, so two streams must not multiply at once. cuBLAS's matrices are column-major. It reads our matrix
as its transpose, and C^T = B^T A^T needs no copy.

Numbers and the types of parameters are those of cublas_api.h and library_types.h of CUDA 13 (cuBLAS 13.10). Tests run this
module on a fake of the library.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.types import bfloat16
from ...errors import UnsupportedError

__all__ = ["Cublas", "find_library"]

_LIMIT = 1 << 31  # sizes are int
_WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper, the most of all
_NO_TRANSPOSE, _TRANSPOSE = 0, 1
_DEFAULT_ALGORITHM = -1
_MATH_MODE = 0 | 16  # no TF32; partial sums of 16-bit floats combine in 32 bits
_TYPES: dict[np.dtype, tuple[int, int, np.dtype]] = {
    np.dtype(dtype): (number, compute, np.dtype(scalar))
    for dtype, number, compute, scalar in (
        (np.float16, 2, 68, np.float32),
        (bfloat16, 14, 68, np.float32),
        (np.float32, 0, 68, np.float32),
        (np.complex64, 4, 68, np.complex64),
        (np.float64, 1, 70, np.float64),
        (np.complex128, 5, 70, np.complex128),
    )
}
"""dtype -> its cudaDataType_t, its cublasComputeType_t (68: float32, 70: float64), the dtype of alpha and beta."""

_int, _long, _address = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
_MATRIX = (_address, _int, _int, _long)  # memory, dtype, leading dimension, stride between matrices
_FUNCTIONS = {
    "cublasCreate_v2": (_address,),
    "cublasSetMathMode": (_address, _int),
    "cublasSetStream_v2": (_address, _address),
    "cublasSetWorkspace_v2": (_address, _address, ctypes.c_size_t),
    "cublasGemmStridedBatchedEx": (
        _address,
        _int,
        _int,
        _int,
        _int,
        _int,
        _address,
        *_MATRIX,
        *_MATRIX,
        _address,
        *_MATRIX,
        _int,
        _int,
        _int,
    ),
}


def find_library(runtime_version: int) -> Any:
    """Return CuPy's cuBLAS for a version of the CUDA runtime (13020 is 13.2), or None if there is none."""
    with suppress(ImportError, RuntimeError, OSError):  # CuPy 14 uses cuda-pathfinder, which knows NVIDIA's wheels
        from cuda import pathfinder

        return ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cublas").abs_path)
    with suppress(OSError):
        return ctypes.CDLL(f"libcublas.so.{runtime_version // 1000}")
    return None


@dataclass(frozen=True)
class _Matrices:
    """A stack of matrices in cuBLAS's terms. `array` holds the memory until the product is enqueued."""

    array: Any
    transposed: bool
    leading: int
    stride: int


class Cublas:
    """cuBLAS on the current device. It lives as long as the process, because graphs use its workspace.

    `stream()` is a context manager that gives the current stream's address. That stream waits for the products on other
    streams, and no other thread enqueues meanwhile. `capability` is the GPU's. Raise RuntimeError.
    """

    def __init__(self, cupy: Any, library: Any, stream: Callable[[], AbstractContextManager[int]], capability: tuple[int, int]):
        self._cupy, self._library, self._stream = cupy, library, stream
        for name, types in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, _int
        self.dtypes = frozenset(d for d in _TYPES if d != bfloat16 or capability >= (8, 0))
        """The dtypes that `matmul` takes. Older GPUs do not multiply bfloat16."""
        self._scalars = {d: (np.ones(1, scalar), np.zeros(1, scalar)) for d, (_, _, scalar) in _TYPES.items()}
        self._workspace = cupy.empty(_WORKSPACE_BYTES, np.uint8)
        handle = _address()
        self._call("cublasCreate_v2", ctypes.byref(handle))
        self._handle = handle.value
        self._call("cublasSetMathMode", self._handle, _MATH_MODE)

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise RuntimeError(
                f"cuBLAS failed: {name} returned cublasStatus_t {status} (3: too little memory on the GPU; 15: not possible on "
                "this GPU). `funccoll doctor` compares versions."
            )

    def matmul(self, x: Any, y: Any, out: Any = None) -> Any:
        """Return `x @ y` by NumPy's rules, for arrays with elements and one dtype of `dtypes`. `out` shares no memory."""
        a, b = x[None] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = (*batch, *(x.shape[-2:-1]), *(y.shape[-1:] if y.ndim > 1 else ()))
        if max(*a.shape[-2:], b.shape[-1], math.prod(batch)) >= _LIMIT:
            raise UnsupportedError(f"cuBLAS takes sizes below 2**31: {x.shape} @ {y.shape}. Multiply in parts.")
        made = out if out is not None and out.flags.c_contiguous else self._cupy.empty(shape, x.dtype)
        self._multiply(self._matrices(a, batch), self._matrices(b, batch), made)
        if out is not None and made is not out:
            out[...] = made
            return out
        return made

    def _matrices(self, x: Any, batch: tuple[int, ...]) -> _Matrices:
        """Return a stack unchanged if cuBLAS can read it; else a copy, which repeats matrices only if that is necessary."""
        for array in (
            lambda: x,
            lambda: self._cupy.ascontiguousarray(x),
            lambda: self._cupy.ascontiguousarray(self._cupy.broadcast_to(x, (*batch, *x.shape[-2:]))),
        ):
            given = array()
            found = _layout(given.shape, given.strides, given.itemsize, batch)
            if found is not None:
                return _Matrices(given, *found)
        raise AssertionError("a contiguous stack is readable")

    def _multiply(self, a: _Matrices, b: _Matrices, out: Any) -> None:
        (m, k), n = a.array.shape[-2:], b.array.shape[-1]
        count, lead = out.size // (m * n), a.leading
        # One matrix for a whole stack: the stack's rows form one matrix, and one product is faster.
        rows_follow = a.stride == m * lead or (m == 1 and a.stride >= k)
        if count > 1 and not b.stride and not a.transposed and rows_follow and max(m * count, a.stride // m) < _LIMIT:
            lead, m, count = a.stride // m, m * count, 1
        number, compute, _ = _TYPES[out.dtype]
        one, zero = (scalar.ctypes.data for scalar in self._scalars[out.dtype])
        with self._stream() as stream:
            self._call("cublasSetStream_v2", self._handle, stream)
            # Setting the stream has set a workspace of cuBLAS's own, for which a capture would allocate memory.
            self._call("cublasSetWorkspace_v2", self._handle, self._workspace.data.ptr, _WORKSPACE_BYTES)
            self._call(
                "cublasGemmStridedBatchedEx",
                self._handle,
                _TRANSPOSE if b.transposed else _NO_TRANSPOSE,
                _TRANSPOSE if a.transposed else _NO_TRANSPOSE,
                n,
                m,
                k,
                one,
                b.array.data.ptr,
                number,
                b.leading,
                b.stride,
                a.array.data.ptr,
                number,
                lead,
                a.stride,
                zero,
                out.data.ptr,
                number,
                n,
                m * n,
                count,
                compute,
                _DEFAULT_ALGORITHM,
            )


def _layout(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, batch: tuple[int, ...]
) -> tuple[bool, int, int] | None:
    """Say how cuBLAS reads a stack that is broadcast to `batch`: transposed, leading dimension, stride. None if it cannot.

    Steps along a dimension of one element do not matter. Steps are positive, and rows do not overlap.
    """
    if any(step % itemsize for step in strides):
        return None
    *outer, down, across = (step // itemsize for step in strides)
    rows, columns = shape[-2:]
    stride = _stride_of(shape[:-2], tuple(outer), batch)
    if stride is None or stride < 0:
        return None
    for transposed, length, near, far, lines in (
        (False, columns, across, down, rows),
        (True, rows, down, across, columns),
    ):
        leading = far if lines > 1 else length
        if (near == 1 or length == 1) and length <= leading < _LIMIT:
            return transposed, leading, stride
    return None


def _stride_of(sizes: tuple[int, ...], steps: tuple[int, ...], batch: tuple[int, ...]) -> int | None:
    """Return the one step from each matrix of a stack, broadcast to `batch`, to the next; None if there are several."""
    missing = len(batch) - len(sizes)
    stride, expected = None, 0
    for size, step, wanted in reversed(list(zip((1,) * missing + sizes, (0,) * missing + steps, batch, strict=True))):
        if wanted == 1:
            continue
        step = 0 if size == 1 else step
        if stride is None:
            stride = step
        elif step != expected:
            return None
        expected = step * wanted
    return stride or 0
