"""Random scans of small products, elementwise functions and moves of elements, perhaps with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import funccoll as fc

__all__ = ["random_loop"]

WIDTHS = 2, 3, 5, 16, 33, 64, 70
BATCHES = 1, 2, 3, 8, 13, 32


def _halves(x: Any) -> Any:
    first, second = np.split(np.concatenate([x, x * x.dtype.type(0.5)], -1), 2, -1)
    return first * np.tanh(second)


MOVES: Sequence[Callable[[Any], Any]] = (
    lambda x: np.roll(x, 1, 0),
    lambda x: np.roll(x, -1, -1),
    _halves,
    lambda x: x[::-1],
    lambda x: np.concatenate([x[..., :1], x[..., 1:] * x.dtype.type(0.5)], -1),
    lambda x: x - x.mean(-1, keepdims=True),
    lambda x: x * x.max(0),
    lambda x: np.pad(x[..., 1:], [(0, 0)] * (x.ndim - 1) + [(1, 0)]),
    lambda x: np.transpose(np.transpose(x) * x.dtype.type(0.5)),
    lambda x: fc.nn.sigmoid(x) * x,
)


def random_loop(seed: int) -> tuple[Callable[..., Any], tuple[np.ndarray, ...]]:
    """Return a function with a scan, and its arguments: matrices, first carry, and what it scans."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(rng.choice(["f4", "f8"]))
    width = int(rng.choice(WIDTHS))
    shape = (width,) if rng.random() < 0.3 else (int(rng.choice(BATCHES)), width)
    length = int(rng.choice([1, 2, 5, 8, 37]))
    draw = lambda *s: (rng.normal(size=s) / 3).astype(dtype)
    w, u, m = draw(width, width) / dtype.type(width**0.5), draw(width, width), draw(width, width)
    arguments = w, u, m, draw(*shape), draw(length, *shape)
    moves = [MOVES[k] for k in rng.integers(len(MOVES), size=rng.integers(0, 4))]
    reverse, counts, outer, keeps, gradient, swaps = (bool(k) for k in rng.integers(2, size=6))

    def run(w: Any, u: Any, m: Any, h: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            h, total, count = carry
            z = h @ w + np.tanh(x) @ np.transpose(u)
            for move in moves:
                z = move(z)
            if counts:
                z = np.where(count > 1, z, -z)
            new = np.tanh(z)
            if outer:
                rows = np.reshape(new, (-1, width))
                total = total + np.transpose(np.reshape(x, (-1, width))) @ rows
            ys = {"h": new, "count": count} if keeps else {"old": h}
            return (new, (np.transpose(total) if swaps else total), count + 1), ys

        return fc.scan(body, (h, m, 0), xs, reverse=reverse)

    def loss(*arguments: Any) -> Any:
        (h, total, _), ys = run(*arguments)
        return (h**2).sum() + (total * total.dtype.type(0.1)).sum() + sum((y**2).sum() for y in ys.values() if y.dtype == dtype)

    return (fc.grad(loss, tuple(range(5))) if gradient else run), arguments
