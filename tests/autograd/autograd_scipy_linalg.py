"""The part of `autograd_scipy` that stands in for `autograd.scipy.linalg`: SciPy's functions as primitives of a user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

import funccoll as fc


def _solution_type(*operands: Any, **static: Any) -> Any:
    return operands[-1]


def _sylvester_vjp(ct: Any, inputs: Any, x: Any) -> list[Any]:
    a, b, _ = inputs
    pulled = solve_sylvester(a.mT, b.mT, ct)
    return [-pulled @ x.mT, -x.mT @ pulled, pulled]


solve_sylvester = fc.custom_primitive("solve_sylvester", scipy.linalg.solve_sylvester, types=_solution_type, vjp=_sylvester_vjp)


_complex_sqrtm = fc.custom_primitive(
    "sqrtm",
    lambda a: scipy.linalg.sqrtm(a).astype(complex),
    types=_solution_type,
    vjp=lambda ct, inputs, root: [solve_sylvester(root.mT, root.mT, ct)],
)


def sqrtm(a: Any) -> Any:
    """The square root of a matrix: complex, for a type does not say whether the root of a real matrix is real."""
    return _complex_sqrtm(a.astype(complex))


def _bands(ab: Any, lower: int) -> tuple[Any, Any, Any]:
    """For each element of a banded matrix's array: its band, its column's number, and whether the matrix has it."""
    band, column = np.indices(ab.shape)
    row = band + column - lower
    return band, np.clip(row, 0, ab.shape[1] - 1), (row >= 0) & (row < ab.shape[1])


def _banded_vjp(ct: Any, inputs: Any, x: Any, *, lower: int, upper: int) -> list[Any]:
    """The transpose has element (i, j) of the matrix, ab[upper + i - j, j], in band lower + j - i of column i."""
    ab, _ = inputs
    band, column, inside = _bands(ab, lower)
    pulled = _solve_banded(np.where(inside, ab[lower + upper - band, column], 0.0), ct, lower=upper, upper=lower)
    _, row, inside = _bands(ab, upper)
    of_elements = pulled[row] * x if x.ndim == 1 else np.sum(pulled[row] * x, axis=-1)
    return [np.where(inside, -of_elements, 0.0), pulled]


_solve_banded = fc.custom_primitive(
    "solve_banded",
    lambda ab, b, *, lower, upper: scipy.linalg.solve_banded((lower, upper), ab, b),
    types=_solution_type,
    vjp=_banded_vjp,
)


def solve_banded(l_and_u: tuple[int, int], ab: Any, b: Any) -> Any:
    """scipy.linalg.solve_banded."""
    lower, upper = l_and_u
    return _solve_banded(ab, b, lower=lower, upper=upper)
