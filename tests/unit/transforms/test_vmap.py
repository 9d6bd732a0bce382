"""vmap: axes, nesting, gradients, randomness, custom rules, meshes, errors. JAX's meaning is in test_transformations_vs_jax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll.core.interpreter import evaluate
from funccoll.core.types import type_of
from funccoll.errors import DTypeError, PytreeError, ShapeError, TraceError, UnsupportedError
from funccoll.tracing.trace import stage
from tests.support.batched_programs import equations, normal
from tests.support.example_counts import examples
from tests.support.groups import in_groups
from tests.support.spmd import MESHES, bits, per_device

pytestmark = pytest.mark.covers("transformations")

# ---------------------------------------------------------------- axes


@examples(40)
@given(data=st.data())
def test_axes(data):
    """Any axes of arguments and results, against a loop over slices."""
    size = data.draw(st.integers(0, 3), "size")
    shapes = [tuple(data.draw(st.lists(st.sampled_from([1, 2]), max_size=3), "shape of an element")) for _ in range(2)]
    element = np.broadcast_shapes(*shapes)
    axes = [data.draw(st.none() | st.integers(-len(s) - 1, len(s)), "axis") for s in shapes]
    out_axis = data.draw(st.integers(-len(element) - 1, len(element)), "out_axes")
    args = [normal(*s) if a is None else np.moveaxis(normal(size, *s), 0, a) for s, a in zip(shapes, axes)]
    if all(a is None for a in axes):
        with pytest.raises(ShapeError, match="no argument is batched"):
            fc.vmap(np.subtract, tuple(axes))(*args)
    fn = lambda x, y: (x - y, y * 0 + 1.0)
    mapped = fc.vmap(fn, tuple(axes), (out_axis, 0), axis_size=size)
    parts = [[x] * size if a is None else list(np.moveaxis(x, a, 0)) for x, a in zip(args, axes)]
    loop = [fn(*part) for part in zip(*parts)]
    wanted = np.stack([a for a, _ in loop], out_axis) if loop else np.moveaxis(np.zeros((0, *element)), 0, out_axis)
    found, ones = mapped(*args)
    np.testing.assert_array_equal(found, wanted)
    assert ones.shape == (size, *shapes[1])
    assert all(y.flags.writeable and y.flags.owndata for y in (found, ones))


def test_axes_of_pytrees():
    """A prefix of axes for dicts, tuples and None; keywords are batched along dimension 0."""
    x, y, z = normal(3, 2), normal(2, 3), normal(4)

    def fn(tree: Any, other: Any, *, scale: Any) -> Any:
        assert other is None
        return {"a": tree["x"] * scale, "b": (tree["y"] + tree["more"][0], tree["more"][0])}

    scale = normal(3)
    out = fc.vmap(fn, ({"x": 0, "y": 1, "more": None}, None), {"a": 1, "b": (0, None)})(
        {"x": x, "y": y, "more": [z[:2]]}, None, scale=scale
    )
    np.testing.assert_array_equal(out["a"], (x * scale[:, None]).T)
    np.testing.assert_array_equal(out["b"][0], y.T + z[:2])
    np.testing.assert_array_equal(out["b"][1], z[:2])


def test_results_that_do_not_depend_on_the_element():
    """They are repeated, or given once where out_axes is None."""
    fn = lambda x: (np.float32(2.0), 3, x)
    two, three, _ = fc.vmap(fn)(np.ones((4, 2)))
    assert (two.shape, two.dtype, three.shape) == ((4,), np.float32, (4,))
    assert fc.vmap(fn, out_axes=(None, None, 0))(np.ones((4, 2)))[:2] == (2.0, 3)
    assert fc.vmap(lambda: np.ones(3), axis_size=2)().shape == (2, 3)


def test_python_scalars_are_weak():
    x = np.ones((2, 3), np.float32)
    assert fc.vmap(lambda x, s: x * s, (0, None))(x, 2.0).dtype == np.float32
    assert fc.vmap(lambda x: x * 2.0)(x).dtype == np.float32
    assert fc.vmap(lambda x, s: x * s)(x, np.ones(2)).dtype == np.float64


def test_nested():
    x, y = normal(3, 2), normal(4, 2)
    table = fc.vmap(fc.vmap(np.dot, (None, 0)), (0, None))
    np.testing.assert_allclose(table(x, y), x @ y.T, rtol=1e-12)
    np.testing.assert_allclose(fc.vmap(lambda a: fc.vmap(lambda b: a @ b)(y))(x), x @ y.T, rtol=1e-12)
    np.testing.assert_allclose(fc.jit(table)(x, y), x @ y.T, rtol=1e-12)


def test_captured_values():
    """Arrays and traced values of the functions around it are the same for all elements."""
    w, x = normal(3, 2), normal(4, 3)
    loss = lambda w: np.sum(fc.vmap(lambda row: np.tanh(row @ w))(x))
    wanted = fc.grad(lambda w: np.sum(np.tanh(x @ w)))(w)
    np.testing.assert_allclose(fc.grad(loss)(w), wanted, rtol=1e-12)
    np.testing.assert_allclose(fc.jit(fc.grad(loss))(w), wanted, rtol=1e-12)


def test_a_jitted_function_is_inlined():
    np.testing.assert_array_equal(fc.vmap(fc.jit(lambda x: x + 1))(np.arange(3.0)), [1, 2, 3])


# ---------------------------------------------------------------- one operation, not many


@pytest.mark.parametrize(
    ("x", "y", "axes", "shapes"),
    [
        ((5, 3), (3, 4), (0, None), [(5, 3), (3, 4)]),
        ((5, 2, 3), (3, 4), (0, None), [(10, 3), (3, 4)]),
        ((5, 2, 3), (3,), (0, None), [(10, 3), (3,)]),
        ((5, 2, 2, 3), (3, 4), (0, None), [(20, 3), (3, 4)]),
        ((2, 3), (5, 3), (None, 0), [(5, 3), (3, 2)]),
        ((3,), (5, 3), (None, 0), [(5, 3), (3,)]),
        ((3,), (5, 3, 4), (None, 0), None),
        ((2, 3), (5, 3, 4), (None, 0), [(2, 3), (5, 3, 4)]),
        ((5, 3), (5, 3), (0, 0), None),
        ((5, 2, 3), (5, 3), (0, 0), None),
        ((5, 3), (5, 3, 4), (0, 0), None),
        ((5, 3), (5, 2, 3, 4), (0, 0), None),
        ((5, 2, 2, 3), (5, 3, 4), (0, 0), None),
        ((5, 2, 3), (2, 3, 4), (0, None), None),
        ((0, 3), (3, 4), (0, None), None),
        ((5, 2, 0), (0, 4), (0, None), None),
    ],
)
def test_matmul(x, y, axes, shapes):
    """One product for the batch; of one operand that is batched all rows are in one matrix."""
    x, y = normal(*x), normal(*y)
    mapped = fc.vmap(np.matmul, axes)
    size = x.shape[0] if axes[0] == 0 else y.shape[0]
    loop = [np.matmul(x[i] if axes[0] == 0 else x, y[i] if axes[1] == 0 else y) for i in range(size)]
    found = mapped(x, y)
    np.testing.assert_allclose(found, np.stack(loop) if loop else np.zeros((0, *y.shape[1:])), rtol=1e-12)
    program, _ = stage(lambda *xs: [mapped(*xs)], [type_of(x), type_of(y)])
    (product,) = [eqn for eqn in program.equations if eqn.primitive.name == "matmul"]
    assert shapes is None or [a.type.shape for a in product.inputs] == shapes


def test_outer_products_are_multiplied():
    """A stack of products over one element is NumPy's multiplication, with its zeros."""
    x, ct = np.array([[-1.0, 2.0], [0.0, 1.0]]), np.array([[0.0, 3.0], [-2.0, 1.0]])
    weights = fc.vmap(fc.grad(lambda w, x, ct: np.sum(x @ w * ct)), (None, 0, 0))
    w = normal(2, 2)
    assert bits(weights(w, x, ct)) == bits(x[:, :, None] * ct[:, None, :])
    assert "matmul" not in equations(weights, w, x, ct)[1:]


