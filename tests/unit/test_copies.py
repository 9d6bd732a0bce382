"""Collectives along an axis over which an operand does not vary: what is itself the result, is widened, or is refused."""

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import DTypeError, VaryingError
from tests.support.misuse import run, wrong

pytestmark = pytest.mark.covers("collectives")

MESH = fc.make_mesh({"data": 3, "model": 2})
BOTH = ("data", "model")
GRID = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
OPS = ("mean", "max", "min")
ITSELF = {
    **{op: lambda x, axis, op=op: fc.all_reduce(x, axis, op=op) for op in OPS},
    "broadcast": lambda x, axis: fc.broadcast(x, axis, root=1),
}


def program_of(body, *args, specs, out=P()):
    """The checked program of a body on the mesh, after the passes."""
    lowered = fc.jit(body, mesh=MESH, in_specs=specs, out_specs=out).lower(*args)
    lowered.program.check()
    return lowered.program


def value_of(body, *args, specs, out=P()):
    return np.asarray(fc.jit(body, mesh=MESH, in_specs=specs, out_specs=out)(*args))


# ---------------------------------------------------------------- the operand is the result


@pytest.mark.parametrize("axis", ["data", BOTH])
@pytest.mark.parametrize("name", ITSELF)
def test_nothing_is_moved_or_rounded(name, axis):
    x = np.float16([0.1, np.nan, -0.0, 6e-8])  # a third of three copies' sum would be rounded

    def body(x):
        got = ITSELF[name](x, axis)
        assert got.varying == set()
        return got

    assert not program_of(body, x, specs=P()).equations
    assert value_of(body, x, specs=P()).tobytes() == x.tobytes()


@pytest.mark.parametrize("op", ["and", "or"])
def test_bits(op):
    x = np.array([5, -2])
    assert not program_of(lambda x: fc.all_reduce(x, "data", op=op), x, specs=P()).equations
    np.testing.assert_array_equal(value_of(lambda x: fc.all_reduce(x, "data", op=op), x, specs=P()), x)


@pytest.mark.parametrize("op", OPS)
def test_the_axes_that_a_value_varies_over_are_still_reduced(op):
    def body(x):
        return fc.all_reduce(x, BOTH, op=op)

    (eqn,) = program_of(body, GRID, specs=P("data")).equations
    assert eqn.axes() == ("data",) and eqn.params["size"] == 3
    expected = value_of(lambda x: fc.all_reduce(x, "data", op=op), GRID, specs=P("data"))
    assert value_of(body, GRID, specs=P("data")).tobytes() == expected.tobytes()


@pytest.mark.parametrize("root", [pytest.param(i, marks=() if i == 4 else pytest.mark.slow) for i in range(6)])
@pytest.mark.parametrize(("spec", "axes"), [(P("data"), BOTH), (P("model"), BOTH), (P("model"), ("model", "data"))])
def test_the_root_of_a_broadcast_is_the_same_device(spec, axes, root):
    def body(x):
        return fc.broadcast(x, axes, root=root)

    def of_copies(x):
        return fc.broadcast(fc.pvary(x, axes), axes, root=root)

    np.testing.assert_array_equal(value_of(body, GRID, specs=spec), value_of(of_copies, GRID, specs=spec))
    (eqn,) = program_of(body, GRID, specs=spec).equations
    assert eqn.axes() == spec.axes


def test_a_pytree_stays_one_operation_of_what_varies():
    def body(x, y):
        out = fc.all_reduce({"x": x, "y": y, "half": x / 2, "one": 1.0}, "data", op="mean")
        assert [leaf.shape for leaf in fc.tree.leaves(out)] == [(2, 4), (), (2, 4), (6, 4)]
        return out

    program = program_of(body, GRID, GRID, specs=(P("data"), P()))
    (eqn,) = program.collectives()
    assert len(eqn.inputs) == 2
    out = fc.jit(body, mesh=MESH, in_specs=(P("data"), P()), out_specs=P())(GRID, GRID)
    np.testing.assert_array_equal(out["y"], GRID)
    np.testing.assert_allclose(out["x"], GRID.reshape(3, 2, 4).mean(0), rtol=1e-6)


@pytest.mark.parametrize("name", ITSELF)
def test_its_gradient_is_that_of_the_operand(name):
    def body(w):
        def loss(w):
            return np.sum(ITSELF[name](w, "data") ** 2) + ITSELF[name](np.sum(w), BOTH)

        return fc.grad(loss)(w)

    assert not program_of(body, GRID, specs=P()).collectives()
    np.testing.assert_array_equal(value_of(body, GRID, specs=P()), 2 * GRID + 1)


