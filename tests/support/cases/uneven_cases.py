"""Data and programs of `test_uneven_batches.py`, for processes too: integers, so that sums are exact in any order."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.errors import UnevenBatchesError

ROWS = 3
"""Rows of a batch, but for last ones."""
LIKE = {"x": np.full((ROWS, 2), 3.0)}


def summed_loss(w: Any, x: Any, active: Any) -> Any:
    """A loss whose values and gradients are integers for integers, summed over examples."""
    return np.sum(active.astype(x.dtype) * np.square(x @ w - 1))


def data_of(position: int, rows: Sequence[int]) -> list[Any]:
    """The batches of a position: integers, with these numbers of rows."""
    rng = np.random.default_rng(position)
    return [{"x": rng.integers(-4, 5, (n, 2)).astype(np.float64)} for n in rows]


@functools.cache
def gradient_step(mesh: Any) -> Any:
    """The gradient of the loss summed over the devices, and the sum of the weights."""

    def step(w: Any, active: Any, batch: Any) -> Any:
        x = batch["x"]
        loss = lambda w: fc.all_reduce(summed_loss(w, x, active), "data")
        return fc.grad(loss)(w), fc.all_reduce(np.sum(active * np.ones(len(x), np.float32)), "data")

    return fc.jit(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())


def total_gradient(mesh: Any, batches: Any, **options: Any) -> tuple[np.ndarray, float, int]:
    """The sums over all steps of the gradient and of the weights, and the number of steps."""
    step, w = gradient_step(mesh), np.array([1.0, -2.0])
    total, weight, steps = np.zeros(2), 0.0, 0
    for active, batch in fc.uneven_batches(batches, mesh=mesh, **options):
        gradient, weights = step(w, active, batch)
        total, weight, steps = total + np.asarray(gradient), weight + float(weights), steps + 1
    return total, weight, steps


ON_PROCESSES: dict[int, list[tuple[list[list[int]], dict[str, Any]]]] = {
    2: [
        ([[3, 3], []], {"batch_size": ROWS, "like": LIKE}),
        ([[3, 3], []], {}),
        ([[3], [3, 3, 2]], {"batch_size": ROWS}),
        ([[], []], {}),
    ],
    3: [
        ([[3, 3], [3], [3]], {"throw_on_early_termination": True}),
        ([[], [3, 3, 1], [2]], {"batch_size": ROWS, "like": LIKE}),
        ([[3, 3]] * 3, {"throw_on_early_termination": True}),
        ([[3], [3], []], {"throw_on_early_termination": True}),
    ],
    4: [([[3], [3], [3, 3], [3]], {}), ([[3, 3], [3, 3], [3], [3]], {})],
}
"""Number of processes -> (rows of each rank's batches, options), in turn in one job: an error ends nothing but its loop."""


def outcomes(mesh: Any, rank: int) -> list[Any]:
    """Of each of ON_PROCESSES: `total_gradient`, or the error and the number of batches taken before."""
    found: list[Any] = []
    for rows, options in ON_PROCESSES[fc.world_size()]:
        taken = iter(data_of(rank if "model" not in mesh.shape else rank // 2, rows[rank]))
        try:
            total, weight, steps = total_gradient(mesh, taken, **options)
            found.append([total.tolist(), weight, steps])
        except UnevenBatchesError as error:
            found.append(str(error))
    return found


def training(mesh: Any, batches: Any, rows: int) -> Iterator[tuple[Any, Any, float]]:
    """Parameters, running statistics and loss after each step of a network with batch normalization."""

    def loss_fn(params: Any, running: Any, active: Any, batch: Any) -> Any:
        x = batch["x"]
        hidden, stats = fc.nn.sync_batch_norm(x @ params["w"], params["scale"], params["bias"], weights=active)
        losses = np.square(np.tanh(hidden) @ params["out"] - np.sin(x[:, 0]))
        weights = active.astype(losses.dtype)
        weighted = np.sum(weights * losses), np.sum(weights * np.ones_like(losses))
        return weighted, fc.nn.update_running_stats(running, stats)

    dp = fc.data_parallel(loss_fn, reduction="weighted", buffers="broadcast")

    def step(params: Any, running: Any, active: Any, batch: Any) -> Any:
        (loss, running), grads = dp.value_and_grad(params, running, active, batch)
        return fc.tree.map(lambda p, g: p - 0.1 * g, params, grads), running, loss

    specs = P(), P(), P("data"), P("data")
    jitted = fc.jit(step, mesh=mesh, in_specs=specs, out_specs=P(), donate_argnums=(0, 1, 2, 3))
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(2, 4)), "scale": np.ones(4), "bias": np.zeros(4), "out": rng.normal(size=4)}
    running = np.zeros(4), np.ones(4)
    for active, batch in fc.uneven_batches(batches, mesh=mesh, batch_size=rows, like={"x": np.ones((rows, 2))}):
        params, running, loss = jitted(params, running, active, batch)
        yield *fc.tree.map(np.asarray, (params, running)), float(loss)


def bits_of_training(mesh: Any, batches: Any) -> list[str]:
    """A hash of what each step of `training` gives."""
    found = training(mesh, batches, ROWS)
    return [hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in fc.tree.leaves(out))).hexdigest() for out in found]