def test_einsum():
    x, w = normal(5, 2, 3), normal(4, 3)
    mapped = fc.vmap(lambda x, w: np.einsum("ik,jk->ij", x, w), (0, None))
    np.testing.assert_allclose(mapped(x, w), x @ w.T, rtol=1e-12)
    assert equations(mapped, x, w) == ["einsum"]


def test_per_example_gradients():
    """Gradients for each example, without a loop: two products forwards, two outer products and one product back."""
    params = {"w": normal(6, 5), "b": normal(5), "v": normal(5, 3)}
    x, y = normal(4, 6), np.array([0, 2, 1, 1])

    def loss(params: Any, x: Any, y: Any) -> Any:
        logits = np.tanh(x @ params["w"] + params["b"]) @ params["v"]
        return np.log(np.sum(np.exp(logits))) - logits[y]

    each = fc.vmap(fc.grad(loss), (None, 0, 0))
    loop = [fc.grad(loss)(params, x[i], y[i]) for i in range(4)]
    for found in (each(params, x, y), fc.jit(each)(params, x, y)):
        for name in params:
            np.testing.assert_allclose(found[name], np.stack([g[name] for g in loop]), rtol=1e-10)
    program = fc.jit(each).trace(params, x, y).program
    assert len(program.equations) < 60
    assert sum(eqn.primitive.name == "matmul" for eqn in program.equations) == 3
    np.testing.assert_allclose(
        fc.grad(lambda p: np.mean(fc.vmap(loss, (None, 0, 0))(p, x, y)))(params)["w"],
        np.mean([g["w"] for g in loop], axis=0),
        rtol=1e-10,
    )


