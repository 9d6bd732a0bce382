"""Elementary functions of native kernels: errors in ulp, special values, tails, and the same bits on every processor."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.core.types import bfloat16
from funccoll.kernels import object_cache
from funccoll.kernels.native import elementary, machine_code
from funccoll.kernels.native.elementary import FUNCTIONS, ULP
from funccoll.kernels.native.ir_text import LANES, KernelText, elementwise

pytestmark = [
    pytest.mark.covers("jit"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]

BEST = machine_code.processor_level()
LEVELS = machine_code.LEVELS[: machine_code.LEVELS.index(BEST) + 1] if BEST else ()
KINDS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
CASES = [(kind, name) for kind, names in ULP.items() for name in names]
PLAIN = "x86-64"
"""No processor computes this way: FMA is a function of C's library here."""


@functools.cache
def compiled(text, cpu=BEST or ""):
    """A kernel's function of addresses and a number of elements."""
    operands = text.partition("define void @kernel(")[2].partition(")")[0].count("ptr ")
    address = object_cache.load("kernel", machine_code.object_code(text, cpu))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * operands, ctypes.c_int64)(address)


@functools.cache
def text_of(name, kind="float"):
    return elementwise("kernel", [kind], [kind], lambda x: [FUNCTIONS[name](x)])


def evaluate(name, x, cpu=BEST):
    out = np.empty_like(x)
    compiled(text_of(name, KINDS[x.dtype]), cpu)(x.ctypes.data, out.ctypes.data, x.size)
    return out


def exact(name, x):
    """The function in twice as many bits, or 64 of the mantissa beside float64's 53."""
    with np.errstate(all="ignore"):
        x = x.astype(np.float64 if x.dtype == np.float32 else np.longdouble)
        if name == "erf":
            return exact_erf(x)
        if name == "sigmoid":
            return 1 / (1 + np.exp(-x))
        return getattr(np, name)(x)


def exact_erf(x):
    """erf: a sum of positive terms below 2, and 1 - erfc above, where erfc is small."""
    found = np.copysign(1 - np.fromiter(map(math.erfc, np.abs(x).tolist()), x.dtype, x.size), x)
    near = np.abs(x) < 2
    small = x[near]
    term = total = small.copy()
    for n in range(1, 60):
        term = term * (2 * small * small / (2 * n + 1))
        total = total + term
    found[near] = total * np.exp(-small * small) * (2 / np.sqrt(np.arccos(x.dtype.type(-1))))
    return found


def errors(found, wanted):
    """The errors in units in the last place of the exact results. inf for a wrong NaN, infinity or sign."""
    limits = np.finfo(found.dtype)
    with np.errstate(all="ignore"):
        rounded = wanted.astype(found.dtype)
        exponents = np.maximum(np.frexp(wanted)[1], limits.minexp + 1) - (limits.nmant + 1)
        off = np.ldexp(np.abs(found.astype(wanted.dtype) - wanted), -exponents).astype(np.float64)
    off[found == rounded] = np.where(np.isfinite(rounded), off, 0.0)[found == rounded]
    off[~np.isfinite(rounded) & (found != rounded)] = np.inf
    off[np.isnan(wanted)] = np.where(np.isnan(found), 0.0, np.inf)[np.isnan(wanted)]
    off[~np.isnan(wanted) & (np.isnan(off) | (np.signbit(found) != np.signbit(wanted)))] = np.inf
    return off


def patterns(step):
    """Every `step`th pattern of 32 bits, as floats."""
    for first in range(0, 1 << 32, step << 20):
        yield np.arange(first, min(first + (step << 20), 1 << 32), step, dtype=np.uint32).view(np.float32)


def doubles(count):
    """Random numbers of all exponents, of usual ones, and near 1."""
    generator = np.random.default_rng(5)
    bits = generator.integers(0, 1 << 64, count, dtype=np.uint64).view(np.float64)
    usual = np.ldexp(generator.uniform(-1, 1, count), generator.integers(-60, 12, count))
    yield np.concatenate([bits, usual, generator.uniform(-3, 3, count), 1 + generator.uniform(-0.5, 0.5, count)])


