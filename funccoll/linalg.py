"""Linear algebra that NumPy lacks; np.linalg's own functions are traced as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core.interpreter import Traced, bind
from .core.public_names import directory
from .core.types import type_of
from .errors import TraceError
from .ops.decompositions import several_systems
from .primitives.linear_systems import conjugate, solve_triangular_p

__all__ = ["solve_triangular"]

_FORMS = {0: 0, "N": 0, 1: 1, "T": 1, 2: 2, "C": 2}


def solve_triangular(a: Any, b: Any, *, trans: int | str = 0, lower: bool = False, unit_diagonal: bool = False) -> Any:
    """Solve `a @ x = b` for a triangular matrix `a`.

    The arguments are those of scipy.linalg.solve_triangular; the result is computed with NumPy, by blocks.

    Args:
        a: Matrices of shape (..., n, n), of which one triangle is read. Leading dimensions broadcast with those of `b`.
        b: A vector (n,) or matrices (..., n, k).
        trans: 0 or "N" solves with `a`, 1 or "T" with its transpose, 2 or "C" with its adjoint.
        lower: True reads the lower triangle of `a`, False the upper one.
        unit_diagonal: True takes the diagonal of `a` as ones.

    Returns:
        The solution, with the shape of `b` after broadcasting.

    Raises:
        LinAlgError: If a diagonal element is zero.
        ShapeError: If the shapes do not fit.
        DTypeError: If the dtypes do not fit.

    Example:
        >>> print(fc.linalg.solve_triangular(np.array([[2.0, 0.0], [1.0, 4.0]]), np.array([2.0, 5.0]), lower=True))
        [1. 1.]
    """
    if trans not in _FORMS:
        raise TraceError(f"solve_triangular: trans={trans!r} must be 0, 1 or 2 ('N', 'T' or 'C').")

    def solve(a: Any, b: Any) -> Any:
        params = {"lower": bool(lower), "unit_diagonal": bool(unit_diagonal)}
        if not any(isinstance(x, Traced) for x in (a, b)):  # the type rule checks, and does not run outside a trace
            solve_triangular_p.infer(type_of(a), type_of(b), **params)
        if _FORMS[trans]:
            a, params["lower"] = a.mT if _FORMS[trans] == 1 else conjugate(a).mT, not lower
        return bind(solve_triangular_p, a, b, **params)

    return several_systems(solve, a, b)


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(globals(), {})
