"""Programs with loops and branches, written once for JAX and for funccoll: `case(np, lax, *arguments)`.

Most are cases of JAX's own tests of control flow (tests/lax_control_flow_test.py), in other words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

Case = tuple[Callable[..., Any], tuple]
CASES: dict[str, Case] = {}
"""Name -> the program and its arguments: arrays of float64, with respect to which gradients are compared."""


def case(*arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES[fn.__name__] = fn, arguments
        return fn

    return add


def values(*shape: int, seed: int = 0) -> numpy.ndarray:
    return numpy.random.default_rng(seed).normal(size=shape)


VECTOR, MATRIX, ROWS = values(4), values(4, 4, seed=1), values(5, 4, seed=2)


@case(ROWS)
def cumulative_sum(np, lax, xs):
    return lax.scan(lambda c, x: (c + x, c), np.zeros(4), xs)


@case(ROWS)
def cumulative_sum_reversed(np, lax, xs):
    return lax.scan(lambda c, x: (c + x, c * x), np.ones(4), xs, reverse=True)


@case(VECTOR)
def scan_without_arrays(np, lax, x):
    return lax.scan(lambda c, _: (np.sin(c), c.sum()), x, None, length=3)


@case(VECTOR, ROWS)
def scan_of_no_iterations(np, lax, c, xs):
    return lax.scan(lambda c, x: (c * x, c + x), c, xs[:0])


@case(VECTOR, ROWS)
def scan_of_one_iteration(np, lax, c, xs):
    return lax.scan(lambda c, x: (c * x, c + x), c, xs[:1])


@case(MATRIX, VECTOR, ROWS)
def recurrent_network(np, lax, w, h, xs):
    def step(h, x):
        h = np.tanh(w @ h + x)
        return h, h * h

    return lax.scan(step, h, xs)


@case(MATRIX, VECTOR, ROWS)
def state_in_dictionaries(np, lax, w, h, xs):
    def step(state, x):
        return {"h": np.tanh(w @ state["h"] + x["a"]), "n": state["n"] + 1.0}, (state["n"] * x["b"], {"y": state["h"]})

    return lax.scan(step, {"h": h, "n": 0.0}, {"a": xs, "b": xs * 2})


@case(VECTOR, ROWS)
def carry_that_passes_through(np, lax, c, xs):
    return lax.scan(lambda s, x: ((s[0], s[1] * x), s[0] + x), (c, c), xs)


@case(VECTOR, ROWS)
def carry_that_becomes_constant(np, lax, c, xs):
    return lax.scan(lambda s, x: ((s[1], np.ones(4)), s[0] * x), (c, c), xs)


@case(VECTOR, ROWS)
def carries_that_change_places(np, lax, c, xs):
    return lax.scan(lambda s, x: ((s[1], s[0] * x), s[0]), (c, np.cos(c)), xs)


@case(ROWS)
def counter_and_result(np, lax, xs):
    return lax.scan(lambda s, x: ((s[0] + 1, s[1] + x * s[0]), None), (0, np.zeros(4)), xs)[0][1]


@case(VECTOR, ROWS)
def result_that_nobody_uses(np, lax, c, xs):
    return lax.scan(lambda c, x: (c + np.sin(x), np.exp(c)), c, xs)[0]


@case(MATRIX, ROWS)
def nested_scans(np, lax, w, xs):
    def outer(c, x):
        inner, ys = lax.scan(lambda d, r: (d * np.cos(r) + x, d), c, w)
        return inner, ys.sum(0)

    return lax.scan(outer, np.ones(4), xs)


@case(MATRIX, ROWS)
def scan_with_a_branch(np, lax, w, xs):
    def step(c, x):
        c = lax.cond(c.sum() > 0, lambda c: c * w[0], lambda c: np.sin(c) + 1, c)
        return c + x, c.max()

    return lax.scan(step, np.zeros(4), xs)


@case(VECTOR, ROWS)
def scan_with_a_loop_inside(np, lax, c, xs):
    def step(c, x):
        return lax.fori_loop(0, 3, lambda i, v: v * 0.5 + i * x, c), x.sum()

    return lax.scan(step, c, xs)


@case(VECTOR)
def loop_with_static_bounds(np, lax, x):
    return lax.fori_loop(2, 6, lambda i, v: v * 1.5 - i, x)


@case(VECTOR)
def loop_without_iterations(np, lax, x):
    return lax.fori_loop(6, 2, lambda i, v: v * 1.5 - i, x)


@case(VECTOR)
def powers_by_loop(np, lax, x):
    return lax.fori_loop(0, 4, lambda i, s: (s[0] * x, s[1] + s[0]), (np.ones(4), np.zeros(4)))


@case(VECTOR)
def branch_taken(np, lax, x):
    return lax.cond(x[0] < 10, lambda x: np.sin(x), lambda x: np.cos(x), x)


@case(VECTOR)
def branch_not_taken(np, lax, x):
    return lax.cond(x[0] > 10, lambda x: np.sin(x), lambda x: np.cos(x), x)


@case(VECTOR, MATRIX)
def branches_that_capture(np, lax, x, w):
    return lax.cond(x.sum() > -100, lambda: w @ x, lambda: w.T @ np.exp(x))


@case(VECTOR, MATRIX)
def branches_with_operands_of_their_own(np, lax, x, w):
    return lax.cond(x.sum() > 0, lambda a, b: (a @ b, a.sum()), lambda a, b: (b, np.float64(2.0) * b[0]), w, x)


@case(VECTOR)
def branch_with_a_constant(np, lax, x):
    return lax.cond(x.sum() > 100, lambda x: x, lambda x: np.zeros(4), x)


@case(VECTOR)
def branch_in_a_branch(np, lax, x):
    return lax.cond(x[0] > -9, lambda x: lax.cond(x[1] > 9, np.exp, np.tanh, x), np.sin, x)


def _switch(number: int) -> None:
    def switch(np, lax, x):
        index = np.floor(x[0] * 0).astype(int) + number
        return lax.switch(index, [lambda x: x, lambda x: x * x, lambda x: np.exp(x) + x[0]], x)

    CASES[f"switch_{number}"] = switch, (VECTOR,)


for _number in (-3, 0, 1, 2, 7):
    _switch(_number)


@case(VECTOR)
def gradient_in_a_loop(np, lax, x):
    return lax.fori_loop(0, 3, lambda i, v: v - 0.1 * lax.grad(lambda u: (np.sin(u) * u).sum())(v), x)


@case(VECTOR)
def gradient_of_a_loop_in_a_loop(np, lax, x):
    inner = lambda v: lax.fori_loop(0, 2, lambda i, u: np.sin(u) * v, v).sum()
    return lax.scan(lambda v, _: (v - 0.1 * lax.grad(inner)(v), inner(v)), x, None, length=3)


@case(VECTOR)
def second_derivative(np, lax, x):
    inner = lambda v: lax.scan(lambda c, r: (c * np.sin(r) + r, c), np.float64(1.0), v)[0]
    return lax.grad(lambda v: (lax.grad(inner)(v) ** 2).sum())(x)


@case(ROWS)
def indices_and_updates(np, lax, xs):
    return lax.scan(lambda c, i: (c + lax.asarray(xs)[i] * i, lax.asarray(xs)[i, i % 4]), np.zeros(4), np.arange(5))


@case(ROWS, MATRIX)
def attention_over_a_scan(np, lax, xs, w):
    def step(c, x):
        weights = np.exp(xs @ (w @ x))
        return c + (weights[:, None] * xs).sum(0) / weights.sum(), weights

    return lax.scan(step, np.zeros(4), xs)


FORWARD: dict[str, Case] = {}
"""Cases without gradients: while loops."""


def forward(*arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        FORWARD[fn.__name__] = fn, arguments
        return fn

    return add


@forward(VECTOR)
def doubling(np, lax, x):
    return lax.while_loop(lambda c: np.abs(c).max() < 100, lambda c: c * 2, x)


@forward(VECTOR)
def never(np, lax, x):
    return lax.while_loop(lambda c: c[0] > 100, lambda c: c * 2, x)


@forward(numpy.float64(2.0))
def newton(np, lax, x):
    return lax.while_loop(lambda s: np.abs(s * s - x) > 1e-12, lambda s: (s + x / s) / 2, x)


@forward(numpy.int64(27))
def collatz(np, lax, n):
    step = lambda s: (lax.cond(s[0] % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, s[0]), s[1] + 1)
    return lax.while_loop(lambda s: s[0] != 1, step, (n, 0))


@forward(numpy.int64(5), VECTOR)
def loop_to_a_traced_bound(np, lax, n, x):
    return lax.fori_loop(0, n, lambda i, v: v + i * x, np.zeros(4))


@forward(MATRIX, VECTOR)
def power_iteration(np, lax, w, x):
    def step(s):
        y = (w + w.T) @ s[0]
        y = y / np.sqrt((y * y).sum())
        return y, np.abs(y - s[0]).max(), s[2] + 1

    return lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 50), step, (x, np.float64(1.0), 0))


@forward(ROWS)
def while_in_a_scan(np, lax, xs):
    inner = lambda c, x: lax.while_loop(lambda v: v.sum() < 5, lambda v: v + np.abs(x) + 0.1, c)
    return lax.scan(lambda c, x: (inner(c, x) - 4, c), np.zeros(4), xs)


@forward(VECTOR)
def scan_in_a_while(np, lax, x):
    body = lambda s: (lax.scan(lambda c, r: (c + r * 0.1, None), s[0], np.ones((3, 4)))[0], s[1] + 1)
    return lax.while_loop(lambda s: s[0].max() < 3, body, (x, 0))
