"""A stand-in for `autograd.test_util`: gradients against differences, values against NumPy's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from tests.autograd.autograd_operators import pull_of, unary_to_nary

STEP = TOLERANCE = 1e-6  # autograd's own


def scalar_close(a: Any, b: Any) -> bool:
    """Autograd's tolerance."""
    return abs(a - b) < TOLERANCE or abs(a - b) / abs(a + b) < TOLERANCE


def _leaves(x: Any) -> list[Any]:
    return [np.asarray(v) for v in optree.tree_leaves(x)]


def _random(x: Any) -> Any:
    def draw(v: Any) -> Any:
        v = np.asarray(v)
        out = np.array(np.random.randn(*v.shape))  # noqa: NPY002  (the seeds that the tests set)
        return out + 1j * np.random.randn(*v.shape) if v.dtype.kind == "c" else out  # noqa: NPY002

    return optree.tree_map(draw, x)


def _inner(x: Any, y: Any) -> Any:
    return sum(np.real(np.vdot(a, b)) for a, b in zip(_leaves(x), _leaves(y), strict=True))


def _check_vjp(fn: Any, x: Any) -> None:
    pull, value = pull_of(fn, x)
    plain = fn(x)
    for ours, theirs in zip(_leaves(value), _leaves(plain), strict=True):
        assert ours.shape == theirs.shape, f"shape {ours.shape} is not NumPy's {theirs.shape}"
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-12, err_msg="the traced value is not NumPy's")
    direction, cotangent = _random(x), _random(plain)
    move = lambda sign: fn(optree.tree_map(lambda v, d: v + sign * STEP / 2 * d, x, direction))
    difference = [(a - b) / STEP for a, b in zip(_leaves(move(1)), _leaves(move(-1)), strict=True)]
    pulled = optree.tree_map(np.conj, pull(optree.tree_map(np.conj, cotangent)))
    for ours, theirs in zip(_leaves(pulled), _leaves(x), strict=True):
        assert ours.shape == theirs.shape, f"a gradient of shape {ours.shape} for {theirs.shape}"
    exact, numeric = _inner(direction, pulled), _inner(cotangent, difference)
    assert scalar_close(numeric, exact), f"gradient {exact}, by differences {numeric}"


@unary_to_nary
def check_grads(fn: Any, x: Any, modes: Sequence[str] = ("fwd", "rev"), order: int = 2) -> None:
    """Compare derivatives with differences, to the order that is asked."""
    _check_vjp(fn, x)
    if order > 1:
        cotangent = _random(fn(x))
        check_grads(lambda x, ct: pull_of(fn, x)[0](ct), (0, 1), modes, order=order - 1)(x, cotangent)


def combo_check(fn: Any, *check_args: Any, **check_kwargs: Any) -> Any:
    """Check gradients with all combinations of arguments and keywords."""

    def check(*args: Any, **kwargs: Any) -> None:
        choices = [[(k, v) for v in values] for k, values in kwargs.items()]
        for chosen, named in itertools.product(list(itertools.product(*args)), list(itertools.product(*choices))):
            check_grads(fn, *check_args, **check_kwargs)(*chosen, **dict(named))

    return check


def check_equivalent(x: Any, y: Any) -> None:
    """Compare two results."""
    for a, b in zip(_leaves(x), _leaves(y), strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def quick_grad_check(fn: Any, x: Any, extra_args: Sequence[Any] = (), **options: Any) -> None:
    """`check_grads` in the first argument, by its old name."""
    check_grads(lambda x: fn(x, *extra_args), modes=["rev"], order=1)(x)
