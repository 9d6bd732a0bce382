"""Calls of data-parallel functions: reductions, uneven batches, accumulation, buffers, hooks with state, and the plan."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.errors import PytreeError, ShapeError, TraceError, VaryingError
from funccoll.parallel.buckets import Bucket, CommHook
from funccoll.parallel.data_parallel_function import Accumulated
from tests.support.cases.data_parallel_cases import ROWS, check, integers, outcomes, params_of, summed
from tests.support.ranks.ranks import JOIN, Ranks

pytestmark = pytest.mark.covers("data-parallel")


def mesh_of(n: int) -> Any:
    return fc.make_mesh({"data": n})


def on_devices(n: int, dp: Any, *args: Any) -> tuple[Any, Any]:
    specs = (P(), *[ROWS] * (len(args) - 1))
    loss, grads = fc.jit(dp.value_and_grad, mesh=mesh_of(n), in_specs=specs, out_specs=(P(), P()))(*args)
    return np.asarray(loss), fc.tree.map(np.asarray, grads)


def equal(found: Any, wanted: Any) -> None:
    fc.tree.map(lambda f, w: np.testing.assert_array_equal(np.asarray(f), np.asarray(w)), found, wanted)


def counts_of(n: int) -> st.SearchStrategy[list[int]]:
    """Numbers of rows of n devices, not all of them 0: equal ones or any."""
    uneven = st.lists(st.integers(0, 4), min_size=n, max_size=n).filter(any)
    return st.integers(1, 4).map(lambda rows: [rows] * n) | uneven


@settings(deadline=None, max_examples=20)
@given(counts=st.sampled_from([1, 2, 3, 4]).flatmap(counts_of), seed=st.integers(0, 99))
def test_any_split_of_a_batch_has_the_gradient_of_one_device(counts, seed):
    """Exactly, where everything is an integer: devices have different numbers of rows, the rest is padding of weight 0."""
    check(outcomes(mesh_of(len(counts)), counts, seed), counts, seed)


JOB = (
    JOIN
    + """
import json
from tests.support.cases.data_parallel_cases import *
mesh = fc.make_mesh({"data": fc.world_size()})
while request := hear():
    say(json.dumps(outcomes(mesh, *json.loads(request))))
