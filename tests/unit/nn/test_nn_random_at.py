"""fc.nn against the plain formulas in float64, fc.random's streams and moments, and fc.at against assignment."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import funccoll as fc
from funccoll import P, nn
from funccoll.errors import DTypeError, ShapeError, UnsupportedError
from tests.support.cases.numpy_cases import BF16
from tests.support.groups import in_groups
from tests.support.oracles.numpy_oracle import assert_same, numerical

pytestmark = pytest.mark.covers("nn")

# ---------------------------------------------------------------- nn: values

_erf = np.vectorize(math.erf, otypes=[np.float64])
_exp = np.vectorize(lambda v: math.inf if v > 709 else math.exp(v), otypes=[np.float64])


def f_relu(x):
    return np.where(x > 0, x, 0.0)


def f_sigmoid(x):
    return 1 / (1 + _exp(-x))


def f_gelu(x):
    return x * (1 + _erf(x / math.sqrt(2))) / 2


def f_gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def f_logsumexp(x, axis=-1):
    top = np.max(x, axis=axis, keepdims=True)
    return np.log(np.sum(np.exp(x - top), axis=axis, keepdims=True)) + top


ELEMENTWISE = {
    "relu": (nn.relu, f_relu),
    "sigmoid": (nn.sigmoid, f_sigmoid),
    "erf": (nn.erf, _erf),
    "gelu": (nn.gelu, f_gelu_tanh),
    "silu": (nn.silu, lambda x: x * f_sigmoid(x)),
    "softplus": (nn.softplus, lambda x: np.maximum(x, 0) + np.log1p(_exp(-np.abs(x)))),
    "gelu exact": (lambda x: nn.gelu(x, approximate=False), f_gelu),
}
ROWS = {
    "softmax": (nn.softmax, lambda x: np.exp(x - f_logsumexp(x))),
    "softmax 0": (lambda x: nn.softmax(x, axis=0), lambda x: np.exp(x - f_logsumexp(x, 0))),
    "log_softmax": (nn.log_softmax, lambda x: x - f_logsumexp(x)),
    "log_softmax 0": (lambda x: nn.log_softmax(x, 0), lambda x: x - f_logsumexp(x, 0)),
    "logsumexp": (nn.logsumexp, lambda x: f_logsumexp(x)[..., 0]),
    "logsumexp keep": (lambda x: nn.logsumexp(x, axis=0, keepdims=True), lambda x: f_logsumexp(x, 0)),
    "logsumexp all": (lambda x: nn.logsumexp(x, axis=None), lambda x: f_logsumexp(x, None)[0, 0]),
    "logsumexp two": (lambda x: nn.logsumexp(x, axis=(0, 1)), lambda x: f_logsumexp(x, (0, 1))[0, 0]),
    "layer_norm": (
        nn.layer_norm,
        lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
    ),
}
ROWS["rms_norm"] = (nn.rms_norm, lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6))
TOLERANCE = {np.dtype(np.float64): 1e-13, np.dtype(np.float32): 2e-6, np.dtype(np.float16): 2e-3, BF16: 2e-2}
BIG = np.array([-1e4, -745.0, -90.0, -30.0, -8.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 8.0, 30.0, 90.0, 745.0, 1e4])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@in_groups("name", ELEMENTWISE)
def test_elementwise_values(name, dtype):
    ours, formula = ELEMENTWISE[name]
    x = BIG.astype(dtype)
    with np.errstate(under="ignore"):
        want = formula(x.astype(np.float64))
        # Where a number is rounded to 0 in this dtype it may be 0; elsewhere the relative error counts.
        tiny = 1e-7 if dtype.itemsize == 2 else 1e-38
        results = [np.asarray(fc.jit(ours)(x)), np.asarray(ours(x))]
    for got in results:
        assert got.dtype == dtype and got.shape == x.shape
        # gelu's 1 + tanh cancels far to the left: its error is relative to |x|, as in every library.
        eps = np.finfo(np.float32 if dtype.itemsize < 8 else np.float64).eps if "gelu" in name else 0
        slack = np.abs(x.astype(float)) * eps
        error = np.abs(got.astype(np.float64) - want)
        assert (error <= TOLERANCE[dtype] * np.abs(want) + tiny + slack).all(), (name, dtype, got, want)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@in_groups("name", ROWS)
def test_row_values(name, dtype):
    ours, formula = ROWS[name]
    rng = np.random.default_rng(0)
    for x in (rng.normal(size=(4, 5)), 1e4 * rng.normal(size=(3, 4)), np.full((2, 3), -1e4), rng.normal(size=(2, 700))):
        x = x.astype(dtype)
        want = formula(x.astype(np.float64))
        got = np.asarray(fc.jit(ours)(x))
        assert got.dtype == dtype and got.shape == want.shape
        limit = TOLERANCE[dtype]
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=limit, atol=limit * (1 + np.abs(want).max() * 0.1))


def test_minus_infinity_is_a_mask():
    x = np.array([[0.5, -np.inf, 1.5], [-np.inf, -np.inf, 2.0]])
    kept = np.exp(np.array([0.5, 1.5])) / np.exp(np.array([0.5, 1.5])).sum()
    np.testing.assert_allclose(nn.softmax(x), [[kept[0], 0, kept[1]], [0, 0, 1]], rtol=1e-14)
    assert np.isneginf(nn.log_softmax(x)[0, 1])
    np.testing.assert_allclose(nn.logsumexp(x), [np.log(np.exp(0.5) + np.exp(1.5)), 2.0])
    gradient = fc.grad(lambda x: np.sum(nn.softmax(x)[:, 2]))(x)
    np.testing.assert_allclose(gradient, [[-kept[0] * kept[1], 0, kept[0] * kept[1]], [0, 0, 0]], atol=1e-15)
    nothing = np.full((2, 3), -np.inf)
    np.testing.assert_array_equal(nn.logsumexp(nothing), [-np.inf, -np.inf])
    np.testing.assert_array_equal(fc.grad(lambda x: np.sum(nn.logsumexp(x)))(nothing), np.zeros((2, 3)))
    assert nn.logsumexp(np.array([np.inf, 1.0])) == np.inf
    assert np.isnan(nn.logsumexp(np.array([np.nan, 1.0]))) and np.isnan(nn.relu(np.array(np.nan)))
    assert nn.silu(np.array(-np.inf)) == 0 and nn.silu(np.array(np.inf)) == np.inf
    assert nn.softplus(np.array(-np.inf)) == 0 and nn.softplus(np.array(np.inf)) == np.inf
    assert nn.sigmoid(np.array(-np.inf)) == 0 and nn.sigmoid(np.array(np.inf)) == 1


@in_groups("name", [*ELEMENTWISE, *ROWS])
def test_gradients_of_nn(name):
    ours, formula = {**ELEMENTWISE, **ROWS}[name]
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 3))
    ct = rng.normal(size=np.shape(formula(x)))
    first = fc.grad(lambda x: np.sum(ct * ours(x)))
    np.testing.assert_allclose(first(x), numerical(lambda x: np.sum(ct * formula(x)), [x], [0], 1e-6)[0], rtol=1e-6, atol=1e-8)
    direction = rng.normal(size=x.shape)
    along = lambda x: np.sum(direction * first(x))
    want = numerical(along, [x], [0], 1e-6)[0]
    np.testing.assert_allclose(np.asarray(fc.jit(fc.grad(along))(x)), want, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@in_groups("name", [*ELEMENTWISE, *ROWS])
def test_gradients_stay_finite_far_out(name, dtype):
    ours = {**ELEMENTWISE, **ROWS}[name][0]
    x = np.stack([BIG, BIG[::-1]]).astype(dtype)
    gradient = np.asarray(fc.jit(fc.grad(lambda x: np.sum(ours(x).astype(np.float32))))(x))
    assert gradient.dtype == dtype and np.isfinite(gradient.astype(np.float64)).all()


def test_gradients_at_the_corner():
    assert fc.grad(nn.relu)(0.0) == 0
    assert fc.grad(nn.sigmoid)(0.0) == 0.25
    assert fc.grad(fc.grad(nn.sigmoid))(0.0) == 0
    np.testing.assert_allclose(fc.grad(fc.grad(fc.grad(nn.sigmoid)))(0.0), -0.125)
    np.testing.assert_allclose(fc.grad(nn.sigmoid)(-40.0), math.exp(-40), rtol=1e-12)
    np.testing.assert_allclose(fc.grad(nn.gelu)(0.0), 0.5)
    x = np.linspace(-9, 9, 101)
    by_the_chain_rule = fc.grad(lambda x: np.sum(f_gelu_tanh(x)))(x)
    np.testing.assert_allclose(fc.grad(lambda x: np.sum(nn.gelu(x)))(x), by_the_chain_rule, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(fc.grad(nn.erf)(0.0), 2 / math.sqrt(math.pi))


def test_gelu_takes_the_words_of_torch():
    x = np.linspace(-2, 2, 9)
    for word, value in (("tanh", True), ("none", False)):
        assert_same(nn.gelu(x, approximate=word), nn.gelu(x, value))
    with pytest.raises(DTypeError, match="approximate='exact' must be True \\(\"tanh\", the default\\) or False"):
        nn.gelu(x, approximate="exact")


def test_norms_name_the_shapes_and_parameters_that_do_not_fit():
    x = np.ones((2, 3))
    for call, words in (
        (lambda x: nn.layer_norm(x, (3,)), "layer_norm: scale is (3,), and not a shape but the numbers that are multiplied"),
        (lambda x: nn.rms_norm(x, 3), "rms_norm: scale is 3, and not a shape but the numbers"),
        (lambda x: nn.layer_norm(x, np.ones(2)), "layer_norm: scale has shape (2,), and x (2, 3): scale has one number"),
        (lambda x: nn.layer_norm(x, None, np.ones((2, 4))), "layer_norm: bias has shape (2, 4), and x (2, 3): bias has one"),
        (lambda x: nn.rms_norm(x, np.ones(2)), "rms_norm: scale has shape (2,), and x (2, 3): scale has one number"),
        (lambda x: nn.layer_norm(np.sum(x)), "layer_norm: x is a scalar, and has no last dimension"),
    ):
        for run in (call, fc.jit(call)):
            with pytest.raises(ShapeError) as raised:
                run(x)
            assert str(raised.value).startswith(words)
    assert nn.layer_norm(x, np.ones(3), np.ones(1)).shape == nn.rms_norm(x, 2.0).shape == x.shape


def test_layer_norm_scale_and_bias():
    rng = np.random.default_rng(0)
    x, scale, bias = rng.normal(size=(3, 4)), rng.normal(size=4), rng.normal(size=4)

    def formula(x, scale, bias):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1) * scale + bias

    np.testing.assert_allclose(nn.layer_norm(x, scale, bias, eps=0.1), formula(x, scale, bias), rtol=1e-12)
    ct = rng.normal(size=(3, 4))
    got = fc.grad(lambda *a: np.sum(ct * nn.layer_norm(*a, eps=0.1)), (0, 1, 2))(x, scale, bias)
    want = numerical(lambda *a: np.sum(ct * formula(*a)), [x, scale, bias], (0, 1, 2), 1e-6)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-8)


def test_rms_norm_scale():
    x, scale = np.array([[3.0, 4.0]]), np.array([1.0, 2.0])
    np.testing.assert_allclose(nn.rms_norm(x, scale, eps=0), x * scale / np.sqrt(12.5), rtol=1e-15)
    np.testing.assert_array_equal(nn.rms_norm(np.zeros((2, 2))), np.zeros((2, 2)))


def test_one_hot():
    for dtype in (np.int8, np.uint8, np.int64):
        labels = np.array([[0, 2], [1, 5]], dtype)
        want = np.concatenate([np.eye(3), np.zeros((3, 3))])[labels]
        assert_same(fc.jit(lambda x: nn.one_hot(x, 3))(labels), want.astype(np.float32))
        assert_same(fc.jit(lambda x: nn.one_hot(x, 300, np.bool_))(labels), np.eye(300, dtype=bool)[labels])
    np.testing.assert_array_equal(nn.one_hot(np.array(-1), 2), [0, 0])
    assert nn.one_hot(np.zeros((2, 0), np.int32), 4).shape == (2, 0, 4)
    with pytest.raises(ShapeError, match="integers"):
        nn.one_hot(np.array([1.0]), 3)
    with pytest.raises(DTypeError):
        nn.erf(np.array([1j]))


# ---------------------------------------------------------------- random

DRAWS = {
    "bits": lambda k: fc.random.bits(k, (3, 5)),
    "uniform": lambda k: fc.random.uniform(k, (7,), np.float64, -2.0, 3.0),
    "normal": lambda k: fc.random.normal(k, (7, 3)),
    "normal64": lambda k: fc.random.normal(k, 5, np.float64),
    "bernoulli": lambda k: fc.random.bernoulli(k, 0.3, (9,)),
    "split": lambda k: fc.random.split(k, 3),
    "fold_in": lambda k: fc.random.fold_in(k, 11),
}


@pytest.mark.usefixtures("numpy_compute")
@pytest.mark.parametrize("name", DRAWS)
def test_jitted_draws_equal_eager_ones(name):
    key = fc.random.key(42)
    assert_same(fc.jit(DRAWS[name])(key), DRAWS[name](key))
    assert not np.array_equal(DRAWS[name](key), DRAWS[name](fc.random.key(43)))


@pytest.mark.usefixtures("numpy_compute")
@pytest.mark.parametrize("axes", [{"a": 1}, {"a": 3}, {"a": 8}, {"a": 2, "b": 4}], ids=str)
def test_each_device_has_its_own_stream_on_any_mesh(axes):
    """fold_in of a device's index: what device i draws depends on i, and not on how many devices there are."""
    mesh = fc.make_mesh(axes)
    names = tuple(axes)

    @fc.jit(mesh=mesh, in_specs=P(), out_specs=(P(names), P()))
    def draw(key):
        mine = fc.random.fold_in(key, fc.axis_index(names))
        return fc.random.normal(mine, (4,)), fc.random.uniform(key, (4,))

    key = fc.random.key(5)
    got, common = draw(key)
    want = [fc.random.normal(fc.random.fold_in(key, i), (4,)) for i in range(mesh.size)]
    np.testing.assert_array_equal(np.asarray(got), np.concatenate(want))
    np.testing.assert_array_equal(np.asarray(common), fc.random.uniform(key, (4,)))


