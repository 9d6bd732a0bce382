"""Distributions of fc.random: by moments, chi-squared and Kolmogorov-Smirnov tests with fixed seeds, and at their borders."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import funccoll as fc
from funccoll import P, random
from funccoll.errors import DTypeError, ShapeError, UnsupportedError
from funccoll.primitives import randomness
from funccoll.random import continuous, discrete
from tests.support.cases.numpy_cases import BF16
from tests.support.groups import in_groups
from tests.support.oracles.numpy_oracle import assert_same, numerical

pytestmark = pytest.mark.covers("nn-models")

KEY = random.key(2024)
N = 20_000

DRAWS = {
    "randint": lambda k: random.randint(k, (3, 4), -5, 7),
    "randint8": lambda k: random.randint(k, 9, -128, 128, np.int8),
    "categorical": lambda k: random.categorical(k, np.log([[0.1, 0.2, 0.7]] * 4)),
    "permutation": lambda k: random.permutation(k, 9),
    "rows": lambda k: random.permutation(k, np.arange(12.0).reshape(6, 2)),
    "shuffle": lambda k: random.shuffle(k, np.arange(12.0).reshape(2, 6), 1),
    "choice": lambda k: random.choice(k, 7, (2, 5)),
    "choice of": lambda k: random.choice(k, np.arange(12.0).reshape(2, 6), (2, 2), axis=1),
    "choice once": lambda k: random.choice(k, 9, 5, replace=False),
    "choice by p": lambda k: random.choice(k, 5, (3, 3), p=np.array([0.1, 0.2, 0.3, 0.4, 0.0])),
    "choice once by p": lambda k: random.choice(k, 5, 3, replace=False, p=np.array([0.1, 0.2, 0.3, 0.4, 0.0])),
    "bernoulli": lambda k: random.bernoulli(k, np.array([0.2, 0.9]), (4, 2)),
    "truncated_normal": lambda k: random.truncated_normal(k, -1.0, np.array([1.0, 2.0, np.inf]), (4, 3)),
    "exponential": lambda k: random.exponential(k, (3, 2), np.float64),
    "laplace": lambda k: random.laplace(k, 4),
    "gumbel": lambda k: random.gumbel(k, 4),
    "gamma": lambda k: random.gamma(k, np.array([0.1, 1.0, 9.0]), (4, 3)),
    "loggamma": lambda k: random.loggamma(k, 0.01, (3,)),
    "beta": lambda k: random.beta(k, 2.0, np.array([0.5, 3.0])),
    "dirichlet": lambda k: random.dirichlet(k, np.array([0.5, 1.0, 2.0]), (3,)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_functions_of_the_key(name):
    """The same in a trace, on devices and outside; another key gives other values."""
    draw = DRAWS[name]
    want = draw(KEY)
    assert_same(fc.jit(draw)(KEY), want)
    keys = [random.fold_in(KEY, i) for i in range(3)]
    assert any(not np.array_equal(draw(k), want) for k in keys)
    on_devices = fc.jit(
        lambda k: np.expand_dims(draw(random.fold_in(k, fc.axis_index("a"))), 0),
        mesh=fc.make_mesh({"a": 3}),
        in_specs=P(),
        out_specs=P("a"),
    )(KEY)
    assert_same(on_devices, np.stack([draw(k) for k in keys]))


def test_rules_of_batching():
    """Several keys draw as each by itself; where data are not batched they are repeated."""
    keys = random.split(KEY, 4)
    a, data = np.array([[0.5, 1.0, 3.0]] * 4), np.arange(4)
    cases = [
        (randomness.random_bits_p, [keys], [True], {"shape": (2, 3)}),
        (randomness.split_p, [keys], [True], {"num": 3}),
        (randomness.fold_in_p, [keys, data], [True, True], {}),
        (randomness.fold_in_p, [keys, data[1]], [True, False], {}),
        (randomness.fold_in_p, [KEY, data], [False, True], {}),
        (randomness.log_gamma_p, [keys, a], [True, True], {}),
        (randomness.log_gamma_p, [keys, a[0]], [True, False], {}),
        (randomness.random_order_p, [keys], [True], {}),
    ]
    for primitive, values, batched, params in cases:
        got = primitive.batch(primitive, values, batched, 4, **params)
        each = [primitive.reference(*(v[i] if b else v for v, b in zip(values, batched)), **params) for i in range(4)]
        np.testing.assert_array_equal(got, np.stack(each))
    assert randomness.random_bits_p.reference(keys.reshape(2, 2, 2), shape=(3,)).shape == (2, 2, 3)
    assert randomness.random_bits_p.reference(keys[:0], shape=(3,)).shape == (0, 3)


# ---------------------------------------------------------------- integers


def chi_squared(values, probabilities) -> float:
    """The statistic in standard deviations above its mean: approximately normal."""
    counts = np.bincount(values, minlength=len(probabilities))
    assert len(counts) == len(probabilities) and not counts[probabilities == 0].any()
    expected = np.asarray(probabilities)[probabilities > 0] * counts.sum()
    degrees = len(expected) - 1
    return (((counts[probabilities > 0] - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


def test_randint():
    for low, high, dtype in [(0, 10, np.int64), (-7, 30, np.int8), (0, 256, np.uint8), (2**40, 2**40 + 3, np.int64)]:
        drawn = random.randint(KEY, (N,), low, high, dtype)
        assert drawn.dtype == dtype
        assert abs(chi_squared(drawn.astype(np.int64) - low, np.full(high - low, 1 / (high - low)))) < 5
    assert_same(random.randint(KEY, (2, 3), 4, 5), np.full((2, 3), 4))
    low, high = np.array([[1], [0]]), np.array([2, 5, 9])
    drawn = random.randint(KEY, (500, 2, 3), low, high)
    assert (drawn >= low).all() and (drawn < high).all() and (drawn[:, 1, 2] == 8).any()
    traced = fc.jit(lambda k, low, high: random.randint(k, 100, low, high))(KEY, np.int32(-3), np.int32(50))
    assert_same(traced, random.randint(KEY, 100, -3, 50))


def test_randint_over_all_integers():
    for dtype in (np.int64, np.uint64, np.int8):
        limits = np.iinfo(dtype)
        if dtype == np.uint64:
            drawn = random.randint(KEY, N, 0, np.uint64(limits.max), dtype)
        else:
            drawn = random.randint(KEY, N, limits.min, int(limits.max) + 1, dtype)
        part = (drawn.astype(np.float64) - float(limits.min)) / (float(limits.max) - float(limits.min))
        assert abs(part.mean() - 0.5) < 5 / math.sqrt(12 * N) and part.min() < 0.01 and part.max() > 0.99
    assert random.randint(KEY, (), 0, 5).shape == () and random.randint(KEY, (0, 3), 0, 5).shape == (0, 3)


def test_scaling_is_exact():
    """⌊count · w / 2^128⌋ against Python's integers."""
    rng = np.random.default_rng(0)
    first, second, count = (rng.integers(0, 2**64, 300, np.uint64, endpoint=False) for _ in range(3))
    count[:100] >>= np.uint64(40)
    first[200:] = np.uint64(2**64 - 1)
    second[250:] = np.uint64(2**64 - 1)
    got = discrete._scaled(first, second, count)
    assert got.tolist() == [int(c) * ((int(a) << 64) + int(b)) >> 128 for a, b, c in zip(first, second, count)]


