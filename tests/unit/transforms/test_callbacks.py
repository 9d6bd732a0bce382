"""pure_callback and primitives of the user's own."""

import functools

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.core.interpreter import bind
from funccoll.errors import MeshError, PytreeError, ShapeError, TraceError
from funccoll.transforms.callbacks import pure_callback_p

pytestmark = pytest.mark.covers("checkpoint")

MESH = fc.make_mesh({"data": 4, "model": 2})
X = np.arange(8.0)
F64 = np.dtype(np.float64)


def jitted(fn, in_specs=P("data"), out_specs=P("data")):
    return fc.jit(fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs)


# ---------------------------------------------------------------- pure_callback


def test_it_is_called_once_for_each_copy_in_the_order_of_the_devices():
    calls = []

    def double(x):
        calls.append(x)
        return 2 * x

    fn = jitted(lambda x: fc.pure_callback(double, x, x) + 1)
    assert np.array_equal(fn(X), 2 * X + 1)
    # Four copies on eight devices. What was kept is the function's own.
    assert [c.tolist() for c in calls] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    calls.clear()
    shared = jitted(lambda x: fc.pure_callback(double, x, x) + fc.pure_callback(double, x, x), P(), P())
    assert np.array_equal(shared(X), 4 * X) and len(calls) == 1
    unused = jitted(lambda x: (fc.pure_callback(double, x, x), x)[1])
    assert np.array_equal(unused(X), X) and len(calls) == 1


def test_pytrees_and_types():
    def fn(tree, n):
        return {"sum": np.sum(tree["x"]) + n, "rows": (np.stack([tree["x"]] * 2).astype(np.float32),)}

    types = {"sum": fc.ArrayType((), F64), "rows": (np.empty((2, 8), np.float32),)}
    call = lambda x: fc.pure_callback(fn, types, {"x": x}, 3)
    for found in (call(X), jitted(call, P(), P())(X)):
        assert float(found["sum"]) == 31 and np.array_equal(found["rows"][0], [X, X])


def test_the_program_and_the_function_keep_their_memory_apart():
    kept = np.ones(8)

    def fn(x):
        x += 1  # its own copy
        return kept

    found = jitted(lambda x: (np.square(fc.pure_callback(fn, x, x) + 1.0), x), P(), P())(X)
    assert np.array_equal(found[0], np.full(8, 4.0)) and np.array_equal(found[1], np.arange(8.0))
    assert np.array_equal(kept, np.ones(8)) and np.array_equal(X, np.arange(8.0))


@pytest.mark.parametrize(
    ("result", "types", "error", "match"),
    [
        (np.ones(3), fc.ArrayType((2,), F64), ShapeError, r"float64\[3\], and float64\[2\] was stated\. Convert it in callee"),
        (np.ones(2, np.float32), fc.ArrayType((2,), F64), ShapeError, r"of type float32\[2\], and float64\[2\] was stated"),
        ([np.ones(2)], fc.ArrayType((2,), F64), PytreeError, "result is a list of 1, and result_types has one value"),
        ((np.ones(2), 1), (fc.ArrayType((2,), F64), fc.ArrayType((), F64)), ShapeError, r"result 1 of type int64\[\]"),
    ],
)
def test_results_of_another_type(result, types, error, match):
    def callee(x):
        return result

    fn = jitted(lambda x: fc.pure_callback(callee, types, x), P(), P())
    with pytest.raises(error, match=match) as caught:
        fn(X)
    assert any("test_callbacks.py" in note and "in <lambda>" in note for note in caught.value.__notes__)


def test_an_exception_has_the_line_of_the_call():
    def callee(x):
        if x[0] > 3:
            raise KeyError("what the function raised")
        return x

    fn = jitted(lambda x: fc.pure_callback(callee, x, x))
    with pytest.raises(KeyError, match="what the function raised") as caught:
        fn(X)
    line = test_an_exception_has_the_line_of_the_call.__code__.co_firstlineno + 6
    assert f"test_callbacks.py:{line} in <lambda>" in "".join(caught.value.__notes__)


