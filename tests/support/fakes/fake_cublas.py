"""cuBLAS over host memory, for machines without it: C functions which read their arguments, and refuse what cuBLAS refuses.

Products are computed in host memory at the addresses that are given, as matrices with their columns in a row. They go through
`fake_cupy.launch`, and may be captured: cuBLAS allows it, where its workspace is the caller's.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
from contextlib import contextmanager
from ctypes import c_int, c_longlong, c_size_t, c_void_p
from typing import Any

import numpy as np

from funccoll.platforms.gpu.cublas import Cublas
from tests.support.fakes import fake_cupy
from tests.support.fakes.fake_cupy import BFLOAT16

HANDLE, STREAM = 0x7000_0001, 0x5000
INVALID = 7
DTYPES = {2: np.float16, 14: BFLOAT16, 0: np.float32, 4: np.complex64, 1: np.float64, 5: np.complex128}
COMPUTE = {np.dtype("e"): 68, BFLOAT16: 68, np.dtype("f"): 68, np.dtype("F"): 68, np.dtype("d"): 70, np.dtype("D"): 70}


def strict(*types: Any) -> Any:
    """A Python function as a C function that returns a status: 7 where it asserts, with what it says on stderr."""

    def wrap(function: Any) -> Any:
        def call(*args: Any) -> int:
            try:
                function(*args)
            except Exception:  # ctypes would print it and return anything
                traceback.print_exc()
                return INVALID
            return 0

        return ctypes.CFUNCTYPE(c_int, *types)(call)

    return wrap


class FakeCublas:
    """The library. `calls` has (transa, transb, m, n, k, lda, strideA, ldb, strideB, batchCount) of each product."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.math = self.workspace = self.stream = None
        MATRIX = (c_void_p, c_int, c_int, c_longlong)
        self.cublasCreate_v2 = strict(c_void_p)(self._create)
        self.cublasSetMathMode = strict(c_void_p, c_int)(self._set_math)
        self.cublasSetStream_v2 = strict(c_void_p, c_void_p)(self._set_stream)
        self.cublasSetWorkspace_v2 = strict(c_void_p, c_void_p, c_size_t)(self._set_workspace)
        self.cublasGemmStridedBatchedEx = strict(
            c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p, *MATRIX, *MATRIX, c_void_p, *MATRIX, c_int, c_int, c_int
        )(self._gemm)

    def _create(self, handle: int) -> None:
        assert fake_cupy.recorder is None, "cublasCreate allocates memory: not in a capture"
        c_void_p.from_address(handle).value = HANDLE

    def _set_math(self, handle: int, mode: int) -> None:
        assert handle == HANDLE and mode in (0, 16)
        self.math = mode

    def _set_stream(self, handle: int, stream: int | None) -> None:
        assert handle == HANDLE
        self.stream, self.workspace = stream or 0, None

    def _set_workspace(self, handle: int, memory: int, nbytes: int) -> None:
        assert handle == HANDLE and memory and nbytes >= 4 << 20
        self.workspace = memory

    def _gemm(
        self,
        handle: int,
        transa: int,
        transb: int,
        m: int,
        n: int,
        k: int,
        alpha: int,
        a: int,
        atype: int,
        lda: int,
        stridea: int,
        b: int,
        btype: int,
        ldb: int,
        strideb: int,
        beta: int,
        c: int,
        ctype: int,
        ldc: int,
        stridec: int,
        count: int,
        compute: int,
        algo: int,
    ) -> None:
        assert handle == HANDLE and self.stream is not None and self.workspace and self.math is not None
        assert atype == btype == ctype and algo == -1 and {transa, transb} <= {0, 1}
        dtype = np.dtype(DTYPES[atype])
        assert compute == COMPUTE[dtype]
        scalar = np.dtype("f") if dtype.itemsize == 2 else dtype
        one, zero = (np.frombuffer(ctypes.string_at(p, scalar.itemsize), scalar)[0] for p in (alpha, beta))
        assert (one, zero) == (1, 0) and min(m, n, k, count) > 0 and a and b and c
        self.calls.append((transa, transb, m, n, k, lda, stridea, ldb, strideb, count))
        A = columns(a, dtype, *((k, m) if transa else (m, k)), lda, stridea, count)
        B = columns(b, dtype, *((n, k) if transb else (k, n)), ldb, strideb, count)
        C = columns(c, dtype, m, n, ldc, stridec, count)
        assert count == 1 or stridec >= ldc * n
        assert not any(np.may_share_memory(C, other) for other in (A, B))
        # Transposed: rows of NumPy's are columns of cuBLAS's, and NumPy on the CPU is then asked for the same product.
        A, B = A if transa else A.swapaxes(1, 2), B if transb else B.swapaxes(1, 2)
        C = C.swapaxes(1, 2)
        fake_cupy.launch(lambda: np.copyto(C, np.matmul(B.astype(scalar), A.astype(scalar)), casting="unsafe"))


def columns(address: int, dtype: np.dtype, rows: int, width: int, leading: int, stride: int, count: int) -> np.ndarray:
    """A stack of matrices in memory, with their columns in a row."""
    assert leading >= max(1, rows) and stride >= 0 and address % dtype.alignment == 0
    nbytes = ((count - 1) * stride + (width - 1) * leading + rows) * dtype.itemsize
    memory = (ctypes.c_char * nbytes).from_address(address)
    steps = tuple(step * dtype.itemsize for step in (stride, 1, leading))
    return np.ndarray((count, rows, width), dtype, buffer=memory, strides=steps)


def cublas(library: FakeCublas, capability: tuple[int, int] = (9, 0)) -> Cublas:
    """Our products by the fake, outside of a GPU."""
    lock = threading.RLock()

    @contextmanager
    def stream() -> Any:
        with lock:
            yield STREAM

    return Cublas(fake_cupy, library, stream, capability)
