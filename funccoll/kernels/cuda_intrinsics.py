"""Memory operations of a GPU that Numba does not have, as LLVM instructions and inline PTX. Addresses are plain integers.

Importing it needs numba-cuda, and no GPU.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import extending
from numba.cuda import types as cuda_types

from .block import SHARED_WORDS, THREADS, VECTOR_BYTES, lane_count
from .conversions import conversions
from .reductions import Machine

__all__ = [
    "MACHINE",
    "barrier",
    "block_count",
    "block_number",
    "global_ns",
    "load",
    "load_acquire_gpu",
    "load_acquire_sys",
    "load_element",
    "load_lanes",
    "load_vector",
    "map_lanes",
    "multiply_high",
    "shared_words",
    "sleep_ns",
    "store",
    "store_element",
    "store_lanes",
    "store_release_gpu",
    "store_release_sys",
    "thread_count",
    "thread_number",
    "zip_lanes",
]

intrinsic: Any = extending.intrinsic
types: Any = cuda_types
_WORD, _HALF_WORD, _GLOBAL, _SHARED = ir.IntType(64), ir.IntType(32), 1, 3


def _assembly(builder: Any, result: Any, operands: list[Any], text: str, constraints: str) -> Any:
    """Inline PTX. No memory access moves across it."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    clobber = ("," if constraints else "") + "~{memory}"
    return builder.call(ir.InlineAsm(kind, text, constraints + clobber, side_effect=True), operands)


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """The int64 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _WORD.as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64 to an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _WORD.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _load_acquire(scope: str) -> Any:
    """The int64 at an address that other threads of the scope write. Nothing that comes after is read before it."""

    @intrinsic
    def load_acquire(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _assembly(builder, _WORD, [args[0]], f"ld.acquire.{scope}.global.b64 $0, [$1];", "=l,l")

        return types.int64(types.int64), codegen

    return load_acquire


def _store_release(scope: str) -> Any:
    """Write an int64 to an address that other threads of the scope read.

    What this block wrote before the last barrier is visible first.
    """

    @intrinsic
    def store_release(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _assembly(builder, ir.VoidType(), list(args), f"st.release.{scope}.global.b64 [$0], $1;", "l,l")
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store_release


load_acquire_gpu, load_acquire_sys = map(_load_acquire, ("gpu", "sys"))
store_release_gpu, store_release_sys = map(_store_release, ("gpu", "sys"))


@intrinsic
def barrier(typingctx: Any) -> Any:
    """Wait for all threads of the block. All of them come to this same instruction, the threads of a warp together.

    It is syncthreads. NVVM knows that to be convergent, so it neither copies it nor moves it into a branch.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        name = "llvm.nvvm.barrier0"
        builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def global_ns(typingctx: Any) -> Any:
    """The time in nanoseconds of a clock that all blocks share."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _assembly(builder, _WORD, [], "mov.u64 $0, %globaltimer;", "=l")

    return types.int64(), codegen


@intrinsic
def sleep_ns(typingctx: Any, duration: Any) -> Any:
    """Sleep for up to twice as many nanoseconds, a millisecond at most."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _assembly(builder, ir.VoidType(), [builder.trunc(args[0], ir.IntType(32))], "nanosleep.u32 $0;", "r")
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def shared_words(typingctx: Any) -> Any:
    """The address of SHARED_WORDS words that the threads of this block share. It is the same for every call."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        module, name, kind = builder.module, "funccoll_shared_words", ir.ArrayType(_WORD, SHARED_WORDS)
        words: Any = module.globals.get(name)
        if words is None:
            words = ir.GlobalVariable(module, kind, name, _SHARED)
            words.linkage, words.initializer, words.align = "linkonce_odr", ir.Constant(kind, ir.Undefined), VECTOR_BYTES
        generic = builder.addrspacecast(words, kind.as_pointer(), "generic")
        return builder.ptrtoint(generic, _WORD)

    return types.int64(), codegen


# ---------------------------------------------------------------- elements and vectors, in global memory


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer(_GLOBAL))


@intrinsic
def load_element(typingctx: Any, address: Any, dtype: Any) -> Any:
    """The element of a dtype at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.get_data_type(dtype.dtype)
        value = builder.load(_pointer(builder, args[0], data), align=_alignment(dtype.dtype))
        return context.data_model_manager[dtype.dtype].from_data(builder, value)

    return dtype.dtype(types.int64, dtype), codegen