# ---------------------------------------------------------------- categories and orders


def test_categorical():
    p = np.array([0.5, 0.0, 0.2, 0.25, 0.05])
    with np.errstate(divide="ignore"):
        logits = np.log(p) + 3
    for given in (logits, logits.astype(np.float32)):
        drawn = random.categorical(KEY, given, shape=(N,))
        assert drawn.dtype == np.int64 and abs(chi_squared(drawn, p)) < 5
    assert random.categorical(KEY, np.zeros((3, 4, 5)), axis=1).shape == (3, 5)
    assert random.categorical(KEY, np.zeros((4, 5)), shape=(7, 4)).shape == (7, 4)


def test_permutations_are_equally_likely():
    keys = random.split(KEY, 3000)
    orders = randomness.random_order_p.reference(randomness.random_bits_p.reference(keys, shape=(4,)))
    numbers = {p: i for i, p in enumerate(itertools.permutations(range(4)))}
    assert abs(chi_squared(np.array([numbers[tuple(row)] for row in orders.tolist()]), np.full(24, 1 / 24))) < 5
    assert_same(random.permutation(keys[0], 4), orders[0])
    x = np.arange(24.0).reshape(2, 4, 3)
    moved = random.permutation(keys[0], x, axis=1)
    np.testing.assert_array_equal(moved, x[:, orders[0]])
    np.testing.assert_array_equal(random.shuffle(keys[0], x, -2), moved)
    assert random.permutation(KEY, 0).shape == (0,)