def test_streams_do_not_meet():
    """A key's bits, the keys folded or split from it, and their bits: no word twice."""
    key = fc.random.key(0)
    pools = [fc.random.bits(key, 1000), *fc.random.split(key, 200)]
    pools += [fc.random.fold_in(key, i) for i in range(200)]
    pools += [fc.random.bits(fc.random.fold_in(key, i), 100) for i in range(20)]
    pools += [fc.random.bits(k, 100) for k in fc.random.split(key, 20)[:1]]
    pools += [fc.random.bits(fc.random.fold_in(fc.random.fold_in(key, i), j), 50) for i in range(4) for j in range(4)]
    # split(key, 20) begins as split(key, 200) does: only their bits are further words.
    words = np.concatenate([np.ravel(p) for p in pools])
    assert len(np.unique(words)) == len(words)
    np.testing.assert_array_equal(fc.random.split(key, 5)[:2], fc.random.split(key))
    assert not np.array_equal(fc.random.fold_in(key, -1), fc.random.fold_in(key, 1))


def test_moments():
    n = 200_000
    key = fc.random.key(9)
    # Bounds of 5 standard errors; the seed is fixed, so this passes always or never.
    for dtype in (np.float32, np.float64, np.float16, BF16):
        u = fc.random.uniform(key, n, dtype)
        z = fc.random.normal(key, n, dtype)
        assert u.dtype == z.dtype == dtype
        u, z = u.astype(np.float64), z.astype(np.float64)
        rounding = 2.0**-9 if dtype == BF16 else 2.0**-12 if dtype == np.float16 else 0  # truncation to few digits
        assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n) + rounding
        assert abs(u.var() - 1 / 12) < 5 / math.sqrt(180 * n) * 1.0 + rounding
        assert u.min() >= 0 and u.max() < 1
        assert abs(z.mean()) < 5 / math.sqrt(n) and abs(z.var() - 1) < 5 * math.sqrt(2 / n) + rounding
        assert abs((z**3).mean()) < 5 * math.sqrt(15 / n) and abs((z**4).mean() - 3) < 5 * math.sqrt(96 / n) + 4 * rounding
        assert np.isfinite(z).all()
    first, second = fc.random.normal(key, (2, n), np.float64)
    assert abs((first * second).mean()) < 5 / math.sqrt(n)
    b = fc.random.bernoulli(key, 0.3, n)
    assert b.dtype == np.bool_ and abs(b.mean() - 0.3) < 5 * math.sqrt(0.21 / n)
    assert not fc.random.bernoulli(key, 0.0, n).any() and fc.random.bernoulli(key, 1.0, n).all()
    each = np.mod(fc.random.bits(key, n).view(np.uint8).astype(int), 16)
    counts = np.bincount(each, minlength=16)
    expected = counts.sum() / 16
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-squared with 15 degrees of freedom, p < 1e-4