# ---------------------------------------------------------------- indexing

ITEMS = st.sampled_from([slice(None), slice(1, None), slice(None, None, -1), None, 0, -1, "array", "array"])


@examples(25)
@given(data=st.data())
def test_indices(data):
    """Reads and updates with any mix of slices, integers, new dimensions and arrays, some of them batched, against a loop."""
    size, shape = 3, (3, 2, 4, 3)
    items = data.draw(st.lists(ITEMS, max_size=5).filter(lambda i: sum(x is not None for x in i) <= 4), "index")
    x_batched = data.draw(st.booleans(), "x is batched")
    common = data.draw(st.sampled_from([(), (2,), (1,), (2, 2)]), "shape of index arrays")
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays, flags, dim = [], [], 0
    for item in items:
        if item == "array":
            flag = data.draw(st.booleans(), "array is batched")
            own = common[data.draw(st.integers(0, len(common)), "dimensions left out") :]
            arrays.append(rng.integers(-shape[dim], shape[dim], (size, *own) if flag else own))
            flags.append(flag)
        dim += item is not None
    if not (x_batched or any(flags)):
        x_batched = True
    x = rng.normal(size=(size, *shape) if x_batched else shape)

    def index(arrays: Any) -> tuple:
        rest = iter(arrays)
        return tuple(next(rest) if isinstance(item, str) else item for item in items)

    reads = fc.vmap(lambda x, *a: x[index(a)], (0 if x_batched else None, *(0 if f else None for f in flags)))
    element = lambda i: index([a[i] if f else a for a, f in zip(arrays, flags)])
    own = lambda i: x[i] if x_batched else x
    wanted = np.stack([own(i)[element(i)] for i in range(size)])
    for fn in (reads, fc.jit(reads)):
        np.testing.assert_array_equal(fn(x, *arrays), wanted)

    v_batched = data.draw(st.booleans(), "value is batched")
    lead = data.draw(st.integers(0, wanted.ndim - 1), "dimensions of the region that the value lacks")
    v = rng.normal(size=(size, *wanted.shape[1 + lead :]) if v_batched else wanted.shape[1 + lead :])
    axes = (0 if x_batched else None, 0 if v_batched else None, *(0 if f else None for f in flags))
    adds = lambda x, v, *a: fc.at(x)[index(a)].add(v)
    elements = [(own(i), v[i] if v_batched else v, *(a[i] if f else a for a, f in zip(arrays, flags))) for i in range(size)]
    added = np.stack([adds(*one) for one in elements])
    np.testing.assert_allclose(fc.vmap(adds, axes)(x, v, *arrays), added, rtol=1e-12)
    loss = lambda x, v, *a: np.sum(np.sin(fc.at(x)[index(a)].add(v)[index(a)]))
    grads = fc.vmap(fc.grad(loss, (0, 1)), axes)(x, v, *arrays)
    each = [fc.grad(loss, (0, 1))(*one) for one in elements]
    for found, loop in zip(grads, zip(*each)):
        np.testing.assert_allclose(found, np.stack(loop), rtol=1e-9, atol=1e-12)


