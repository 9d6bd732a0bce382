"""Primitives that decompose matrices, over stacks of them (leading dimensions). Their references are NumPy's.

NumPy reads one triangle of a symmetric matrix. So these gradients lie in one triangle, too: they are derivatives of the actual
computation. (JAX reads the mean of the matrix and its adjoint; its gradient is the mean of ours and its adjoint.) LAPACK
chooses the signs or phases of eigenvectors and singular vectors. A gradient is right for functions that do not depend on
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType
from ..errors import UnsupportedError
from .batch_rules import batch_all
from .linear_systems import adjoint, conjugate, real_dtype, require_matrices, solve_triangular_p
from .shaping import fit

__all__ = ["cholesky_p", "eig_p", "eigh_p", "eigvals_p", "eigvalsh_p", "qr_p", "svd_p", "svdvals_p"]

_decomposition = partial(Primitive, batch=batch_all, blas=True)


def _half_triangle(n: int, dtype: np.dtype, lower: bool = True) -> np.ndarray:
    """Return ones in one triangle, and 1/2 on the diagonal."""
    ones = np.ones((n, n), real_dtype(dtype))
    return (np.tril(ones) if lower else np.triu(ones)) - np.eye(n, dtype=ones.dtype) / 2


def _to_triangle(ct: Any, lower: bool) -> Any:
    """Return the cotangent of one triangle, given that of the Hermitian matrix that it stands for."""
    return (ct + adjoint(ct)) * _half_triangle(ct.shape[-1], ct.dtype, lower)


def _total(parts: Sequence[Any]) -> Any:
    return sum(parts[1:], parts[0])


def _diagonal_matrix(x: Any) -> Any:
    """Return matrices with vectors on their diagonals."""
    return np.expand_dims(x, -2) * np.eye(x.shape[-1], dtype=real_dtype(x.dtype))


def _inverse_gaps(x: Any) -> Any:
    """Return 1 / (x[j] - x[i]) for every pair, and 0 on the diagonal."""
    same = np.eye(x.shape[-1], dtype=np.bool_)
    gaps = np.expand_dims(x, -2) - np.expand_dims(x, -1)
    return np.where(same, np.zeros((), x.dtype), 1 / np.where(same, np.ones((), x.dtype), gaps))


# ---------------------------------------------------------------- Cholesky


def _infer_cholesky(a: ArrayType, *, upper: bool) -> list[ArrayType]:
    require_matrices("np.linalg.cholesky", a, square=True)
    return [a]


def _cholesky_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, upper: bool) -> list[Any]:
    """Source: Murray, "Differentiation of the Cholesky decomposition", 2016."""

    def pull() -> Any:
        # An upper factor is the adjoint of the lower one.
        factor, ct = (adjoint(outs[0]), adjoint(cts[0])) if upper else (outs[0], cts[0])
        inner = (factor.mT @ ct) * _half_triangle(factor.shape[-1], factor.dtype)
        solve = partial(bind, solve_triangular_p, lower=False, unit_diagonal=False)
        whole = solve(adjoint(factor), solve(factor.mT, inner).mT).mT
        return _to_triangle(whole, not upper)

    return [pull]


cholesky_p = _decomposition("linalg.cholesky", _infer_cholesky, np.linalg.cholesky, _cholesky_vjp)


# ---------------------------------------------------------------- eigenvalues


def _infer_eigh(a: ArrayType, *, lower: bool) -> list[ArrayType]:
    dtype = require_matrices("np.linalg.eigh", a, square=True)
    return [ArrayType(a.shape[:-1], real_dtype(dtype)), a]


def _eigh_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, lower: bool) -> list[Any]:
    (of_values, of_vectors), (w, v) = cts, outs

    def pull() -> Any:
        # If only the eigenvalues are used, they may be equal.
        parts = [] if of_values is None else [_diagonal_matrix(of_values)]
        parts += [] if of_vectors is None else [_inverse_gaps(w) * (v.mT @ of_vectors)]
        return fit(_to_triangle(conjugate(v) @ _total(parts) @ v.mT, lower), inputs[0])

    return [pull]


def _uplo(lower: bool) -> Any:
    return "L" if lower else "U"


eigh_p = _decomposition(
    "linalg.eigh", _infer_eigh, lambda a, *, lower: np.linalg.eigh(a, _uplo(lower)), _eigh_vjp, multiple=True
)


def _eigvalsh_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, lower: bool) -> list[Any]:
    def pull() -> Any:
        values, vectors = np.linalg.eigh(inputs[0], _uplo(lower))
        return _eigh_vjp([cts[0], None], inputs, [values, vectors], lower=lower)[0]()

    return [pull]


eigvalsh_p = _decomposition(
    "linalg.eigvalsh",
    lambda a, *, lower: _infer_eigh(a, lower=lower)[:1],
    lambda a, *, lower: np.linalg.eigvalsh(a, _uplo(lower)),
    _eigvalsh_vjp,
)


def _infer_eig(a: ArrayType) -> list[ArrayType]:
    dtype = np.result_type(require_matrices("np.linalg.eig", a, square=True), np.complex64)
    return [ArrayType(a.shape[:-1], dtype), ArrayType(a.shape, dtype)]


def _complex(x: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Return NumPy's result as complex. NumPy's is real if all eigenvalues are: its type depends on values."""
    return x.astype(np.result_type(a, np.complex64), copy=False)