@intrinsic
def store_element(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an element to an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.data_model_manager[value].as_data(builder, args[1])
        builder.store(data, _pointer(builder, args[0], data.type), align=_alignment(value))
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


def _alignment(kind: Any) -> int:
    return _size(kind) // 2 if isinstance(kind, types.Complex) else _size(kind)


def _vector(context: Any, kind: Any) -> Any:
    """The LLVM vector of as many scalars as fill one instruction."""
    scalar = context.get_data_type(kind.underlying_float if isinstance(kind, types.Complex) else kind)
    return ir.VectorType(scalar, VECTOR_BYTES // context.get_abi_sizeof(scalar))


def _load_vector(builder: Any, address: Any, vector: Any) -> Any:
    """Load 16 bytes at once. NVVM cuts its own vectors into fours if elements have less than 32 bits."""
    if not _is_cut(vector):
        return builder.load(_pointer(builder, address, vector), align=VECTOR_BYTES)
    results = ir.LiteralStructType([_HALF_WORD] * 4)
    found = _assembly(builder, results, [address], "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l")
    value = ir.Constant(ir.VectorType(_HALF_WORD, 4), ir.Undefined)
    for i in range(4):
        value = builder.insert_element(value, builder.extract_value(found, i), ir.Constant(_HALF_WORD, i))
    return builder.bitcast(value, vector)


def _store_vector(builder: Any, value: Any, address: Any) -> None:
    """Store 16 bytes at once."""
    if not _is_cut(value.type):
        builder.store(value, _pointer(builder, address, value.type), align=VECTOR_BYTES)
        return
    words = builder.bitcast(value, ir.VectorType(_HALF_WORD, 4))
    parts = [builder.extract_element(words, ir.Constant(_HALF_WORD, i)) for i in range(4)]
    _assembly(builder, ir.VoidType(), [address, *parts], "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r")


def _is_cut(vector: Any) -> bool:
    return vector.count > 4


def _size(kind: Any) -> int:
    return kind.bitwidth // 8


@intrinsic
def load_lanes(typingctx: Any, address: Any, stride: Any, dtype: Any) -> Any:
    """A tuple of `lane_count` elements: 16 bytes at the address, and at each `stride` bytes further."""
    kind = dtype.dtype
    count = lane_count(_size(kind))
    result = types.UniTuple(kind, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, places = _vector(context, kind), range(count * _size(kind) // VECTOR_BYTES)
        each = [builder.add(args[0], builder.mul(args[1], ir.Constant(_WORD, number))) for number in places]
        vectors = [_load_vector(builder, at, vector) for at in each]  # all loads first, so that they are in flight together
        return context.make_tuple(builder, result, [x for value in vectors for x in _elements(context, builder, value, kind)])

    return result(types.int64, types.int64, dtype), codegen


@intrinsic
def load_vector(typingctx: Any, address: Any, dtype: Any) -> Any:
    """A tuple of the elements of the 16 bytes at an address."""
    kind = dtype.dtype
    result = types.UniTuple(kind, VECTOR_BYTES // _size(kind))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _load_vector(builder, args[0], _vector(context, kind))
        return context.make_tuple(builder, result, _elements(context, builder, value, kind))

    return result(types.int64, dtype), codegen


def _elements(context: Any, builder: Any, vector: Any, kind: Any) -> list[Any]:
    """The elements of an LLVM vector."""
    scalars = [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(vector.type.count)]
    if not isinstance(kind, types.Complex):
        return scalars
    found = []
    for real, imag in zip(scalars[::2], scalars[1::2], strict=True):
        number = context.make_complex(builder, kind)
        number.real, number.imag = real, imag
        found.append(number._getvalue())
    return found


@intrinsic
def store_lanes(typingctx: Any, address: Any, stride: Any, values: Any) -> Any:
    """Write a tuple of elements where `load_lanes` reads it."""
    kind, count = values.dtype, values.count

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, each = _vector(context, kind), VECTOR_BYTES // _size(kind)
        elements = [builder.extract_value(args[2], i) for i in range(count)]
        for number in range(count // each):
            scalars = []
            for element in elements[number * each : (number + 1) * each]:
                if isinstance(kind, types.Complex):
                    parts = context.make_complex(builder, kind, value=element)
                    scalars += [parts.real, parts.imag]
                else:
                    scalars.append(element)
            value = ir.Constant(vector, ir.Undefined)
            for i, scalar in enumerate(scalars):
                value = builder.insert_element(value, scalar, ir.Constant(ir.IntType(32), i))
            at = builder.add(args[0], builder.mul(args[1], ir.Constant(_WORD, number)))
            _store_vector(builder, value, at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, values), codegen


@intrinsic
def map_lanes(typingctx: Any, function: Any, values: Any) -> Any:
    """The tuple of `function` of each element."""
    each = typingctx.resolve_function_type(function, (values.dtype,), {})
    result = types.UniTuple(each.return_type, values.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call = context.get_function(function, each)
        found = [call(builder, [builder.extract_value(args[1], i)]) for i in range(values.count)]
        return context.make_tuple(builder, result, found)

    return result(function, values), codegen


@intrinsic
def zip_lanes(typingctx: Any, function: Any, first: Any, second: Any) -> Any:
    """The tuple of `function` of each pair of elements. `second` may be one element, which is paired with all."""
    is_tuple = isinstance(second, types.UniTuple)
    each = typingctx.resolve_function_type(function, (first.dtype, second.dtype if is_tuple else second), {})
    result = types.UniTuple(each.return_type, first.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call = context.get_function(function, each)
        other = lambda i: builder.extract_value(args[2], i) if is_tuple else args[2]
        pairs = [[builder.extract_value(args[1], i), other(i)] for i in range(first.count)]
        return context.make_tuple(builder, result, [call(builder, pair) for pair in pairs])

    return result(function, first, second), codegen


# ---------------------------------------------------------------- threads


@cuda.jit(device=True)
def thread_number() -> Any:
    """The number of this thread in its block."""
    return types.int64(cuda.threadIdx.x)


@cuda.jit(device=True)
def thread_count() -> Any:
    """The number of threads of a block. It is a constant, because a GPU has no instruction that divides integers."""
    return types.int64(THREADS)


@cuda.jit(device=True)
def block_number() -> Any:
    """The number of this block in the grid."""
    return types.int64(cuda.blockIdx.x)


@cuda.jit(device=True)
def block_count() -> Any:
    """The number of blocks of the grid."""
    return types.int64(cuda.gridDim.x)


# ---------------------------------------------------------------- elements


@intrinsic
def multiply_high(typingctx: Any, a: Any, b: Any) -> Any:
    """The upper word of the product of two uint64. NVVM has an instruction for it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        double = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], double), builder.zext(args[1], double))
        return builder.trunc(builder.lshr(product, ir.Constant(double, 64)), _WORD)

    return types.uint64(types.uint64, types.uint64), codegen


def _rounded(builder: Any, operation: str, a: Any, b: Any) -> Any:
    """An operation with a rounding of its own. NVVM contracts plain products and sums, and has no switch against it."""
    letter = "f" if isinstance(a.type, ir.FloatType) else "d"
    kind = ir.FunctionType(a.type, [a.type, a.type])
    name = f"llvm.nvvm.{operation}.rn.{letter}"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [a, b])


def _negative(builder: Any, value: Any) -> Any:
    return builder.fsub(ir.Constant(value.type, -0.0), value)  # NVVM's older dialect has no fneg


@intrinsic
def _times(typingctx: Any, a: Any, b: Any) -> Any:
    """The product of two floats."""
    return a(a, b), lambda context, builder, signature, args: _rounded(builder, "mul", *args)


@intrinsic
def _plus(typingctx: Any, a: Any, b: Any) -> Any:
    """The sum of two floats."""
    return a(a, b), lambda context, builder, signature, args: _rounded(builder, "add", *args)


@intrinsic
def _minus(typingctx: Any, a: Any, b: Any) -> Any:
    """The difference of two floats."""
    return a(a, b), lambda context, builder, signature, args: _rounded(builder, "add", args[0], _negative(builder, args[1]))


MACHINE = Machine(cuda.jit(device=True), *conversions(intrinsic, types), _times, _plus, _minus)
