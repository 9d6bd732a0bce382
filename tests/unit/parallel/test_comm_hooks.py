"""Communication hooks: each against its algorithm in NumPy, what is sent, error feedback, and numbers at the edge."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P, comm_hooks
from funccoll.errors import ShapeError, TraceError
from funccoll.parallel.buckets import Bucket, CommHook
from tests.support.cases.comm_hook_cases import HOOKS, bytes_sent, first_states, reducer, step_of
from tests.support.groups import in_groups
from tests.support.hook_runs import lowered, normal, run

pytestmark = pytest.mark.covers("comm-hooks")

F32 = np.float32
every_hook = pytest.mark.parametrize("name", HOOKS)


@every_hook
@in_groups("dtype", [np.float16, fc.bfloat16, np.float32, np.float64], ids=str)
def test_every_float(name, dtype):
    """Shape and dtype stay; the sums are close to the true ones where rank 1 can be; states keep their types."""
    hook = HOOKS[name]()
    gradients = [(normal(3, 24, 1) * normal(1, 40)).astype(dtype), normal(3, 5).astype(dtype), np.zeros((3, 0, 4), dtype)]
    first = first_states(hook, gradients)
    states, sums = run(hook, [gradients] * 2, first)
    types = lambda tree: fc.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert types(states) == types(first)
    for summed, g in zip(sums[1], gradients):
        assert (summed.shape, summed.dtype) == (g.shape[1:], g.dtype)
        true = g.astype(float).sum(0)
        off = 0.2 if name == "power_sgd in int8" else 0.06  # where blocks mix P's and gradients
        np.testing.assert_allclose(summed.astype(float), true, atol=off * np.abs(true).max(initial=0))


@every_hook
def test_zeros_stay_zeros(name):
    gradients = [np.zeros((2, 24, 40), F32), np.zeros((2, 70), F32)]
    states, sums = run(HOOKS[name](), [gradients] * 2)
    for x in (sums[1][0], sums[1][1], *(x for path, x in _paths(states) if "q" not in path)):
        np.testing.assert_array_equal(x, 0)


@every_hook
@in_groups(
    ("bad", "where"),
    [
        (np.nan, 0),
        (np.inf, 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((np.nan, 1), (np.inf, 0), (-np.inf, 0), (-np.inf, 1))),
    ],
)
def test_what_is_not_finite_is_not_hidden(name, bad, where):
    """It comes out at its place on all devices, and is gone in the next step."""
    hook = HOOKS[name]()
    good = [normal(2, 24, 40), normal(2, 70)]
    ill = [g.copy() for g in good]
    ill[where][1].flat[11] = bad
    states, sums = run(hook, [good, ill])
    assert not np.isfinite(sums[1][where].flat[11])
    assert np.all(np.isfinite(sums[1][1 - where])) or "int8" in name  # blocks span gradients
    assert all(np.all(np.isfinite(x)) for x in fc.tree.leaves(states))
    _, [healthy] = run(hook, [good], states)
    assert all(np.all(np.isfinite(x)) for x in healthy)


@every_hook
@in_groups("dtype", [np.complex64, np.complex128, np.int32])
def test_other_dtypes_are_summed_as_they_are(name, dtype):
    gradients = [(10 * normal(3, 24, 40)).astype(dtype), (10 * normal(3, 6)).astype(dtype)]
    if np.dtype(dtype).kind == "c":
        gradients = [g + (1j * normal(*g.shape)).astype(dtype) for g in gradients]
    _, [sums] = run(HOOKS[name](), [gradients])
    _, [exact] = run(comm_hooks.all_reduce, [gradients])
    assert [x.tobytes() for x in sums] == [x.tobytes() for x in exact]
    assert sums[0].dtype == dtype


@pytest.mark.parametrize("name", ["int8", "power_sgd", "power_sgd in bfloat16", "power_sgd in int8"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_error_feedback_applies_everything(name, devices):
    """Over many steps the sum of what was applied approaches the sum of the true gradients."""
    base = [normal(devices, 24, 40), normal(devices, 33)]
    steps = [[b + normal(*b.shape) for b in base] for _ in range(64)]
    _, sums = run(HOOKS[name](), steps)
    for i in range(2):
        true = np.cumsum([g[i].astype(float).sum(0) for g in steps], axis=0)
        applied = np.cumsum([s[i].astype(float) for s in sums], axis=0)
        off = np.linalg.norm((applied - true).reshape(64, -1), axis=1) / np.linalg.norm(true.reshape(64, -1), axis=1)
        assert off[63] < {"int8": 0.002, "power_sgd": 0.25}.get(name, 0.35 if i == 0 else 0.005)
        assert off[63] < off[7] < 1 or off[63] < 1e-2


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_bytes(devices):
    gradients = [normal(devices, 64, 128), normal(devices, 128), normal(devices, 128, 40)]
    full = bytes_sent(lowered(comm_hooks.all_reduce, gradients))
    assert full == round(2 * (devices - 1) / devices * 13440 * 4)
    share = {
        name: bytes_sent(lowered(hook, gradients)) / full
        for name, hook in {
            "float16": comm_hooks.float16(),
            "bfloat16": comm_hooks.bfloat16(),
            "int8": comm_hooks.int8(),
            "power_sgd": comm_hooks.power_sgd(2),
            "both": comm_hooks.power_sgd(2, inner=comm_hooks.float16()),
        }.items()
    }
    factors = (2 * (64 + 128 + 128 + 40) + 128) / 13440
    expected = {"float16": 0.5, "bfloat16": 0.5, "int8": 65 / 256, "power_sgd": factors, "both": factors / 2}
    assert share == pytest.approx(expected, rel=0.01)


@every_hook
def test_in_the_backward_pass(name, line):
    """As the hook of a grad_hook, whose result must not vary: the same bits as the step that calls it directly."""
    hook, gradients = HOOKS[name](), [normal(4, 24, 40), normal(4, 6)]
    states = first_states(hook, gradients)

    def body(states: Any, gradients: Any, ws: Any) -> Any:
        states, gradients = fc.tree.map(lambda x: x[0], (states, gradients))
        kept: list[Any] = []

        def reduce(cts: Any) -> Any:
            new, sums = reducer(hook)(states, cts)
            kept.append(new)
            return sums

        def loss(ws: Any) -> Any:
            return fc.all_reduce(sum(np.sum(w * g) for w, g in zip(fc.grad_hook(ws, reduce, "data"), gradients)), "data")

        sums = fc.grad(loss)(ws)
        return fc.tree.map(lambda x: x[None], kept[0]), sums

    every = P("data")
    step = fc.jit(body, mesh=line, in_specs=(every, every, P()), out_specs=(every, P()))
    found = step(states, gradients, [np.ones((24, 40), F32), np.ones(6, F32)])
    wanted = step_of(hook, line)(states, gradients)
    for a, b in zip(fc.tree.leaves(found), fc.tree.leaves(wanted), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def train(hook: Any, mesh: Any, steps: int, **options: Any) -> tuple[dict[str, np.ndarray], list[float]]:
    """(parameters, losses) of a regression by data_parallel."""
    rng = np.random.default_rng(1)
    params = {"w1": rng.normal(size=(24, 40)) / 5, "b": np.zeros(40), "w2": rng.normal(size=(40, 30)) / 6}
    params = fc.tree.map(lambda x: x.astype(F32), params)
    x = rng.normal(size=(64, 24)).astype(F32)
    y = np.tanh(x @ rng.normal(size=(24, 30)).astype(F32) / 5)
    loss = lambda p, x, y: np.mean((np.tanh(x @ p["w1"] + p["b"]) @ p["w2"] - y) ** 2)
    dp = fc.data_parallel(loss, comm_hook=hook, **options)

    def body(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradients, *state = dp.value_and_grad(params, x, y, state=state)
        return fc.tree.map(lambda p, g: p - np.float32(1) * g, params, gradients), state[0] if state else None, value

    every, state, losses = P("data"), None, []
    if isinstance(hook, CommHook):
        state = fc.jit(dp.init, mesh=mesh, in_specs=P(), out_specs=every)(params)
    step = fc.jit(body, mesh=mesh, in_specs=(P(), every, every, every), out_specs=(P(), every, P()))
    for _ in range(steps):
        params, state, value = step(params, state, x, y)
        losses.append(float(value))
    return fc.tree.map(np.asarray, params), losses


@pytest.fixture(scope="module")
def exact():
    """The losses of training without a hook."""
    return train(comm_hooks.all_reduce, fc.make_mesh({"data": 4}), 60)[1]


@every_hook
def test_training_by_data_parallel(name, line, exact):
    """As good as without a hook, in one bucket and in three; only blocks depend on how gradients are put into buckets."""
    params, losses = train(HOOKS[name](), line, 60)
    assert exact[-1] < 0.1 * exact[0]
    assert losses[-1] < 1.1 * exact[-1] + 0.02 * exact[0]
    again, _ = train(HOOKS[name](), line, 60, first_bucket_mb=1e-4, bucket_cap_mb=1e-4)
    for a, b in zip(params.values(), again.values()):
        if "int8" in name:
            np.testing.assert_allclose(a, b, atol=0.2)
        else:
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("make", "specs"),
    [
        (lambda: comm_hooks.int8(16), P("data", None, "model")),
        (
            lambda: comm_hooks.power_sgd(2, min_compression_rate=1),
            {"error": P("data", None, "model"), "q": P("data", "model"), "inner": (), "inner_q": ()},
        ),
    ],
)
def test_parameters_that_are_split_over_another_axis(make, specs, mesh):
    """Each device reduces the gradient of its own block of the parameter, over "data"."""
    w, x = normal(24, 64), normal(8, 24)
    dp = fc.data_parallel(lambda w, x: fc.all_reduce(np.mean((x @ w["w"]) ** 2), "model"), comm_hook=make())
    place = {"w": P(None, "model")}
    state = fc.jit(dp.init, mesh=mesh, in_specs=(place,), out_specs={"w": specs})({"w": w})

    def body(state: Any, w: Any, x: Any) -> Any:
        _, gradients, state = dp.value_and_grad(w, x, state=state)
        return gradients, state

    step = fc.jit(body, mesh=mesh, in_specs=({"w": specs}, place, P("data")), out_specs=(place, {"w": specs}))
    for _ in range(2):
        gradients, state = step(state, {"w": w}, x)
    for model in range(2):
        half = w[:, model * 32 : model * 32 + 32]
        own = np.stack([2 * x[d : d + 2].T @ (x[d : d + 2] @ half) / half[:2].size / 4 for d in range(0, 8, 2)])
        _, (_, [wanted]) = run(make(), [[own]] * 2)
        np.testing.assert_allclose(gradients["w"][:, model * 32 : model * 32 + 32], wanted, rtol=1e-3, atol=2e-3)


@every_hook
def test_over_two_axes_and_in_a_mesh_of_several(name, mesh):
    """Over both axes of a mesh as over one axis of 8; over one, each line of devices for itself."""
    hook, gradients = HOOKS[name](), [normal(8, 24, 40), normal(8, 6)]
    flat = fc.tree.map(np.asarray, step_of(hook, fc.make_mesh({"data": 8}))(first_states(hook, gradients), gradients))
    both = fc.tree.map(np.asarray, step_of(hook, mesh, ("data", "model"))(first_states(hook, gradients), gradients))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(fc.tree.leaves(flat), fc.tree.leaves(both), strict=True))

    def body(states: Any, gradients: Any) -> Any:
        _, sums = reducer(hook, "data")(*fc.tree.map(lambda x: x[0], (states, gradients)))
        return [x[None] for x in sums]

    everywhere = P(("data", "model"))
    lines = fc.jit(body, mesh=mesh, in_specs=everywhere, out_specs=P("model"))(first_states(hook, gradients), gradients)
    for model in range(2):
        mine = [g[model::2] for g in gradients]
        _, [alone] = run(hook, [mine])
        for a, b in zip(lines, alone):
            assert np.asarray(a)[model].tobytes() == b.tobytes()


def test_state_does_not_depend_on_buckets():
    """A bucket of two gradients, then one for each, goes on where it was: states belong to gradients."""
    hook = comm_hooks.int8(8)
    gradients = [normal(3, 24, 4), normal(3, 17)]
    states, [together] = run(hook, [gradients])
    apart = [run(hook, [[g]], (state,)) for g, state in zip(gradients, states)]
    for g, first, (left, [[second]]) in zip(gradients, together, apart):
        np.testing.assert_allclose(first + second + left[0].sum(0), 2 * g.sum(0), rtol=1e-4, atol=1e-5)


def test_composed_hooks_have_state_where_one_of_them_has():
    casts = (comm_hooks.float16, comm_hooks.bfloat16)
    for make, inner in itertools.product(casts, (comm_hooks.all_reduce, comm_hooks.float16())):
        assert not isinstance(make(inner), CommHook)
    assert isinstance(comm_hooks.bfloat16(comm_hooks.int8()), CommHook)
    hook = comm_hooks.power_sgd(2, inner=comm_hooks.bfloat16(comm_hooks.int8()))
    (matrix, vector) = first_states(hook, [normal(2, 20, 30), normal(2, 8)])
    shapes = {"error": (2, 20, 30), "q": (2, 30, 2), "inner": (2, 20, 2), "inner_q": (2, 30, 2)}
    assert {k: v.shape for k, v in matrix.items()} == shapes
    assert vector["inner"].shape == (2, 8)


def test_a_hook_of_the_users_own_as_inner():
    seen: list[Bucket] = []

    def own(bucket: Bucket) -> Bucket:
        seen.append(bucket)
        return bucket.all_reduce()

    gradients = [normal(2, 7), normal(2, 20, 30), normal(2, 40, 9)]
    _, sums = run(comm_hooks.power_sgd(inner=own), [gradients])
    assert [(b.names, [tuple(g.shape) for g in b.gradients]) for b in seen] == [
        (("[0]", "[1]", "[2]"), [(7,), (20, 1), (40, 1)]),
        (("[1]", "[2]"), [(30, 1), (9, 1)]),
    ]
    np.testing.assert_allclose(sums[0][0], gradients[0].sum(0))


def test_the_state_of_an_inner_hook_goes_from_step_to_step():
    counted = lambda states, bucket: (tuple(s + 1 for s in states), bucket.all_reduce())
    counting = CommHook(lambda gradient: np.zeros((), np.int32), counted)
    gradients = [normal(2, 7), normal(2, 20, 30)]
    (vector, matrix), _ = run(comm_hooks.power_sgd(inner=comm_hooks.float16(counting)), [gradients] * 3)
    for count in (vector["inner"], matrix["inner"], matrix["inner_q"]):
        np.testing.assert_array_equal(count, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: comm_hooks.int8(0), "comm_hooks.int8: block_size must be an integer of at least 1, not 0"),
        (lambda: comm_hooks.power_sgd(1.5), "comm_hooks.power_sgd: rank must be an integer of at least 1, not 1.5"),
        (lambda: comm_hooks.power_sgd(True), "rank must be"),
        (lambda: comm_hooks.power_sgd(min_compression_rate=0), "min_compression_rate must be a positive number, not 0"),
        (lambda: comm_hooks.power_sgd(seed=-1), "random.key takes an integer"),
    ],
)
def test_options_are_checked(make, words):
    with pytest.raises(ShapeError, match=words):
        make()


@pytest.mark.parametrize("make", [comm_hooks.float16, comm_hooks.bfloat16, lambda inner: comm_hooks.power_sgd(inner=inner)])
def test_inner_must_be_a_hook(make):
    with pytest.raises(TraceError, match=r"inner must be a function hook\(bucket\) -> bucket or a CommHook, not 'float16'"):
        make("float16")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8", "power_sgd"])
def test_a_hook_that_was_not_made(name):
    with pytest.raises(TraceError, match=rf"comm_hooks.{name} makes a hook, .* give comm_hooks.{name}\(\) as the hook"):
        run(getattr(comm_hooks, name), [[normal(2, 3)]])


def test_every_hook_learns_the_digits():
    """So does post-local SGD. The record of benchmarks/training/comm_hooks.py: real processes, real images."""
    record = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "comm_hooks.json").read_text())
    cases = {case["name"]: case for case in record["cases"]}
    assert record["processes"] == 2
    for case in cases.values():
        assert case["met"] is True
        assert case["accuracy"]["min"] >= case["goal"] == 0.95
        assert len({run["seed"] for run in case["runs"]}) == 5
        assert case["losses"][-1] < 0.05 * case["losses"][0]
    assert cases["all_reduce"]["bytes_per_step"] == (64 * 128 + 128 + 128 * 10 + 10) * 4
    names = {name.partition("(")[0] for name in cases if "SGD" not in name}
    assert names == set(comm_hooks.__all__) - {"Bucket", "CommHook"} and len(names) < len(cases)
    assert all(case["compression"] > 1.9 for name, case in cases.items() if name != "all_reduce")


def _paths(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, tuple) else None
    return [(path, tree)] if items is None else [leaf for k, v in items for leaf in _paths(v, f"{path}/{k}")]
