"""Products with a transpose by BLAS: in another order where that is faster, by shapes alone, with results in C order."""

from __future__ import annotations

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.compiler.codegen import segments
from funccoll.compiler.codegen.transposed_products import by_transpose

pytestmark = [pytest.mark.covers("jit"), pytest.mark.usefixtures("numpy_compute")]


@pytest.fixture
def shapes(monkeypatch):
    """The shapes of products that are computed by the transpose."""
    found = []

    def counted(x, y, out=None):
        found.append((*x.shape, y.shape[1]))
        return by_transpose(x, y, out)

    monkeypatch.setattr(segments, "by_transpose", counted)
    return found


def matrix(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    ("m", "k", "n", "dtype", "faster"),
    [
        (8, 512, 512, np.float32, True),
        (48, 256, 256, np.float32, True),
        (49, 256, 256, np.float32, False),
        (64, 512, 512, np.float32, True),
        (65, 512, 512, np.float32, False),
        (2, 1024, 1024, np.float32, True),
        (1, 1024, 1024, np.float32, False),
        (4, 511, 512, np.float32, False),
        (8, 512, 512, np.float64, False),
        (8, 512, 512, np.complex64, False),
    ],
)
def test_shapes_decide(shapes, m, k, n, dtype, faster):
    x, w = matrix(m, k, dtype=dtype), matrix(n, k, dtype=dtype)
    found = np.asarray(fc.jit(lambda x, w: x @ w.T)(x, w))
    assert shapes == ([(m, k, n)] if faster else [])
    assert found.flags.c_contiguous and found.dtype == dtype
    np.testing.assert_allclose(found, x @ w.T, rtol=1e-4, atol=1e-3)


def test_only_transposes_of_matrices(shapes):
    x, w = matrix(8, 512), matrix(512, 512)
    fc.jit(lambda x, w: (x @ w, np.ones((3, 8, 512), np.float32) @ w.T, w.T @ w, x @ np.transpose(w, (0, 1))))(x, w)
    assert shapes == []


def test_gradients_of_small_batches(shapes):
    x, w = matrix(32, 512), matrix(512, 512) / 20
    of = fc.jit(fc.grad(lambda w, x: np.sum(np.tanh(x @ w) @ w)))(w, x)
    assert shapes == [(32, 512, 512)]
    h = np.tanh(x @ w)
    wanted = h.T @ np.ones((32, 512), np.float32) + x.T @ ((1 - h * h) * (np.ones((32, 512), np.float32) @ w.T))
    np.testing.assert_allclose(np.asarray(of), wanted, rtol=1e-3, atol=1e-3)


def test_published_results_lie_where_peers_read_them():
    """In C order, like all that is written into memory that is given."""
    out = np.full((8, 512), np.nan, np.float32)
    x, w = matrix(8, 512), matrix(512, 512)
    assert by_transpose(x, w.T, out) is out
    assert (out == by_transpose(x, w.T)).all()


def test_virtual_devices_have_the_bits_of_one(shapes):
    x, w = matrix(64, 512), matrix(512, 512)
    mesh = fc.make_mesh({"d": 2})
    split = fc.jit(lambda x, w: x @ w.T, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    parts = [np.asarray(fc.jit(lambda x, w: x @ w.T)(part, w)) for part in np.split(x, 2)]
    assert (np.asarray(split(x, w)) == np.concatenate(parts)).all()
    assert shapes == [(32, 512, 512)] * 4