def test_choice():
    p = np.array([0.1, 0.0, 0.4, 0.3, 0.2])
    assert abs(chi_squared(random.choice(KEY, 5, N), np.full(5, 0.2))) < 5
    assert abs(chi_squared(random.choice(KEY, 5, N, p=p), p)) < 5
    letters = np.array([10.0, 20, 30, 40, 50])
    np.testing.assert_array_equal(random.choice(KEY, letters, (3, 4), p=p), letters[random.choice(KEY, 5, (3, 4), p=p)])
    keys = random.split(KEY, 2000)
    pairs = np.array([random.choice(k, 5, 2, replace=False, p=p) for k in keys])
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert abs(chi_squared(pairs[:, 0], p)) < 5
    after = np.array([sum(p[i] * p[j] / (1 - p[i]) for i in range(5) if i != j) for j in range(5)])  # the second one
    assert abs(chi_squared(pairs[:, 1], after)) < 5
    assert sorted(random.choice(KEY, 6, 6, replace=False)) == list(range(6))
    assert random.choice(KEY, np.ones((2, 5, 3)), (4, 6), axis=1).shape == (2, 4, 6, 3)
    assert random.choice(KEY, 1, 5, p=np.ones(1)).tolist() == [0] * 5
    assert random.choice(KEY, 0, 0).shape == (0,)
    traced = fc.jit(lambda k, x, p: random.choice(k, x, 50, p=p))(KEY, letters, 7 * p)  # divided by their sum
    assert_same(traced, random.choice(KEY, letters, 50, p=p))


def test_positions_by_bisection():
    total = np.cumsum(np.array([0.1, 0.0, 0.4, 0.0, 0.5, 0.0]))
    u = np.array([0, 0.05, total[0], np.nextafter(total[2], 0), total[2], 0.75, np.nextafter(total[-1], 0)])
    for size in range(1, 7):
        got = discrete._position(total[:size], u)
        assert got.tolist() == np.minimum(np.searchsorted(total[:size], u, side="right"), size - 1).tolist()


# ---------------------------------------------------------------- floats


def distance(sample, cdf) -> float:
    """Kolmogorov and Smirnov's statistic times sqrt(n): above 2.2 with a probability of 1e-4."""
    x = np.sort(np.asarray(sample, np.float64).ravel())
    at, n = cdf(x), len(x)
    return math.sqrt(n) * max(np.max(np.arange(1, n + 1) / n - at), np.max(at - np.arange(n) / n))


normal_cdf = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))


def truncated_cdf(low, high):
    a, b = (float(normal_cdf(x)) for x in (low, high))
    return lambda x: (normal_cdf(x) - a) / (b - a)


