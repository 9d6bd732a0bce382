"""arg_reduce: the extremum over an axis, and the device that has it. `axis_group_cases` has its values in groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.errors import DTypeError, MeshError, ScheduleError, ShapeError, UnsupportedError
from tests.support.cases.collective_cases import DTYPES, FLOATS, has_op, sample, sample_nans
from tests.support.example_counts import examples
from tests.support.misuse import X, run, wrong
from tests.support.spmd import MESHES, axis_choices, expected, per_device

pytestmark = pytest.mark.covers("collectives")

LINE = MESHES["line"]


def winner(op: str, values: np.ndarray) -> int:
    """The first of some scalars that has the extremum, one by one: NaN wins, -0 < +0."""
    best = 0
    for i, value in enumerate(values[1:], 1):
        held = values[best]
        if held != held:
            break
        signs = np.signbit(held), np.signbit(value)
        above = value > held or (value == held == 0 and signs == (True, False))
        below = value < held or (value == held == 0 and signs == (False, True))
        if value != value or (above if op == "max" else below):
            best = i
    return best


@given(
    st.sampled_from(["max", "min"]),
    st.sampled_from([dtype for dtype in DTYPES if has_op("max", dtype)]),
    st.sampled_from([(mesh, axes) for mesh, m in MESHES.items() for axes in axis_choices(m)]),
    st.sampled_from(["any", "few", "nans"]),
    st.integers(0, 2**32),
)
@examples(30, few=6)
def test_the_first_device_with_the_extremum(op, dtype, where, kind, seed):
    """And the bits of the values are those of all_reduce."""
    mesh, axes = MESHES[where[0]], where[1]
    rng = np.random.default_rng(seed)
    shape = (mesh.size, 3, 7)
    make = sample_nans if kind == "nans" and dtype.kind not in "iub" else sample
    x = make(dtype, shape, rng)
    if kind == "few" and dtype.kind != "b":
        x = (rng.integers(0, 3, shape) * rng.choice([1] if dtype.kind == "u" else [-1, 1], shape)).astype(dtype)
        x = np.where(rng.random(shape) < 0.5, -x, x).astype(dtype) if dtype.kind not in "iu" else x  # zeros of both signs
    value, position = per_device(mesh, lambda x: fc.arg_reduce(x, axes, op=op))(x)
    same = per_device(mesh, lambda x: fc.all_reduce(x, axes, op=op))(x)

    def place(group: list[Any], i: int) -> np.ndarray:
        stack = np.stack(group).reshape(len(group), -1).T
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return np.reshape([winner(op, row) for row in stack], group[0].shape)

    for device, wanted in enumerate(expected(mesh, axes, list(x), place)):
        assert position.shards[device].dtype == np.int32
        np.testing.assert_array_equal(position.shards[device][0], wanted)
        assert value.shards[device].tobytes() == same.shards[device].tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_nans_and_zeros(dtype):
    """NaN wins, the first of several; -0 < +0."""
    nan, inf = np.nan, np.inf
    columns = {
        (0, 0): [0.0, 0.0, 0.0],
        (1, 0): [-0.0, 0.0, -0.0],
        (0, 1): [0.0, -0.0, -0.0],
        (1, 1): [inf, nan, -nan],
        (2, 2): [-inf, 1.0, nan],
        (2, 1): [0.0, -inf, inf],
    }
    x = np.array([*columns.values()], dtype).T
    for number, op in enumerate(("max", "min")):
        call = lambda x, op=op: fc.arg_reduce(x[0], "d", op=op)[1]
        position = fc.jit(call, mesh=fc.make_mesh({"d": 3}), in_specs=P("d"), out_specs=P())(x)
        assert np.asarray(position).tolist() == [places[number] for places in columns]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_mpi4py_expects_of_maxloc_and_minloc(size):
    """Ranks give their numbers: the last one has the largest, the first one the smallest. Equal values are the first one's."""
    mesh, numbers = fc.make_mesh({"d": size}), np.arange(size)

    def call(x: Any) -> Any:
        return [fc.arg_reduce(v, "d", op=op) for v in (x, 0 * x, -x) for op in ("max", "min")]

    spec = {"mesh": mesh, "in_specs": P("d"), "out_specs": P()}
    for dtype in (np.int16, np.int64, np.float32, np.float64):
        found = [tuple(int(np.asarray(part)[0]) for part in pair) for pair in fc.jit(call, **spec)(numbers.astype(dtype))]
        last = size - 1
        assert found == [(last, last), (0, 0), (0, 0), (0, 0), (0, 0), (-last, last)]


