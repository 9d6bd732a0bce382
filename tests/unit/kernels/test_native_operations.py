"""Elementwise primitives in native kernels: NumPy's results to the last bit, for every kind and special values."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

import funccoll as fc
from funccoll.compiler.passes.fuse import fuse
from funccoll.core.ir import primitive_named
from funccoll.kernels import object_cache
from funccoll.kernels.native import angles, elementary, machine_code, powers
from funccoll.kernels.native.ir_text import elementwise
from funccoll.kernels.native.operations import FUNCTIONS, OPERATIONS, UNSIGNED, converted

pytestmark = [
    pytest.mark.covers("jit"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]

BEST = machine_code.processor_level()
LEVELS = machine_code.LEVELS[: machine_code.LEVELS.index(BEST) + 1] if BEST else ()
DTYPES = {"float": np.float32, "double": np.float64, "i32": np.int32, "i64": np.int64, "i1": np.bool_}
MEMORY = {np.dtype(dtype): "bool" if kind == "i1" else kind for kind, dtype in DTYPES.items()}
SIGNLESS = {np.dtype(np.uint32): "i32", np.dtype(np.uint64): "i64"}
MEMORY |= SIGNLESS
OPERANDS = {"where": 3}
CASES = [
    (name, kind)
    for name, known in OPERATIONS.items()
    for kind in sorted(known.kinds)
    if name not in FUNCTIONS and "_unsigned" not in name
]
CONVERSIONS = list(itertools.product(DTYPES, DTYPES))


def run(emit, arrays, dtype, cpu):
    text = elementwise("kernel", [MEMORY[a.dtype] for a in arrays], [MEMORY[np.dtype(dtype)]], lambda *x: [emit(*x)])
    address = object_cache.load("kernel", machine_code.object_code(text, cpu))
    out = np.empty(arrays[0].shape, dtype)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(arrays) + 1), ctypes.c_int64)(address)
    function(*(a.ctypes.data for a in (*arrays, out)), out.size)
    return out


def numbers(kind):
    generator = np.random.default_rng(0)
    if kind == "i1":
        return np.array([False, True])
    dtype = np.dtype(DTYPES[kind])
    if dtype.kind == "i":
        limits = np.iinfo(dtype)
        return np.array([0, 1, -1, 2, 7, -7, limits.max, limits.min, *generator.integers(-99, 99, 9)], dtype)
    limits = np.finfo(dtype)
    places = [0.0, 0.5, 1.0, 1.5, 2.5, limits.tiny, limits.smallest_subnormal, limits.max, np.inf, 2.0**22 + 0.5, 1e7]
    return np.array([*places, *(-p for p in places), np.nan, *generator.standard_normal(9)], dtype)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_results_are_numpys(name, kind):
    primitive = primitive_named(name)
    count = primitive.ufunc.nin if primitive.ufunc else OPERANDS.get(name, 1)
    every = numbers(kind)
    if count == 1:
        arrays = [every]
    else:
        arrays = [a.reshape(-1).copy() for a in np.meshgrid(every, every)]
    if name == "where":
        arrays = [np.arange(arrays[0].size) % 3 == 0, *arrays]
    with np.errstate(all="ignore"):
        wanted = np.asarray(primitive.reference(*arrays))
    for cpu in LEVELS:
        found = run(OPERATIONS[name].emit, arrays, wanted.dtype, cpu)
        np.testing.assert_array_equal(found, wanted)
        if wanted.dtype.kind == "f" and name not in ("maximum", "minimum", "fmax", "fmin"):  # NumPy takes either zero
            number = ~np.isnan(wanted)
            np.testing.assert_array_equal(np.signbit(found)[number], np.signbit(wanted)[number])


def without_sign(dtype):
    """Numbers at the ends of the range, about 2^53 and 2^24, and halfway between floats."""
    generator, limit = np.random.default_rng(0), np.iinfo(dtype).max
    numbers = [
        0,
        1,
        2,
        5,
        31,
        32,
        63,
        64,
        limit,
        limit - 1,
        limit // 2,
        limit // 2 + 1,
        2**24 + 1,
        *generator.integers(0, limit, 9, dtype),
    ]
    if dtype == np.uint64:
        halfway = (generator.integers(0, 1 << 24, 30).astype(dtype) * 2 + 1) << generator.integers(10, 39, 30).astype(dtype)
        numbers += [2**53, 2**53 + 1, 2**63 + 1025, *halfway, *(halfway + dtype.type(1)), *(halfway - dtype.type(1))]
    return np.array(numbers, dtype)


@pytest.mark.parametrize("dtype", SIGNLESS, ids=str)
@pytest.mark.parametrize("name", sorted({*UNSIGNED} - {"stop_gradient", "where"}))
def test_numbers_without_sign(name, dtype):
    primitive, every = primitive_named(name), without_sign(dtype)
    arrays = [a.reshape(-1).copy() for a in np.meshgrid(every, every)] if primitive.ufunc.nin == 2 else [every]
    wanted = np.asarray(primitive.reference(*arrays))
    for cpu in LEVELS:
        np.testing.assert_array_equal(run(OPERATIONS[UNSIGNED[name]].emit, arrays, wanted.dtype, cpu), wanted)


@pytest.mark.parametrize("dtype", SIGNLESS, ids=str)
@pytest.mark.parametrize("kind", ["float", "double"])
def test_floats_of_numbers_without_sign(dtype, kind):
    x = without_sign(dtype)
    for cpu in LEVELS:
        found = run(OPERATIONS[f"{kind}_of_unsigned"].emit, [x], DTYPES[kind], cpu)
        np.testing.assert_array_equal(found, x.astype(DTYPES[kind]))


def test_integers_of_numbers_without_sign():
    x = without_sign(np.dtype(np.uint32))
    np.testing.assert_array_equal(run(OPERATIONS["i64_of_unsigned"].emit, [x], np.int64, BEST), x.astype(np.int64))


def test_bits_of_dropout_are_fused():
    """Random words become floats, and are compared: one kernel. Signs do not mix."""

    def fn(words, x, numbers):
        kept = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) < 0.5
        return np.where(kept, x * 2, np.float32(0)), words < numbers, np.maximum(words, np.uint64(2**63 + 5))

    generator = np.random.default_rng(0)
    words = generator.integers(0, 1 << 64, 9000, np.uint64)
    x, numbers = generator.standard_normal(9000).astype(np.float32), generator.integers(-99, 99, 9000)
    compiled = fc.jit(fn)
    for found, wanted in zip(compiled(words, x, numbers), fn(words, x, numbers), strict=True):
        np.testing.assert_array_equal(np.asarray(found), wanted)
    program = fuse(compiled.lower(words, x, numbers).program)
    assert [eqn.primitive.name for eqn in program.equations] == ["fused", "less"]


@pytest.mark.parametrize("name", ["floor_divide", "remainder", "fmod"])
@pytest.mark.parametrize("kind", ["float", "double"])
def test_remainders_of_whole_and_large_quotients(name, kind):
    """Quotients that are whole, the next numbers to them, and too large for one step."""
    generator, count = np.random.default_rng(0), 20_000
    y = np.ldexp(generator.uniform(-1, 1, count), generator.integers(-30, 30, count)).astype(DTYPES[kind])
    quotients = np.rint(np.ldexp(generator.uniform(-1, 1, count), generator.integers(0, 60, count)))
    near = (y * quotients).astype(y.dtype)
    for x in (near, *(np.nextafter(near, y.dtype.type(to)) for to in (-np.inf, np.inf))):
        wanted = primitive_named(name).reference(x, y)
        found = run(OPERATIONS[name].emit, [x, y], y.dtype, BEST)
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("source", "target"), CONVERSIONS)
def test_conversions_are_numpys(source, target):
    x = numbers(source)
    with np.errstate(all="ignore"):
        wanted = x.astype(DTYPES[target])
    for cpu in LEVELS:
        np.testing.assert_array_equal(run(lambda v: converted(v, target), [x], DTYPES[target], cpu), wanted)


@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("target", [np.int32, np.int64])
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_floats_beyond_integers_become_the_least_one(source, target):
    limit = 2.0 ** (8 * np.dtype(target).itemsize - 1)
    edges = np.array([limit, -limit, np.inf, np.nan, 1e30, 2.5, -2.5, 0.99, -0.0, limit / 2], source)
    x = np.concatenate([edges, -edges, np.nextafter(edges, 0), np.nextafter(edges, 2 * edges)])
    kinds = {v: k for k, v in DTYPES.items()}
    for cpu in LEVELS:
        found = run(lambda v: converted(v, kinds[target]), [x], target, cpu)
        np.testing.assert_array_equal(found, x.astype(target))
        assert found[2] == found[3] == np.iinfo(target).min
    program = fuse(fc.jit(lambda x: np.floor(x * 2).astype(target)).lower(np.resize(x, 20_000)).program)
    assert [eqn.primitive.name for eqn in program.equations] == ["fused"]


def test_every_function_is_an_operation():
    assert {*elementary.FUNCTIONS} - {*OPERATIONS} == {"sigmoid"}  # which is expit
    assert {*powers.ULP, *angles.ULP} <= {*FUNCTIONS} <= {*OPERATIONS}
