"""Misuse of optimizers: the errors name the place."""

from __future__ import annotations

import numpy as np
import pytest

import funccoll as fc
from funccoll import P, optim
from funccoll.errors import DTypeError, PytreeError, ShapeError, TraceError, UnsupportedError, VaryingError
from funccoll.primitives.optimizers import wide_dtype
from tests.support.groups import in_groups
from tests.support.optimizers import by_apply, by_pair

pytestmark = pytest.mark.covers("errors", "optim")


def step_of(grads=None, state=None, params=None, optimizer=None):
    optimizer = optim.adam(0.1) if optimizer is None else optimizer
    good = {"a": [np.ones(3, np.float32)], "b": np.ones((2, 2), np.float32)}
    params = good if params is None else params
    state = optimizer.init(good) if state is None else state
    return optim.apply(optimizer, good if grads is None else grads, state, params)


F3, F22 = np.ones(3, np.float32), np.ones((2, 2), np.float32)
WIDE = {"a": [np.ones(3)], "b": F22}


@in_groups(
    ("call", "error", "words"),
    [
        (lambda: step_of({"a": [F3]}), PytreeError, "key 'a', and params has a dict with the keys 'a', 'b'"),
        (lambda: step_of({"a": [F3], "b": F22, "c": F3}), PytreeError, "grads is a dict with the keys 'a', 'b', 'c'"),
        (
            lambda: step_of({"a": (F3,), "b": F22}),
            PytreeError,
            r"grads\['a'\] is a tuple of 1, and params has a list of 1 there",
        ),
        (lambda: step_of({"a": [F22], "b": F22}), ShapeError, r"grads\['a'\]\[0\] has shape \[2, 2\], and params\['a'\]"),
        (
            lambda: step_of({"a": [F3.astype(np.float64)], "b": F22}),
            DTypeError,
            r"grads\['a'\]\[0\] is float64, and .* float32. Convert it: .astype\(np.float32\)",
        ),
        (
            lambda: step_of({"a": [F3.astype(fc.bfloat16)], "b": F22}, optim.adam(0.1).init(WIDE), WIDE),
            DTypeError,
            r"float64. Convert the parameters, .astype\(fc.bfloat16\), .* or else grads\['a'\]\[0\], .astype\(np.float64\)",
        ),
        (
            lambda: step_of(params=WIDE),
            DTypeError,
            r"state.mu\['a'\]\[0\] is float32, and params\['a'\]\[0\] float64. Convert the parameters, "
            r".astype\(np.float32\), if",
        ),
        (
            lambda: step_of(params={"a": [np.arange(3)], "b": F22}),
            DTypeError,
            r"params\['a'\]\[0\] is int64\[3\], and only real",
        ),
        (lambda: step_of(params={"a": [F3 * 1j], "b": F22}), DTypeError, "the imaginary part"),
        (lambda: optim.adam(0.1).init({"n": np.arange(2)}), DTypeError, r"adam: params\['n'\] is int64\[2\]"),
        (
            lambda: step_of(state=optim.sgd(0.1).init({"a": [F3], "b": F22})),
            PytreeError,
            "its state is AdamState, and SgdState",
        ),
        (lambda: step_of(state=optim.adam(0.1).init({"a": [F3]})), PytreeError, "state.mu is a dict with the key 'a'"),
        (
            lambda: step_of(state=optim.adam(0.1).init({"a": [F3], "b": F3})),
            ShapeError,
            r"\[2, 2\]. Pass the state that init\(par",
        ),
        (
            lambda: step_of(state=optim.adam(0.1, amsgrad=True).init({"a": [F3], "b": F22})),
            PytreeError,
            "state.nu_max is not None",
        ),
        (
            lambda: step_of(optimizer=optim.chain(optim.clip(1.0), optim.adam(0.1)), state=optim.adam(0.1).init({})),
            PytreeError,
            "a tuple of 2, one for each transformation, and AdamState was given",
        ),
        (
            lambda: step_of(state=optim.adam(0.1).init({"a": [F3], "b": F22})._replace(count=0.5)),
            DTypeError,
            "state.count is of",
        ),
        (lambda: optim.adam(-0.1), ShapeError, "adam: learning_rate must be a finite number, and not negative; it is -0.1"),
        (lambda: optim.sgd(float("nan")), ShapeError, "sgd: learning_rate"),
        (lambda: optim.sgd(0.1, nesterov=True), ShapeError, "nesterov needs a momentum"),
        (lambda: optim.sgd(0.1, weight_decay=-1), ShapeError, "sgd: weight_decay"),
        (lambda: optim.adamw(0.1, b2=1.0), ShapeError, "adamw: b2 must be a number less than 1"),
        (lambda: optim.clip_by_global_norm(0), ShapeError, "max_norm must be more than 0"),
        (lambda: optim.clip(-1.0), ShapeError, "clip: max_delta"),
        (lambda: optim.linear_schedule(0.1, 0.0, 0), ShapeError, "transition_steps must be an integer of at least 1"),
        (lambda: optim.warmup_cosine_decay_schedule(0.0, 0.1, 5, 5), ShapeError, "it must be more than warmup_steps, 5"),
        (lambda: optim.join_schedules([optim.constant_schedule(1.0)], [3]), TraceError, "1 schedule"),
        (lambda: optim.join_schedules([lambda i: 1.0] * 3, [3, 2]), ShapeError, "must increase"),
        (
            lambda: step_of(optimizer=optim.sgd(lambda count: np.ones(2))),
            DTypeError,
            "learning_rate is of type .*a real scalar",
        ),
        (lambda: optim.apply(1e-3, F3, (), F3), TraceError, r"takes a pair of functions \(init, update\)"),
        (lambda: optim.chain(), TraceError, "one or more"),
        (lambda: optim.adamw(0.1).update(F3, optim.adamw(0.1).init(F3)), PytreeError, "reads the parameters"),
        (lambda: optim.apply_updates({"a": F3}, {"a": F22}), ShapeError, r"updates\['a'\] has shape"),
    ],
)
def test_errors_name_the_place(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_gradients_that_are_not_reduced(line):
    optimizer = optim.sgd(0.1)

    def body(p, g):
        return optim.apply(optimizer, {"w": g}, optimizer.init({"w": p}), {"w": p})[0]

    step = fc.jit(body, mesh=line, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(VaryingError, match=r"sgd: grads\['w'\], of type .*, varies over 'data', and params\['w'\]"):
        step(np.ones(2, np.float32), np.ones(8, np.float32))


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.sgd(1.0),
        optim.adamw(0.1),
        optim.chain(optim.clip(9.0), optim.sgd(1.0)),
        optim.GradientTransformation(lambda p: (), lambda g, s, p=None: (fc.tree.map(np.negative, g), s)),
    ],
)
def test_gradients_that_are_reduced_over_an_axis_of_their_parameter_raise(mesh, optimizer):
    """Each device would change its columns by the mean of all columns' gradients."""

    def run(change):
        def body(w, x):
            g = fc.all_reduce(fc.grad(lambda w: np.mean((x @ w) ** 2))(fc.pvary(w, "data")), "data", op="mean")
            return optim.apply(optimizer, {"w": change(g)}, optimizer.init({"w": w}), {"w": w})[0]["w"]

        specs = (P(None, "model"), P("data"))
        return fc.jit(body, mesh=mesh, in_specs=specs, out_specs=specs[0])(np.ones((3, 4)), np.ones((4, 3)))

    with pytest.raises(VaryingError) as error:
        run(lambda g: fc.all_reduce(g, "model", op="mean"))
    text = str(error.value).replace("updates['w']", "grads['w']")
    assert ": grads['w'], of type f64[3,2], is equal along 'model', and params['w'] varies over 'model'" in text
    assert "Do not reduce it over 'model'" in text and "pass fc.pvary(grads['w'], 'model')." in text
    assert "test_optimizer_errors.py" in text.splitlines()[-1]
    run(lambda g: fc.pvary(fc.all_reduce(g, "model", op="mean"), "model"))
    for fine in (lambda g: g, np.zeros_like, lambda g: np.ones(g.shape)):
        run(fine)


