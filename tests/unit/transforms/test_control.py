"""Loops and branches: values and gradients are JAX's, eager and compiled ones have the same bits, bad input is refused."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import (
    DTypeError,
    FunccollError,
    PytreeError,
    ShapeError,
    TraceError,
    UnsupportedError,
    VaryingError,
)
from tests.support.cases import control_cases
from tests.support.groups import in_groups
from tests.support.refused_loops import refused

pytestmark = pytest.mark.covers("control-flow")

OURS = SimpleNamespace(
    scan=fc.scan,
    while_loop=fc.while_loop,
    fori_loop=fc.fori_loop,
    cond=fc.cond,
    switch=fc.switch,
    grad=fc.grad,
    jvp=fc.jvp,
    vmap=fc.vmap,
    asarray=fc.asarray,
)
ONE = fc.make_mesh({"d": 1})
TWO = fc.make_mesh({"d": 2})
X = np.arange(3.0)
ALL = {**control_cases.CASES, **control_cases.FORWARD}


def of_arguments(name):
    """The case as a function of its arguments, and these."""
    fn, arguments = ALL[name]
    return (lambda *args: fn(np, OURS, *args)), arguments


def loss(fn):
    """A scalar of the floating-point results that depends on each of their elements."""

    def total(*args):
        leaves = fc.tree.leaves(fn(*args))
        return sum((x * np.cos(np.arange(x.size) + 0.5).reshape(x.shape)).sum() for x in leaves if x.dtype.kind == "f")

    return total


def bits(tree):
    return [np.ascontiguousarray(np.asarray(x)).tobytes() for x in fc.tree.leaves(tree)]


@pytest.fixture(scope="module")
def jax_results():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    import jax
    from jax import lax

    def find(name):
        fn, arguments = ALL[name]
        theirs = SimpleNamespace(
            scan=lax.scan,
            while_loop=lax.while_loop,
            fori_loop=lax.fori_loop,
            cond=lax.cond,
            switch=lax.switch,
            grad=jax.grad,
            jvp=jax.jvp,
            vmap=jax.vmap,
            asarray=jax.numpy.asarray,
        )
        of = lambda *args: fn(jax.numpy, theirs, *args)

        def total(*args):
            leaves = jax.tree.leaves(of(*args))
            weigh = lambda x: (x * np.cos(np.arange(x.size) + 0.5).reshape(x.shape)).sum()
            return sum(weigh(x) for x in leaves if x.dtype.kind == "f")

        with jax.enable_x64(True):
            arguments = list(map(jax.numpy.asarray, arguments))
            argnums = tuple(range(len(arguments)))
            gradient = jax.grad(total, argnums) if name in control_cases.CASES else lambda *_: ()
            return jax.tree.map(np.asarray, jax.jit(lambda *args: (of(*args), gradient(*args)))(*arguments))

    return find


QUICK = ("recurrent_network", "nested_scans", "branch_taken", "switch_1", "collatz")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ALL])
def test_values_and_gradients_are_those_of_jax(name, jax_results):
    fn, arguments = of_arguments(name)
    wanted, gradients = jax_results(name)
    for found in (fn(*arguments), fc.jit(fn, mesh=ONE, in_specs=P(), out_specs=P())(*arguments)):
        assert fc.tree.structure(found) == fc.tree.structure(wanted)
        for mine, theirs in zip(fc.tree.leaves(found), fc.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-10, atol=1e-12)
    if name in control_cases.CASES:
        gradient = fc.grad(loss(fn), tuple(range(len(arguments))))
        for found in (gradient(*arguments), fc.jit(gradient, mesh=ONE, in_specs=P(), out_specs=P())(*arguments)):
            for mine, theirs in zip(found, gradients, strict=True):
                np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("numpy_compute")
@in_groups("name", ALL)
def test_compiled_loops_have_the_bits_of_eager_ones(name):
    fn, arguments = of_arguments(name)
    both = fn if name in control_cases.FORWARD else fc.value_and_grad(loss(fn), tuple(range(len(arguments))))
    assert bits(fc.jit(both, mesh=ONE, in_specs=P(), out_specs=P())(*arguments)) == bits(both(*arguments))


@in_groups("name", ALL)
def test_a_batch_is_a_loop_over_its_elements(name):
    fn, arguments = of_arguments(name)
    elements = [[np.asarray(x * (1 + n / 4) if x.dtype.kind == "f" else x + n) for x in arguments] for n in range(3)]
    batch = [np.stack(each) for each in zip(*elements, strict=True)]
    wanted = [fc.tree.leaves(fn(*element)) for element in elements]
    for found in (fc.vmap(fn)(*batch), fc.jit(fc.vmap(fn), mesh=ONE, in_specs=P(), out_specs=P())(*batch)):
        for mine, each in zip(fc.tree.leaves(found), zip(*wanted, strict=True), strict=True):
            np.testing.assert_allclose(np.asarray(mine), np.stack(each), rtol=1e-10, atol=1e-12)


@in_groups("name", control_cases.CASES)
def test_derivatives_forwards_and_backwards_agree(name):
    fn, arguments = of_arguments(name)
    random = np.random.default_rng(3)
    tangents = [random.normal(size=x.shape) for x in arguments]
    _, forwards = fc.jvp(loss(fn), arguments, tangents)
    gradients = fc.grad(loss(fn), tuple(range(len(arguments))))(*arguments)
    backwards = sum(np.sum(g * t) for g, t in zip(gradients, tangents, strict=True))
    np.testing.assert_allclose(forwards, backwards, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["doubling", "newton", "power_iteration", "while_in_a_scan"])
def test_while_loops_have_forward_derivatives(name):
    fn, arguments = of_arguments(name)
    tangents = [np.cos(np.arange(x.size) + 1.0).reshape(x.shape) for x in arguments]
    step = 1e-6
    ends = [loss(fn)(*(x + s * step * t for x, t in zip(arguments, tangents, strict=True))) for s in (1, -1)]
    _, tangent = fc.jvp(loss(fn), arguments, tangents)
    np.testing.assert_allclose(tangent, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-7)


def test_a_scan_is_the_unrolled_loop():
    xs, w = control_cases.ROWS, control_cases.MATRIX

    def unrolled(w, xs):
        h = np.zeros(4)
        for t in range(5):
            h = np.tanh(w @ h + xs[t])
        return h

    def scanned(w, xs):
        return fc.scan(lambda h, x: (np.tanh(w @ h + x), None), np.zeros(4), xs)[0]

    assert bits(scanned(w, xs)) == bits(unrolled(w, xs))


def test_a_program_is_as_long_for_many_iterations_as_for_few():
    def program(length):
        gradient = fc.grad(lambda x: fc.scan(lambda c, _: (np.sin(c), c), x, None, length)[0])
        step = fc.jit(gradient, mesh=ONE, in_specs=P(), out_specs=P())
        return sum(1 for _ in step.lower(1.0).program.executed())

    assert program(3) == program(30_000)


# ---------------------------------------------------------------- Python scalars


def test_python_scalars_take_the_dtype_of_what_they_meet():
    xs = np.ones(3, np.float32)
    total, _ = fc.scan(lambda c, x: (c + x, None), 0.0, xs)
    count, _ = fc.scan(lambda c, x: (c + 1, None), 0, xs)
    assert total.dtype == np.float32 and count == 3
    step = fc.jit(lambda w: w * fc.scan(lambda c, _: (c * 0.5, None), 1.0, None, 2)[0], mesh=ONE, in_specs=P(), out_specs=P())
    assert step(xs).dtype == np.float32 and np.asarray(step(xs)).tolist() == [0.25] * 3
    assert fc.cond(np.bool_(True), lambda: np.float32(1), lambda: 2.0).dtype == np.float32
    step = lambda c, x: ({"a": c["b"], "b": c["b"] + x}, None)  # an integer becomes a float, and then an array
    assert fc.scan(step, {"a": 0, "b": 0.0}, xs)[0]["a"].dtype == np.float32


def test_the_number_of_an_iteration_is_a_python_integer():
    """So it does not widen float32, with bounds of any origin; a bound with a dtype gives it that dtype."""
    x = np.ones(2, np.float32)
    loop = lambda upper: fc.fori_loop(0, upper, lambda i, v: v * 0.5 + i, x)
    wanted = ((x * 0.5) * 0.5 + 1) * 0.5 + 2
    for found in (loop(3), fc.jit(loop)(3)):
        assert found.dtype == np.float32 and bits(found) == bits(wanted.astype(np.float32))
    assert fc.fori_loop(np.int32(0), np.int32(3), lambda i, v: i, np.int32(0)).dtype == np.int32


def test_results_of_branches_that_are_python_scalars():
    """They stay scalars where all are, and take another branch's dtype only as they would in arithmetic."""
    x = np.ones(2, np.float32)
    choose = fc.jit(lambda x, n: x * fc.switch(n, [lambda: 1.0, lambda: 2, lambda: 0.5]))
    assert [np.asarray(choose(x, n)).tolist() for n in range(3)] == [[1, 1], [2, 2], [0.5, 0.5]]
    assert choose(x, 0).dtype == np.float32
    assert fc.cond(False, lambda: 1, lambda: 2.5) == 2.5


