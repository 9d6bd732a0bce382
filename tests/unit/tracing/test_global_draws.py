"""Draws from NumPy's global random state while a function is traced: warned of once, at the user's line."""

# ruff: noqa: NPY002  (the global state is what is tested)

import random
import threading
import warnings

import numpy as np
import pytest

import funccoll as fc

pytestmark = pytest.mark.covers("numpy")

X = np.ones(3)


@pytest.fixture(autouse=True)
def global_state():
    before = np.random.get_state()
    yield
    np.random.set_state(before)


def warned(call, *args):
    """The warnings that a call shows."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*args)
    return found


def noisy(x):
    shifted = x + 1
    return shifted * np.random.normal(size=x.shape)


def line_of(function, offset):
    return function.__code__.co_firstlineno + offset


def test_whole():
    (found,) = warned(fc.jit(noisy), X)
    assert found.category is fc.GlobalRandomWarning and (found.filename, found.lineno) == (__file__, line_of(noisy, 2))
    other = " (or another thread does)" if threading.active_count() > 1 else ""
    assert str(found.message) == (
        f"noisy draws from NumPy's global random state (np.random) while it is traced{other}: the numbers become constants, "
        "the same in every call. Pass a key, and draw with fc.random.normal(key, shape) and the like, or draw outside and pass "
        "the numbers as an argument."
    )


def test_once_for_a_function():
    step = fc.jit(noisy)
    assert len(warned(step, X)) == 1 and not warned(step, X) and not warned(step, np.ones(5))
    twice = fc.jit(lambda x: x + np.random.rand() + np.random.rand())
    assert len(warned(twice.lower, X)) == 1 and not warned(twice, X)


def test_in_a_loop_of_a_function_called_from_it():
    def body(carry, x):
        return carry * np.random.rand(), x

    (found,) = warned(fc.jit(lambda xs: fc.scan(body, 1.0, xs)), X)
    assert found.lineno == line_of(body, 1)
    (found,) = warned(fc.jit(fc.grad(lambda x: np.sum(noisy(x)))), X)
    assert found.lineno == line_of(noisy, 2)


def test_python_decides_by_a_draw():
    def dropped(x):
        return x if np.random.rand() < 2 else -x

    (found,) = warned(fc.jit(dropped), X)
    assert "dropped draws from" in str(found.message) and found.lineno == line_of(dropped, 0)


def test_an_error_has_the_line():
    with warnings.catch_warnings():
        warnings.simplefilter("error", fc.GlobalRandomWarning)
        with pytest.raises(fc.GlobalRandomWarning) as raised:
            fc.jit(noisy)(X)
    frames = [(f.path, f.lineno + 1) for f in raised.traceback]
    assert any(str(path) == __file__ and line == line_of(noisy, 2) for path, line in frames)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.rand(),
        lambda: np.random.seed(3),
        lambda: np.random.shuffle([1, 2, 3]),
        lambda: np.random.bytes(1),
        lambda: np.random.rand(624 * 312),
        lambda: np.random.choice(4),
        lambda: np.random.randint(9),
    ],
)
def test_what_moves_the_state(draw):
    def f(x):
        draw()
        return x * 2.0

    assert len(warned(fc.jit(f), X)) == 1


def test_what_is_no_mistake():
    key, generator = fc.random.key(0), np.random.default_rng(0)
    np.random.rand()  # before
    assert not warned(fc.jit(lambda x: x + fc.random.normal(key, x.shape)), X)
    assert not warned(fc.jit(lambda x: x + generator.normal() + random.random()), X)  # baked as well, and not to be seen
    assert not warned(fc.jit(lambda x: x + fc.pure_callback(lambda y: y * np.random.rand(), x, x)), X)
    with fc.debug.disable_jit():  # it draws anew in each call
        assert not warned(fc.jit(noisy), X)
    assert not warned(fc.grad(lambda x: np.sum(noisy(x))), X)


def test_another_generator_is_not_read_as_if_it_were_the_usual_one():
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(0))
        assert not warned(fc.jit(noisy), X)
    finally:
        np.random.set_bit_generator(usual)
