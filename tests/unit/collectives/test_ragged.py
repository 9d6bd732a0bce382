"""Ragged collectives on virtual devices: values, gradients, batches, published examples, and errors."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.errors import DTypeError, MeshError, ShapeError, UnsupportedError, VaryingError
from tests.support.cases import ragged_cases as cases
from tests.support.example_counts import examples
from tests.support.spmd import per_device

pytestmark = pytest.mark.covers("ragged")

MESHES = [({"d": 3}, ("d",)), ({"a": 2, "b": 2}, ("b",)), ({"a": 2, "b": 3}, ("b", "a"))]


@pytest.mark.parametrize(("axes", "over"), MESHES)
@given(seed=st.integers(0, 1 << 20))
@examples(60, few=2)
def test_random_sizes(axes, over, seed):
    cases.check(axes, over, seed)


@given(p=st.integers(2, 7), seed=st.integers(0, 1 << 20))
@examples(60, few=2)
def test_random_groups(p, seed):
    cases.check_groups(p, seed)


@pytest.mark.parametrize(
    ("axes", "over", "groups"), [*((*mesh, None) for mesh in MESHES[1:]), ({"d": 5}, ("d",), [[3, 0], [1, 4, 2]])]
)
def test_gradients_are_transposes(axes, over, groups):
    """<w, f(x)> = <f'(w), x> for random integers, which float64 adds exactly."""
    mesh, rng = fc.make_mesh(axes), np.random.default_rng(7)
    drawn = cases.Drawn(mesh, over, rng, 5, "float64", (2,), groups)
    drawn.root %= min(map(len, drawn.groups()))
    integers = lambda *shape: rng.integers(-9, 9, shape).astype(np.float64)
    drawn.x = integers(*drawn.x.shape)
    for form in cases.FORMS:
        f = cases.traced(drawn, form)
        y = np.stack([*per_device(mesh, f)(drawn.x, *cases.told(drawn)).shards])[:, 0]
        w = integers(*y.shape)

        def loss(x, w, *told, f=f):
            return fc.all_reduce(np.sum(f(x, *told) * w), mesh.axis_names)

        gradient = per_device(mesh, fc.grad(loss))(drawn.x, w, *cases.told(drawn))
        g = np.stack([*gradient.shards])[:, 0]
        assert np.sum(g * drawn.x) == np.sum(w * y), form
        assert np.any(g), form
        along = per_device(mesh, lambda x, t, *told, f=f: fc.jvp(lambda x: f(x, *told), (x,), (t,))[1])
        tangent = along(drawn.x, drawn.x, *cases.told(drawn))  # of a linear function, at itself
        assert np.array_equal(np.stack([*tangent.shards])[:, 0], y), form


def test_batches_move_whole_rows():
    drawn = cases.Drawn(mesh := fc.make_mesh({"d": 3}), ("d",), np.random.default_rng(3), 4, "float32", (2, 5))
    for form in cases.FORMS:
        f = cases.traced(drawn, form)
        batched = lambda x, *told, f=f: fc.vmap(lambda row: f(row, *told), in_axes=2, out_axes=2)(x)
        got = np.asarray(per_device(mesh, batched)(drawn.x, *cases.told(drawn)))
        assert np.array_equal(got, np.asarray(per_device(mesh, f)(drawn.x, *cases.told(drawn)))), form
    with pytest.raises(UnsupportedError, match=r"sizes differ within the batch.*Leave the sizes unbatched"):
        per_device(mesh, lambda s: fc.vmap(lambda s: fc.ragged.all_to_all(np.ones((3, 1)), "d", sizes=s)[0])(s))(
            np.ones((3, 2, 3), np.int64)
        )


def test_loops_and_branches():
    cases.in_control_flow(3)


def test_new_sizes_compile_nothing():
    mesh, compiled = fc.make_mesh({"d": 4}), []
    step = fc.jit(
        lambda x, s: (compiled.append(1), fc.ragged.all_to_all(x, "d", sizes=s[0])[0])[1],
        mesh=mesh, in_specs=P("d"), out_specs=P("d"),
    )  # fmt: skip
    for seed in range(6):
        sizes = np.random.default_rng(seed).integers(0, 3, (4, 4))
        step(np.arange(32.0), sizes)
        blocks = [np.ones((n, 2)) for n in sizes.sum(1)]
        fc.ragged.all_to_all(blocks, "d", sizes=[*sizes], mesh=mesh)
    assert len(compiled) == 1
    assert len(mesh.programs["ragged"]) <= 4  # the sizes, and rooms for 4, 6 and 8 rows


# ---------------------------------------------------------------- published examples


