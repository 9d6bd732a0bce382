"""Memory operations of a CPU that Numba does not have, as LLVM instructions. Addresses are plain integers."""

from __future__ import annotations

from time import CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID
from typing import Any

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils
from numba.np import arrayobj

__all__ = [
    "array_at",
    "begin_message",
    "call",
    "copy",
    "data_of",
    "dtype_of",
    "fence",
    "intrinsic",
    "is_contiguous",
    "load",
    "load_acquire",
    "monotonic_ns",
    "nap",
    "non_temporal_copy",
    "pause",
    "references_to",
    "size_of",
    "square_root",
    "store",
    "store_release",
    "test_message",
    "thread_ns",
    "type_of",
    "yield_core",
]

intrinsic: Any = extending.intrinsic
yield_core = types.ExternalFunction("sched_yield", types.int32())
"""Let another process run on this core."""
nap = types.ExternalFunction("usleep", types.int32(types.uint32))
"""Sleep for some microseconds."""
_PIECE = 1 << 18  # bytes
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """The int64 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64 to an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """The int64 at an address. Nothing that comes after is read before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@njit
def monotonic_ns(words: Any) -> Any:
    """The time in nanoseconds of a clock that all processes share. `words` is the address of two words that it may write."""
    _clock_gettime(CLOCK_MONOTONIC, words)
    return 1_000_000_000 * load(words) + load(words + 8)


@njit
def thread_ns(words: Any) -> Any:
    """The nanoseconds that this thread has spent on a processor. `words` as in `monotonic_ns`."""
    _clock_gettime(CLOCK_THREAD_CPUTIME_ID, words)
    return 1_000_000_000 * load(words) + load(words + 8)


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64 to an address. Everything that came before is written before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """A hint that this is a waiting loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def array_at(typingctx: Any, address: Any, count: Any, dtype: Any) -> Any:
    """The array of `count` elements that begins at an address. (`numba.carray` needs reference counts.)"""
    kind = types.Array(dtype.dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(kind)(context, builder)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        data = builder.inttoptr(args[0], context.get_data_type(kind.dtype).as_pointer())
        arrayobj.populate_array(made, data=data, shape=[args[1]], strides=[itemsize], itemsize=itemsize, meminfo=None)
        return made._getvalue()

    return kind(types.int64, types.int64, dtype), codegen


@intrinsic
def _memcpy(typingctx: Any, to: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes between ranges that do not overlap, by the C library."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source = (builder.inttoptr(a, cgutils.voidptr_t) for a in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit
def copy(to: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes between ranges that do not overlap.

    It copies in pieces. From about the size of the second-level cache on, C libraries change to loops that fetch every line
    before they write it, and later to non-temporal stores. Their bounds do not know what other ranks do. Measured, pieces are
    1.2 to 1.6 times as fast from 2 MiB on.
    """
    done = 0
    while count - done > _PIECE:
        _memcpy(to + done, source + done, _PIECE)
        done += _PIECE
    _memcpy(to + done, source + done, count - done)


@intrinsic
def _non_temporal_lines(typingctx: Any, to: Any, source: Any, count: Any) -> Any:
    """Copy `count` cache lines with non-temporal stores. `to` is the beginning of one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source, count = args
        word = ir.IntType(64)
        line = ir.VectorType(word, 8).as_pointer()
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, count, intp=word) as loop:
            offset = builder.shl(loop.index, word(6))
            value = builder.load(builder.inttoptr(builder.add(source, offset), line), align=1)
            stored = builder.store(value, builder.inttoptr(builder.add(to, offset), line), align=64)
            stored.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit
def non_temporal_copy(to: Any, source: Any, count: Any) -> Any:
    """Copy with non-temporal stores: whole lines are written without being read first. Before a release it needs a `fence`.

    Single elements would be many times slower than a plain copy, so only whole lines are written that way.
    """
    head = min(-to & 63, count)
    lines = (count - head) >> 6
    done = head + (lines << 6)
    copy(to, source, head)
    _non_temporal_lines(to + head, source + head, lines)
    copy(to + done, source + done, count - done)


@intrinsic
def fence(typingctx: Any) -> Any:
    """Order non-temporal stores before everything that comes after."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call(
    typingctx: Any, function: Any, dsts: Any, ndst: Any, srcs: Any, nsrc: Any, count: Any, divisor: Any, accumulator: Any
) -> Any:
    """Call a combine by its address. See `object_cache.address_of` for the convention."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.IntType(32), [word] * 9)
        # It returns nothing and raises nothing. The two words that it may write are in the accumulator, which is not yet in
        # use.
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[7], builder.add(args[7], word(8)), *args[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


def _c_function(words: int) -> Any:
    """A call of a C function by its address, with this number of words. It returns an int.

    An argument may have any C type, pointer or int: it is one word, and an int is its lower half.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * words)
        found = builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return builder.sext(found, ir.IntType(64))

    return types.int64(*[types.int64] * (1 + words)), codegen


@intrinsic
def begin_message(
    typingctx: Any, function: Any, buffer: Any, count: Any, datatype: Any, peer: Any, tag: Any, communicator: Any, request: Any
) -> Any:
    """Call MPI_Isend or MPI_Irecv. Returns its error code. (As 64-bit words, arguments are also right where C has ints.)"""
    return _c_function(7)


@intrinsic
def test_message(typingctx: Any, function: Any, request: Any, flag: Any, status: Any) -> Any:
    """Call MPI_Test. Returns its error code."""
    return _c_function(3)


@intrinsic
def square_root(typingctx: Any, x: Any) -> Any:
    """The square root of a real float, correctly rounded, as an instruction. (Numba's own calls the C library.)"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(args[0].type, [args[0].type])
        name = "llvm.sqrt.f32" if isinstance(args[0].type, ir.FloatType) else "llvm.sqrt.f64"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return x(x), codegen


# Places in CPython's and NumPy's ABIs of an object's reference count, its type, and an array's data and flags. The count is
# first, the type behind it. An array's data are behind the head of all objects, its flags behind data, nd, dimensions, strides,
# base and descr, all of the size of a pointer.
_TYPE = object.__basicsize__ - 8
_DATA = object.__basicsize__
_NDIM, _DIMENSIONS, _DTYPE, _FLAGS = (_DATA + 8 * i for i in (1, 2, 5, 6))
_C_CONTIGUOUS = 1


@njit
def type_of(thing: Any) -> Any:
    """The address of an object's type, from the object's (`id`)."""
    return load(thing + _TYPE)


@njit
def references_to(thing: Any) -> Any:
    """The number of references to an object, from its address."""
    return load(thing) & 0xFFFFFFFF


@njit
def data_of(array: Any) -> Any:
    """The address of an array's data, from the array object's."""
    return load(array + _DATA)


@njit
def dtype_of(array: Any) -> Any:
    """The address of an array's dtype, from the array object's."""
    return load(array + _DTYPE)


@njit
def size_of(array: Any) -> Any:
    """The number of an array's elements, from the array object's address."""
    size, dimensions = 1, load(array + _DIMENSIONS)
    for k in range(load(array + _NDIM) & 0xFFFFFFFF):
        size *= load(dimensions + 8 * k)
    return size


@njit
def is_contiguous(array: Any) -> Any:
    """True for a C-contiguous array, from the array object's address."""
    return load(array + _FLAGS) & _C_CONTIGUOUS != 0
