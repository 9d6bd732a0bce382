"""Gradients of every NumPy function that can be traced, against numerical differentiation."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import optree
import pytest

import funccoll as fc
from funccoll.errors import DTypeError
from tests.support.cases.all_numpy_cases import CASES
from tests.support.cases.numpy_cases import DIRECTION, DISCRETE, SMOOTH, ZERO, Case
from tests.support.groups import in_groups
from tests.support.oracles.numpy_oracle import by_function, noted, numerical, run

pytestmark = pytest.mark.covers("numpy")


def _differentiable(case: Case) -> list[int]:
    return [i for i, a in enumerate(case.args) if a.dtype.kind in "fc"]


def _weights(case: Case) -> list[np.ndarray | None]:
    """A random cotangent for each inexact output."""
    rng = np.random.default_rng(3)
    outs = [np.asarray(o) for o in optree.tree_leaves(run(case, *case.args))]
    weights = []
    for o in outs:
        w = rng.normal(size=o.shape) + (1j * rng.normal(size=o.shape) if o.dtype.kind == "c" else 0)
        weights.append(w.astype(o.dtype) if o.dtype.kind in "fc" else None)
    return weights


def _scalar(case: Case):
    weights = _weights(case)

    def loss(*args):
        total = 0.0
        for w, out in zip(weights, optree.tree_leaves(case.call(*args)), strict=True):
            if w is not None:
                total = total + np.sum(np.real(w * out))
        return total

    return loss


SMOOTH_CASES = [c for c in CASES if c.grad == SMOOTH]
EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few cases", "all cases"])


@EVERY
@in_groups("cases", by_function(SMOOTH_CASES))
def test_first_and_second_gradient(cases, every):
    for case in cases if every else cases[-1:]:
        with noted(case.id):
            check_first_and_second_gradient(case)


def check_first_and_second_gradient(case: Case) -> None:
    argnums = _differentiable(case)
    assert argnums and any(w is not None for w in _weights(case))
    loss = _scalar(case)
    first = fc.grad(loss, argnums)
    got = first(*case.args)
    with np.errstate(all="ignore"):
        want = numerical(loss, case.args, argnums, 1e-6)
    for g, w, i in zip(got, want, argnums, strict=True):
        assert (g.dtype, g.shape) == (case.args[i].dtype, case.args[i].shape)
        np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-7 * max(1.0, np.abs(w).max(initial=0)))

    rng = np.random.default_rng(5)
    directions = [rng.normal(size=g.shape) + (1j * rng.normal(size=g.shape) if g.dtype.kind == "c" else 0) for g in got]

    def along(*args):
        return sum(np.sum(np.real(d * g)) for d, g in zip(directions, first(*args), strict=True))

    jitted = fc.jit(fc.grad(along, argnums))(*case.args)
    want = numerical(fc.jit(along), case.args, argnums, 1e-6)  # compiled once, for tens of calls
    for g, w in zip(jitted, want, strict=True):
        np.testing.assert_allclose(np.asarray(g), w, rtol=1e-5, atol=1e-6 * max(1.0, np.abs(w).max(initial=0)))


DIRECTION_CASES = by_function([c for c in CASES if c.grad == DIRECTION])


@EVERY
@in_groups("cases", DIRECTION_CASES)
def test_gradients_along_a_direction(cases, every):
    for case in cases if every else cases[:2]:
        with noted(case.id):
            check_gradients_along_a_direction(case)


def check_gradients_along_a_direction(case: Case) -> None:
    argnums, loss, h = _differentiable(case), _scalar(case), 1e-6
    rng = np.random.default_rng(5)
    directions = {
        i: rng.normal(size=case.args[i].shape)
        + (1j * rng.normal(size=case.args[i].shape) if case.args[i].dtype.kind == "c" else 0)
        for i in argnums
    }
    first = fc.grad(loss, argnums)

    def along(*args):
        return sum(np.sum(np.real(directions[i] * g)) for i, g in zip(argnums, first(*args), strict=True))

    ends = [[a + s * h * directions[i] if i in argnums else a for i, a in enumerate(case.args)] for s in (1, -1)]
    for f, rough in ((loss, 1e-7), (along, 1e-6)):
        want = (f(*ends[0]) - f(*ends[1])) / (2 * h)
        grads = fc.jit(fc.grad(f, argnums))(*case.args)
        for g, i in zip(grads, argnums, strict=True):
            assert (g.dtype, g.shape) == (case.args[i].dtype, case.args[i].shape)
        got = sum(np.sum(np.real(np.asarray(g) * directions[i])) for g, i in zip(grads, argnums, strict=True))
        np.testing.assert_allclose(got, want, rtol=10 * rough, atol=rough * max(1.0, abs(want)))


@in_groups("function", sorted({c.function for c in SMOOTH_CASES}, key=lambda f: f.__name__))
def test_gradients_keep_the_dtype(function):
    case = next(c for c in SMOOTH_CASES if c.function is function)
    loss = lambda *xs: sum(np.sum(np.real(o)) for o in optree.tree_leaves(case.call(*xs)))
    argnums = _differentiable(case)
    with np.errstate(all="ignore"):
        exact = fc.grad(loss, argnums)(*case.args)
    for dtype, rough in ((np.float32, 1e-4), (np.float16, 0.05)):
        narrow = {"f": np.dtype(dtype), "c": np.dtype(np.complex64)}
        args = [a.astype(narrow.get(a.dtype.kind, a.dtype)) for a in case.args]
        with np.errstate(all="ignore"), noted(narrow):
            grads = fc.jit(fc.grad(lambda *xs: loss(*xs).astype(np.float32), argnums))(*args)
            for g, e, i in zip(grads, exact, argnums, strict=True):
                assert g.dtype == args[i].dtype
                np.testing.assert_allclose(np.asarray(g), e, rtol=rough, atol=rough)


@in_groups("cases", by_function([c for c in CASES if c.grad in (ZERO, DISCRETE)]))
def test_no_gradient_where_there_is_none(cases):
    for case in cases:
        with noted(case.id):
            check_no_gradient(case)


def check_no_gradient(case: Case) -> None:
    argnums = _differentiable(case)
    if not argnums:  # integers only: asking for a gradient is an error that says so
        with pytest.raises(DTypeError, match="only floats"):
            fc.grad(lambda *xs: np.sum(case.call(*xs)), 0)(*case.args)
        return
    outs, pullback = fc.vjp(case.call, *case.args)
    if case.grad == DISCRETE:
        assert not any(np.asarray(o).dtype.kind in "fc" for o in optree.tree_leaves(outs))
    cts = optree.tree_map(lambda o: np.ones(np.shape(o), np.asarray(o).dtype), outs)
    for ct, x in zip(pullback(cts), case.args, strict=True):
        assert ct.dtype == x.dtype
        np.testing.assert_array_equal(ct, np.zeros_like(x))


def test_the_deviation_of_one_element_has_no_gradient():
    """It is 0 whatever the element is, also where a mask or NaN leaves one; unless the mean is given."""
    x, mask = np.array([[1.0, 5.0, 2.0], [4.0, 7.0, 3.0]]), np.array([[True, False, False], [True, True, True]])
    holes = np.where(mask, x, np.nan)
    below = fc.grad(lambda row: np.std(row))(x[1])
    for fn in (lambda x: np.std(x, axis=1, where=mask), lambda x: np.nanstd(np.where(mask, x, np.nan), axis=1)):
        np.testing.assert_allclose(fc.grad(lambda x, fn=fn: np.sum(fn(x)))(x), [np.zeros(3), below], rtol=1e-12)
        np.testing.assert_allclose(fc.jvp(fn, (x,), (x,))[1], [0, below @ x[1]], rtol=1e-12)
    assert not fc.grad(lambda x: np.sum(np.nanstd(x, axis=1)[:1]))(holes).any()
    assert fc.grad(lambda x: np.sum(np.std(x, mean=np.array([0.5]))))(np.array([2.0])) == 1


def test_ties_share_the_gradient():
    for pair in (np.maximum, np.minimum, np.fmax, np.fmin):
        x, y = fc.grad(lambda x, y, f=pair: np.sum(f(x, y)), (0, 1))(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
        np.testing.assert_array_equal([x, y], np.full((2, 2), 0.5))
    for f in (np.max, np.min, np.amax, np.amin):
        np.testing.assert_array_equal(fc.grad(f)(np.full(4, 2.5)), np.full(4, 0.25))
    np.testing.assert_array_equal(fc.grad(np.max)(np.array([1.0, 3.0, 3.0])), [0, 0.5, 0.5])
    np.testing.assert_array_equal(fc.grad(np.max)(np.array([1.0, np.nan, 3.0])), [0, 1, 0])
    rows = fc.grad(lambda x: np.sum(np.max(x, axis=1)))(np.array([[1.0, 1.0], [0.0, 2.0]]))
    np.testing.assert_array_equal(rows, [[0.5, 0.5], [0, 1]])
    np.testing.assert_array_equal(fc.grad(lambda x: np.sum(np.abs(x)))(np.array([-2.0, 0.0, 3.0])), [-1, 0, 1])


def test_gradients_at_hard_points():
    np.testing.assert_array_equal(fc.grad(np.prod)(np.zeros(3)), np.zeros(3))
    np.testing.assert_array_equal(fc.grad(np.prod)(np.array([0.0, 2.0, 3.0])), [6, 0, 0])
    both = fc.grad(lambda x, y: np.sum(np.power(x, y)), (0, 1))
    with np.errstate(invalid="ignore"):
        x, y = both(np.array([0.0, 0.0, 0.0, -2.0]), np.array([0.0, 1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(x, [0, 1, 0, 12])
    np.testing.assert_array_equal(y, [0, 0, 0, np.nan])  # (-2) ** y is a real number at whole numbers alone
    for f in (np.logaddexp, np.logaddexp2):
        pair = fc.grad(lambda x, y, f=f: np.sum(f(x, y)), (0, 1))
        x, y = pair(np.array([-np.inf, 0.0, np.inf]), np.array([0.0, -np.inf, 0.0]))
        np.testing.assert_array_equal([x, y], [[0, 1, 1], [1, 0, 0]])
    z = fc.grad(lambda z: np.sum(np.abs(z)))(np.array([0j, 3 + 4j]))
    np.testing.assert_allclose(z, [0, 0.6 - 0.8j])


@pytest.mark.processes
def test_programs_of_gradients_are_equal_in_every_process():
    """Python's hashes of strings differ between processes; a program's text must not."""
    script = (
        "import numpy as np, funccoll as fc\n"
        "f = lambda x, y: np.sum(np.einsum('iij,jk->k', x, y)) + np.sum(np.linalg.norm(x, axis=(0, 2)))\n"
        "print(fc.jit(fc.grad(f, (0, 1))).trace(np.ones((2, 2, 3)), np.ones((3, 2))).fingerprint)"
    )
    runs = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        runs.append(subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True))
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout.strip()) == 64
