"""Tracers as NumPy arrays: methods, operators, indices, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import funccoll as fc
from funccoll.errors import ConcretizationError, InPlaceError, ShapeError, UnsupportedError
from funccoll.primitives.elementwise import where_p
from tests.support.cases.numpy_cases import BF16, NUMPY
from tests.support.groups import in_groups
from tests.support.oracles.numpy_oracle import assert_same, noted

pytestmark = [pytest.mark.covers("numpy"), pytest.mark.usefixtures("numpy_compute")]

# ---------------------------------------------------------------- tracers are arrays


def _both(call, *args):
    assert_same(fc.jit(call)(*args), call(*args))


# fmt: off
METHODS = [
    lambda x: x.sum(), lambda x: x.sum(0), lambda x: x.sum(axis=-1, keepdims=True), lambda x: x.prod(1), lambda x: x.max(),
    lambda x: x.min(axis=0), lambda x: x.mean(1), lambda x: x.any(), lambda x: x.all(0), lambda x: x.argmax(1),
    lambda x: x.argmin(), lambda x: x.cumsum(), lambda x: x.cumsum(axis=1), lambda x: x.T, lambda x: x.mT, lambda x: x.real,
    lambda x: x.imag, lambda x: x.conj(), lambda x: x.conjugate(), lambda x: x.reshape(3, 2), lambda x: x.reshape((6,)),
    lambda x: x.reshape(-1), lambda x: x.reshape([2, -1]), lambda x: x.ravel(), lambda x: x.flatten(), lambda x: x.copy(),
    lambda x: x.transpose(), lambda x: x.transpose(1, 0), lambda x: x.transpose((1, 0)), lambda x: x.transpose(None),
    lambda x: x.swapaxes(0, 1), lambda x: x[None].squeeze(), lambda x: x.squeeze(), lambda x: x.take([1, 0]),
    lambda x: x.clip(-0.5, 0.5), lambda x: x.round(1), lambda x: x.dot(x.T), lambda x: x.repeat(2), lambda x: x.trace(),
    lambda x: x.diagonal(), lambda x: x.astype(np.float32), lambda x: x.astype("i4"), lambda x: x.max(initial=9),
    lambda x: np.array([x.shape, (x.ndim, x.size), (x.nbytes, x.itemsize), (len(x), 0)]),
    lambda x: [row * i for i, row in enumerate(x)], lambda x: (lambda a, b: a - b)(*x),
    lambda x: np.add.reduce(x), lambda x: np.add.reduce(x, axis=None), lambda x: np.add.reduce(x, 1, keepdims=True),
    lambda x: np.multiply.reduce(x, axis=1), lambda x: np.maximum.reduce(x), lambda x: np.minimum.reduce(x, axis=(0, 1)),
    lambda x: np.logical_and.reduce(x > 0), lambda x: np.logical_or.reduce(x > 0, axis=1),
    lambda x: np.add.reduce(x, dtype=np.float32), lambda x: np.add.reduce(x, axis=1, initial=1.5),
]
# fmt: on


def test_methods_and_properties():
    for number, method in enumerate(METHODS):
        with noted(f"METHODS[{number}]"):
            _both(method, np.random.default_rng(0).normal(size=(2, 3)))


def test_pythons_round():
    x = np.array([1.25, -2.35, 2.5])
    for ours, numpys in zip(fc.jit(lambda x: (round(x), round(x, 1)))(x), (np.round(x), np.round(x, 1)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), numpys)


def test_variance_methods():
    x = np.random.default_rng(0).normal(size=(4, 3))
    assert_same(fc.jit(lambda x: [x.var(), x.std(0), x.var(1, ddof=1)])(x), [x.var(), x.std(0), x.var(1, ddof=1)], exact=False)


OPERATORS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
    "divmod": divmod,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
BITWISE = {
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_reflected_operators(name):
    op = OPERATORS[name]
    for dtype in (np.float32, np.float64, np.int32, np.uint8):
        x = np.array([1, 2, 3, 5], dtype)
        _both(op, x, x[::-1].copy())
        for other in (2, 3.5, True, np.float64(2.5), np.int64(3), np.array([1, 2, 3, 4], np.int16), [1, 2, 2, 1]):
            _both(lambda x, other=other: op(x, other), x)
            _both(lambda x, other=other: op(other, x), x)


@pytest.mark.parametrize("name", BITWISE)
def test_bitwise_operators(name):
    op = BITWISE[name]
    x = np.array([1, 2, 3, 5], np.int32)
    for other in (2, np.int64(3), np.array([1, 2, 3, 4], np.int16), True):
        _both(lambda x, other=other: op(x, other), x)
        _both(lambda x, other=other: op(other, x), x)
    _both(lambda x: ~x, x)
    _both(lambda x: ~(x > 2), x)


def test_matmul_operator_reflected():
    rng = np.random.default_rng(0)
    x, c = rng.normal(size=(3, 3)), rng.normal(size=(3, 3))
    _both(lambda x: x @ c, x)
    _both(lambda x: c @ x, x)
    _both(lambda x: (-x, +x, abs(x)), x)


EXPONENTS = [-1, 0, 0.5, 1, 1.0, 2, 2.0, 3, 3.0, -2.0, True]
if NUMPY >= (2, 3):  # before, `x ** np.float64(2)` of float16 is float16, and `x ** -1.0` has other signs of zeros: not as here
    EXPONENTS += [-1.0, np.float64(2), np.float32(2), np.int8(2)]


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_power_has_numpys_bits(exponent):
    rng = np.random.default_rng(0)
    for dtype in (np.float16, np.float32, np.float64, np.complex64):
        x = np.append(rng.uniform(0.1, 9, size=50), [0.0, np.inf, np.nan]).astype(dtype)
        with np.errstate(all="ignore"):
            cube = exponent == 3 and dtype in (np.float32, np.float64)  # the compiler's products: test_simplify.py
            want = x * x * x if cube else x**exponent
        assert_same(fc.jit(lambda x: x**exponent)(x), want)
    if exponent >= 0:
        for dtype in (np.int8, np.uint8, np.int64):
            _both(lambda x: x**exponent, np.array([0, 1, 5, 11], dtype))


def test_what_needs_values_is_refused():
    x = np.arange(4.0)
    for call in (bool, float, int, lambda x: x.item(), lambda x: x.tolist(), lambda x: range(4)[x]):
        with pytest.raises(ConcretizationError):
            fc.jit(lambda x, call=call: call(x[0]))(x)

    def assign(x):
        x[0] = 1
        return x

    def add_to(x):
        y = np.zeros(4)
        y += x
        return y

    for call in (assign, add_to, lambda x: np.add(x, x, out=np.zeros(4)), lambda x: np.sum(x, out=np.zeros(()))):
        with pytest.raises(InPlaceError):
            fc.jit(call)(x)
    unsupported = [
        np.poly,
        lambda x: x.sort(),
        lambda x: np.where(x > 0),
        lambda x: x[x > 0],
        lambda x: np.subtract.accumulate(x),
        lambda x: np.max(x, where=x > 0),
        lambda x: np.reshape(x, 4, order="F"),
        lambda x: np.frexp(x),
        lambda x: np.pad(x, 1, mode="mean"),
        lambda x: np.repeat(x, x.astype(int)),
        lambda x: x[: x.astype(int)[0]],
        lambda x: np.linalg.pinv(x.reshape(2, 2), hermitian=True),
        lambda x: np.add(x, x, where=x > 0),
        lambda x: x[True],
        lambda x: np.roll(x, x[0].astype(int)),
    ]
    for call in unsupported:
        with pytest.raises(UnsupportedError):
            fc.jit(call)(x)


@in_groups(
    "call",
    [
        lambda x: x.reshape(4, 2),
        lambda x: x.reshape(-1, -1),
        lambda x: x.reshape(-2, -3),
        lambda x: np.squeeze(x, 0),
        lambda x: np.concatenate([x, x[:, :2]]),
        lambda x: np.stack([x, x[0]]),
        lambda x: np.split(x, 2, 1),
        lambda x: np.split(x, 0),
        lambda x: x + np.ones(4),
        lambda x: x @ x,
        lambda x: np.einsum("ij,jk", x, x),
        lambda x: np.einsum("ij->ik", x),
        lambda x: np.einsum("ij->ii", x),
        lambda x: np.einsum("ijk->i", x),
        lambda x: np.einsum("...ijk->i", x),
        lambda x: np.einsum("...j->j", x),
        lambda x: np.pad(x, -1),
        lambda x: np.max(x[:0], axis=0),
        lambda x: np.argmax(x[:0], axis=0),
        lambda x: np.broadcast_to(x, (3, 3)),
        lambda x: np.linalg.norm(x[None], 1),
        lambda x: np.linalg.norm(x[0], "fro"),
        lambda x: np.tensordot(x, x, 1),
        lambda x: np.sum(x, axis=2),
        lambda x: np.sum(x, axis=(0, 0)),
        lambda x: x.transpose(0, 0),
        lambda x: np.moveaxis(x, (0, 1), 0),
        lambda x: np.take_along_axis(x, np.array([0]), 0),
        lambda x: np.broadcast_to(x, (3,)),
        lambda x: np.vdot(x, x[0]),
        lambda x: np.average(x, 0, np.ones(3)),
    ],
)
def test_what_numpy_refuses_is_refused(call):
    x = np.arange(6.0).reshape(2, 3)
    with pytest.raises((ValueError, IndexError, TypeError, ZeroDivisionError)):
        call(x)
    with pytest.raises((ValueError, IndexError)):
        fc.jit(call)(x)


MASKS = [np.array([True, False, True]), np.ones((2, 2), bool), (..., np.ones(2, bool))]


@pytest.mark.parametrize("index", [5, -3, (0, 3), (0, 0, 0), (..., ...), [0, 2], (0, [7]), *MASKS])
def test_bad_indices_are_refused(index):
    x = np.arange(6.0).reshape(2, 3)
    with pytest.raises(IndexError):
        x[index]
    with pytest.raises(ShapeError):
        fc.jit(lambda x: x[index])(x)


def test_a_float_array_as_an_index_names_its_conversion():
    with pytest.raises(ShapeError, match=r"or masks\. Convert it: \.astype\(np\.int32\)\."):
        fc.jit(lambda x, i: x[i])(np.arange(6.0), np.ones(2, np.float32))


# ---------------------------------------------------------------- properties


@given(data=st.data(), shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
def test_basic_indexing(data, shape):
    x = np.arange(float(np.prod(shape, dtype=int))).reshape(shape)
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=6))
    _check_index(x, index)


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=3))
def test_integer_array_indexing(data, shape):
    """Integer arrays that broadcast together, integers, slices, None and `...` in any order."""
    x = np.arange(float(np.prod(shape))).reshape(shape)
    common = data.draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    index = []
    for n in shape[: data.draw(st.integers(1, len(shape)))]:
        kind = data.draw(st.sampled_from(["array", "array", "int", "slice", "new", "list"]))
        own = tuple(data.draw(st.sampled_from([1, k])) if k else k for k in common)
        if kind == "array":
            index.append(data.draw(hnp.arrays(st.sampled_from([np.int64, np.int8]), own, elements=st.integers(-n, n - 1))))
        elif kind == "list":
            index.append([data.draw(st.integers(-n, n - 1))])
        elif kind == "int":
            index.append(data.draw(st.integers(-n, n - 1)))
        elif kind == "slice":
            index.append(data.draw(st.slices(n)))
        else:
            index.extend([None, data.draw(st.slices(n))])
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), Ellipsis)
    _check_index(x, tuple(index))


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3))
def test_boolean_masks_that_are_known(data, shape):
    x = np.arange(float(np.prod(shape, dtype=int))).reshape(shape)
    covered = data.draw(st.integers(1, len(shape)))
    mask = data.draw(hnp.arrays(np.bool_, shape[:covered]))
    _check_index(x, mask)
    _check_index(x, (mask, ..., None))


def _check_index(x, index):
    """Values as NumPy's; the gradient scatters back what was read, adding where an element was read twice."""
    want = x[index]
    assert_same(fc.jit(lambda x: x[index])(x), want)
    ct = np.random.default_rng(0).normal(size=np.shape(want))
    expected = np.zeros_like(x)
    np.add.at(expected, index, ct)
    grad = fc.jit(fc.grad(lambda x: np.sum(x[index] * ct)))(x)
    np.testing.assert_allclose(np.asarray(grad), expected, rtol=1e-14, atol=1e-14)
    # A traced index gives what a known one gives.
    items = index if isinstance(index, tuple) else (index,)
    arrays = [i for i in items if isinstance(i, np.ndarray) and i.dtype != bool]
    if arrays:

        def traced(x, arrays):
            rest = iter(arrays)
            return x[tuple(next(rest) if isinstance(i, np.ndarray) and i.dtype != bool else i for i in items)]

        assert_same(fc.jit(traced)(x, arrays), want)


