"""checkpoint: the same bits, less memory, and what the passes must leave alone."""

import functools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.core.interpreter import bind
from funccoll.errors import TraceError
from funccoll.primitives.higher_order import checkpoint_name_p, optimization_barrier_p
from tests.support.example_counts import examples

pytestmark = [pytest.mark.covers("checkpoint"), pytest.mark.usefixtures("numpy_compute")]

policies = fc.checkpoint_policies
ONE = fc.make_mesh({"data": 1})
RNG = np.random.default_rng(0)


def jitted(fn, mesh=ONE, in_specs=P(), out_specs=P()):
    return fc.jit(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def names(fn, *args):
    return [e.primitive.name for e in jitted(fn).trace(*args).lower().program.equations]


def layer(w, x):
    return np.tanh(fc.checkpoint_name(x @ w, "product")) + np.sin(x)


def loss(params, x, wrap=lambda f: f):
    inner = wrap(layer)
    for w in params:
        x = inner(w, x)
    return np.sum(np.square(x)) + np.sum(params[0])


POLICIES = {
    "nothing": policies.nothing,
    "dots": policies.dots,
    "everything": policies.everything,
    "names": policies.save_names("product"),
    "any": policies.any_of(policies.dots, policies.collectives),
}
PARAMS = [RNG.normal(size=(4, 4)) for _ in range(3)]
X = RNG.normal(size=(5, 4))


def same(found, expected):
    for a, b in zip(fc.tree.leaves(found), fc.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["layers", "whole", "nested"])
def test_gradients_have_the_bits_of_those_without(policy, how):
    wrap = functools.partial(fc.checkpoint, policy=POLICIES[policy])
    fn = loss if how == "whole" else functools.partial(loss, wrap=wrap)
    fn = fn if how == "layers" else wrap(fn)
    for run in (lambda f: f, jitted):
        expected = run(fc.value_and_grad(loss, (0, 1)))(PARAMS, X)
        same(run(fc.value_and_grad(fn, (0, 1)))(PARAMS, X), expected)
        same(run(fn)(PARAMS, X), expected[0])


def test_second_derivatives():
    def of(fn):
        return fc.grad(lambda p, x: sum(np.sum(np.cos(g)) for g in fc.grad(fn)(p, x)))

    for policy in POLICIES.values():
        found = of(functools.partial(loss, wrap=functools.partial(fc.checkpoint, policy=policy)))
        for a, b in zip(found(PARAMS, X), of(loss)(PARAMS, X), strict=True):
            assert np.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_forward_derivatives_of_batches_and_hessians():
    square = lambda wrap: lambda x: np.sum(wrap(lambda x: np.tanh(x) * x)(x)) ** 2
    found, wanted = (fc.hessian(square(wrap))(X[0]) for wrap in (fc.checkpoint, lambda f: f))
    assert np.allclose(found, wanted, rtol=1e-13) and np.any(wanted[0, 1])
    batched = lambda wrap: fc.vmap(lambda x: fc.jvp(square(wrap), (x,), (x,))[1])(X)
    same(batched(fc.checkpoint), batched(lambda f: f))


def test_a_gradient_of_a_tangent_computes_again():
    """The tangents of a checkpoint are checkpointed, too."""

    def count(wrap):
        along = lambda x: fc.jvp(lambda x: np.sum(wrap(lambda x: np.tanh(np.exp(x)))(x)), (x,), (np.ones(4),))[1]
        return names(fc.value_and_grad(along), X[0]).count("exp")

    assert count(fc.checkpoint) == count(lambda f: f) + 1


def test_the_backward_pass_computes_again_what_the_policy_does_not_keep():
    def count(primitive, **options):
        fn = functools.partial(loss, wrap=functools.partial(fc.checkpoint, **options))
        return names(fc.grad(fn), PARAMS, X).count(primitive)

    plain = names(fc.grad(loss), PARAMS, X)
    assert "optimization_barrier" not in plain and "checkpoint_name" not in plain
    # The last layer's sin is not needed for the gradient.
    assert count("tanh") == plain.count("tanh") + 3 and count("matmul") == plain.count("matmul") + 3
    for policy in (policies.dots, policies.save_names("product", "other")):
        assert count("tanh", policy=policy) == plain.count("tanh") + 3
        assert count("matmul", policy=policy) == plain.count("matmul")
    assert count("matmul", policy=policies.save_names("other")) == plain.count("matmul") + 3
    assert count("tanh", policy=policies.everything) == plain.count("tanh")


def test_without_a_gradient_it_is_the_function():
    wrapped = fc.checkpoint(loss)
    assert names(wrapped, PARAMS, X) == names(loss, PARAMS, X)
    same(wrapped(PARAMS, X), loss(PARAMS, X))


def peak(fn, *args):
    run = jitted(fn)
    run(*args)
    tracemalloc.start()
    run(*args)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def test_the_measured_peak_of_memory_falls():
    """24 blocks of three activations: without checkpoints all are kept, with them one of each and those of one block."""
    x = np.linspace(-1, 1, 1 << 15).reshape(-1, 128)

    def block(x):
        return np.sin(np.tanh(np.exp(-x * x)))

    def deep(x, wrap):
        for _ in range(24):
            x = wrap(block)(x)
        return np.sum(x * x)

    def of(wrap):
        return peak(fc.grad(functools.partial(deep, wrap=wrap)), x) / x.nbytes

    kept, again = of(lambda f: f), of(fc.checkpoint)
    inside = of(lambda f: fc.checkpoint(f, policy=policies.everything))
    assert kept > 24 * 3 and inside > 24 * 3 and again < 24 + 8, (kept, inside, again)

    def segments(x):  # sqrt(n) of n blocks in one checkpoint each: about 2 sqrt(n)
        part = fc.checkpoint(lambda x: functools.reduce(lambda x, _: fc.checkpoint(block)(x), range(6), x))
        return np.sum(functools.reduce(lambda x, _: part(x), range(4), x) ** 2)

    assert peak(fc.grad(segments), x) / x.nbytes < 4 + 6 + 8


MESH = fc.make_mesh({"data": 2, "model": 2})


def parallel(params, x, wrap):
    """Tensor parallelism: each block ends with an all_reduce over "model"."""

    def block(first, second, x):
        return x + fc.all_reduce(np.tanh(x @ first) @ second, "model")

    for first, second in params:
        x = wrap(block)(first, second, x)
    return fc.all_reduce(np.sum(np.square(x)), "data")


PARALLEL = [(RNG.normal(size=(4, 6)), RNG.normal(size=(6, 4))) for _ in range(3)]
SPECS = ([(P(None, "model"), P("model"))] * 3, P("data"))


@pytest.mark.parametrize("policy", ["nothing", "any"])
def test_forward_derivatives_on_a_mesh(policy):
    """Collectives take tangents along in a checkpoint as outside of it; and both orders of both modes agree."""
    x, tangent = RNG.normal(size=(8, 4)), [tuple(map(np.cos, pair)) for pair in PARALLEL]
    specs = (SPECS[0], SPECS[0], P("data"))

    def derivatives(wrap):
        along = lambda f: lambda p, t: fc.jvp(f, (p,), (t,))[1]

        def step(p, t, x):
            fn = lambda p: parallel(p, x, wrap)
            return along(fn)(p, t), fc.grad(lambda p: along(fn)(p, t))(p), along(fc.grad(fn))(p, t)

        return jitted(step, MESH, specs, (P(), SPECS[0], SPECS[0]))(PARALLEL, tangent, x)

    plain, again = derivatives(lambda f: f), derivatives(functools.partial(fc.checkpoint, policy=POLICIES[policy]))
    same(again[0], plain[0])
    for one, other in ((again[1], plain[1]), (again[2], plain[2]), (plain[1], plain[2])):
        for a, b in zip(fc.tree.leaves(one), fc.tree.leaves(other), strict=True):
            assert np.allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-9)


