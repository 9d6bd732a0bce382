"""np.linalg over traced arrays: linear systems, inverses, determinants and decompositions of stacks of matrices."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..errors import ShapeError, UnsupportedError
from ..primitives.decompositions import cholesky_p, eig_p, eigh_p, eigvals_p, eigvalsh_p, qr_p, svd_p, svdvals_p
from ..primitives.least_squares import lstsq_p
from ..primitives.linear_systems import det_p, inv_p, pinv_p, slogdet_p, solve_p
from .elementwise import astype, unify
from .registry import as_traceable, implements, refuse_out

__all__ = ["as_floats", "several_systems"]


def as_floats(x: Any) -> Any:
    """Return a traceable array. Integers and booleans are float64, as np.linalg takes them."""
    x = as_traceable(x)
    return astype(x, np.float64) if x.dtype.kind in "iub" else x


@functools.cache
def _result_type(function: Callable[..., Any]) -> Any:
    """Return the class of the named tuple that a function of np.linalg returns."""
    return type(function(np.eye(1)))


# ---------------------------------------------------------------- systems


def several_systems(solve: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Solve `a x = b` by a solver of matrices. If b has one dimension it is a vector (NumPy's rule)."""
    a, b = unify(as_floats(a), as_floats(b))
    return np.squeeze(solve(a, np.expand_dims(b, -1)), -1) if b.ndim == 1 else solve(a, b)


@implements(np.linalg.solve)
def solve(a: Any, b: Any) -> Any:
    """np.linalg.solve."""
    return several_systems(functools.partial(bind, solve_p), a, b)


@implements(np.linalg.tensorsolve)
def tensorsolve(a: Any, b: Any, axes: Any = None) -> Any:
    """np.linalg.tensorsolve."""
    a, b = as_traceable(a), as_traceable(b)
    order = list(range(a.ndim))
    for d in () if axes is None else axes:
        order.remove(d)
        order.append(d)
    a = np.transpose(a, order)
    unknowns = tuple(a.shape[b.ndim :])
    n = math.prod(unknowns)
    if a.size != n * n or b.size != n:
        raise ShapeError(
            f"np.linalg.tensorsolve: shape {tuple(a.shape)} has {n} unknowns {unknowns} behind the {b.ndim} dimensions of b, "
            f"whose shape is {tuple(b.shape)}: there must be as many equations."
        )
    return np.reshape(solve(np.reshape(a, (n, n)), np.ravel(b)), unknowns)


@implements(np.linalg.inv)
def inv(a: Any) -> Any:
    """np.linalg.inv."""
    return bind(inv_p, as_floats(a))


@implements(np.linalg.tensorinv)
def tensorinv(a: Any, ind: int = 2) -> Any:
    """np.linalg.tensorinv."""
    if ind <= 0:
        raise ShapeError(f"np.linalg.tensorinv: ind={ind} must be at least 1.")
    shape = (*a.shape[ind:], *a.shape[:ind])
    return np.reshape(inv(np.reshape(a, (math.prod(a.shape[ind:]), -1))), shape)


@implements(np.linalg.pinv)
def pinv(a: Any, rcond: Any = None, hermitian: bool = False, *, rtol: Any = np._NoValue) -> Any:
    """np.linalg.pinv, with a cutoff that is known while tracing."""
    _refuse_hermitian("pinv", hermitian)
    a = as_floats(a)
    if rcond is None:
        rcond = 1e-15 if rtol is np._NoValue else rtol
    elif rtol is not np._NoValue:
        raise ValueError("rtol and rcond cannot both be set")
    if rcond is None:
        rcond = max(a.shape[-2:], default=0) * float(np.finfo(a.dtype).eps)
    if np.ndim(rcond):
        raise UnsupportedError("np.linalg.pinv with a cutoff for each matrix cannot be traced; pass one number.")
    return bind(pinv_p, a, rcond=float(rcond))


@implements(np.linalg.lstsq)
def lstsq(a: Any, b: Any, rcond: Any = None) -> Any:
    """np.linalg.lstsq. The residuals are NaN if a matrix with more rows than columns does not have full rank."""
    a, b = unify(as_floats(a), as_floats(b))
    if rcond is None:
        rcond = np.finfo(np.float64).eps * max(a.shape, default=0)
    columns = np.expand_dims(b, -1) if b.ndim == 1 else b
    x, residuals, rank, s = bind(lstsq_p, a, columns, rcond=float(rcond))
    return (np.squeeze(x, -1) if b.ndim == 1 else x), residuals, rank, s


@implements(np.linalg.matrix_power)
def matrix_power(a: Any, n: Any) -> Any:
    """np.linalg.matrix_power: powers of two, multiplied in NumPy's order."""
    a, n = as_traceable(a), operator.index(n)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ShapeError(f"np.linalg.matrix_power: the last two dimensions of shape {tuple(a.shape)} must be equal.")
    if n == 0:
        return np.broadcast_to(np.eye(a.shape[-1], dtype=a.dtype), tuple(a.shape))
    if n < 0:
        a, n = inv(a), -n
    if n == 3:
        return (a @ a) @ a
    power, result = a, None
    while True:
        n, bit = divmod(n, 2)
        if bit:
            result = power if result is None else result @ power
        if not n:
            return result
        power = power @ power


