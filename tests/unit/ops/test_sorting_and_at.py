"""`fc.top_k`, `fc.unique`, `fc.full`, and the updates and reads of `fc.at`, against NumPy and JAX."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import funccoll as fc
from funccoll.core.types import bfloat16
from funccoll.errors import DTypeError, MissingMethodError, ShapeError, UnsupportedError
from funccoll.primitives.sorting import stable_order
from tests.support.example_counts import examples
from tests.support.groups import in_groups

pytestmark = pytest.mark.covers("linalg", "nn")

X = np.array([[0.5, -2.0, 3.0, 0.5], [1.0, 7.0, -1.0, 0.0]])
NUMBERS = st.lists(st.sampled_from([-3.0, -1.0, -0.0, 0.0, 2.0, 2.5, np.nan]), min_size=1, max_size=9)


def gradient(f, *args):
    value, pull = fc.vjp(f, *args)
    return pull(np.arange(1.0, 1 + np.size(value)).reshape(np.shape(value)))


@examples(20)  # JAX compiles each size
@given(st.lists(st.sampled_from([-3.0, 0.0, 2.0, 2.5, np.nan]), min_size=1, max_size=6), st.integers(1, 5))
@example([-3.0, -3.0, -3.0, -3.0, np.nan], 4)  # as many equal the smallest as are looked for
def test_top_k_is_jaxs(values, k):
    jax = pytest.importorskip("jax")
    x = np.array(values, np.float32)
    k = min(k, x.size)
    for got, want in zip(fc.top_k(x, k), jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(got, want)


KINDS = ["?", "i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", bfloat16]


def _sortable(dtype: Any, draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers with ties, extremes, both zeros, infinities, and NaNs of both signs."""
    dtype = np.dtype(dtype)
    x = draw.integers(-3, 4, shape).astype(np.float64)
    if dtype.kind in "iu":
        return np.where(x == 3, np.iinfo(dtype).max, np.where(x == -3, np.iinfo(dtype).min, x.astype(dtype))).astype(dtype)
    if dtype.kind == "b":
        return x > 0
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-30, -1e-30])
    return np.where(draw.random(shape) < 0.3, special[draw.integers(0, 8, shape)], x).astype(dtype)


