"""Refusals of NumPy functions: the expression that each says to write instead computes the same."""

import re

import numpy as np
import pytest
from misuse import run

import funccoll as fc
from funccoll.errors import UnsupportedError
from funccoll.ops.registry import INSTEAD

A, B = np.array([3.0, -1.5, 2.5, 2.0]), np.array([2.5, 0.5, 3.0, -2.0])
GRID, CUBE, COMPLEX, HOLE = A.reshape(2, 2), np.arange(8.0).reshape(2, 2, 2), A + 1j * (B > 0), np.array([np.nan, *A])
FAR = np.array([np.inf, -np.inf, 1, np.nan])
ONE, TWO = lambda f, x, y: f(x), lambda f, x, y: f(x, y)
PARTS = lambda f, x, y: f(x, 2)
CALLS = {
    # the NumPy function's call, x, y; ONE of A where it is not here
    "allclose": (TWO, A, B), "angle": (ONE, COMPLEX, None), "append": (TWO, A, B), "array_equal": (TWO, A, B),
    "bincount": (ONE, np.array([1, 0, 1, 1]), None), "column_stack": (lambda f, x, y: f([x, y]), A, B),
    "dsplit": (PARTS, CUBE, None), "fliplr": (ONE, GRID, None), "flipud": (ONE, GRID, None), "hsplit": (PARTS, CUBE, None),
    "iscomplex": (ONE, COMPLEX, None), "isin": (TWO, A, B), "isneginf": (ONE, FAR, None), "isposinf": (ONE, FAR, None),
    "isreal": (ONE, COMPLEX, None), "rot90": (ONE, CUBE[0], None), "searchsorted": (TWO, np.sort(A), B),
    "vecdot": (TWO, COMPLEX[:2] * GRID, COMPLEX[2:]), "vsplit": (PARTS, CUBE, None),
    **dict.fromkeys(("nanmax", "nanmean", "nanmin", "nanprod", "nansum"), (ONE, HOLE, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in INSTEAD if hasattr(np, name)])  # some came with NumPy 2.1
def test_an_expression_computes_what_the_function_does(name):
    call, *operands = CALLS.get(name, (ONE, A, None))
    function = getattr(np, name)
    with pytest.raises(UnsupportedError, match=re.escape(f"Write {INSTEAD[name]} in its place.")):
        fc.jit(lambda x, y: call(function, x, y))(*operands)
    got = fc.jit(eval(f"lambda x, y: {INSTEAD[name]}", {"np": np, "n": 2}))(*operands)
    expected = call(function, *operands)
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("function", [np.median, lambda x: np.quantile(x, 0.5), np.cov, np.sort, np.argsort, np.linalg.svd])
def test_a_function_that_is_only_spelled_alike_is_not_suggested(function):
    with pytest.raises(UnsupportedError, match=r"fc.supported_functions\(\) lists") as caught:
        run(function)
    assert str(caught.value).count("np.") == 1
