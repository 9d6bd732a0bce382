"""Splits of a batch over devices, and the gradient of each: integers, so that sums are exact in any order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P

ROWS = P("data")


def integers(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    """Small integers, as floats."""
    return np.random.default_rng([seed, *shape]).integers(-3, 4, shape).astype(dtype)


def summed(params: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    """A sum of losses, a polynomial of integers, and the sum of the weights."""
    y = (x @ params["w"] + params["b"]) ** 2
    return np.sum(np.sum(y, axis=1) * weight), np.sum(weight)


def params_of(width: int = 3, dtype: Any = np.float64) -> Any:
    """Parameters of `summed`."""
    return {"w": integers(width, 2, dtype=dtype), "b": integers(2, seed=1, dtype=dtype)}


def split(counts: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of devices which have these numbers of them, padded; the weights, 0 for padding; and the rows without it."""
    most = max(counts)
    blocks = [integers(most, 3, seed=seed + k) for k in range(len(counts))]
    weights = [np.arange(most) < count for count in counts]
    real = [block[:count] for block, count in zip(blocks, counts, strict=True)]
    return np.concatenate(blocks), np.concatenate(weights).astype(np.float64), np.concatenate(real)


@functools.cache
def gradients_of(mesh: Any) -> dict[str, Any]:
    """Reduction -> its jitted value and gradient."""
    total = fc.data_parallel(lambda *args: summed(*args)[0], reduction="sum")
    mean = fc.data_parallel(summed, reduction="weighted")
    specs: Any = {"in_specs": (P(), ROWS, ROWS), "out_specs": P()}
    functions = {"sum": total.value_and_grad, "weighted": mean.value_and_grad}
    return {name: fc.jit(function, mesh=mesh, **specs) for name, function in functions.items()}


def outcomes(mesh: Any, counts: Sequence[int], seed: int) -> dict[str, list[Any]]:
    """Reduction -> the loss and the gradients of a split, as lists."""
    x, weight, _ = split(counts, seed)
    found = {name: gradient(params_of(), x, weight) for name, gradient in gradients_of(mesh).items()}
    return {name: [np.asarray(leaf).tolist() for leaf in fc.tree.leaves(values)] for name, values in found.items()}


def check(found: dict[str, list[Any]], counts: Sequence[int], seed: int) -> None:
    """Hold the outcomes of a split to one device, which has all rows and no padding."""
    *_, real = split(counts, seed)
    sums = fc.value_and_grad(lambda p, x: summed(p, x, np.ones(len(x)))[0])(params_of(), real)
    for got, want in zip(found["sum"], fc.tree.leaves(sums), strict=True):
        np.testing.assert_array_equal(got, want)
    rounding = 0 if sum(counts) & (sum(counts) - 1) == 0 else 1e-13  # a power of two divides exactly
    for got, want in zip(found["weighted"], fc.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(got, np.asarray(want) / sum(counts), rtol=rounding, atol=rounding)