@implements(np.linalg.multi_dot)
def multi_dot(arrays: Sequence[Any], *, out: Any = None) -> Any:
    """np.linalg.multi_dot: in the order with the fewest multiplications (Cormen et al., 15.2)."""
    refuse_out(out)
    matrices = [as_traceable(x) for x in arrays]
    if len(matrices) < 2:
        raise ShapeError(f"np.linalg.multi_dot takes at least two arrays, not {len(matrices)}.")
    if len(matrices) == 2:
        return np.dot(*matrices)
    row, column = matrices[0].ndim == 1, matrices[-1].ndim == 1
    if row:
        matrices[0] = np.expand_dims(matrices[0], 0)
    if column:
        matrices[-1] = np.expand_dims(matrices[-1], -1)
    if any(x.ndim != 2 for x in matrices):
        raise ShapeError(f"np.linalg.multi_dot: shapes {[tuple(x.shape) for x in matrices]}; all but the ends are matrices.")
    sizes = [*(x.shape[0] for x in matrices), matrices[-1].shape[1]]

    @functools.cache
    def best(i: int, j: int) -> tuple[int, int]:
        """Return the fewest multiplications for matrices i to j, and the last matrix of the left factor."""
        if i == j:
            return 0, i
        splits = ((best(i, k)[0] + best(k + 1, j)[0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j))
        return min(splits)

    def product(i: int, j: int) -> Any:
        k = best(i, j)[1]
        return matrices[i] if i == j else np.dot(product(i, k), product(k + 1, j))

    result = product(0, len(matrices) - 1)
    shape = [*([] if row else [sizes[0]]), *([] if column else [sizes[-1]])]
    return np.reshape(result, shape)


# ---------------------------------------------------------------- determinants and decompositions


@implements(np.linalg.det)
def det(a: Any) -> Any:
    """np.linalg.det."""
    return bind(det_p, as_floats(a))


@implements(np.linalg.slogdet)
def slogdet(a: Any) -> Any:
    """np.linalg.slogdet."""
    return _result_type(np.linalg.slogdet)(*bind(slogdet_p, as_floats(a)))


@implements(np.linalg.cholesky)
def cholesky(a: Any, /, *, upper: bool = False) -> Any:
    """np.linalg.cholesky."""
    return bind(cholesky_p, as_floats(a), upper=bool(upper))


def _lower(UPLO: str) -> bool:
    if UPLO.upper() not in ("L", "U"):
        raise ValueError("UPLO must be 'L' or 'U'")
    return UPLO.upper() == "L"


@implements(np.linalg.eigh)
def eigh(a: Any, UPLO: str = "L") -> Any:
    """np.linalg.eigh."""
    return _result_type(np.linalg.eigh)(*bind(eigh_p, as_floats(a), lower=_lower(UPLO)))


@implements(np.linalg.eigvalsh)
def eigvalsh(a: Any, UPLO: str = "L") -> Any:
    """np.linalg.eigvalsh."""
    return bind(eigvalsh_p, as_floats(a), lower=_lower(UPLO))


@implements(np.linalg.eig)
def eig(a: Any) -> Any:
    """np.linalg.eig. The results are complex, even if all eigenvalues are real."""
    return _result_type(np.linalg.eig)(*bind(eig_p, as_floats(a)))


@implements(np.linalg.eigvals)
def eigvals(a: Any) -> Any:
    """np.linalg.eigvals. The result is complex, even if all eigenvalues are real."""
    return bind(eigvals_p, as_floats(a))


def _refuse_hermitian(name: str, hermitian: bool) -> None:
    if hermitian:
        raise UnsupportedError(f"np.linalg.{name} with hermitian=True cannot be traced; leave it out, or use np.linalg.eigh.")


@implements(np.linalg.svd)
def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    """np.linalg.svd."""
    _refuse_hermitian("svd", hermitian)
    if not compute_uv:
        return svdvals(a)
    return _result_type(np.linalg.svd)(*bind(svd_p, as_floats(a), full_matrices=bool(full_matrices)))


@implements(np.linalg.svdvals)
def svdvals(x: Any, /) -> Any:
    """np.linalg.svdvals."""
    return bind(svdvals_p, as_floats(x))


@implements(np.linalg.qr)
def qr(a: Any, mode: str = "reduced") -> Any:
    """np.linalg.qr in the modes reduced, complete and r."""
    if mode not in ("reduced", "complete", "r"):
        raise UnsupportedError(f"np.linalg.qr(mode={mode!r}) cannot be traced; use reduced, complete or r.")
    q, r = bind(qr_p, as_floats(a), complete=mode == "complete")
    return r if mode == "r" else _result_type(np.linalg.qr)(q, r)


@implements(np.linalg.matrix_rank)
def matrix_rank(A: Any, tol: Any = None, hermitian: bool = False, *, rtol: Any = None) -> Any:
    """np.linalg.matrix_rank."""
    _refuse_hermitian("matrix_rank", hermitian)
    if rtol is not None and tol is not None:
        raise ValueError("tol and rtol cannot both be set")
    A = as_floats(A)
    if A.ndim < 2:
        return np.any(A != 0).astype(np.int64)
    s = svdvals(A)
    if tol is None:
        rtol = max(A.shape[-2:]) * np.finfo(s.dtype).eps if rtol is None else np.asarray(rtol)[..., None]
        tol = np.max(s, axis=-1, keepdims=True, initial=0) * rtol
    else:
        tol = np.asarray(tol)[..., None]
    return np.count_nonzero(s > tol, axis=-1)
