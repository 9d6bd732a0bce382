"""Products of matrices of compiled programs by kernels, where these are faster than one thread of BLAS."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from ..config import FUSE
from ..core.ir import Equation
from ..kernels.native.fast_call import functions_of, module_of
from ..kernels.native.machine_code import processor_level, why_not
from ..kernels.native.packed_products import PackedProduct, packed_product_kernel
from ..primitives.linalg import matmul_p
from .blas import one_thread

__all__ = ["is_packed", "packed_product"]

_KINDS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
_LEAST, _LARGEST = 1 << 19, 1 << 28
"""Multiplications, with those of a whole stack, from which on kernels are used; and of one product up to which they are. With
AVX-512 OpenBLAS takes 1.05 to 2 times as long (0.8 to 1.3 with AVX2), and larger products are at home there."""
_ROWS, _INNER, _COLUMNS = 4, 16, 16
"""The least sizes. Products of fewer rows wait for memory."""


def is_packed(eqn: Equation, devices: int) -> bool:
    """True for a product that `packed_product` computes, in a program on a mesh of `devices` devices.

    Shapes decide, and the number of BLAS threads: several are faster than a kernel. So all ranks and transports have the same
    bits.
    """
    if eqn.primitive is not matmul_p:
        return False
    x, y = (a.type for a in eqn.inputs)
    if x.dtype != y.dtype or x.dtype not in _KINDS or x.ndim < 2 or y.ndim < 2:
        return False
    inner, columns = y.shape[-2:]
    rows = math.prod(x.shape[:-1]) if y.ndim == 2 else x.shape[-2]
    one = rows * inner * columns
    small = rows < _ROWS or inner < _INNER or columns < _COLUMNS or one > _LARGEST
    if small or eqn.outputs[0].type.size * inner < _LEAST or FUSE.read() == "0" or why_not() is not None:
        return False
    return one_thread(devices)


def packed_product(x: np.ndarray, y: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return `x @ y`, in C order."""
    if out is None:
        stack = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        out = np.empty((*stack, x.shape[-2], y.shape[-1]), x.dtype)
    if y.ndim == 2:  # one product of all rows
        assert out.flags.c_contiguous, "its rows would be those of a copy"
        _compute(np.reshape(x, (-1, x.shape[-1])), y, np.reshape(out, (-1, y.shape[-1])))
    else:
        stack = out.shape[:-2]
        _compute(np.broadcast_to(x, (*stack, *x.shape[-2:])), np.broadcast_to(y, (*stack, *y.shape[-2:])), out)
    return out


def _compute(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    found = _function(x.dtype, x.shape, x.strides, y.shape[-1], y.strides, out.strides)
    if found is not None:
        function, work = found
        if function(x, y, out, np.empty(work, np.uint8)):
            return
    x, y = (np.require(a, requirements=("C", "A")) for a in (x, y))
    function, work = _function(x.dtype, x.shape, x.strides, y.shape[-1], y.strides, out.strides)  # type: ignore[misc]
    if not function(x, y, out, np.empty(work, np.uint8)):
        raise AssertionError("arrays in C order are refused")


@functools.lru_cache(maxsize=256)
def _function(
    dtype: np.dtype,
    shape: tuple[int, ...],
    left: tuple[int, ...],
    columns: int,
    right: tuple[int, ...],
    result: tuple[int, ...],
) -> tuple[Callable[..., bool], int] | None:
    """Return the kernel for arrays of these strides, and the bytes of its workspace; None if operands must be copied."""
    size, level = dtype.itemsize, processor_level()
    if any(s % size for s in (*left, *right)) or size not in right[-2:] or level is None:
        return None
    *stack, rows, inner = shape
    distances = (tuple(s // size for s in strides) for strides in (left, right, result))
    kernel = packed_product_kernel(PackedProduct(_KINDS[dtype], tuple(stack), rows, inner, columns, *distances), level)
    return functions_of([kernel.name], module_of([kernel]))[kernel.name], kernel.workspace_bytes
