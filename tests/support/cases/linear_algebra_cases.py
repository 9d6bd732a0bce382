"""The part of `numpy_cases` for np.linalg: solving, decompositions, norms. Importing it adds its cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.support.cases.numpy_cases import DIRECTION, DISCRETE, FORWARD, cplx, ints, normal
from tests.support.cases.numpy_cases import add as add_case

L = np.linalg
add = partial(add_case, grad=DIRECTION)


def regular(*shape: int, complex: bool = False) -> np.ndarray:
    """Stacks of matrices far from singular."""
    return (cplx if complex else normal)(*shape) + 3 * np.eye(shape[-1])


def hermitian(*shape: int, complex: bool = False) -> np.ndarray:
    """Stacks of positive definite matrices."""
    a = regular(*shape, complex=complex)
    return a @ np.conjugate(a.mT)


def sizes(decompose: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[Any], list[Any]]:
    """A decomposition without the signs or phases that LAPACK chooses."""
    return lambda a: [np.abs(x) for x in decompose(a, *args, **kwargs)]


for _complex in (True, False):
    _x = cplx if _complex else normal
    for _shape in ((2, 3, 3), (3, 3)):
        _a, _h = regular(*_shape, complex=_complex), hermitian(*_shape, complex=_complex)
        for _f in (L.inv, L.det, L.slogdet, L.pinv):
            add(_f, _f, _a)
        add(L.solve, L.solve, _a, _x(*_shape))
        add(L.cholesky, L.cholesky, _h)
        add(L.eigvalsh, L.eigvalsh, _h)
        add(L.eigh, sizes(L.eigh), _h)
        add(L.eig, sizes(L.eig), _a)
        add(L.eigvals, lambda a: np.abs(np.linalg.eigvals(a)), _a)
        add(L.matrix_power, lambda a: np.linalg.matrix_power(a, -5), _a)
    add(L.cholesky, lambda a: np.linalg.cholesky(a, upper=True), _h)
    add(L.eigvalsh, lambda a: np.linalg.eigvalsh(a, "U"), _h)
    add(L.eigh, sizes(L.eigh, "U"), _h)
    for _shape in ((4, 3), (2, 2, 3), (3, 3)):
        _a = _x(*_shape)
        add(L.svd, sizes(L.svd, full_matrices=False), _a)
        add(L.svd, lambda a: np.linalg.svd(a, compute_uv=False), _a)
        add(L.svdvals, L.svdvals, _a)
        add(L.qr, L.qr, _a)
        add(L.pinv, L.pinv, _a)
        for _ord in (None, "fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf):
            add(L.matrix_norm, lambda a, o=_ord: np.linalg.matrix_norm(a, ord=o), _a, exact=False)
        add(L.norm, lambda a: np.linalg.norm(a, "nuc", axis=(0, 1), keepdims=True), _a)
    for _ord in (1, 2, 3, np.inf):
        add(L.vector_norm, lambda a, o=_ord: np.linalg.vector_norm(a, ord=o, axis=(0, 2)), _x(2, 3, 2), exact=False)
    add(L.norm, L.norm, _x(4, 3), exact=False)
    add(L.norm, lambda a: np.linalg.norm(a, 2), _x(4, 3))

add(L.solve, L.solve, regular(3, 3), normal(3))
add(L.solve, L.solve, regular(2, 3, 3), normal(3))
add(L.solve, L.solve, regular(3, 3), cplx(4, 3, 2))
add(L.solve, L.solve, regular(2, 1, 2, 2), normal(3, 2, 1))
add(L.solve, L.solve, ints(1, 9, 3, 3) + 9 * np.eye(3, dtype=np.int64), ints(0, 9, 3), grad=DISCRETE)
add(L.solve, L.solve, regular(3, 3).astype(np.float32), ints(0, 9, 3), grad=FORWARD)
add(L.inv, L.inv, np.zeros((0, 0)), grad=FORWARD)
add(L.slogdet, lambda a: list(np.linalg.slogdet(a)), regular(2, 2).astype(np.complex64), grad=FORWARD)
add(L.det, L.det, ints(0, 9, 2, 3, 3), grad=DISCRETE)
add(L.svd, lambda a: np.linalg.svd(a)[1], normal(4, 3))
add(L.svd, L.svd, normal(2, 4, 3), grad=FORWARD)
add(L.qr, lambda a: np.linalg.qr(a, "complete"), normal(2, 3))
add(L.qr, lambda a: np.linalg.qr(a, "complete"), normal(3, 2), grad=FORWARD)
add(L.qr, lambda a: np.linalg.qr(a, "r"), cplx(3, 2))
add(L.qr, lambda a: np.linalg.qr(a).Q @ np.linalg.qr(a).R, normal(2, 3), exact=False)
add(L.pinv, lambda a: np.linalg.pinv(a.T @ a, rcond=1e-10), normal(2, 3))
add(L.pinv, lambda a: np.linalg.pinv(a, rtol=None), normal(3, 2))
add(L.pinv, lambda a: np.linalg.pinv(a, rcond=0.4), cplx(2, 4, 3))  # which cuts singular values off that are not zero
for _m, _n in ((4, 2), (2, 4), (3, 3)):
    # What NumPy leaves out is not compared: its residuals depend on the rank, which is an integer.
    add(L.lstsq, lambda a, b: [out for i, out in enumerate(np.linalg.lstsq(a, b)) if i != 2], cplx(_m, _n), cplx(_m, 2))
add(L.lstsq, L.lstsq, normal(4, 2), normal(4), grad=FORWARD)
add(L.lstsq, lambda a, b: np.linalg.lstsq(a, b, 0.5)[0], normal(4, 3), normal(4, 2))
for _n in (0, 1, 2, 3, 6):
    add(L.matrix_power, lambda a, n=_n: np.linalg.matrix_power(a, n), regular(2, 2, 2), grad=FORWARD)
add(L.multi_dot, lambda *xs: np.linalg.multi_dot(xs), normal(3), normal(3, 4), normal(4, 2), normal(2), exact=False)
add(L.multi_dot, lambda *xs: np.linalg.multi_dot(xs), normal(2, 3), normal(3, 4), exact=False)
add(L.multi_dot, lambda *xs: np.linalg.multi_dot(xs), normal(2, 3), normal(3, 4), normal(4, 2), exact=False)
add(L.multi_dot, lambda *xs: np.linalg.multi_dot(xs), *(normal(n + 1, n) for n in (5, 4, 3, 2, 1)), exact=False)
add(L.tensorsolve, L.tensorsolve, regular(6, 6).reshape(2, 3, 3, 2), normal(2, 3))
add(L.tensorsolve, lambda a, b: np.linalg.tensorsolve(a, b, (0, 2)), regular(6, 6).reshape(3, 2, 2, 3), normal(2, 3))
add(L.tensorinv, L.tensorinv, regular(6, 6).reshape(2, 3, 6))
add(L.tensorinv, lambda a: np.linalg.tensorinv(a, 1), regular(6, 6).reshape(6, 3, 2))
add(L.matrix_rank, L.matrix_rank, normal(2, 3, 3), grad=DISCRETE)
add(L.matrix_rank, lambda a: np.linalg.matrix_rank(np.outer(a, a)), normal(3), grad=DISCRETE)
add(L.matrix_rank, lambda a: np.linalg.matrix_rank(a, tol=0.5), normal(3, 4), grad=DISCRETE)
add(L.matrix_rank, lambda a: np.linalg.matrix_rank(a, rtol=0.5), normal(3, 4), grad=DISCRETE)
for _p in (None, 2, -2, 1, np.inf, "fro", "nuc"):
    add(L.cond, lambda a, p=_p: np.linalg.cond(a, p), regular(2, 3, 3), exact=False)
add(L.cond, L.cond, np.array([[1.0, 2.0], [2.0, 4.0]]) * 0, grad=FORWARD)
add(L.norm, lambda a: np.linalg.norm(a, 2, axis=(0, 2)), normal(2, 3, 4))
add(L.norm, lambda a: np.linalg.norm(a, "nuc"), ints(0, 9, 2, 3), grad=DISCRETE)
add(L.vector_norm, L.vector_norm, normal(2, 3), exact=False)
add(L.vector_norm, lambda a: np.linalg.vector_norm(a, keepdims=True), normal(2, 3), exact=False)
