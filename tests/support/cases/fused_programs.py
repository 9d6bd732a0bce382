"""Random programs of elementwise functions, reductions and views, whose results depend continuously on rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import funccoll as fc

__all__ = ["random_program"]


def _one(x: Any, number: float = 1.0) -> Any:
    return np.asarray(number, x.dtype)


UNARY: Sequence[Callable[[Any], Any]] = (
    np.negative,
    np.exp,
    np.tanh,
    np.square,
    np.abs,
    np.sin,
    np.cos,
    lambda x: np.sqrt(np.abs(x) + _one(x)),
    lambda x: np.log1p(np.abs(x)),
    lambda x: x * _one(x, 0.5),
    lambda x: _one(x) / (np.abs(x) + _one(x)),
    lambda x: x.astype(np.float64).astype(x.dtype) + _one(x, 0.25),
)
BINARY: Sequence[Callable[[Any, Any], Any]] = (
    np.add,
    np.subtract,
    np.multiply,
    np.maximum,
    np.minimum,
    lambda x, y: x / (np.abs(y) + _one(y)),
)
REDUCTIONS = np.sum, np.max, np.min, np.mean
VIEWS: Sequence[Callable[[Any], Any]] = (
    lambda x: x.reshape((*x.shape, 1)),
    lambda x: np.broadcast_to(x, (2, *x.shape)),
    lambda x: np.swapaxes(x, 0, -1),
    lambda x: x[::2],
    lambda x: x[::-1],
    lambda x: x.reshape(-1),
)
SHAPES = [
    (64,), (5, 7), (33,), (3, 4, 65), (2, 3, 4), (128, 32), (1, 40), (40, 1), (1, 1), (6, 1, 50), (300, 8), (257,), (4, 16, 4),
    (2000,), (4200,), (150, 3), (1,), (0, 3), (3, 10), (200, 16),
]  # fmt: skip
LARGEST = 20_000


def random_program(seed: int) -> tuple[Callable[..., list[Any]], list[np.ndarray]]:
    """Return a function of arrays and its arguments, some with negative strides or in Fortran order, perhaps a gradient."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(rng.choice(["f4", "f8"]))
    base = SHAPES[rng.integers(len(SHAPES))]
    arguments = []
    for _ in range(rng.integers(1, 4)):
        shape = [1 if rng.random() < 0.2 else n for n in base]
        x = rng.normal(size=shape[rng.integers(0, 2) :] if rng.random() < 0.3 else shape).astype(dtype)
        kind = rng.random()
        if kind < 0.1 and x.ndim:
            x = np.ascontiguousarray(x[::-1])[::-1]
        elif kind < 0.2:
            x = np.asfortranarray(x)
        arguments.append(x)
    if rng.random() < 0.1:
        arguments.append(arguments[0])  # the same memory twice
    choices = rng.integers(0, 1 << 30, size=(rng.integers(3, 18), 4)).tolist()
    returned = rng.integers(0, 1 << 30, size=rng.integers(1, 4)).tolist()

    def step(values: list[Any], kind: int, a: int, b: int, c: int) -> Any:
        x = values[a % len(values)] if a % 3 else values[-1]
        y = values[c % len(values)]
        if kind < 3 and _broadcast(x, y):
            return BINARY[b % len(BINARY)](x, y)
        if kind == 3 and x.ndim and x.size:
            axis = None if b % 7 == 0 else -1 if b % 3 else b // 3 % x.ndim
            total = REDUCTIONS[c % 4](x, axis=axis, keepdims=bool(b // 16 % 4))
            return x - total if c % 2 and total.ndim == x.ndim else total
        if kind == 4 and x.ndim and 2 * x.size <= LARGEST:
            return VIEWS[b % len(VIEWS)](x)
        return UNARY[b % len(UNARY)](x)

    def program(*xs: Any) -> list[Any]:
        values = list(xs)
        for kind, a, b, c in choices:
            value = step(values, kind % 6, a, b, c)
            values.append(np.maximum(np.minimum(value, _one(value, 30.0)), _one(value, -30.0)))
        return [values[-1], *(values[k % len(values)] for k in returned)]

    if rng.random() < 0.6 or 0 in base:
        return program, arguments
    loss = lambda *xs: sum((v * _one(v, 0.3)).sum() for v in program(*xs))
    gradient = fc.value_and_grad(loss, argnums=tuple(range(len(arguments))))
    return lambda *xs: fc.tree.leaves(gradient(*xs)), arguments


def _broadcast(x: Any, y: Any) -> bool:
    try:
        return int(np.prod(np.broadcast_shapes(x.shape, y.shape))) <= LARGEST
    except ValueError:
        return False
