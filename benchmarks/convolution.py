"""A convolution network against JAX, in one run on one thread: `python benchmarks/convolution.py`.

LeNet's layers (LeCun et al., 1998) with maxima and rectifiers, 28 x 28 pixels, batch 64: a whole training step, inside jit.
Writes benchmarks/results/convolution.json.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # whatever threads there are

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from measure import compare, machine, record

import funccoll as fc
from funccoll import nn

RESULTS = Path(__file__).parent / "results" / "convolution.json"
BATCH, GOAL = 64, 1.3
WIDTHS = ((6, 16, 120), (20, 50, 500), (32, 64, 128))
"""Channels of the two convolutions, and units behind them: LeNet's own, Caffe's, Keras'."""


def parameters(first: int, second: int, units: int) -> dict[str, np.ndarray]:
    """Weights and biases of the five layers."""
    rng = np.random.default_rng(0)
    shapes = {"c1": (5, 5, 1, first), "c2": (5, 5, first, second),
              "d1": (25 * second, units), "d2": (units, 84), "d3": (84, 10)}  # fmt: skip
    weights = {name: (rng.normal(size=s) / np.sqrt(np.prod(s[:-1]))).astype(np.float32) for name, s in shapes.items()}
    return weights | {f"b{name}": np.zeros(s[-1], np.float32) for name, s in shapes.items()}


def network(p: Any, x: Any, relu: Any, conv: Any, pool: Any) -> Any:
    """The logits of a batch of images."""
    x = pool(relu(conv(x, p["c1"], "SAME") + p["bc1"]))
    x = pool(relu(conv(x, p["c2"], "VALID") + p["bc2"]))
    x = x.reshape(x.shape[0], -1)
    x = relu(x @ p["d1"] + p["bd1"])
    return relu(x @ p["d2"] + p["bd2"]) @ p["d3"] + p["bd3"]


@fc.jit
def step(p: Any, x: Any, y: Any) -> Any:
    """A step of gradient descent, and the loss."""

    def loss(p: Any) -> Any:
        logits = network(p, x, nn.relu, lambda x, w, padding: nn.conv(x, w, padding=padding), lambda x: nn.max_pool(x, 2))
        return np.mean(nn.cross_entropy(logits, y))

    value, grads = fc.value_and_grad(loss)(p)
    return fc.tree.map(lambda a, g: a - np.float32(0.01) * g, p, grads), value


def _conv(x: Any, w: Any, padding: str) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@jax.jit
def jax_step(p: Any, x: Any, y: Any) -> Any:
    """The same in JAX."""

    def loss(p: Any) -> Any:
        logs = jax.nn.log_softmax(network(p, x, jax.nn.relu, _conv, _pool))
        return -jnp.mean(jnp.take_along_axis(logs, y[:, None], axis=1))

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, g: a - 0.01 * g, p, grads), value


def main() -> None:
    """Run every network, and write the JSON."""
    about, rows, rng = machine(), [], np.random.default_rng(1)
    x, y = rng.normal(size=(BATCH, 28, 28, 1)).astype(np.float32), rng.integers(0, 10, BATCH).astype(np.int32)
    for widths in WIDTHS:
        p = parameters(*widths)
        (ours, loss), (theirs, jax_loss) = step(p, x, y), jax_step(p, x, y)
        np.testing.assert_allclose(float(loss), float(jax_loss), rtol=1e-5)
        for name in p:
            np.testing.assert_allclose(np.asarray(ours[name]), theirs[name], atol=1e-5)
        placed = jax.device_put((p, x, y))
        numbers = compare(lambda p=p: step(p, x, y), lambda args=placed: jax.block_until_ready(jax_step(*args)))
        relative = 1 / numbers["ratio"]["median"]
        rows.append({"name": f"LeNet {widths}, batch {BATCH}, a training step", "goal": f"≤ {GOAL} × JAX",
                     "times_jax": relative, "met": relative <= GOAL, **numbers})  # fmt: skip
        print(f"{rows[-1]['name']}: {numbers['ours']['median_us']:.0f} µs, {relative:.2f} × JAX", flush=True)
    record(RESULTS, about, cases=rows)


if __name__ == "__main__":
    sys.exit(main())
