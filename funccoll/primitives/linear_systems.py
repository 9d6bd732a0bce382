"""Primitives that solve linear systems, with inverses and determinants, over stacks of matrices (leading dimensions).

Their references are NumPy's, which computes single precision in double. No rule conjugates the cotangent's side of the
pairing: the transpose of a matrix is a plain one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType
from ..errors import DTypeError, ShapeError
from .batch_rules import batch_aligned, batch_all
from .elementwise import broadcast_shapes
from .shaping import fit

__all__ = [
    "adjoint",
    "cofactors_p",
    "conjugate",
    "det_p",
    "inv_p",
    "pinv_p",
    "real_dtype",
    "require_matrices",
    "slogdet_p",
    "solve_p",
    "solve_triangular_p",
]


def require_matrices(name: str, *types: ArrayType, square: bool = False) -> np.dtype:
    """Return the dtype of stacks of matrices. Raise ShapeError or DTypeError for matrices that LAPACK does not take."""
    for x in types:
        if x.dtype.kind not in "fc" or x.dtype == np.float16:
            raise DTypeError(f"{name} is not defined for {x.dtype}, as in NumPy: convert it with .astype(np.float32).")
        if x.ndim < 2:
            raise ShapeError(f"{name}: a matrix has two dimensions, and shape {x.shape} has {x.ndim}.")
    if square and types[0].shape[-1] != types[0].shape[-2]:
        raise ShapeError(f"{name}: the last two dimensions of shape {types[0].shape} differ; the matrix must be square.")
    return functools.reduce(np.promote_types, (x.dtype for x in types))


def real_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the real part."""
    return np.finfo(dtype).dtype


def conjugate(x: Any) -> Any:
    """Return np.conjugate, or a real array unchanged."""
    return np.conjugate(x) if x.dtype.kind == "c" else x


def adjoint(x: Any) -> Any:
    """Return the conjugate transpose of each matrix."""
    return conjugate(x.mT)


# ---------------------------------------------------------------- solve


def _infer_solve(a: ArrayType, b: ArrayType, name: str = "np.linalg.solve") -> list[ArrayType]:
    dtype = require_matrices(name, a, b, square=True)
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"{name}: a matrix of shape {a.shape} and a right-hand side of shape {b.shape}: it has {b.shape[-2]} rows, not "
            f"{a.shape[-1]}. One with one dimension is a vector; of several vectors pass b[..., None]."
        )
    batch = broadcast_shapes(f"{name} (leading dimensions)", [a.shape[:-2], b.shape[:-2]])
    return [ArrayType((*batch, *b.shape[-2:]), dtype)]


def _solve_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    a, b = inputs
    pulled = functools.cache(lambda: np.linalg.solve(a.mT, cts[0]))
    return [lambda: fit(-(pulled() @ outs[0].mT), a), lambda: fit(pulled(), b)]


solve_p = Primitive("linalg.solve", _infer_solve, np.linalg.solve, _solve_vjp, batch=batch_aligned, blas=True)


_BLOCK = 64
"""Rows of the triangles for LAPACK's general solver: it takes n³ operations, and substitution takes n²."""


