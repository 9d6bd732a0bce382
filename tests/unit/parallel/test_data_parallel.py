"""grad_hook, custom_vjp with collectives inside, and data_parallel: values, and what stands in the traced program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import MeshError, ShapeError, TraceError, VaryingError

pytestmark = pytest.mark.covers("data-parallel")

RNG = np.random.default_rng(0)


def chain(x: Any, *weights: Any) -> Any:
    for w in weights:
        x = np.tanh(x @ w)
    return np.mean(np.square(x))


def names(program: Any) -> list[str]:
    return [e.primitive.name for e in program.equations]


def summed(axis: Any) -> Any:
    return lambda g: fc.all_reduce(g, axis)


# ---------------------------------------------------------------- grad_hook


def test_hooks_fire_when_their_last_cotangent_is_complete(line):
    """All hooks stand first in the program, in the wrong order; each fires in the middle of the backward pass."""
    fired: list[str] = []

    def record(name: str) -> Any:
        def hook(g: Any) -> Any:
            fired.append(name)
            return fc.all_reduce(g, "data")

        return hook

    def body(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            ((a, c),) = (fc.grad_hook(ws[0::2], record("a and c"), "data"),)
            (b,) = fc.grad_hook(ws[1:2], record("b"), "data")
            (d,) = fc.grad_hook(ws[3:4], record("d"), "data")
            return fc.all_reduce(chain(x, a, b, c, d), "data", op="mean")

        return fc.grad(loss)(ws)

    jitted = fc.jit(body, mesh=line, in_specs=(P(), P("data")), out_specs=P())
    ws = [RNG.normal(size=(3, 3)) for _ in range(4)]
    program = jitted.trace(ws, np.ones((8, 3))).program.check()
    assert fired == ["d", "b", "a and c"]  # d first of all; the pair waits for a, the first layer
    order = names(program)
    reduces = [i for i, n in enumerate(order) if n == "all_reduce"][1:]
    assert [len(program.equations[i].outputs) for i in reduces] == [1, 1, 2]
    matmuls = [i for i, n in enumerate(order) if n in ("matmul", "dot", "einsum")]
    assert sum(i > reduces[0] for i in matmuls) == 2 * 3 - 1  # three layers still to transpose; x needs no gradient
    assert sum(i > reduces[1] for i in matmuls) == 1


def test_a_hook_behind_another(mesh):
    """Hooks over two axes in a row both fire early, and the gradient is the sum over both."""
    fired: list[str] = []

    def record(axis: str) -> Any:
        return lambda g: (fired.append(axis), fc.all_reduce(g, axis))[1]

    def body(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            inner = fc.grad_hook(ws[1], record("data"), "data")
            inner = fc.grad_hook(inner, record("model"), "model")
            first = fc.grad_hook(
                ws[0], lambda g: (fired.append("both"), fc.all_reduce(g, ("data", "model")))[1], ("data", "model")
            )
            return fc.all_reduce(chain(x, first, inner), ("data", "model"))

        return fc.grad(loss)(ws)

    ws, x = [RNG.normal(size=(3, 3)) for _ in range(2)], RNG.normal(size=(8, 3))
    got = fc.jit(body, mesh=mesh, in_specs=(P(), P(("data", "model"))), out_specs=P())(ws, x)
    assert fired == ["model", "data", "both"]
    want = fc.grad(lambda ws: 8 * chain(x, *ws))(ws)
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=1e-12)


def test_hook_receives_zeros_for_what_is_not_used(line):
    """One k-ary bucket: an unused member takes part with zeros; a bucket that is not used does not communicate."""
    seen: list[Any] = []

    def body(a: Any, b: Any, c: Any, x: Any) -> Any:
        def loss(a: Any, b: Any, c: Any) -> Any:
            def hook(g: Any) -> Any:
                seen.append(fc.tree.map(lambda v: (v.shape, v.varying), g))
                return fc.all_reduce(g, "data")

            wide = fc.grad_hook({"a": a, "b": b}, hook, "data")
            fc.grad_hook(c, hook, "data")
            return fc.all_reduce(np.sum(x * wide["a"]), "data")

        return fc.grad(loss, argnums=(0, 1, 2))(a, b, c)

    a, x = np.array(2.0), np.arange(8.0)
    got = fc.jit(body, mesh=line, in_specs=(P(), P(), P(), P("data")), out_specs=P())(a, np.ones(3), np.ones(2), x)
    assert seen == [{"a": ((), {"data"}), "b": ((3,), {"data"})}]
    for g, w in zip(got, (28.0, np.zeros(3), np.zeros(2))):
        np.testing.assert_array_equal(g, w)


def test_the_hook_is_the_gradient(line):
    """Whatever the hook returns is the gradient; the value is that of pvary."""

    def body(w: Any, x: Any) -> Any:
        loss = lambda w: fc.all_reduce(x * fc.grad_hook(w, lambda g: fc.all_reduce(g, "data", op="max"), "data"), "data")
        return fc.value_and_grad(lambda w: np.sum(loss(w)))(w)

    value, grad = fc.jit(body, mesh=line, in_specs=(P(), P("data")), out_specs=P())(np.array(3.0), np.array([1.0, 5, 2, 4]))
    assert (float(value), float(grad)) == (36, 5)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda g: g, "not vary"),
        (lambda g: [fc.all_reduce(g[0], "data")], "structure"),
        (lambda g: [fc.all_reduce(v, "data").astype(np.float32) for v in g], "dtype"),
        (lambda g: [np.sum(fc.all_reduce(v, "data")) for v in g], "shape"),
    ],
)
def test_wrong_hooks_are_refused(hook, words, line):
    def body(ws: Any) -> Any:
        return fc.grad(lambda ws: fc.all_reduce(chain(np.ones((2, 3)), *fc.grad_hook(ws, hook, "data")), "data"))(ws)

    with pytest.raises((VaryingError, ValueError), match=words):
        fc.jit(body, mesh=line, in_specs=P(), out_specs=P()).trace([np.ones((3, 3))] * 2)


def test_a_value_that_varies_already_is_refused(line):
    body = lambda x: fc.grad_hook(x, summed("data"), "data")
    with pytest.raises(VaryingError, match="varies over it already"):
        fc.jit(body, mesh=line, in_specs=P("data"), out_specs=P("data")).trace(np.ones(4))


# ---------------------------------------------------------------- custom_vjp


def test_custom_vjp_with_collectives(mesh):
    """Megatron's f (identity forward, all_reduce backward) and a rule that moves residuals between devices."""

    @fc.custom_vjp
    def shifted_product(x: Any, y: Any) -> Any:
        return fc.all_reduce(x * y, "data")

    def forward(x: Any, y: Any) -> Any:
        return fc.all_reduce(x * y, "data"), fc.permute((x, y), "data", pairs=[(i, (i + 1) % 4) for i in range(4)])

    def backward(residuals: Any, ct: Any) -> Any:
        x, y = fc.permute(residuals, "data", pairs=[((i + 1) % 4, i) for i in range(4)])
        return ct * y, 10 * ct * x

    shifted_product.defvjp(forward, backward)

    def body(x: Any, y: Any) -> Any:
        loss = lambda x, y: fc.all_reduce(np.sum(shifted_product(x, y) ** 2), "model")
        return fc.value_and_grad(loss, argnums=(0, 1))(x, y)

    x, y = RNG.normal(size=(2, 4, 2))
    spec = P("data", "model")
    value, (dx, dy) = fc.jit(body, mesh=mesh, in_specs=spec, out_specs=(P(), spec))(x, y)
    total = (x * y).sum(0)
    np.testing.assert_allclose(float(value), (total**2).sum())
    np.testing.assert_allclose(dx, 2 * total * y)
    np.testing.assert_allclose(dy, 20 * total * x)


