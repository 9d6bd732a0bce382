"""Gradients around jitted functions with a mesh: on virtual devices and in jobs alike."""

from __future__ import annotations

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.compiler.program_calls import moved, sum_of
from funccoll.errors import ShardingError, TraceError
from tests.support.cases.shard_map_gradient_cases import (
    CASES,
    blocks_of_gradients,
    compare_in_job,
    data,
    expected_of_split_cotangents,
    functions,
    split_cotangents,
)
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("mesh-gradients")


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_without_a_mesh(name: str) -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    ours, plain, arguments = CASES[name](functions(mesh), mesh)
    given = [fc.device_put(x, mesh, spec) if spec is not None else x for x, spec in arguments]
    every = tuple(range(len(given)))
    value, gradients = fc.value_and_grad(ours, every)(*given)
    expected, wanted = fc.value_and_grad(plain, every)(*(x for x, _ in arguments))
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for found, want, x in zip(gradients, wanted, given, strict=True):
        assert type(found) is (fc.Array if type(x) is fc.Array and x.sharding.varying else np.ndarray)
        if type(found) is fc.Array:
            assert found.sharding == x.sharding
        np.testing.assert_allclose(np.asarray(found), want, rtol=1e-10, atol=1e-12)


def test_second_derivatives() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    f, (w, x) = functions(mesh), data()
    ours = fc.grad(lambda w: np.sum(fc.grad(lambda v: f.loss(v, x) + f.dot(f.features(v, x), x))(w) ** 2))
    plain = fc.grad(lambda w: np.sum(fc.grad(lambda v: np.mean(np.tanh(x @ v) ** 2) + np.sum(np.tanh(x * v) * x))(w) ** 2))
    np.testing.assert_allclose(ours(w), plain(w), rtol=1e-10)


def test_it_is_compiled_once() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    f, (w, x) = functions(mesh), data()
    traced = []

    @fc.jit(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def loss(w, x):
        traced.append(w.shape)
        return f.loss.fn(w, x)

    step = fc.value_and_grad(lambda w: loss(w, x) * 2)
    first = step(w)
    again = step(w)
    assert len(traced) == 1
    np.testing.assert_array_equal(first[1], again[1])
    step(w.astype(np.float32))
    assert len(traced) == 2
    loss.clear_cache()
    step(w)
    assert len(traced) == 3


def test_a_pullback_takes_whole_and_split_cotangents_and_gives_zeros() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    f, (w, x) = functions(mesh), data()
    given = fc.device_put(x, mesh, P("data"))
    result, pullback = fc.vjp(lambda w, x: f.features(w, x), w, given)
    assert type(result) is fc.Array and result.sharding.spec == P("data")
    expected = fc.vjp(lambda w, x: np.tanh(x * w), w, x)[1](x)
    for cotangent in (x, given, fc.device_put(x, mesh, P(None, None))):
        for found, want in zip(pullback(cotangent), expected, strict=True):
            np.testing.assert_allclose(np.asarray(found), want, rtol=1e-12)
    (nothing,) = fc.vjp(lambda x: f.loss(w, w[None] * np.ones((8, 1))), given)[1](np.float64(1))
    assert type(nothing) is fc.Array and nothing.sharding == given.sharding and not np.asarray(nothing).any()


def test_a_split_value_has_cotangents_of_several_shardings() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    f, (w, x) = functions(mesh), data()
    for found, want in zip(split_cotangents(f, mesh), expected_of_split_cotangents(), strict=True):
        assert type(found) is fc.Array and found.sharding.spec == P("data")
        np.testing.assert_allclose(np.asarray(found), want, rtol=1e-12)

    def ours(x, ct):
        (h, _), pullback = fc.vjp(lambda x: (f.features(w, x),) * 2, x)
        return f.dot(pullback((ct, h))[0], x) + f.dot(fc.vjp(lambda x: x, x)[1](ct)[0], x)

    def plain(x, ct):
        h, pullback = fc.vjp(lambda x: np.tanh(x * w), x)
        return np.sum(pullback(ct + h)[0] * x) + np.sum(ct * x)

    found = fc.grad(ours, (0, 1))(fc.device_put(x, mesh, P("data")), x[::-1])
    for ct, want in zip(found, fc.grad(plain, (0, 1))(x, x[::-1]), strict=True):
        np.testing.assert_allclose(np.asarray(ct), want, rtol=1e-12)
    other = fc.device_put(x, fc.make_mesh({"data": 4}), P("data"))
    with pytest.raises(ShardingError, match=r"a cotangent f64\[8,4\] is split as P\('data'\) over .* they have one mesh"):
        fc.vjp(lambda x: x, fc.device_put(x, mesh, P("data")))[1](other)


def test_an_array_that_is_closed_over_can_be_printed() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    f, (w, x) = functions(mesh), data()
    split, seen = fc.device_put(x, mesh, P("data")), []

    def loss(w):
        seen.extend((repr(split), f"{split}"))
        return f.loss(w, split)

    fc.grad(loss)(w)
    assert seen == [repr(split), str(x)]


def test_a_result_of_python_scalars_stays_weak() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    step = fc.jit(lambda n: n + 1, mesh=mesh, in_specs=P(), out_specs=P())
    loss = lambda w, n: np.sum(w * step(n))
    value, (ct, _) = fc.value_and_grad(loss, (0, 1))(np.ones(4, np.float32), 2.0)
    assert value.dtype == ct.dtype == np.float32


def test_redistributions_are_recorded_with_their_lines_and_forgotten() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    f, x = functions(mesh), data()[1]
    fc.clear_caches()

    def loss(x):
        once = fc.redistribute(x, P("model"))
        again = fc.redistribute(x, P("model"))
        return f.dot(once, again)

    fc.grad(loss)(fc.device_put(x, mesh, P("data")))
    assert moved.cache_info().currsize == 2  # of two lines
    fc.clear_caches()
    assert moved.cache_info().currsize == sum_of.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda f, w, x: f.dot(x, x) + np.sum(x), "reduce_sum takes an Array f64[8,4] that is split as P('data')"),
        (lambda f, w, x: np.sum(f.features(w, x)), "reduce_sum takes an Array f64[8,4] that is split as P('data')"),
        (lambda f, w, x: f.dot(x, x) * x[0, 0], "getitem takes an Array"),
        (lambda f, w, x: fc.grad(lambda v: np.sum(v * x))(w)[0], "multiply takes an Array"),
        (lambda f, w, x: fc.vmap(lambda r: np.sum(r))(x)[0], "takes an Array"),
        (lambda f, w, x: fc.cond(w[0] > 0, lambda: f.dot(x, x), lambda: w[0]), "inside a traced function"),
        (lambda f, w, x: f.dot(fc.redistribute(f.dot(x, x), P("data")), x), "which is whole, and on no mesh"),
        (lambda f, w, x: fc.checkpoint(lambda x: f.dot(x, x))(x), "inside a traced function"),
    ],
)
def test_anything_else_is_refused(use, what: str) -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    f, (w, x) = functions(mesh), data()
    with pytest.raises((ShardingError, TraceError)) as error:
        fc.grad(lambda x: use(f, w, x))(fc.device_put(x, mesh, P("data")))
    assert what in str(error.value) and "test_shard_map_gradients.py" in str(error.value)


