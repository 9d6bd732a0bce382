"""Specs that nobody has to write: `fc.optim.state_specs` and `fc.spec_like`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, optim
from funccoll.errors import PytreeError, ShapeError, ShardingError, TraceError
from tests.support.groups import in_groups
from tests.support.misuse import wrong

pytestmark = pytest.mark.covers("optim")

MESH = fc.make_mesh({"data": 2, "model": 2})
ENTRIES = [P(), P("data"), P(None, "model"), P("model", "data"), P(("data", "model")), P(("model", "data"), None), P(None)]
SPECS = {"w": P(None, "model"), "b": P("model"), "layers": [P("data"), P(), P("model", "data")]}
OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, 0.9, nesterov=True),
    "adam": optim.adam(optim.cosine_decay_schedule(0.1, 10)),
    "amsgrad": optim.adamw(0.1, amsgrad=True),
    "chain": optim.chain(optim.clip_by_global_norm(1.0), optim.clip(0.1), optim.adamw(0.1)),
    "scaled": optim.chain(optim.sgd(0.1, 0.5), optim.scale_by_schedule(optim.exponential_decay(1.0, 3, 0.5))),
}


def any_value(x: Any) -> Any:
    """`x`, of which a type checker knows nothing."""
    return x


class Averages(NamedTuple):
    steps: Any
    slow: Any
    seen: Any


def lookahead():
    """A transformation of one's own: averages of the parameters, a history of fixed size, and the optimizer's state."""
    inner = optim.adam(0.1)

    def init(params: Any) -> Any:
        return Averages(np.int64(0), fc.tree.map(np.copy, params), {"losses": np.zeros(8), "inner": inner.init(params)})

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, new = inner.update(grads, state.seen["inner"], params)
        slow = fc.tree.map(lambda s, p: s * 0.9 + p * 0.1, state.slow, params)
        return updates, Averages(state.steps + 1, slow, {**state.seen, "inner": new})

    return optim.GradientTransformation(init, update)


OPTIMIZERS["own"] = lookahead()


def put(tree, specs):
    return fc.tree.map(lambda x, spec: fc.device_put(x, MESH, spec), tree, specs)


def params_like(specs):
    """Parameters that these specs can split: of as many dimensions as they name, or one more."""
    return fc.tree.map(lambda spec: np.arange(4.0 ** (len(spec) + 1), dtype=np.float32).reshape((4,) * (len(spec) + 1)), specs)


spec_trees = st.recursive(
    st.sampled_from(ENTRIES),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
    max_leaves=6,
)


@settings(max_examples=40)
@given(spec_trees, st.sampled_from(sorted(set(OPTIMIZERS) - {"own"})))
def test_it_says_what_init_makes_of_arrays(specs, name):
    """Our optimizers place the state of Arrays as these are placed."""
    optimizer = OPTIMIZERS[name]
    state = optimizer.init(put(params_like(specs), specs))
    found = optim.state_specs(optimizer, specs)
    assert fc.tree.structure(found) == fc.tree.structure(state)
    normal = lambda specs: [P() if not spec.axes else spec for spec in fc.tree.leaves(specs)]
    assert normal(found) == normal(fc.spec_like(state))


def step_of(optimizer, state_specs):
    def body(params, state, grads):
        return optim.apply(optimizer, grads, state, params)

    return fc.jit(body, mesh=MESH, in_specs=(SPECS, state_specs, SPECS), out_specs=(SPECS, state_specs))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_a_mesh_takes_and_returns_them(name):
    optimizer = OPTIMIZERS[name]
    if name == "chain":  # the norm is of all parameters
        optimizer = optim.chain(optim.clip_by_global_norm(1.0, ("data", "model")), optim.clip(0.1), optim.adamw(0.1))
    state_specs = optim.state_specs(optimizer, SPECS)
    params = params_like(SPECS)
    state, grads = optimizer.init(params), fc.tree.map(np.sin, params)
    step = any_value(step_of(optimizer, state_specs))
    assert step.trace(params, state, grads).program.outputs
    if name in ("chain", "own"):
        found: Any = (params, state)
        expected: Any = (params, state)
        for _ in range(2):
            found = step(*found, grads)
            expected = optim.apply(OPTIMIZERS[name], grads, expected[1], expected[0])
        assert fc.spec_like(found) == (SPECS, state_specs)
        for x, wanted in zip(fc.tree.leaves(found), fc.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "specs", "error", "words"),
    [
        ("adam", P(), ShapeError, r"adam: state\.mu\['b'\] has shape \[4, 4\], and params\['b'\] \[2, 4\]\. An optimizer's"),
        ("adam", SPECS, PytreeError, r"in_specs\[1\] is a dict with .*, and the arguments have an AdamState with 4 children"),
        ("chain", SPECS, PytreeError, r"in_specs\[1\] is a dict with .*, and the arguments have a tuple of 3 there\. An opt"),
        ("chain", (P(), P(), SPECS), PytreeError, r"in_specs\[1\]\[2\] is a dict .* have an AdamState with 4 children there"),
    ],
)
def test_other_specs_name_state_specs(name, specs, error, words):
    params = params_like(SPECS)
    with pytest.raises(error, match=words) as told:
        step_of(OPTIMIZERS[name], specs)(params, OPTIMIZERS[name].init(params), params)
    assert " An optimizer's state has the specs fc.optim.state_specs(optimizer, param_specs), in in_specs" in str(told.value)


def test_other_specs_of_the_parameters_do_not():
    params = params_like(SPECS)
    with pytest.raises(PytreeError, match="Give one P for each array") as told:
        fc.jit(lambda p, s: p, mesh=MESH, in_specs=({"w": P()}, P()))(params, OPTIMIZERS["adam"].init(params))
    assert "optim.state_specs" not in str(told.value)


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"own"}))
@in_groups("prefix", [P("data"), {"w": P("data"), "layers": None}, None, P(), (P(), {"x": P("model")})])
def test_a_prefix_gives_a_prefix(name, prefix):
    optimizer = OPTIMIZERS[name]
    without_none: Any = P() if prefix is None else {**prefix, "layers": P()} if isinstance(prefix, dict) else prefix
    whole = fc.tree.map(lambda spec: {"kernel": spec, "bias": [spec]}, without_none)
    specs = optim.state_specs(optimizer, prefix), optim.state_specs(optimizer, whole)
    step = fc.jit(lambda s: s, mesh=MESH, in_specs=specs[:1], out_specs=specs[1])
    state = optimizer.init(params_like(whole))
    taken = step.trace(state)  # the prefix fits the state, and splits it as the full specs do
    assert [layout.sharding for layout in taken.signature.in_layouts] == [x.sharding for x in taken.signature.out_layouts]


def test_specs_that_arguments_decide():
    optimizer, specs = OPTIMIZERS["adam"], {"w": fc.AUTO, "b": P("model")}
    found = optim.state_specs(optimizer, specs)
    assert found == optim.AdamState(P(), specs, specs, None)
    assert optim.state_specs(optimizer, {}) == optim.AdamState(P(), {}, {}, None)


def own(init):
    return optim.GradientTransformation(init, lambda grads, state, params=None: (grads, state))


def test_constants_are_whole_also_of_the_size_of_some_parameters():
    specs = [P("data"), P("data", "model")]
    for size in range(1, 30):
        for shape in [(size,), (size, 2), (size, 3), (size, 4)]:
            assert optim.state_specs(own(lambda params, shape=shape: np.zeros(shape)), specs) == P()


def factored(params):
    return fc.tree.map(lambda p: {"row": np.zeros(p.shape[:-1]), "column": np.zeros(p.shape[1:])}, params)


def test_what_cannot_be_told():
    specs = {"w": P("data", "model"), "b": P()}
    mixed = optim.chain(optim.adam(0.1), own(factored))
    wrong(
        PytreeError,
        lambda: optim.state_specs(mixed, specs),
        "state_specs: state[1]['b']['column'] is neither",
        "by hand",
        "in a chain",
    )
    by_size = [
        lambda p: np.zeros(p.shape[0]),
        lambda p: np.zeros(p.shape[:1]),
        lambda p: np.zeros(p.shape[1:]),
        lambda p: p.T,
        lambda p: np.eye(p.shape[-1]),
        lambda p: np.eye(p.shape[1]),
        lambda p: np.zeros(p.size),
        lambda p: p[None],
        lambda p: np.zeros((8, *p.shape)),
        lambda p: p[:1],
        lambda p: p[..., 0],
        lambda p: p[:-1],
    ]
    for make in by_size:
        wrong(PytreeError, lambda make=make: optim.state_specs(own(make), P("data", "model")), "state is neither like")
        assert optim.state_specs(own(make), P()) == P()
    by_rank = own(lambda params: fc.tree.map(lambda p: (p, p) if p.ndim > 2 else p, params))
    wrong(PytreeError, lambda: optim.state_specs(by_rank, specs), "structure", "shapes of the parameters")
    assert optim.state_specs(by_rank, {"w": P(), "b": P(None, None)}) == P()


def test_init_that_fails_says_what_it_was_given():
    kernel = own(lambda params: params["kernel"])
    wrong(PytreeError, lambda: optim.state_specs(kernel, P("data")), "IndexError", "small arrays", "no prefix")
    assert optim.state_specs(kernel, {"kernel": P("data")}) == P("data")
    matrices = own(lambda params: fc.tree.map(lambda p: np.zeros((p.shape[0], *p.shape[1:])), params))
    assert optim.state_specs(matrices, [P(), P("data")]) == [P(), P("data")]  # no scalars


def test_arguments_of_other_kinds():
    wrong(ShardingError, lambda: optim.state_specs(optim.adam(0.1), {"w": "data"}), "param_specs: 'data'", "fc.P('data')")
    wrong(ShardingError, lambda: optim.state_specs(optim.adam(0.1), params_like(SPECS)), "is not a partition spec")
    wrong(TraceError, lambda: optim.state_specs(any_value(optim.adam), SPECS), "takes a pair", "fc.optim.adam(1e-3)")


# ------------------------------------------------------------ spec_like


@given(spec_trees)
@settings(max_examples=20)
def test_spec_like_reads_shardings(specs):
    arrays = put(params_like(specs), specs)
    found = fc.spec_like((arrays, 1.0, None, np.ones(3), fc.asarray(2.0), "name"))
    assert found[1:] == (P(), None, P(), P(), P())
    assert found[0] == specs
    same = fc.jit(lambda x: x, mesh=MESH, in_specs=(found[0],), out_specs=found[0])
    assert not same.trace(arrays).redistributions  # nothing is redistributed


def test_spec_like_of_traced_arrays():
    x = fc.device_put(np.ones(4), MESH, P("data"))
    step = lambda: fc.jit(lambda x: fc.spec_like({"x": x}), mesh=MESH, in_specs=P("data"))(x)
    wrong(TraceError, step, "tree['x'] is a traced array", "outside")
    seen = []
    step = fc.jit(lambda x: fc.all_reduce(np.sum(x), "data"), mesh=MESH, in_specs=P("data"), out_specs=P())

    def loss(x):
        seen.append(fc.spec_like([x, 2 * step(x)]))
        return step(x)

    fc.grad(loss)(x)
    assert seen == [[P("data"), P()]]


def test_split_parameters_and_states_are_saved_whole_and_loaded(tmp_path):
    """The guide's way, without DataParallel: gathered, written by NumPy, and split again by the step that takes them."""
    optimizer, specs = optim.adam(0.1), {"b": P(), "w": P("model")}
    mesh = fc.make_mesh({"model": 4})
    states = optim.state_specs(optimizer, specs)
    step = fc.jit(lambda p, s: optim.apply(optimizer, p, s, p), mesh=mesh, in_specs=(specs, states), out_specs=(specs, states))
    params = {"b": np.ones(3, np.float32), "w": np.arange(8, dtype=np.float32)}
    made = step(params, optimizer.init(params))
    leaves, tree = fc.tree.flatten(fc.process_allgather(made))
    np.savez(tmp_path / "saved.npz", *leaves)
    with np.load(tmp_path / "saved.npz") as saved:
        loaded = fc.tree.unflatten(tree, [saved[f"arr_{i}"] for i in range(len(leaves))])
    for want, found in zip(*map(fc.tree.leaves, (step(*made), step(*loaded))), strict=True):
        assert found.sharding == want.sharding
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want))