def test_pairs_of_two_ranks_are_those_of_mpi():
    """The smaller of two values with its index; of equal ones the lower index."""
    pairs = np.array([(x, y) for x in range(-1, 2) for y in range(-1, 2)], np.float64).T
    at = lambda op: fc.jit(
        lambda x: fc.arg_reduce(x[0], "d", op=op), mesh=fc.make_mesh({"d": 2}), in_specs=P("d"), out_specs=P()
    )(pairs)
    (smallest, where), (largest, there) = at("min"), at("max")
    for i, (x, y) in enumerate(pairs.T):
        assert (smallest[i], where[i]) == min((x, 0), (y, 1))
        assert (largest[i], there[i]) == max((x, 0), (y, -1))[:1] + (int(y > x),)


def test_types_and_copies():
    """What does not vary is its own extremum at position 0, and nothing is sent; over an axis more it is the first copy's."""
    mesh, seen = MESHES["grid"], {}

    def body(x: Any, rows: Any, same: Any) -> Any:
        both = ("data", "model")
        found = {"x": fc.arg_reduce(x, both), "rows": fc.arg_reduce(rows, both[::-1]), "same": fc.arg_reduce(same, both)}
        seen.update({name: [y.varying if hasattr(y, "varying") else frozenset() for y in pair] for name, pair in found.items()})
        return found

    spec = {"mesh": mesh, "in_specs": (P(("data", "model")), P("data"), P()), "out_specs": P()}
    function = fc.jit(body, **spec)
    args = np.array([3, 5, 5, 1, 0, 2, 5, 4.0]), np.array([1.0, 4.0, 4.0, 2.0]), np.ones(2)
    found = {name: (np.asarray(v).tolist(), np.asarray(at).tolist()) for name, (v, at) in function(*args).items()}
    assert found == {"x": ([5.0], [1]), "rows": ([4.0], [1]), "same": ([1.0, 1.0], [0, 0])}
    assert all(not varying for pair in seen.values() for varying in pair)
    assert len(function.lower(*args).program.collectives()) == 4


def test_a_tree_is_two_collectives():
    def call(x: Any) -> Any:
        assert fc.arg_reduce((), "data") == ((), ())
        return fc.arg_reduce({"a": x, "b": [x * 2, (3 * x).astype(np.int32)]}, "data", op="min")

    lowered = per_device(LINE, call).lower(np.ones((4, 2)))
    names = [(e.primitive.name, e.params["op"], len(e.inputs)) for e in lowered.program.collectives()]
    assert names == [("all_reduce", "min", 3), ("all_reduce", "min", 3)]
    assert "winner" not in str(lowered)
    value, position = per_device(LINE, call)(np.array([[2.0, 1], [1, 1], [1, 0], [3, 0]]))
    assert np.asarray(value["b"][1])[0].tolist() == [3, 0] and np.asarray(position["b"][0])[0].tolist() == [1, 2]


# ---------------------------------------------------------------- transformations


