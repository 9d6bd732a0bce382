"""Powers, logarithms, roots and angles in native kernels: errors in ulp, special values, and the same bits everywhere."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import pytest

from funccoll.core.ir import primitive_named
from funccoll.kernels.native import angles, machine_code, powers
from funccoll.kernels.native.ir_text import elementwise
from funccoll.kernels.native.operations import FUNCTIONS, OPERATIONS

from .test_native_elementary import LEVELS, PLAIN, compiled, doubles, errors, patterns, specials

pytestmark = [
    pytest.mark.slow,
    pytest.mark.covers("jit"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]

KINDS = {"float": np.float32, "double": np.float64}
BOUNDS = {**powers.ULP, **angles.ULP}
CASES = [(kind, name) for name in BOUNDS for kind in KINDS]
SUMS = [(kind, name) for name in ("logaddexp", "logaddexp2") for kind in KINDS]


@functools.cache
def text_of(name, kind):
    return elementwise("kernel", [kind] * operands_of(name), [kind], lambda *x: [OPERATIONS[name].emit(*x)])


def operands_of(name):
    return primitive_named(name).ufunc.nin


def evaluate(name, kind, x, cpu=machine_code.processor_level()):
    out = np.empty_like(x[0])
    compiled(text_of(name, kind), cpu)(*(a.ctypes.data for a in (*x, out)), out.size)
    return out


def exact(name, x):
    with np.errstate(all="ignore"):
        return getattr(np, name)(*(a.astype(np.longdouble) for a in x))


def drawn(name, kind, step, count):
    """Operands: numbers of all sizes, and every pair of special ones."""
    generator = np.random.default_rng(1)
    special = specials(KINDS[kind])
    numbers = [*(patterns(step) if kind == "float" else doubles(count)), special]
    if operands_of(name) == 1:
        return [(x,) for x in numbers]
    pairs = [(x, generator.permutation(x)) for x in numbers]
    pairs += [(x, generator.uniform(-30, 30, x.size).astype(x.dtype)) for x in numbers]
    some = np.unique(np.concatenate([special[::7], np.array([-3, -2, -0.5, 0, 0.5, 1, 2, 3, np.inf, np.nan], special.dtype)]))
    some = np.concatenate([some, -some])
    return [*pairs, tuple(a.reshape(-1).copy() for a in np.meshgrid(some, some))]


def check(name, kind, x):
    bound = BOUNDS[name] if kind == "double" else 0.51
    found = evaluate(name, kind, x)
    off = errors(found, exact(name, x))
    worst = int(np.argmax(off))
    assert off[worst] <= bound, f"{name}{tuple(a[worst] for a in x)} = {found[worst]!r} has an error of {off[worst]} ulp"
    return off[worst]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_errors_of_a_sample(kind, name):
    found = max(check(name, kind, x) for x in drawn(name, kind, 257_003, 5_000))
    assert found > 0.4 * BOUNDS[name] or kind == "float"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_errors_of_many_numbers(kind, name):
    for x in drawn(name, kind, 257, 500_000):
        check(name, kind, x)


@pytest.mark.parametrize(("kind", "name"), SUMS)
def test_sums_of_powers(kind, name):
    """The error in units of the greater operand, or of 0.7: the result may be near 0."""
    for x in drawn(name, kind, 257_003, 5_000):
        found, wanted = evaluate(name, kind, x), exact(name, x)
        with np.errstate(all="ignore"):
            finite = np.isfinite(wanted.astype(KINDS[kind]))
            unit = np.spacing(np.maximum(np.abs(np.maximum(*x)), KINDS[kind](0.7)))[finite]
            assert (np.abs(found - wanted)[finite] <= powers.LOG_ADD_ULP * unit).all()
            np.testing.assert_array_equal(found[~finite], wanted.astype(KINDS[kind])[~finite])


@pytest.mark.parametrize(("kind", "name"), CASES + SUMS)
def test_every_processor_gives_the_same_bits(kind, name):
    for x in drawn(name, kind, 10_000_019, 200):
        bits = {evaluate(name, kind, x, cpu).tobytes() for cpu in (PLAIN, *LEVELS)}
        assert len(bits) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_exact_results_are_exact(kind):
    numbers = np.arange(-20, 22, dtype=KINDS[kind])
    two = np.full_like(numbers, 2)
    np.testing.assert_array_equal(evaluate("exp2", kind, [numbers]), 2.0**numbers)
    np.testing.assert_array_equal(evaluate("log2", kind, [2.0**numbers]), numbers)
    np.testing.assert_array_equal(evaluate("power", kind, [numbers, two]), numbers * numbers)
    tens = np.array([10.0**k for k in range(11)], KINDS[kind])
    np.testing.assert_array_equal(evaluate("log10", kind, [tens]), np.arange(11))
    np.testing.assert_array_equal(evaluate("cbrt", kind, [numbers * numbers * numbers]), numbers)
    np.testing.assert_array_equal(evaluate("hypot", kind, [numbers * 3, numbers * 4]), abs(numbers) * 5)


def test_bits_change_deliberately():
    """As in `test_native_elementary`."""
    texts = "".join(text_of(name, kind) for kind, name in CASES + SUMS)
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "afa54bb6427d40b2"


def test_functions_of_the_same_result():
    assert FUNCTIONS["power"][0] is FUNCTIONS["general_root"][0] is FUNCTIONS["float_power"][0]
