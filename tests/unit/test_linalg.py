"""Linear algebra beyond the table of test_numpy_table: triangular systems, JAX's gradients, singular matrices, batching."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll.errors import DTypeError, ShapeError, TraceError, UnsupportedError
from funccoll.primitives import decompositions, fourier, least_squares, linalg, linear_systems
from funccoll.primitives.linear_systems import _BLOCK
from tests.support.example_counts import examples

pytestmark = pytest.mark.covers("linalg")

L = np.linalg


def matrices(*shape: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) + (1j * rng.normal(size=shape) if np.dtype(dtype).kind == "c" else 0)
    return x.astype(dtype)


def regular(*shape: int, **kwargs: Any) -> np.ndarray:
    a = matrices(*shape, **kwargs)
    return a + (3 * np.eye(shape[-1])).astype(a.dtype)


# ---------------------------------------------------------------- triangular systems


FORMS = st.sampled_from([0, 1, 2, "N", "T", "C"])


@examples(40)
@given(n=st.integers(0, 5), k=st.integers(1, 3), trans=FORMS, lower=st.booleans(), unit=st.booleans(), data=st.data())
def test_solve_triangular(n, k, trans, lower, unit, data):
    dtype = data.draw(st.sampled_from([np.float64, np.complex128]))
    of_a, of_b = data.draw(st.sampled_from([((), ()), ((2,), ()), ((), (2,)), ((3, 1), (2,))]))
    a, b = regular(*of_a, n, n, dtype=dtype), matrices(*of_b, n, k, dtype=dtype)
    triangle = np.tril(a, -unit) if lower else np.triu(a, unit * 1)
    triangle = triangle + np.eye(n) if unit else triangle
    form = {0: triangle, 1: triangle.mT, 2: np.conjugate(triangle).mT}[{"N": 0, "T": 1, "C": 2}.get(trans, trans)]
    params = {"trans": trans, "lower": lower, "unit_diagonal": unit}
    got = fc.linalg.solve_triangular(a, b, **params)
    np.testing.assert_allclose(form @ got, np.broadcast_to(b, got.shape), rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(fc.jit(lambda a, b: fc.linalg.solve_triangular(a, b, **params))(a, b), got)
    if not of_b and not of_a:
        vector = fc.linalg.solve_triangular(a, b[:, 0], **params)
        assert vector.shape == (n,)
        np.testing.assert_allclose(vector, got[:, 0], rtol=1e-12)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("trans", [0, 1, 2])
def test_gradients_of_solve_triangular(lower, unit, trans):
    a, b, w, da, db = (f(2, 3, 3, dtype=np.complex128, seed=i) for i, f in enumerate([regular] + [matrices] * 4))
    solve = lambda a, b: fc.linalg.solve_triangular(a, b, trans=trans, lower=lower, unit_diagonal=unit)
    loss = lambda a, b: np.sum(np.real(w * solve(a, b)))
    first, h = fc.grad(loss, (0, 1)), 1e-6

    def along(a, b):
        of_a, of_b = first(a, b)
        return np.sum(np.real(of_a * da)) + np.sum(np.real(of_b * db))

    ends = [(a + s * h * da, b + s * h * db) for s in (1, -1)]
    for f in (loss, along):
        of_a, of_b = fc.jit(fc.grad(f, (0, 1)))(a, b)
        got = np.sum(np.real(np.asarray(of_a) * da)) + np.sum(np.real(np.asarray(of_b) * db))
        np.testing.assert_allclose(got, (f(*ends[0]) - f(*ends[1])) / (2 * h), rtol=1e-6)
    of_a = np.asarray(first(a, b)[0])
    np.testing.assert_array_equal(of_a, (np.tril if lower else np.triu)(of_a))


def test_large_triangles_are_solved_by_blocks():
    n = 3 * _BLOCK + 1
    a, b = regular(n, n) + n * np.eye(n), matrices(n, 2)
    for lower in (False, True):
        x = fc.linalg.solve_triangular(a, b, lower=lower)
        np.testing.assert_allclose((np.tril(a) if lower else np.triu(a)) @ x, b, rtol=1e-10, atol=1e-10)
    stacked = fc.linalg.solve_triangular(a, np.stack([b, 2 * b]))
    np.testing.assert_array_equal(stacked[0], fc.linalg.solve_triangular(a, b))


def test_triangles_are_solved_by_substitution():
    """No row is exchanged, so a bad triangle has the small errors of substitution."""
    n = 40
    a = np.tril(-np.ones((n, n)), -1) + np.diag(np.full(n, 1e-3))
    x = fc.linalg.solve_triangular(a, a @ np.ones(n), lower=True)
    want = np.zeros(n)
    b = a @ np.ones(n)
    for i in range(n):
        want[i] = (b[i] - a[i, :i] @ want[:i]) / a[i, i]
    np.testing.assert_allclose(x[:5], want[:5], rtol=1e-9)


# ---------------------------------------------------------------- JAX


@pytest.mark.slow
def test_gradients_agree_with_jax():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    a, h = regular(3, 3, dtype=np.complex64), matrices(3, 3, dtype=np.complex64)
    h = h @ np.conjugate(h.T) + np.eye(3, dtype=np.float32)
    tall, w = matrices(4, 3, dtype=np.complex64), matrices(3, 3, dtype=np.complex64, seed=3)
    real = lambda m: lambda x: m.sum(m.real(w * x))
    cases: list[tuple[Any, Any]] = [
        (lambda m, x: real(m)(m.linalg.inv(x)), a),
        (lambda m, x: m.real(m.linalg.det(x)), a),
        (lambda m, x: m.linalg.slogdet(x)[1] + m.imag(m.linalg.slogdet(x)[0]), a),
        (lambda m, x: real(m)(m.linalg.solve(x, w)), a),
        (lambda m, x: real(m)(m.linalg.solve(w, x)), a),
        (lambda m, x: m.sum(m.abs(m.linalg.svd(x, full_matrices=False)[0]) ** 3), tall),
        (lambda m, x: m.sum(m.linalg.svd(x, compute_uv=False) ** 3), tall),
        (lambda m, x: real(m)(m.linalg.qr(x)[1]), tall),
        (lambda m, x: real(m)(m.linalg.pinv(x) @ tall), tall),
        (lambda m, x: m.sum(m.abs(m.linalg.eigvals(x)) ** 2), a),
        (lambda m, x: m.sum(m.abs(m.fft.fft(x, 5)) ** 3), a),
        (lambda m, x: m.sum(m.fft.irfft(x, 5) ** 3), a),
        (lambda m, x: m.sum(m.abs(m.fft.rfft(m.real(x), 4)) ** 3), a),
    ]
    for number, (f, x) in enumerate(cases):
        got = fc.grad(lambda x, f=f: f(np, x))(x)
        want = jax.grad(lambda x, f=f: f(jnp, x))(x)
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3, err_msg=f"case {number}")
    # JAX reads the mean of the matrix and its adjoint, NumPy one triangle.
    halves: list[Any] = [
        lambda m, x: real(m)(m.linalg.cholesky(x)),
        lambda m, x: m.sum(m.linalg.eigvalsh(x) ** 2),
        lambda m, x: m.sum(m.abs(m.linalg.eigh(x)[1]) ** 3),
    ]
    for number, f in enumerate(halves):
        got = fc.grad(lambda x, f=f: f(np, x))(h)
        want = jax.grad(lambda x, f=f: f(jnp, x))(h)
        np.testing.assert_array_equal(got, np.tril(got))
        np.testing.assert_allclose((got + np.conjugate(got.T)) / 2, want, rtol=2e-3, atol=2e-3, err_msg=f"half {number}")


def test_equal_eigenvalues_have_a_gradient_where_no_vector_is_used():
    for f in (lambda a: np.linalg.eigh(a)[0], np.linalg.eigvalsh, lambda a: np.linalg.svd(a)[1]):
        np.testing.assert_allclose(fc.grad(lambda a, f=f: np.sum(f(a)))(2 * np.eye(3)), np.eye(3), atol=1e-15)


# ---------------------------------------------------------------- errors


def line() -> int:
    return sys._getframe(1).f_lineno


def cofactors(a):
    """The determinants without a row and a column, with their signs."""
    minor = lambda i, j: np.linalg.det(np.delete(np.delete(a, i, 0), j, 1))
    return np.array([[(-1) ** (i + j) * minor(i, j) for j in range(len(a))] for i in range(len(a))])


def test_gradients_of_determinants_are_cofactors():
    """Of every rank, singular ones beside regular ones in a stack, and complex."""
    low = np.outer(np.arange(1.0, 4), [1, 0, 2])
    stack = np.stack([np.diag([1.0, 2, 3]), np.diag([1.0, 2, 0]), low, np.zeros((3, 3)), low + np.diag([0, 1.0, 0])])
    for a in (stack, stack * (1 + 2j)):
        want = np.stack([cofactors(x) for x in a])
        of_sum = lambda a: np.sum(np.real(np.linalg.det(a)))
        for found in (fc.grad(of_sum)(a), fc.jit(fc.grad(of_sum))(a), fc.vmap(fc.grad(of_sum))(a)):
            np.testing.assert_allclose(found, want, atol=1e-12)
    np.testing.assert_allclose(
        fc.jvp(np.linalg.det, (stack,), (np.ones((5, 3, 3)),))[1],
        np.sum([cofactors(x) for x in stack], axis=(1, 2)),
        atol=1e-12,
    )


def test_singular_matrices_raise_numpys_error_with_the_users_line():
    singular = np.zeros((2, 2))

    def solve(a):
        solve.line = line() + 1
        return np.sum(np.linalg.solve(a, np.ones(2)))

    def det(a):
        det.line = line() + 1
        return np.linalg.det(a)

    def cholesky(a):
        cholesky.line = line() + 1
        return np.sum(np.linalg.cholesky(a - 1))

    def triangular(a):
        triangular.line = line() + 1
        return np.sum(fc.linalg.solve_triangular(a, np.ones(2)))

    for f in (solve, cholesky, triangular):
        for call in (fc.jit(f), fc.grad(f), fc.jit(fc.grad(f))):
            with pytest.raises(L.LinAlgError) as caught:
                call(singular)
            assert f"test_linalg.py:{f.line} in {f.__name__}" in "".join(caught.value.__notes__)
            assert len(caught.value.__notes__) == 1
    for call in (fc.grad(det), fc.jit(fc.grad(det))):  # a determinant of 0 has a gradient, and by the inverse no second one
        np.testing.assert_allclose(call(singular), cofactors(singular), atol=1e-14)
    with pytest.raises(L.LinAlgError) as caught:
        fc.hessian(det)(singular)
    assert f"test_linalg.py:{det.line} in det" in "".join(caught.value.__notes__)
    assert fc.jit(det)(singular) == 0
    with pytest.raises(L.LinAlgError):
        fc.linalg.solve_triangular(singular, np.ones(2))


def test_what_does_not_fit_is_refused():
    a = np.ones((2, 3))
    for call in (
        L.inv,
        L.det,
        L.slogdet,
        L.cholesky,
        L.eigh,
        L.eigvalsh,
        L.eig,
        L.eigvals,
        lambda a: L.matrix_power(a, 2),
        lambda a: L.solve(a, a),
        lambda a: fc.linalg.solve_triangular(a, a),
    ):
        with pytest.raises(ShapeError, match=r"square|equal"):
            fc.jit(call)(a)
    with pytest.raises(ShapeError, match=r"\(3, 3\).*\(2, 3\): it has 2 rows, not 3"):
        fc.jit(lambda a: np.linalg.solve(np.eye(3), a))(a)
    with pytest.raises(ShapeError, match="two dimensions"):
        fc.jit(np.linalg.svd)(np.ones(3))
    for dtype in (np.float16, fc.bfloat16):
        with pytest.raises(DTypeError, match="astype"):
            fc.jit(np.linalg.inv)(np.eye(2).astype(dtype))
    with pytest.raises(ShapeError):
        fc.linalg.solve_triangular(np.eye(3), a)
    with pytest.raises(TraceError, match="trans"):
        fc.linalg.solve_triangular(np.eye(2), a, trans="H")
    for call in (
        lambda a: np.linalg.svd(a, hermitian=True),
        lambda a: np.linalg.qr(a, "raw"),
        lambda a: np.linalg.pinv(a, np.ones(1)),
    ):
        with pytest.raises(UnsupportedError):
            fc.jit(call)(a)
    for call in (
        lambda a: np.linalg.eigh(a, "X"),
        lambda a: np.linalg.tensorsolve(a, a),
        lambda a: np.linalg.tensorinv(a, 0),
        lambda a: np.linalg.multi_dot([a]),
        lambda a: np.linalg.pinv(a, 1e-3, rtol=1e-3),
        lambda a: np.linalg.norm(a, 7),
        lambda a: np.fft.fft(a, 0),
        lambda a: np.fft.fft(a, norm="half"),
        lambda a: np.fft.fftn(a, s=(1,), axes=(0, 1)),
    ):
        with pytest.raises(ShapeError):
            fc.jit(call)(a)
    with pytest.raises(DTypeError):
        fc.jit(np.fft.rfft)(a + 1j)


def test_residuals_of_a_rank_that_is_not_full_are_nan():
    x, residuals, rank, _ = fc.jit(np.linalg.lstsq)(np.ones((3, 2)), np.arange(3.0))
    assert np.isnan(np.asarray(residuals)).all() and residuals.shape == (1,) and int(np.asarray(rank)) == 1
    np.testing.assert_allclose(np.asarray(x), np.linalg.lstsq(np.ones((3, 2)), np.arange(3.0))[0])


def test_vectors_that_any_basis_could_be_have_no_gradient():
    a = matrices(3, 2)
    for call in (lambda a: np.linalg.svd(a)[0], lambda a: np.linalg.qr(a, "complete")[1]):
        with pytest.raises(UnsupportedError, match=r"\(3, 2\)"):
            fc.grad(lambda a, call=call: np.sum(call(a)))(a)


# ---------------------------------------------------------------- rules of batching

PRIMITIVES = [
    p
    for m in (linear_systems, decompositions, least_squares, fourier)
    for name, p in vars(m).items()
    if name.endswith("_p") and name in m.__all__
]
PARAMS: dict[str, dict[str, Any]] = {
    "linalg.solve_triangular": {"lower": True, "unit_diagonal": False},
    "linalg.pinv": {"rcond": 1e-15},
    "linalg.lstsq": {"rcond": 1e-15},
    "linalg.cholesky": {"upper": False},
    "linalg.eigh": {"lower": True},
    "linalg.eigvalsh": {"lower": True},
    "linalg.svd": {"full_matrices": True},
    "linalg.qr": {"complete": False},
    **{f"fft.{name}": {"n": 5, "dim": 0, "norm": "ortho"} for name in ("fft", "ifft", "rfft", "irfft")},
}


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=lambda p: p.name)
def test_batching_rules(primitive):
    a = regular(4, 3, 3)
    a = a @ a.mT
    params, b = PARAMS.get(primitive.name, {}), matrices(4, 2, 3, 2)
    two = primitive.name.startswith(("linalg.solve", "linalg.lstsq"))
    b = b[:, 0] if primitive.name == "linalg.lstsq" else b
    one = b[0] if primitive.name == "linalg.lstsq" else b[0, 0]
    pairs = [((a, b), (True, True)), ((a, one), (True, False)), ((a[0], b), (False, True))]
    for values, batched in pairs if two else [((a,), (True,))]:
        got = primitive.batch(primitive, values, batched, 4, **params)
        each = [[x[i] if t else x for x, t in zip(values, batched, strict=True)] for i in range(4)]
        want = [primitive.reference(*one, **params) for one in each]
        for g, w in zip(got, zip(*want, strict=True), strict=True) if primitive.multiple else [(got, want)]:
            np.testing.assert_array_equal(g, np.stack(w))


def test_eigenvalues_are_complex_whatever_their_values():
    for dtype, wide in ((np.float32, np.complex64), (np.float64, np.complex128)):
        w, v = fc.jit(np.linalg.eig)(np.diag([1.0, 2.0]).astype(dtype))
        assert w.dtype == v.dtype == fc.jit(np.linalg.eigvals)(np.eye(2, dtype=dtype)).dtype == wide


def test_results_have_numpys_names():
    found = fc.jit(lambda a: [np.linalg.eigh(a).eigenvalues, np.linalg.svd(a).S, np.linalg.qr(a).R, np.linalg.slogdet(a).sign])
    assert len(found(np.eye(2))) == 4
    out = fc.jit(np.linalg.slogdet)(np.eye(2))
    assert type(out) is type(np.linalg.slogdet(np.eye(2)))


def test_the_gradient_of_a_pseudoinverse_that_cuts_singular_values_off():
    """The numerical tests of all cases are slow, and in the two quick ones no singular value is cut off."""
    rng = np.random.default_rng(0)
    a, weights, along = rng.normal(size=(3, 4, 3))
    cut = np.linalg.svd(a, compute_uv=False) <= 0.4 * np.linalg.norm(a, 2)
    assert cut.any() and not cut.all()

    def loss(a):
        return np.sum(weights * np.linalg.pinv(a, rcond=0.4).T)

    step = 1e-6 * along
    np.testing.assert_allclose(np.sum(along * fc.grad(loss)(a)), (loss(a + step) - loss(a - step)) / 2e-6, rtol=1e-6)


# ---------------------------------------------------------------- stacks of products


@pytest.mark.parametrize("shape", [(3, 64, 128), (2, 3, 64, 128), (0, 64, 128), (1, 65, 127)])
@pytest.mark.parametrize("order", ["C", "strided"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.int32])
def test_large_stacks_are_one_product(shape, order, dtype):
    x, y = (10 * matrices(*shape, seed=1)).astype(dtype), (10 * matrices(shape[-1], 130, seed=2)).astype(dtype)
    if order == "strided":
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -2, 0)), 0, -2)
    product = fc.jit(lambda x, y: np.swapaxes(x, -1, -2).swapaxes(-1, -2) @ y)
    found = np.asarray(product(x, y))
    assert (found == (np.ascontiguousarray(x).reshape(-1, shape[-1]) @ y).reshape(*shape[:-1], 130)).all()
    assert found.dtype == dtype and found.flags.c_contiguous
    np.testing.assert_allclose(found, np.matmul(x, y), rtol=1e-3, atol=1e-2)


def test_one_product_into_memory_that_peers_read():
    x, y = matrices(4, 64, 128, dtype=np.float32), matrices(128, 200, dtype=np.float32)
    out = np.full((4, 64, 200), np.nan, np.float32)
    assert linalg.matmul_p.reference(x, y, out=out) is out
    assert (out == linalg.matmul_p.reference(x, y)).all() and (out.reshape(256, 200) == x.reshape(256, 128) @ y).all()
    with pytest.raises(AssertionError):
        linalg.matmul_p.reference(x, y, out=np.moveaxis(np.empty((64, 4, 200), np.float32), 0, 1))
