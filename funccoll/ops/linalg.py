"""NumPy's products and einsum over traced arrays."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..errors import ShapeError, UnsupportedError
from ..primitives.linalg import einsum_p
from .elementwise import matmul, unify
from .registry import as_traceable, implements, normalize_dim, refuse_out


@implements(np.tensordot)
def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """np.tensordot: transposes and one matmul."""
    a, b = as_traceable(a), as_traceable(b)
    if isinstance(axes, (int, np.integer)):
        left, right = list(range(a.ndim - int(axes), a.ndim)), list(range(int(axes)))
    else:
        left, right = ([x] if isinstance(x, (int, np.integer)) else list(x) for x in axes)
    left, right = [normalize_dim(d, a.ndim) for d in left], [normalize_dim(d, b.ndim) for d in right]
    if len(left) != len(right) or any(a.shape[i] != b.shape[j] for i, j in zip(left, right, strict=False)):
        raise ShapeError(f"np.tensordot: shapes {a.shape} and {b.shape} do not match along {axes!r}.")
    rows, columns = [d for d in range(a.ndim) if d not in left], [d for d in range(b.ndim) if d not in right]
    inner = math.prod(a.shape[d] for d in left)
    out = [*(a.shape[d] for d in rows), *(b.shape[d] for d in columns)]
    a = np.reshape(np.transpose(a, rows + left), (math.prod(a.shape[d] for d in rows), inner))
    b = np.reshape(np.transpose(b, right + columns), (inner, math.prod(b.shape[d] for d in columns)))
    return np.reshape(matmul(a, b), out)


@implements(np.dot)
def dot(a: Any, b: Any, out: Any = None) -> Any:
    """np.dot."""
    refuse_out(out)
    a, b = as_traceable(a), as_traceable(b)
    if not a.ndim or not b.ndim:
        return a * b
    return matmul(a, b) if a.ndim <= 2 and b.ndim <= 2 else tensordot(a, b, (a.ndim - 1, max(b.ndim - 2, 0)))


@implements(np.inner)
def inner(a: Any, b: Any) -> Any:
    """np.inner."""
    return a * b if not np.ndim(a) or not np.ndim(b) else tensordot(a, b, (-1, -1))


@implements(np.vdot)
def vdot(a: Any, b: Any) -> Any:
    """np.vdot: conjugates its first argument."""
    a = np.ravel(a)
    return matmul(np.conjugate(a) if a.dtype.kind == "c" else a, np.ravel(b))


@implements(np.outer)
def outer(a: Any, b: Any, out: Any = None) -> Any:
    """np.outer."""
    refuse_out(out)
    return np.expand_dims(np.ravel(a), 1) * np.expand_dims(np.ravel(b), 0)


def _explicit(subscripts: str, operands: Sequence[Any]) -> str:
    """Return the subscripts without spaces, with an output term and with letters in place of `...`."""
    subscripts = subscripts.replace(" ", "")
    left, arrow, right = subscripts.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise ShapeError(f"np.einsum({subscripts!r}) names {len(terms)} operands, and {len(operands)} were given.")
    extra = [x.ndim - len(t.replace("...", "")) if "..." in t else 0 for t, x in zip(terms, operands, strict=True)]
    if min(extra, default=0) < 0 or (arrow and max(extra, default=0) and "..." not in right):
        raise ShapeError(f"np.einsum({subscripts!r}): '...' does not fit shapes {[tuple(x.shape) for x in operands]}.")
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in subscripts]
    batch = "".join(spare[: max(extra, default=0)])
    terms = [t.replace("...", batch[len(batch) - n :]) for t, n in zip(terms, extra, strict=True)]
    if not arrow:
        once = [c for c in sorted(set(left) - set(".,")) if left.count(c) == 1]
        return f"{','.join(terms)}->{batch}{''.join(once)}"
    return f"{','.join(terms)}->{right.replace('...', batch)}"


def _as_string(*items: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the string and the operands of a call `np.einsum(a, [0, 1], b, [1, 2], [0, 2])`."""
    letters = string.ascii_lowercase + string.ascii_uppercase
    terms = ["".join("..." if i is Ellipsis else letters[i] for i in dimensions) for dimensions in items[1::2]]
    result = ["".join("..." if i is Ellipsis else letters[i] for i in items[-1])] if len(items) % 2 else []
    return "->".join([",".join(terms), *result]), items[: 2 * len(terms) : 2]


@implements(np.einsum)
def einsum(subscripts: Any, *operands: Any, out: Any = None, optimize: Any = False, dtype: Any = None) -> Any:
    """np.einsum with a subscript string, or with a list of dimension numbers after each operand."""
    if dtype is not None:
        raise UnsupportedError("np.einsum(..., dtype=...) cannot be traced; convert the operands with .astype(dtype).")
    if not isinstance(subscripts, str):
        subscripts, operands = _as_string(subscripts, *operands)
    arrays = unify(*map(as_traceable, operands))
    explicit = _explicit(subscripts, arrays)
    return bind(einsum_p, *_broadcast_terms(explicit, arrays), subscripts=explicit)


def _broadcast_terms(explicit: str, operands: Sequence[Any]) -> list[Any]:
    """Broadcast every dimension of size 1 to the size that its letter has elsewhere (NumPy's rule)."""
    terms = explicit.partition("->")[0].split(",")
    if any(len(t) != x.ndim for t, x in zip(terms, operands, strict=True)):
        return list(operands)  # the type rule raises the error
    sizes: dict[str, int] = {}
    for letter, n in ((c, n) for t, x in zip(terms, operands, strict=True) for c, n in zip(t, x.shape, strict=True)):
        if n != 1 or letter not in sizes:
            sizes[letter] = n
    pairs = zip(terms, operands, strict=True)
    return [np.broadcast_to(x, [n if n != 1 else sizes[c] for c, n in zip(t, x.shape, strict=True)]) for t, x in pairs]


@implements(np.trace)
def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> Any:
    """np.trace of the main diagonal."""
    refuse_out(out)
    return np.sum(diagonal(a, offset, axis1, axis2), axis=-1, dtype=dtype)


@implements(np.diagonal)
def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """np.diagonal."""
    i, j = normalize_dim(axis1, a.ndim), normalize_dim(axis2, a.ndim)
    a = np.moveaxis(a, (i, j), (-2, -1))
    rows, columns = a.shape[-2:]
    n = max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)
    k = np.arange(n)
    return a[..., k + max(-offset, 0), k + max(offset, 0)]