def test_lists_as_indices():
    x = np.arange(6.0).reshape(2, 3)
    for index in ([], ([], 0), [[0, 1], [1, 0]], ([0, 1], (2, 0)), ([True, False],), (slice(None), [True, False, True])):
        _both(lambda x, index=index: x[index], x)
    _both(lambda x, i: x[[i, 0]], x, np.array(1))
    _both(lambda x, i: x[i, i], x, np.array(1, np.uint8))


@given(
    shapes=hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, min_side=0, max_side=3),
    ufunc=st.sampled_from([np.multiply, np.add, np.subtract]),
)
def test_broadcasting(shapes, ufunc):
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-4, 5, size=s).astype(np.float64) for s in shapes.input_shapes)
    call = lambda a, b, c: ufunc(a, b) * c
    assert_same(fc.jit(call)(a, b, c), call(a, b, c))
    grads = fc.jit(fc.grad(lambda *xs: np.sum(call(*xs)), (0, 1, 2)))(a, b, c)
    # The loss is affine in each argument, and all numbers are small integers: the difference is exact.
    for i, (g, x) in enumerate(zip(grads, (a, b, c), strict=True)):
        assert g.shape == x.shape
        args = [a, b, c]
        args[i] = x + 1
        assert np.sum(np.asarray(g)) == np.sum(call(*args)) - np.sum(call(a, b, c))


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=3))
def test_reduction_axes(data, shape):
    axis = data.draw(st.none() | hnp.valid_tuple_axes(len(shape)) | st.integers(-len(shape), len(shape) - 1))
    keepdims = data.draw(st.booleans())
    f = data.draw(st.sampled_from([np.sum, np.prod, np.max, np.min, np.any, np.all, np.count_nonzero, np.mean]))
    x = np.random.default_rng(0).integers(-3, 4, size=shape).astype(np.float64)
    call = lambda x: f(x, axis=axis, keepdims=keepdims)
    assert_same(fc.jit(call)(x), np.asarray(call(x)), exact=f is not np.mean)


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=3))
def test_rearranging(data, shape):
    """Any chain of rearrangements moves elements as NumPy does, and its gradient moves them back."""
    steps = data.draw(st.lists(st.sampled_from(["flip", "roll", "swap", "expand", "ravel", "transpose", "tile"]), max_size=4))
    numbers = [data.draw(st.integers(0, 5)) for _ in steps]

    def call(x):
        for step, n in zip(steps, numbers, strict=True):
            d = n % x.ndim
            x = {
                "flip": lambda x: np.flip(x, d),
                "roll": lambda x: np.roll(x, n, d),
                "swap": lambda x: np.swapaxes(x, 0, d),
                "expand": lambda x: np.expand_dims(x, d) if x.ndim < 6 else x,
                "ravel": np.ravel,
                "transpose": np.transpose,
                "tile": lambda x: np.tile(x, n % 3 + 1),
            }[step](x)
        return x

    x = np.arange(float(np.prod(shape))).reshape(shape)
    want = call(x)
    assert_same(fc.jit(call)(x), want)
    ct = np.random.default_rng(0).integers(-9, 9, size=want.shape).astype(float)
    expected = np.bincount(want.ravel().astype(int), ct.ravel(), x.size).reshape(shape)
    np.testing.assert_array_equal(np.asarray(fc.grad(lambda x: np.sum(call(x) * ct))(x)), expected)