def _eig_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """Differentiate eigenvectors of length 1.

    Source: Boeddeker et al., "On the computation of complex-valued gradients", 2017, (4.77).
    """
    (of_values, of_vectors), (w, v) = cts, outs

    def pull() -> Any:
        parts = [] if of_values is None else [_diagonal_matrix(of_values)]
        if of_vectors is not None:
            inner = v.mT @ of_vectors
            lengths = np.real(inner) * np.eye(v.shape[-1], dtype=real_dtype(v.dtype))
            parts.append(_inverse_gaps(w) * (inner - v.mT @ conjugate(v) @ lengths))
        return fit(np.linalg.solve(v.mT, _total(parts) @ v.mT), inputs[0])

    return [pull]


eig_p = _decomposition("linalg.eig", _infer_eig, lambda a: [_complex(x, a) for x in np.linalg.eig(a)], _eig_vjp, multiple=True)


def _eigvals_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    return [lambda: _eig_vjp([cts[0], None], inputs, np.linalg.eig(inputs[0]))[0]()]


eigvals_p = _decomposition(
    "linalg.eigvals", lambda a: _infer_eig(a)[:1], lambda a: _complex(np.linalg.eigvals(a), a), _eigvals_vjp
)


# ---------------------------------------------------------------- singular values


def _infer_svd(a: ArrayType, *, full_matrices: bool) -> list[ArrayType]:
    dtype = require_matrices("np.linalg.svd", a)
    *batch, m, n = a.shape
    k = min(m, n)
    rows, columns = (m, n) if full_matrices else (k, k)
    return [
        ArrayType((*batch, m, rows), dtype),
        ArrayType((*batch, k), real_dtype(dtype)),
        ArrayType((*batch, columns, n), dtype),
    ]