@pytest.mark.parametrize("groups", [None, [[3, 0], [1, 2]], [[2], [3, 1, 0]]])
def test_the_winner_alone_has_the_gradient(groups):
    rng = np.random.default_rng(0)
    x, weights, t = rng.integers(0, 3, (4, 20)).astype(np.float64), rng.normal(size=(4, 20)), rng.normal(size=(4, 20))

    def largest(x: Any) -> Any:
        return fc.arg_reduce(x, "data", groups=groups)[0]

    def each(x: Any, w: Any, t: Any) -> Any:
        def loss(x: Any) -> Any:
            y = largest(x) * w
            return fc.all_reduce(np.sum(y), "data")

        gradient = fc.grad(loss)(x)
        again = fc.grad(lambda x: fc.all_reduce(np.sum(fc.grad(lambda x: loss(x * x))(x) * t), "data"))(x)
        pushed = fc.jvp(largest, (x,), (t,))[1]
        return gradient, again, fc.pvary(pushed, "data") if groups is None else pushed

    found, again, pushed = (np.asarray(y) for y in per_device(LINE, each)(x, weights, t))
    wanted, tangent, hit = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for group in groups or [range(4)]:
        rows = [*group]
        for e in range(x.shape[1]):
            first = rows[int(np.argmax(x[rows, e]))]
            wanted[first, e], tangent[rows, e], hit[first, e] = weights[rows, e].sum(), t[first, e], 1
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    np.testing.assert_allclose(pushed, tangent)
    np.testing.assert_allclose(again, 2 * wanted * t, atol=1e-12)


def test_copies_have_the_gradient_of_one_value():
    def gradient(x: Any) -> Any:
        return fc.grad(lambda x: np.sum(fc.arg_reduce(x, "data")[0] ** 2))(x)

    assert np.asarray(fc.jit(gradient, mesh=LINE, in_specs=P(), out_specs=P())(np.arange(3.0))).tolist() == [0, 2, 4]


def test_in_vmap_scan_and_cond():
    x = np.random.default_rng(0).integers(-9, 9, (4, 3, 2)).astype(np.float64)

    def nested(x: Any) -> Any:
        batched = fc.vmap(lambda row: fc.arg_reduce(row, "data"))(x)
        slopes = fc.vmap(fc.grad(lambda row: fc.all_reduce(np.sum(fc.arg_reduce(row, "data")[0]) + 0 * row[0], "data")))(x)
        carried, where = fc.scan(lambda c, _: (c - fc.arg_reduce(c, "data")[0], fc.arg_reduce(c, "data")[1]), x, None, length=2)
        chosen = fc.cond(fc.axis_size("data") > 2, lambda x: fc.arg_reduce(x, "data")[1], lambda x: x.astype(np.int32), x)
        return batched, slopes, carried, where[0], chosen

    (value, at), slopes, carried, where, chosen = per_device(LINE, nested)(x)
    first = x.argmax(0)
    for found in (at, where, chosen):
        np.testing.assert_array_equal(np.asarray(found), np.broadcast_to(first, x.shape))
    np.testing.assert_array_equal(np.asarray(value), np.broadcast_to(x.max(0), x.shape))
    np.testing.assert_array_equal(np.asarray(slopes), np.where(np.arange(4)[:, None, None] == first, 4, 0))
    np.testing.assert_array_equal(np.asarray(carried), x - x.max(0))


# ---------------------------------------------------------------- errors


def test_errors():
    wrong(UnsupportedError, lambda: run(lambda x: fc.arg_reduce(x, "data", op="sum")), 'op=\'sum\' must be "max" or "min"')
    wrong(DTypeError, lambda: run(lambda x: fc.arg_reduce(x + 1j, "data")), "arg_reduce 'max'", "complex numbers have no order")
    wrong(MeshError, lambda: run(lambda x: fc.arg_reduce(x, "rows")), "arg_reduce", "unknown axis 'rows'")
    wrong(MeshError, lambda: fc.arg_reduce(X, "data"), "arg_reduce", "outside a mesh")
    wrong(ShapeError, lambda: run(lambda x: fc.arg_reduce(x, "data", groups=[[0, 1]])), "arg_reduce", "position 2 is in none")
    wrong(ScheduleError, lambda: run(lambda x: fc.arg_reduce(x, "data", algorithm="rings")), "Did you mean 'ring'?")