def test_collectives_run_again_or_are_kept():
    def of(wrap):
        fn = fc.value_and_grad(functools.partial(parallel, wrap=wrap))
        run = jitted(fn, MESH, SPECS, (P(), SPECS[0]))
        lowered = run.trace(PARALLEL, X[:4]).lower()
        return run(PARALLEL, X[:4]), lowered

    plain, program = of(lambda f: f)
    again, recomputed = of(fc.checkpoint)
    kept, saved = of(lambda f: fc.checkpoint(f, policy=policies.collectives))
    same(again, plain)
    same(kept, plain)
    count = len(program.collectives())
    # The gradient needs the results of no all_reduce, but those of a block's argument, which is kept: none runs again.
    assert len(saved.collectives()) == len(recomputed.collectives()) == count

    def of_whole(**options):
        fn = fc.checkpoint(lambda p, x: parallel(p, x, lambda f: f), **options)
        run = jitted(fc.value_and_grad(fn), MESH, SPECS, (P(), SPECS[0]))
        same(run(PARALLEL, X[:4]), plain)
        return len(run.trace(PARALLEL, X[:4]).lower().collectives())

    # Every block's sum is read behind it, by the next block or by the loss.
    assert of_whole() == count + 3 and of_whole(policy=policies.collectives) == count


