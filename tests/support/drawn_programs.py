"""A program to draw, and the boxes of its drawing."""

from __future__ import annotations

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.draw.scene import Boxes


def training_step(mesh, layers=2):
    def loss_fn(params, x):
        for w in params:
            x = np.tanh(x @ w)
        return np.mean(x**2)

    dp = fc.data_parallel(loss_fn, axis="data", bucket_cap_mb=0.0002, first_bucket_mb=0.0001)
    params, x = [np.ones((4, 4), np.float32) for _ in range(layers)], np.ones((8, 4), np.float32)
    step = fc.jit(lambda p, x: fc.value_and_grad(dp)(p, x), mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    return step.trace(params, x), dp.explain(mesh, params, x)


def boxes_of(drawing):
    return next(m for m in drawing.scene.panels[0].marks if isinstance(m, Boxes))
