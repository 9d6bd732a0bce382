"""custom_vjp with keywords and with arguments that are not differentiated; weight gradients as one product."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll.errors import PytreeError, TraceError
from tests.support.example_counts import examples

pytestmark = pytest.mark.covers("gradients")

X = np.linspace(-1, 1, 6).reshape(2, 3)


def scaled(x, factor=2.0, shift=0.0):
    return x * factor + shift


def make():
    rule = fc.custom_vjp(scaled)
    seen = []

    def forward(x, *rest):
        seen.append(len(rest))
        return scaled(x, *rest), rest

    return rule.defvjp(forward, lambda rest, ct: (10 * ct, *(None for _ in rest))), seen


@pytest.mark.parametrize(
    ("call", "rest"),
    [
        (lambda f, x: f(x), 0),
        (lambda f, x: f(x=x), 0),
        (lambda f, x: f(x, factor=3.0), 1),
        (lambda f, x: f(x, shift=1.0), 2),
        (lambda f, x: f(shift=1.0, x=x), 2),
        (lambda f, x: f(x, 3.0, 1.0), 2),
    ],
)
def test_keywords_reach_the_rules_by_position(call, rest):
    rule, seen = make()
    value, gradient = fc.value_and_grad(lambda x: np.sum(call(rule, x)))(X)
    assert value == np.sum(call(scaled, X)) and np.array_equal(gradient, np.full_like(X, 10)) and seen == [rest]
    assert np.array_equal(call(rule, X), call(scaled, X))
    assert np.array_equal(fc.jit(lambda x: call(rule, x))(X), call(scaled, X))


def test_arguments_that_are_not_differentiated():
    @functools.partial(fc.custom_vjp, nondiff_argnums=(0, 2))
    def apply(fn, x, mode="plain"):
        return fn(x) if mode == "plain" else -fn(x)

    def forward(fn, x, mode="plain"):
        return apply(fn, x, mode), x

    def backward(fn, *rest):
        *mode, x, ct = rest
        return (ct * (fn(x) + (100 if mode == ["other"] else 0)),)

    apply.defvjp(forward, backward)
    assert np.array_equal(fc.grad(lambda x: np.sum(apply(np.exp, x)))(X), np.exp(X))
    for run in (lambda f: f, fc.jit):
        found = run(fc.value_and_grad(lambda x: np.sum(apply(np.exp, x, mode="other"))))(X)
        assert found[0] == pytest.approx(-np.sum(np.exp(X))) and np.array_equal(found[1], np.exp(X) + 100)


def test_bad_rules_and_calls():
    rule, _ = make()
    with pytest.raises(TraceError, match=r"custom_vjp scaled: got an unexpected keyword argument 'scale'"):
        rule(X, scale=3)
    only = fc.custom_vjp(lambda x, *, n: x).defvjp(lambda x: (x, ()), lambda r, ct: (ct,))
    with pytest.raises(TraceError, match=r"n can only be passed by keyword"):
        only(X, n=3)
    for wrong in (-1, "0", (True,)):
        with pytest.raises(TraceError, match="must be positions of arguments"):
            fc.custom_vjp(scaled, nondiff_argnums=wrong)
    fixed = fc.custom_vjp(scaled, nondiff_argnums=1).defvjp(lambda x, f: (x, ()), lambda f, r, ct: (ct, ct))
    with pytest.raises(TraceError, match=r"the argument factor of scaled is in nondiff_argnums, and holds a traced array"):
        fc.jit(lambda x: fixed(x, x))(X)
    with pytest.raises(PytreeError, match=r"tuple of 1 cotangent\(s\), one for each argument that is not in nondiff_argnums"):
        fc.grad(lambda x: np.sum(fixed(x, 2.0)))(X)


# ---------------------------------------------------------------- weight gradients


@examples(40)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=4), st.integers(0, 3), st.sampled_from([None, 0, 1, 4]))
def test_products_with_one_matrix_have_their_gradients(lead, k, m):
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (*lead, k)).astype(np.float64)
    w = rng.integers(-3, 4, (k,) if m is None else (k, m)).astype(np.float64)
    out, pull = fc.vjp(np.matmul, x, w)
    ct = rng.integers(-3, 4, out.shape).astype(np.float64)
    of_x, of_w = pull(ct)
    full, column = (ct[..., None], w[:, None]) if m is None else (ct, w)
    assert np.array_equal(of_x, full @ column.T)
    rows = range(len(lead))
    assert np.array_equal(of_w, np.tensordot(x, full, axes=(rows, rows)).reshape(w.shape))
    second = fc.grad(lambda x, w: np.sum(fc.vjp(np.matmul, x, w)[1](ct)[1] ** 2))(x, w)
    assert np.array_equal(second, 2 * full @ of_w.reshape(column.shape).T)


def test_a_weight_gradient_is_one_product():
    x, w = np.ones((5, 7, 3)), np.ones((3, 2))
    for fn in (lambda x, w: np.sum(np.tanh(x @ w)), lambda x, w: np.sum(np.tanh(np.einsum("bnk,km->bnm", x, w)))):
        program = fc.jit(fc.grad(fn, (0, 1))).trace(x, w).lower().program
        made = [e for e in program.equations if e.primitive.blas and e.outputs[0].type.shape in ((3, 2), (5, 3, 2))]
        assert len(made) == 1 and made[0].outputs[0].type.shape == (3, 2)
        assert not any(e.primitive.name == "reduce_sum" and e.outputs[0].type.shape == (3, 2) for e in program.equations)
