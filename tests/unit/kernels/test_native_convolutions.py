"""Kernels of convolutions against the references, which are the definition."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll.core.ir import Equation, Var
from funccoll.core.types import type_of
from funccoll.kernels.native import convolutions, machine_code
from funccoll.kernels.native.convolutions import Convolution, convolution_kernel, is_small
from funccoll.kernels.native.fast_call import functions_of, module_of
from funccoll.platforms import native_convolution
from funccoll.primitives.convolution import conv_input_p, conv_kernel_p, conv_p, padded_sizes, positions
from tests.support.example_counts import examples

pytestmark = [
    pytest.mark.covers("nn"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason="this machine has no kernels"),
]


def computed(primitive, *operands, **params):
    """What a compiled program computes."""
    inputs = tuple(Var(type_of(x)) for x in operands)
    outputs = tuple(map(Var, primitive.infer(*(v.type for v in inputs), **params)))
    function = native_convolution.native_convolution(Equation(primitive, inputs, outputs, params, None))
    assert function is not None
    return function(*operands)


@st.composite
def cases(draw):
    dims = draw(st.integers(1, 3))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))
    window, strides, dilation = each(1, 3), each(1, 2), each(1, 2)
    padding = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(dims))
    spans = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    sizes = tuple(max(1, s - low - high) + draw(st.integers(0, 6)) for s, (low, high) in zip(spans, padding, strict=True))
    channels, outputs = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 17, 40]))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return draw(st.integers(1, 3)), sizes, channels, window, outputs, strides, padding, dilation, dtype


@examples(6)  # each is compiled
@given(cases(), st.integers(0, 2**32 - 1))
def test_kernels_compute_what_the_references_do(case, seed):
    count, sizes, channels, window, outputs, strides, padding, dilation, dtype = case
    rng = np.random.default_rng(seed)
    params = {"strides": strides, "padding": padding, "dilation": dilation, "groups": 1}
    x, w = rng.normal(size=(count, *sizes, channels)).astype(dtype), rng.normal(size=(*window, channels, outputs)).astype(dtype)
    found = positions(sizes, window, strides, padding, dilation)
    y = rng.normal(size=(count, *found, outputs)).astype(dtype)
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4 if dtype == np.float32 else 1e-12)
    same(computed(conv_p, x, w, **params), conv_p.reference(x, w, **params))
    same(computed(conv_input_p, y, w, sizes=sizes, **params), conv_input_p.reference(y, w, sizes=sizes, **params))
    same(computed(conv_kernel_p, x, y, window=window, **params), conv_kernel_p.reference(x, y, window=window, **params))
    for kind in ("result", "gradient"):  # and nothing above came from a reference
        assert native_convolution._function(kind, x.dtype, x.shape, w.shape, strides, padding, dilation) is not None


@pytest.mark.parametrize("gives", ["result", "gradient"])
def test_every_processor_has_the_same_bits(gives):
    if machine_code.processor_level() != machine_code.LEVELS[-1]:
        pytest.skip("this processor does not run the code of all levels")
    c = Convolution("float", gives, 2, (9, 30), 5, (3, 3), 24, (1, 1), (1, 1))
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 9, 30, 5)).astype(np.float32), rng.normal(size=(3, 3, 5, 24)).astype(np.float32)
    y = rng.normal(size=(2, *c.positions, 24)).astype(np.float32)
    found = []
    for level in machine_code.LEVELS:
        kernel = convolution_kernel(c, level)
        function = functions_of([kernel.name], module_of([kernel]), level)[kernel.name]
        out = np.zeros_like(y if gives == "result" else w)
        assert function(x, w if gives == "result" else y, out)
        found.append(out.tobytes())
    assert len({*found}) == 1 and any(found[0])


def test_what_blas_does_faster_or_alone_is_left_to_the_reference(monkeypatch):
    small = Convolution("float", "result", 1, (8, 8), 16, (3, 3), 16, (1, 1), (1, 1))
    assert is_small(small)
    monkeypatch.setattr(convolutions, "_LARGEST", 9215)
    assert not is_small(small)
    x, w = np.ones((1, 4, 4, 2), np.complex64), np.ones((2, 2, 2, 3), np.complex64)
    assert fc.jit(lambda x, w: fc.nn.conv(x, w))(x, w)[0, 0, 0, 0] == 8
    grouped = fc.jit(lambda x, w: fc.nn.conv(x, w, groups=2))(x.real, np.ones((2, 2, 1, 4), np.float32))
    assert np.asarray(grouped).tolist() == np.full((1, 3, 3, 4), 4).tolist()
    assert padded_sizes((4,), ((1, 2),)) == (7,)


def test_a_step_with_convolutions_is_the_one_without_kernels(monkeypatch):
    rng = np.random.default_rng(0)
    x, w, v = (rng.normal(size=s).astype(np.float32) for s in ((3, 12, 12, 2), (3, 3, 2, 6), (3, 3, 6, 4)))

    def loss(w, v, x):
        hidden = fc.nn.relu(fc.nn.conv(x, w, padding="SAME"))
        return np.mean(fc.nn.conv(hidden, v, strides=2) ** 2)

    step = fc.grad(loss, (0, 1, 2))
    found = fc.jit(step)(w, v, x)
    monkeypatch.setenv("FUNCCOLL_FUSE", "0")
    for mine, plain in zip(found, fc.jit(lambda *a: step(*a))(w, v, x), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-5)
        assert np.asarray(mine).tobytes() != np.asarray(plain).tobytes()  # it is another order of additions
