"""What a thread of a GPU computes, compiled by Numba for the CPU: it has the types that it has on a GPU.

The simulator has NumPy's scalars, of which the sum of two int8 is an int8; compiled it is an int64, and an int64 plus a
uint64 is a float64. Here one thread does all the work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import extending, njit, types

from funccoll.kernels.block import VECTOR_BYTES, lane_count
from funccoll.kernels.cpu_fold import CPU
from funccoll.kernels.cuda import _fold
from funccoll.kernels.cuda_compiler import Operations
from funccoll.kernels.cuda_compute import compute_template
from funccoll.kernels.intrinsics import load
from funccoll.primitives.combining import fold
from tests.support.cases.combine_operands import DTYPES, operations, some_operations, values
from tests.support.cases.scatter_cases import expected, sample

pytestmark = pytest.mark.covers("cuda-kernel")

SLOW = pytest.mark.slow
intrinsic: Any = extending.intrinsic


def load_one(context: Any, builder: Any, address: Any, kind: Any) -> Any:
    data = context.data_model_manager[kind]
    return data.from_data(builder, builder.load(builder.inttoptr(address, data.get_data_type().as_pointer())))


def store_one(context: Any, builder: Any, address: Any, value: Any, kind: Any) -> None:
    data = context.data_model_manager[kind].as_data(builder, value)
    builder.store(data, builder.inttoptr(address, data.type.as_pointer()))


UNALIGNED = np.zeros(1, np.int64)
"""The low bits of all addresses and strides of vectors that were not multiples of a vector's size: a GPU raises for one."""