def check(name, x):
    bound = ULP[KINDS[x.dtype]][name]
    off = errors(evaluate(name, x), exact(name, x))
    worst = int(np.argmax(off))
    assert off[worst] <= bound, f"{name}({x[worst]!r}) has an error of {off[worst]} ulp"
    return off[worst]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_errors_of_a_sample(kind, name):
    found = max(check(name, x) for x in (patterns(25_717) if kind == "float" else doubles(50_000)))
    bound = ULP[kind][name]
    assert found > 0.4 * bound, f"{name}: the bound of {bound} says little about an error of {found}"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_errors_of_every_257th_number(kind, name):
    for x in patterns(257) if kind == "float" else doubles(1_000_000):
        check(name, x)


def specials(dtype):
    limits = np.finfo(dtype)
    tiny, least, large = limits.smallest_subnormal, limits.tiny, limits.max
    places = [0.0, tiny, least - tiny, least, 2.0**-54, 2.0**-53, 2.0**-26, 2.0**-25, 2.0**-12, 0.5, 0.7, 2 / 3, 0.9277, 1.0]
    places += [
        4 / 3,
        2.0,
        4.0,
        9.0,
        10.0,
        17.3,
        20.0,
        50.0,
        87.3365,
        88.37,
        88.7228,
        89.0,
        103.9721,
        104.0,
        708.4,
        709.78,
        710.0,
    ]
    places += [745.13, 746.0, 3e4, 2.0**22, 1e10, 1e38, large, np.inf]
    places += [k * math.pi / 4 for k in range(1, 9)] + [22 * math.pi, 1e4 * math.pi]
    numbers = np.array(places, dtype)
    with np.errstate(over="ignore"):
        numbers = np.concatenate([numbers, *(np.nextafter(numbers, dtype(to)) for to in (-np.inf, np.inf))])
    return np.concatenate([numbers, -numbers, np.array([np.nan, -np.nan], dtype)])


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_special_values(kind, name):
    check(name, specials(np.float32 if kind == "float" else np.float64))


@pytest.mark.parametrize("name", ["sin", "tanh", "erf", "expm1", "log1p", "sqrt"])
def test_zeros_keep_their_sign(name):
    assert evaluate(name, np.array([-0.0, 0.0], np.float32)).tobytes() == np.array([-0.0, 0.0], np.float32).tobytes()


