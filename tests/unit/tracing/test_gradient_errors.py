"""Every refusal of gradients: losses that vary, hooks and rules that do not fit."""

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import DTypeError, PytreeError, ShapeError, TraceError, VaryingError
from tests.support.misuse import X, run, wrong

pytestmark = pytest.mark.covers("errors")


def test_gradient_of_a_varying_loss():
    def call():
        def loss(params, x):
            return np.sum(params["w"] * x)

        def step(x):
            return fc.grad(loss)({"w": np.float32(2)}, x)["w"]

        return run(step)

    wrong(
        VaryingError,
        call,
        "grad of loss",
        "varies over axis 'data'",
        "params['w']",
        "f32[]",
        "sum of the losses",
        "fc.all_reduce(loss, 'data', op=\"mean\")",
        "fc.data_parallel",
        "fc.pvary",
        line=5,
    )


def _columns_and_rows(p, x):
    h = np.tanh(x @ p["up"])
    return np.mean((h @ p["down"] + p["b"]) ** 2)


def _in_checkpoint(p, x):
    h = fc.checkpoint(lambda up, down: np.einsum("bh,hd->bd", np.tanh(x @ up), down * 2))(p["up"], p["down"])
    return np.mean(np.tanh(h + p["b"]))


def _read_at_own_rows(p, x):
    row = np.arange(3) - 2 * fc.axis_index("data")
    h = np.where(((row >= 0) & (row < 2))[:, None], p["down"][np.clip(row, 0, 1)], 0)
    return np.mean((x @ h + p["b"]) @ np.ones((3, 2)) @ p["down"])


def _weights_alone(p, x):
    return np.mean(x) * np.sum(p["up"] ** 2) + np.sum(p["b"])


PARTIAL = {
    _columns_and_rows: (2, "matmul of p['down'], f64[2,3]{data}"),
    _in_checkpoint: (1, "einsum of p['down'], f64[2,3]{data}"),
    _read_at_own_rows: (2, "getitem of p['down'], f64[2,3]{data}"),
    _weights_alone: (1, "reduce_sum of p['up'], f64[3,2]{data}"),
}


def _of_split_weights(loss):
    """The gradient of a loss of weights that are split by columns and by rows."""
    specs = {"b": P(), "down": P("data"), "up": P(None, "data")}
    params = {"b": np.ones(3), "down": np.ones((8, 3)), "up": np.ones((3, 8))}
    mesh = fc.make_mesh({"data": 4})
    return fc.jit(lambda p, x: fc.grad(loss)(p, x), mesh=mesh, in_specs=(specs, P()), out_specs=specs)(params, np.ones((3, 3)))


@pytest.mark.parametrize("loss", PARTIAL)
def test_gradient_of_a_forgotten_partial_sum(loss):
    line, what = PARTIAL[loss]
    with pytest.raises(VaryingError) as caught:
        _of_split_weights(loss)
    first, remedy = str(caught.value).split("\n")[0].split(" Is the ")
    assert "p['b'] of type f64[3] does not" in first
    assert remedy.startswith(f"{what}, at test_gradient_errors.py:{loss.__code__.co_firstlineno + line} (")
    assert "a partial" in remedy
    assert "? Then write fc.all_reduce(..., 'data') there" in remedy
    assert "loss" not in remedy.split("?")[1]  # its mean would be a gradient of another model


def test_a_forgotten_partial_sum_in_data_parallel():
    """Its bucket takes all parameters at once: each stays what it is."""
    mesh = fc.make_mesh({"data": 1, "model": 2})
    specs = {"down": P("model", None), "head": P(), "out": P("model", None), "up": P(None, "model")}

    def loss(p, x):
        y = x + (x @ p["up"]) @ p["out"]
        return np.mean((y + fc.all_reduce(np.tanh(y @ p["up"]) @ p["down"], "model")) @ p["head"])

    step = fc.jit(
        lambda p, x: fc.value_and_grad(fc.data_parallel(loss))(p, x)[0], mesh=mesh, in_specs=(specs, P("data")), out_specs=P()
    )
    with pytest.raises(VaryingError) as caught:
        step({name: np.ones((4, 4)) for name in specs}, np.ones((2, 4)))
    line = loss.__code__.co_firstlineno + 1
    assert f"Is the matmul of p['out'], f64[2,4]{{model}}, at test_gradient_errors.py:{line} (loss)" in str(caught.value)


def _cross_entropy(p, x):
    logits = np.tanh(x + p["b"]) @ p["up"] * 2
    return np.mean(fc.nn.cross_entropy(logits, np.zeros(3, int)))


def _squares_of_columns(p, x):
    columns = np.einsum("bd,dh->bh", x + p["b"], p["up"])
    return np.mean(columns**2)


