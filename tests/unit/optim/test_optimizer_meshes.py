"""Optimizers on meshes and in jobs: one set of bits, states where their parameters are, norms over all devices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, optim
from funccoll.config import FUSE
from funccoll.errors import VaryingError
from funccoll.tracing.trace import value_type
from tests.support.example_counts import examples
from tests.support.optimizers import OPTIMIZERS, bits, clipped

pytestmark = pytest.mark.covers("optim")

# ---------------------------------------------------------------- meshes


def sharded(params):
    return {"w": P("data"), "b": P()} if isinstance(params, dict) else params


@pytest.mark.parametrize("donate", [(), (0, 1)])
@pytest.mark.parametrize("name", ["adam", "chain", "momentum"])
def test_on_a_mesh(line, name, donate):
    """Parameters that are split, and that are not; as many steps on one device give the same values."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, "data"), optim.adamw(0.1)) if name == "chain" else OPTIMIZERS[name]()
    rng = np.random.default_rng(0)
    params = {"w": rng.integers(-4, 5, (8, 3)).astype(np.float32), "b": rng.integers(-4, 5, 3).astype(np.float32)}
    state = optimizer.init(params)
    specs = {"w": P("data"), "b": P()}
    state_specs = fc.tree.map(lambda x: P("data") if np.shape(x) == (8, 3) else P(), state)

    def loss(params, x):
        return fc.all_reduce(np.sum((x * fc.all_gather(params["w"], "data")) @ params["b"]), "data")

    def body(params, state, x):
        grads = fc.grad(loss)(params, x)
        return optim.apply(optimizer, grads, state, params)

    step = fc.jit(
        body, mesh=line, in_specs=(specs, state_specs, P("data")), out_specs=(specs, state_specs), donate_argnums=donate
    )
    x = rng.integers(-3, 4, (4 * 8, 3)).astype(np.float32)
    single = (params, state)
    many = (params, state)
    for _ in range(3):
        whole = {"w": params_gradient(single[0], x)[0], "b": params_gradient(single[0], x)[1]}
        alone = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)) if name == "chain" else optimizer
        single = optim.apply(alone, whole, single[1], single[0])
        many = step(*many, x)
    for a, b in zip(fc.tree.leaves(single), fc.tree.leaves(many), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def params_gradient(params, x):
    """Of the sum over blocks of x of `(block * w) @ b`."""
    blocks = x.reshape(4, 8, 3)
    w, b = np.asarray(params["w"]), np.asarray(params["b"])
    return blocks.sum(0) * b, (blocks * w).sum((0, 1))


def test_a_step_that_no_collective_separates_from_its_readers(line):
    """The parameter is equal on all devices, and what reads it varies: the step would run first, so it writes elsewhere."""
    optimizer = optim.sgd(1.0)

    def body(p, g, x):
        seen = p * x  # on each device
        new, _ = optim.apply(optimizer, g, optimizer.init(p), p)
        return new, seen

    step = fc.jit(body, mesh=line, in_specs=(P(), P(), P("data")), out_specs=(P(), P("data")), donate_argnums=0)
    p = fc.device_put(np.full(2, 3, np.float32), line, P())
    new, seen = step(p, np.ones(2, np.float32), np.repeat(np.arange(4, dtype=np.float32), 2))
    assert np.all(np.asarray(new) == 2)
    np.testing.assert_array_equal(np.asarray(seen), np.repeat(np.arange(4) * 3, 2))


READ_BY_OTHERS = {
    "permute": (lambda p: fc.permute(p, "data", pairs=[(i, (i + 1) % 4) for i in range(4)]), np.roll(np.arange(8), 2)),
    "broadcast": (lambda p: fc.broadcast(p, "data"), np.tile([0, 1], 4)),
    "all_gather": (lambda p: fc.all_gather(p, "data", stack=True)[0], np.tile([0, 1], 4)),
}


@pytest.mark.parametrize("name", ["permute", "broadcast", "all_gather"])
def test_a_block_that_another_device_reads(line, name):
    """Collectives between virtual devices may move no bytes: a device must not overwrite what the next one still reads."""
    optimizer = optim.sgd(1.0)
    move, wanted = READ_BY_OTHERS[name]

    def body(p, g):
        total = fc.pvary(move(p), "data") * 10 if name != "permute" else move(p) * 10
        new, _ = optim.apply(optimizer, g + 0 * total, optimizer.init(p), p)  # after the collective
        return new, total

    step = fc.jit(body, mesh=line, in_specs=P("data"), out_specs=P("data"), donate_argnums=0)
    p = fc.device_put(np.arange(8, dtype=np.float32), line, P("data"))
    new, total = step(p, np.ones(8, np.float32))
    np.testing.assert_array_equal(np.asarray(new), np.arange(8) - 1)
    np.testing.assert_array_equal(np.asarray(total), 10 * wanted)


CHOICES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=10)


