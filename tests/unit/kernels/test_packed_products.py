"""Packed products: their sums, operands as they lie in memory, and which products compiled programs compute by them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.compiler.codegen import segments
from funccoll.kernels.native import machine_code, packed_products
from funccoll.kernels.native.fast_call import functions_of, module_of
from funccoll.kernels.native.packed_products import PANEL, PackedProduct, packed_product_kernel
from funccoll.platforms import blas, native_product
from funccoll.platforms.native_product import packed_product
from tests.support.example_counts import examples

pytestmark = [
    pytest.mark.covers("jit"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason="this machine has no kernels"),
]
RNG = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


def computed(x, y, level, inner=packed_products.INNER):
    """The product by the code of a kind of processor, with guards around the result and the workspace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_products, "INNER", inner)
        of = lambda a: tuple(s // a.itemsize for s in a.strides)
        shape = *x.shape[:-1], y.shape[-1]
        whole = np.full((shape[0] + 2, *shape[1:]), 77, x.dtype)
        out = whole[1:-1]
        product = PackedProduct(
            {4: "float", 8: "double"}[x.itemsize], x.shape[:-2], *x.shape[-2:], y.shape[-1], of(x), of(y), of(out)
        )
        kernel = packed_product_kernel(product, level)
        function = functions_of([kernel.name], module_of([kernel]), level)[kernel.name]
    work = np.full(kernel.workspace_bytes + 64, 77, np.uint8)
    assert function(x, y, out, work[: kernel.workspace_bytes])
    assert (whole[0] == 77).all() and (whole[-1] == 77).all() and (work[kernel.workspace_bytes :] == 77).all()
    return out


@st.composite
def operands(draw):
    """Matrices of odd sizes, perhaps in stacks, that lie in rows, in columns, or in parts of larger ones."""
    size = lambda most: draw(st.integers(1, most))
    rows, inner, columns = size(40), size(70), size(300)
    stack = draw(st.sampled_from([(), (), (3,), (2, 2)]))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(size(1 << 30))

    def matrix(n, m):
        lies = draw(st.sampled_from(["rows", "columns", "part", "heads"]))
        if lies == "columns":
            return rng.normal(size=(*stack, m, n)).astype(dtype).swapaxes(-1, -2)
        if lies == "part":
            return rng.normal(size=(*stack, n + 2, m + 600)).astype(dtype)[..., 1:-1, 5 : 5 + m]
        if lies == "heads" and stack:
            return np.moveaxis(rng.normal(size=(stack[0], n, *stack[1:], m)).astype(dtype), 1, -2)
        return rng.normal(size=(*stack, n, m)).astype(dtype)

    return matrix(rows, inner), matrix(inner, columns)


@examples(100, few=5)  # each is compiled
@given(operands(), st.sampled_from([16, 23, 256]))
def test_products_as_operands_lie(case, inner):
    x, y = case
    found = [computed(x, y, level, inner) for level in machine_code.LEVELS if level <= machine_code.processor_level()]
    assert len({f.tobytes() for f in found}) == 1, "bits depend on the processor"
    again = computed(np.ascontiguousarray(x), np.ascontiguousarray(y), machine_code.LEVELS[0], inner)
    assert again.tobytes() == found[0].tobytes(), "bits depend on strides"
    bound = (np.abs(x).astype(np.float64) @ np.abs(y) + 1e-30) * (x.shape[-1] + 1) * np.finfo(x.dtype).eps
    assert (np.abs(found[0] - x.astype(np.float64) @ y) <= bound).all()


def test_the_order_of_a_sum():
    """Parts of `INNER` terms, each one after the other, are added one after the other."""
    terms = normal(40)
    wanted = np.float32(0)
    for part in (terms[:16], terms[16:32], terms[32:]):
        total = np.float32(0)
        for term in part:
            total += term
        wanted = total + wanted
    x = np.ascontiguousarray(np.broadcast_to(terms, (5, 40)))
    found = computed(x, np.ones((40, PANEL + 1), np.float32), machine_code.LEVELS[0], inner=16)
    assert (found == wanted).all()


@pytest.fixture
def shapes(monkeypatch):
    """The shapes of operands of products that kernels compute."""
    found = []

    def counted(x, y, out=None):
        found.append((x.shape, y.shape))
        return packed_product(x, y, out)

    monkeypatch.setattr(segments, "packed_product", counted)
    monkeypatch.setattr(native_product, "one_thread", lambda devices: True)
    return found


@pytest.mark.parametrize(
    ("x", "y", "packed"),
    [
        ((64, 128), (128, 64), True),
        ((64, 127), (127, 64), False),  # few multiplications
        ((3, 512), (512, 512), False),  # few rows
        ((2, 2, 512), (512, 512), True),  # they are one product
        ((128, 512), (512, 15), False),
        ((16, 32, 32), (16, 32, 32), True),
        ((4, 1, 32, 64), (3, 64, 32), True),
        ((1, 1 << 10, 1 << 10), (1, 1 << 10, 260), False),  # many multiplications
        ((512,), (512, 1024), False),
    ],
)
def test_shapes_decide(shapes, x, y, packed):
    x, y = normal(*x), normal(*y)
    found = np.asarray(fc.jit(lambda x, y: x @ y)(x, y))
    assert bool(shapes) == packed
    assert found.flags.c_contiguous
    np.testing.assert_allclose(found, x @ y, rtol=1e-4, atol=1e-3)


def test_not_by_other_dtypes_nor_several_threads(shapes, monkeypatch):
    x = np.ones((128, 128))
    for dtype in (np.complex64, np.int64, np.float16):
        fc.jit(lambda x: x @ x)(x.astype(dtype))
    monkeypatch.setattr(native_product, "one_thread", lambda devices: False)
    fc.jit(lambda x: x @ x + 1)(x)
    assert not shapes


def test_threads_of_a_program(monkeypatch):
    counts = [2]
    monkeypatch.setattr(blas, "_controls", lambda: [(lambda: counts[0], None)])
    assert not blas.one_thread(1) and blas.one_thread(2)
    counts[0] = 1
    assert blas.one_thread(1)
    monkeypatch.setenv("FUNCCOLL_BLAS_THREADS", "2")
    assert blas.one_thread(1) and not blas.one_thread(2)


def test_operands_with_other_strides_are_copied():
    x, y = normal(64, 256)[:, ::2], normal(256, 128)[::2, ::2]
    np.testing.assert_allclose(packed_product(x, y), x @ y, rtol=1e-4, atol=1e-3)
    bytes_apart = np.zeros(64 * 128, [("a", "i1"), ("x", "f4")])["x"].reshape(64, 128)
    bytes_apart[...] = x
    np.testing.assert_array_equal(packed_product(bytes_apart, y), packed_product(x, y))


def test_results_are_written_where_they_are_wanted():
    x, y = normal(2, 64, 128), normal(128, 64)
    out = np.full((2, 64, 64), np.nan, np.float32)
    assert packed_product(x, y, out) is out
    np.testing.assert_array_equal(out, packed_product(x, y))


def test_virtual_devices_have_the_bits_of_one(shapes):
    x, w = normal(64, 512), normal(512, 512)
    mesh = fc.make_mesh({"d": 2})
    split = fc.jit(lambda x, w: x @ w.T, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    parts = [np.asarray(fc.jit(lambda x, w: x @ w.T)(part, w)) for part in np.split(x, 2)]
    assert (np.asarray(split(x, w)) == np.concatenate(parts)).all()
    assert shapes == [((32, 512), (512, 512))] * 4
