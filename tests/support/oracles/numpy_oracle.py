"""NumPy as the oracle of traced functions: the bits of values, numerical differentiation for gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import optree
import pytest

from tests.support.cases.numpy_cases import BF16, Case


def by_function(cases: list[Case]) -> list[Any]:
    """The cases of each function: one test."""
    functions = sorted({c.function for c in cases}, key=lambda f: f.__name__)
    return [pytest.param([c for c in cases if c.function is f], id=f.__name__) for f in functions]


@contextmanager
def noted(what: object) -> Iterator[None]:
    """An error says which of several cases it is of."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case {what}")
        raise


def run(case: Case, *args):
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's functions without NaN warn of slices of NaNs
        return case.call(*args)


def assert_same(got, want, exact: bool = True) -> None:
    """Structure, dtype, shape, and the values: the bits where `exact` (NaN equals NaN), else to a few roundings."""
    got, got_tree = optree.tree_flatten(list(got) if isinstance(got, tuple) else got)
    want, want_tree = optree.tree_flatten(list(want) if isinstance(want, tuple) else want)
    assert got_tree == want_tree
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        if g.dtype == BF16:
            g, w = g.astype(np.float32), w.astype(np.float32)
        if exact:
            np.testing.assert_array_equal(g, w)
            if g.dtype.kind == "f":
                np.testing.assert_array_equal(np.signbit(g[~np.isnan(g)]), np.signbit(w[~np.isnan(w)]))
        elif g.dtype.kind in "fc":
            eps = np.finfo(g.dtype).eps
            np.testing.assert_allclose(g, w, rtol=16 * eps, atol=16 * eps * max(1.0, np.max(np.abs(w), initial=0.0)))
        else:
            np.testing.assert_array_equal(g, w)


DTYPES = [np.dtype(d) for d in ("?", "i1", "u1", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")]


def numerical(loss, args, argnums, h: float) -> list[np.ndarray]:
    """Central differences, du/dx - i du/dy for complex arguments."""
    grads = []
    for i in argnums:
        g = np.zeros(args[i].shape, args[i].dtype)
        for place in np.ndindex(args[i].shape):
            for unit in (1.0, 1j) if g.dtype.kind == "c" else (1.0,):
                ends = []
                for sign in (1, -1):
                    moved = [np.array(a) for a in args]
                    moved[i][place] += sign * h * unit
                    ends.append(np.asarray(loss(*moved)))
                g[place] += (ends[0] - ends[1]) / (2 * h) * (-1j if unit == 1j else 1)
        grads.append(g)
    return grads
