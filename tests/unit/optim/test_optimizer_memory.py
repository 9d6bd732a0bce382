"""Memory of optimizers' steps: donated arrays are written in place, others are not."""

from __future__ import annotations

import numpy as np
import pytest

import funccoll as fc
from funccoll import optim
from funccoll.config import FUSE
from tests.support.optimizers import bits, by_apply

pytestmark = pytest.mark.covers("optim")


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """NumPy writes to new memory. Kernels write to what is given up."""
    monkeypatch.setenv(FUSE, "1")


def address(x):
    return np.asarray(x).__array_interface__["data"][0]


def addresses(tree):
    return [address(x) for x in fc.tree.leaves(tree)]


def grads_of(params):
    return fc.tree.map(lambda x: np.ones(x.shape, x.dtype), params)


def test_donated_arrays_are_written_in_place(adam):
    step, state, params = adam
    before = addresses((params, state.mu, state.nu))
    for _ in range(3):
        params, state = step(grads_of(params), state, params)
        assert addresses((params, state.mu, state.nu)) == before
    assert int(state.count) == 3


def test_what_is_still_in_use_is_not_written(adam):
    step, state, params = adam
    kept = fc.tree.map(lambda x: np.asarray(x), params)  # views
    part, exported = np.asarray(state.mu["w"])[1:], np.from_dlpack(state.nu["b"])
    values = bits((kept, part, exported))
    new, state = step(grads_of(params), state, params)
    assert bits((kept, part, exported)) == values and bits(new) != values[: len(new)]
    assert not set(addresses(new)) & set(addresses(kept))
    assert all(x.is_deleted() for x in fc.tree.leaves(params))


def test_one_array_for_two_leaves(adam):
    """Tied parameters: one memory, two results."""
    optimizer = optim.sgd(1.0)
    step = fc.jit(by_apply(optimizer), donate_argnums=(1, 2))
    tied = fc.asarray(np.zeros(8, np.float32))
    new, _ = step({"a": np.ones(8, np.float32), "b": np.full(8, 2, np.float32)}, optimizer.init({}), {"a": tied, "b": tied})
    assert np.all(np.asarray(new["a"]) == -1) and np.all(np.asarray(new["b"]) == -2)


def test_results_that_share_memory_are_not_written_together():
    """A program that returns one value twice: two Arrays of one block."""
    twice = fc.jit(lambda x: (x + 1, x + 1))
    a, b = twice(np.zeros(8, np.float32))
    optimizer = optim.sgd(1.0)
    step = fc.jit(lambda p: optim.apply(optimizer, p, optimizer.init(p), p)[0], donate_argnums=0)
    assert np.all(np.asarray(step(a)) == 0) and np.all(np.asarray(b) == 1)


def test_a_parameter_that_is_returned_as_well_is_not_written():
    optimizer = optim.sgd(1.0)

    def body(p, g):
        new, _ = optim.apply(optimizer, g, optimizer.init(p), p)
        return new, p, p.reshape(2, 4)

    p, g = fc.asarray(np.zeros(8, np.float32)), np.ones(8, np.float32)
    new, old, view = fc.jit(body, donate_argnums=0)(p, g)
    assert np.all(np.asarray(new) == -1) and np.all(np.asarray(old) == 0) and np.all(np.asarray(view) == 0)


def test_several_steps_of_one_program():
    optimizer = optim.adam(0.1)

    def body(params, state, x):
        for _ in range(3):
            grads = fc.grad(lambda p: np.sum(np.square(x @ p)))(params)
            params, state = optim.apply(optimizer, grads, state, params)
        return params, state

    x, p = np.eye(8, dtype=np.float32) * 3, np.ones((8, 8), np.float32)
    wanted = body(p, optimizer.init(p), x)
    step = fc.jit(body, donate_argnums=(0, 1))
    params, state = fc.asarray(p), fc.tree.map(fc.asarray, optimizer.init(fc.asarray(p)))
    assert bits(step(params, state, x)) == bits(wanted)
