"""Gradients of slices, gathers and splits are added into one array: the same values, at the cost of the pieces."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.core.interpreter import bind
from funccoll.primitives.indexing import Piece, scatter_p
from funccoll.primitives.piece_sums import accumulate, accumulate_p
from tests.support.example_counts import examples

pytestmark = pytest.mark.covers("gradients")

MESH = fc.make_mesh({"data": 1})


def lowered(fn, *args):
    return fc.jit(fn, mesh=MESH, in_specs=P(), out_specs=P()).trace(*args).lower()


def through_elements(xs):
    h = np.zeros(xs.shape[1:], xs.dtype)
    for t in range(len(xs)):
        h = np.tanh(xs[t] + h)
    return np.sum(h)


LOOPS = {
    "xs[t]": through_elements,
    "for x in xs": lambda xs: sum(np.sum(np.square(x)) for x in xs),
    "np.split": lambda xs: sum(np.sum(np.square(x)) for x in np.split(xs, len(xs))),
    "slices": lambda xs: sum(np.sum(np.square(xs[t : t + 1])) for t in range(len(xs))),
    "gathers": lambda xs: sum(np.sum(np.square(xs[np.array([t, 0])])) for t in range(len(xs))),
    "and as a whole": lambda xs: np.sum(np.exp(xs)) + sum(np.sum(np.square(x)) for x in xs),
}


@pytest.mark.parametrize("cuts", [((0, 3), (3, 8)), ((3, 8), (0, 3)), ((0, 3), (3, 7)), ((0, 4), (3, 8))])
def test_pieces_that_make_up_the_whole_are_added_to_zeros(cuts):
    """Whether they do, or leave a gap, or overlap: -0 becomes 0."""
    recipes = tuple((("slice", None, None, None), ("slice", *cut, None)) for cut in cuts)
    pieces = [np.full((2, b - a), -0.0, np.float32) for a, b in cuts]
    pieces[0][0] = 1.5
    wanted = np.zeros((2, 8), np.float32)
    for (a, b), piece in zip(cuts, pieces, strict=True):
        wanted[:, a:b] += piece
    found = accumulate_p.reference(*pieces, shape=(2, 8), recipes=recipes, started=False)
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", LOOPS)
def test_the_cost_is_linear_in_the_number_of_pieces(name):
    equations, nbytes = [], []
    for steps in (10, 20, 40):
        xs = np.linspace(-1, 1, steps * 6).reshape(steps, 3, 2)
        found = lowered(fc.grad(LOOPS[name]), xs)
        equations.append(len(found.program.equations))
        nbytes.append(found.cost_analysis()["bytes accessed"])
        named = [e.primitive.name for e in found.program.equations]
        assert named.count("accumulate") == 1 and "scatter_add" not in named
    # Twice as many steps add twice as much: a quadratic part would add more.
    assert equations[2] - equations[1] == 2 * (equations[1] - equations[0])
    assert nbytes[2] - nbytes[1] == pytest.approx(2 * (nbytes[1] - nbytes[0]), rel=0.01)


def one_by_one(start, pieces):
    """The definition: each piece an array of the whole shape."""
    total = start
    for piece in pieces:
        made = scatter_p.reference(piece.value, *piece.arrays, shape=piece.shape, recipe=piece.recipe)
        total = made if total is None else total + made
    return total


RECIPES = [
    (("int", 1),),
    (("int", -1), ("slice", None, None, 2)),
    (("slice", 1, 3, None),),
    (("slice", None, None, -1), ("int", 2)),
    (("int", 0), ("int", 0), ("int", 0)),
    (("new",), ("slice", 0, 2, 1)),
    (("array",),),
    (("slice", None, None, None), ("array",)),
    (("array",), ("slice", 0, 2, None), ("array",)),
]
SHAPE = (4, 3, 2)


@st.composite
def sums(draw):
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    dtype = draw(st.sampled_from([np.float32, np.float64, np.complex64, np.float16]))

    def values(shape):
        drawn = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape) * rng.integers(0, 2, shape)
        return (drawn * (1 + 1j) if dtype == np.complex64 else drawn).astype(dtype)

    pieces = []
    for recipe in draw(st.lists(st.sampled_from(RECIPES), min_size=2, max_size=6)):
        arrays = [rng.permutation(2) for entry in recipe if entry[0] == "array"]  # repeated, they would add up among themselves
        index = (
            tuple(
                {"int": lambda e: e[1], "slice": lambda e: slice(*e[1:]), "new": lambda e: None}.get(
                    e[0], lambda e, rest=iter(arrays): next(rest)
                )(e)
                for e in recipe
            )
            if len(arrays) < 2
            else (arrays[0], slice(*recipe[1][1:]), arrays[1])
        )
        pieces.append(Piece(values(np.empty(SHAPE)[index].shape), arrays, SHAPE, recipe))
    return draw(st.sampled_from([None, values(SHAPE)])), pieces


@examples(60)
@given(sums())
def test_the_sum_has_the_bits_of_arrays_added_one_by_one(case):
    start, pieces = case
    found, expected = accumulate(start, pieces), one_by_one(start, pieces)
    assert found.dtype == expected.dtype
    assert (found + found.dtype.type(0)).tobytes() == (expected + found.dtype.type(0)).tobytes()  # but for signs of zeros


@examples(20)
@given(sums())
def test_the_transpose_reads_the_pieces(case):
    """<accumulate(v), ct> = <v, transposed(ct)>, with integers, so exactly; and the transpose's transpose is the sum."""
    start, pieces = case
    rng = np.random.default_rng(0)
    whole = lambda shape: rng.integers(-4, 5, shape).astype(np.float64)
    pieces = [Piece(whole(p.value.shape), p.arrays, p.shape, p.recipe) for p in pieces]
    start = None if start is None else whole(SHAPE)
    values = [v for v in (start, *(p.value for p in pieces)) if v is not None]

    def f(*values):
        rest = values if start is None else values[1:]
        given = [Piece(v, p.arrays, p.shape, p.recipe) for v, p in zip(rest, pieces, strict=True)]
        return accumulate(None if start is None else values[0], given)

    out, pull = fc.vjp(f, *values)
    ct = whole(SHAPE)
    back, pull_back = fc.vjp(lambda ct: pull(ct), ct)
    assert np.sum(out * ct) == sum(np.sum(v * b) for v, b in zip(values, back, strict=True))
    (again,) = pull_back(tuple(values))
    assert np.array_equal(again, out)


