"""Convolution and pooling: against plain loops, JAX, finite differences, and each example by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, nn
from funccoll.errors import DTypeError, ShapeError
from funccoll.primitives import convolution
from funccoll.primitives.convolution import conv_input_p, conv_kernel_p, conv_p
from funccoll.primitives.pooling import window_max_p, window_max_put_p, window_max_take_p, window_spread_p, window_sum_p
from tests.support.cases.numpy_cases import BF16
from tests.support.example_counts import examples
from tests.support.groups import in_groups
from tests.support.oracles.numpy_oracle import numerical

pytestmark = pytest.mark.covers("nn-models")

RNG = np.random.default_rng(0)


def pairs_of(padding: Any, sizes, window, strides, dilation) -> list[tuple[int, int]]:
    if padding == "VALID":
        return [(0, 0)] * len(sizes)
    if padding == "SAME":
        found = []
        for n, k, s, d in zip(sizes, window, strides, dilation):
            out = -(-n // s)
            missing = max((out - 1) * s + d * (k - 1) + 1 - n, 0)
            found.append((missing // 2, missing - missing // 2))
        return found
    return list(padding)


def windows(x: np.ndarray, window, strides, padding, dilation, fill: Any = 0):
    """(position, window of each example and channel) in turn, cut from a padded copy."""
    pairs = pairs_of(padding, x.shape[1:-1], window, strides, dilation)
    padded = np.pad(x, [(0, 0), *pairs, (0, 0)], constant_values=fill)
    spans = [d * (k - 1) + 1 for k, d in zip(window, dilation)]
    counts = [(n - span) // s + 1 for n, span, s in zip(padded.shape[1:-1], spans, strides)]
    for position in np.ndindex(*counts):
        cut = tuple(slice(p * s, p * s + span, d) for p, s, span, d in zip(position, strides, spans, dilation))
        yield position, padded[(slice(None), *cut)]


def plain_conv(x, w, strides, padding, dilation, groups):
    found = {}
    for position, part in windows(x, w.shape[:-2], strides, padding, dilation):
        channels, outputs = x.shape[-1] // groups, w.shape[-1] // groups
        each = [
            np.tensordot(part[..., g * channels : (g + 1) * channels], w[..., g * outputs : (g + 1) * outputs], w.ndim - 1)
            for g in range(groups)
        ]
        found[position] = np.concatenate(each, -1)
    shape = tuple(n + 1 for n in max(found))
    return np.stack([found[p] for p in np.ndindex(*shape)], 1).reshape(len(x), *shape, -1)


@st.composite
def convolutions(draw):
    """(x, w, strides, padding, dilation, groups): one or two dimensions, small integers."""
    n = draw(st.integers(1, 2))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(n))
    sizes, window, strides, dilation, groups = each(3, 6), each(1, 3), each(1, 3), each(1, 2), draw(st.integers(1, 2))
    spans = [d * (k - 1) + 1 for k, d in zip(window, dilation)]
    low = [max(0, span - size) for span, size in zip(spans, sizes)]
    explicit = tuple((p + draw(st.integers(0, 2)), draw(st.integers(0, 2))) for p in low)
    padding = draw(st.sampled_from(["SAME", explicit] if any(low) else ["SAME", "VALID", explicit]))
    channels, outputs = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 100)))
    x = rng.integers(-4, 5, (draw(st.integers(1, 3)), *sizes, channels * groups)).astype(np.float64)
    w = rng.integers(-4, 5, (*window, channels, outputs * groups)).astype(np.float64)
    return x, w, strides, padding, dilation, groups


@examples(60)
@given(case=convolutions(), block=st.sampled_from([1, 1 << 9, 1 << 18]), short=st.sampled_from([1, 1 << 9]))
def test_values_and_transposes(case, block, short):
    """The sums are exact, so are the dot tests: <conv(x, w), y> is the same through either gradient. Blocks of any size."""
    x, w, strides, padding, dilation, groups = case
    kept = convolution._BLOCK_BYTES, convolution._SHORT_RUN
    convolution._BLOCK_BYTES, convolution._SHORT_RUN = block, short
    try:
        f = lambda x, w: nn.conv(x, w, strides=strides, padding=padding, dilation=dilation, groups=groups)
        out, pull = fc.vjp(f, x, w)
        np.testing.assert_array_equal(out, plain_conv(*case))
        y = np.random.default_rng(1).integers(-4, 5, out.shape).astype(np.float64)
        dx, dw = pull(y)
        assert np.sum(out * y) == np.sum(dx * x) == np.sum(dw * w)
        # Linear in each operand: differences are derivatives.
        v = np.random.default_rng(2).integers(-4, 5, x.shape).astype(np.float64)
        assert np.sum(dx * v) == np.sum(f(v, w) * y)
        u = np.random.default_rng(3).integers(-4, 5, w.shape).astype(np.float64)
        assert np.sum(dw * u) == np.sum(f(x, u) * y)
    finally:
        convolution._BLOCK_BYTES, convolution._SHORT_RUN = kept


@given(case=convolutions())
@examples(25)
def test_channels_first(case):
    x, w, *rest = case
    options = dict(zip(("strides", "padding", "dilation", "groups"), rest))
    first = nn.conv(np.moveaxis(x, -1, 1), np.moveaxis(w, (-1, -2), (0, 1)), channels_first=True, **options)
    np.testing.assert_array_equal(np.moveaxis(first, 1, -1), nn.conv(x, w, **options))


def test_second_derivatives():
    x, w = RNG.normal(size=(1, 4, 4, 2)), RNG.normal(size=(3, 2, 1, 2))
    v, u = RNG.normal(size=x.shape), RNG.normal(size=w.shape)

    def loss(x, w):
        return np.sum(np.sin(nn.conv(x, w, strides=(2, 1), padding="SAME", dilation=(1, 2), groups=2)))

    def slope(x, w):
        dx, dw = fc.grad(loss, (0, 1))(x, w)
        return np.sum(dx * v) + np.sum(dw * u)

    want = numerical(fc.jit(slope), [x, w], (0, 1), 1e-6)
    for g, n in zip(fc.jit(fc.grad(slope, (0, 1)))(x, w), want, strict=True):
        np.testing.assert_allclose(np.asarray(g), n, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64, np.complex64, np.int32], ids=str)
def test_dtypes(dtype):
    """16-bit floats are summed in float32: long sums of ones are exact, and the result is rounded once."""
    x, w = np.ones((2, 40, 30, 1), dtype), np.ones((20, 15, 1, 2), dtype)
    out = fc.jit(nn.conv)(x, w)
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out).astype(np.complex128), np.full((2, 21, 16, 2), 300).astype(dtype))
    if dtype is not np.int32:
        y, pull = fc.vjp(nn.conv, x, w)
        dx, dw = pull(np.ones_like(y))
        assert dx.dtype == dw.dtype == dtype
        assert dx[0, 20, 15, 0] == 600 and dw[0, 0, 0, 0] == np.asarray(2 * 21 * 16, dtype)
    with pytest.raises(DTypeError):
        nn.conv(x.astype(bool), w.astype(bool))


def test_mixed_dtypes_promote():
    x, w = RNG.normal(size=(1, 5, 1)).astype(np.float32), RNG.normal(size=(2, 1, 1))
    assert nn.conv(x, w).dtype == np.float64
    dx, dw = fc.grad(lambda x, w: np.sum(nn.conv(x, w)), (0, 1))(x, w)
    assert (dx.dtype, dw.dtype) == (np.float32, np.float64)


@pytest.mark.parametrize("shape", [(0, 5, 4, 2), (2, 5, 4, 2)])
def test_without_examples_or_outputs(shape):
    x = np.ones(shape)
    for outputs in (0, 3):
        w = np.ones((2, 2, 2, outputs))
        y, pull = fc.vjp(nn.conv, x, w)
        dx, dw = pull(y)
        assert y.shape == (shape[0], 4, 3, outputs) and dx.shape == x.shape and dw.shape == w.shape
        assert shape[0] or not np.any(dw)


def test_on_a_mesh_the_kernel_gradient_is_reduced():
    """Examples on four virtual devices: one all_reduce of the kernel's gradient, which is that of all examples."""
    mesh = fc.make_mesh({"data": 4})
    x, w = RNG.integers(-3, 4, (8, 6, 6, 2)).astype(np.float32), RNG.integers(-3, 4, (3, 3, 2, 3)).astype(np.float32)

    @fc.jit(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def gradient(w, x):
        return fc.grad(lambda w: fc.all_reduce(np.sum(np.square(nn.conv(x, w, padding="SAME"))), "data"))(w)

    whole = fc.grad(lambda w: np.sum(np.square(nn.conv(x, w, padding="SAME"))))(w)
    np.testing.assert_array_equal(np.asarray(gradient(w, x)), whole)


# ---------------------------------------------------------------- batching


def each_by_itself(primitive, values, batched, params):
    """The rule of vmap against a loop over the batch."""
    size = next(v.shape[0] for v, b in zip(values, batched) if b)
    want = np.stack([primitive.reference(*(v[i] if b else v for v, b in zip(values, batched)), **params) for i in range(size)])
    got = primitive.batch(primitive, values, batched, size, **params)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("batched", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_batches_of_convolutions(groups, batched):
    small = lambda *shape: RNG.integers(-4, 5, shape).astype(np.float64)
    lead = [(3,) if b else () for b in batched]
    params = {"strides": (2, 1), "padding": ((1, 0), (0, 2)), "dilation": (1, 2), "groups": groups}
    x, w, y = (2, 5, 6, 4), (2, 3, 4 // groups, 6), (2, 3, 4, 6)
    found = convolution.positions(x[1:-1], w[:-2], params["strides"], params["padding"], params["dilation"])
    assert found == y[1:-1]
    each_by_itself(conv_p, [small(*lead[0], *x), small(*lead[1], *w)], batched, params)
    each_by_itself(conv_input_p, [small(*lead[0], *y), small(*lead[1], *w)], batched, params | {"sizes": x[1:-1]})
    each_by_itself(conv_kernel_p, [small(*lead[0], *x), small(*lead[1], *y)], batched, params | {"window": w[:-2]})


POOLING = {"dim": 1, "window": 3, "stride": 2, "padding": (1, 1)}


def test_batches_of_pooling():
    x = RNG.integers(0, 3, (4, 2, 7, 3)).astype(np.float64)
    out = window_max_p.reference(x, **POOLING | {"dim": 2})
    y = RNG.normal(size=out.shape)
    for primitive, values in [(window_max_p, [x]), (window_sum_p, [x])]:
        each_by_itself(primitive, values, [True], POOLING)
    each_by_itself(window_spread_p, [y], [True], POOLING | {"length": 7})
    for last in (True, False):
        each_by_itself(window_max_put_p, [x, out, y if last else y[0]], [True, True, last], POOLING)
        each_by_itself(window_max_take_p, [x, out, x if last else x[0]], [True, True, last], POOLING)


# ---------------------------------------------------------------- pooling

POOLS = [
    ((2,), {}),
    ((3,), {"strides": 1, "padding": "SAME"}),
    ((2, 3), {"strides": (2, 1), "padding": ((1, 0), (2, 1))}),
    ((2, 2), {}),
    ((3, 2), {"strides": 2, "padding": "SAME"}),
    ((2, 2), {"strides": 3}),
]


def plain_pool(x, window, options, reduce, fill):
    window = tuple(window)
    strides = options.get("strides", window)
    strides = (strides,) * len(window) if isinstance(strides, int) else strides
    cut = windows(x, window, strides, options.get("padding", "VALID"), (1,) * len(window), fill)
    found = {position: reduce(part) for position, part in cut}
    shape = tuple(n + 1 for n in max(found))
    return np.stack([found[p] for p in np.ndindex(*shape)], 1).reshape(len(x), *shape, -1)


@pytest.mark.parametrize(("window", "options"), POOLS, ids=str)
def test_pooling_values(window, options):
    over = tuple(range(1, len(window) + 1))
    for dtype in (np.float32, np.float16, BF16, np.int8, np.uint8):
        x = RNG.integers(0, 50, (2, *(7, 6)[: len(window)], 3)).astype(dtype)
        least = -np.inf if np.dtype(dtype).kind not in "iu" else np.iinfo(dtype).min
        out = fc.jit(lambda x: nn.max_pool(x, window, **options))(x)
        assert out.dtype == dtype
        want = plain_pool(x, window, options, lambda part: part.max(over), least)
        np.testing.assert_array_equal(np.asarray(out), want)
        first = nn.max_pool(np.moveaxis(x, -1, 1), window, channels_first=True, **options)
        np.testing.assert_array_equal(np.moveaxis(first, 1, -1), want)
        if dtype not in (np.int8, np.uint8):
            for counted in (True, False):
                average = lambda part: (np.mean if counted else np.nanmean)(part.astype(np.float64), over)
                want = plain_pool(x.astype(np.float64), window, options, average, 0.0 if counted else np.nan)
                got = nn.avg_pool(x, window, count_padding=counted, **options)
                assert got.dtype == dtype
                eps = float(np.finfo(np.float32).eps) if dtype == np.float32 else 2.0**-8
                np.testing.assert_allclose(got.astype(np.float64), want, rtol=2 * eps)


@pytest.mark.parametrize(("window", "options"), POOLS, ids=str)
def test_pooling_gradients(window, options):
    """Gradient and second derivative along a direction; no ties."""
    shape = (2, *(7, 6)[: len(window)], 2)
    x, v = RNG.permutation(np.prod(shape)).reshape(shape).astype(np.float64), RNG.normal(size=shape)
    for pool in (nn.max_pool, nn.avg_pool, lambda x, *a, **k: nn.avg_pool(x, *a, count_padding=False, **k)):
        loss = lambda x: np.sum(pool(x, window, **options) ** 3)
        slope = lambda x: np.sum(fc.grad(loss)(x) * v)
        up, down = loss(x + 1e-4 * v), loss(x - 1e-4 * v)
        np.testing.assert_allclose(slope(x), (up - down) / 2e-4, rtol=1e-6)
        bent = np.sum(np.asarray(fc.jit(fc.grad(slope))(x)) * v)
        np.testing.assert_allclose(bent, (slope(x + 1e-4 * v) - slope(x - 1e-4 * v)) / 2e-4, rtol=1e-6)


def test_the_first_of_equal_maxima_has_the_gradient():
    x = np.array([[0.0, 3, 3, 1], [3, 3, 0, 1], [np.nan, 1, 2, 2], [np.nan, 5, 2, 2]])[None, :, :, None]
    got = fc.grad(lambda x: np.sum(nn.max_pool(x, 2)))(x)[0, :, :, 0]
    np.testing.assert_array_equal(got, [[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    # Windows that overlap: an element that is the maximum of several has the sum.
    line = np.array([1.0, 5, 1, 4, 4])[None, :, None]
    np.testing.assert_array_equal(fc.grad(lambda x: np.sum(nn.max_pool(x, 3, strides=1)))(line)[0, :, 0], [0, 2, 0, 1, 0])


CONVOLUTIONS = [((1, 1), "SAME", (2, 1)), ((2, 3), "VALID", (1, 1)), ((1, 2), ((1, 2), (0, 3)), (1, 2))]
MAXIMA = [((2, 2), "VALID"), ((1, 2), "SAME"), ((2, 1), ((1, 1), (0, 1)))]


def test_against_jax():
    """Values and gradients, exactly: the sums are of small integers. Ties in the maxima go the same way."""
    jax = pytest.importorskip("jax")
    from jax import lax

    from tests.support.oracles.jax_sides import COMPILER_OPTIONS

    small = lambda *shape: RNG.integers(-3, 4, shape).astype(np.float32)
    x, w = small(2, 9, 8, 4), small(3, 2, 2, 6)

    def theirs(x, w):
        convolved = [
            lax.conv_general_dilated(
                x, w, strides, padding, rhs_dilation=dilation, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
            )
            for strides, padding, dilation in CONVOLUTIONS
        ]
        pads = [(s, p if isinstance(p, str) else ((0, 0), *p, (0, 0))) for s, p in MAXIMA]
        return convolved + [lax.reduce_window(x, -np.inf, lax.max, (1, 3, 2, 1), (1, *s, 1), p) for s, p in pads]

    def ours(x, w):
        convolved = [nn.conv(x, w, strides=s, padding=p, dilation=d, groups=2) for s, p, d in CONVOLUTIONS]
        return convolved + [nn.max_pool(x, (3, 2), strides=s, padding=p) for s, p in MAXIMA]

    found, pull = fc.vjp(ours, x, w)
    cts = [small(*y.shape) for y in found]
    compiled = jax.jit(lambda x, w, cts: (theirs(x, w), jax.vjp(theirs, x, w)[1](cts))).lower(x, w, cts)
    want, gradients = compiled.compile(compiler_options=COMPILER_OPTIONS)(x, w, cts)
    for ours, jaxs in zip([*found, *pull(cts)], [*want, *gradients], strict=True):
        np.testing.assert_array_equal(ours, jaxs)


# ---------------------------------------------------------------- bad input

IMAGE, KERNEL = np.ones((2, 8, 8, 4)), np.ones((3, 3, 4, 6))


@in_groups(
    ("call", "words"),
    [
        (lambda: nn.conv(IMAGE, np.ones((3, 3, 3, 6))), r"has 4 channels.*\(3, 3, 3, 6\) takes 3"),
        (lambda: nn.conv(IMAGE, np.ones((3, 3, 4, 6)), groups=2), r"2 group\(s\) of 2.*takes 4"),
        (lambda: nn.conv(IMAGE, np.ones((3, 3, 1, 6)), groups=3), "groups=3 must divide the 4 channels of x and the 6 outputs"),
        (lambda: nn.conv(IMAGE, np.ones((9, 3, 4, 6))), r"window of \(9, 3\).*does not fit into \(8, 8\).*SAME"),
        (lambda: nn.conv(IMAGE, KERNEL, dilation=4), "does not fit"),
        (lambda: nn.conv(IMAGE, np.ones((0, 3, 4, 6)), padding=1), "does not fit"),
        (lambda: nn.conv(IMAGE, np.ones((3, 4, 6))), r"\(2, 8, 8, 4\), the kernel \(3, 4, 6\).*equally many"),
        (lambda: nn.conv(np.ones((8, 4)), np.ones((3, 4))), "needs examples, channels, and a spatial dimension"),
        (lambda: nn.conv(IMAGE, KERNEL, strides=0), "strides=0 must be an integer of 1 or more, or 2 of them"),
        (lambda: nn.conv(IMAGE, KERNEL, strides=(1, 1, 1)), r"strides=\(1, 1, 1\)"),
        (lambda: nn.conv(IMAGE, KERNEL, dilation=1.5), "dilation=1.5"),
        (lambda: nn.conv(IMAGE, KERNEL, groups=0), "groups=0"),
        (lambda: nn.conv(IMAGE, KERNEL, padding="FULL"), "padding='FULL' must be"),
        (lambda: nn.conv(IMAGE, KERNEL, padding=((1, 1),)), "one for each dimension"),
        (lambda: nn.conv(IMAGE, KERNEL, padding=-1), "padding=-1"),
        (lambda: nn.max_pool(IMAGE, 9), r"dimension 2 of shape \(2, 8, 8, 4\): a window of 9 does not fit.*at most the 8"),
        (lambda: nn.max_pool(IMAGE, 2, padding=2), "more than the padding"),
        (lambda: nn.avg_pool(np.ones((2, 0, 3)), 1), "does not fit"),
        (lambda: nn.max_pool(IMAGE, (2, 2, 2)), r"window=\(2, 2, 2\)"),
        (lambda: nn.max_pool(np.ones((8, 4)), 2), "needs examples"),
    ],
)
def test_errors_name_shapes_and_what_to_do(call, words):
    with pytest.raises(ShapeError, match=words):
        call()
    with pytest.raises(ShapeError, match=words) as caught:
        fc.jit(lambda: call())()
    assert caught.value.source is not None


def test_wrong_dtypes():
    with pytest.raises(DTypeError, match="no order"):
        nn.max_pool(IMAGE.astype(complex), 2)
    with pytest.raises(DTypeError, match="astype"):
        nn.avg_pool(IMAGE.astype(int), 2)


# ---------------------------------------------------------------- on a GPU's library


def test_rules_for_a_gpu():
    """CuPy's rules on the fake: the same values and gradients as NumPy's."""
    from tests.support.fakes.cupy_programs import on_gpu

    small = lambda *shape: RNG.integers(-3, 4, shape).astype(np.float32)
    x, w = small(2, 6, 5, 4), small(3, 2, 2, 6)

    def everything(x, w):
        y = nn.conv(x, w, strides=(1, 2), padding="SAME", groups=2)
        pooled = nn.max_pool(y, 2, strides=1, padding="SAME") + nn.avg_pool(y, (4, 2), strides=1, padding=((2, 1), (1, 0)))
        return np.sum(np.square(pooled)), y, pooled

    gradients = fc.grad(lambda x, w: everything(x, w)[0], (0, 1))
    slope = fc.grad(lambda x, w: np.sum(np.square(gradients(x, w)[0])) * 1e-6, (0, 1))
    for function in (everything, gradients, slope):
        for got, want in zip(on_gpu(function, x, w), fc.jit(function)(x, w), strict=True):
            np.testing.assert_allclose(got, np.asarray(want), rtol=1e-5, atol=1e-3)
    halves = [v.astype(BF16) for v in (x, w)]
    np.testing.assert_array_equal(
        on_gpu(nn.conv, *(v.astype(BF16) for v in (x, w[:, :, :, :6].repeat(2, 2)))),
        nn.conv(halves[0], w.repeat(2, 2).astype(BF16)),
    )
    np.testing.assert_array_equal(on_gpu(lambda x: nn.max_pool(x, 2), halves[0]), nn.max_pool(halves[0], 2))
    assert not np.any(on_gpu(nn.conv, np.ones((2, 4, 4, 0), np.float32), np.ones((2, 2, 0, 3), np.float32)))