# ---------------------------------------------------------------- bad input

ROWS = control_cases.ROWS


@in_groups(
    ("error", "match", "call"),
    [
        (
            ShapeError,
            r"the carry enters <lambda> as f64\[4\] and leaves it as f64\[8\]",
            lambda: fc.scan(lambda c, x: (np.concatenate([c, x]), None), np.zeros(4), ROWS),
        ),
        (
            DTypeError,
            r"the carry\['n'\] enters <lambda> as f64\[\] and leaves it as f32\[\].*astype\(np.float64\)",
            lambda: fc.scan(lambda c, x: ({"n": c["n"].astype(np.float32)}, None), {"n": np.float64(0)}, ROWS),
        ),
        (
            PytreeError,
            r"and init must have one structure: carry .*'a'.*, and init has",
            lambda: fc.scan(lambda c, x: ({"a": c}, None), np.zeros(4), ROWS),
        ),
        (TraceError, r"<lambda> must return \(carry, y\), not", lambda: fc.scan(lambda c, x: c, np.zeros(4), ROWS)),
        (
            ShapeError,
            r"first dimensions differ: xs\['a'\] has 5, xs\['b'\] has 4",
            lambda: fc.scan(lambda c, x: (c, None), 0.0, {"a": ROWS, "b": ROWS[1:]}),
        ),
        (ShapeError, r"first dimensions differ: xs has 5, length is 3", lambda: fc.scan(lambda c, x: (c, None), 0.0, ROWS, 3)),
        (ShapeError, r"xs is a scalar", lambda: fc.scan(lambda c, x: (c, None), 0.0, 3.0)),
        (TraceError, r"xs is None. Pass length=", lambda: fc.scan(lambda c, x: (c, None), 0.0)),
        (TraceError, r"length=-1", lambda: fc.scan(lambda c, x: (c, None), 0.0, None, -1)),
        (TraceError, r"scan takes a function, not 3", lambda: fc.scan(3, 0.0, ROWS)),
        (
            ShapeError,
            r"cond: result\[0\] is f64\[4\] of <lambda> and f64\[3\] of <lambda>",
            lambda: fc.cond(True, lambda x: (x[0],), lambda x: (x[0, 1:],), ROWS),
        ),
        (
            DTypeError,
            r"cond: result is f64\[5,4\] of <lambda> and i64\[5,4\] of <lambda>",
            lambda: fc.cond(True, lambda x: x, lambda x: x.astype(int), ROWS),
        ),
        (DTypeError, r"cond: result is i32\[\] of <lambda> and f64", lambda: fc.cond(True, lambda: np.int32(1), lambda: 2.5)),
        (DTypeError, r"cond: result is bool\[\] of <lambda> and i64\[\] of", lambda: fc.cond(True, lambda: True, lambda: 2)),
        (DTypeError, r"fori_loop: the carry enters", lambda: fc.fori_loop(0, 3, lambda i, v: v + 0.5, np.int64(1))),
        (TraceError, r"branches is a list or tuple of functions, not 3", lambda: fc.switch(0, 3)),
        (
            PytreeError,
            "branches must return one structure: result of <lambda> is a tuple of 1",
            lambda: fc.cond(True, lambda x: x, lambda x: (x,), ROWS),
        ),
        (ShapeError, r"predicate has type bool\[4\], and must be a scalar", lambda: fc.cond(ROWS[0] > 0, lambda: 1, lambda: 2)),
        (PytreeError, r"must return one boolean", lambda: fc.while_loop(lambda c: (c > 0, c), lambda c: c, 1.0)),
        (TraceError, r"there are no branches", lambda: fc.switch(0, [])),
        (DTypeError, r"the index has type f64\[\]", lambda: fc.switch(0.5, [lambda: 1])),
        (DTypeError, r"upper has type f64\[\]", lambda: fc.fori_loop(0, 2.5, lambda i, c: c, 1)),
        (
            UnsupportedError,
            r"while_loop has no reverse-mode gradient.*fc.scan",
            lambda: fc.grad(lambda x: fc.while_loop(lambda c: c < 10, lambda c: c * 2, x))(1.0),
        ),
    ],
)
def test_bad_input_is_refused(error, match, call):
    refused(error, match, call)


