"""Derivatives at kinks, ties and poles are what docs/guides/numpy.md says: ours in every mode and dtype.

tests/torch/test_torch_singular_derivatives.py holds the page to torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import funccoll as fc
from tests.support.cases.derivative_cases import ROWS, SECOND, Row, equal
from tests.support.cases.numpy_cases import BF16
from tests.support.groups import in_groups

pytestmark = pytest.mark.covers("gradients")


def along_units(f: Any, x: np.ndarray) -> np.ndarray:
    """The forward derivative along each direction that can be taken alone: along those of several, 0 * inf is NaN."""
    out = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        unit = np.zeros(x.shape)
        unit[place] = 1
        out[place] = fc.jvp(f, (x,), (unit,))[1]
    return out


def quiet(row: Row) -> Any:
    """NumPy's own warnings of poles and of values that are not numbers; a derivative of 0 comes without."""
    regular = np.isfinite(np.asarray(row.ours)).all() and np.isfinite(np.asarray(row.point)).all() and ", -" not in row.text
    return np.errstate() if regular else np.errstate(all="ignore")


@in_groups("row", ROWS, str)
def test_first_derivatives(row):
    with quiet(row):
        check_first_derivatives(row)


def check_first_derivatives(row: Row) -> None:
    x = row.x
    f, gradient = row.call, fc.grad(row.call)
    equal(gradient(x), row.ours)
    equal(fc.jit(gradient)(x), row.ours)
    equal(fc.vmap(gradient)(np.stack([x, x])), np.stack([row.ours, row.ours]))
    if np.isfinite(np.asarray(row.ours)).all() and x.dtype.kind != "c" and np.isfinite(x).all():
        equal(along_units(f, x), row.ours)
        equal(fc.vmap(lambda x: fc.jvp(f, (x,), (np.ones_like(x),))[1])(np.stack([x, x])), [np.sum(row.ours)] * 2)
    if x.dtype.kind != "c":
        for dtype, rtol in ((np.float32, 1e-6), (np.float16, 2e-3), (BF16, 1e-2)):
            if dtype is not np.float32 and not row.has_16_bits:
                continue
            found = gradient(x.astype(dtype))
            assert found.dtype == np.dtype(dtype)
            equal(found, row.ours, rtol)


@pytest.mark.parametrize("row", SECOND, ids=str)
def test_second_derivatives(row):
    x = row.x
    with np.errstate(all="ignore"):
        for hessian in (fc.hessian, lambda f: fc.jacrev(fc.jacrev(f)), lambda f: fc.jacfwd(fc.jacfwd(f))):
            equal(hessian(row.call)(x), row.ours)


@pytest.mark.parametrize("kind", [np.complex64, np.complex128])
def test_complex_lengths(kind):
    """Of zeros 0, in every mode; elsewhere as before."""
    cubic, frobenius = lambda z: np.linalg.norm(z, 3), lambda z: np.linalg.norm(z.reshape(1, 2), "fro")
    for f in (np.linalg.norm, np.std, lambda z: np.sum(np.abs(z)), lambda z: np.sum(np.angle(z)), cubic, frobenius):
        z = np.zeros(2, kind)
        assert not fc.grad(f)(z).any() and not fc.jvp(f, (z,), (z + 1j,))[1].any()
        assert fc.grad(f)(z).dtype == kind
    assert np.isnan(np.asarray(fc.jvp(fc.grad(np.linalg.norm), (np.zeros(2, kind),), (np.ones(2, kind),))[1])).all()


def test_lengths_near_the_ends_of_the_range():
    """Squares overflow and underflow long before lengths do; in float16 from 256 on."""
    for dtype in (np.float16, np.float32, np.float64, BF16):
        limit = float(np.sqrt(np.finfo(dtype).max)) if dtype is not BF16 else 1e19
        for size in (2 * limit, 4 / limit):
            y, x = (np.asarray(size, dtype) for _ in range(2))
            got = fc.grad(np.arctan2, (0, 1))(y, x)
            np.testing.assert_allclose(np.asarray(got, np.float64), [0.5 / float(x), -0.5 / float(x)], rtol=1e-2)
    np.testing.assert_allclose(fc.grad(np.arcsinh)(np.float16(400)), 1 / 400, rtol=1e-3)


def test_sinc_near_zero():
    """sin(x) / x² and cos(x) / x cancel there: in the second derivative nothing was left of it."""
    for x in (0.0, 1e-300, 1e-9, 1e-4, 0.005):
        t = np.pi * x
        slope = np.pi * (-t / 3 + t**3 / 30 - t**5 / 840)
        curvature = np.pi**2 * (-1 / 3 + t**2 / 10 - t**4 / 168)
        np.testing.assert_allclose(fc.grad(np.sinc)(x), slope, rtol=1e-12)
        np.testing.assert_allclose(fc.jvp(np.sinc, (x,), (1.0,))[1], slope, rtol=1e-12)
        np.testing.assert_allclose(fc.hessian(np.sinc)(x), curvature, rtol=1e-9)
        np.testing.assert_allclose(fc.grad(np.sinc)(np.float32(x)), slope, rtol=1e-6, atol=1e-44)


def test_the_rows_of_a_batch_do_not_spoil_each_other():
    """One row of zeros: the gradient of all others is what it is without it (a model's weights are in all of them)."""
    rows = np.array([[3.0, 4.0], [0.0, 0.0], [5.0, 12.0]])
    loss = lambda w: np.sum(np.linalg.norm(rows * w, axis=1) + np.std(rows * w, axis=1))
    want = fc.grad(lambda w: np.sum(np.linalg.norm(rows[::2] * w, axis=1) + np.std(rows[::2] * w, axis=1)))(np.ones(2))
    np.testing.assert_allclose(fc.grad(loss)(np.ones(2)), want)