def test_batches_have_the_values_of_a_loop():
    rng = np.random.default_rng(0)
    recipes = ((("int", 1),), (("slice", 0, 2, None),), (("array",),))
    for started, count in itertools.product((False, True), (2, 3)):
        shapes = [(4, 3)] * started + [(3,), (2, 3), (2, 3)][:count]
        arrays = [rng.integers(0, 4, (5, 2))] * (count == 3)
        for batched in itertools.product((False, True), repeat=len(shapes)):
            flags = [*batched, *[True] * len(arrays)]
            if not any(flags):
                continue
            values = [rng.normal(size=(5, *s) if b else s) for s, b in zip(shapes, batched, strict=True)] + arrays
            params = {"shape": (4, 3), "recipes": recipes[:count], "started": started}
            assert accumulate_p.batch is not None
            found = accumulate_p.batch(accumulate_p, values, flags, 5, **params)
            for i in range(5):
                each = bind(accumulate_p, *(v[i] if b else v for v, b in zip(values, flags, strict=True)), **params)
                assert np.array_equal(found[i], each)


def test_derivatives_of_derivatives():
    xs = np.linspace(-1, 1, 12).reshape(4, 3)

    def f(xs):
        return sum(np.sum(np.sin(x) * xs[0]) for x in xs) + np.sum(xs**3)

    gradient = fc.grad(f)
    directional = fc.grad(lambda xs: np.sum(gradient(xs) * np.cos(xs)))
    eps, v = 1e-6, np.cos(np.arange(12.0)).reshape(4, 3)
    found = np.sum(directional(xs) * v)
    of = lambda xs: np.sum(gradient(xs) * np.cos(xs))
    assert found == pytest.approx((of(xs + eps * v) - of(xs - eps * v)) / (2 * eps), rel=1e-6)


def test_on_devices_the_gradient_of_what_all_share_is_reduced_once():
    """Each device reads other rows of a shared table; the sum over the devices is one all_reduce of the whole gradient."""
    mesh = fc.make_mesh({"data": 4})
    table = np.random.default_rng(0).normal(size=(6, 3))
    ids = np.arange(8).reshape(8, 1) % 6

    def f(table, ids):
        rows = [table[i] for i in ids]
        return fc.all_reduce(sum(np.sum(r**3) for r in rows) + np.sum(table[2]), "data")

    def step(table, ids):
        return fc.grad(f)(table, ids)

    jitted = fc.jit(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    expected = sum((scatter_p.reference(3 * table[i] ** 2, i, shape=table.shape, recipe=(("array",),)) for i in ids), start=0)
    expected[2] += 4
    assert np.allclose(jitted(table, ids), expected, rtol=1e-14)
    named = [e.primitive.name for e in jitted.trace(table, ids).lower().program.equations]
    assert named.count("all_reduce") == 1 and named.count("accumulate") == 2  # of each device's rows, and with table[2]
