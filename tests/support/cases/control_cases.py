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


@case(VECTOR, ROWS)
def reversed_scan_of_no_iterations(np, lax, c, xs):
    return lax.scan(lambda c, x: (c * x, (c, x.sum())), c, xs[5:], reverse=True)


@case(VECTOR)
def polynomial_by_horner(np, lax, coefficients):
    return lax.scan(lambda y, c: (y * coefficients[0] + c, y), np.float64(0.0), coefficients, reverse=True)


@case(ROWS)
def scan_that_carries_nothing(np, lax, xs):
    return lax.scan(lambda c, x: (c, {"norm": np.sqrt((x * x).sum()), "largest": np.argmax(x)}), (), xs)


@case(ROWS)
def trees_with_none(np, lax, xs):
    step = lambda c, x: ((c[0], None, c[2] + x[1][0]), (None, x[0] * c[2]))
    return lax.scan(step, (xs[0, 0], None, np.ones(4)), (xs, (xs[::-1], None)))


@case(VECTOR)
def fibonacci(np, lax, x):
    return lax.scan(lambda c, _: ((c[1], c[0] + c[1]), c[0]), (x, x * 2), None, length=6)


@case(MATRIX)
def carry_that_is_also_scanned_and_captured(np, lax, w):
    return lax.scan(lambda c, row: (np.sin(c @ w) + row, row @ w[0]), w, w)


@case(ROWS)
def flags_as_a_carry(np, lax, xs):
    def step(state, x):
        high, total, count = state
        return (x.sum() > 0, total + np.where(high, x, -x), count + high), high

    return lax.scan(step, (True, np.zeros(4), 0), xs)


@case(VECTOR)
def integers_as_indices_in_a_carry(np, lax, x):
    step = lambda s, _: (((s[0] * 3 + 1) % 4, s[1] * lax.asarray(x)[s[0]]), s[0])
    return lax.scan(step, (np.int64(2), np.float64(1.0)), None, length=5)


@case(ROWS)
def running_maximum(np, lax, xs):
    return lax.scan(lambda m, x: (np.maximum(m, x), np.maximum(m, x).sum()), np.full(4, -5.0), xs)


@case(ROWS)
def logarithm_of_a_sum_online(np, lax, xs):
    def step(state, x):
        top, total = state
        new = np.maximum(top, x)
        return (new, total * np.exp(top - new) + np.exp(x - new)), None

    top, total = lax.scan(step, (xs[0], np.ones(4)), xs[1:])[0]
    return top + np.log(total)


@case(MATRIX, MATRIX, ROWS)
def gated_network(np, lax, w, u, xs):
    def step(state, x):
        h, c = state
        gate = 1 / (1 + np.exp(-(u @ h + x)))
        c = gate * c + (1 - gate) * np.tanh(w @ h)
        return (gate * np.tanh(c), c), h

    return lax.scan(step, (np.zeros(4), np.ones(4)), xs)


@case(MATRIX)
def scan_in_both_directions(np, lax, w):
    def outer(c, row):
        inner, ys = lax.scan(lambda d, r: (d * np.cos(r) + row, d.sum()), c, w, reverse=True)
        return inner, ys

    return lax.scan(outer, np.ones(4), w)


@case(VECTOR, MATRIX)
def loop_in_a_branch(np, lax, x, w):
    many = lambda x: lax.scan(lambda c, r: (np.tanh(c * r), c.sum()), x, w)
    return lax.cond(x[0] < 9, many, lambda x: (x, np.zeros(4)), x)


@case(ROWS)
def branch_by_parity(np, lax, xs):
    def step(c, item):
        i, x = item
        return lax.cond(i % 2 == 0, lambda c: c + x, lambda c: c * x, c), i

    return lax.scan(step, np.ones(4), (np.arange(5), xs))


@case(ROWS)
def choice_in_each_iteration(np, lax, xs):
    branches = [lambda c, x: c + x, lambda c, x: c * x, lambda c, x: np.sin(c)]
    return lax.scan(lambda c, i: (lax.switch(i % 4 - 1, branches, c, lax.asarray(xs)[i]), c[0]), np.ones(4), np.arange(5))


@case(VECTOR)
def branch_of_which_one_uses_nothing(np, lax, x):
    return lax.cond(x.sum() > -99, lambda x, n: (x * n, n), lambda x, n: (np.ones(4), n), x, np.int64(3))


@case(VECTOR, MATRIX)
def branches_with_different_captures(np, lax, x, w):
    return lax.switch(np.int64(1), [lambda: x.sum(), lambda: (w @ x).sum(), lambda: w.sum()])


@case(VECTOR)
def predicate_that_is_a_number(np, lax, x):
    return lax.cond(np.floor(np.abs(x[0])).astype(int), lambda: x * 2, lambda: x**3)


