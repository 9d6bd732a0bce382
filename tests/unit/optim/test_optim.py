"""fc.optim: torch's values step by step, one set of bits for the pair and for `apply`, errors with the place in the tree."""

from __future__ import annotations

import json

import numpy as np
import pytest

import funccoll as fc
from funccoll import optim
from funccoll.config import FUSE
from tests.support import SUPPORT
from tests.support.optimizers import OPTIMIZERS, bits, by_apply, by_pair, random_params

pytestmark = pytest.mark.covers("optim")

TORCH = json.loads((SUPPORT / "oracles/torch_optimizers.json").read_text())
RATE = TORCH["rate"]


def tree_of(values, dtype):
    return {k: np.asarray(v, np.float64).astype(dtype) for k, v in values.items()}


# ---------------------------------------------------------------- torch


def ours(case):
    options = dict(case["options"])
    if "betas" in options:
        options["b1"], options["b2"] = options.pop("betas")
    return getattr(optim, case["name"])(RATE, **options)


@pytest.mark.parametrize("case", TORCH["cases"], ids=lambda c: f"{c['name']}-{c['dtype']}-{'-'.join(c['options'])}")
@pytest.mark.slow
def test_torchs_values_step_by_step(case):
    dtype = np.dtype(fc.bfloat16 if case["dtype"] == "bfloat16" else case["dtype"])
    optimizer, params = ours(case), tree_of(TORCH["start"], dtype)
    state = optimizer.init(params)
    step = fc.jit(by_apply(optimizer))
    # 16-bit floats: the unit of the last place, because a sum on the edge may be rounded to either side.
    tolerance = {"float64": 1e-12, "float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}[case["dtype"]]
    for grads, wanted in zip(TORCH["gradients"], case["params"], strict=True):
        params, state = step(tree_of(grads, dtype), state, params)
        for k, x in params.items():
            assert x.dtype == dtype
            np.testing.assert_allclose(np.asarray(x).astype(np.float64), wanted[k], rtol=tolerance, atol=tolerance)


def test_16_bit_floats_are_rounded_once_as_torch_does():
    """Without the rounding to one side or the other, which is rare: nearly all values are torch's."""
    same, count = 0, 0
    for case in TORCH["cases"]:
        if case["dtype"] in ("bfloat16", "float16"):
            dtype = np.dtype(fc.bfloat16 if case["dtype"] == "bfloat16" else case["dtype"])
            optimizer, params = ours(case), tree_of(TORCH["start"], dtype)
            state = optimizer.init(params)
            for grads, wanted in zip(TORCH["gradients"], case["params"], strict=True):
                params, state = optim.apply(optimizer, tree_of(grads, dtype), state, params)
                for k, x in params.items():
                    same += int(np.sum(x.astype(np.float64) == np.asarray(wanted[k])))
                    count += x.size
    assert same > 0.99 * count, (same, count)


@pytest.mark.parametrize("case", TORCH["clipped"], ids=lambda c: str(c["max_norm"]))
def test_torchs_clipping(case):
    grads = tree_of(TORCH["gradients"][0], np.float32)
    transformation = optim.clip_by_global_norm(case["max_norm"])
    found, state = fc.jit(transformation.update)(grads, transformation.init(grads))
    assert state == optim.clip(1.0).init(grads) == ()
    np.testing.assert_allclose(np.asarray(optim.global_norm(grads)), case["norm"], rtol=1e-6)
    for k, x in found.items():
        np.testing.assert_allclose(np.asarray(x), case["grads"][k], rtol=1e-6)
    if case["norm"] < case["max_norm"]:
        assert bits(found) == bits(grads)


SCHEDULES = {
    "linear": optim.linear_schedule(0.25, 1.0, 8),
    "cosine": optim.cosine_decay_schedule(1.0, 15, 0.1),
    "exponential": optim.exponential_decay(1.0, 1, 0.9),
    "staircase": optim.exponential_decay(1.0, 4, 0.5, staircase=True),
    "piecewise": optim.piecewise_constant_schedule(1.0, {7: 0.1, 3: 0.1, 11: 0.1}),
    "warmup": optim.warmup_cosine_decay_schedule(0.2, 1.0, 5, 15),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedules(name):
    schedule = SCHEDULES[name]
    wanted = TORCH["rates"][name]
    np.testing.assert_allclose([float(schedule(i)) for i in range(16)], wanted, rtol=1e-12, atol=1e-15)
    traced = fc.jit(lambda count: schedule(count))
    for i in (0, 4, 5, 15):
        assert np.asarray(traced(np.int32(i))) == schedule(i)
    if name != "exponential" and name != "staircase":
        assert float(schedule(1000)) == pytest.approx(wanted[-1])


def test_schedules_end_and_join():
    assert [float(optim.exponential_decay(1.0, 1, 0.5, end_value=0.2)(i)) for i in range(4)] == [1, 0.5, 0.25, 0.2]
    assert [float(optim.exponential_decay(1.0, 1, 2.0, end_value=5.0)(i)) for i in range(4)] == [1, 2, 4, 5]
    assert optim.constant_schedule(0.5)(7) == 0.5
    joined = optim.join_schedules([optim.constant_schedule(1.0), lambda i: 10.0 + i, optim.constant_schedule(2.0)], [2, 4])
    assert [float(joined(i)) for i in range(6)] == [1, 1, 10, 11, 2, 2]


# ---------------------------------------------------------------- one set of bits

OTHERS = [np.float16, fc.bfloat16, np.float64]
"""Dtypes beside float32."""
SLOW = pytest.mark.slow
SOME_ARE_FAST = {"chain": (), "momentum": ()}


@pytest.mark.parametrize(
    ("name", "dtypes", "fuse"),
    [
        *(pytest.param(name, OTHERS, "0", id=name) for name in OPTIMIZERS),
        *(pytest.param(name, OTHERS, "1", id=f"{name}-fused", marks=SOME_ARE_FAST.get(name, SLOW)) for name in OPTIMIZERS),
    ],
)
def test_the_pair_and_apply_have_the_same_bits(name, dtypes, fuse, monkeypatch):
    """In a trace and outside, donated or not; a schedule gives the rate. Kernels have sums of their own, in `chain`'s norm."""
    monkeypatch.setenv(FUSE, fuse)
    optimizer = OPTIMIZERS[name](optim.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5))

    def random_tree(seed=0):
        return {k: x for k, x in random_params(seed).items() if x.dtype in (np.float32, *dtypes)}

    params = random_tree()
    ways = {
        "pair": by_pair(optimizer),
        "apply": by_apply(optimizer),
        "traced pair": fc.jit(by_pair(optimizer)),
        "traced apply": fc.jit(by_apply(optimizer)),
        "donated": fc.jit(by_apply(optimizer), donate_argnums=(1, 2)),
    }
    now = {way: (optimizer.init(params), params) for way in ways}
    for i in range(4):
        grads = random_tree(i + 1)
        for way, step in ways.items():
            state, old = now[way]
            new, state = step(grads, state, old)
            now[way] = state, new
        found = {way: bits(values) for way, values in now.items()}
        kernels_sum = fuse == "1" and name == "chain"
        for way, b in found.items():
            assert b == found["traced pair" if kernels_sum and way not in ("pair", "apply") else "pair"], way
    assert bits(params) == bits(random_tree())  # NumPy arrays are the caller's, also where they are donated
    assert bits(now["pair"]) != bits((optimizer.init(params), params))


def test_infinities_and_nans_stay_what_they_are():
    values = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e38, 1e-45, 3.0] * 5, np.float32)
    for make in OPTIMIZERS.values():
        optimizer = make()
        params, grads = {"x": values}, {"x": values[::-1].copy()}
        with np.errstate(all="ignore"):
            wanted = by_pair(optimizer)(grads, optimizer.init(params), params)
        found = fc.jit(by_apply(optimizer))(grads, optimizer.init(params), params)
        for a, b in zip(fc.tree.leaves(wanted), fc.tree.leaves(found), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            nan = np.isnan(a)
            assert np.array_equal(nan, np.isnan(b)) and a[~nan].tobytes() == b[~nan].tobytes()


def test_leaves_that_are_not_contiguous():
    def body(grads, state, params):
        return optim.apply(optim.adam(0.1), grads.T, state, params.T)

    params, grads = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((3, 4), np.float32)
    state = optim.adam(0.1).init(params.T)
    assert bits(fc.jit(body)(grads, state, params)) == bits(body(grads, state, params))


def test_one_equation_for_each_dtype():
    params = random_params()
    optimizer = optim.chain(optim.clip(1.0), optim.adam(0.1))
    program = fc.jit(by_apply(optimizer)).trace(params, optimizer.init(params), params).lower().program
    steps = [eqn for eqn in program.equations if eqn.primitive.name == "optimizer_step"]
    assert sorted(str(eqn.inputs[0].type.dtype) for eqn in steps) == ["bfloat16", "float16", "float32", "float64"]
    assert sum(eqn.params["leaves"] for eqn in steps) == len(params)


def test_a_rate_may_be_a_traced_scalar():
    params = random_params()
    optimizer = optim.sgd(0.25)
    wanted, _ = optim.apply(optimizer, params, optimizer.init(params), params)

    def body(params, rate):
        inner = optim.sgd(rate)
        return optim.apply(inner, params, inner.init(params), params)[0]

    assert bits(fc.jit(body)(params, 0.25)) == bits(body(params, np.float32(0.25))) == bits(wanted)
