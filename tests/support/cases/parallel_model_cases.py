"""The model, loss, optimizer and hook of `test_parallel_model.py`, for its ranks too."""

from __future__ import annotations

from typing import Any

import numpy as np

import funccoll as fc
from funccoll.parallel.buckets import CommHook


class Momentum:
    """Gradient descent with momentum, in optax's shape."""

    def init(self, params: Any) -> Any:
        return {"velocity": fc.tree.map(np.zeros_like, params), "count": np.zeros((), np.int32)}

    def update(self, gradients: Any, state: Any, params: Any) -> Any:
        velocity = fc.tree.map(lambda v, g: v * np.asarray(0.5, g.dtype) + g, state["velocity"], gradients)
        updates = fc.tree.map(lambda v: v * np.asarray(-0.25, v.dtype), velocity)
        return updates, {"velocity": velocity, "count": state["count"] + 1}


def loss(params: Any, x: Any) -> Any:
    for w in params["layers"]:
        x = np.tanh(x @ w)
    return np.mean((x - params["goal"]) ** 2)


def params_of(seed: int = 0, dtype: Any = np.float64) -> Any:
    rng = np.random.default_rng(seed)
    return {"layers": [rng.normal(size=(3, 3)).astype(dtype) for _ in range(2)], "goal": rng.normal(size=3).astype(dtype)}


X = np.random.default_rng(9).normal(size=(8, 3))


def error_feedback() -> CommHook:
    def reduce(errors: Any, bucket: Any) -> Any:
        given = [(g + e).astype(np.float16) for g, e in zip(bucket.gradients, errors, strict=True)]
        left = tuple(g + e - n.astype(g.dtype) for g, e, n in zip(bucket.gradients, errors, given, strict=True))
        summed = bucket.replace(given).all_reduce()
        return left, bucket.replace([s.astype(bucket.dtype) for s in summed.gradients])

    return CommHook(np.zeros_like, reduce)