def test_a_collective_that_runs_again_waits_for_the_cotangents():
    """Else grouping would run all recomputations first, and keep all their values."""

    def block(x):
        return np.tanh(fc.all_reduce(np.tanh(x), "data", op="mean") * x)

    def deep(x):
        for _ in range(3):
            x = fc.checkpoint(block)(x)
        return fc.all_reduce(np.sum(x), "data")

    run = jitted(fc.grad(deep), MESH, P("data"), P("data"))
    lowered = run.trace(X[:4]).lower()
    plain = jitted(
        fc.grad(lambda x: fc.all_reduce(np.sum(functools.reduce(lambda x, _: block(x), range(3), x)), "data")),
        MESH,
        P("data"),
        P("data"),
    )
    same(run(X[:4]), plain(X[:4]))
    from funccoll.compiler.passes.group_collectives import group_collectives

    order = group_collectives(lowered.program).check().equations
    barriers = [i for i, e in enumerate(order) if e.primitive is optimization_barrier_p]
    reduced = [i for i, e in enumerate(order) if e.primitive.communicates]
    assert len(barriers) == 3
    for first, last in zip(barriers, [*barriers[1:], len(order)], strict=True):
        assert sum(first < i < last for i in reduced) == 2  # of the block that is computed again, and of its gradient


def test_what_is_taken_from_around_has_a_gradient():
    def f(w, x):
        return np.sum(fc.checkpoint(lambda x: np.tanh(x @ w))(x))

    same(fc.grad(f)(PARAMS[0], X), fc.grad(lambda w, x: np.sum(np.tanh(x @ w)))(PARAMS[0], X))
    same(fc.grad(lambda w: np.sum(fc.checkpoint(lambda: np.sin(w))()))(X), np.cos(X))


def test_an_argument_that_is_passed_twice():
    fn = lambda x, y, n: np.sum(np.sin(x) * y[n])
    x = X[0]
    expected = np.cos(x) * x[2]
    expected[2] += np.sum(np.sin(x))
    for policy in (policies.nothing, policies.everything):
        wrapped = fc.checkpoint(fn, policy=policy)
        assert np.allclose(fc.grad(lambda x: wrapped(x, x, np.int64(2)))(x), expected, rtol=1e-14)


def test_keywords_pytrees_and_several_results():
    @fc.checkpoint
    def fn(tree, *, scale):
        return {"a": tree["x"] * scale, "b": (np.sum(tree["x"]), scale)}

    def of(x, scale):
        out = fn({"x": x, "n": np.arange(3)}, scale=scale)
        return np.sum(out["a"]) + out["b"][0] * out["b"][1]

    found = fc.grad(of, (0, 1))(X, 2.0)
    assert np.array_equal(found[0], np.full_like(X, 4)) and found[1] == pytest.approx(2 * np.sum(X))


