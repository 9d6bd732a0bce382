"""`fc.AUTO` in out_specs: the layouts of results, read off the program; never a wrong one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, optim
from funccoll.compiler.layout_rules import rule_of
from funccoll.compiler.output_layouts import CONTROL_RULES
from funccoll.core.ir import _PRIMITIVES
from funccoll.errors import OutSpecsError, PytreeError
from funccoll.transforms.custom_primitives import USERS_PRIMITIVES
from tests.support.cases.layout_programs import MESH, random_program
from tests.support.example_counts import examples
from tests.support.groups import in_groups
from tests.support.misuse import wrong

pytestmark = pytest.mark.covers("jit")

X = np.arange(64.0).reshape(4, 16)


def laid_out(body, *specs, args=(X,), out: Any = fc.AUTO):
    """The specs of the results, from the types alone."""
    step: Any = fc.jit(body, mesh=MESH, in_specs=specs, out_specs=out)
    traced = step.trace(*args)
    return traced.signature.out_tree.unflatten([layout.sharding.spec for layout in traced.signature.out_layouts])


@examples(120)
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_random_programs_have_the_value_that_numpy_gives_whole_arrays(random, steps):
    inputs, program, value = random_program(lambda n: random.randrange(n), steps)
    step = fc.jit(program, mesh=MESH, in_specs=tuple(spec for _, spec in inputs), out_specs=fc.AUTO)
    try:
        found = step(*(x for x, _ in inputs))
    except OutSpecsError:
        assert value.spec is None or not value.sure
        return
    assert found.shape == value.whole.shape
    np.testing.assert_allclose(found, value.whole, rtol=1e-9, atol=1e-12)


A, B, AB = P("a"), P(None, "b"), P("a", "b")
KEPT = {
    "elementwise": (lambda x: np.where(x > 0, np.sin(x), x.astype(np.float32)), AB, AB),
    "two axes of one dimension": (lambda x: x + 1, P(None, ("b", "a")), P(None, ("b", "a"))),
    "whole": (lambda x: x.sum(), P(), P()),
    "new and constant": (lambda x: np.zeros((2, 3)), A, P()),
    "made by broadcasting": (lambda x: x + np.zeros((3, 1, 1)), AB, P(None, "a", "b")),
    "transposed": (lambda x: np.moveaxis(x, 0, 1), A, P(None, "a")),
    "sum of another dimension": (lambda x: x.sum(1), A, A),
    "keepdims": (lambda x: x.max(0, keepdims=True), B, B),
    "all_reduce": (lambda x: fc.all_reduce(x.sum(0), "a"), AB, P("b")),
    "all_gather": (lambda x: fc.all_gather(x, "a"), AB, B),
    "all_gather, stacked": (lambda x: fc.all_gather(x, "a", stack=True), AB, P(None, None, "b")),
    "broadcast": (lambda x: fc.broadcast(x, "a"), AB, B),
    "scatter": (lambda x: fc.scatter(x, "a", dim=1), A, P(None, "a")),
    "reduce_scatter": (lambda x: fc.reduce_scatter(x, "a", dim=1), AB, P(None, ("b", "a"))),
    "all_to_all": (lambda x: fc.all_to_all(x, "a", split_dim=1, concat_dim=0), AB, P(None, ("b", "a"))),
    "own_slice": (lambda x: fc.own_slice(x, ("b", "a"), dim=1), P(), P(None, ("b", "a"))),
    "permute": (lambda x: fc.permute(x, "a", pairs=[(0, 1)]), AB, AB),
    "halo": (lambda x: np.concatenate([fc.permute(x[-1:], "a", pairs=[(0, 1)]), x])[:-1], A, A),
    "stencil": (lambda x: np.pad(x, 1)[:-2, 1:-1] + x, AB, AB),
    "boundary": (lambda x: np.where(fc.axis_index("a") == 0, 0.0, x), A, A),
    "embedding": (lambda x: fc.asarray(np.eye(64))[x.astype(int)], AB, AB),
    "index behind": (lambda x: x[:, None, 3], A, A),
    "arrays apart": (lambda x: x[:, None, :, None][:, [0, 0], :, [0]], A, P(None, "a")),
    "largest of rows": (lambda x: fc.top_k(x, 2)[1], A, A),
    "sorted rows": (lambda x: np.sort(np.cumsum(x, axis=1), axis=1), A, A),
    "fft of rows": (lambda x: np.fft.rfft(x, axis=1), A, A),
    "matmul": (lambda x: x @ np.ones((16, 3)), A, A),
    "matmul from the left": (lambda x: np.ones((3, 4)) @ x, B, B),
    "product of two": (lambda x: x @ fc.all_gather(x, "a").T, A, A),
    "contraction": (lambda x: fc.all_reduce(x @ np.ones((8, 3)), "b"), AB, A),
    "einsum": (lambda x: np.einsum("ij,kj->kij", x, np.ones((2, 16))), A, P(None, "a")),
    "flattened behind": (lambda x: np.reshape(x, (x.shape[0], 2, -1)), AB, P("a", "b")),
    "ravel": (lambda x: np.ravel(x), A, A),
    "searched": (lambda x: np.searchsorted(np.arange(5.0), x), AB, AB),
    "at": (lambda x: fc.at(x)[:, 0].add(1.0), A, A),
    "noise": (lambda x: x + fc.random.normal(fc.random.fold_in(fc.random.key(0), fc.axis_index("a")), x.shape), A, A),
    "gradient": (lambda x: fc.grad(lambda x: np.sum(np.sin(x[1:, ::2]) * 2))(x), AB, AB),
    "hessian's diagonal": (lambda x: fc.jvp(fc.grad(lambda x: np.sum(x**3)), (x,), (x,))[1], A, A),
    "vmap": (lambda x: fc.vmap(lambda row: row @ np.ones((16, 2)))(x), A, A),
    "vmap of columns": (lambda x: fc.vmap(lambda c: c * np.sum(c), in_axes=1, out_axes=1)(x), B, B),
    "loop": (lambda x: fc.fori_loop(0, 3, lambda i, c: c * 0.5 + x, np.zeros_like(x)), AB, AB),
    "while": (
        lambda x: fc.while_loop(
            lambda c: fc.all_reduce(np.sum(c[1]), ("a", "b")) < 9e9, lambda c: (c[0] + 1, c[1] * 2), (0, x)
        )[1],
        AB,
        AB,
    ),
    "scan": (lambda x: fc.scan(lambda c, row: (c + row, c * row), np.zeros(x.shape[1]), x)[1], B, B),
    "cond": (lambda x: fc.cond(fc.all_reduce(x[0, 0], ("a", "b"), op="max") > 0, lambda x: x * 2, np.zeros_like, x), AB, AB),
    "checkpoint": (lambda x: fc.checkpoint(np.sin)(x), AB, AB),
    "nested jit": (lambda x: fc.jit(lambda x: x.T)(x), A, P(None, "a")),
    "softmax of whole rows": (lambda x: fc.nn.softmax(x, axis=1), A, A),
    "a rule without layout, of whole values": (lambda x: np.linalg.inv(fc.all_reduce(x @ x.T, "b")), B, P()),
}


@in_groups("name", KEPT)
def test_axes_follow_their_dimension(name):
    body, spec, expected = KEPT[name]
    assert laid_out(body, spec) == expected


NORMALIZE: Any = fc.custom_primitive("normalize", lambda x: x / x.sum(0), types=lambda x: x, batch="elementwise")
LOST = {
    "sum": (lambda x: x.sum(0), A, "reduce_sum over the split dimension"),
    "sum, used again": (lambda x: x - x.mean(0), A, "of each device's block"),
    "argmax": (lambda x: np.argmax(x, axis=0), A, "argmax over the split"),
    "sort": (lambda x: np.sort(x, axis=0), A, "sort is of each device's block"),
    "top_k": (lambda x: fc.top_k(x.T, 1)[1], A, "top_k_indices is of each device's block"),
    "cumsum": (lambda x: np.cumsum(x, axis=0), A, "cumsum is of each"),
    "fft": (lambda x: np.fft.fft(x, axis=0), A, "fft.fft is of each"),
    "reversal": (lambda x: x[::-1], A, "reversed"),
    "integer": (lambda x: x[0], A, "an index into the split dimension"),
    "array": (lambda x: x[[0, 1]], A, "an index into the split dimension"),
    "update": (lambda x: fc.at(x)[0].set(1.0), A, "an index into the split dimension"),
    "update by split values": (lambda x: fc.at(np.zeros((16, 16)))[x[:, 0].astype(int)].add(x), A, "indices of each device"),
    "update at split indices": (lambda x: fc.at(np.zeros(16))[x[:, 0].astype(int)].add(1.0), A, "indices of each device"),
    "product": (lambda x: x.T @ x, A, "part of a sum"),
    "einsum": (lambda x: np.einsum("ij,kj->ik", x, x), B, "part of a sum"),
    "diagonal": (lambda x: np.einsum("ii->i", x[:, :2]), A, "a diagonal"),
    "other dimensions": (lambda x: x[:, :2] + x[:, :2].T, A, "along different dimensions"),
    "other axes": (lambda x: x + fc.own_slice(fc.all_gather(x, "a"), "b", dim=0), A, "are split differently"),
    "taken apart": (lambda x: np.reshape(x, (8, -1)), B, "reshape takes it apart"),
    "one element": (lambda x: np.reshape(x[:1], (-1,)), A, "reshape"),
    "one element, in front": (lambda x: np.reshape(x, (1, 2, -1)), A, "reshape"),
    "one element, repeated": (lambda x: np.broadcast_to(x[:1], (2, 16)), A, "one element is repeated"),
    "reduce": (lambda x: fc.reduce(x, "a"), A, "the results of reduce"),
    "gather": (lambda x: fc.gather(x, "a"), A, "the results of gather"),
    "all_to_all in place": (lambda x: fc.all_to_all(x, "a", split_dim=0, concat_dim=0), A, "the results of all_to_all"),
    "outer axis gathered": (lambda x: fc.all_gather(x, "b", dim=1), P(None, ("b", "a")), "outside of 'a'"),
    "scan": (lambda x: fc.scan(lambda c, row: (c, row), 0.0, x)[1], A, "the loop runs over each"),
    "carry": (lambda x: fc.fori_loop(0, 2, lambda i, c: c + x.sum(0), np.zeros(16)), A, "reduce_sum"),
    "predicate": (lambda x: fc.cond(x.sum() > 0, lambda x: x, lambda x: -x, x), A, "reduce_sum"),
    "branches": (lambda x: fc.cond(fc.axis_index("b") > 0, lambda x: x[:, :2], lambda x: x[:, :2].T, x), A, "different dim"),
    "linalg": (lambda x: np.linalg.inv(x[:, :2]), A, "there is no rule for linalg.inv"),
    "solve": (lambda x: np.linalg.solve(np.eye(2), x), A, "there is no rule for linalg.solve"),
    "solve, one triangle": (lambda x: fc.linalg.solve_triangular(np.eye(2), x), A, "there is no rule for linalg.solve_tri"),
    "a primitive of one's own": (lambda x: NORMALIZE(x), A, "there is no rule for normalize"),
    "only device numbers": (lambda x: fc.axis_index("a") * np.ones(3), A, "each device has made it for itself"),
    "copies": (lambda x: fc.pvary(np.ones(3), "a"), A, "each device has made it for itself"),
}


@in_groups("name", LOST)
def test_what_is_of_each_block_alone_is_refused(name):
    body, spec, reason = LOST[name]
    with pytest.raises(OutSpecsError, match=r"fc\.AUTO cannot derive which dimension of result, of type") as caught:
        laid_out(body, spec)
    assert reason in str(caught.value)


entries = st.sampled_from([slice(None), slice(0, 2), None, 1, "array", "column"])


@examples(120)
@given(st.lists(entries, max_size=5), st.integers(0, 3), st.booleans(), st.booleans())
def test_indices_take_axes_where_numpy_takes_the_dimension(items, dim, of_array, update):
    """Of an array of 2 x 2 x 2 x 2 on each device dimension `dim` is split, or dimension 0 of its first index array."""
    taken = [item for item in items if item is not None]
    arrays = {"array": np.array([0, 1]), "column": np.array([[0], [1]])}
    assume(len(taken) <= 4 and (not of_array or any(isinstance(item, str) for item in taken)))
    kept = dim >= len(taken) or isinstance(taken[dim], slice)

    def index(first: Any) -> tuple:
        given: list[Any] = [arrays.get(item, item) if isinstance(item, str) else item for item in items]
        where = [k for k, item in enumerate(items) if isinstance(item, str)]
        return tuple(first if of_array and k == where[0] else item for k, item in enumerate(given))

    first_array = next((k for k, item in enumerate(taken) if isinstance(item, str)), 0)
    number = arrays[taken[first_array] if of_array else "array"]
    numbers = np.arange(2).reshape([2 if d == dim else 1 for d in range(4)])
    if of_array:  # each element of the result is the row of the index array
        numbers = np.arange(2).reshape([2 if d == first_array else 1 for d in range(4)])
    result = np.broadcast_to(numbers, (2,) * 4)[index(number)]
    along = [d for d in range(result.ndim) if (result != result.take([0], d)).any()]
    whole = np.zeros([4 if d == dim and not of_array else 2 for d in range(4)])
    specs = (P(*[None] * dim, "a"), P()) if not of_array else (P(), A)
    both = np.concatenate([number, number]) if of_array else number
    if update:  # into the region that has the axis
        body = lambda x, i: fc.at(x)[index(i)].add(np.ones(result.shape))
        expected = specs[0] if kept and not of_array else None
    else:
        body = lambda x, i: x[index(i)]
        expected = P(*[None] * along[0], "a") if of_array or kept else None
    if expected is None:
        with pytest.raises(OutSpecsError):
            laid_out(body, *specs, args=(whole, both))
    else:
        assert laid_out(body, *specs, args=(whole, both)) == expected


def test_each_primitive_has_a_rule_or_refuses():
    """A new primitive gets a rule, or its name here: its results have no layout where its operands are split."""
    without = {name for name, p in _PRIMITIVES.items() if p not in CONTROL_RULES and rule_of(p).__name__ == "_without_rule"}
    groups = ("linalg.", "conv", "window_", "random_")
    assert {name for name in _PRIMITIVES if name.startswith("linalg.")} <= without
    left = {name for name in without if not name.startswith(groups) and "." not in name}
    assert left <= {"axis_index", "barrier", "debug_report", "fused", "fused_scan", "shard_map_call", "pure_callback"} | {
        p.name for p in USERS_PRIMITIVES
    }


def test_errors_say_where_and_what_to_write():
    message = wrong(
        OutSpecsError,
        lambda: fc.jit(lambda x: {"n": [x, x.sum(0)]}, mesh=MESH, in_specs=A, out_specs=fc.AUTO)(X),
        "out_specs of <lambda>",
        "result['n'][1], of type f64[16]{a}",
        "test_output_layouts.py:",
        "fc.all_reduce",
        "fc.P('a') puts",
    )
    assert message.count(". ") <= 2
    scalar = lambda: fc.jit(lambda x: x.sum(), mesh=MESH, in_specs=A, out_specs=fc.AUTO)(X)
    wrong(OutSpecsError, scalar, "x[None] with fc.P('a')")


def test_it_stands_beside_specs_and_in_prefixes():
    body = lambda x: ({"w": x, "b": x.T}, x.sum(1), fc.all_reduce(x.sum(), "a"))
    assert laid_out(body, A, out=({"w": A, "b": fc.AUTO}, fc.AUTO, P())) == ({"w": A, "b": P(None, "a")}, A, P())
    assert laid_out(body, A, out=(fc.AUTO, A, fc.AUTO)) == ({"w": A, "b": P(None, "a")}, A, P())
    two = lambda: fc.jit(body, mesh=MESH, in_specs=A, out_specs=(fc.AUTO,) * 2)(X)
    wrong(PytreeError, two, "out_specs is a tuple of 2", "results have a tuple of 3")
    step = fc.jit(lambda x: x.T, mesh=MESH, in_specs=fc.AUTO, out_specs=fc.AUTO)
    for spec in (A, AB, P(None, ("a", "b")), P()):
        array = fc.device_put(X, MESH, spec)
        assert step(step(array)).sharding.spec == spec
        np.testing.assert_array_equal(step(array), X.T)


def test_without_a_mesh_all_is_whole():
    assert fc.jit(lambda x: x + 1, out_specs=fc.AUTO)(X).sharding.spec == P()


def test_operations_that_run_at_once_have_the_same_layout():
    with fc.debug.disable_jit():
        found = fc.jit(lambda x: x.T * 2, mesh=MESH, in_specs=AB, out_specs=fc.AUTO)(X)
    assert found.sharding.spec == P("b", "a")
    np.testing.assert_array_equal(found, X.T * 2)


def test_gradients_around_it():
    step = fc.jit(lambda x: x**2, mesh=MESH, in_specs=AB, out_specs=fc.AUTO)
    total = fc.jit(lambda x: fc.all_reduce(np.sum(x), ("a", "b")), mesh=MESH, in_specs=AB, out_specs=fc.AUTO)
    np.testing.assert_array_equal(fc.grad(lambda x: total(step(x)))(X), 2 * X)


MODEL = {"w1": P(None, "b"), "b1": P("b"), "w2": P("b"), "b2": P()}
OPTIMIZERS = [optim.sgd(0.1, 0.9), optim.adam(0.1), optim.chain(optim.adamw(0.1), optim.scale_by_schedule(0.5))]


def mlp(params, x):
    hidden = np.tanh(x @ params["w1"] + params["b1"])
    return fc.all_reduce(hidden @ params["w2"], "b") + params["b2"]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["momentum", "adam", "chain"])
def test_a_training_step_returns_parameters_and_state_as_they_came(optimizer, parallel):
    """Data and tensor parallel, the state's specs from the parameters', and nothing written for the results."""

    def loss(params, x):
        return np.mean(mlp(params, x) ** 2)

    def step(params, state, x):
        if parallel:
            value, grads = fc.value_and_grad(fc.data_parallel(loss, axis="a"))(params, x)
        else:
            value, grads = fc.value_and_grad(lambda p: fc.all_reduce(loss(p, x), "a", op="mean"))(params)
        return *optim.apply(optimizer, grads, state, params), value

    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(16, 6)), "b1": np.zeros(6), "w2": rng.normal(size=(6, 3)), "b2": np.zeros(3)}
    specs = (MODEL, optim.state_specs(optimizer, MODEL), A)
    found = laid_out(step, *specs, args=(params, optimizer.init(params), X))
    assert found == (*specs[:2], P())


def test_models_with_rules_that_say_nothing_can_be_trained():
    """Gradients of a convolution are reduced before they are returned."""

    def step(w, x):
        return fc.grad(lambda w: fc.all_reduce(np.mean(fc.nn.conv(x, w) ** 2), "a", op="mean"))(w)

    args = np.ones((3, 3, 2, 4)), np.ones((4, 8, 8, 2))
    assert laid_out(step, P(), A, args=args) == P()


def test_a_transformer_that_is_split_over_data_and_heads():
    """Heads that are cut out of a split matrix and joined again; an optimizer whose last step is not fused."""
    layers: Any = {"qkv": P(None, None, "b"), "o": P("b"), "w1": P(None, "b"), "b1": P("b"), "w2": P("b")}
    specs = {"table": P(), "layers": [layers] * 2, "out": P(None, "b")}
    shapes = {"qkv": (8, 3, 16), "o": (16, 8), "w1": (8, 16), "b1": (16,), "w2": (16, 8)}
    layer_params = {name: np.ones(shape) for name, shape in shapes.items()}
    params: Any = {"table": np.ones((10, 8)), "out": np.ones((8, 10)), "layers": [layer_params] * 2}

    def layer(x, p):
        q, k, v = np.moveaxis(np.reshape(np.einsum("btd,dce->btce", x, p["qkv"]), (*x.shape[:2], 3, -1, 4)), 2, 0)
        scores = np.where(np.tril(np.ones((5, 5), bool)), np.einsum("bthe,bshe->bhts", q, k) / 2, -1e9)
        heads = np.einsum("bhts,bshe->bthe", fc.nn.softmax(scores), v)
        x = x + fc.all_reduce(np.reshape(heads, (*x.shape[:2], -1)) @ p["o"], "b")
        return x + fc.all_reduce(np.maximum(x @ p["w1"] + p["b1"], 0) @ p["w2"], "b")

    def logits(params, tokens):
        x = params["table"][tokens]
        for p in params["layers"]:
            x = fc.checkpoint(layer)(x, p)
        return x @ params["out"]

    def loss(params, tokens):
        return np.mean(fc.all_gather(logits(params, tokens), "b", dim=2) ** 2)

    optimizer = optim.chain(optim.clip_by_global_norm(1.0, "b"), optim.adam(0.1), optim.scale_by_schedule(0.5))

    def step(params, state, tokens):
        value, grads = fc.value_and_grad(fc.data_parallel(loss, axis="a"))(params, tokens)
        return *optim.apply(optimizer, grads, state, params), value, logits(params, tokens)

    state_specs = optim.state_specs(optimizer, specs)
    args = params, optimizer.init(params), np.zeros((4, 5), int)
    found = laid_out(step, specs, state_specs, A, args=args)
    assert found == (specs, state_specs, P(), P("a", None, "b"))