def test_collectives_inside_are_refused():
    fn = jitted(lambda x: fc.pure_callback(lambda y: fc.all_reduce(y, "data"), x, x))
    with pytest.raises(MeshError, match="all_reduce over 'data' was called outside a mesh"):
        fn(X)


def test_gradients_are_refused_and_custom_vjp_gives_one():
    call = lambda x: fc.pure_callback(np.sin, x, x)
    for run in (lambda f: f, lambda f: jitted(f, P(), P())):
        for derivative in (fc.grad(lambda x: np.sum(call(x))), lambda x: fc.jvp(call, (x,), (x,))):
            with pytest.raises(TraceError, match=r"of sin has no derivative.*fc.debug.print or fc.debug.callback.*custom_vjp"):
                run(derivative)(X)
        count = lambda x: x * fc.pure_callback(np.count_nonzero, fc.ArrayType((), np.dtype(np.int64)), x)
        assert np.array_equal(run(lambda x: fc.jvp(count, (x,), (x,))[1])(X), 7 * X)  # integers have no tangents
        wrapped = fc.custom_vjp(call)
        wrapped.defvjp(lambda x: (call(x), x), lambda x, ct: (ct * np.cos(x),))
        assert np.array_equal(run(fc.grad(lambda x: np.sum(wrapped(x))))(X), np.cos(X))
        assert np.array_equal(run(lambda x: fc.jvp(wrapped, (x,), (X,))[1])(X), X * np.cos(X))
        assert np.array_equal(run(fc.grad(lambda x: np.sum(x * call(fc.stop_gradient(x)))))(X), np.sin(X))


def test_batches_are_loops():
    x = np.arange(6.0).reshape(3, 2)
    assert pure_callback_p.batch is not None
    _, tree = fc.tree.flatten((1, 2))
    params = {"fn": lambda x, y: x + y, "types": (fc.ArrayType((2,), F64),), "in_tree": tree, "out_tree": fc.tree.structure(1)}
    (found,) = pure_callback_p.batch(pure_callback_p, [x, x[0]], [True, False], 3, **params)
    assert np.array_equal(found, x + x[0])


def test_bad_arguments_of_a_callback():
    with pytest.raises(TraceError, match=r"pure_callback takes a function, not 3"):
        fc.pure_callback(3, X, X)
    with pytest.raises(TraceError, match=r"pure_callback of sin: a result type is 'f8': a type has a shape and a dtype"):
        fc.pure_callback(np.sin, "f8", X)


# ---------------------------------------------------------------- custom_primitive


def example():
    """The example of the documentation."""

    def softsign_types(x):
        return x

    return fc.custom_primitive(
        "softsign",
        lambda x: x / (1 + abs(x)),
        types=softsign_types,
        vjp=lambda ct, inputs, output: [ct * np.square(1 - np.abs(output))],
        batch="elementwise",
    )


def test_the_example_is_the_documentations():
    import doctest
    import inspect

    examples = doctest.DocTestParser().get_examples(fc.custom_primitive.__doc__)
    source = inspect.getsource(example)
    for line in "".join(one.source for one in examples if not one.want).splitlines():
        assert line.strip().removeprefix("softsign = ") in source, line


def test_a_primitive_in_ten_lines():
    softsign = example()
    plain = lambda x: x / (1 + np.abs(x))
    x = X - 3.5
    assert np.array_equal(softsign(x), plain(x)) and softsign.__name__ == "softsign"

    def step(x):
        y = softsign(x) + softsign(x)
        return fc.all_reduce(np.sum(np.square(y)), "data")

    run = jitted(fc.value_and_grad(step), P("data"), (P(), P("data")))
    value, gradient = run(x)
    assert float(value) == pytest.approx(np.sum(np.square(2 * plain(x))))
    assert np.allclose(gradient, 8 * plain(x) / np.square(1 + np.abs(x)), rtol=1e-13)
    named = [e.primitive.name for e in run.trace(x).lower().program.equations]
    assert named.count("softsign") == 1
    second = fc.grad(lambda x: np.sum(fc.grad(lambda x: np.sum(softsign(x)))(x)))(x)
    assert np.allclose(second, -2 * np.sign(x) / (1 + np.abs(x)) ** 3, rtol=1e-13)
    rule = fc.core.ir.primitive_named("softsign").batch
    primitive = fc.core.ir.primitive_named("softsign")
    assert np.array_equal(rule(primitive, [x.reshape(2, 4)], [True], 2), plain(x.reshape(2, 4)))


