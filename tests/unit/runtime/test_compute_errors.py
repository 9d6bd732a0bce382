"""An exception of compiled code keeps its type and text, and its notes name the user's line that computed it."""

import traceback

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from tests.support.misuse import LINE, X


def note_of(kind, jitted, *args):
    """The note of the exception `kind` that a call raises, as (line within the function's source, its name)."""
    with pytest.raises(kind) as caught:
        jitted(*args)
    assert type(caught.value) is kind
    notes = caught.value.__notes__
    assert len(notes) == 1
    assert notes[0] in "".join(traceback.format_exception(caught.value)).splitlines()
    where, _, function = notes[0].partition(" in ")
    file, _, line = where.rpartition(":")
    assert file == f"  at {__file__}"
    return int(line) - jitted.fn.__code__.co_firstlineno, function


def picked(x, i):
    y = x + 1
    z = np.take(y, i, axis=0)
    return z * 2


def reduced_then_picked(x, i):
    total = fc.all_reduce(x, "data")
    shifted = x - total
    return shifted[i]


def power(x, n):
    return (x * 2).astype(np.int64) ** n


@pytest.mark.parametrize("options", [{}, {"mesh": LINE, "in_specs": (P("data"), P()), "out_specs": P("data")}])
def test_a_line_of_compute_is_named(options):
    far, negative = np.array([8]), np.array(-1)
    assert note_of(IndexError, fc.jit(picked, **options), X, far) == (2, "picked")
    assert note_of(ValueError, fc.jit(power, **options), X, negative) == (1, "power")
    if options:
        assert note_of(IndexError, fc.jit(reduced_then_picked, **options), X, far) == (3, "reduced_then_picked")


def test_a_line_is_named_on_every_way_into_a_program():
    i = np.array([0])
    compiled = fc.jit(picked)
    ready = fc.jit(lambda x: x)(X), fc.jit(lambda i: i)(i)
    compiled(X, i)
    compiled(*ready)  # arguments are known to fit from here on
    assert note_of(IndexError, compiled, X, np.array([8])) == (2, "picked")
    assert note_of(IndexError, compiled, ready[0], fc.jit(lambda i: i)(i + 8)) == (2, "picked")


def test_the_gradient_names_the_line_of_the_function():
    def loss(x, i):
        return np.sum(picked(x, i))

    jitted = fc.jit(fc.grad(loss))
    jitted.fn = picked
    assert note_of(IndexError, jitted, X, np.array([8])) == (2, "picked")


def test_an_exception_before_the_program_runs_has_no_note():
    with pytest.raises(TypeError) as caught:
        fc.jit(lambda x, y: x)(X)
    assert not hasattr(caught.value, "__notes__")