"""
)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_any_split_over_processes_has_the_gradient_of_one_device(n):
    """One job executes all examples."""
    with Ranks(JOB, range(n)) as ranks:
        assert set(ranks.lines().values()) == {"in"}

        @settings(deadline=None, max_examples=20)
        @given(counts=counts_of(n), seed=st.integers(0, 99))
        def splits(counts: list[int], seed: int) -> None:
            for rank in range(n):
                ranks.tell(rank, json.dumps([counts, seed]))
            for found in map(json.loads, ranks.lines().values()):
                check(found, counts, seed)

        splits()
        for rank in range(n):
            ranks.tell(rank)
        ranks.end_well()


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_gradients_are_accumulated_without_communication(reduction):
    """Those of three batches are those of one of all rows (a sum of means, where each is a mean)."""
    n, parts = 2, 3
    x, weight = integers(parts * n * 2, 3), integers(parts * n * 2, seed=2) ** 2 + 1
    loss = summed if reduction == "weighted" else lambda *a: summed(*a)[0]
    dp, mesh, params = fc.data_parallel(loss, reduction=reduction), mesh_of(n), params_of()
    first = fc.jit(dp.accumulate, mesh=mesh, in_specs=(P(), ROWS, ROWS), out_specs=ROWS)
    specs = (P(), ROWS, ROWS, ROWS)
    more = fc.jit(lambda p, a, *b: dp.accumulate(p, *b, accumulated=a), mesh=mesh, in_specs=specs, out_specs=ROWS)
    last = fc.jit(lambda p, a, *b: dp.value_and_grad(p, *b, accumulated=a), mesh=mesh, in_specs=specs, out_specs=P())
    batches = list(zip(np.split(x, parts), np.split(weight, parts), strict=True))
    found = first(params, *batches[0])
    assert isinstance(found, Accumulated) and found.gradients["w"].shape == (n, 3, 2) and found.weight.shape == (n,)
    assert len(first.lower(params, *batches[0]).collectives()) == 0
    assert len(more.lower(params, found, *batches[1]).collectives()) == 0
    loss, grads = last(params, more(params, found, *batches[1]), *batches[2])
    sums, wanted = fc.value_and_grad(lambda p: summed(p, x, weight)[0])(params)
    divisor = {"mean": n, "sum": 1, "weighted": weight.sum()}[reduction]
    fc.tree.map(lambda g, w: np.testing.assert_allclose(np.asarray(g), w / divisor, rtol=1e-14), grads, wanted)
    if reduction == "weighted":
        np.testing.assert_allclose(float(loss), sums / divisor, rtol=1e-14)
    else:
        np.testing.assert_allclose(float(loss), summed(params, *batches[2])[0] / divisor, rtol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_a_device_with_padding_adds_nothing(reduction):
    """Its loss may be anything, as that of infinities is."""
    x, weight, active = integers(8, 3), np.arange(1.0, 9), np.array([True, False, True, True])
    x[2:4] = np.inf
    loss = summed if reduction == "weighted" else lambda *a: summed(*a)[0]
    dp = fc.data_parallel(loss, reduction=reduction)

    def step(params: Any, active: Any, *batch: Any) -> Any:
        return dp.value_and_grad(params, *batch, active=active), dp(params, *batch, active=active)

    specs = (P(), ROWS, ROWS, ROWS)
    finite = x.copy()
    finite[2:4] = 7
    (loss, grads), again = fc.jit(step, mesh=mesh_of(4), in_specs=specs, out_specs=P())(params_of(), active, finite, weight)
    keep = np.repeat(active, 2)
    sums, wanted = fc.value_and_grad(lambda p: summed(p, x[keep], weight[keep])[0])(params_of())
    divisor = {"mean": 3, "sum": 1, "weighted": weight[keep].sum()}[reduction]
    np.testing.assert_allclose(float(loss), sums / divisor, rtol=1e-14)
    assert float(loss) == float(again)
    fc.tree.map(lambda g, w: np.testing.assert_allclose(np.asarray(g), w / divisor, rtol=1e-14), grads, wanted)
    assert np.isfinite(fc.jit(step, mesh=mesh_of(4), in_specs=specs, out_specs=P())(params_of(), active, x, weight)[1])


def with_buffers(params: Any, buffers: Any, x: Any) -> Any:
    y = x @ params["w"]
    seen = {
        "mean": buffers["mean"] * 0.5 + np.mean(y, axis=0) * 0.5,
        "count": buffers["count"] + len(x),
        "first": np.argmax(y[:, 0]),
    }
    return np.mean(y**2), seen


@pytest.mark.parametrize("how", ["broadcast", "mean"])
@pytest.mark.parametrize("padded", [False, True])
def test_buffers_are_equal_on_all_devices(how, padded):
    n, x, params = 4, integers(8, 3), {"w": integers(3, 2)}
    buffers = {"mean": np.ones(2), "count": np.int64(5), "first": np.int64(9)}
    active = np.array([not padded, True, True, False]) if padded else np.ones(n, bool)
    dp = fc.data_parallel(with_buffers, buffers=how)

    def step(params: Any, buffers: Any, active: Any, x: Any) -> Any:
        (loss, buffers), grads = dp.value_and_grad(params, buffers, x, active=active if padded else None)
        return loss, buffers, grads

    jitted = fc.jit(step, mesh=mesh_of(n), in_specs=(P(), P(), ROWS, ROWS), out_specs=P())
    _, found, grads = jitted(params, buffers, active, x)
    each = [with_buffers(params, buffers, part)[1] for part in np.split(x, n)]
    first = buffers if padded else each[0]  # device 0 has only padding: its buffers stay
    assert int(found["count"]) == 5 + 2 and int(found["first"]) == int(first["first"])
    means = np.mean([e["mean"] for e, on in zip(each, active, strict=True) if on], axis=0)
    np.testing.assert_allclose(found["mean"], means if how == "mean" else first["mean"], rtol=1e-15)
    rows = np.repeat(active, 2)
    wanted = fc.grad(lambda p: with_buffers(p, buffers, x[rows])[0])(params)
    np.testing.assert_allclose(grads["w"], wanted["w"], rtol=1e-13)


def test_buffers_and_aux():
    def loss(params: Any, buffers: Any, x: Any) -> Any:
        value, buffers = with_buffers(params, buffers, x)
        return value, (buffers, {"rows": np.sum(x, axis=1)})

    dp = fc.data_parallel(loss, buffers="mean", has_aux=True)
    buffers, x = {"mean": np.ones(2), "count": np.int64(5), "first": np.int64(9)}, integers(8, 3)
    step = fc.jit(dp, mesh=mesh_of(2), in_specs=(P(), P(), ROWS), out_specs=(P(), (P(), ROWS)))
    value, (made, aux) = step({"w": integers(3, 2)}, buffers, x)
    assert int(made["count"]) == 9
    np.testing.assert_array_equal(aux["rows"], x.sum(1))
    np.testing.assert_allclose(float(value), with_buffers({"w": integers(3, 2)}, buffers, x)[0], rtol=1e-13)


# ---------------------------------------------------------------- hooks


def counting(scale: float = 1.0) -> CommHook:
    """A hook that counts its calls in its state, and keeps what it was given."""

    def reduce(states: Any, bucket: Bucket) -> Any:
        summed = bucket.from_buffer(fc.all_reduce(bucket.buffer() * np.asarray(scale, bucket.dtype), "data"))
        return tuple({"calls": s["calls"] + 1, "last": g} for s, g in zip(states, bucket.gradients, strict=True)), summed

    return CommHook(lambda g: {"calls": np.zeros((), np.int64), "last": np.zeros_like(g)}, reduce)


def test_a_hook_with_state_is_carried_from_call_to_call():
    n, x, params = 4, integers(8, 3), {"n": np.int32(4), **params_of()}
    dp = fc.data_parallel(lambda p, x: summed(p, x, np.ones(len(x)))[0], comm_hook=counting(), reduction="sum")
    state = fc.jit(dp.init, mesh=mesh_of(n), in_specs=P(), out_specs=ROWS)(params)
    assert state["w"]["last"].shape == (n, 3, 2) and state["n"] == ()
    specs = {"in_specs": (P(), ROWS, ROWS), "out_specs": (P(), P(), ROWS)}
    step = fc.jit(lambda p, s, x: dp.value_and_grad(p, x, state=s), mesh=mesh_of(n), **specs)
    for _ in range(3):
        _, grads, state = step(params, state, x)
    wanted = fc.grad(lambda p, x: summed({**params, **p}, x, np.ones(len(x)))[0])({"w": params["w"], "b": params["b"]}, x)
    equal({"w": grads["w"], "b": grads["b"]}, wanted)
    equal(state["w"]["calls"], np.full(n, 3))
    equal(np.asarray(state["w"]["last"]).sum(0), wanted["w"])  # of each device its own
    plan = dp.explain(mesh_of(n), params, x)
    assert [row.parameters for row in plan.rows] == [("['b']", "['w']")] and plan.without_gradient == ("['n']",)


def half(bucket: Bucket) -> Bucket:
    narrow = bucket.replace([g.astype(np.float16) for g in bucket.gradients]).all_reduce()
    return bucket.replace([g.astype(bucket.dtype) for g in narrow.gradients])


def test_a_hook_without_state_is_the_gradient():
    dp = fc.data_parallel(lambda p, x: summed(p, x, np.ones(len(x)))[0] / 8, comm_hook=half)
    step = fc.jit(fc.grad(dp), mesh=mesh_of(2), in_specs=(P(), ROWS), out_specs=P())
    x, params = integers(4, 3, dtype=np.float32), params_of(dtype=np.float32)
    wanted = fc.grad(lambda p: summed(p, x, np.ones(4, np.float32))[0] / 16)(params)
    equal(step(params, x), wanted)  # small integers and halves: float16 has them all
    sent = [row for row in step.lower(params, x).collectives() if row.dtype == "f16"]
    assert [(row.operands, row.nbytes) for row in sent] == [(2, 2 * 8)]
    plan = dp.explain(mesh_of(2), params, x)
    assert (plan.rows[0].nbytes, plan.rows[0].sent) == (32, 16)


@pytest.mark.parametrize(
    ("hook", "error", "words"),
    [
        (lambda b: b, VaryingError, r"comm_hook .* a gradient of type f64\[2\]\{data\} for params\['b'\], which varies over"),
        (
            lambda b: b.replace([g.astype(np.float32) for g in b.all_reduce().gradients]),
            ShapeError,
            r"type f32\[2\] for params\['b'\], of",
        ),
        (lambda b: b.replace([np.sum(g) for g in b.all_reduce().gradients]), ShapeError, r"f64\[\] for params\['b'\]"),
        (lambda b: b.all_reduce().gradients, TraceError, r"must return the bucket with other gradients: bucket.replace"),
        (lambda b: b.replace(b.all_reduce().gradients[:1]), TraceError, "must return the bucket"),
        (lambda b: b.from_buffer(b.buffer()[1:]), ShapeError, r"bucket 0 has 8 elements.*shape \(7,\)"),
        (CommHook(lambda g: (), lambda s, b: (s,)), TraceError, "must return .states, bucket."),
        (
            CommHook(lambda g: np.zeros(3), lambda s, b: ([x[1:] for x in s], b.all_reduce())),
            TraceError,
            r"a state of f64\[2\], and was given f64\[3\]: structure, shapes",
        ),
    ],
)
def test_hooks_that_are_refused(hook, error, words):
    dp = fc.data_parallel(lambda p, x: summed(p, x, np.ones(len(x)))[0], comm_hook=hook)

    def step(params: Any, x: Any) -> Any:
        state = dp.init(params) if isinstance(hook, CommHook) else None
        return dp.value_and_grad(params, x, state=state)[1]

    with pytest.raises(error, match=words):
        fc.jit(step, mesh=mesh_of(2), in_specs=(P(), ROWS), out_specs=P()).trace(params_of(), np.ones((4, 3)))


def test_a_hook_that_is_differentiated_twice_is_refused():
    dp = fc.data_parallel(lambda p, x: summed(p, x, np.ones(len(x)))[0], comm_hook=half)
    second = fc.grad(lambda p, x: sum(np.sum(g) for g in fc.tree.leaves(fc.grad(dp)(p, x))))
    with pytest.raises(TraceError, match=r"comm_hook half is differentiated twice.*without a comm_hook"):
        fc.jit(second, mesh=mesh_of(2), in_specs=(P(), ROWS), out_specs=P()).trace(params_of(), np.ones((4, 3)))


def test_misuse_of_states_is_named():
    loss = lambda p, x: summed(p, x, np.ones(len(x)))[0]
    plain, stateful = fc.data_parallel(loss), fc.data_parallel(loss, comm_hook=counting())
    params, x = params_of(), np.ones((4, 3))

    def refused(fn: Any, error: Any, words: str) -> None:
        jitted: Any = fc.jit(fn, mesh=mesh_of(2), in_specs=(P(), ROWS), out_specs=P())
        with pytest.raises(error, match=words):
            jitted.trace(params, x)

    refused(fc.grad(stateful), TraceError, "has a state, which fc.grad cannot carry.*dp.value_and_grad")
    refused(stateful.value_and_grad, TraceError, r"this comm_hook has a state. Make it with dp.init\(params\)")
    refused(lambda p, x: plain.init(p), TraceError, "there is none")
    refused(lambda p, x: plain.value_and_grad(p, x, state=3), TraceError, "there is none")
    refused(lambda p, x: stateful.value_and_grad(p, x, state=p["w"]), PytreeError, "state has another structure than params")
    equal_on_all = {k: {"calls": np.zeros(1, np.int64), "last": np.zeros((1, *v.shape))} for k, v in params.items()}
    refused(lambda p, x: stateful.value_and_grad(p, x, state=equal_on_all), VaryingError, r"have P\('data'\) in in_specs")
    weighted = fc.data_parallel(loss, reduction="weighted")
    refused(weighted, TraceError, r"must return \(sum, weight\).*such as the number of examples")
    refused(fc.data_parallel(loss, buffers="mean", has_aux=True), TraceError, r"must return \(loss, \(buffers, aux\)\)")
    refused(fc.data_parallel(lambda p, b: (np.sum(b), b[:1]), buffers="mean"), ShapeError, "shape and dtype must stay")
    refused(fc.data_parallel(lambda p, b: (np.sum(b), [b]), buffers="mean"), PytreeError, "buffers of another structure")
    refused(lambda p, x: plain({"n": np.int32(2)}, x), TraceError, r"no parameter is of floats.*\['n'\] of i32\[\]")
    refused(lambda p, x: plain(p, x, active=x), ShapeError, "active must be one number on each device")
    with pytest.raises(TraceError, match=r"reduction must be one of 'mean', 'sum', 'weighted', not 'avg'"):
        fc.data_parallel(loss, reduction="avg")
    both = lambda p, x: plain.value_and_grad(p, x, active=True, accumulated=plain.accumulate(p, x))
    refused(both, TraceError, "another number of devices")


# ---------------------------------------------------------------- the plan


def layers(params: Any, x: Any) -> Any:
    for w in params["layers"]:
        x = np.tanh(x @ w)
    return np.mean(x**2 + fc.stop_gradient(params["frozen"]))


def test_unused_and_frozen_parameters_need_no_communication():
    params = {"layers": [integers(4, 4, seed=k) for k in range(3)], "frozen": np.ones(4), "unused": np.ones((2, 2))}
    dp = fc.data_parallel(layers, first_bucket_mb=1e-5)
    _, grads = on_devices(2, dp, params, integers(4, 4))
    equal({k: grads[k] for k in ("frozen", "unused")}, {"frozen": np.zeros(4), "unused": np.zeros((2, 2))})
    plan = dp.explain(mesh_of(2), params, integers(4, 4))
    assert [r.parameters for r in plan.rows] == [("['layers'][2]",), ("['layers'][1]", "['layers'][0]")]
    assert plan.without_gradient == ("['frozen']", "['unused']")
    starts = [r.starts for r in plan.rows]
    assert 0 < starts[0] < starts[1] <= 1 and all(r.seconds > 0 for r in plan.rows)
    text = repr(plan)
    assert re.search(r"0 +f64 +1 +128 +128 +\d+% of the work +[\d.]+ [nµm]s +\['layers'\]\[2\]\n", text)
    assert "2 buckets over 'data' (2 devices), predicted communication" in text and "['frozen'], ['unused']" in text
    assert plan._repr_html_().count("<tr>") == 3


def test_a_tied_parameter_has_one_gradient():
    params, x = {"w": integers(3, 3)}, integers(4, 3)
    tied = lambda p, x: np.sum((x @ p["w"]) @ p["w"].T)
    _, grads = on_devices(2, fc.data_parallel(tied, reduction="sum"), params, x)
    equal(grads, fc.grad(tied)(params, x))
    assert len(fc.data_parallel(tied).explain(mesh_of(2), params, x).rows) == 1