@in_groups("dtype", KINDS, ids=str)
def test_a_stable_order_and_the_largest_are_those_of_numpys_stable_argsort(dtype):
    draw = np.random.default_rng(7)
    for shape in ((1,), (5, 0), (0, 5), (3, 40), (2, 7, 3)):
        x = _sortable(dtype, draw, shape)
        wide = x.astype(np.float32) if dtype is bfloat16 else x  # NumPy puts a NaN of bfloat16 anywhere
        for dim in range(x.ndim):
            np.testing.assert_array_equal(stable_order(x, dim), np.argsort(wide, axis=dim, kind="stable"))
        order = x.shape[-1] - 1 - np.argsort(wide[..., ::-1], axis=-1, kind="stable")[..., ::-1]
        for k in {0, min(1, x.shape[-1]), x.shape[-1] // 2, x.shape[-1]}:
            np.testing.assert_array_equal(fc.top_k(x, k)[1], order[..., :k])
    one_nan_and_a_tie = np.array([[3, np.nan, 1, 2], [2, 2, 2, 1]])  # as many elements reach the smallest as without either
    np.testing.assert_array_equal(fc.top_k(one_nan_and_a_tie, 2)[1], [[1, 0], [0, 1]])


def test_top_k_in_a_program_and_its_gradient():
    values, indices = fc.jit(lambda x: fc.top_k(x, 2))(X)
    np.testing.assert_array_equal(values, [[3.0, 0.5], [7.0, 1.0]])
    np.testing.assert_array_equal(indices, [[2, 0], [1, 0]])
    np.testing.assert_array_equal(gradient(lambda x: fc.top_k(x, 2)[0], X)[0], [[2, 0, 1, 0], [4, 3, 0, 0]])
    with pytest.raises(ShapeError, match=r"shape \(2, 4\) does not have 5 elements"):
        fc.top_k(X, 5)


@examples(30)
@given(NUMBERS, st.integers(1, 8))
def test_unique_is_numpys_cut_or_filled(values, size):
    x = np.array(values)
    want, index, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
    got, *more = fc.unique(x, size, fill_value=-9.0, return_index=True, return_inverse=True, return_counts=True)
    known = min(size, want.size)
    np.testing.assert_array_equal(got, [*want, *[-9.0] * size][:size])
    np.testing.assert_array_equal(more[0][:known], index[:known])
    np.testing.assert_array_equal(more[1], inverse)
    np.testing.assert_array_equal(more[2], [*counts, *[0] * size][:size])


def test_unique_fills_with_the_smallest_and_is_differentiable():
    np.testing.assert_array_equal(fc.jit(lambda x: fc.unique(x, 5))(np.array([3, 1, 3])), [1, 3, 1, 1, 1])
    np.testing.assert_array_equal(gradient(lambda x: fc.unique(x, 2), np.array([3.0, 1.0, 2.0]))[0], [0, 1, 2])
    with pytest.raises(ShapeError, match="no elements"):
        fc.unique(np.zeros(0), 2)


def test_full_of_a_traced_value():
    np.testing.assert_array_equal(fc.jit(lambda v: fc.full((2, 3), v))(1.5), np.full((2, 3), 1.5))
    np.testing.assert_array_equal(fc.full(2, 7, np.int8), np.full(2, 7, np.int8))
    assert fc.jit(lambda v: fc.full(2, v, np.float32))(1.5).dtype == np.float32
    np.testing.assert_array_equal(gradient(lambda v: fc.full((2, 2), v), np.array([1.0, 2.0]))[0], [4, 6])


UPDATES = {"multiply": np.multiply, "min": np.minimum, "max": np.maximum, "add": np.add}
INDICES = [np.array([0, 1, 0]), (slice(None), np.array([2, 2, -1])), (0, 1), slice(1, None), (Ellipsis, np.array([[0], [3]]))]


@pytest.mark.parametrize("name", UPDATES)
@in_groups("index", INDICES, ids=str)
def test_updates_are_those_of_the_ufunc(name, index):
    value = np.linspace(-2, 3, X[index].size).reshape(X[index].shape)
    want = X.copy()
    UPDATES[name].at(want, index, value)
    update = lambda x, v: getattr(fc.at(x)[index], name)(v)
    np.testing.assert_array_equal(update(X, value), want)
    np.testing.assert_array_equal(fc.jit(update)(X, value), want)
    # Gradients against differences, in a direction: there are no ties here.
    x = X + np.arange(8).reshape(2, 4) / 7
    _, pull = fc.vjp(update, x, value)
    rng = np.random.default_rng(3)
    ct, dx, dv = rng.normal(size=X.shape), rng.normal(size=X.shape), rng.normal(size=value.shape)
    gx, gv = pull(ct)
    numeric = np.sum(ct * (update(x + 1e-6 * dx, value + 1e-6 * dv) - update(x - 1e-6 * dx, value - 1e-6 * dv))) / 2e-6
    np.testing.assert_allclose(np.sum(gx * dx) + np.sum(gv * dv), numeric, rtol=1e-6, atol=1e-7)


def test_gradients_of_ties_and_zeros():
    one = np.ones(2)
    gx, gv = gradient(lambda x, v: fc.at(x)[np.array([0, 0])].max(v)[:1], np.array([2.0, 5.0]), np.array([2.0, 1.0]))
    np.testing.assert_array_equal(gx, [0.5, 0])
    np.testing.assert_array_equal(gv, [0.5, 0])
    factors = np.array([0.0, 3.0, 0.0, 4.0])
    _, gv = gradient(lambda x, v: fc.at(x)[np.array([0, 0, 1, 1])].multiply(v), 2 * one, factors)
    np.testing.assert_array_equal(gv, [6, 0, 16, 0])
    _, gv = gradient(lambda x, v: fc.at(x)[np.array([0, 0])].multiply(v), one, np.zeros(2))
    np.testing.assert_array_equal(gv, [0, 0])


READS = [
    np.array([5, -6, 1, -1, 4]),
    (np.array([0, 9]), slice(1, 3)),
    (1, -7),
    (Ellipsis, np.array([[4], [-5]])),
    (None, 2),
    [3, 0],
]


def padded_read(x: np.ndarray, index: Any, mode: str, fill: float | None) -> np.ndarray:
    """The read of an array around which there are 20 more elements on each side: its edges' values, or what fills."""
    missing = np.nan if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    margin = {"mode": "edge"} if mode == "clip" else {"mode": "constant", "constant_values": missing if fill is None else fill}
    parts = [np.array(i) if isinstance(i, list) else i for i in (index if isinstance(index, tuple) else (index,))]
    ndim = sum(i is not None and i is not Ellipsis for i in parts)
    if Ellipsis not in [i for i in parts if not isinstance(i, np.ndarray)]:
        parts.append(Ellipsis)
    at = next(k for k, i in enumerate(parts) if i is Ellipsis)
    parts[at : at + 1] = [slice(None)] * (x.ndim - ndim)
    dims, moved = iter(x.shape), []
    for i in parts:
        n = 0 if i is None else next(dims)
        if isinstance(i, slice):
            moved.append(slice(*(20 + stop for stop in i.indices(n)[:2])))
        else:
            moved.append(None if i is None else 20 + np.where(np.asarray(i) < 0, np.maximum(np.asarray(i) + n, -20), i))
    return np.pad(x, 20, **margin)[tuple(moved)]


@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("index", READS, ids=str)
def test_reads_out_of_bounds(index, mode):
    """Against a padded array; JAX, which defines them, takes a tenth of a second for each."""
    for x in (X.astype(np.float32), np.arange(8, dtype=np.int32).reshape(2, 4)):
        for fill in (None, 7) if mode == "fill" else (None,):
            want = padded_read(x, index, mode, fill)
            for read in (lambda x: fc.at(x)[index].get(mode, fill), fc.jit(lambda x: fc.at(x)[index].get(mode, fill))):
                np.testing.assert_array_equal(read(x), want)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("index", READS, ids=str)
def test_reads_out_of_bounds_are_jaxs(index, mode):
    jnp = pytest.importorskip("jax.numpy")
    for x in (X.astype(np.float32), np.arange(8, dtype=np.int32).reshape(2, 4)):
        for fill in (None, 7):
            if fill is not None and mode != "fill":
                continue
            want = (
                jnp.asarray(x)
                .at[
                    tuple(np.array(i) if isinstance(i, list) else i for i in index)
                    if isinstance(index, tuple)
                    else np.array(index)
                ]
                .get(mode=mode, fill_value=fill)
            )
            for read in (lambda x: fc.at(x)[index].get(mode, fill), fc.jit(lambda x: fc.at(x)[index].get(mode, fill))):
                np.testing.assert_array_equal(read(x), want)


def test_reads_that_wrap_are_those_of_take():
    places = np.array([[5, -6], [1, 9]])
    for read in (lambda i: fc.at(X)[:, i].get("wrap"), lambda i: fc.asarray(fc.at(X)[:, i].get("wrap"))):
        np.testing.assert_array_equal(fc.jit(read)(places), np.take(X, places, axis=1, mode="wrap"))
    np.testing.assert_array_equal(fc.at(X)[-5, 7].get("wrap"), X[-5 % 2, 7 % 4])


def test_reads_by_a_traced_index_and_their_gradient():
    read = lambda x, i: fc.at(x)[i].get("fill", 0.0)
    np.testing.assert_array_equal(fc.jit(read)(X, np.array([1, 2])), [X[1], np.zeros(4)])
    np.testing.assert_array_equal(gradient(lambda x: read(x, np.array([1, 2])), X)[0], [np.zeros(4), [1, 2, 3, 4]])
    np.testing.assert_array_equal(fc.jit(lambda x, i: fc.at(x)[i].get())(X, np.array([1, 0])), X[::-1])


def test_bad_updates_and_reads():
    with pytest.raises(MissingMethodError, match=re.escape(".set, .add, .multiply, .min and .max")):
        fc.at(X)[0].divide(2)
    with pytest.raises(DTypeError, match="no order"):
        fc.jit(lambda z: fc.at(z)[0].max(1j))(X + 0j)
    with pytest.raises(ShapeError, match="does not broadcast"):
        fc.at(X)[0].min(np.ones(3))
    with pytest.raises(UnsupportedError, match=re.escape("get(mode='drop'): the modes are 'clip', 'wrap', 'fill'")):
        fc.at(X)[0].get("drop")
    with pytest.raises(ShapeError, match="no place to choose"):
        fc.at(np.zeros((0, 2)))[np.array([0])].get("clip")


def test_counts_leave_out_numbers_that_have_no_place():
    """Larger ones, and negative ones, which NumPy refuses: a traced array's values are not known."""
    x, w = np.array([0, 7, 2, -1, -2, 2, 3]), np.arange(7.0)
    counts, sums = fc.jit(lambda x, w: (np.bincount(x, minlength=3), np.bincount(x, w, minlength=3)))(x, w)
    assert np.asarray(counts).tolist() == [1, 0, 2] and np.asarray(sums).tolist() == [0, 0, 7]
