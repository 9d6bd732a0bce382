"""The programs of benchmarks/programs/language.py, each written once for NumPy under funccoll and for JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

HIDDEN = 64


class Dialect(NamedTuple):
    """A library's own names for the functions that the programs call."""

    np: Any
    jit: Callable[..., Any]
    ready: Callable[[Any], Any]
    """Wait for a result."""
    put: Callable[[Any], Any]
    """Arguments as the library's own arrays."""
    grad: Callable[..., Any]
    value_and_grad: Callable[..., Any]
    vmap: Callable[..., Any]
    scan: Callable[..., Any]
    map: Callable[..., Any]
    relu: Callable[..., Any]
    conv: Callable[..., Any]
    """(images, kernel, padding)."""
    pool: Callable[..., Any]
    """The maxima of 2 x 2 pixels."""
    cross_entropy: Callable[..., Any]
    """Of logits and labels, for each example."""


def our_dialect() -> Dialect:
    """funccoll, on a mesh of one device."""
    import funccoll as fc
    from funccoll import nn

    mesh = fc.make_mesh({"d": 1})
    return Dialect(
        np,
        fc.jit,
        lambda result: result,
        lambda args: fc.tree.map(lambda x: fc.device_put(x, mesh), args),
        fc.grad,
        fc.value_and_grad,
        fc.vmap,
        fc.scan,
        fc.tree.map,
        nn.relu,
        lambda x, w, padding: nn.conv(x, w, padding=padding),
        lambda x: nn.max_pool(x, 2),
        nn.cross_entropy,
    )


def jax_dialect() -> Dialect:
    """JAX."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def conv(x: Any, w: Any, padding: str) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def cross_entropy(logits: Any, labels: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.expand_dims(labels, -1), axis=-1)[..., 0]

    return Dialect(
        jnp,
        jax.jit,
        jax.block_until_ready,
        jax.device_put,
        jax.grad,
        jax.value_and_grad,
        jax.vmap,
        lax.scan,
        jax.tree.map,
        jax.nn.relu,
        conv,
        pool,
        cross_entropy,
    )


Made = tuple[Callable[..., Any], tuple[Any, ...]]
"""A new function object, for which nothing is cached, and its arguments."""


def _random(*shape: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def _cell() -> tuple[np.ndarray, ...]:
    w, wx = _random(2, HIDDEN, HIDDEN, scale=HIDDEN**-0.5)
    return w, wx, np.zeros(HIDDEN, np.float32)


def rnn(lib: Dialect, steps: int, batch: int) -> Made:
    """The loss of a scanned RNN, and its gradient in parameters and inputs."""

    def loss(cell: Any, xs: Any) -> Any:
        w, wx, b = cell

        def body(h: Any, x: Any) -> Any:
            h = lib.np.tanh(h @ w + x @ wx + b)
            return h, h

        _, hs = lib.scan(body, np.zeros((batch, HIDDEN), np.float32), xs)
        return (hs**2).mean()

    return lib.value_and_grad(loss, (0, 1)), (_cell(), _random(steps, batch, HIDDEN, seed=1))


def unrolled_rnn(lib: Dialect, steps: int) -> Made:
    """The last state of an RNN, in a Python loop."""

    def last(cell: Any, xs: Any) -> Any:
        (w, wx, b), h = cell, np.zeros((32, HIDDEN), np.float32)
        for t in range(steps):
            h = lib.np.tanh(h @ w + xs[t] @ wx + b)
        return h

    return last, (_cell(), _random(steps, 32, HIDDEN, seed=1))


def rows(lib: Dialect, steps: int) -> Made:
    """The gradient of a Python loop over `xs[t]`, in w and xs."""

    def loss(w: Any, xs: Any) -> Any:
        h = w
        for t in range(steps):
            h = lib.np.tanh(h * w + xs[t])
        return h.sum()

    return lib.grad(loss, (0, 1)), (np.ones(8, np.float32), _random(steps, 8))


def collectives(lib: Dialect, count: int) -> Made:
    """A chain of all_reduces over 8 devices; ours alone."""
    import funccoll as fc

    def chain(x: Any) -> Any:
        for _ in range(count):
            x = fc.pvary(fc.all_reduce(x, "d", op="mean"), "d") * 1.5
        return x

    return chain, (np.ones(8, np.float32),)


def lenet(lib: Dialect, first: int, second: int, units: int) -> Made:
    """A training step of LeNet's layers (LeCun et al., 1998) with maxima and rectifiers: 28 x 28 pixels, batch 64."""
    shapes: dict[str, tuple[int, ...]] = {"c1": (5, 5, 1, first), "c2": (5, 5, first, second)}
    shapes |= {"d1": (25 * second, units), "d2": (units, 84), "d3": (84, 10)}
    params = {name: _random(*s, scale=float(np.prod(s[:-1])) ** -0.5) for name, s in shapes.items()}
    params |= {f"b{name}": np.zeros(s[-1], np.float32) for name, s in shapes.items()}

    def loss(p: Any, x: Any, y: Any) -> Any:
        x = lib.pool(lib.relu(lib.conv(x, p["c1"], "SAME") + p["bc1"]))
        x = lib.pool(lib.relu(lib.conv(x, p["c2"], "VALID") + p["bc2"]))
        x = x.reshape(x.shape[0], -1)
        x = lib.relu(x @ p["d1"] + p["bd1"])
        x = lib.relu(x @ p["d2"] + p["bd2"])
        return lib.cross_entropy(x @ p["d3"] + p["bd3"], y).mean()

    def step(p: Any, x: Any, y: Any) -> Any:
        value, grads = lib.value_and_grad(loss)(p, x, y)
        return value, lib.map(lambda a, g: a - np.float32(0.01) * g, p, grads)

    return step, (params, _random(64, 28, 28, 1, seed=1), _labels(64))


def per_example(lib: Dialect, examples: int) -> Made:
    """The gradients of each example's loss, of a multi-layer perceptron 784-512-10."""
    params = {
        "w1": _random(784, 512, scale=784**-0.5),
        "b1": np.zeros(512, np.float32),
        "w2": _random(512, 10, scale=512**-0.5),
        "b2": np.zeros(10, np.float32),
    }

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = lib.relu(x @ p["w1"] + p["b1"])
        return lib.cross_entropy(h @ p["w2"] + p["b2"], y)

    return lib.vmap(lib.grad(loss), (None, 0, 0)), (params, _random(examples, 784, seed=1), _labels(examples))


def _labels(count: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 10, count).astype(np.int32)


PROGRAMS: dict[str, Callable[..., Made]] = {
    "rnn": rnn,
    "unrolled": unrolled_rnn,
    "rows": rows,
    "collectives": collectives,
    "lenet": lenet,
    "vmap": per_example,
}