def test_uniform_stays_below_maxval():
    key = fc.random.key(3)
    for dtype, low, high in [(np.float32, 1e7, 1e7 + 2), (np.float16, 0.0, 1.0), (BF16, 1.0, 3.0), (np.float64, -1.0, 0.0)]:
        u = fc.random.uniform(key, 20_000, dtype, low, high)
        assert u.dtype == dtype
        u = u.astype(np.float64)
        assert (u >= low).all() and (u < high).all()
    traced = fc.jit(lambda k, lo, hi: fc.random.uniform(k, 8, np.float32, lo, hi))(key, np.float32(2), np.float32(5))
    np.testing.assert_array_equal(np.asarray(traced), fc.random.uniform(key, 8, np.float32, 2, 5))
    p = np.array([[0.0], [1.0]])
    np.testing.assert_array_equal(fc.random.bernoulli(key, p, (2, 5)), np.broadcast_to(p == 1, (2, 5)))
    assert fc.random.bernoulli(key, p).shape == (2, 1)


def test_shapes_of_draws():
    key = fc.random.key(2**127 + 3)
    assert fc.random.bits(key).shape == () and fc.random.bits(key, 0).shape == (0,)
    assert fc.random.split(key, 0).shape == (0, 2) and fc.random.normal(key, (2, 0)).shape == (2, 0)
    assert fc.random.key(np.int64(7)).tolist() == [7, 0]
    np.testing.assert_array_equal(fc.random.bits(key, (2, 3)).ravel(), fc.random.bits(key, 6))


