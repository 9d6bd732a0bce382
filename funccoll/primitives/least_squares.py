"""The primitive of np.linalg.lstsq."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.ir import Primitive
from ..core.types import ArrayType
from ..errors import ShapeError
from .batch_rules import batch_each
from .decompositions import svdvals_p
from .linear_systems import conjugate, pinv_p, real_dtype, require_matrices

__all__ = ["lstsq_p"]


def _infer(a: ArrayType, b: ArrayType, *, rcond: float) -> list[ArrayType]:
    dtype = require_matrices("np.linalg.lstsq", a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[0]:
        raise ShapeError(f"np.linalg.lstsq: shapes {a.shape} and {b.shape}; it takes a matrix, and as many rows.")
    (m, n), k, real = a.shape, b.shape[1], real_dtype(dtype)
    return [
        ArrayType((n, k), dtype),
        ArrayType((k if m > n else 0,), real),
        ArrayType((), np.dtype(np.int32)),
        ArrayType((min(m, n),), real),
    ]


def _lstsq(a: np.ndarray, b: np.ndarray, *, rcond: float) -> list[Any]:
    x, residuals, rank, s = np.linalg.lstsq(a, b, rcond)
    if a.shape[0] > a.shape[1] and not residuals.size:  # NumPy has none unless the rank is full, which depends on values
        residuals = np.full(b.shape[1], np.nan, s.dtype)
    return [x, residuals, np.int32(rank), s]


def _lstsq_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, rcond: float) -> list[Any]:
    """Differentiate pinv(a) @ b, the solution. Residuals do not change with it, because it minimizes them."""
    (a, b), (x, *_), (of_x, of_residuals, _, of_s) = inputs, outs, cts
    missing = None
    if of_residuals is not None and a.shape[0] > a.shape[1]:
        missing = 2 * of_residuals * conjugate(b - a @ x)

    def of_a() -> Any:
        parts = [] if missing is None else [-(missing @ x.mT)]
        if of_x is not None:
            inverse = np.linalg.pinv(a, rcond=rcond)
            assert pinv_p.vjp is not None
            parts.append(pinv_p.vjp([of_x @ b.mT], [a], [inverse], rcond=rcond)[0]())
        if of_s is not None:
            assert svdvals_p.vjp is not None
            parts.append(svdvals_p.vjp([of_s], [a], [None])[0]())
        return sum(parts, np.zeros_like(a))

    def of_b() -> Any:
        parts = [] if missing is None else [missing]
        parts += [] if of_x is None else [np.linalg.pinv(a, rcond=rcond).mT @ of_x]
        return sum(parts, np.zeros_like(b))

    return [of_a, of_b]


lstsq_p = Primitive("linalg.lstsq", _infer, _lstsq, _lstsq_vjp, batch=batch_each, multiple=True, blas=True)