def _svd_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, full_matrices: bool) -> list[Any]:
    """Source: Townsend, "Differentiating the singular value decomposition", 2016; the phases: Wan and Zhang, 2019."""
    (a,), (of_u, of_s, of_vh), (u, s, vh) = inputs, cts, outs
    m, n = a.shape[-2:]
    if full_matrices and m != n:
        if of_u is not None or of_vh is not None:
            raise UnsupportedError(
                f"np.linalg.svd of shape {a.shape} with full_matrices=True: the vectors beyond the first {min(m, n)} are any "
                "basis of the rest, so only the singular values have a gradient. Pass full_matrices=False."
            )
        return _svdvals_vjp([of_s], inputs, [s])  # through the vectors that have derivatives

    def pull() -> Any:
        parts = [] if of_s is None else [_diagonal_matrix(of_s)]
        outside = []
        row, column = np.expand_dims(s, -2), np.expand_dims(s, -1)
        gaps = None if of_u is None and of_vh is None else _inverse_gaps(np.square(s))
        if of_u is not None:
            inner = u.mT @ of_u
            parts.append(gaps * (inner - adjoint(inner)) * row)
            if a.dtype.kind == "c":
                parts.append(1j * np.imag(inner) * np.eye(s.shape[-1], dtype=s.dtype) / row)
            if m > n:
                scaled = of_u / row
                outside.append((scaled - conjugate(u) @ (u.mT @ scaled)) @ conjugate(vh))
        if of_vh is not None:
            inner = of_vh @ vh.mT
            parts.append(column * gaps * (adjoint(inner) - inner))
            if n > m:
                scaled = of_vh / column
                outside.append(conjugate(u) @ (scaled - (scaled @ vh.mT) @ conjugate(vh)))
        return sum(outside, conjugate(u) @ _total(parts) @ conjugate(vh))

    return [pull]


svd_p = _decomposition(
    "linalg.svd", _infer_svd, lambda a, *, full_matrices: np.linalg.svd(a, full_matrices), _svd_vjp, multiple=True
)


def _svdvals_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    def pull() -> Any:
        vectors = np.linalg.svd(inputs[0], full_matrices=False)
        return _svd_vjp([None, cts[0], None], inputs, vectors, full_matrices=False)[0]()

    return [pull]


svdvals_p = _decomposition(
    "linalg.svdvals",
    lambda a: _infer_svd(a, full_matrices=False)[1:2],
    lambda a: np.linalg.svd(a, compute_uv=False),
    _svdvals_vjp,
)


# ---------------------------------------------------------------- QR


def _infer_qr(a: ArrayType, *, complete: bool) -> list[ArrayType]:
    dtype = require_matrices("np.linalg.qr", a)
    *batch, m, n = a.shape
    k = m if complete else min(m, n)
    return [ArrayType((*batch, m, k), dtype), ArrayType((*batch, k, n), dtype)]


def _qr_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, complete: bool) -> list[Any]:
    """Source: Walter and Lehmann, "Algorithmic differentiation of linear algebra functions", 2010."""
    (a,), (of_q, of_r), (q, r) = inputs, cts, outs
    m, n = a.shape[-2:]
    if complete and m > n:
        raise UnsupportedError(
            f"np.linalg.qr of shape {a.shape} in mode 'complete' has no gradient: the last {m - n} columns of Q are any basis "
            "of the rest. Use mode 'reduced'."
        )

    def pull() -> Any:
        # The square matrix before column m has the same Q, which gives the rest of R.
        of_square_q = of_q
        if n > m and of_r is not None:
            rest = conjugate(a[..., m:]) @ adjoint(of_r[..., m:])
            of_square_q = rest if of_q is None else of_q + rest
        square_r, of_square_r = r[..., :m], None if of_r is None else of_r[..., :m]
        parts = [] if of_square_q is None else [q.mT @ of_square_q]
        parts += [] if of_square_r is None else [-(of_square_r @ square_r.mT)]
        inner = _total(parts)
        turn = (inner - adjoint(inner)) * _half_triangle(inner.shape[-1], inner.dtype) - inner
        ct = conjugate(q) @ turn
        ct = ct if of_square_q is None else ct + of_square_q
        ct = bind(solve_triangular_p, square_r, ct.mT, lower=False, unit_diagonal=False).mT
        return ct if n <= m else np.concatenate([ct, _rest(ct)], axis=-1)

    def _rest(ct: Any) -> Any:
        if of_r is None:
            return np.zeros((*ct.shape[:-1], n - m), ct.dtype)
        return conjugate(q) @ of_r[..., m:]

    return [pull]


qr_p = _decomposition(
    "linalg.qr",
    _infer_qr,
    lambda a, *, complete: np.linalg.qr(a, "complete" if complete else "reduced"),
    _qr_vjp,
    multiple=True,
)