@pytest.mark.parametrize("op", OPS)
def test_the_gradient_of_a_value_that_varies_over_some_axes(op):
    def grad_of(reduced):
        return lambda x: fc.grad(lambda x: np.sum(reduced(x)))(x)

    got = value_of(grad_of(lambda x: fc.all_reduce(x, BOTH, op=op)), GRID, specs=P("data"), out=P("data"))
    expected = value_of(grad_of(lambda x: fc.all_reduce(x, "data", op=op)), GRID, specs=P("data"), out=P("data"))
    np.testing.assert_array_equal(got, expected)


def test_a_dtype_that_has_no_such_reduction_is_refused_all_the_same():
    for op, x, part in (
        ("mean", np.arange(3), "no exact mean"),
        ("and", np.ones(3), "integers or booleans"),
        ("max", np.ones(3, complex), "no order"),
    ):
        wrong(DTypeError, lambda: run(lambda x: fc.all_reduce(x, "data", op=op), x, spec=P(), out=P()), part)


# ---------------------------------------------------------------- the operand is widened


MOVES = {
    "permute": lambda x: fc.permute(x, "data", pairs=[(0, 1), (1, 2)]),
    "all_to_all": lambda x: fc.all_to_all(x, "data", split_dim=0, concat_dim=1),
    "both axes": lambda x: fc.permute(x, BOTH, pairs=[(i, (i + 1) % 6) for i in range(6)]),
}


@pytest.mark.parametrize("name", MOVES)
def test_moving_widens(name):
    move, axes = MOVES[name], BOTH if name == "both axes" else "data"
    out = P(axes)

    def same(specs, widen):
        body = lambda x, y: move(x) * (1 + 0 * np.sum(y))
        explicit = lambda x, y: move(fc.pvary(x, axes)) * (1 + 0 * np.sum(y))
        texts = [program_of(f, GRID, GRID, specs=specs, out=out).text(sources=False) for f in (body, explicit)]
        assert texts[0] == texts[1] and ("pvary" in texts[0]) == widen
        np.testing.assert_array_equal(*(value_of(f, GRID, GRID, specs=specs, out=out) for f in (body, explicit)))

    same((P(), P()), widen=True)
    assert "pvary" not in program_of(move, GRID.repeat(3, 0), specs=P(axes), out=out).text()


def test_a_gradient_through_widening_sums_over_the_devices():
    x = np.arange(6, dtype=np.float32)

    def body(w, x):
        def loss(w):
            return fc.all_reduce(np.sum(MOVES["permute"](w) * x), "data")

        return fc.grad(loss)(w)

    got = value_of(body, np.float32([2, 3]), x, specs=(P(), P("data")))
    np.testing.assert_array_equal(got, x[2:4] + x[4:6])  # device 0 receives nothing


def test_a_halo_exchange_of_zeros_and_its_mean_need_no_edit():
    def laplacian(u):
        n = fc.axis_size("data")
        empty = np.zeros_like(u[:1])
        left = fc.permute(u[-1:], "data", pairs=[(i, i + 1) for i in range(n - 1)]) + fc.permute(empty, "data", pairs=[(0, 1)])
        h = np.concatenate([left, u, np.zeros((1, 4), u.dtype)])
        return h[:-2] + h[2:] - 2 * u, fc.all_reduce(np.max(empty), "data", op="max")

    u, top = fc.jit(laplacian, mesh=MESH, in_specs=P("data"), out_specs=(P("data"), P()))(GRID)
    whole = GRID.reshape(3, 2, 4)
    before = np.concatenate([np.zeros((1, 4), np.float32), GRID])[:-1]
    after = np.concatenate([whole, np.zeros((3, 1, 4), np.float32)], axis=1)[:, 1:].reshape(6, 4)
    np.testing.assert_allclose(u, before + after - 2 * GRID, rtol=1e-6)
    assert float(top) == 0


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("op", ["sum", "prod", "xor"])
def test_no_pvary_is_made_under_what_counts_copies(op):
    x = np.array([1, 2])
    for axis, spec in (("data", P()), (BOTH, P("data")), (BOTH, P())):
        call = lambda: fc.jit(lambda x: fc.all_reduce(x, axis, op=op), mesh=MESH, in_specs=spec)(x.repeat(3))
        wrong(VaryingError, call, "all_reduce", "does not vary", "fc.pvary(x, ")
