"""Refusals of NumPy functions: the expression that each says to write instead computes the same."""

import re

import numpy as np
import pytest

import funccoll as fc
from funccoll.errors import FunccollError, InPlaceError, MissingMethodError, UnsupportedError
from funccoll.ops.registry import INSTEAD
from tests.support.misuse import X, run

pytestmark = pytest.mark.covers("numpy")

A, B = np.array([3.0, 1.5, 2.5, 2.0]), np.array([2.5, 0.5, 3.0, 2.0])
K, J = np.array([3, 0, 1]), np.array([1, 0, 1])
TWO = lambda f, x, y: f(x, y)
CALLS = {
    # the NumPy function's call, x, y; n is 2
    "geomspace": (lambda f, x, y: f(x, y, 2), A, B),
    "ldexp": (TWO, A, K[[0, 1, 2, 0]]),
    "polyder": (lambda f, x, y: f(x), A, None),
    "polymul": (TWO, A, B),
    "ravel_multi_index": (lambda f, x, y: f((x, y), (4, 2)), K, J),
    "sort_complex": (lambda f, x, y: f(x), A + 1j * B, None),
    "union1d": (TWO, K[1:], J),
    "unravel_index": (lambda f, x, y: f(x, (4, 2)), K, None),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_an_expression_computes_what_the_function_does(name):
    call, *operands = CALLS[name]
    function = getattr(np, name)
    with pytest.raises(UnsupportedError, match=re.escape(f"Write {INSTEAD[name]} in its place.")):
        fc.jit(lambda x, y: call(function, x, y))(*operands)
    got = fc.jit(eval(f"lambda x, y: {INSTEAD[name]}", {"np": np, "fc": fc, "n": 2}))(*operands)
    expected = call(function, *operands)
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("function", [np.roots, np.poly, np.spacing, np.frexp, np.i0])
def test_a_function_that_is_only_spelled_alike_is_not_suggested(function):
    with pytest.raises(UnsupportedError, match=r"fc.supported_functions\(\) lists") as caught:
        run(function)
    assert str(caught.value).count("np.") == 1


TABLE = np.arange(6.0)


@pytest.mark.parametrize(
    ("wrong", "form", "right"),
    [
        (lambda x: np.array([x, x]), "fc.asarray([...]) in place of np.array([...])", lambda x: fc.asarray([x, x])),
        (lambda x: np.array([[x, 1.0], [x, x]]), "fc.asarray([...])", lambda x: fc.asarray([[x, 1.0], [x, x]])),
        (lambda x: np.full(3, x), "fc.full(shape, x) in place of np.full(shape, x)", lambda x: fc.full(3, x)),
        (lambda x: np.full((2, 2), x), "fc.full(shape, x)", lambda x: np.full((2, 2), x, like=x)),
    ],
)
def test_what_numpy_cannot_dispatch_names_its_form(wrong, form, right):
    with pytest.raises(FunccollError, match=re.escape(form)):
        fc.jit(wrong)(2.5)
    np.testing.assert_array_equal(fc.jit(right)(2.5), wrong(2.5))


@pytest.mark.parametrize(
    ("wrong", "form", "right"),
    [
        (lambda i: TABLE[i], "fc.asarray(a)[i] in place of a[i]", lambda i: fc.asarray(TABLE)[i]),
        (lambda i: np.take(TABLE, i), "np.take(fc.asarray(a), i)", lambda i: np.take(fc.asarray(TABLE), i)),
    ],
)
def test_a_traced_index_of_a_constant_names_its_form(wrong, form, right):
    with pytest.raises(FunccollError, match=re.escape(form)):
        fc.jit(wrong)(np.array([3, 0]))
    np.testing.assert_array_equal(fc.jit(right)(np.array([3, 0])), wrong(np.array([3, 0])))


def test_a_method_that_works_in_place_names_the_function():
    with pytest.raises(MissingMethodError, match=re.escape("Use np.sort(x)")):
        fc.jit(lambda x: x.sort())(A)
    with pytest.raises(UnsupportedError, match=re.escape("fc.unique(x, size=n)")):
        fc.jit(np.unique)(A)
    with pytest.raises(InPlaceError, match=re.escape("x = fc.at(x)[index].max(value)")):
        fc.jit(lambda x: np.maximum.at(x, 0, 1.0))(A)
    with pytest.raises(UnsupportedError, match=re.escape("np.add, np.multiply, np.maximum and np.minimum can.")):
        fc.jit(np.logaddexp.accumulate)(A)
    with pytest.raises(UnsupportedError, match=r"np\.add\.reduceat cannot be traced"):
        fc.jit(lambda x: np.add.reduceat(x, [0, 2]))(A)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("torch.relu", marks=pytest.mark.slow),
        "jax.numpy.sum",
        "jax.nn.relu",
        "str.join",
    ],
)
def test_errors_of_other_libraries_functions_say_what_takes_a_traced_array(name):
    """Their own words name the class of traced arrays alone.

    Not among the tests of tracing: to import JAX takes a second, and `make test-fast` runs those.
    """
    module, _, function = name.rpartition(".")
    found = getattr(str if module == "str" else pytest.importorskip(module), function)
    f = fc.jit(lambda x: found("", [x]) if module == "str" else found(x))
    for call in (lambda: f(X), lambda: fc.jit(fc.grad(f))(X), lambda: fc.vmap(f)(X)):
        with pytest.raises(TypeError, match="Tracer") as caught:
            call()
        notes = [note for note in caught.value.__notes__ if "JAX" not in note]
        assert len(notes) == 2 and "np.* functions" in notes[0] and "(torch.*, jax.numpy.*) do not." in notes[0]
        assert notes[1] == f"  at {__file__}:{f.fn.__code__.co_firstlineno} in <lambda>"