@examples(60)
@given(CHOICES, st.sets(st.integers(0, 12), max_size=3))
def test_random_programs_have_the_same_bits_donated_or_not(choices, kept):
    """Steps among what reads their parameters, on the same and on other devices, before and after collectives."""
    mesh, optimizer = fc.make_mesh({"d": 2}), optim.sgd(0.5, 0.5)

    def varies(x):
        return "d" in value_type(x).varying

    def body(p, q, x):
        values = [p, q, x]
        for kind, i, j in choices:
            a, b = values[-1 - i % len(values)], values[j % len(values)]
            if kind == 0:
                values.append(a + b)
            elif kind == 1:
                values.append(fc.all_reduce(a if varies(a) else fc.pvary(a, "d"), "d"))
            elif kind == 2:
                values.append(a.T.T if j % 2 else a.reshape(4, 2).reshape(2, 4))
            elif kind == 3 and varies(a):
                values.append(fc.permute(a, "d", pairs=[(0, 1), (1, 0)]))
            elif kind >= 3 and varies(a) >= varies(b):
                gradient = b if varies(b) == varies(a) else fc.pvary(b, "d")
                new, state = optim.apply(optimizer, gradient, optim.SgdState(0, a * 0.5), a)
                values += [new, state.trace]
        last = values[-2:] + [values[k % len(values)] for k in sorted(kept)]
        return [v if varies(v) else fc.pvary(v, "d") for v in last]

    def run(donate):
        rng = np.random.default_rng(0)
        given = [
            fc.device_put(rng.integers(-9, 9, (rows, 4)).astype(np.float32), mesh, spec)
            for rows, spec in ((2, P()), (4, P("d")), (4, P("d")))
        ]
        return bits(fc.jit(body, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P("d"), donate_argnums=donate)(*given))

    assert run((0, 1, 2)) == run(())


def test_states_lie_where_their_parameters_are(line):
    params = {"w": fc.device_put(np.ones((8, 2), np.float32), line, P("data"))}
    state = optim.adam(0.1).init(params)
    assert state.mu["w"].sharding == params["w"].sharding


def test_global_norm_of_split_leaves(line):
    tree = {"w": np.arange(8, dtype=np.float32), "b": np.ones(3, np.float32)}
    specs = {"w": P("data"), "b": P()}
    norm = fc.jit(lambda t: optim.global_norm(t, "data"), mesh=line, in_specs=(specs,), out_specs=P())(tree)
    np.testing.assert_allclose(np.asarray(norm), np.sqrt(np.sum(np.arange(8.0) ** 2) + 3), rtol=1e-6)