def test_torch_all_to_all_single():
    """The documented examples of torch.distributed.all_to_all_single: uneven splits, and complex numbers."""
    mesh = fc.make_mesh({"rank": 4})
    given = [np.arange(6), np.arange(10, 19), np.arange(20, 25), np.arange(30, 37)]
    splits = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
    found, received = fc.ragged.all_to_all(given, "rank", sizes=splits, mesh=mesh)
    assert [y.tolist() for y in found] == [
        [0, 1, 10, 11, 12, 20, 21, 30, 31],
        [2, 3, 13, 14, 22, 32, 33],
        [4, 15, 16, 23, 34, 35],
        [5, 17, 18, 24, 36],
    ]
    assert [n.tolist() for n in received] == np.transpose(splits).tolist()
    whole = [np.array([4 * r + i + (4 * r + i) * 1j for i in range(1, 5)], np.complex64) for r in range(4)]
    found, _ = fc.ragged.all_to_all(whole, "rank", sizes=[1, 1, 1, 1], mesh=mesh)
    assert [y.tolist() for y in found] == [[c * (1 + 1j) for c in range(r, 17, 4)] for r in range(1, 5)]


def test_torch_all_gather_and_reduce_scatter_of_uneven_blocks():
    """Blocks of rank + 1 rows, as torch's tests of uneven tensors have them."""
    mesh = fc.make_mesh({"rank": 3})
    found, sizes = fc.ragged.all_gather([np.full((r + 1, 2), r) for r in range(3)], "rank", mesh=mesh)
    assert all(y[:, 1].tolist() == [0, 1, 1, 2, 2, 2] for y in found) and sizes[0].tolist() == [1, 2, 3]
    found = fc.ragged.reduce_scatter([np.arange(6.0) * (r + 1) for r in range(3)], "rank", sizes=[1, 2, 3], mesh=mesh)
    assert [y.tolist() for y in found] == [[0], [6, 12], [18, 24, 30]]
    mean = fc.ragged.reduce_scatter([np.arange(6.0) * (r + 1) for r in range(3)], "rank", sizes=[6, 0, 0], op="mean", mesh=mesh)
    assert [y.tolist() for y in mean] == [[0, 2, 4, 6, 8, 10], [], []]


def test_mpi_vector_collectives():
    """mpi4py's tests of vectors: counts that follow the rank, displacements with gaps, empty messages."""
    p, mesh = 4, fc.make_mesh({"rank": 4})
    for root in range(p):
        blocks = [np.full(r, r, np.int32) for r in range(p)]  # rank 0 has none
        found, counts = fc.ragged.gather(blocks, "rank", root=root, mesh=mesh)
        assert [y.tolist() for y in found] == [[1, 2, 2, 3, 3, 3] if r == root else [] for r in range(p)]
        assert counts[0].tolist() == [0, 1, 2, 3]
        whole = [np.repeat(np.arange(p), root + 1) if r == root else np.empty(0, int) for r in range(p)]
        found, size = fc.ragged.scatter(whole, "rank", sizes=[root + 1] * p, root=root, mesh=mesh)
        assert [y.tolist() for y in found] == [[r] * (root + 1) for r in range(p)]
        assert size == [root + 1] * p

    def spread(x):  # Alltoallv with a gap of one element behind each block, on both sides
        count, every = np.full(p, 2), np.arange(p)
        places = np.full(p, 3) * fc.axis_index("rank")
        return fc.ragged.ragged_all_to_all(x, np.full(3 * p, -1), 3 * every, count, places, count, "rank")

    got = fc.jit(spread, mesh=mesh, in_specs=P("rank"), out_specs=P("rank"))(np.repeat(np.arange(p), 3 * p))
    assert got.shards[2].tolist() == [0, 0, -1, 1, 1, -1, 2, 2, -1, 3, 3, -1]


def test_jax_ragged_all_to_all():
    """The documented example of jax.lax.ragged_all_to_all, and its output that stays where nothing is received."""
    mesh = fc.make_mesh({"x": 2})
    step = per_device(mesh, lambda *given: fc.ragged.ragged_all_to_all(*given, axis="x"))
    two = lambda a, b: np.array([a, b])
    operand, sizes = two([1, 2, 2], [3, 4, 0]), (two([1, 2], [1, 1]), two([0, 0], [1, 2]), two([1, 1], [2, 1]))
    got = step(operand, np.zeros((2, 4), int), two([0, 1], [0, 1]), *sizes)
    assert np.asarray(got).tolist() == [[1, 3, 0, 0], [2, 2, 4, 0]]
    got = step(operand, np.full((2, 4), 9), two([0, 1], [0, 1]), *sizes)
    assert np.asarray(got).tolist() == [[1, 3, 9, 9], [2, 2, 4, 9]]

    def loss(x, out, *offsets):
        moved = fc.ragged.ragged_all_to_all(x, out, *offsets, axis="x")
        return fc.all_reduce(np.sum(moved * np.arange(1.0, 5.0)), "x")

    gradient = per_device(mesh, fc.grad(loss, argnums=(0, 1)))
    of_x, of_out = gradient(operand.astype(float), np.zeros((2, 4)), two([0, 1], [0, 1]), *sizes)
    assert np.asarray(of_x).tolist() == [[1, 1, 2], [2, 3, 0]]
    assert np.asarray(of_out).tolist() == [[0, 0, 3, 4], [0, 0, 0, 4]]