@in_groups(
    "call",
    [
        lambda: fc.random.key(-1),
        lambda: fc.random.key(1.5),
        lambda: fc.random.key(True),
        lambda: fc.random.key(2**128),
        lambda: fc.random.bits(np.zeros(2)),
        lambda: fc.random.bits(np.zeros(3, np.uint64)),
        lambda: fc.random.bits(0),
        lambda: fc.random.fold_in(fc.random.key(0), 1.5),
        lambda: fc.random.fold_in(fc.random.key(0), np.array([1])),
        lambda: fc.random.split(fc.random.key(0), -1),
        lambda: fc.random.split(fc.random.key(0), 2.0),
        lambda: fc.random.bits(fc.random.key(0), (-1,)),
        lambda: fc.random.bits(fc.random.key(0), "ab"),
        lambda: fc.random.normal(fc.random.key(0), 3, np.int32),
        lambda: fc.random.uniform(fc.random.key(0), 3, np.complex64),
        lambda: fc.random.bernoulli(fc.random.key(0), np.ones(4), (2,)),
        lambda: fc.jit(lambda k: fc.random.bits(k, 3))(np.zeros(2)),
        lambda: fc.jit(lambda k: fc.random.split(k))(np.zeros((3, 2))),
    ],
)
def test_bad_random_arguments(call):
    with pytest.raises((ShapeError, DTypeError)):
        call()


