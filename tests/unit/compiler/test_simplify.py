"""Simplification of compute: what each rule rewrites and leaves, its values beside NumPy's, and gradients."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import funccoll as fc
from funccoll import P
from funccoll.compiler.passes.simplify import simplify
from funccoll.core.interpreter import evaluate
from funccoll.core.types import bfloat16
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


def test_what_is_not_chosen_is_not_computed():
    assert lowered(lambda x: np.where(True, np.sin(x), np.tanh(x)), X) == ["sin"]


def test_a_number_that_must_vary_stays_a_choice():
    fn = lambda x: fc.all_reduce(np.where(False, x, ZERO), "data")
    before, after = programs(fn, X, out_specs=P())
    assert [e.primitive.name for e in after.check().equations] == ["where", "all_reduce"]
    shards = np.split(X, 4)
    assert bits(run_program(before, shards)[0]) == bits(run_program(after, shards)[0])


def test_the_gradient_of_a_power_has_no_predicate():
    assert lowered(fc.grad(lambda x: np.sum(np.power(x, 3))), X) == ["square", "multiply"]


# ------------------------------------------------------------------ constants that are one number


def ones(*shape: int, value: float = 1.0, dtype: Any = np.float32):
    return np.full(shape, value, dtype)


NUMBERS = {
    "a product": (lambda x: x * ones(8, 8, value=2.5), ["multiply"]),
    "a broadcast constant": (lambda x: np.broadcast_to(np.float32(2), (8, 8)) - x, ["subtract"]),
    "-0": (lambda x: np.copysign(x, ones(8, value=-0.0)), ["copysign"]),
    "a choice": (lambda x: np.where(x > ones(8), x, ones(8, 8, value=-0.0)), ["greater", "where"]),
    "two choices": (lambda x: np.where(x > 0, ones(8, 8, value=2), ones(8, 8, value=-0.0)), ["greater", "where"]),
    "a predicate": (lambda x: -np.where(ones(8, 8, dtype=np.bool_), x, ZERO), ["negative"]),
    "of size 1": (lambda x: x / ones(1, 1, value=3), ["divide"]),
    "once varied": (lambda x: x + fc.pvary(fc.asarray(ones(8, value=3)), "data"), ["add"]),
    "reshaped": (lambda x: x + np.reshape(fc.asarray(ones(16, 4, value=3)), (8, 8)), ["add"]),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_an_equal_constant_becomes_a_number(case):
    fn, equations = NUMBERS[case]
    x = np.concatenate([X, np.array([[0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e30, 1]] * 8, np.float32)])
    before, after = programs(fn, x, mesh=fc.make_mesh({"data": 2}))
    assert [e.primitive.name for e in after.check().equations] == equations
    assert not after.constants
    with np.errstate(all="ignore"):
        wanted = run_program(before, np.split(x, 2), mesh=fc.make_mesh({"data": 2}))
        found = run_program(after, np.split(x, 2), mesh=fc.make_mesh({"data": 2}))
    assert bits(wanted[0]) == bits(found[0])


TABLE = np.arange(8, dtype=np.float32)
LAST = ones(16, 8)
LAST[-1, -1] = 2
ARRAYS_STAY = {
    "elements that differ": lambda x: x + TABLE,
    "a last element that differs": lambda x: np.concatenate([x, x]) + LAST,
    "signs of zero that differ": lambda x: np.copysign(x, TABLE * 0 * np.array([1, -1] * 4, np.float32)),
    "the result's shape": lambda x: x + ones(3, 8, 8, value=2),
    "a result": lambda x: (x, ones(8, 8)),
    "powers": lambda x: np.power(x, ones(8, value=2)),  # NumPy rounds otherwise than x * x
    "a product of matrices": lambda x: x @ ones(8, 8, value=2),
    "NaN": lambda x: np.maximum(x, ones(8, 8, value=np.nan)),
}


@pytest.mark.parametrize("shape", [(4, 8), ()])
def test_one_of_two_constants_stays(shape):
    """Its type says that the result varies."""
    a, b = ones(*shape, value=3), ones(*shape, value=5)
    fn = lambda x: x + fc.pvary(fc.asarray(a), "data") * fc.pvary(fc.asarray(b), "data")
    _, after = programs(fn, X, mesh=fc.make_mesh({"data": 2}))
    assert [e.primitive.name for e in after.check().equations] == ["pvary", "multiply", "add"]
    assert bits(fc.jit(fn, mesh=fc.make_mesh({"data": 2}), in_specs=P("data"), out_specs=P("data"))(X)) == bits(X + 15)


@pytest.mark.parametrize("case", ARRAYS_STAY)
def test_other_constants_stay_arrays(case):
    fn = ARRAYS_STAY[case]
    assert len(program(fn, X).constants) == 1
    for found, wanted in zip(fc.tree.leaves(run(fn, X)), fc.tree.leaves(fn(X)), strict=True):
        assert bits(found) == bits(wanted)


def test_a_gradient_captures_no_cotangents():
    x = np.ones((1024, 1024), np.float32)
    loss = lambda w, x: np.mean(np.tanh(x * w) ** 2)
    step = program(fc.value_and_grad(loss), np.float32(2), x)
    assert not step.constants
    grad = program(fc.grad(lambda x: np.sum(np.sin(x))), x)  # the cotangent is 1
    assert [e.primitive.name for e in grad.equations] == ["cos"]


ONES = {
    "1 x": (lambda x: -(1 * x), ["negative"]),
    "x ones": (lambda x: -(x * ones(8, 8)), ["negative"]),
    "x / 1": (lambda x: -(x / 1), ["negative"]),
    "a wider 1": (lambda x: -(x * np.float64(1)), ["multiply", "negative"]),
    "1 / x": (lambda x: -(1 / x), ["divide", "negative"]),
    "a larger one": (lambda x: -(x * ones(2, 1, 1)), ["multiply", "negative"]),
}


@pytest.mark.parametrize("case", ONES)
def test_factors_of_1_are_left_out(case):
    fn, equations = ONES[case]
    x = X.copy()
    x[0, :4] = -0.0, np.nan, -np.inf, 1e-40
    assert lowered(fn, x) == equations
    with np.errstate(all="ignore"):
        assert bits(run(fn, x)) == bits(fn(x))


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float64, np.int8, np.uint64])
def test_a_factor_of_1_of_other_dtypes(dtype):
    x = np.array([0.0, 1.0, 100.0, -0.0, 3.0]).astype(dtype)
    for fn in (lambda x: x * 1, lambda x: x * np.ones_like(x)):
        assert lowered(fn, x) == []
        assert bits(run(fn, x)) == bits(x)


def test_a_factor_of_1_of_complex_numbers_stays():
    assert lowered(lambda x: x * 1, X.astype(np.complex64)) == ["multiply"]


def test_the_result_of_a_factor_of_1_is_not_the_argument():
    x = X.copy()
    result = fc.jit(lambda x: x * 1)(x)
    x[:] = 0
    assert bits(result) == bits(X)


# ------------------------------------------------------------------ reductions of one element


COLUMN = np.tile(np.array([1, -0.0, 0, np.nan, -np.nan, np.inf, -3, 1e-40], np.float32), 512).reshape(4096, 1)
REDUCTIONS = {
    "sum": (lambda x: np.sum(x, axis=1), ["add", "reshape"]),
    "sum, kept": (lambda x: np.sum(x, axis=1, keepdims=True), ["add"]),
    "mean": (lambda x: np.mean(x, axis=-1), ["add", "reshape"]),
    "wider sum": (lambda x: np.sum(x, axis=1, dtype=np.float64), ["convert", "add", "reshape"]),
    "prod": (lambda x: -np.prod(x, axis=1), ["reshape", "negative"]),
    "max": (lambda x: -np.max(x, axis=1), ["reshape", "negative"]),
    "min, kept": (lambda x: -np.min(x, axis=1, keepdims=True), ["negative"]),
    "any": (lambda x: np.any(x, axis=1), ["convert", "reshape"]),
    "all": (lambda x: np.all(x, axis=1), ["convert", "reshape"]),
    "several": (lambda x: np.sum(x[:, None], axis=(1, 2)), ["getitem", "add", "reshape"]),
}


@pytest.mark.parametrize("case", REDUCTIONS)
def test_a_reduction_of_single_elements_is_a_reshape(case):
    fn, equations = REDUCTIONS[case]
    assert lowered(fn, COLUMN) == equations
    assert bits(run(fn, COLUMN)) == bits(fn(COLUMN))


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint16, np.int64, np.float16, bfloat16, np.float64, np.complex64])
@pytest.mark.parametrize("name", ["sum", "prod", "max", "any"])
def test_single_elements_of_every_dtype(name, dtype):
    x = np.array([[1], [0], [-0.0], [100]]).astype(dtype)
    if name == "max" and np.dtype(dtype).kind == "c":
        return
    function = getattr(np, name)
    for fn in (lambda x: function(x, axis=1), lambda x: function(x, axis=1, keepdims=True)):
        assert name == "sum" or not any(e.startswith("reduce") for e in lowered(fn, x))
        found, wanted = np.asarray(run(fn, x)), fn(x)
        assert (found.dtype, found.shape, bits(found)) == (wanted.dtype, wanted.shape, bits(wanted))


def test_other_reductions_stay():
    assert lowered(lambda x: np.sum(x, axis=0), COLUMN) == ["reduce_sum"]
    assert lowered(np.sum, COLUMN) == ["reduce_sum"]
    assert lowered(lambda x: np.sum(x, axis=1), COLUMN[:64]) == ["reduce_sum"]  # small: one call of NumPy takes less than two
    assert lowered(lambda x: np.argmax(x, axis=1), COLUMN) == ["argmax"]
    assert lowered(lambda x: np.max(x, axis=1), COLUMN[:0]) == ["reshape"]


@pytest.mark.parametrize("name", ["sum", "prod", "max", "mean"])
def test_gradients_of_single_elements(name):
    x = np.arange(1.0, 9.0).reshape(8, 1)
    loss = lambda x: np.sum(np.sin(getattr(np, name)(x, axis=1)))
    assert bits(run(fc.grad(loss), x)) == bits(np.cos(x))


# ------------------------------------------------------------------ shapes


CUBE = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
SHAPES = {
    "transposed twice": (lambda x: np.transpose(np.transpose(x, (1, 2, 0)), (1, 2, 0)), ["transpose"]),
    "transposed back": (lambda x: -np.transpose(np.transpose(x, (1, 2, 0)), (2, 0, 1)), ["negative"]),
    "transposed thrice": (lambda x: -x.T.T.T, ["transpose", "negative"]),
    "dimensions swapped twice": (lambda x: np.swapaxes(np.swapaxes(x, 0, 1), 1, 2), ["transpose"]),
    "not transposed": (lambda x: -np.transpose(x, (0, 1, 2)), ["negative"]),
    "reshaped twice": (lambda x: np.reshape(np.reshape(x, (6, 4)), (4, 6)), ["reshape"]),
    "reshaped back": (lambda x: -np.reshape(np.reshape(x, 24), (2, 3, 4)), ["negative"]),
    "not broadcast": (lambda x: -np.broadcast_to(x, x.shape), ["negative"]),
    "broadcast twice": (lambda x: np.broadcast_to(np.broadcast_to(x, (1, 2, 3, 4)), (5, 2, 3, 4)), ["broadcast_to"]),
    "broadcast another": (
        lambda x: np.broadcast_to(np.broadcast_to(x[0], (2, 3, 4)), (5, 2, 3, 4)),
        ["getitem", "broadcast_to"],
    ),
    "a sum with its dimension": (lambda x: np.reshape(np.sum(x, 1), (2, 1, 4)), ["reduce_sum"]),
    "a maximum without": (lambda x: np.reshape(np.max(x, 1, keepdims=True), (2, 4)), ["reduce_max"]),
    "a sum in between": (lambda x: -np.reshape(np.reshape(np.sum(x), (1, 1, 1)), ()), ["reduce_sum", "negative"]),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_are_given_once(case):
    fn, equations = SHAPES[case]
    assert lowered(fn, CUBE) == equations
    assert bits(run(fn, CUBE)) == bits(fn(CUBE))


SHAPES_STAY = {
    "a reshape that is read": (
        lambda x: (y := np.reshape(x.T, 24), np.reshape(y, (4, 6))),
        ["transpose", "reshape", "reshape"],
    ),
    "a sum that is read": (lambda x: (y := np.sum(x, 1), np.reshape(y, (2, 1, 4))), ["reduce_sum", "reshape"]),
    "a sum in another shape": (lambda x: np.reshape(np.sum(x, 1), (4, 2)), ["reduce_sum", "reshape"]),
    "a transpose of a reshape": (lambda x: np.reshape(x, (6, 4)).T, ["reshape", "transpose"]),
    "a sum that is read by another name": (
        lambda x: (np.reshape(np.sum(x, 1) * 1, (2, 1, 4)), np.sum(x, 1) * 1),
        ["reduce_sum", "reshape", "reduce_sum"],
    ),
}


@pytest.mark.parametrize("case", SHAPES_STAY)
def test_other_shapes_stay(case):
    fn, equations = SHAPES_STAY[case]
    traced: Any = fc.jit(fn)
    assert [e.primitive.name for e in simplify(traced.trace(CUBE).program).check().equations] == equations
    for found, wanted in zip(fc.tree.leaves(run(fn, CUBE)), fc.tree.leaves(fn(CUBE)), strict=True):
        assert bits(found) == bits(wanted)


def test_a_reduction_stays_where_it_is():
    """Later, its operand would live longer."""

    def fn(x):
        total = np.sum(np.sin(x), 1)
        rest = np.cos(x)
        return rest * np.reshape(total, (2, 1, 4))

    assert lowered(fn, CUBE) == ["sin", "reduce_sum", "cos", "multiply"]


def test_shapes_of_gradients_go():
    def layer_norm(x):
        centred = x - np.mean(x, -1, keepdims=True)
        return centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-5)

    step: Any = fc.jit(fc.grad(lambda x: np.sum(layer_norm(x) ** 3)))
    traced = step.trace(CUBE)
    assert [e.primitive.name for e in traced.program.equations].count("reshape") == 2
    assert "reshape" not in [e.primitive.name for e in traced.lower().program.equations]


# ------------------------------------------------------------------ a model


def block(p, x):
    """A block of a transformer, as a new user would write it: 2 heads, gelu with a cube."""

    def layer_norm(x):
        centred = x - np.mean(x, -1, keepdims=True)
        return centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-5)

    def heads(x):
        return np.transpose(np.reshape(x, (*x.shape[:2], 2, -1)), (0, 2, 1, 3))

    q, k, v = (heads(layer_norm(x) @ w) for w in p["qkv"])
    scores = np.exp(q @ np.transpose(k, (0, 1, 3, 2)) / 2)
    out = scores / np.sum(scores, -1, keepdims=True) @ v
    x = x + np.reshape(np.transpose(out, (0, 2, 1, 3)), x.shape)
    h = layer_norm(x) @ p["in"]
    return x + 0.5 * h * (1 + np.tanh(0.8 * (h + 0.044715 * h**3))) @ p["out"]


def test_the_gradient_of_a_transformer_block_has_less_to_do():
    rng = np.random.default_rng(0)
    values = lambda *shape: rng.normal(size=shape) / 4
    p = {"qkv": [values(8, 8) for _ in range(3)], "in": values(8, 32), "out": values(32, 8)}
    x = values(4, 6, 8)
    step: Any = fc.jit(fc.value_and_grad(lambda p, x: np.mean(block(p, x) ** 2), (0, 1)))
    traced = step.trace(p, x)
    counts = []
    for program in (traced.program, traced.lower().program):
        names = [e.primitive.name for e in program.equations]
        counts.append({name: names.count(name) for name in ("power", "where", "transpose", "reshape")})
        counts[-1]["constants"] = sum(value.size > 1 for _, value in program.constants)
    assert counts == [
        {"power": 2, "where": 1, "transpose": 24, "reshape": 32, "constants": 1},
        {"power": 0, "where": 0, "transpose": 20, "reshape": 18, "constants": 0},
    ]
    leaves: Any = (p, x)
    plain, _ = evaluate(traced.program, [value for _, value in traced.program.constants], fc.tree.leaves(leaves))
    for found, wanted in zip(fc.tree.leaves(step(p, x)), plain, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------ random programs


@st.composite
def functions_of_shapes(draw):
    """A function of an array, which transposes, reshapes, broadcasts and reduces it and its results."""
    steps = []
    shapes: list[tuple[int, ...]] = [(2, 3, 4)]
    for _ in range(draw(st.integers(1, 8))):
        source = draw(st.just(len(shapes) - 1) | st.integers(0, len(shapes) - 1))
        shape = shapes[source]
        kind = draw(
            st.sampled_from(["transpose", "transpose", "reshape", "reshape", "broadcast", "max", "times 1", "negative"])
        )
        new: Any = shape
        if kind == "transpose":
            new = tuple(draw(st.permutations(range(len(shape)))))
            shapes.append(tuple(shape[d] for d in new))
        elif kind == "reshape":
            new = (1, *draw(st.permutations(shape)))[draw(st.integers(0, 1)) :]
            shapes.append(new)
        elif kind == "broadcast":
            new = (*[1] * draw(st.integers(0, 1)), *(2 if n == 1 and draw(st.booleans()) else n for n in shape))
            shapes.append(new)
        elif kind == "max" and shape:
            new = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
            shapes.append(np.max(np.empty(shape), axis=new[0], keepdims=new[1]).shape)
        else:
            shapes.append(shape)
        steps.append((kind, source, new))

    def fn(x):
        values = [x]
        for kind, source, new in steps:
            x = values[source]
            if kind == "transpose":
                values.append(np.transpose(x, new))
            elif kind == "reshape":
                values.append(np.reshape(x, new))
            elif kind == "broadcast":
                values.append(np.broadcast_to(x, new))
            elif kind == "max" and x.shape:
                values.append(np.max(x, axis=new[0], keepdims=new[1]))
            else:
                values.append(x * 1 if kind == "times 1" else -x)
        return tuple(values[-2:])

    return fn


@given(functions_of_shapes())
def test_shapes_keep_every_element(fn):
    for found, wanted in zip(run(fn, CUBE), fn(CUBE), strict=True):
        assert np.asarray(found).shape == wanted.shape
        assert bits(found) == bits(wanted)


UNARY = (np.negative, np.square, np.sqrt, np.abs)
BINARY = (np.add, np.subtract, np.multiply, np.divide, np.maximum, np.copysign)


@st.composite
def functions_of_constants(draw):
    """A function of two arrays and constants, of which many have equal elements: exactly rounded operations."""
    steps = []
    for count in range(2, 2 + draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["unary", "binary", "constant", "where", "power"]))
        a, b = (draw(st.integers(0, count - 1)) for _ in range(2))
        value = draw(st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.0, np.inf]))
        shape = draw(st.sampled_from([(4, 3), (3,), (1, 3), (4, 1), (1, 1)]))
        constant = np.full(shape, value, np.float32)
        if draw(st.booleans()):
            constant.flat[-1] = draw(st.sampled_from([0.0, -0.0, 1.0]))
        unary, binary = draw(st.sampled_from(UNARY)), draw(st.sampled_from(BINARY))
        steps.append((kind, a, b, constant, unary, binary, draw(st.booleans())))

    def fn(*values):
        values = [*values]
        for kind, a, b, constant, unary, binary, swapped in steps:
            x, y = (constant, values[a]) if swapped else (values[a], constant)
            if kind == "unary":
                values.append(unary(values[a]))
            elif kind == "constant":
                values.append(binary(x, y))
            elif kind == "where":
                values.append(np.where(constant > 0, values[a], values[b]))
            elif kind == "power":
                values.append(np.power(values[a], 1))
            else:
                values.append(binary(values[a], values[b]))
        return tuple(values[2:])

    return fn


@given(functions_of_constants(), arrays(np.float32, (2, 4, 3), elements=st.floats(width=32)))
def test_numbers_in_place_of_arrays_change_no_bit(fn, xs):
    with np.errstate(all="ignore"):
        wanted = fn(*xs)
        for found, value in zip(run(fn, *xs), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(found), value)
            real = ~np.isnan(value)
            assert np.all(np.signbit(np.asarray(found))[real] == np.signbit(value)[real])