def test_pytrees_share_their_sizes():
    mesh = fc.make_mesh({"d": 2})
    tree = [{"a": np.arange(3), "b": np.ones((3, 2))}, {"a": np.arange(1), "b": np.zeros((1, 2))}]
    found, _ = fc.ragged.all_gather(tree, "d", mesh=mesh)
    assert found[1]["a"].tolist() == [0, 1, 2, 0] and found[0]["b"].shape == (4, 2)


# ---------------------------------------------------------------- errors


def raised(fn, *arrays, match):
    mesh = fc.make_mesh({"d": 2})
    with pytest.raises(ShapeError, match=match) as info:
        per_device(mesh, fn)(*arrays)
    assert re.search(r"test_ragged\.py:\d+", str(info.value)), info.value


def test_sizes_that_do_not_fit():
    x, two = np.ones((2, 3, 2)), lambda a, b: np.array([a, b])
    send = lambda x, s: fc.ragged.all_to_all(x, "d", sizes=s)[0]
    raised(send, x, two([1, 1], [-1, 2]), match=r"over 'd': the size of the rows from rank 1 to rank 0 is -1")
    raised(send, x, two([1, 1], [2, 2]), match=r"rank 1 sends rows 2 to 4 to rank 1, and its operand has 3 rows.* are \[2, 2\]")
    small = lambda x, s: fc.ragged.all_to_all(x, "d", sizes=s, result_rows=2)[0]
    raised(
        small, x, two([1, 1], [2, 1]), match=r"rank 0 receives 2 rows from rank 1 as its rows 1 to 3, and its result has 2 rows"
    )
    raised(lambda x, s: fc.ragged.reduce_scatter(x, "d", sizes=s), x, two([1, 2], [2, 1]),
           match=r"ranks 0 and 1 have different sizes: \[1, 2\] and \[2, 1\]")  # fmt: skip
    raised(lambda x, n: fc.ragged.all_gather(x, "d", rows=n[0])[0][None], x, two([1], [4]), match=r"operand has 3 rows")

    def stated(x, received):
        zero, one = np.zeros(2, np.int64), np.ones(2, np.int64)
        return fc.ragged.ragged_all_to_all(x, x, zero, one, zero + fc.axis_index("d"), received, "d")

    raised(stated, x, two([1, 1], [1, 2]), match=r"rank 1 sends 1 rows to rank 1 \(send_sizes\), and rank 1 expects 2 rows")
    overlap = lambda x: fc.ragged.ragged_all_to_all(x, x, [0, 0], [2, 2], fc.axis_index("d") * np.ones(2, int), [2, 2], "d")
    raised(overlap, x, match=r"rank 0 receives from ranks 0 and 1 overlap: they begin at 0 and 1, with 2 and 2 rows")


def test_gradient_of_rows_that_go_to_several_devices_is_refused():
    zero, one = np.zeros(2, int), np.ones(2, int)

    def both(x):  # each row goes to both devices
        moved = fc.ragged.ragged_all_to_all(x, np.zeros(2), zero, one, fc.axis_index("d") * one, one, axis="d")
        return fc.all_reduce(np.sum(moved), "d")

    raised(fc.grad(both), np.ones((2, 1)), match="the rows that rank 0 receives from ranks 0 and 1 overlap")