def test_gradients_of_split_parameters_that_a_loss_does_not_use_are_taken(mesh):
    """Zeros have the type of their parameter, also through loops and choices."""
    optimizer = optim.sgd(1.0)
    losses = [
        lambda w, b: np.sum(b),
        lambda w, b: np.sum(w),
        lambda w, b: np.sum(fc.stop_gradient(w)),
        lambda w, b: fc.all_reduce(np.sum(w), "model"),
        lambda w, b: fc.scan(lambda c, x: (c + x, None), b[0], b)[0],
        lambda w, b: fc.cond(b[0] > 0, np.sum, np.max, b),
        lambda w, b: fc.checkpoint(lambda w, b: np.sum(b))(w, b),
        lambda w, b: np.sum(fc.all_gather(w, "model")),
    ]
    for loss in losses:
        step = lambda w, b, loss=loss: optim.apply(optimizer, fc.grad(lambda w: loss(w, b))(w), optimizer.init(w), w)[0]
        fc.jit(step, mesh=mesh, in_specs=(P("model"), P()), out_specs=P("model"))(np.ones(4), np.ones(3))


def test_a_step_is_not_differentiated():
    optimizer = optim.adam(0.1)

    def loss(p, step):
        new, _ = step(optimizer)(p, optimizer.init(p), p)
        return np.sum(new)

    with pytest.raises(UnsupportedError, match=r"fc.optim.apply has no gradient.*optimizer.update"):
        fc.grad(loss)(F3, by_apply)
    assert fc.grad(lambda p: loss(p, by_pair))(F3).shape == (3,)


def test_a_pair_of_anothers_making():
    """optax's own have this shape: any pair is applied, by its update."""
    halve = optim.GradientTransformation(lambda p: (), lambda g, s, p=None: (fc.tree.map(lambda x: -0.5 * x, g), s))
    new, _ = fc.jit(by_apply(halve))({"a": F3}, (), {"a": F3})
    assert np.all(np.asarray(new["a"]) == 0.5)
    assert wide_dtype(np.dtype(np.float16)) == np.float32