def test_an_array_that_is_closed_over_is_refused_too() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    w, x = data()
    split = fc.device_put(x, mesh, P("data"))
    with pytest.raises(ShardingError, match=r"NumPy reads an Array f64\[8,4\] that is split as P\('data'\)"):
        fc.grad(lambda w: np.sum(split * w))(w)


def test_other_traces_refuse_the_call() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    f, (w, x) = functions(mesh), data()
    loss = lambda w: f.loss(w, x)
    for transformed in (fc.jit(fc.grad(loss)), fc.jit(loss), fc.hessian(loss), lambda w: fc.jvp(loss, (w,), (w,))):
        with pytest.raises(TraceError, match=r"call the plain function, loss\.fn"):
            transformed(w)
    with pytest.raises(TraceError, match="inside pullback"):
        fc.jacrev(fc.grad(loss))(w)


def test_a_mesh_of_its_own_is_refused() -> None:
    mesh, other = fc.make_mesh({"data": 2, "model": 2}), fc.make_mesh({"data": 4})
    f, (_, x) = functions(mesh), data()
    with pytest.raises(ShardingError, match="functions that are called in one gradient have one mesh"):
        fc.grad(lambda x: f.dot(x, x))(fc.device_put(x, other, P("data")))


def test_a_split_value_is_made_whole_by_redistribute() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    f, (w, x) = functions(mesh), data()

    def ours(w, x):
        h = fc.redistribute(f.features(w, x), P(None, "model"))
        return np.sum(fc.redistribute(h, P()) ** 3) + f.dot(h, h)

    found = fc.grad(ours, (0, 1))(w, fc.device_put(x, mesh, P("data")))
    expected = fc.grad(lambda w, x: np.sum(np.tanh(x * w) ** 3) + np.sum(np.tanh(x * w) ** 2), (0, 1))(w, x)
    for ct, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ct), want, rtol=1e-12)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.processes
def test_processes_have_the_bits_of_virtual_devices(count: int) -> None:
    launch(compare_in_job, count, blocks_of_gradients(fc.make_mesh({"data": count})))


def test_other_transformations_take_arrays_whole() -> None:
    mesh = fc.make_mesh({"data": 2, "model": 2})
    _, x = data()
    split, f = fc.device_put(x, mesh, P("data")), lambda x: np.sum(np.reshape(x, -1) ** 3)
    assert fc.jvp(f, (split,), (split,)) == fc.jvp(f, (x,), (x,))
    np.testing.assert_array_equal(fc.vmap(lambda r: np.sum(r * r))(split), np.sum(x * x, 1))
