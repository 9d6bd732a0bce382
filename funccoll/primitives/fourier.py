"""Primitives of discrete Fourier transforms along one dimension. Those over several dimensions consist of these, as NumPy's do.

A transform cuts its operand to `n` elements or pads it with zeros, multiplies by a symmetric matrix, and scales by `norm`. So
its transpose is the transform of the cotangent, cut or padded to the operand's size. A transform between real numbers and
half a spectrum counts inner frequencies twice, because they stand for the other half, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType, bfloat16
from ..errors import DTypeError, ShapeError
from .batch_rules import shifted
from .shaping import fit

__all__ = ["fft_p", "ifft_p", "irfft_p", "rfft_p"]

_OTHER_DIRECTION: dict[str, Any] = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


def _resized(x: Any, n: int, dim: int) -> Any:
    """Return `x` with n elements along a dimension, cut or padded with zeros."""
    size = x.shape[dim]
    if size > n:
        return x[(slice(None),) * dim + (slice(0, n),)]
    return x if size == n else np.pad(x, [(0, n - size if d == dim else 0) for d in range(x.ndim)])


def _counts(n: int, x: Any, dim: int) -> np.ndarray:
    """Count how often each frequency of half a spectrum stands in the whole one of n, along a dimension of x."""
    counts = np.full(n // 2 + 1, 2, np.finfo(x.dtype).dtype)
    counts[0] = 1
    if n % 2 == 0:
        counts[-1] = 1
    return counts.reshape([-1 if d == dim else 1 for d in range(x.ndim)])


def _infer(transform: Callable[..., Any], length: Callable[[int], int]) -> Callable[..., list[ArrayType]]:
    name = f"np.fft.{transform.__name__}"

    def infer(x: ArrayType, *, n: int, dim: int, norm: str) -> list[ArrayType]:
        if x.dtype == bfloat16 or (transform is np.fft.rfft and x.dtype.kind == "c"):
            raise DTypeError(f"{name} is not defined for {x.dtype}, as in NumPy: use np.fft.fft, or convert it.")
        if n < 1:
            raise ShapeError(f"{name} of {n} elements along dimension {dim} of shape {x.shape}: there must be at least one.")
        dtype = transform(np.zeros(2, x.dtype)).dtype
        return [ArrayType((*x.shape[:dim], length(n), *x.shape[dim + 1 :]), dtype)]

    return infer


def _batch(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, dim: int, **params: Any) -> Any:
    return bind(primitive, values[0], dim=shifted(dim), **params)


def _define(transform: Callable[..., Any], length: Callable[[int], int], transpose: Callable[..., Any]) -> Primitive:
    def reference(x: np.ndarray, *, n: int, dim: int, norm: str) -> np.ndarray:
        return transform(x, n, dim, norm)

    def vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, n: int, dim: int, norm: str) -> list[Any]:
        (x,) = inputs
        return [lambda: fit(_resized(transpose(cts[0], n, dim, norm), x.shape[dim], dim), x)]

    return Primitive(f"fft.{transform.__name__}", _infer(transform, length), reference, vjp, batch=_batch)


def _from_half(ct: Any, n: int, dim: int, norm: str) -> Any:
    return np.fft.irfft(np.conjugate(ct) / _counts(n, ct, dim), n, dim, _OTHER_DIRECTION[norm])


def _to_half(ct: Any, n: int, dim: int, norm: str) -> Any:
    return np.conjugate(np.fft.rfft(ct, n, dim, _OTHER_DIRECTION[norm])) * _counts(n, ct, dim)


fft_p = _define(np.fft.fft, lambda n: n, np.fft.fft)
ifft_p = _define(np.fft.ifft, lambda n: n, np.fft.ifft)
rfft_p = _define(np.fft.rfft, lambda n: n // 2 + 1, _from_half)
irfft_p = _define(np.fft.irfft, lambda n: n, _to_half)