def test_set():
    """Batched values and indices; the whole array stays as it is elsewhere."""
    x, i, v = np.zeros((3, 2, 4)), np.array([0, 3, 1]), normal(3, 2)
    found = fc.vmap(lambda x, i, v: fc.at(x)[:, i].set(v))(x, i, v)
    wanted = np.array(x)
    for k in range(3):
        wanted[k, :, i[k]] = v[k]
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(fc.vmap(lambda i: fc.at(np.zeros(4))[i].set(1.0))(i), np.eye(4)[i])


# ---------------------------------------------------------------- randomness


@pytest.mark.usefixtures("numpy_compute")
def test_random_numbers_of_many_keys():
    """Each key's numbers are those that it gives alone, in one equation."""
    keys = fc.random.split(fc.random.key(1), 6).reshape(2, 3, 2)
    draw = lambda key: fc.random.normal(fc.random.fold_in(fc.random.split(key)[0], 7), (2,))
    nested = fc.vmap(fc.vmap(draw))
    wanted = np.array([[draw(k) for k in row] for row in keys])
    for found in (nested(keys), fc.jit(nested)(keys)):
        assert bits(found) == bits(wanted)
    assert [n for n in equations(nested, keys) if n.startswith("random")] == ["random_split", "random_fold_in", "random_bits"]
    steps = fc.vmap(lambda i: fc.random.fold_in(keys[0, 0], i))(np.arange(4))
    np.testing.assert_array_equal(steps, [fc.random.fold_in(keys[0, 0], i) for i in range(4)])
    with pytest.raises(ShapeError, match="a random key has type"):
        fc.random.bits(keys)


# ---------------------------------------------------------------- meshes


def test_varying_values():
    """Elements vary over the mesh as the whole does; what is shared stays equal on all devices."""

    def step(x: Any, w: Any) -> Any:
        fn = lambda row, w: (np.sum(row * w), fc.all_reduce(row * w, "data"), w * fc.axis_index("data"), w + 1)
        out = fc.vmap(fn, (0, None), (0, 0, None, None))(x, fc.broadcast(w, "data"))
        assert [y.varying for y in out] == [{"data"}, set(), {"data"}, set()]
        return fc.tree.map(lambda y: fc.pvary(y, "data"), out)

    x, w = normal(4, 3, 2), normal(4, 2)
    sums, total, index, more = map(np.asarray, per_device(MESHES["line"], step)(x, w))
    np.testing.assert_allclose(sums, np.sum(x * w[0], axis=-1), rtol=1e-12)
    np.testing.assert_allclose(total[1], np.sum(x * w[0], axis=0), rtol=1e-12)
    np.testing.assert_allclose(index, w[0] * np.arange(4)[:, None], rtol=1e-12)
    np.testing.assert_allclose(more[3], w[0] + 1, rtol=1e-12)


def test_per_example_gradients_over_a_mesh(line):
    """The examples of each device have gradients of their own; parameters are varied by the user, as for gradients."""
    w, x = normal(3), normal(8, 3)
    step = fc.jit(
        lambda w, x: fc.vmap(fc.grad(lambda w, x: np.tanh(w @ x)), (None, 0))(fc.pvary(w, "data"), x),
        mesh=line,
        in_specs=(fc.P(), fc.P("data")),
        out_specs=fc.P("data"),
    )
    np.testing.assert_allclose(step(w, x), (1 - np.tanh(x @ w) ** 2)[:, None] * x, rtol=1e-12)


# ---------------------------------------------------------------- errors


def pair(x: Any, y: Any) -> Any:
    return x, y