@pytest.mark.parametrize(("axis", "named"), [(None, "'model'"), ("data", "('data', 'model')")])
def test_a_norm_of_which_devices_have_several_is_an_error(mesh, axis, named):
    """The optimizer after it would only say that the gradients of what is whole vary."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.5, axis), optim.sgd(0.1))
    params = {"b": np.ones(3, np.float32), "w": np.ones((4, 2), np.float32)}
    specs = {"b": P(), "w": P("data", "model") if axis else P(None, "model")}
    step = fc.jit(
        lambda p: optim.apply(optimizer, p, optimizer.init(p), p)[0],
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs,
    )
    with pytest.raises(VaryingError) as error:
        step(params)
    assert str(error.value).startswith(
        "clip_by_global_norm: grads['w'] varies over 'model', and grads['b'] does not: each device would scale it by another "
    )
    assert f"clip_by_global_norm(1.5, axis={named})." in str(error.value)
    assert "test_optimizer_meshes.py" in str(error.value)


def test_a_norm_of_gradients_that_are_all_split_names_its_axes(mesh):
    """Without, each device would scale its columns by their own norm: steps that no single process takes."""
    grads, specs = {"w": np.ones((2, 4), np.float32), "v": np.ones(8, np.float32)}, {"w": P(None, "model"), "v": P("model")}
    with pytest.raises(VaryingError) as error:
        clipped(None, specs, mesh)(grads)
    assert str(error.value).startswith(
        "clip_by_global_norm: grads['v'] varies over 'model', and no axis is named: each device would scale its part by the "
        "norm of this part alone. Name the axes over which gradients are split: clip_by_global_norm(1, axis='model'). If "
        "each device has gradients of its own, write axis=().\n"
    )
    np.testing.assert_allclose(clipped("model", specs, mesh)(grads)["w"], np.full((2, 4), 0.25), rtol=1e-5)
    np.testing.assert_allclose(clipped((), specs, mesh)(grads)["w"], np.full((2, 4), 0.125**0.5), rtol=1e-5)
    rows, both = np.ones((4, 4), np.float32), {"w": P("data", "model")}
    with pytest.raises(VaryingError, match=r"grads\['w'\] varies over 'data', 'model', .*axis=\('data', 'model'\)\)"):
        clipped(None, both, mesh)({"w": rows})
    # Per device along "data", as before its gradients are averaged: the axes that are named are those that are meant.
    np.testing.assert_allclose(clipped("model", both, mesh)({"w": rows})["w"], np.full((4, 4), 0.5), rtol=1e-5)


def test_a_norm_of_whole_gradients_needs_no_axis(mesh):
    grads = {"w": np.ones((2, 2), np.float32)}
    for axis in (None, (), "model"):
        np.testing.assert_allclose(clipped(axis, {"w": P()}, mesh)(grads)["w"], np.full((2, 2), 0.5), rtol=1e-5)
    clip = optim.clip_by_global_norm(1.0)
    each = fc.vmap(lambda g: clip.update(g, clip.init(g))[0])(np.eye(3, dtype=np.float32) * 5)
    np.testing.assert_allclose(each, np.eye(3), rtol=1e-5)


# ---------------------------------------------------------------- processes


def train(devices=2, steps=4):
    """Training of parameters that are equal on all devices, and of split ones; what it ends with."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, "data"), optim.adamw(0.1))
    mesh = fc.make_mesh({"data": devices})
    rng = np.random.default_rng(0)
    host = {"w": rng.normal(size=(64, 300)).astype(np.float32), "v": rng.normal(size=(300, 4)).astype(np.float32)}
    specs = {"w": P(), "v": P("data")}
    params = {k: fc.device_put(x, mesh, specs[k]) for k, x in host.items()}
    state = optimizer.init(params)
    state_specs = fc.tree.map(lambda x: x.sharding.spec if isinstance(x, fc.Array) else P(), state)

    def loss(params, x):
        hidden = np.tanh(x @ params["w"]) @ fc.all_gather(params["v"], "data")
        return fc.all_reduce(np.mean(hidden**2), "data", op="mean")

    def body(params, state, x):
        return optim.apply(optimizer, fc.grad(loss)(params, x), state, params)

    split = (specs, state_specs)
    step = fc.jit(body, mesh=mesh, in_specs=(*split, P("data")), out_specs=split, donate_argnums=(0, 1))
    for i in range(steps):
        x = np.random.default_rng(i).normal(size=(8 * devices, 64)).astype(np.float32)
        params, state = step(params, state, x)
    return [np.asarray(fc.process_allgather(params[k])).tobytes() for k in sorted(params)]


@pytest.mark.processes
def test_a_job_has_the_bits_of_virtual_devices(monkeypatch):
    monkeypatch.setenv(FUSE, "1")
    assert fc.launch(train, 2) == [train()] * 2