@case(MATRIX)
def power_of_a_matrix(np, lax, w):
    return lax.fori_loop(0, 3, lambda i, p: p @ w, w)


@case(VECTOR)
def loop_from_a_negative_bound(np, lax, x):
    return lax.fori_loop(-3, 2, lambda i, s: {"a": s["a"] * x + i, "b": s["a"]}, {"a": x, "b": x})


@case(VECTOR, ROWS)
def tangents_of_a_scan(np, lax, x, xs):
    run = lambda x: lax.scan(lambda c, r: (np.sin(c * r), c), x, xs)
    return lax.jvp(run, (x,), (xs[0],))


@case(VECTOR, ROWS)
def gradient_of_tangents(np, lax, x, xs):
    run = lambda x: lax.scan(lambda c, r: (np.sin(c * r), None), x, xs)[0].sum()
    return lax.grad(lambda x: lax.jvp(run, (x,), (x * x,))[1])(x)


@case(VECTOR)
def tangents_of_branches(np, lax, x):
    return lax.jvp(lambda x: lax.cond(x[0] > 99, np.sin, lambda x: x * x[0], x), (x,), (x[::-1],))


@case(MATRIX, ROWS)
def batch_of_scans(np, lax, w, xs):
    return lax.vmap(lambda row: lax.scan(lambda c, x: (np.tanh(c * x + row), c.sum()), row, xs))(w)


@case(MATRIX)
def batch_that_decides(np, lax, w):
    return lax.vmap(lambda row: lax.cond(row[0] > 0, lambda r: np.sin(r), lambda r: r * r, row))(w)


@case(MATRIX)
def batch_that_chooses(np, lax, w):
    branches = [np.sin, lambda r: r * r, lambda r: r[::-1]]
    return lax.vmap(lambda row, i: lax.switch(i, branches, row))(w, np.arange(-1, 3))


@case(MATRIX)
def batch_of_loops_with_branches(np, lax, w):
    step = lambda i, r: lax.cond(r.sum() > i - 1, lambda r: r * 0.5, lambda r: r + 1.0, r)
    return lax.vmap(lambda row: lax.fori_loop(0, 4, step, row))(w)


@case(VECTOR, MATRIX)
def batch_of_what_is_captured(np, lax, x, w):
    return lax.vmap(lambda row: lax.scan(lambda c, _: (c * 2.0 + row, None), x, None, length=2)[0])(w)


@case(MATRIX)
def gradients_of_a_batch(np, lax, w):
    inner = lambda row: lax.scan(lambda c, r: (c * np.cos(r) + r, None), np.float64(1.0), row)[0]
    return lax.vmap(lax.grad(inner))(w)


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


@forward(MATRIX)
def batch_of_loops_that_end_apart(np, lax, w):
    return lax.vmap(lambda row: lax.while_loop(lambda s: (s[0] ** 2).sum() < 50, lambda s: (s[0] * 1.5, s[1] + 1), (row, 0)))(w)


@forward(VECTOR)
def batch_of_bounds(np, lax, x):
    return lax.vmap(lambda n: lax.fori_loop(n, 2 * n, lambda i, v: v + i * x, x))(np.arange(4))


@forward(MATRIX)
def batch_with_a_common_condition(np, lax, w):
    return lax.vmap(lambda row: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * row), (0, row)))(w)


@forward(numpy.int64(84), numpy.int64(35))
def greatest_common_divisor(np, lax, a, b):
    return lax.while_loop(lambda s: s[1] != 0, lambda s: (s[1], s[0] % np.maximum(s[1], 1)), (a, b))[0]


@forward(numpy.int64(3), numpy.int64(4))
def loop_in_a_loop(np, lax, a, b):
    inner = lambda total: lax.while_loop(lambda s: s[0] < b, lambda s: (s[0] + 1, s[1] + 1), (0, total))[1]
    return lax.while_loop(lambda s: s[0] < a, lambda s: (s[0] + 1, inner(s[1])), (0, np.int64(0)))[1]


@forward(VECTOR)
def condition_and_body_that_capture(np, lax, x):
    return lax.while_loop(lambda c: c.sum() < x.sum() + 9, lambda c: c + np.abs(x) + 0.5, np.zeros(4))


@forward(numpy.float64(7.0))
def bisection(np, lax, x):
    def halve(s):
        low, high = s
        middle = (low + high) / 2
        return lax.cond(middle * middle < x, lambda: (middle, high), lambda: (low, middle))

    return lax.while_loop(lambda s: s[1] - s[0] > 1e-9, halve, (np.float64(0.0), x + 1))


@forward(VECTOR)
def flag_that_ends_a_loop(np, lax, x):
    step = lambda s: (s[0] + np.abs(x).sum() + 0.1, s[0] < 4)
    return lax.while_loop(lambda s: s[1], step, (np.float64(0.0), True))