def test_astype_keeps_the_imaginary_part():
    x = np.array([0, 1j, 2], np.complex64)
    for dtype in (np.bool_, np.complex128):
        np.testing.assert_array_equal(fc.jit(lambda x, dtype=dtype: x.astype(dtype))(x), x.astype(dtype))
    for dtype in (np.float32, np.int64):
        with pytest.raises(fc.errors.DTypeError, match="would drop the imaginary part"):
            fc.jit(lambda x, dtype=dtype: x.astype(dtype))(x)


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "f2", BF16, "i4", "f4", "f8", "c8", "c16"], ids=str)
def test_where_gives_the_bits_of_numpys_also_for_large_arrays(dtype):
    """From 1,024 elements on it selects them by their bits."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)

    def bits(*shape):
        if dtype.kind == "b":
            return rng.random(shape) < 0.5
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]  # NaNs with payloads, too

    mask, x, y = rng.random((40, 50)) < 0.5, bits(40, 50), bits(40, 50)
    zero = np.zeros((), dtype)
    choices = [
        (mask, x, y),
        (mask, x, zero),
        (mask, x, y[0, 0]),
        (mask, zero, y),
        (mask[0], x, y),
        (mask, x[0], y[:, :1]),
        (mask.T, x.T, bits(50, 40)),
        (mask, x[::-1], zero),
        (mask[:, ::2], x[:, ::2], y[:, ::2]),
        (mask[:1], x, zero),
    ]
    if dtype.kind in "fc":
        choices.append((mask, x, -zero))
    for arrays in choices:
        found, right = where_p.reference(*arrays), np.where(*arrays)
        assert (found.dtype, found.shape, found.tobytes()) == (right.dtype, right.shape, right.tobytes())