def test_custom_vjp_may_capture_a_traced_value(line):
    def body(x: Any, scale: Any) -> Any:
        @fc.custom_vjp
        def scaled(x: Any) -> Any:
            return fc.all_reduce(x * scale, "data")

        scaled.defvjp(lambda x: (scaled(x), scale), lambda s, ct: (fc.pvary(ct, "data") * s,))
        return fc.grad(lambda x: np.sum(scaled(x) ** 2))(x)

    x, scale = RNG.normal(size=(2, 4))
    got = fc.jit(body, mesh=line, in_specs=P("data"), out_specs=P("data"))(x, scale)
    np.testing.assert_allclose(got, 2 * (x * scale).sum() * scale)


# ---------------------------------------------------------------- data_parallel


def params_of(layers: int, width: int, dtype: Any = np.float64) -> dict[str, Any]:
    return {f"w{i}": RNG.normal(size=(width, width)).astype(dtype) for i in range(layers)}


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    for i in range(len(params)):
        x = np.tanh(x @ params[f"w{i}"].astype(x.dtype))
    return np.mean((x - y) ** 2)


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 3}, {"data": 3, "model": 2}, {"data": 1}], ids=str)
def test_gradients_equal_one_device(axes):
    mesh = fc.make_mesh(axes)
    step = fc.value_and_grad(fc.data_parallel(loss_fn), argnums=(0, 1, 2))
    params, (x, y) = params_of(3, 4), RNG.normal(size=(2, 12, 4))
    specs = (P(), P("data"), P("data"))
    loss, grads = fc.jit(step, mesh=mesh, in_specs=specs, out_specs=(P(), specs))(params, x, y)
    want_loss, want = fc.value_and_grad(loss_fn, argnums=(0, 1, 2))(params, x, y)
    np.testing.assert_allclose(float(loss), want_loss, rtol=1e-13)
    fc.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-11, atol=1e-15), grads, want)


