"""Batch normalization over devices against the whole batch on one device, against torch's, and in training programs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, nn
from funccoll.errors import DTypeError, MeshError, ShapeError
from tests.support.example_counts import examples
from tests.support.oracles.numpy_oracle import numerical
from tests.support.oracles.record_torch_batch_norm import CASES, FILE
from tests.support.spmd import bits

pytestmark = pytest.mark.covers("uneven-batches")

RNG = np.random.default_rng(0)
TORCH = json.loads(FILE.read_text())["cases"]


def formula(x: Any, scale: Any = None, bias: Any = None, eps: float = 1e-5, over: Any = 0) -> Any:
    """The definition, in float64."""
    x = np.asarray(x, np.float64)
    out = (x - x.mean(over, keepdims=True)) / np.sqrt(x.var(over, keepdims=True) + eps)
    out = out if scale is None else out * scale
    return out if bias is None else out + bias


def gradients(mesh: Any, **options: Any) -> Any:
    """The jitted gradients of sum(y * cotangent), summed over the devices, in x, scale and bias; and y and the statistics."""
    split = P("data")

    def step(x: Any, scale: Any, bias: Any, cotangent: Any, weights: Any) -> Any:
        def loss(x: Any, scale: Any, bias: Any) -> Any:
            y, stats = nn.sync_batch_norm(x, scale, bias, weights=weights, **options)
            return fc.all_reduce(np.sum(y * cotangent), "data"), (y, stats)

        return fc.grad(loss, (0, 1, 2), has_aux=True)(x, scale, bias)

    return fc.jit(step, mesh=mesh, in_specs=(split, P(), P(), split, split), out_specs=((split, P(), P()), (split, P())))


# ---------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("reduce_dims", [None, (0, 2), -3])
def test_values_and_gradients_are_those_of_the_whole_batch(devices, reduce_dims):
    x, cotangent = RNG.normal(3, 2, size=(8, 3, 2)), RNG.normal(size=(8, 3, 2))
    over = {None: (0, 1), (0, 2): (0, 2), -3: (0,)}[reduce_dims]
    kept = tuple(1 if d in over else n for d, n in enumerate(x.shape))
    features = tuple(n for d, n in enumerate(x.shape) if d not in over)
    scale, bias = RNG.normal(size=features), RNG.normal(size=features)
    run = gradients(fc.make_mesh({"data": devices}), reduce_dims=reduce_dims, eps=0.1)
    grads, (y, stats) = run(x, scale, bias, cotangent, None)

    def whole(x: Any, scale: Any, bias: Any) -> Any:
        return formula(x, scale.reshape(kept), bias.reshape(kept), 0.1, over)

    np.testing.assert_allclose(y, whole(x, scale, bias), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(stats.mean, x.mean(over), rtol=1e-13)
    np.testing.assert_allclose(stats.var, x.var(over), rtol=1e-13)
    assert float(stats.count) == x.size / np.prod(features) and stats.mean.shape == features
    wanted = numerical(lambda *a: np.sum(cotangent * whole(*a)), [x, scale, bias], (0, 1, 2), 1e-6)
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_gradients_of_the_statistics():
    """A loss may use mean and variance, which are equal on all devices."""
    mesh = fc.make_mesh({"data": 4})
    x, a, b = RNG.normal(size=(8, 3)), RNG.normal(size=3), RNG.normal(size=3)

    def body(x: Any) -> Any:
        def loss(x: Any) -> Any:
            _, stats = nn.sync_batch_norm(x)
            return np.sum(a * stats.mean + b * np.sqrt(stats.var))

        return fc.grad(loss)(x)

    got = fc.jit(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)
    (want,) = numerical(lambda x: np.sum(a * x.mean(0) + b * x.std(0)), [x], (0,), 1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)


def test_second_derivatives(line):
    """The gradient of a gradient's norm, over four devices and in one."""
    x, cotangent = RNG.normal(size=(8, 3)), RNG.normal(size=(8, 3))

    def norm_of_gradient(axis: Any) -> Any:
        total = (lambda v: fc.all_reduce(v, axis)) if axis else lambda v: v

        def norm(x: Any, cotangent: Any) -> Any:
            loss = lambda x: total(np.sum(np.tanh(nn.sync_batch_norm(x, axis=axis)[0]) * cotangent))
            return total(np.sum(np.square(fc.grad(loss)(x))))

        return fc.grad(norm)

    got = fc.jit(norm_of_gradient("data"), mesh=line, in_specs=P("data"), out_specs=P("data"))(x, cotangent)
    plain = norm_of_gradient(None)
    np.testing.assert_allclose(got, plain(x, cotangent), rtol=1e-10)

    def norm(x: Any) -> Any:
        return np.sum(np.square(fc.grad(lambda x: np.sum(np.tanh(nn.sync_batch_norm(x, axis=None)[0]) * cotangent))(x)))

    (want,) = numerical(norm, [x], (0,), 1e-5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_torchs_numbers(name, devices):
    """Outputs, gradients and running statistics of three training batches and an evaluation, as torch 2.13 computed them."""
    case, mesh = TORCH[name], fc.make_mesh({"data": devices})
    scale, bias = np.float32(case["scale"]), np.float32(case["bias"])
    over = (0,) if name == "rows" else (0, 2, 3)
    running = np.zeros(len(scale), np.float32), np.ones(len(scale), np.float32)
    train = gradients(mesh, reduce_dims=over, eps=case["eps"])
    close = lambda got, want, atol=1e-5: np.testing.assert_allclose(got, want, rtol=1e-5, atol=atol)
    for step in case["steps"]:
        x, cotangent = np.float32(step["x"]), np.float32(step["cotangent"])
        if step["training"]:
            grads, (y, stats) = train(x, scale, bias, cotangent, None)
            running = nn.update_running_stats(running, stats, case["momentum"])
            for got, want in zip(grads, ("x_grad", "scale_grad", "bias_grad"), strict=True):
                close(got, step[want], 2e-5)
        else:
            mean, var = running
            y = nn.batch_norm(x, scale, bias, mean=mean, var=var, reduce_dims=over, eps=case["eps"])
        assert y.dtype == np.float32
        close(y, step["y"])
        for got, want in zip(running, step["running"], strict=True):
            assert got.dtype == np.float32
            close(got, want)


# ---------------------------------------------------------------- numerics


@pytest.mark.parametrize("offset", [0, 1e4, 1e6])
def test_float32_far_from_zero(line, offset):
    """Rows far from 0: E[x^2] - E[x]^2 has no digit left, and neither has a mean of rows that are added one by one."""
    x = (RNG.normal(size=(20000, 4)) + offset).astype(np.float32)
    y, stats = fc.jit(nn.sync_batch_norm, mesh=line, in_specs=P("data"), out_specs=(P("data"), P()))(x)
    wide = x.astype(np.float64)
    spacing = np.spacing(np.float32(max(offset, 1)))  # of what can be a mean; the devices' variances have no such limit
    np.testing.assert_allclose(stats.var, wide.var(0), rtol=1e-4, atol=spacing**2)
    np.testing.assert_allclose(stats.mean, wide.mean(0), rtol=0, atol=spacing)
    np.testing.assert_allclose(y, formula(wide), rtol=1e-4, atol=max(spacing, 1e-5))


@pytest.mark.parametrize("value", [0.0, 1.0, -3e8, 1e-30])
def test_equal_rows(line, value):
    """Without any variance the result is the bias, and gradients are finite."""
    x = np.full((8, 2), value, np.float32)
    run = gradients(line)
    cotangent = RNG.normal(size=(8, 2)).astype(np.float32)
    grads, (y, stats) = run(x, np.ones(2, np.float32), np.full(2, 5, np.float32), cotangent, None)
    np.testing.assert_array_equal(stats.var, 0)
    np.testing.assert_array_equal(y, 5)
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("dtype", [np.float16, fc.bfloat16], ids=str)
def test_16_bit_floats_are_computed_in_float32(line, dtype):
    """The squares of these overflow float16; the result is the float32 result, rounded once."""
    x = (RNG.normal(size=(64, 3)) * 1000 + 5000).astype(dtype)
    scale, bias = np.float32([1, -2, 0.5]), np.float32([0, 1, 2])
    run = fc.jit(nn.sync_batch_norm, mesh=line, in_specs=(P("data"), P(), P()), out_specs=(P("data"), P()))
    y, stats = run(x, scale, bias)
    wide, wide_stats = run(x.astype(np.float32), scale, bias)
    assert (y.dtype, stats.mean.dtype, stats.var.dtype) == (dtype, np.float32, np.float32)
    assert bits(y) == bits(np.asarray(wide).astype(dtype))
    assert bits(stats.var) == bits(wide_stats.var)
    evaluated = nn.batch_norm(x, scale, bias, mean=stats.mean, var=stats.var)
    assert evaluated.dtype == dtype
    np.testing.assert_allclose(np.float32(evaluated), np.float32(y), rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------- weights


@examples(25)
@given(st.data())
def test_padding_counts_as_nothing(data):
    """Any numbers of rows on the devices, padded: statistics and gradients are those of the rows alone."""
    devices = data.draw(st.sampled_from([2, 3]))
    rows = data.draw(st.lists(st.integers(0, 4), min_size=devices, max_size=devices).filter(lambda r: sum(r) > 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x, cotangent = rng.normal(2, 3, size=(devices, 4, 2)), rng.normal(size=(devices, 4, 2))
    mask = np.arange(4) < np.array(rows)[:, None]
    cotangent[~mask] = 0
    run = gradients(fc.make_mesh({"data": devices}))
    scale, bias = rng.normal(size=2), rng.normal(size=2)
    grads, (y, stats) = run(x.reshape(-1, 2), scale, bias, cotangent.reshape(-1, 2), mask.reshape(-1))
    kept, cts = x[mask], cotangent[mask]
    np.testing.assert_allclose(np.asarray(y)[mask.reshape(-1)], formula(kept, scale, bias), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(stats.var, kept.var(0), rtol=1e-12)
    assert float(stats.count) == sum(rows)
    _, pullback = fc.vjp(lambda *a: nn.sync_batch_norm(*a, axis=None)[0], kept, scale, bias)
    for got, want in zip(grads, pullback(cts), strict=True):
        got = np.asarray(got)
        if got.ndim == 2:
            assert (got[~mask.reshape(-1)] == 0).all()
            got = got[mask.reshape(-1)]
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shape", [(4,), (1,), (4, 3), (4, 1), (1, 3)])
def test_weights_of_the_first_dimensions(shape, line):
    """Weights of rows, of rows and steps, or of devices: a weight of n stands for n copies of an element."""
    x = RNG.normal(size=(16, 3, 2))
    whole = (4 * shape[0], *shape[1:])
    weights = RNG.integers(0, 4, whole)
    _, stats = fc.jit(lambda x, w: nn.sync_batch_norm(x, weights=w), mesh=line, in_specs=P("data"), out_specs=(P("data"), P()))(
        x, weights
    )
    per_device = weights.reshape(4, *shape, *(1,) * (2 - len(shape)))
    times = np.broadcast_to(per_device, (4, 4, 3)).reshape(-1)
    repeated = np.repeat(x.reshape(-1, 2), times, axis=0)
    assert float(stats.count) == len(repeated)
    np.testing.assert_allclose(stats.mean, repeated.mean(0), rtol=1e-12)
    np.testing.assert_allclose(stats.var, repeated.var(0), rtol=1e-12)


def test_gradients_of_weights(line):
    x, weights, a = RNG.normal(size=(8, 2)), RNG.uniform(0.5, 2, 8), RNG.normal(size=2)

    def body(x: Any, weights: Any) -> Any:
        return fc.grad(lambda w: np.sum(a * nn.sync_batch_norm(x, weights=w)[1].var))(weights)

    def whole(w: Any) -> Any:
        mean = w @ x / w.sum()
        return np.sum(a * (w @ (x - mean) ** 2) / w.sum())

    got = fc.jit(body, mesh=line, in_specs=P("data"), out_specs=P("data"))(x, weights)
    np.testing.assert_allclose(got, numerical(whole, [weights], (0,), 1e-6)[0], rtol=1e-6)


def test_a_batch_of_padding_alone(line):
    """All weights 0: nothing is divided by 0, and the running statistics stay."""
    x = RNG.normal(size=(8, 2))
    running = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    body = lambda x, w, running: nn.update_running_stats(running, nn.sync_batch_norm(x, weights=w)[1])
    got = fc.jit(body, mesh=line, in_specs=(P("data"), P("data"), P()), out_specs=P())(x, np.zeros(8), running)
    for new, old in zip(got, running, strict=True):
        np.testing.assert_array_equal(new, old)


def test_no_gradient_flows_into_running_statistics():
    """Running statistics vary with training, as torch's buffers do; they are not constants."""
    x, running = RNG.normal(size=(8, 2)), (np.zeros(2), np.ones(2))
    loss = lambda x, running: np.sum(nn.update_running_stats(running, nn.sync_batch_norm(x, axis=None)[1], 0.25)[1])
    of_x, of_running = fc.grad(loss, (0, 1))(x, running)
    np.testing.assert_array_equal(of_x, 0)
    np.testing.assert_array_equal(of_running, ([0, 0], [0.75, 0.75]))


def test_one_row_alone_moves_the_running_mean():
    mean, var = nn.update_running_stats((np.zeros(2), np.ones(2)), nn.sync_batch_norm(np.array([[4.0, 8.0]]), axis=None)[1])
    np.testing.assert_allclose(mean, [0.4, 0.8])
    np.testing.assert_allclose(var, [0.9, 0.9])  # one row has no variance


# ---------------------------------------------------------------- meshes and training


def test_two_axes(mesh):
    """Batches split over data, features over model: each device normalizes its own features over the data axis alone."""
    x, scale = RNG.normal(size=(8, 6)), RNG.normal(size=6)
    split = P("data", "model")
    stats_specs = nn.BatchStats(P("model"), P("model"), P())
    run = fc.jit(nn.sync_batch_norm, mesh=mesh, in_specs=(split, P("model")), out_specs=(split, stats_specs))
    y, stats = run(x, scale)
    np.testing.assert_allclose(y, formula(x, scale), rtol=1e-12)
    np.testing.assert_allclose(stats.var, x.var(0), rtol=1e-12)
    assert float(stats.count) == 8
    assert {c.axes() for c in run.trace(x, scale).program.equations if c.primitive.communicates} == {("data",)}

    both = fc.jit(lambda x: nn.sync_batch_norm(x, axis=("data", "model"))[1], mesh=mesh, in_specs=split, out_specs=P())
    halves = x.reshape(8, 2, 3).reshape(16, 3)  # the two halves of the features are one batch
    np.testing.assert_allclose(both(x).mean, halves.mean(0), rtol=1e-12)
    np.testing.assert_allclose(both(x).var, halves.var(0), rtol=1e-12)


def test_an_axis_over_which_nothing_varies_is_left_out(mesh):
    """Copies of a batch have its mean and variance; they are not more rows."""
    x = RNG.normal(size=(8, 2))
    run = fc.jit(
        lambda x: nn.sync_batch_norm(x, axis=("data", "model")), mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P())
    )
    assert float(run(x)[1].count) == 8
    alone = fc.jit(nn.sync_batch_norm, mesh=mesh, in_specs=P(), out_specs=P())
    np.testing.assert_allclose(alone(x)[0], formula(x), rtol=1e-12)
    assert not [e for e in alone.trace(x).program.equations if e.primitive.communicates]


def test_one_collective_forward_and_one_group_backward(line):
    x, scale = np.ones((8, 2)), np.ones(2)
    loss = fc.data_parallel(lambda scale, x: np.mean(np.square(nn.sync_batch_norm(x, scale)[0])))
    step = fc.jit(fc.grad(loss, argnums=1), mesh=line, in_specs=(P(), P("data")), out_specs=P("data"))
    program = step.lower(scale, x).program
    assert [e.primitive.name for e in program.equations if e.primitive.communicates] == ["all_gather", "all_reduce"]


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_training_with_running_statistics(line, donate):
    """data_parallel over four devices, with buffers, against one device with the whole batch: twenty steps."""
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(3, 4)), "scale": np.ones(4), "bias": np.zeros(4), "out": rng.normal(size=4)}
    running = np.zeros(4), np.ones(4)
    x = rng.normal(1, 2, size=(20, 8, 3))
    target = np.sin(x.sum(-1))

    def loss_fn(params: Any, running: Any, x: Any, target: Any, axis: Any = "data") -> Any:
        hidden, stats = nn.sync_batch_norm(x @ params["w"], params["scale"], params["bias"], axis=axis)
        loss = np.mean(np.square(np.tanh(hidden) @ params["out"] - target))
        return loss, nn.update_running_stats(running, stats)

    def update(loss: Any) -> Any:
        def step(params: Any, running: Any, x: Any, target: Any) -> Any:
            (value, running), grads = fc.value_and_grad(loss, has_aux=True)(params, running, x, target)
            return fc.tree.map(lambda p, g: p - 0.1 * g, params, grads), running, value

        return step

    specs = P(), P(), P("data"), P("data")
    train = fc.jit(
        update(fc.data_parallel(loss_fn, has_aux=True)), mesh=line, in_specs=specs, out_specs=P(), donate_argnums=donate
    )
    alone = update(lambda *args: loss_fn(*args, axis=None))
    ours, theirs = (params, running), (params, running)
    losses = []
    for batch, t in zip(x, target, strict=True):
        *ours, value = train(*ours, batch, t)
        *theirs, wanted = alone(*theirs, batch, t)
        losses.append(float(value))
        np.testing.assert_allclose(value, wanted, rtol=1e-9)
    for got, want in zip(fc.tree.leaves(ours), fc.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


# ---------------------------------------------------------------- refusals


def test_plain_batch_norm_and_an_axis_outside_a_mesh():
    x = RNG.normal(size=(8, 2))
    y, stats = nn.sync_batch_norm(x, axis=None)
    np.testing.assert_allclose(y, formula(x), rtol=1e-12)
    np.testing.assert_allclose(nn.batch_norm(x, mean=stats.mean, var=stats.var), y, rtol=1e-12, atol=1e-14)
    with pytest.raises(MeshError, match="axis=None"):
        nn.sync_batch_norm(x)
    with pytest.raises(MeshError, match="unknown axis 'rows'"):
        fc.jit(lambda x: nn.sync_batch_norm(x, axis="rows"), mesh=fc.make_mesh({"data": 2}), in_specs=P("data"))(x)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (DTypeError, "dtype int64.*astype", lambda: nn.sync_batch_norm(np.ones((2, 2), int), axis=None)),
        (DTypeError, "dtype complex128", lambda: nn.batch_norm(np.ones((2, 2), complex), mean=0, var=1)),
        (ShapeError, r"shape \(4,\) has no dimension before its last", lambda: nn.sync_batch_norm(np.ones(4), axis=None)),
        (ShapeError, r"reduce_dims=2 .* shape \(2, 3\)", lambda: nn.sync_batch_norm(np.ones((2, 3)), axis=None, reduce_dims=2)),
        (ShapeError, r"reduce_dims=\(0, -2\)", lambda: nn.sync_batch_norm(np.ones((2, 3)), axis=None, reduce_dims=(0, -2))),
        (
            ShapeError,
            r"scale has shape \(2,\).* has \(3,\)",
            lambda: nn.sync_batch_norm(np.ones((2, 3)), np.ones(2), axis=None),
        ),
        (ShapeError, r"mean has shape \(\)", lambda: nn.batch_norm(np.ones((2, 3)), mean=0.0, var=np.ones(3))),
        (ShapeError, r"weights have shape \(3,\)", lambda: nn.sync_batch_norm(np.ones((2, 3)), weights=np.ones(3), axis=None)),
        (ShapeError, r"shape \(2, 3\)", lambda: nn.sync_batch_norm(np.ones((2, 3)), weights=np.ones((2, 3)), axis=None)),
    ],
)
def test_refusals(error, words, call):
    with pytest.raises(error, match=words):
        call()