@examples(25)
@given(
    st.lists(st.sampled_from(["sin", "square", "slice", "mix", "dot"]), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.sampled_from(sorted(POLICIES)),
)
def test_random_functions_keep_their_bits(steps, wrapped, policy):
    table = {
        "sin": lambda x, w: np.sin(x),
        "square": lambda x, w: x * x,
        "dot": lambda x, w: x @ w,
        "slice": lambda x, w: np.concatenate([x[1:], x[:1]]) * w[0],
        "mix": lambda x, w: np.where(x > 0, x, np.exp(x)) + w[1],
    }

    def fn(x, w, wrap):
        for step, use in zip(steps, wrapped, strict=False):
            x = wrap(table[step])(x, w) if use else table[step](x, w)
        return np.sum(x)

    def of(wrap):
        return jitted(fc.grad(functools.partial(fn, wrap=wrap), (0, 1)))(X, PARAMS[0])

    same(of(functools.partial(fc.checkpoint, policy=POLICIES[policy])), of(lambda f: f))


@pytest.mark.parametrize("policy", POLICIES)
def test_forward_derivatives_are_those_without(policy):
    """jvp, linearize, second derivatives, by arguments and what is captured; the gradient of a jvp runs both parts again."""
    wrap = functools.partial(fc.checkpoint, policy=POLICIES[policy])
    w, t = PARAMS[0], PARAMS[1]

    def fn(w, wrap=lambda f: f):
        both = lambda x: (layer(w, x), np.argmax(x), 2.0 * w)
        y, n, double = wrap(both)(layer(w, X))
        return np.sum(y * y) + np.sum(double) * n

    checked = functools.partial(fn, wrap=wrap)
    for run in (lambda f: f, jitted):
        same(run(lambda w, t: fc.jvp(checked, (w,), (t,)))(w, t), run(lambda w, t: fc.jvp(fn, (w,), (t,)))(w, t))
        along = lambda fn: lambda w: fc.jvp(fn, (w,), (t,))[1]
        np.testing.assert_allclose(run(fc.grad(along(checked)))(w), run(fc.grad(along(fn)))(w), rtol=1e-12)
        np.testing.assert_allclose(run(fc.hessian(checked))(w), run(fc.hessian(fn))(w), rtol=1e-9, atol=1e-12)
    assert fc.linearize(checked, w)[1](t) == fc.linearize(fn, w)[1](t)
    of_tanh = lambda w: np.sum(fc.checkpoint(np.tanh, policy=POLICIES[policy])(w))
    assert names(fc.value_and_grad(along(of_tanh)), w).count("tanh") == (1 if policy == "everything" else 2)


def test_a_collective_may_come_first_in_what_runs_again():
    """Its operand is a barrier's result then, which is dropped when the program is compiled."""
    mesh, x = fc.make_mesh({"data": 2}), np.arange(1.0, 5.0)

    def program(wrap):
        inner = wrap(lambda x: np.sum(x * np.sin(fc.permute(x, "data", pairs=[(0, 1), (1, 0)]))))
        return fc.grad(lambda x: fc.all_reduce(inner(x), "data"))

    runs = [jitted(program(wrap), mesh, P("data"), P("data"))(x) for wrap in (fc.checkpoint, lambda f: f)]
    same(*runs)


def test_rules_of_batching_and_of_forward_derivatives():
    """A name is the identity; so is a barrier, whose operands that are not batched get the batch as well."""
    assert checkpoint_name_p.batch and optimization_barrier_p.batch and checkpoint_name_p.jvp and optimization_barrier_p.jvp
    x = np.arange(6.0).reshape(2, 3)
    assert checkpoint_name_p.batch(checkpoint_name_p, [x], [True], 2, name="x") is x
    assert checkpoint_name_p.jvp([x], [x], [x], name="x") == [x]
    assert optimization_barrier_p.jvp([x, None, x], [x, x, x], [x, x], tokens=1) == [x, None]
    shapes = []

    def f(x, y):
        assert optimization_barrier_p.batch
        outs = optimization_barrier_p.batch(optimization_barrier_p, [x, y, x], [True, False, True], 2, tokens=1)
        shapes.extend(o.shape for o in outs)
        return outs

    found = jitted(f)(x, x)
    assert shapes == [(2, 3), (2, 2, 3)] and np.array_equal(found[0], x) and np.array_equal(found[1], [x, x])


def test_bad_input():
    with pytest.raises(TraceError, match=r"checkpoint takes a function, not 3"):
        fc.checkpoint(3)
    with pytest.raises(TraceError, match=r"checkpoint\(\.\.\., policy=\.\.\.\) takes a function, not 'dots'"):
        fc.checkpoint(loss, policy="dots")
    with pytest.raises(TraceError, match=r"save_names\(\): it takes the names"):
        policies.save_names()
    with pytest.raises(TraceError, match=r"the name is a string"):
        fc.checkpoint_name(X, 3)


def test_a_name_outside_a_trace_is_the_value():
    assert np.array_equal(fc.checkpoint_name({"x": X}, "x")["x"], X)
    assert np.array_equal(bind(checkpoint_name_p, X, name="x"), X)
