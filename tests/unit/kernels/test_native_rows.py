"""Native kernels of rows: the order of sums, maxima with NaN, phases, ends of rows, and the same bits on every processor."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funccoll.kernels import object_cache
from funccoll.kernels.native import elementary, machine_code
from funccoll.kernels.native.ir_text import LANES
from funccoll.kernels.native.row_kernel import BLOCK, KernelOperand, row_kernel

pytestmark = [
    pytest.mark.covers("jit"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]

BEST = machine_code.processor_level()
LEVELS = machine_code.LEVELS[: machine_code.LEVELS.index(BEST) + 1] if BEST else ()
FULL, ROW, COLUMN, SCALAR = (
    KernelOperand("float"),
    KernelOperand("float", "row"),
    KernelOperand("float", "column"),
    KernelOperand("float", "scalar"),
)


def run(text, arrays, rows, cpu=BEST or ""):
    address = object_cache.load("kernel", machine_code.object_code(text, cpu))
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(arrays), ctypes.c_int64)(address)
    function(*(a.ctypes.data for a in arrays), rows)


def reductions(length, kind="float"):
    """A kernel (x, total, largest): the sum and the maximum of each row."""

    def both(row):
        def block(b):
            b.reduce("total", "sum", b.read("x"))
            b.reduce("largest", "max", b.read("x"))

        return block

    operands = {"x": KernelOperand(kind), "total": KernelOperand(kind, "row"), "largest": KernelOperand(kind, "row")}
    return row_kernel("kernel", operands, length, [both], {"total": "total", "largest": "largest"})


def softmax(length):
    """A kernel (x, y)."""

    def largest(row):
        return lambda b: b.reduce("largest", "max", b.read("x"))

    def terms(row):
        most = row.reduced("largest")

        def block(b):
            term = elementary.exp(b.read("x") - most)
            b.write("y", term)
            b.reduce("total", "sum", term)

        return block

    def quotients(row):
        inverse = 1.0 / row.reduced("total")
        return lambda b: b.write("y", b.read("y") * inverse)

    return row_kernel("kernel", {"x": FULL, "y": FULL}, length, [largest, terms, quotients], {})


def ordered_sum(x):
    """The sum of a row as the module defines it: the order is part of what a program computes."""
    vectors = np.zeros((-(-x.size // LANES), LANES), x.dtype)
    vectors.reshape(-1)[: x.size] = x
    total = np.zeros(LANES, np.float64)
    blocks = BLOCK if x.dtype == np.float32 else max(1, len(vectors))
    for start in range(0, len(vectors), blocks):
        lanes = np.zeros(LANES, x.dtype)
        for vector in vectors[start : start + blocks]:
            lanes += vector
        total += lanes
    while total.size > 1:
        total = total[: total.size // 2] + total[total.size // 2 :]
    return x.dtype.type(total[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 1000, 4095, 4096, 4097, 8192, 8225, 20_001])
def test_sums_have_the_order_that_is_written(length, dtype):
    x = np.random.default_rng(length).standard_normal((3, length)).astype(dtype)
    kind = "float" if dtype == np.float32 else "double"
    for cpu in LEVELS:
        total, largest = np.empty((2, 3), dtype)
        run(reductions(length, kind), [x, total, largest], 3, cpu)
        assert total.tolist() == [ordered_sum(row) for row in x]
        np.testing.assert_array_equal(largest, x.max(axis=1))


def test_long_sums_are_accurate():
    x = np.random.default_rng(0).random(1 << 20, np.float32)
    total, largest = np.empty((2, 1), np.float32)
    run(reductions(x.size), [x, total, largest], 1)
    assert abs(total[0] / x.sum(dtype=np.float64) - 1) < 1e-7


@pytest.mark.parametrize("length", [1, 5, 32, 70])
def test_a_maximum_with_nan_is_nan(length):
    for place in range(length):
        x = np.zeros((2, length), np.float32)
        x[0, place], x[1] = np.nan, -np.inf
        total, largest = np.empty((2, 2), np.float32)
        run(reductions(length), [x, total, largest], 2)
        np.testing.assert_array_equal(largest, [np.nan, -np.inf])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 4), st.integers(1, 140), st.booleans())
def test_softmax(rows, length, in_place):
    x = np.random.default_rng(length).standard_normal((rows, length)).astype(np.float32)
    terms = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True, initial=-np.inf))
    wanted, found = terms / terms.sum(axis=1, keepdims=True), set()
    for cpu in LEVELS:
        memory = np.full((rows + 2, length), 7, np.float32)
        memory[1:-1] = x
        run(softmax(length), [memory[1:] if in_place else x, memory[1:]], rows, cpu)
        np.testing.assert_allclose(memory[1:-1], wanted, rtol=1e-6)
        assert (memory[[0, -1]] == 7).all()
        found.add(memory.tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("length", [3, 32, 50])
def test_operands_of_each_extent(length):
    def scaled(row):
        factor = row.read("factor") * row.read("weight")
        return lambda b: b.write("y", b.read("x") * factor + b.read("bias"))

    operands = {"x": FULL, "factor": ROW, "bias": COLUMN, "weight": SCALAR, "y": FULL}
    generator = np.random.default_rng(0)
    x, factor, bias = (generator.standard_normal(s).astype(np.float32) for s in ((4, length), 4, length))
    weight, y = np.array([3], np.float32), np.empty_like(x)
    run(row_kernel("kernel", operands, length, [scaled], {}), [x, factor, bias, weight, y], 4)
    np.testing.assert_array_equal(y, x * (factor * weight)[:, None] + bias)


def test_a_result_has_the_kind_of_its_reduction():
    operands = {"x": FULL, "total": KernelOperand("half", "row")}
    with pytest.raises(TypeError, match="total of kernel is half, and sum is float"):
        row_kernel("kernel", operands, 4, [lambda row: lambda b: b.reduce("sum", "sum", b.read("x"))], {"total": "sum"})