def test_groups_that_do_not_fit():
    mesh, x = fc.make_mesh({"d": 4}), np.ones((4, 3, 2))
    sizes = np.array([[2, 1]] * 3 + [[1, 2]])
    reduced = lambda **given: per_device(
        mesh, lambda x, s: fc.ragged.reduce_scatter(x, "d", sizes=s, groups=[[0, 2], [1, 3]], **given)
    )
    with pytest.raises(ShapeError, match=r"rank 1 sends 1 rows to rank 3 .*, and rank 3 expects 2 rows from it"):
        reduced()(x, sizes)
    with pytest.raises(UnsupportedError, match=r'op="max" has no groups; sums and means have. Use fc\.all_reduce'):
        reduced(op="max")(x, sizes)
    with pytest.raises(ShapeError, match="position 3 is in none of them"):
        per_device(mesh, lambda x: fc.ragged.all_gather(x, "d", groups=[[0, 2], [1]])[0])(x)
    with pytest.raises(UnsupportedError, match=r"groups= is for traced functions. Outside, pass a mesh of the group: fc.group"):
        fc.ragged.all_gather([*x], "d", groups=[[0, 2], [1, 3]], mesh=mesh)
    with pytest.raises(ShapeError, match=r"root=2 must be an integer from 0 to 1"):
        per_device(mesh, lambda x: fc.ragged.gather(x, "d", root=2, groups=[[0, 2], [1, 3]])[0])(x)


def test_what_is_known_when_a_function_is_traced():
    mesh = fc.make_mesh({"d": 2})

    def wrong(fn, error, match, x=np.ones((2, 3))):
        with pytest.raises(error, match=match):
            per_device(mesh, fn)(x)

    wrong(
        lambda x: fc.ragged.all_to_all(x, "d", sizes=[1, 1, 1])[0], ShapeError, r"sizes has shape \(3,\).*each of the 2 devices"
    )
    wrong(lambda x: fc.ragged.all_to_all(x, "d", sizes=[1.0, 1.0])[0], DTypeError, "must be integers, not float64")
    wrong(lambda x: fc.ragged.all_gather(x[0], "d")[0], ShapeError, r"arrays of shapes \(\)")
    wrong(lambda x: fc.ragged.all_gather(x, "e")[0], MeshError, "unknown axis 'e'")
    wrong(lambda x: fc.ragged.gather(x, "d", root=2)[0], ShapeError, "root=2 must be an integer from 0 to 1")
    wrong(
        lambda x: fc.ragged.scatter(x, "d", sizes=[1, 1], result_rows=x[0])[0], ShapeError, "known when the function is traced"
    )
    wrong(lambda x: fc.ragged.reduce_scatter(x, "d", sizes=[1, 1], op="least"), UnsupportedError, "unknown op 'least'")
    wrong(lambda x: fc.ragged.reduce_scatter(x, "d", sizes=[1, 1], op="and"), DTypeError, "bitwise operations need integers")
    wrong(
        fc.grad(lambda x: fc.all_reduce(np.sum(fc.ragged.reduce_scatter(x, "d", sizes=[1, 1], op="max")), "d")),
        VaryingError, 'with op="max" has no gradient',
    )  # fmt: skip
    wrong(
        lambda x: fc.ragged.ragged_all_to_all(x, x.astype(np.int32), *[[0, 0]] * 4, axis="d"),
        ShapeError,
        "dtype and the further",
    )


def test_what_is_wrong_outside():
    mesh = fc.make_mesh({"d": 2})
    blocks = [np.ones((2, 2)), np.ones((1, 2))]

    def wrong(error, match, name="all_to_all", given=blocks, **more):
        with pytest.raises(error, match=match):
            getattr(fc.ragged, name)(given, "d", mesh=mesh, **more)

    wrong(ShapeError, r"over axis 'd': rank 1 has 1 rows, and its sizes are \[1, 1\]", sizes=[[1, 1], [1, 1]])
    wrong(ShapeError, r"rank 0 has 2 rows, and its sizes are \[3, -1\]", sizes=[[3, -1], [1, 0]])
    wrong(ShapeError, r"sizes has shape \(3,\)", sizes=[[1, 1, 0], [1, 0, 0]])
    wrong(DTypeError, "must be integers", sizes=[[0.5, 1.5], [1, 0]])
    wrong(ShapeError, r"ranks 0 and 1 have different sizes: \[2, 0\] and \[1, 1\]", "reduce_scatter", [blocks[0]] * 2,
          sizes=[[2, 0], [1, 1]])  # fmt: skip
    wrong(MeshError, "plays all 2 devices.*a list of 2 blocks.*not one ndarray", "all_gather", blocks[0])
    wrong(ShapeError, r"float64\[2, 2\]; float64\[1, 3\].*further dimensions must be equal", "all_gather",
          [blocks[0], np.ones((1, 3))])  # fmt: skip
    with pytest.raises(MeshError, match="all_gather over 'd' was called outside a mesh"):
        fc.ragged.all_gather(np.ones(2), "d")
    with pytest.raises(MeshError, match="takes a mesh with devices"):
        fc.ragged.all_gather(np.ones(2), "d", mesh=fc.abstract_mesh({"d": 2}))
