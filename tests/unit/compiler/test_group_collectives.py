"""The order in which a program runs: collectives side by side, and nothing overwritten that is still to be read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.compiler import generate
from funccoll.compiler.passes.buffers import Buffers, plan_buffers
from funccoll.compiler.passes.group_collectives import group_collectives
from tests.support.cases.step_programs import STEPS, program
from tests.support.example_counts import examples

pytestmark = pytest.mark.covers("passes")

MESH = fc.make_mesh({"d": 2, "e": 2})


@examples(60)
@given(STEPS)
def test_memory_is_overwritten_only_when_nobody_reads_it_later(choices):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(4, 4)).astype(np.float32) for _ in range(2))
    specs = {"mesh": MESH, "in_specs": P("d", "e"), "out_specs": P("d", "e")}
    found = [np.array(v) for v in fc.jit(program(choices), **specs)(x, y)]
    careful = generate.plan_buffers
    generate.plan_buffers = lambda *how, **more: Buffers({}, plan_buffers(*how, **more).borrowed)
    try:
        wanted = [np.array(v) for v in fc.jit(program(choices), **specs)(x, y)]
    finally:
        generate.plan_buffers = careful
    for mine, right in zip(found, wanted, strict=True):
        assert mine.tobytes() == right.tobytes()


@examples(60)
@given(STEPS, st.lists(st.integers(0, 2), min_size=22, max_size=22))
def test_the_order_with_groups_can_run(choices, buckets):
    shape = np.zeros((4, 4), np.float32)
    before = fc.jit(program(choices), mesh=MESH, in_specs=P("d", "e"), out_specs=P("d", "e")).lower(shape, shape).program
    marks = iter(buckets)
    before = before.replace(
        equations=tuple(e.replace(bucket=next(marks)) if e.primitive.communicates else e for e in before.equations)
    )
    after = group_collectives(before).check()
    assert set(after.equations) == set(before.equations)
    assert after.collectives() == before.collectives()

    def groups(p):
        kinds = [e.primitive.communicates for e in p.equations]
        return sum(now and not past for past, now in zip([False, *kinds], kinds, strict=False))

    assert groups(after) <= groups(before)


def test_a_value_that_is_read_after_a_collective_is_not_overwritten_before_it():
    @fc.jit(mesh=fc.make_mesh({"d": 2}), in_specs=P("d"), out_specs=P("d"))
    def step(x):
        a = x * 2.0
        r = fc.all_reduce(x, "d")
        b = a + r
        return b, np.exp(a)

    x = np.arange(8, dtype=np.float32)
    b, _ = step(x)
    np.testing.assert_array_equal(np.asarray(b), 2 * x + np.tile(x[:4] + x[4:], 2))


def test_buckets_of_gradients_are_reduced_where_their_last_gradient_is_made():
    """In calls of their own, the first together with the loss, which nothing waits for."""

    def loss_fn(weights, x):
        for w in weights:
            x = np.tanh(x @ w)
        return np.mean(x)

    def step(weights, x):
        mean_loss = fc.data_parallel(loss_fn, ("d", "e"), first_bucket_mb=1e-6, bucket_cap_mb=1e-6)
        loss, grads = fc.value_and_grad(mean_loss)(weights, x)
        return loss, fc.tree.map(np.maximum, weights, grads)

    jitted = fc.jit(step, mesh=MESH, in_specs=(P(), P(("d", "e"))), out_specs=P())
    lowered = jitted.lower([np.eye(3, dtype=np.float32)] * 4, np.ones((8, 3), np.float32))
    reduced = [eqn for eqn in lowered.program.equations if eqn.primitive.communicates]
    assert [(eqn.params["op"], eqn.bucket) for eqn in reduced] == [("mean", 0), *(("sum", k) for k in (1, 2, 3, 4))]
    assert len(lowered.collectives()) == 5
    names = {"all_reduce": "r", "matmul": "m", "maximum": "u"}
    order = group_collectives(lowered.program).check().equations
    found = "".join(names.get(eqn.primitive.name, "") for eqn in order)
    assert found == "mmmm" + "mmrr" + "mmr" * 2 + "mr" + "uuuu"