DISTRIBUTIONS = {
    "normal": (lambda k, d: random.normal(k, N, d), normal_cdf),
    "exponential": (lambda k, d: random.exponential(k, N, d), lambda x: -np.expm1(-x)),
    "laplace": (lambda k, d: random.laplace(k, N, d), lambda x: np.where(x < 0, np.exp(x) / 2, 1 - np.exp(-x) / 2)),
    "gumbel": (lambda k, d: random.gumbel(k, N, d), lambda x: np.exp(-np.exp(-x))),
    "truncated": (lambda k, d: random.truncated_normal(k, -0.5, 2.0, N, d), truncated_cdf(-0.5, 2.0)),
    "lower tail": (lambda k, d: random.truncated_normal(k, -np.inf, -4.0, N, d), truncated_cdf(-np.inf, -4.0)),
    "half": (lambda k, d: random.truncated_normal(k, 0.0, np.inf, N, d), truncated_cdf(0.0, np.inf)),
    "gamma 1": (lambda k, d: random.gamma(k, 1.0, N, d), lambda x: -np.expm1(-x)),
    "gamma 2": (lambda k, d: random.gamma(k, 2.0, N, d), lambda x: 1 - np.exp(-x) * (1 + x)),
    "gamma 1/2": (lambda k, d: random.gamma(k, 0.5, N, d), lambda x: 2 * normal_cdf(np.sqrt(2 * x)) - 1),
    "beta": (lambda k, d: random.beta(k, 1.0, 3.0, N, d), lambda x: 1 - (1 - x) ** 3),
    "arcsine": (lambda k, d: random.beta(k, 0.5, 0.5, N, d), lambda x: 2 / np.pi * np.arcsin(np.sqrt(np.minimum(x, 1)))),
    "dirichlet": (lambda k, d: random.dirichlet(k, np.ones(4), N, d)[:, 1], lambda x: 1 - (1 - x) ** 3),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    draw, cdf = DISTRIBUTIONS[name]
    for dtype in (np.float32, np.float64):
        sample = draw(KEY, dtype)
        assert sample.dtype == dtype and sample.shape == (N,)
        assert distance(sample, cdf) < 2.2
        assert distance(sample + 0.1, cdf) > 2.2  # the test can fail
    for dtype in (np.float16, BF16):
        short = draw(KEY, dtype)
        assert short.dtype == dtype and abs(short.astype(np.float64) - sample).max() <= 2.0**-8 * abs(sample).max()


def test_moments_of_gamma():
    for a in (1e-3, 0.3, 1.0, 4.5, 1000.0):
        x = random.gamma(KEY, a, N, np.float64)
        assert abs(x.mean() - a) < 5 * math.sqrt(a / N)
        assert abs(x.var() - a) < 5 * math.sqrt((2 * a * a + 6 * a) / N)
    tiny = random.loggamma(KEY, 1e-4, N, np.float64)  # -a log is exponential, but for the factor gamma(a + 1)
    assert np.isfinite(tiny).all() and distance(-1e-4 * tiny, lambda x: -np.expm1(-x)) < 2.2
    each = random.gamma(KEY, np.array([0.2, 2.0, 50.0]), (N, 3), np.float64)
    assert (abs(each.mean(0) - [0.2, 2, 50]) < 5 * np.sqrt(np.array([0.2, 2, 50]) / N)).all()
    small = random.dirichlet(KEY, np.full(3, 1e-3), 100)
    np.testing.assert_allclose(small.sum(-1), 1, rtol=1e-6)
    odd = fc.jit(lambda a: random.gamma(KEY, a))(np.array([-1.0, 0.0, np.nan, np.inf, 1.0]))
    np.testing.assert_array_equal(np.isnan(np.asarray(odd)), [True, False, True, False, False])
    assert np.asarray(odd)[1] == 0 and np.asarray(odd)[3] == np.inf


def test_gamma_has_no_gradient():
    for f in (lambda a: random.gamma(KEY, a), lambda a: random.beta(KEY, a, 1.0), lambda a: random.dirichlet(KEY, a)[0]):
        with pytest.raises(UnsupportedError, match="no gradient in their parameters"):
            fc.grad(lambda a: np.sum(f(a)))(np.array([1.5, 2.0]))
    drawn = lambda x: random.gamma(KEY, x, dtype=np.float64)
    assert fc.grad(lambda x: x * drawn(fc.stop_gradient(x)))(np.float64(2)) == drawn(2.0)


def test_the_normal_distribution_to_its_digits():
    """Φ against libm's erfc, and the quantile as its inverse."""
    x = np.concatenate([np.linspace(-37, 8, 400), [-4, np.nextafter(-4, -5), -np.inf, np.inf, 0]])
    np.testing.assert_allclose(continuous._normal_cdf(x), normal_cdf(x), rtol=1e-11)
    p = np.concatenate([10.0 ** -np.arange(1, 300, 7), np.linspace(0.01, 0.99, 99), [0.075, 0.925]])
    np.testing.assert_allclose(normal_cdf(continuous._normal_quantile(p)), p, rtol=1e-12)
    assert continuous._normal_quantile(np.array([0.0, 0.5, 1.0])).tolist() == [-np.inf, 0, np.inf]


def test_truncated_normal():
    for low, high in [(5.0, 6.0), (-31.0, -30.0), (30.0, np.inf), (-0.1, 0.1), (-np.inf, np.inf)]:
        for dtype in (np.float32, np.float64):
            x = random.truncated_normal(KEY, low, high, 2000, dtype)
            assert (x >= low).all() and (x <= high).all() and len(np.unique(x)) > 1000
    far = random.truncated_normal(KEY, 30.0, np.inf, N, np.float64)  # approximately exponential
    assert abs((far - 30).mean() * 30 - 1) < 0.05
    assert (random.truncated_normal(KEY, 100.0, 101.0, 5) == 100).all()
    assert (random.truncated_normal(KEY, -101.0, -100.0, 5) == -100).all()
    bounds = np.array([-0.5]), np.array([1.5])
    ours = lambda a, b: np.sum(random.truncated_normal(KEY, a, b, 10, np.float64))
    for g, n in zip(fc.grad(ours, (0, 1))(*bounds), numerical(ours, list(bounds), (0, 1), 1e-6), strict=True):
        np.testing.assert_allclose(g, n, rtol=1e-6)
    gradient = fc.grad(lambda a: np.sum(random.truncated_normal(KEY, a, np.inf, 10, np.float64)))(np.array([1.0]))
    assert np.isfinite(gradient).all() and 0 < gradient[0] < 10


# ---------------------------------------------------------------- bad input


@in_groups(
    ("call", "words"),
    [
        (lambda k: random.randint(k, 3, 5, 5), "minval=5 and maxval=5"),
        (lambda k: random.randint(k, 3, 0, 300, np.uint8), "must fit into uint8"),
        (lambda k: random.randint(k, 3, -1, 3, np.uint8), "must fit into uint8"),
        (lambda k: random.randint(k, 3, np.zeros(2, int), 4), r"minval of shape \(2,\).*\(3,\)"),
        (lambda k: random.bernoulli(k, 1.5), "p=1.5 is not a probability: it must be from 0 to 1"),
        (lambda k: random.bernoulli(k, np.array([0.5, np.nan])), "not a probability"),
        (lambda k: random.bernoulli(k, -0.1, 3), "p=-0.1"),
        (lambda k: random.categorical(k, np.zeros((3, 0))), "no category"),
        (lambda k: random.categorical(k, np.zeros((3, 4)), shape=(2,)), r"logits of shape \(3,\).*\(2,\)"),
        (lambda k: random.permutation(k, -1), "x=-1"),
        (lambda k: random.permutation(k, np.float32(3)), "known integer, or an array"),
        (lambda k: random.shuffle(k, 3), "fc.random.permutation"),
        (lambda k: random.choice(k, 3, 4, replace=False), r"4 element\(s\) cannot be drawn from 3 without"),
        (lambda k: random.choice(k, 0, 4), "cannot be drawn from 0"),
        (lambda k: random.choice(k, np.float32(3)), "scalar"),
        (lambda k: random.choice(k, 3, p=np.ones(4) / 4), r"shape \(4,\) for 3"),
        (lambda k: random.choice(k, 3, p=np.array([0.5, 0.4, 0.0])), "sums to 0.9"),
        (lambda k: random.choice(k, 3, p=np.array([1.5, -0.5, 0.0])), "values from -0.5"),
        (lambda k: random.choice(k, 3, 3, replace=False, p=np.array([0.5, 0.5, 0.0])), "3 are drawn.*2 of p"),
        (lambda k: random.truncated_normal(k, 1.0, 1.0), "must be less than"),
        (lambda k: random.truncated_normal(k, np.zeros(2), 1.0, 3), r"lower of shape \(2,\)"),
        (lambda k: random.gamma(k, 0.0), "a=0.0 must be greater than 0"),
        (lambda k: random.gamma(k, np.ones(2), 3), r"a of shape \(2,\)"),
        (lambda k: random.beta(k, 1.0, np.array([-1.0])), "b="),
        (lambda k: random.dirichlet(k, np.float32(1)), "last dimension"),
        (lambda k: random.gamma(k[:1], 1.0), r"u64\[2\], not u64\[1\]"),
        (lambda k: random.bits(np.stack([k, k]), 3), r"u64\[2\], not u64\[2,2\]"),
    ],
)
def test_errors_say_what_to_do(call, words):
    for run in (call, fc.jit(call)):
        with pytest.raises(ShapeError, match=words):
            run(KEY)


@pytest.mark.parametrize(
    "call",
    [
        lambda: random.randint(KEY, 3, 0.5, 3),
        lambda: random.randint(KEY, 3, 0, 3, np.float32),
        lambda: random.exponential(KEY, 3, np.int32),
        lambda: random.gamma(KEY, 1.0, 3, np.complex64),
    ],
)
def test_wrong_dtypes(call):
    with pytest.raises(DTypeError):
        call()