def test_draws_have_no_gradient_and_pass_gradients_by():
    key = fc.random.key(0)
    noise = fc.random.normal(key, (3,), np.float64)
    got = fc.jit(fc.grad(lambda x: np.sum(x * fc.random.normal(key, (3,), np.float64))))(np.ones(3))
    np.testing.assert_array_equal(np.asarray(got), noise)


# ---------------------------------------------------------------- at


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=3))
def test_set_and_add(data, shape):
    """Against assignment to a copy, and np.add.at; eager and traced; and the gradients of both operands."""
    x = np.arange(float(np.prod(shape))).reshape(shape)
    if data.draw(st.booleans()):
        index = data.draw(hnp.basic_indices(shape, allow_newaxis=False))
        repeats = False
    else:
        index = data.draw(hnp.integer_array_indices(shape, result_shape=hnp.array_shapes(min_dims=1, max_dims=2, max_side=3)))
        flat = np.ravel(x[index])  # the elements of x are distinct
        repeats = len(np.unique(flat)) < len(flat)
    region = np.shape(x[index])
    own = tuple(data.draw(st.sampled_from([1, n])) if n else n for n in region)
    value = np.random.default_rng(0).integers(-9, 9, size=own).astype(float)

    added = x.copy()
    np.add.at(added, index, value)
    assert_same(fc.at(x)[index].add(value), added)
    assert_same(fc.jit(lambda x, v: fc.at(x)[index].add(v))(x, value), added)
    ct = np.random.default_rng(1).integers(-9, 9, size=shape).astype(float)
    loss = lambda x, v: np.sum(ct * fc.at(x)[index].add(v))
    dx, dv = fc.grad(loss, (0, 1))(x, value)
    np.testing.assert_array_equal(dx, ct)
    np.testing.assert_array_equal(dv, _summed_to(ct[index], own))
    if repeats:
        return
    placed = x.copy()
    placed[index] = value
    assert_same(fc.at(x)[index].set(value), placed)
    assert_same(fc.jit(lambda x, v: fc.at(x)[index].set(v))(x, value), placed)
    dx, dv = fc.jit(fc.grad(lambda x, v: np.sum(ct * fc.at(x)[index].set(v)), (0, 1)))(x, value)
    hole = ct.copy()
    hole[index] = 0
    np.testing.assert_array_equal(np.asarray(dx), hole)
    np.testing.assert_array_equal(np.asarray(dv), _summed_to(ct[index], own))


