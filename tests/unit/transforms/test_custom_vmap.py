"""Rules of vmap of the user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import funccoll as fc
from tests.support.batched_programs import equations, normal

pytestmark = pytest.mark.covers("transformations")


def clipped() -> Any:
    @fc.custom_vjp
    def scale(x: Any, w: Any) -> Any:
        return np.sum(x * w)

    def forward(x: Any, w: Any) -> Any:
        return scale(x, w), {"x": x, "w": w, "what": "residuals hold anything", "factor": 10.0}

    def backward(kept: Any, ct: Any) -> Any:  # not the derivative: ten times as large in x
        assert kept["what"] == "residuals hold anything"
        return ct * kept["w"] * kept["factor"], ct * kept["x"]

    return scale.defvjp(forward, backward)


@pytest.mark.parametrize("jit", [lambda f: f, fc.jit], ids=["plain", "jit"])
def test_custom_vjp(jit):
    """Its rule is used whichever stands inside, and a gradient of what is not batched is a sum."""
    x, w, scale = normal(4, 3), normal(3), clipped()
    axes = (0, None)
    np.testing.assert_allclose(jit(fc.vmap(scale, axes))(x, w), x @ w, rtol=1e-12)
    per_example = jit(fc.vmap(fc.grad(scale, (0, 1)), axes))(x, w)
    total = jit(fc.grad(lambda x, w: np.sum(fc.vmap(scale, axes)(x, w)), (0, 1)))(x, w)
    for of_x in (per_example[0], total[0]):
        np.testing.assert_allclose(of_x, np.tile(10 * w, (4, 1)), rtol=1e-12)
    np.testing.assert_allclose(per_example[1], x, rtol=1e-12)
    np.testing.assert_allclose(total[1], x.sum(0), rtol=1e-12)

    twice = lambda x, w: np.sum(fc.vmap(lambda w: fc.vmap(scale, axes)(x, w))(w))
    ws = normal(2, 3)
    of_x, of_w = jit(fc.grad(twice, (0, 1)))(x, ws)
    np.testing.assert_allclose(of_x, np.tile(10 * ws.sum(0), (4, 1)), rtol=1e-12)
    np.testing.assert_allclose(of_w, np.tile(x.sum(0), (2, 1)), rtol=1e-12)
    of_each = jit(fc.vmap(fc.grad(lambda w: np.sum(fc.vmap(scale, axes)(x, w)))))(ws)
    np.testing.assert_allclose(of_each, np.tile(x.sum(0), (2, 1)), rtol=1e-12)


def test_custom_vjp_with_captured_values_and_without_cotangents():
    offset = normal(3)

    @fc.custom_vjp
    def shift(x: Any, n: Any) -> Any:
        return x + offset + n

    shift.defvjp(lambda x, n: (shift(x, n), None), lambda kept, ct: (2 * ct, None))
    fn = lambda x: np.sum(fc.vmap(shift, (0, None))(x, 1))
    np.testing.assert_array_equal(fc.grad(fn)(np.ones((2, 3))), np.full((2, 3), 2.0))
    np.testing.assert_array_equal(fc.vmap(shift, (None, 0))(np.zeros(3), np.arange(2)), offset + np.arange(2)[:, None])


def test_stop_gradient():
    fn = fc.vmap(fc.grad(lambda x: x * fc.stop_gradient(x)))
    np.testing.assert_array_equal(fn(np.array([2.0, 3.0])), [2.0, 3.0])


def test_grad_hook(line):
    """Of what is shared it is the hook of one; of a batch there is one for each element."""

    def step(w: Any, x: Any) -> Any:
        hook = lambda g: fc.tree.map(lambda g: np.clip(fc.all_reduce(g, "data"), -1, 1), g)
        loss = lambda w, x: np.sum(fc.grad_hook({"w": w}, hook, "data")["w"] * x)
        gradient = lambda loss, w: (lambda y, pull: pull(np.ones(y.shape))[0])(*fc.vjp(loss, w))
        per_example = fc.vmap(lambda w, x: gradient(lambda w: loss(w, x), w), (None, 0))(w, x)
        return per_example, gradient(lambda w: fc.vmap(loss)(np.stack([w] * 3), x), w)

    x = 0.1 * normal(12, 2)
    x[0] = 5.0
    found = fc.jit(step, mesh=line, in_specs=(fc.P(), fc.P("data")), out_specs=(fc.P(), fc.P()))(np.ones(2), x)
    each = np.clip(x.reshape(4, 3, 2).sum(0), -1, 1)
    np.testing.assert_allclose(found[0], each, rtol=1e-12)
    np.testing.assert_allclose(found[1], each.sum(0), rtol=1e-12)


def test_optimizer_steps():
    """One step for parameters of many models, and many learning rates."""
    params, grads = {"w": normal(3, 2)}, {"w": normal(3, 2)}

    def step(rate: Any, grads: Any, params: Any) -> Any:
        optimizer = fc.optim.adam(rate)
        return fc.optim.apply(optimizer, grads, optimizer.init(params), params)[0]["w"]

    one = lambda rate, i: step(rate, {"w": grads["w"][i]}, {"w": params["w"][i]})
    models = lambda g, p: fc.vmap(lambda g, p: step(0.1, g, p))(g, p)
    assert equations(lambda g, p: models({"w": g}, {"w": p}), grads["w"], params["w"]).count("optimizer_step") == 1
    np.testing.assert_allclose(models(grads, params), [one(0.1, i) for i in range(3)], rtol=1e-12)