def lanes(builder: Any, address: Any, stride: Any, count: int, kind: Any) -> list[Any]:
    """The addresses of the elements of one `load_lanes`."""
    size, word = kind.bitwidth // 8, ir.IntType(64)
    flag = builder.inttoptr(ir.Constant(word, UNALIGNED.ctypes.data), word.as_pointer())
    low = builder.and_(builder.or_(address, stride), ir.Constant(word, VECTOR_BYTES - 1))
    builder.store(builder.or_(builder.load(flag), low), flag)
    each = VECTOR_BYTES // size
    far = [builder.mul(stride, ir.Constant(word, i // each)) for i in range(count)]
    return [builder.add(builder.add(address, f), ir.Constant(word, size * (i % each))) for i, f in enumerate(far)]


@intrinsic
def load_element(typingctx: Any, address: Any, dtype: Any) -> Any:
    return dtype.dtype(types.int64, dtype), lambda context, builder, signature, args: load_one(
        context, builder, args[0], dtype.dtype
    )


@intrinsic
def store_element(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_one(context, builder, *args, value)
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


@intrinsic
def load_lanes(typingctx: Any, address: Any, stride: Any, dtype: Any) -> Any:
    kind = dtype.dtype
    result = types.UniTuple(kind, lane_count(kind.bitwidth // 8))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = lanes(builder, args[0], args[1], result.count, kind)
        return context.make_tuple(builder, result, [load_one(context, builder, place, kind) for place in places])

    return result(types.int64, types.int64, dtype), codegen


@intrinsic
def load_vector(typingctx: Any, address: Any, dtype: Any) -> Any:
    kind = dtype.dtype
    result = types.UniTuple(kind, VECTOR_BYTES * 8 // kind.bitwidth)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = lanes(builder, args[0], ir.Constant(ir.IntType(64), VECTOR_BYTES), result.count, kind)
        return context.make_tuple(builder, result, [load_one(context, builder, place, kind) for place in places])

    return result(types.int64, dtype), codegen


@intrinsic
def store_lanes(typingctx: Any, address: Any, stride: Any, values: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i, place in enumerate(lanes(builder, args[0], args[1], values.count, values.dtype)):
            store_one(context, builder, place, builder.extract_value(args[2], i), values.dtype)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, values), codegen


@njit
def multiply_high(a: Any, b: Any) -> Any:
    low, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    middle = (a & low) * (b >> word) + ((a & low) * (b & low) >> word)
    return (a >> word) * (b >> word) + (middle >> word) + ((a >> word) * (b & low) + (middle & low) >> word)


def called(context: Any, builder: Any, function: Any, signature: Any) -> Any:
    found = context.get_function(function, signature)
    context.add_linking_libs(getattr(found, "libs", ()))
    return found


@intrinsic
def map_lanes(typingctx: Any, function: Any, values: Any) -> Any:
    each = typingctx.resolve_function_type(function, (values.dtype,), {})
    result = types.UniTuple(each.return_type, values.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call = called(context, builder, function, each)
        elements = [builder.extract_value(args[1], i) for i in range(values.count)]
        return context.make_tuple(builder, result, [call(builder, [element]) for element in elements])

    return result(function, values), codegen


@intrinsic
def zip_lanes(typingctx: Any, function: Any, first: Any, second: Any) -> Any:
    is_tuple = isinstance(second, types.UniTuple)
    each = typingctx.resolve_function_type(function, (first.dtype, second.dtype if is_tuple else second), {})
    result = types.UniTuple(each.return_type, first.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call = called(context, builder, function, each)
        pairs = [
            [builder.extract_value(args[1], i), builder.extract_value(args[2], i) if is_tuple else args[2]]
            for i in range(first.count)
        ]
        return context.make_tuple(builder, result, [call(builder, pair) for pair in pairs])

    return result(function, first, second), codegen


@njit
def zero() -> Any:
    return 0


@njit
def one() -> Any:
    return 1


MEMORY = {
    "load": load,
    "load_element": load_element,
    "store_element": store_element,
    "load_lanes": load_lanes,
    "load_vector": load_vector,
    "store_lanes": store_lanes,
    "map_lanes": map_lanes,
    "zip_lanes": zip_lanes,
    "multiply_high": multiply_high,
    "thread_number": zero,
    "block_number": zero,
    "thread_count": one,
    "block_count": one,
}
OPERATIONS = Operations(CPU, MEMORY)
EACH = pytest.mark.parametrize("dtype", [pytest.param(d, id=d.name, marks=() if d == np.int8 else SLOW) for d in DTYPES])


def compiled(function: Any) -> Any:
    arguments = [types.int64] * function.__code__.co_argcount
    return njit(types.void(*arguments), error_model="numpy")(function)


def aligned(count: int, nbytes: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """The memory of some arrays, each a row of bytes, and where they begin in it: `offset` bytes after a multiple of 16."""
    memory = np.full((count, nbytes + 64), 0xA5, np.uint8)
    return memory, np.array([-row.ctypes.data % 16 + offset for row in memory])


@pytest.mark.parametrize(
    ("dtype", "ops"),
    [
        pytest.param(np.dtype(np.int8), ["sum"], id="int8 sum"),
        *(pytest.param(d, some_operations(d), id=f"{d.name} some", marks=SLOW) for d in DTYPES),
        *(pytest.param(d, operations(d), id=f"{d.name} all", marks=pytest.mark.exhaustive) for d in DTYPES),
    ],
)
def test_combines_have_the_bits_of_the_fold(dtype, ops):
    """In vectors, and element by element where an address does not allow them."""
    rng, UNALIGNED[:] = np.random.default_rng(0), 0
    for op in ops:
        combine = compiled(_fold(op, dtype, OPERATIONS).py_func)
        for count, outputs, offset in ((2, 1, 0), (5, 2, 0), (3, 2, dtype.alignment), (3, 1, 8)):
            xs = values(dtype, count, rng)
            with np.errstate(all="ignore"):
                want = fold(xs, op)
            memory, starts = aligned(outputs + count, want.nbytes, offset)
            for row, start, x in zip(memory[outputs:], starts[outputs:], xs, strict=True):
                row[start : start + x.nbytes] = x.view(np.uint8)
            before, places = memory.copy(), starts + [row.ctypes.data for row in memory]
            operands = np.stack([places - 3 * 16, np.full_like(places, 16)], axis=1)  # row 3 is there
            combine(operands.ctypes.data, outputs, count, 3, want.size, count if op == "mean" else 0)
            for row, start in zip(before[:outputs], starts, strict=False):
                row[start : start + want.nbytes] = want.view(np.uint8)
            assert (memory == before).all() and not UNALIGNED.any(), (op, count, offset)


def test_random_words_are_those_of_numpy():
    kernel = compiled(compute_template("random_words", None, OPERATIONS))
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 3, 4, 5, 1002, 4096):
        for number, purpose in ((None, 0), (5, 1), ((1 << 64) - 1, 2)):
            out, key = np.zeros(count, np.uint64), rng.integers(0, 1 << 64, 2, np.uint64)
            third = np.array(number or 0, np.uint64)
            kernel(out.ctypes.data, count, key.ctypes.data, 0 if number is None else third.ctypes.data, purpose)
            want = np.random.Philox(counter=np.array([0, 0, third, purpose], np.uint64), key=key).random_raw(count)
            assert out.tobytes() == want.tobytes(), (count, number)


@EACH
def test_scatter_add_has_the_bits_of_add_at(dtype):
    kernel = compiled(compute_template("scatter_add", dtype, OPERATIONS))
    rng = np.random.default_rng(0)
    for nrows, width, count in ((1, 1, 1), (1, 1, 3000), (50, 7, 4000), (1000, 3, 2000), (3, 0, 4), (3, 4, 0)):
        rows = rng.integers(0, nrows, count)
        out, added = (sample(dtype, shape, rng).copy() for shape in ((nrows, width), (count, width)))
        want, order = expected(out, rows, added), np.argsort(rows, kind="stable")
        in_order = rows[order]
        kernel(out.ctypes.data, in_order.ctypes.data, order.ctypes.data, added.ctypes.data, count, width)
        assert out.tobytes() == want.tobytes(), (nrows, width, count)