def _summed_to(x, shape):
    axes = tuple(d for d, n in enumerate(shape) if n == 1 and x.shape[d] != 1)
    return np.sum(x, axis=axes, keepdims=True) if axes else x


def test_repeated_indices_add_up():
    x = np.zeros(3)
    np.testing.assert_array_equal(fc.at(x)[[0, 0, 2]].add([1.0, 2.0, 4.0]), [3, 0, 4])
    np.testing.assert_array_equal(fc.at(x)[np.array([1, 1, 1])].add(1), [0, 3, 0])
    np.testing.assert_array_equal(x, 0)  # the original stays
    counts = fc.jit(lambda i: fc.at(np.zeros(4, np.int64))[i].add(1))(np.array([3, 1, 3, -1]))
    np.testing.assert_array_equal(np.asarray(counts), [0, 1, 0, 3])
    # The second derivative of a sum of squares gathered with repetition counts them.
    loss = lambda x: np.sum(np.square(x[np.array([0, 0, 1])]))
    second = fc.grad(lambda x: np.sum(fc.grad(loss)(x)))(np.ones(3))
    np.testing.assert_array_equal(second, [4, 2, 0])


def test_at_keeps_the_arrays_dtype():
    x = np.array([1, 2, 3], np.int8)
    assert_same(fc.at(x)[0].set(7), np.array([7, 2, 3], np.int8))
    assert_same(fc.at(x)[1:].add(np.array([1, 2], np.int64)), np.array([1, 3, 5], np.int8))
    assert_same(fc.at(x.astype(np.float32))[0].set(np.float64(0.1)), np.array([0.1, 2, 3], np.float32))
    assert fc.at(x.astype(BF16))[0].set(0.5).dtype == BF16
    mask = np.array([True, False, True])
    assert_same(fc.at(x)[mask].set(0), np.array([0, 2, 0], np.int8))
    assert_same(fc.at(x > 1)[0].set(True), np.array([True, True, True]))
    for value in (0.5, np.ones(1), 1j):
        with pytest.raises(DTypeError, match="does not fit"):
            fc.at(x)[0].set(value)
    with pytest.raises(OverflowError):
        fc.at(x)[0].set(300)


def test_at_refuses():
    x = np.zeros((2, 3))
    with pytest.raises(ShapeError, match="broadcast"):
        fc.jit(lambda x: fc.at(x)[0].set(np.ones(2)))(x)
    with pytest.raises(ShapeError, match="broadcast"):
        fc.at(x)[0].add(np.ones(2))
    with pytest.raises(ShapeError, match="out of bounds"):
        fc.at(x)[2].set(1.0)
    with pytest.raises(UnsupportedError, match="needs an index"):
        fc.at(x).set(1.0)
    with pytest.raises(UnsupportedError, match="mask"):
        fc.jit(lambda x: fc.at(x)[x > 0].set(1.0))(x)