def test_over_two_axes_at_once(mesh):
    params, (x, y) = params_of(2, 4), RNG.normal(size=(2, 16, 4))
    step = fc.grad(fc.data_parallel(loss_fn, ("data", "model")))
    rows = P(("data", "model"))
    got = fc.jit(step, mesh=mesh, in_specs=(P(), rows, rows), out_specs=P())(params, x, y)
    want = fc.grad(loss_fn)(params, x, y)
    fc.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-11), got, want)


def test_derivatives_of_the_gradient(line):
    """A Hessian-vector product through data_parallel is that of one device: hooks nest."""
    params, (x, y) = params_of(2, 3), RNG.normal(size=(2, 8, 3))
    vector = params_of(2, 3)

    def product(loss: Any) -> Any:
        def dot(params: Any, *batch: Any) -> Any:
            g = fc.grad(loss)(params, *batch)
            return sum(np.sum(g[k] * vector[k]) for k in g)

        return fc.grad(dot)

    got = fc.jit(product(fc.data_parallel(loss_fn)), mesh=line, in_specs=(P(), P("data"), P("data")), out_specs=P())
    fc.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-10), got(params, x, y), product(loss_fn)(params, x, y))


def test_buckets_stand_in_the_program(line):
    """One k-ary all_reduce for each bucket, in completion order, dtypes apart, the first small."""
    params = params_of(6, 64, np.float32)
    params["w1"] = params["w1"].astype(np.float64)
    kib = 1 / 1024
    step = fc.grad(fc.data_parallel(loss_fn, first_bucket_mb=16 * kib, bucket_cap_mb=33 * kib))
    jitted = fc.jit(step, mesh=line, in_specs=(P(), P("data"), P("data")), out_specs=P())
    x = np.ones((8, 64), np.float32)
    program = jitted.trace(params, x, x).program.check()
    loss, *buckets = [e for e in program.equations if e.primitive.name == "all_reduce"]
    assert loss.inputs[0].type.shape == ()
    # w5 alone (the first, 16 KiB); w4 and w3 (32 KiB); w1 has another dtype; w2 and w0 go together.
    assert [[a.type.nbytes // 1024 for a in e.inputs] for e in buckets] == [[16], [16, 16], [32], [16, 16]]
    assert {a.type.dtype for a in buckets[2].inputs} == {np.dtype(np.float64)}
    outputs = {v: name for name, v in zip(sorted(params), program.outputs)}
    assert [[outputs[v] for v in e.outputs] for e in buckets] == [["w5"], ["w4", "w3"], ["w1"], ["w2", "w0"]]
    order = program.equations
    after = [sum(e.primitive.name == "matmul" for e in order[order.index(b) :]) for b in buckets]
    assert after[0] > after[1] > after[2] > after[3] == 0  # each stands where its last gradient is complete


def test_has_aux_stays_on_its_device(line):
    def with_aux(params: Any, x: Any, y: Any) -> Any:
        return loss_fn(params, x, y), {"mean": np.mean(x)[None], "n": x.shape[0]}

    params, (x, y) = params_of(2, 3), RNG.normal(size=(2, 8, 3))
    step = fc.value_and_grad(fc.data_parallel(with_aux, has_aux=True), has_aux=True)
    specs = ((P(), {"mean": P("data"), "n": P()}), P())
    jitted = fc.jit(step, mesh=line, in_specs=(P(), P("data"), P("data")), out_specs=specs)
    (loss, aux), grads = jitted(params, x, y)
    np.testing.assert_allclose(float(loss), loss_fn(params, x, y))
    np.testing.assert_allclose(aux["mean"], x.reshape(4, -1).mean(1))
    assert int(aux["n"]) == 2
    np.testing.assert_allclose(grads["w0"], fc.grad(loss_fn)(params, x, y)["w0"], rtol=1e-11)


def test_parameters_and_batches_that_are_no_floats(line):
    """Counters among the parameters and labels in the batch pass through."""

    def loss(params: Any, x: Any, labels: Any) -> Any:
        logits = x @ params["w"] + params["step"]
        picked = np.take_along_axis(fc.nn.log_softmax(logits), labels[:, None], axis=1)
        return -np.mean(picked)

    w, x, labels = RNG.normal(size=(3, 5)), RNG.normal(size=(8, 3)), RNG.integers(0, 5, 8)

    def grads(loss: Any) -> Any:
        return lambda w, step, x, labels: fc.grad(lambda w: loss({"w": w, "step": step}, x, labels))(w)

    specs = (P(), P(), P("data"), P("data"))
    got = fc.jit(grads(fc.data_parallel(loss)), mesh=line, in_specs=specs, out_specs=P())(w, np.int32(3), x, labels)
    np.testing.assert_allclose(got, grads(loss)(w, np.int32(3), x, labels), rtol=1e-11, atol=1e-15)


def test_data_parallel_refuses():
    with pytest.raises(TraceError, match="comm_hook is a function of a Bucket, or a CommHook, not 3"):
        fc.data_parallel(loss_fn, comm_hook=3)
    with pytest.raises(ShapeError, match="bucket_cap_mb"):
        fc.data_parallel(loss_fn, bucket_cap_mb=0)
    step = fc.data_parallel(lambda w, x: np.sum(w * x), has_aux=True)
    jitted = fc.jit(step, mesh=fc.make_mesh({"data": 2}), in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(TraceError, match="has_aux"):
        jitted.trace(np.ones(2), np.ones(2))


def test_data_parallel_refuses_in_its_own_words(line):
    def mean(w: Any, x: Any) -> Any:
        return np.mean(w["w"] * x)

    w, x = {"w": np.float64(2)}, np.ones(8)
    with pytest.raises(MeshError, match=r"^data_parallel over 'data' was called outside a mesh"):
        fc.data_parallel(mean)(w, x)
    jitted = fc.jit(fc.data_parallel(mean), mesh=line, in_specs=P("data"), out_specs=P())
    with pytest.raises(VaryingError, match=r"^data_parallel over 'data': params\['w'\], of type .*P\(\) in in_specs"):
        jitted({"w": x}, x)
    reduced = fc.data_parallel(lambda w, x: fc.all_reduce(mean(w, x), "data", op="mean"))
    with pytest.raises(VaryingError, match=r"^data_parallel over 'data': the loss, .* without an all_reduce"):
        fc.jit(reduced, mesh=line, in_specs=(P(), P("data")), out_specs=P())(w, x)
