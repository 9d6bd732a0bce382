"""The design's own example, against single-device NumPy."""

import numpy as np
import pytest

import funccoll as fc
from funccoll import P

pytestmark = pytest.mark.covers("jit")


def loss_fn(params, batch):
    return np.mean((np.tanh(batch @ params["w"]) + params["b"]) ** 2)


def test_step_equals_single_device(mesh):
    @fc.jit(mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    def step(params, batch):
        def mean_loss(params):
            return fc.all_reduce(loss_fn(params, batch), "data", op="mean")

        loss, grads = fc.value_and_grad(mean_loss)(params)
        return fc.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": np.ones(2, np.float32)}
    batch = rng.normal(size=(8, 3)).astype(np.float32)
    updated, loss = step(params, batch)
    expected, grads = fc.value_and_grad(loss_fn)(params, batch)
    np.testing.assert_allclose(float(loss), expected, rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(updated[name], params[name] - 0.1 * grads[name], rtol=1e-5, atol=1e-7)