def test_a_gradient_past_a_while_loop_needs_none_of_it():
    fn = lambda x: x * fc.stop_gradient(fc.while_loop(lambda c: c < 10, lambda c: c * 2, fc.stop_gradient(x)))
    assert fc.grad(fn)(1.0) == 16


REDUCED = lambda x: fc.pvary(fc.all_reduce(x, "d"), "d")


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("cond whose predicate", lambda x: fc.cond(fc.axis_index("d") == 0, REDUCED, lambda x: x, x)),
        ("switch whose index", lambda x: fc.switch(fc.axis_index("d"), [REDUCED, lambda x: x], x)),
        ("while_loop whose condition", lambda x: fc.while_loop(lambda c: c[0] < 3, lambda c: c + REDUCED(c), x)),
    ],
)
def test_collectives_are_refused_where_devices_decide_differently(what, call):
    step = fc.jit(call, mesh=TWO, in_specs=P("d"), out_specs=P("d"))
    refused(VaryingError, f"over axis 'd' inside a {what} varies over it", step.lower, np.ones(4))


def test_an_exception_in_a_loop_names_the_line():
    def program(x):
        return fc.scan(lambda c, i: (c + x[i], None), 0.0, np.array([0, 1, 9]))[0]

    with pytest.raises(IndexError) as caught:
        fc.jit(program, mesh=ONE, in_specs=P(), out_specs=P())(np.ones(3))
    assert any("in <lambda>" in note and __file__ in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fc.scan(lambda c, x: (c, x), 0.0, X, reverse="no"), "reverse='no' must be True or False"),
        (lambda: fc.scan(lambda c, x: (c, x), 0.0, X, unroll=0), "unroll=0 must be a positive integer"),
        (lambda: fc.cond(False, lambda: np.uint8(1), lambda: 300), "cond: the Python integer 300 does not fit uint8"),
        (lambda: fc.scan(lambda c, x: (np.uint8(1), c), -1, X), "scan: the Python integer -1 does not fit uint8"),
    ],
)
def test_values_that_would_be_taken_for_others(call, words):
    for run in (lambda: call(), lambda: fc.jit(call)()):
        with pytest.raises(FunccollError, match=re.escape(words)):
            run()


def test_python_integers_that_fit():
    assert fc.cond(False, lambda: np.uint8(1), lambda: 255) == np.uint8(255)
    carry, ys = fc.scan(lambda c, x: (np.uint8(1), c), 200, X)
    assert (carry, ys.dtype, ys[0]) == (1, np.uint8, 200)
    assert fc.scan(lambda c, x: (c + x, x), 0.0, X, unroll=True)[0] == fc.scan(lambda c, x: (c + x, x), 0.0, X, unroll=7)[0]


def test_what_is_not_an_array_is_named():
    for call, words in (
        (lambda: fc.scan(lambda c, x: (c, x), {"a": "text"}, X), "scan: init['a'] is 'text' of type str: a traced"),
        (lambda: fc.cond(True, lambda x: x, lambda x: x, "b"), "cond: operands[0] is 'b' of type str"),
        (lambda: fc.scan(lambda c, x: (c, [x, "y"]), 0.0, X), "returned 'y' of type str at result[1]"),
    ):
        with pytest.raises(TraceError, match=re.escape(words)):
            call()
