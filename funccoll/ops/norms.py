"""Norms and condition numbers over traced arrays, with NumPy's formulas."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..errors import ShapeError
from ..primitives.elementwise import general_root_p, root_p, stop_gradient_p
from .decompositions import as_floats, svdvals
from .registry import dims, implements, normalize_dim

__all__: list[str] = []


def _squares(x: Any) -> Any:
    return np.real(np.conjugate(x) * x) if x.dtype.kind == "c" else x * x


def _root_of_dot(x: Any, keepdims: bool) -> Any:
    flat = np.ravel(x)
    parts = (np.real(flat), np.imag(flat)) if x.dtype.kind == "c" else (flat,)
    total = functools.reduce(np.add, [np.dot(part, part) for part in parts])
    return np.reshape(bind(root_p, total), (1,) * x.ndim if keepdims else ())


def _largest(sizes: Any, dim: int, keepdims: bool) -> Any:
    """Return the largest of sizes, and 0 of none. If there are some, `initial=0` would take part in the ties of zeros."""
    if sizes.shape[dim]:
        return np.max(sizes, axis=dim, keepdims=keepdims)
    return np.max(sizes, axis=dim, keepdims=keepdims, initial=0)


def _powers(size: Any, ord: Any) -> Any:
    """Return the powers of sizes. A size of 0 gives a constant if the power's derivative there is infinite."""
    if ord > 1:
        return size**ord
    zero = size == 0
    return np.where(zero, bind(stop_gradient_p, size) ** ord, np.where(zero, np.ones((), size.dtype), size) ** ord)


def _vector_norm(x: Any, ord: Any, dim: int, keepdims: bool) -> Any:
    if ord is None or ord == 2:
        return bind(root_p, np.sum(_squares(x), axis=dim, keepdims=keepdims))
    if isinstance(ord, str):
        raise ShapeError(f"np.linalg.norm(ord={ord!r}) of vectors: it is an order of matrices. Choose two dimensions by axis.")
    size = np.abs(x)
    if ord == np.inf:
        return _largest(size, dim, keepdims)
    if ord == -np.inf:
        return np.min(size, axis=dim, keepdims=keepdims)
    if ord == 0:
        return np.sum((x != 0).astype(size.dtype), axis=dim, keepdims=keepdims)
    if ord == 1:
        return np.sum(size, axis=dim, keepdims=keepdims)
    total = np.sum(_powers(size, ord), axis=dim, keepdims=keepdims)
    return bind(general_root_p, total, np.asarray(1 / ord, total.dtype))


def _matrix_norm(x: Any, ord: Any, rows: int, columns: int, keepdims: bool) -> Any:
    x = np.moveaxis(x, (rows, columns), (-2, -1))
    if ord in (None, "fro", "f"):
        out = bind(root_p, np.sum(_squares(x), axis=(-2, -1)))
    elif ord in (2, -2, "nuc"):
        s = svdvals(x)
        out = np.sum(s, axis=-1) if ord == "nuc" else np.min(s, axis=-1) if ord == -2 else _largest(s, -1, False)
    elif ord in (1, -1, np.inf, -np.inf):
        sums = np.sum(np.abs(x), axis=-2 if abs(ord) == 1 else -1)
        out = _largest(sums, -1, False) if ord > 0 else np.min(sums, axis=-1)
    else:
        raise ShapeError(f"np.linalg.norm(ord={ord!r}) of matrices: an order is None, 'fro', 'nuc', 1, -1, 2, -2, inf or -inf.")
    return np.expand_dims(out, (rows, columns)) if keepdims else out


@implements(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """np.linalg.norm with every order."""
    x = as_floats(x)
    if axis is None and (ord is None or (ord in ("f", "fro") and x.ndim == 2) or (ord == 2 and x.ndim == 1)):
        return _root_of_dot(x, keepdims)
    over = dims(None, x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    over = tuple(normalize_dim(d, x.ndim) for d in over)
    if len(over) == 1:
        return _vector_norm(x, ord, over[0], keepdims)
    if len(over) != 2 or over[0] == over[1]:
        raise ShapeError(f"np.linalg.norm(ord={ord!r}) of dimensions {over} of shape {x.shape}: choose one or two by axis.")
    return _matrix_norm(x, ord, *over, keepdims)


@implements(np.linalg.matrix_norm)
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """np.linalg.matrix_norm."""
    return norm(x, ord, (-2, -1), keepdims)


@implements(np.linalg.vector_norm)
def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    """np.linalg.vector_norm."""
    x = as_floats(x)
    over = dims(axis, x.ndim)
    if len(over) == 1:
        return _vector_norm(x, ord, over[0], keepdims)
    rest = [d for d in range(x.ndim) if d not in over]
    flat = np.reshape(np.transpose(x, (*over, *rest)), (math.prod(x.shape[d] for d in over), *(x.shape[d] for d in rest)))
    out = _vector_norm(flat, ord, 0, False)
    return np.expand_dims(out, over) if keepdims else out


@implements(np.linalg.cond)
def cond(x: Any, p: Any = None) -> Any:
    """np.linalg.cond. It is infinite for a singular matrix only if it is computed from singular values."""
    x = as_floats(x)
    if p in (None, 2, -2):
        s = svdvals(x)
        ends = (s[..., 0], s[..., -1]) if p != -2 else (s[..., -1], s[..., 0])
        out = ends[0] / ends[1]
    else:
        size: Callable[[Any], Any] = lambda matrices: norm(matrices, p, (-2, -1))
        out = size(x) * size(np.linalg.inv(x))
    return np.where(np.isnan(out) & ~np.any(np.isnan(x), axis=(-2, -1)), np.asarray(np.inf, out.dtype), out)