@in_groups(
    ("make", "error", "words"),
    [
        (lambda: fc.vmap(pair)(np.ones((2, 3)), np.ones(3)), ShapeError, "x has 2, y has 3"),
        (lambda: fc.vmap(lambda t: t)({"a": np.ones(2), "b": [np.ones(3)]}), ShapeError, r"t\['b'\]\[0\] has 3"),
        (lambda: fc.vmap(lambda x, *, k: x)(np.ones(2), k=np.ones(3)), ShapeError, "x has 2, k has 3"),
        (lambda: fc.vmap(pair, axis_size=4)(np.ones(2), np.ones(2)), ShapeError, "axis_size has 4"),
        (lambda: fc.vmap(pair, (0, 1))(np.ones(2), np.ones(2)), ShapeError, r"y of shape \(2,\) has no dimension 1"),
        (lambda: fc.vmap(pair)(np.ones(2), 1.0), ShapeError, r"y of shape \(\) has no dimension 0"),
        (lambda: fc.vmap(pair, (0, None, 0))(np.ones(2), np.ones(2)), PytreeError, "has 3 entries, and 2 positional"),
        (lambda: fc.vmap(lambda t: t, ({"a": 0},))({"b": np.ones(2)}), PytreeError, "in_axes=.* does not fit the arguments"),
        (lambda: fc.vmap(pair, out_axes=(0, 0, 0))(np.ones(2), np.ones(2)), PytreeError, "out_axes=.* does not fit the result"),
        (
            lambda: fc.vmap(pair, out_axes=None)(np.ones(2), np.ones(2)),
            ShapeError,
            r"out_axes is None for result\[0\].*f64\[\]",
        ),
        (lambda: fc.vmap(pair, out_axes=2)(np.ones(2), np.ones(2)), ShapeError, r"with the batch, result\[0\] of shape \(2,\)"),
        (lambda: fc.vmap(pair, None)(np.ones(2), np.ones(2)), ShapeError, "no argument is batched"),
        (lambda: fc.vmap(pair, "x"), TraceError, "in_axes='x'"),
        (lambda: fc.vmap(pair, out_axes=(0, True)), TraceError, "holds True"),
        (lambda: fc.vmap(3), TraceError, "takes a function"),
        (lambda: fc.vmap(pair, axis_size=-1)(np.ones(2), np.ones(2)), ShapeError, "axis_size=-1"),
        (lambda: fc.vmap(pair, axis_name="i"), UnsupportedError, "axes of a mesh"),
        (lambda: fc.vmap(lambda x: "text")(np.ones(2)), TraceError, "returned 'text'"),
        (lambda: fc.vmap(lambda x: x)(np.array(["a"])), DTypeError, "text is not an array"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_primitive_without_a_rule_is_named():
    from funccoll.core.interpreter import bind
    from funccoll.core.ir import _PRIMITIVES, Primitive

    odd = Primitive("odd", lambda x: [x], lambda x: x)
    try:
        with pytest.raises(UnsupportedError, match="odd has no batching rule"):
            fc.vmap(lambda x: bind(odd, x))(np.ones(2))
    finally:
        del _PRIMITIVES["odd"]


def test_errors_point_at_the_users_line():
    def fn(x: Any) -> Any:
        return x @ np.ones(4)  # this line

    with pytest.raises(ShapeError) as caught:
        fc.vmap(fn)(np.ones((2, 3)))
    assert caught.value.source is not None
    assert caught.value.source.function == "fn"


def test_programs_of_batches_are_values():
    """What stages a program of its own, as control flow does: the program of a batch, with outputs batched where asked."""
    from funccoll.tracing.batched_evaluation import batched_program

    table = normal(3)
    program, captured = stage(lambda x, y: [x + table, y * 2], [type_of(np.ones(3)), type_of(np.ones(()))])
    whole, more, found = batched_program(program, [True, False], 4, [False, False])
    assert found == [True, False]
    whole, more, found = batched_program(program, [True, False], 4, [False, True])
    assert found == [True, True]
    x = normal(4, 3)
    outs, _ = evaluate(whole.check(), more, [x, np.array(1.5), *captured])
    np.testing.assert_array_equal(outs[0], x + table)
    np.testing.assert_array_equal(outs[1], np.full(4, 3.0))