@pytest.mark.parametrize(("loss", "what", "dim"), [(_cross_entropy, "matmul", -1), (_squares_of_columns, "einsum", "...")])
def test_gradient_of_a_forgotten_gather(loss, what, dim):
    """The product that each device has columns of is named first, not the reduction in fc.nn's function alone."""
    with pytest.raises(VaryingError) as caught:
        _of_split_weights(loss)
    line = loss.__code__.co_firstlineno + 1
    product, reduction = str(caught.value).split("\n")[0].split(" Is the ")[1].split("; if the ")
    assert product == (
        f"{what} of p['up'], f64[3,2]{{data}}, at test_gradient_errors.py:{line} ({loss.__name__}), each device's block of a "
        f"whole? Then write fc.all_gather(..., 'data', dim={dim}) there"
    )
    assert f", at test_gradient_errors.py:{line + 1} ({loss.__name__}), is a partial result instead" in reduction


def test_the_remedy_of_a_forgotten_gather():
    def loss(p, x):
        logits = fc.all_gather(np.tanh(x + p["b"]) @ p["up"], "data", dim=-1)
        return np.mean(fc.nn.cross_entropy(logits, np.zeros(3, int)))

    assert _of_split_weights(loss)["up"].shape == (3, 8)


def test_the_remedy_of_a_forgotten_partial_sum():
    def loss(p, x):
        return np.mean((fc.all_reduce(np.tanh(x @ p["up"]) @ p["down"], "data") + p["b"]) ** 2)

    found = _of_split_weights(loss)
    np.testing.assert_allclose(found["b"], 2 * (8 * np.tanh(3) + 1) / 3)
    np.testing.assert_allclose(found["down"], np.full((8, 3), 2 * (8 * np.tanh(3) + 1) / 3 * np.tanh(3)))


def test_where_a_loss_begins_to_vary():
    def of(loss, axes=("data",)):
        mesh = fc.make_mesh({"data": 2, "model": 2})
        step = fc.jit(lambda w, x: fc.grad(lambda w: loss(w, x))(w), mesh=mesh, in_specs=(P(), P(axes)), out_specs=P())
        with pytest.raises(VaryingError) as caught:
            step(np.ones((2, 2)), np.ones((8, 2)))
        return str(caught.value).split("\n")[0].split("sum of the losses along ")[1]

    mean = "fc.all_reduce(loss, 'data', op=\"mean\")"
    batch = of(lambda w, x: np.mean(np.tanh(x @ w) @ w))
    assert "It varies since the matmul of a value from outside of <lambda>, f64[4,2]{data}, at test_gradient_errors" in batch
    assert f"Reduce the loss inside <lambda> ({mean})" in batch
    own = of(lambda w, x: np.sum(w) * fc.axis_index("data"))
    assert "It varies since the axis_index, at test_gradient_errors" in own
    assert "It varies" not in of(lambda w, x: np.sum(fc.pvary(w, "data")))
    both = of(lambda w, x: np.sum(w @ (x.T @ np.tanh(x))))  # of columns that are split, or of examples
    assert "Is the matmul of a value from outside of <lambda>, f64[4,2]{data}, at test_gradient_errors" in both
    assert both.endswith(f"there; if each device has examples of its own instead, reduce the loss: {mean}.")
    for axes in (("data", "model"), ("model", "data")):
        assert "fc.all_reduce(loss, ('data', 'model'), op=\"mean\")" in of(lambda w, x: np.mean(x @ w), axes)


def test_what_grad_does_not_take():
    wrong(TraceError, lambda: fc.grad(lambda x: x * 2)(X), "point scalar", "f32[8]. Reduce it with np.sum or np.mean; fc.jac")
    wrong(TraceError, lambda: fc.grad(lambda x: (np.sum(x), x))(X), "2 arrays", "has_aux=True")
    wrong(TraceError, lambda: fc.grad(lambda x: None)(X), "one scalar", "0 arrays")
    wrong(TraceError, lambda: fc.grad(lambda x: "text")(X), "'text'", "arrays, numbers")
    wrong(TraceError, lambda: fc.grad(lambda x: np.sum(x), has_aux=True)(X), "has_aux=True", "(value, aux)")
    wrong(TraceError, lambda: fc.grad(lambda x: np.sum(x > 0))(X), "real floating-point scalar", "i64[]. Convert it")
    wrong(TraceError, lambda: fc.grad(lambda x: np.sum(x * 1j))(X), "real floating-point scalar", "c64[]. Return np.real(loss)")
    wrong(DTypeError, lambda: fc.grad(lambda x: np.sum(x))(np.arange(3)), "int64", "argnums", "astype")
    wrong(TraceError, lambda: fc.grad(lambda x: np.sum(x), argnums=3)(X), "argnums 3", "1 argument")
    wrong(TraceError, lambda: fc.grad(lambda x: np.sum(x))(), "argnums 0", "0 argument")
    wrong(TraceError, lambda: fc.grad(lambda x, y: np.sum(x * y), argnums=(0, -2))(X, X), "argnums=(0, -2)", "twice")
    for argnums in ("x", 0.5, None, True, (0, "x")):
        wrong(TraceError, lambda: fc.grad(np.sum, argnums=argnums), f"argnums={argnums!r}", "position")
    for call in (lambda: fc.grad(3), lambda: fc.value_and_grad(X), lambda: fc.vjp("f", X), lambda: fc.custom_vjp(3)):
        wrong(TraceError, call, "takes a function")
    wrong(DTypeError, lambda: fc.grad(lambda x: 1.0)("text"), "<U4", "text is not an array")


