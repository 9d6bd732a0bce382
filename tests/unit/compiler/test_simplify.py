"""Simplification of compute: what each rule rewrites and leaves, its values beside NumPy's, and gradients."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import funccoll as fc
from funccoll import P
from tests.support.pass_programs import programs, run_program

pytestmark = pytest.mark.covers("passes")

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def program(fn: Any, *args):
    """A function's program after the passes."""
    jitted: Any = fc.jit(fn)
    return jitted.trace(*args).lower().program


def run(fn: Any, *args):
    return fc.jit(fn)(*args)


def lowered(fn, *args):
    """The names of a function's equations after the passes."""
    return [e.primitive.name for e in program(fn, *args).equations]


def bits(x):
    return np.asarray(x).tobytes()


# ------------------------------------------------------------------ powers


POWERS: dict[str, tuple[Any, Any, list[str]]] = {
    "1": (lambda x: np.power(x, 1), lambda x: x, []),
    "2": (lambda x: np.power(x, 2), lambda x: x * x, ["square"]),
    "3": (lambda x: x**3, lambda x: x * x * x, ["square", "multiply"]),
    "4": (lambda x: x**4.0, lambda x: (x * x) * (x * x), ["square", "square"]),
    "-1": (lambda x: np.power(x, -1.0), lambda x: 1 / x, ["reciprocal"]),
    "2 and 3 share the square": (lambda x: x**2 + x**3, lambda x: x * x + x * x * x, ["square", "multiply", "add"]),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", POWERS)
def test_a_small_power_is_a_product(case, dtype):
    fn, wanted, equations = POWERS[case]
    x = np.concatenate([X.ravel().astype(dtype), np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e30], dtype)])
    assert lowered(fn, x) == equations
    with np.errstate(all="ignore"):
        assert bits(run(fn, x)) == bits(wanted(x))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint16])
@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_products_of_integers_wrap_as_their_powers(dtype, power):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    x = np.concatenate([np.array([low, high, 0, 1, 77], dtype), np.random.default_rng(0).integers(low, high, 100, dtype)])
    fn = lambda x: np.power(x, power)
    assert "power" not in lowered(fn, x)
    assert bits(run(fn, x)) == bits(np.power(x, power))


LEFT: dict[str, tuple[Any, np.ndarray]] = {
    "a higher power": (lambda x: x**5, X),
    "a fraction": (lambda x: np.power(x, 0.5), np.abs(X)),
    "a lower power": (lambda x: x**-2, X),
    "the power 0": (lambda x: np.power(x, 0), X),
    "an array of powers": (lambda x: np.power(x, np.arange(8, dtype=np.float32)), np.abs(X)),
    "a traced power": (lambda x: np.power(np.float32(3), x), X),
    "a wider power": (lambda x: np.power(x, np.float64(3)), X),
    "a wider power of integers": (lambda x: x**3.0, np.arange(5)),
    "float16": (lambda x: x**3, X.astype(np.float16)),
    "complex numbers": (lambda x: x**3, X.astype(np.complex64)),
}


@pytest.mark.parametrize("case", LEFT)
def test_other_powers_are_numpys(case):
    fn, x = LEFT[case]
    assert lowered(fn, x) == ["power"]
    assert bits(run(fn, x)) == bits(fn(x))


def test_a_power_of_integers_by_minus_1_still_raises():
    assert lowered(lambda x: np.power(x, -1), np.arange(1, 5)) == ["power"]
    with pytest.raises(ValueError, match="negative integer powers"):
        fc.jit(lambda x: np.power(x, -1))(np.arange(1, 5))


@pytest.mark.parametrize(("power", "bound"), [(3, 1.3), (4, 2.0)])
@given(arrays(np.float32, 16, elements=st.floats(width=32, allow_nan=False)))
def test_products_are_within_their_bound_of_the_exact_power(power, bound, x):
    result = np.asarray(fc.jit(lambda x: x**power)(x))
    exact = x.astype(np.longdouble) ** power  # 64 bits, and no overflow
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    finite = np.isfinite(rounded)
    near = ~finite & np.isfinite(result)  # the product may round down to the largest number
    assert np.all(np.abs(result[near]) == np.finfo(np.float32).max)
    below = np.nextafter(np.abs(rounded[finite]), np.float32(0))
    ulp = np.maximum(np.abs(rounded[finite]) - below, np.finfo(np.float32).smallest_subnormal).astype(np.longdouble)
    over = np.isinf(result[finite])
    error = np.abs(result[finite].astype(np.longdouble) - exact[finite])
    assert np.all(np.abs(rounded[finite][over]) > np.finfo(np.float32).max * (1 - 2**-22))
    assert np.all(error[~over] <= bound * ulp[~over])
    assert np.all(np.signbit(result[finite]) == np.signbit(rounded[finite]))


def test_gradients_of_powers_have_products_alone():
    x = X.astype(np.float64)
    first: Any = fc.grad(lambda x: np.sum(x**3))
    second = fc.grad(lambda x: np.sum(first(x)))
    for fn, wanted in ((first, 3 * x**2), (second, 6 * x), (fc.grad(lambda x: np.sum(x**4)), 4 * x**3)):
        assert "power" not in lowered(fn, x)
        np.testing.assert_allclose(run(fn, x), wanted, rtol=1e-15)
    _, tangent = fc.jit(lambda x: fc.jvp(lambda x: x**3, (x,), (x,)))(x)
    np.testing.assert_allclose(tangent, 3 * x**3, rtol=1e-15)


def test_powers_in_the_body_of_a_loop_are_products():
    fn = lambda x: fc.scan(lambda h, row: (h + row**3, h**2), np.zeros(8, np.float32), x)
    (scan,) = program(fn, X).equations
    assert [e.primitive.name for e in scan.params["body"].equations] == ["square", "multiply", "add", "square"]


# ------------------------------------------------------------------ constant predicates


ROW, ZERO = X[0], np.float32(0)
PREDICATES = {
    "true": (lambda x: np.where(True, x, ZERO), ["negative"]),
    "false": (lambda x: np.where(False, ZERO, x), ["negative"]),
    "a narrower choice": (lambda x: np.where(True, x[0], x), ["getitem", "broadcast_to", "negative"]),
    "a number": (lambda x: np.where(False, x, ZERO), ["broadcast_to", "negative"]),
    "a traced predicate": (lambda x: np.where(x[0, 0] > 0, x, ZERO), ["getitem", "greater", "where", "negative"]),
    "an array of both": (lambda x: np.where(ROW > 0, x, ZERO), ["where", "negative"]),
}


@pytest.mark.parametrize("case", PREDICATES)
def test_a_constant_predicate_chooses(case):
    fn, equations = PREDICATES[case]
    after = lambda x: -fn(x)
    x = X.copy()
    x[1, :3] = -0.0, np.nan, np.inf
    assert lowered(after, x) == equations
    assert bits(run(after, x)) == bits(after(x))


def test_a_number_that_must_vary_stays_a_choice():
    fn = lambda x: fc.all_reduce(np.where(False, x, ZERO), "data")
    before, after = programs(fn, X, out_specs=P())
    assert [e.primitive.name for e in after.check().equations] == ["where", "all_reduce"]
    shards = np.split(X, 4)
    assert bits(run_program(before, shards)[0]) == bits(run_program(after, shards)[0])


def test_the_gradient_of_a_power_has_no_predicate():
    assert lowered(fc.grad(lambda x: np.sum(np.power(x, 3))), X) == ["square", "multiply", "multiply"]