def several(name="two_parts", **options):
    def types(x, *, at):
        if x.ndim != 1 or not 0 < at < x.shape[0]:
            raise ShapeError(f"two_parts: a vector of more than {at} elements is needed, not {x}.")
        return fc.ArrayType((at,), x.dtype), fc.ArrayType((x.shape[0] - at,), x.dtype)

    def vjp(cts, inputs, outputs, *, at):
        cts = [np.zeros(o.shape, o.dtype) if ct is None else ct for ct, o in zip(cts, outputs, strict=True)]
        return [np.concatenate(cts)]

    return fc.custom_primitive(name, lambda x, *, at: (x[:at], x[at:]), types=types, vjp=vjp, multiple=True, **options)


def test_several_results_and_parameters():
    parts = several()
    assert [p.tolist() for p in parts(X[:3], at=1)] == [[0], [1, 2]]
    fn = lambda x: np.sum(parts(x, at=3)[1] ** 2)
    for run in (lambda f: f, lambda f: jitted(f, P(), P())):
        assert np.array_equal(run(fc.grad(fn))(X), np.where(X < 3, 0, 2 * X))
        with pytest.raises(ShapeError, match=r"more than 9 elements is needed, not f64\[8\]"):
            run(lambda x: parts(x, at=9)[0])(X)
    by_element = fc.core.ir.primitive_named("two_parts")
    found = by_element.batch(by_element, [X.reshape(2, 4)], [True], 2, at=1)
    assert [f.tolist() for f in found] == [[[0], [4]], [[1, 2, 3], [5, 6, 7]]]
    own = several("two_parts_of_a_batch", batch=lambda values, batched, size, *, at: [values[0][:, :at], values[0][:, at:]])
    assert own(X, at=4)[0].tolist() == [0, 1, 2, 3]
    rule = fc.core.ir.primitive_named("two_parts_of_a_batch")
    assert np.array_equal(rule.batch(rule, [X.reshape(2, 4)], [True], 2, at=1)[1], X.reshape(2, 4)[:, 1:])


def test_a_primitive_without_a_gradient():
    silent = fc.custom_primitive("silent", np.sin, types=lambda x: x)
    with pytest.raises(TraceError, match=r"silent has no derivative: define it with custom_primitive\(.*vjp=.* or jvp="):
        fc.grad(lambda x: np.sum(silent(x)))(X)


def test_either_rule_gives_derivatives_in_both_modes():
    """A product and a sum of an array and an integer's worth of it, from its gradient and from its forward derivative."""
    infer = lambda x, y, n: (x, y)
    compute = lambda x, y, n: (x * y, x + n * y)
    vjp = lambda cts, inputs, outs: (lambda x, y, n, a, b: [a * y + b, a * x + n * b, None])(*inputs, *map(filled, cts, outs))
    jvp = lambda ts, inputs, outs: [ts[0] * inputs[1] + inputs[0] * ts[1], ts[0] + inputs[2] * ts[1]]
    filled = lambda ct, out: np.zeros_like(out) if ct is None else ct
    rng = np.random.default_rng(2)
    x, y, u, v = rng.normal(size=(4, 3))
    for rules in ({"vjp": vjp}, {"jvp": jvp}, {"vjp": vjp, "jvp": jvp}):
        both = fc.custom_primitive("both", compute, types=infer, multiple=True, **rules)
        for run in (lambda f: f, lambda f: jitted(f, P(), P())):
            _, tangents = run(lambda x, y: fc.jvp(lambda x, y: both(x, y, 2), (x, y), (u, v)))(x, y)
            assert np.allclose(tangents[0], u * y + x * v) and np.allclose(tangents[1], u + 2 * v)
            assert np.allclose(run(lambda y: fc.jvp(lambda y: both(x, y, 2)[0], (y,), (v,))[1])(y), x * v)
            gx, gy = run(fc.grad(lambda x, y: np.sum(both(x, y, 2)[0] * u), (0, 1)))(x, y)
            assert np.allclose(gx, u * y) and np.allclose(gy, u * x)
            found = run(fc.hessian(lambda x: np.sum(both(x, x, 2)[0] * u)))(x)
            assert np.allclose(found, 2 * np.diag(u))


