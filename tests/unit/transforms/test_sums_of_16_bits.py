"""Gradients that add up many elements of 16 bits: added in float32, and rounded once, before and after compilation.

A sum of ones in bfloat16 stops at 256, in float16 at 2,048. ml_dtypes adds concrete arrays of bfloat16 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from tests.support.cases.numpy_cases import BF16
from tests.support.groups import in_groups

pytestmark = pytest.mark.covers("gradients")

N = 3000


def ones(like: Any, *shape: int) -> np.ndarray:
    return np.ones(shape, like.dtype)


CASES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "bias": (lambda b: np.sum(b + ones(b, N, 2)), (2,)),
    "scale": (lambda s: np.sum(ones(s, N) * s), ()),
    "astype": (lambda s: np.sum((ones(s, N) * s).astype(np.float32)), ()),
    "take": (lambda x: np.sum(x[np.zeros(N, int)]), (3,)),
    "at": (lambda v: np.sum(fc.at(np.zeros(3, v.dtype))[np.zeros(N, int)].add(v)), ()),
    "repeat": (lambda x: np.sum(np.repeat(x, N)), (1,)),
    "tile": (lambda x: np.sum(np.tile(x, N)), (2,)),
    "broadcast_to": (lambda x: np.sum(np.broadcast_to(x, (N, 2))), (2,)),
    "pad": (lambda v: np.sum(np.pad(ones(v, 2) * v, (N, N), constant_values=v)), ()),
    "cumsum": (lambda x: np.sum(np.cumsum(x)[-1:]) / N, (N,)),
    "outer": (lambda w: np.sum(np.outer(ones(w, N), w)), (2,)),
    "where": (lambda b: np.sum(np.where(ones(b, N) > 0, b, 0)), ()),
    "sort": (lambda s: np.sum(np.sort(ones(s, N) * s)), ()),
    "vmap": (lambda s: np.sum(fc.vmap(lambda r: r * s)(ones(s, N))), ()),
    "max": (np.max, (N,)),
    "prod": (np.prod, (N,)),
    "matmul": (lambda w: np.sum(ones(w, N, 3) @ w), (3, 2)),
    "layer norm": (lambda s: np.sum(fc.nn.layer_norm(ones(s, N, 2) * np.array([1, 2], s.dtype), s)), (2,)),
    "cross entropy": (lambda w: np.mean(fc.nn.cross_entropy(ones(w, N, 2) * w, np.zeros(N, int))), (2,)),
}


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=str)
@in_groups("name", CASES)
def test_gradients_do_not_stop_growing(name, dtype):
    call, shape = CASES[name]
    wanted = np.asarray(fc.grad(call)(np.ones(shape)))
    x = np.ones(shape, dtype)
    for found in (fc.grad(call)(x), fc.jit(fc.grad(call))(x), fc.vmap(fc.grad(call))(x[None])[0]):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("name", ["max", "prod", "vmap"])
def test_tangents_too(name):
    call, shape = CASES[name]
    x = np.ones(shape, BF16)
    tangent = fc.jvp(call, (x,), (x,))[1]
    np.testing.assert_allclose(float(tangent), float(fc.jvp(call, (np.ones(shape),), (np.ones(shape),))[1]), rtol=1e-2)
