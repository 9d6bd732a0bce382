"""Operands of the kernels' combines: every dtype, the operations that it has, and values with NaNs, zeros and infinities."""

from __future__ import annotations

import numpy as np

from funccoll.core.types import bfloat16

LENGTH = 3001

DTYPES = [
    np.dtype(t)
    for t in (
        np.bool_,
        np.int8,
        np.uint8,
        np.int16,
        np.uint16,
        np.int32,
        np.uint32,
        np.int64,
        np.uint64,
        np.float16,
        bfloat16,
        np.float32,
        np.float64,
        np.complex64,
        np.complex128,
    )
]
FAST = {
    np.dtype(np.float32): ["sum", "mean", "max"],
    np.dtype(np.int32): ["sum", "prod", "xor"],
    np.dtype(bfloat16): ["sum", "min"],
}
"""The kernels that `make test` compiles, in half a second each: for most operations one, and for three kinds of dtype."""


def operations(dtype: np.dtype) -> list[str]:
    kind = "f" if dtype == bfloat16 else dtype.kind
    ops = ["and", "or", "xor"] if kind in "iub" else []
    ops += ["max", "min"] if kind != "c" else []
    ops += ["sum", "prod"] if kind != "b" else []
    return ops + (["mean"] if kind in "fc" else [])


def some_operations(dtype: np.dtype) -> list[str]:
    """A dtype's share of its operations, each of which one of the dtypes of its kind has."""
    kind = lambda d: "half" if d in (np.float16, bfloat16) else d.kind
    alike = [d for d in DTYPES if kind(d) == kind(dtype)]
    return operations(dtype)[alike.index(dtype) :: len(alike)]


def values(dtype: np.dtype, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    if dtype.kind == "b":
        return [rng.random(LENGTH) < 0.5 for _ in range(count)]
    if dtype.kind in "iu":
        return [np.frombuffer(rng.bytes(LENGTH * dtype.itemsize), dtype) for _ in range(count)]
    out = [rng.normal(size=LENGTH) + (1j * rng.normal(size=LENGTH) if dtype.kind == "c" else 0) for _ in range(count)]
    out[0][:6] = [np.nan, -0.0, 0.0, np.inf, 1e30, -0.0]
    out[1][:6] = [1, -0.0, -0.0, -np.inf, 1e30, 0.0]
    with np.errstate(all="ignore"):
        return [x.astype(dtype) for x in out]