@pytest.mark.usefixtures("numpy_compute")
def test_results_do_not_share_the_memory_of_arguments():
    same = fc.custom_primitive("same", lambda x: x, types=lambda x: x)
    reverse = fc.custom_primitive("reverse", lambda x: x[::-1], types=lambda x: x)
    found = jitted(lambda x: (same(x) + 1, np.exp(reverse(x) - 1), x), P(), P())(X)
    assert np.array_equal(found[0], X + 1) and np.array_equal(found[2], X) and np.array_equal(found[1], np.exp(X[::-1] - 1))
    x = np.ones(3)
    assert same(x) is not x


def gradient_by(vjp):
    f = fc.custom_primitive("f", np.sin, types=lambda x: x, vjp=vjp)
    return fc.grad(lambda x: np.sum(f(x)))(X)


def tangent_by(jvp):
    return fc.jvp(fc.custom_primitive("f", np.sin, types=lambda x: x, jvp=jvp), (X,), (X,))


@pytest.mark.parametrize(
    ("define", "match"),
    [
        (
            lambda: fc.custom_primitive("sin", np.sin, types=lambda x: x),
            r"funccoll has a primitive of this name\. Choose another",
        ),
        (lambda: fc.custom_primitive("a b", np.sin, types=lambda x: x), r"the name is an identifier"),
        (lambda: fc.custom_primitive("f", 3, types=lambda x: x), r"custom_primitive\('f', function\) takes a function, not 3"),
        (lambda: fc.custom_primitive("f", np.sin, types=X), r"custom_primitive\('f', types=\.\.\.\) takes a function"),
        (lambda: fc.custom_primitive("f", np.sin, types=lambda x: x, batch="loop"), r"it is 'elementwise', a function or None"),
        (
            lambda: fc.custom_primitive("f", np.sin, types=lambda x: x.shape)(X),
            r"type rule of f returned \(8,\): it returns an fc",
        ),
        (lambda: fc.custom_primitive("f", np.sin, types=lambda x, **p: x)(X, n=[1]), r"f: parameters are hashable"),
        (lambda: fc.custom_primitive("f", lambda x: 1, types=lambda x: [x, x], multiple=True)(X), r"states 2 results"),
        (lambda: gradient_by(lambda ct, inputs, output: ct), r"the vjp of f returns one cotangent, or None, for each of its 1"),
        (
            lambda: gradient_by(lambda ct, inputs, output: [ct[:2]]),
            r"returned a cotangent of type float64\[2\] for an input of type float64\[8\]",
        ),
        (
            lambda: tangent_by(lambda ts, inputs, output: ts[0][:2]),
            r"a tangent of type float64\[2\] for an output of type float64",
        ),
        (lambda: tangent_by(X), r"custom_primitive\('f', jvp=\.\.\.\) takes a function"),
    ],
)
def test_bad_definitions(define, match):
    with pytest.raises(TraceError, match=match):
        define()


def test_a_function_that_breaks_its_type_rule():
    wrong = fc.custom_primitive("wrong", lambda x: x.astype(np.float32), types=lambda x: x)
    for run in (lambda f: f, jitted):
        with pytest.raises(ShapeError, match=r"wrong returned a result of type float32\[\d\], and float64\[\d\] was stated"):
            run(wrong)(X)


def test_a_primitive_can_be_defined_again():
    first = fc.custom_primitive("again", np.sin, types=lambda x: x)
    second = fc.custom_primitive("again", np.cos, types=lambda x: x)
    assert np.array_equal(first(X), np.sin(X)) and np.array_equal(second(X), np.cos(X))
    assert np.array_equal(jitted(lambda x: first(x) + second(x))(X), np.sin(X) + np.cos(X))
    assert functools.partial(bind, fc.core.ir.primitive_named("again"))(X).tolist() == np.cos(X).tolist()