def test_cotangents_that_do_not_fit():
    _, pull = fc.vjp(lambda x: (x, x), X)
    wrong(PytreeError, lambda: pull(X), "cotangent is one value", "a tuple of 2")
    wrong(PytreeError, lambda: pull(None), "cotangent is None", "a tuple of 2")
    wrong(ShapeError, lambda: pull((X[:2], X)), "f32[2]", "f32[8]", "shape and dtype")
    wrong(ShapeError, lambda: pull((X.astype(np.float64), X)), "f64[8]", "f32[8]")


@pytest.mark.parametrize(
    ("kind", "hook", "part"),
    [
        (PytreeError, lambda g: tuple(g), "one gradient for each value"),
        (PytreeError, lambda g: None, ": result is None"),
        (VaryingError, lambda g: g, "all_reduce it"),
        (TraceError, 3, "takes a function"),
        (VaryingError, lambda g: [np.zeros(3)], "shape and dtype"),
        (DTypeError, lambda g: ["a"], "text is not an array"),
    ],
)
def test_grad_hooks_that_do_not_fit(kind, hook, part):
    def step(x):
        def loss(w):
            (wide,) = fc.grad_hook([w], hook, "data")
            return fc.all_reduce(np.sum(wide * x), "data")

        return fc.grad(loss)(np.float32(2))

    with pytest.raises(kind, match=part) as caught:
        run(step, out=P())
    assert caught.value.source is not None and caught.value.source.file == __file__


@pytest.mark.parametrize(
    ("kind", "forward", "backward", "part"),
    [
        (TraceError, lambda x: x * 2, lambda r, c: (c,), "tuple (result, residuals)"),
        (TraceError, lambda x: None, lambda r, c: (c,), "tuple (result, residuals)"),
        (PytreeError, lambda x: ((x, x), None), lambda r, c: (c,), "forward rule of double returns another structure"),
        (ShapeError, lambda x: (x[:2], None), lambda r, c: (c,), "forward rule of double"),
        (PytreeError, lambda x: (x * 2, None), lambda r, c: c, "tuple of 1 cotangent"),
        (PytreeError, lambda x: (x * 2, None), lambda r, c: (c, c), "tuple of 1 cotangent"),
        (PytreeError, lambda x: (x * 2, None), lambda r, c: ([c],), "a cotangent of another structure"),
        (ShapeError, lambda x: (x * 2, None), lambda r, c: (c[:2],), "f32[2] for a value of type f32[8]"),
        (ShapeError, lambda x: (x * 2, None), lambda r, c: (c.astype(np.float64),), "f64[8]"),
        (DTypeError, lambda x: (x * 2, None), lambda r, c: ("text",), "text is not an array"),
    ],
)
def test_custom_rules_that_do_not_fit(kind, forward, backward, part):
    @fc.custom_vjp
    def double(x):
        return x * 2

    double.defvjp(forward, backward)
    wrong(kind, lambda: fc.grad(lambda x: np.sum(double(x)))(X), part, line=0)


def test_custom_rules_that_are_missing_or_vary():
    wrong(TraceError, lambda: fc.custom_vjp(lambda x: x)(X), "no rule yet", "defvjp(forward, backward)")
    wrong(TraceError, lambda: fc.custom_vjp(lambda x: x).defvjp(1, 2), "defvjp", "function")

    def step(x):
        scaled = fc.custom_vjp(lambda w: w * 1)
        scaled.defvjp(lambda w: (w * 1, None), lambda _, ct: (ct * x[0],))
        return fc.grad(lambda w: np.sum(scaled(w)))(np.float32(2))

    with pytest.raises(VaryingError, match=r"does not vary over 'data'.*all_reduce"):
        run(step, out=P())


def test_data_parallel_says_what_it_takes():
    wrong(TraceError, lambda: fc.data_parallel(3), "loss_fn(params, *batch)")
    for size in (0, -1, "25", None, True):
        wrong(ShapeError, lambda: fc.data_parallel(np.sum, bucket_cap_mb=size), "bucket_cap_mb", repr(size), "MiB")
    for bad in (lambda w, x: w * x, lambda w, x: None, lambda w, x: "a", lambda w, x: np.sum(x > w)):
        wrong(
            TraceError,
            lambda: run(lambda x: fc.data_parallel(bad)(np.float32(1), x), out=P()),
            "data_parallel",
            "real floating-point scalar",
            "np.mean",
        )
    loss = fc.data_parallel(lambda w, x: np.sum(w * x))
    wrong(fc.FunccollError, lambda: loss(X, X), "outside a mesh")
