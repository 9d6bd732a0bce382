"""Random programs, deterministic for each number: elementwise operations, contractions, shapes, and collectives.

A program is generated while it is traced, from its number, the shapes and the mesh axes that values vary over;
both sides must therefore agree on all types, or they would not even trace the same program. All values are
matrices of moderate size and magnitude, so that float32 rounding is the only difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from funccoll import P
from tests.support.oracles.jax_sides import MESHES, Input, Program

NAN_IN_JAX = (122, 158, 195)
"""Programs in whose gradients JAX 0.10.2 on CPU has NaN and funccoll has not: differences are the oracle there."""
NUMBERS = [n for n in range(203) if n not in NAN_IN_JAX]
LARGEST = 16
"""Elements along a dimension, after every operation."""


def total(b: Any, x: Any) -> Any:
    """A number equal on all devices: the sum over the axes `x` varies over of the mean of `x`."""
    x = b.np.mean(x)
    axes = tuple(sorted(b.varying(x)))
    return b.all_reduce(x, axes) if axes else x


# ---------------------------------------------------------------- compute


def matched(b: Any, y: Any, x: Any) -> Any:
    """`y`, or its mean where its shape does not fit that of `x`."""
    return y if y.shape == x.shape else b.np.mean(y)


def contract(b: Any, rng: Any, x: Any, y: Any) -> Any:
    if x.shape[1] == y.shape[0]:
        return x @ y / x.shape[1]
    if x.shape[1] == y.shape[1]:
        return b.np.einsum("ik,jk->ij", x, y) / x.shape[1]
    return b.np.tanh(x.T @ x / x.shape[0])


def reduced(b: Any, rng: Any, x: Any, y: Any) -> Any:
    axis = int(rng.integers(2))
    name = ("sum", "mean", "max", "min")[rng.integers(4)]
    return x * b.np.tanh(getattr(b.np, name)(matched(b, y, x) + x, axis=axis, keepdims=True))


def rearranged(b: Any, rng: Any, x: Any, y: Any) -> Any:
    rows, columns = x.shape
    return [
        lambda: x.T,
        lambda: b.np.reshape(x, (columns, rows)),
        lambda: b.np.flip(x, 0),
        lambda: b.np.roll(x, 1, 1),
        lambda: b.np.concatenate([x, b.np.tanh(x)], axis=1),
        lambda: x[::2, :],
        lambda: x[:, -1:] * x,
        lambda: b.np.take(x, np.array([0, rows - 1, 0]), axis=0),
        lambda: b.np.where(x > 0.1, x, matched(b, y, x)),
        lambda: b.at(x)[0, :].add(b.np.mean(y)),
        lambda: b.np.stack([x, 2 * x], axis=1).reshape(2 * rows, columns),
    ][rng.integers(11)]()


COMPUTE: list[Callable[..., Any]] = [
    lambda b, rng, x, y: b.np.tanh(x) * matched(b, y, x),
    lambda b, rng, x, y: b.np.sin(x) + 0.5 * matched(b, y, x),
    lambda b, rng, x, y: x / b.np.sqrt(1 + b.np.square(matched(b, y, x))),
    lambda b, rng, x, y: b.np.maximum(x, matched(b, y, x)) - b.np.abs(x),
    lambda b, rng, x, y: b.np.exp(-b.np.square(x)) * 3 ** b.np.tanh(matched(b, y, x)),
    lambda b, rng, x, y: b.nn.gelu(x) - b.nn.relu(matched(b, y, x)),
    lambda b, rng, x, y: x * b.nn.softmax(x, axis=-1) + b.nn.logsumexp(x, axis=-1)[:, None],
    lambda b, rng, x, y: b.np.tanh(b.np.cumsum(x, axis=0)) + b.stop_gradient(b.np.mean(y)),
    lambda b, rng, x, y: b.nn.log_softmax(x + b.np.mean(y)),
    contract,
    contract,
    reduced,
    reduced,
    rearranged,
    rearranged,
]


# ---------------------------------------------------------------- collectives


def rows_for(b: Any, x: Any, p: int) -> Any:
    """`x` with a number of rows that p divides."""
    return x if x.shape[0] % p == 0 else b.np.concatenate([x * (1 + 0.1 * i) for i in range(p)], axis=0)


def shifted(rng: Any, p: int) -> list[tuple[int, int]]:
    """Some devices send, to different devices."""
    count = int(rng.integers(1, p + 1))
    return [(int(s), int(d)) for s, d in zip(rng.permutation(p)[:count], rng.permutation(p)[:count])]


OPS = ("sum", "mean", "max", "min", "prod")

COLLECTIVES: dict[str, Callable[..., Any]] = {
    **{f"all_reduce {op}": lambda b, rng, x, a, p, op=op: b.all_reduce(x, a, op=op) for op in OPS},
    **{f"reduce {op}": lambda b, rng, x, a, p, op=op: b.reduce(x, a, root=p - 1, op=op) for op in OPS},
    "all_gather": lambda b, rng, x, a, p: b.all_gather(x[:4], a, dim=int(rng.integers(2))),
    "all_gather stack": lambda b, rng, x, a, p: b.np.sum(b.all_gather(x, a, stack=True, dim=int(rng.integers(3))), axis=1),
    "reduce_scatter sum": lambda b, rng, x, a, p: b.reduce_scatter(rows_for(b, x, p), a),
    "reduce_scatter mean": lambda b, rng, x, a, p: b.reduce_scatter(rows_for(b, x, p).T, a, dim=1, op="mean"),
    "all_to_all": lambda b, rng, x, a, p: b.all_to_all(rows_for(b, x, p), a, split_dim=0, concat_dim=int(rng.integers(2))),
    "permute": lambda b, rng, x, a, p: b.permute(x, a, pairs=shifted(rng, p)),
    "broadcast": lambda b, rng, x, a, p: b.broadcast(x, a, root=int(rng.integers(p))),
    "gather": lambda b, rng, x, a, p: b.gather(x[:2], a, root=int(rng.integers(p)), dim=int(rng.integers(2))),
    "scatter": lambda b, rng, x, a, p: b.scatter(rows_for(b, x, p), a, root=int(rng.integers(p))),
    "own_slice": lambda b, rng, x, a, p: b.own_slice(rows_for(b, x, p), a),
    "pvary": lambda b, rng, x, a, p: b.pvary(x, a) * (1 + b.axis_index(a).astype("float32")),
    "tree": lambda b, rng, x, a, p: (lambda t: t["x"] + t["y"][0])(b.all_reduce({"x": x, "y": [b.np.sin(x)]}, a)),
}
NAMES = list(COLLECTIVES)


def communicate(b: Any, rng: Any, name: str, x: Any, mesh: str) -> Any:
    """Apply a collective over a random tuple of axes, first making `x` vary, or not vary, as it needs."""
    sizes = MESHES[mesh]
    wanted = name in ("own_slice", "pvary")
    axes = [a for a in sizes if (a not in b.varying(x)) == wanted]
    if not axes:
        axes = [list(sizes)[rng.integers(len(sizes))]]
        x = b.broadcast(x, axes[0]) if wanted else x * b.np.cos(b.axis_index(axes[0]).astype("float32") + 0.5 * x)
    over = tuple(axes[i] for i in rng.permutation(len(axes))[: rng.integers(1, len(axes) + 1)])
    p = math.prod(sizes[a] for a in over)
    y = COLLECTIVES[name](b, rng, x, over[0] if len(over) == 1 else over, p)
    return b.np.tanh(y) if "prod" in name or rng.random() < 0.5 else y / p if "sum" in name else y


# ---------------------------------------------------------------- programs


def plan(number: int) -> list[str]:
    """The collectives of a program: all of them in turn."""
    return [NAMES[(4 * number + k) % len(NAMES)] for k in range(4)]


def generate(number: int) -> Program:
    mesh = ("line", "grid")[number % 2]
    rng = np.random.default_rng(number)
    inputs = []
    for _ in range(3):
        entries = [None, None, *MESHES[mesh]]
        rows, columns = rng.permutation(len(entries))[:2]
        spec = P(entries[rows], entries[columns])
        local = rng.choice([4, 8], 2)
        inputs.append(Input(tuple(int(n) * MESHES[mesh].get(a, 1) for n, a in zip(local, spec)), spec))

    def first_order(b: Any, *pool: Any) -> Any:
        rng = np.random.default_rng(number + 10_000)
        values = list(pool)
        for name in plan(number):
            for _ in range(2):
                x, y = (values[-1 - int(i)] for i in rng.integers(0, 3, 2))
                values.append(COMPUTE[rng.integers(len(COMPUTE))](b, rng, x, y)[:LARGEST, :LARGEST])
            y = communicate(b, rng, name, values[-1 - int(rng.integers(2))], mesh)
            values.append(y[:LARGEST, :LARGEST])
        # Inputs take part in the loss, so that each has a gradient.
        return sum(total(b, b.np.tanh(v) * (1 + k)) for k, v in enumerate([*pool, *values[-6:]])), values[3:]

    def second_order(b: Any, *pool: Any) -> Any:
        g = b.grad(lambda *pool: first_order(b, *pool)[0], argnums=(0, 1))(*pool)
        return sum(total(b, b.np.square(v)) for v in g), list(g)

    body = second_order if number % 10 in (2, 7) else first_order
    return Program(f"generated {number}", mesh, tuple(inputs), body)