def test_results_at_the_ends_of_the_range():
    found = evaluate("exp", np.array([-np.inf, -104, -103.9, -87.5, 88.72, 88.73, np.inf], np.float32))
    np.testing.assert_array_equal(found[[0, 1, 2, 5, 6]], np.array([0, 0, 1e-45, np.inf, np.inf], np.float32))
    assert 0 < found[3] < np.finfo("f4").tiny
    assert np.isfinite(found[4])
    np.testing.assert_array_equal(evaluate("log", np.array([0.0, -0.0, -1.0], np.float32)), [-np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("name", ["sin", "cos"])
@pytest.mark.parametrize(
    "hard",
    [
        np.array([16367173.0 * 2.0**72, 16367173.0 * 2.0**71, 11474651.0, 3.3e4, 1e15, 3.4e38], np.float32),
        np.array([6381956970095103 * 2.0**797, 5319372648326541 * 2.0**15, 1e9, 1.1e9, 1e22, 1.7e308], np.float64),
    ],
    ids=["float", "double"],
)
def test_angles_near_multiples_of_a_right_angle(name, hard):
    """The hardest numbers for the reduction of Payne and Hanek, and their neighbours."""
    check(name, np.concatenate([hard, -hard, *(np.nextafter(hard, hard.dtype.type(to)) for to in (0, np.inf))]))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_processor_gives_the_same_bits(kind, name):
    dtype, numbers = (np.float32, patterns(1_000_003)) if kind == "float" else (np.float64, doubles(1_000))
    x = np.concatenate([specials(dtype), *numbers])
    bits = [evaluate(name, x, cpu).tobytes() for cpu in (PLAIN, *LEVELS)]
    assert set(bits) == {bits[0]}


def test_every_function_is_tested():
    assert {name for _, name in CASES} == {*FUNCTIONS}


@pytest.mark.parametrize("name", ["exp", "sin"])
@given(st.integers(0, 3 * LANES), st.integers(0, 3))
def test_any_number_of_elements(name, count, offset):
    """An element's bits depend neither on its place nor on the number, and nothing else is written."""
    memory = np.linspace(-3, 70_000 if name == "sin" else 3, 4 * LANES, dtype=np.float32)
    wanted = evaluate(name, memory)
    x, out = memory[offset:], np.full(4 * LANES, 7, np.float32)
    compiled(text_of(name))(x.ctypes.data, out[offset:].ctypes.data, count)
    assert out[offset : offset + count].tobytes() == wanted[offset : offset + count].tobytes()
    assert (out[:offset] == 7).all()
    assert (out[offset + count :] == 7).all()


@given(st.integers(1, 3 * LANES))
def test_a_result_may_have_the_memory_of_an_operand(count):
    text = elementwise("kernel", ["float"] * 2, ["float"] * 2, lambda x, y: [x - y, x + y])
    x, y = np.arange(count, dtype=np.float32), np.full(count, 3, np.float32)
    wanted = x - y, x + y
    compiled(text)(x.ctypes.data, y.ctypes.data, y.ctypes.data, x.ctypes.data, count)
    np.testing.assert_array_equal((y, x), wanted)


@pytest.mark.parametrize("cpu", LEVELS)
@pytest.mark.parametrize(("kind", "dtype"), [("float", np.float32), ("double", np.float64)])
def test_products_and_sums_are_not_contracted(cpu, kind, dtype):
    generator = np.random.default_rng(0)
    x, y, z = generator.standard_normal((3, 1000)).astype(dtype)
    text = elementwise("kernel", [kind] * 3, [kind] * 2, lambda x, y, z: [x * y + z, x.fma(y, z)])
    apart, fused = np.empty((2, 1000), dtype)
    compiled(text, cpu)(*(a.ctypes.data for a in (x, y, z, apart, fused)), 1000)
    np.testing.assert_array_equal(apart, x * y + z)
    assert (apart != fused).any()


@pytest.mark.parametrize("cpu", LEVELS)
@pytest.mark.parametrize(("kind", "dtype"), [("half", np.float16), ("bfloat", bfloat16)])
def test_floats_of_16_bits(cpu, kind, dtype):
    """All numbers become float32 and back, and float32 is rounded to nearest, ties to even."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    widened, back = np.empty(1 << 16, np.float32), np.empty_like(every)
    compiled(elementwise("kernel", [kind], ["float", kind], lambda x: [x, x]), cpu)(
        every.ctypes.data, widened.ctypes.data, back.ctypes.data, every.size
    )
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(widened, every.astype(np.float32))
    number = ~np.isnan(widened)
    assert back[number].tobytes() == every[number].tobytes()
    assert np.isnan(back[~number].astype(np.float32)).all()
    x = np.concatenate([specials(np.float32), *patterns(25_717), widened[number] * np.float32(1 + 2.0**-12)])
    rounded = np.empty(x.size, dtype)
    compiled(elementwise("kernel", ["float"], [kind], lambda x: [x]), cpu)(x.ctypes.data, rounded.ctypes.data, x.size)
    with np.errstate(all="ignore"):
        wanted = x.astype(dtype)
    number = ~np.isnan(x)
    assert rounded[number].tobytes() == wanted[number].tobytes()
    assert np.isnan(rounded[~number].astype(np.float32)).all()


def test_kinds_are_not_mixed():
    kernel = KernelText("kernel")
    with pytest.raises(TypeError, match="a kernel combines float and double"):
        _ = kernel.constant("float", 1.0) + kernel.constant("double", 1.0)
    with pytest.raises(TypeError, match="result 0 of kernel is i32, and should be float"):
        elementwise("kernel", ["float"], ["float"], lambda x: [x.bits()])


def test_code_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    calls = []
    compile_now = machine_code.object_code
    monkeypatch.setattr(machine_code, "object_code", lambda *a: calls.append(a) or compile_now(*a))
    text = elementwise("kernel", ["float"], ["float"], lambda x: [elementary.sqrt(x)])
    for _ in range(2):
        x, out = np.full(5, 4, np.float32), np.zeros(5, np.float32)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        function(machine_code.address_of(text, "kernel"))(x.ctypes.data, out.ctypes.data, 5)
        assert (out == 2).all()
    assert len(calls) == 1
    machine_code.address_of(text + "; another text\n", "kernel")
    assert len(calls) == 2


def test_bits_change_deliberately():
    """Whoever changes a function's text changes users' bits: then this hash changes, and the changelog has a line."""
    texts = "".join(text_of(name, kind) for kind, name in CASES)
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "e5e054d8a59069a1"