def _substitute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solve upper triangular systems: one half of the matrix after the other, with a product of matrices between them.

    The pivots of the general solver are the triangle's own diagonal, so it solves a block by plain substitution.
    """
    n = a.shape[-1]
    if n <= _BLOCK:
        return np.linalg.solve(a, b)
    cut = n // 2
    below = _substitute(a[..., cut:, cut:], b[..., cut:, :])
    above = _substitute(a[..., :cut, :cut], b[..., :cut, :] - a[..., :cut, cut:] @ below)
    return np.concatenate([above, np.broadcast_to(below, (*above.shape[:-2], *below.shape[-2:]))], axis=-2)


def _triangle(a: Any, lower: bool, unit_diagonal: bool) -> Any:
    inner = -1 if unit_diagonal else 0
    return np.tril(a, inner) if lower else np.triu(a, -inner)


def _solve_triangular(a: np.ndarray, b: np.ndarray, *, lower: bool, unit_diagonal: bool) -> np.ndarray:
    a = _triangle(a, lower, unit_diagonal)
    if unit_diagonal:
        a = a + np.eye(a.shape[-1], dtype=a.dtype)
    if lower:  # the same unknowns from the last to the first
        return np.ascontiguousarray(np.flip(_substitute(np.flip(a, (-2, -1)), np.flip(b, -2)), -2))
    return _substitute(a, b)


def _infer_solve_triangular(a: ArrayType, b: ArrayType, *, lower: bool, unit_diagonal: bool) -> list[ArrayType]:
    return _infer_solve(a, b, "fc.linalg.solve_triangular")


def _solve_triangular_vjp(
    cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, lower: bool, unit_diagonal: bool
) -> list[Any]:
    a, b = inputs
    params = {"lower": not lower, "unit_diagonal": unit_diagonal}
    pulled = functools.cache(lambda: bind(solve_triangular_p, a.mT, cts[0], **params))
    return [lambda: fit(_triangle(-(pulled() @ outs[0].mT), lower, unit_diagonal), a), lambda: fit(pulled(), b)]


solve_triangular_p = Primitive(
    "linalg.solve_triangular",
    _infer_solve_triangular,
    _solve_triangular,
    _solve_triangular_vjp,
    batch=batch_aligned,
    blas=True,
)


# ---------------------------------------------------------------- inverses


def _infer_inv(a: ArrayType) -> list[ArrayType]:
    require_matrices("np.linalg.inv", a, square=True)
    return [a]


def _inv_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    return [lambda: -(outs[0].mT @ cts[0] @ outs[0].mT)]


inv_p = Primitive("linalg.inv", _infer_inv, np.linalg.inv, _inv_vjp, batch=batch_all, blas=True)


def _infer_pinv(a: ArrayType, *, rcond: float) -> list[ArrayType]:
    dtype = require_matrices("np.linalg.pinv", a)
    return [ArrayType((*a.shape[:-2], a.shape[-1], a.shape[-2]), dtype)]


def _pinv_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, rcond: float) -> list[Any]:
    """Apply the transpose of dP = -P dA P + P Pᴴ dAᴴ (I - A P) + (I - P A) dAᴴ Pᴴ P (Golub and Pereyra, 1973).

    This assumes that the singular values below the cut are zero. With a large rcond they are not; then `_along_truncated` is
    used.
    """
    (a,), (p,), (ct,) = inputs, outs, cts

    def pull() -> Any:
        if rcond > np.sqrt(np.finfo(a.dtype).eps):
            return conjugate(_along_truncated(ct.mT, a, rcond))
        conj, back = conjugate(p), adjoint(ct)
        left, right = back @ conj @ p.mT, p.mT @ conj @ back
        return left - conjugate(a @ p) @ left + right - right @ conjugate(p @ a) - p.mT @ ct @ p.mT

    return [pull]


def _along_truncated(c: Any, a: Any, rcond: float) -> Any:
    """Differentiate (pinv A)ᴴ = U f(S) Vᴴ along `c`. f is 1/s of singular values above the cut, and 0 of others.

    In U and V the derivative multiplies the Hermitian part by f's divided differences (f(s) - f(t)) / (s - t), and the other
    part by (f(s) + f(t)) / (s + t). This is the theorem of Daleckii and Krein for the Hermitian matrix [[0, A], [Aᴴ, 0]]. It
    is self-adjoint.
    """
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    kept = s > rcond * np.max(s, axis=-1, keepdims=True)
    f = np.where(kept, 1 / np.where(kept, s, 1), 0)
    column, row = lambda x: np.expand_dims(x, -1), lambda x: np.expand_dims(x, -2)
    alike, product = column(kept) == row(kept), column(f) * row(f)
    differences = np.where(alike, -product, (column(f) - row(f)) / np.where(alike, 1, column(s) - row(s)))
    sums = np.where(alike, product, (column(f) + row(f)) / np.where(alike, 1, column(s) + row(s)))
    right, left = c @ adjoint(vh), adjoint(u) @ c
    x = left @ adjoint(vh)
    inside = differences * (x + adjoint(x)) / 2 + sums * (x - adjoint(x)) / 2
    return (u @ inside + (right - u @ x) * row(f * f)) @ vh + u @ (column(f * f) * (left - x @ vh))


pinv_p = Primitive(
    "linalg.pinv", _infer_pinv, lambda a, *, rcond: np.linalg.pinv(a, rcond=rcond), _pinv_vjp, batch=batch_all, blas=True
)


# ---------------------------------------------------------------- determinants


def _as_matrices(x: Any) -> Any:
    """Return a number for each matrix, as matrices of one element."""
    return np.expand_dims(x, (-2, -1))


def _cofactors(a: np.ndarray) -> np.ndarray:
    """Return det(A) A⁻ᵀ, which exists for singular matrices, too.

    For A = U S Vᴴ it is det(U) det(Vᴴ) conj(U) C conj(Vᴴ). The diagonal matrix C has the products of all other singular values.
    """
    det, out = np.linalg.det(a), np.empty_like(a)
    singular = det == 0
    regular = ~singular
    out[regular] = _as_matrices(det[regular]) * np.swapaxes(np.linalg.inv(a[regular]), -1, -2)
    if singular.any():
        u, s, vh = np.linalg.svd(a[singular])
        others = np.stack([np.prod(np.delete(s, k, axis=-1), axis=-1) for k in range(s.shape[-1])], axis=-1)
        turned = np.conjugate(u) * np.expand_dims(others, -2) @ np.conjugate(vh)
        out[singular] = _as_matrices(np.linalg.det(u) * np.linalg.det(vh)) * turned
    return out


def _cofactors_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    def pull() -> Any:
        inverse = np.linalg.inv(inputs[0]).mT
        total = _as_matrices(np.sum(cts[0] * outs[0], axis=(-2, -1)))
        return total * inverse - inverse @ cts[0].mT @ outs[0]

    return [pull]


cofactors_p = Primitive("linalg.cofactors", _infer_inv, _cofactors, _cofactors_vjp, batch=batch_all, blas=True)


def _infer_det(a: ArrayType) -> list[ArrayType]:
    return [ArrayType(a.shape[:-2], require_matrices("np.linalg.det", a, square=True))]


def _det_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    return [lambda: _as_matrices(cts[0]) * bind(cofactors_p, inputs[0])]


det_p = Primitive("linalg.det", _infer_det, np.linalg.det, _det_vjp, batch=batch_all, blas=True)


def _infer_slogdet(a: ArrayType) -> list[ArrayType]:
    dtype = require_matrices("np.linalg.slogdet", a, square=True)
    return [ArrayType(a.shape[:-2], dtype), ArrayType(a.shape[:-2], real_dtype(dtype))]


def _slogdet_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """Differentiate: d log|A| is the real part of tr(A⁻¹ dA), and the imaginary part turns the sign."""
    (a,), (of_sign, of_log) = inputs, cts

    def pull() -> Any:
        turned = None if of_sign is None or a.dtype.kind != "c" else 1j * np.imag(of_sign * outs[0])
        weights = [w for w in (of_log, turned) if w is not None]
        if not weights:  # a real sign is a step
            return np.zeros_like(a)
        return _as_matrices(sum(weights[1:], weights[0])) * np.linalg.inv(a).mT

    return [pull]


slogdet_p = Primitive(
    "linalg.slogdet", _infer_slogdet, np.linalg.slogdet, _slogdet_vjp, batch=batch_all, multiple=True, blas=True
)
