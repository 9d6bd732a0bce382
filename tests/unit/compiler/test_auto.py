"""`fc.AUTO` in in_specs: an Array is split as its own sharding says, anything else is whole."""

import copy
import pickle

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import DeletedArrayError, ShardingError
from tests.support.misuse import LINE, X, wrong

pytestmark = pytest.mark.covers("jit")

MESH = fc.make_mesh({"data": 4, "model": 2})
GRID = np.arange(48, dtype=np.float32).reshape(8, 6)
SPECS = [P(), P("data"), P(None, "model"), P("model", None), P("data", "model"), P(("data", "model")), P(("model", "data"))]


def shapes_seen(x, *rest):
    """The sum of x over all devices that hold a part of it, and what the body saw."""
    seen.append((x.shape, x.varying))
    total = np.sum(x)
    axes = tuple(a for a in MESH.axis_names if a in x.varying)
    return fc.all_reduce(total, axes) if axes else total


seen: list = []
TOTAL = fc.jit(shapes_seen, mesh=MESH, in_specs=fc.AUTO, out_specs=P())


def test_each_sharding_is_compiled_once_and_taken_as_it_is():
    seen.clear()
    arrays = [fc.device_put(GRID, MESH, spec) for spec in SPECS]
    for _ in range(3):
        for array in arrays:
            assert float(TOTAL(array)) == GRID.sum()
    assert seen == [(a.sharding.shard_shape(a.shape), a.sharding.varying) for a in arrays]
    for array in arrays:
        (layout,) = TOTAL.lower(array).signature.in_layouts
        assert layout is array.layout


def test_anything_else_is_whole_as_is_what_has_no_mesh():
    for whole in (GRID, fc.asarray(GRID), fc.jit(lambda x: x)(GRID), fc.device_put(GRID, LINE)):
        seen.clear()
        assert float(TOTAL(whole)) == GRID.sum()
        assert seen in ([], [((8, 6), frozenset())])  # one type is traced once
    assert float(fc.jit(shapes_seen, mesh=MESH, in_specs=fc.AUTO, out_specs=P())(2.5)) == 2.5


def test_an_array_and_the_same_values_of_numpy_are_two_programs():
    step = fc.jit(lambda x: x[:1] + 0 * fc.axis_index("data"), mesh=MESH, in_specs=fc.AUTO, out_specs=P("data"))
    for _ in range(2):
        np.testing.assert_array_equal(step(GRID), GRID[[0, 0, 0, 0]])
        np.testing.assert_array_equal(step(fc.device_put(GRID, MESH, P("data"))), GRID[::2])


def test_the_default_stays_the_global_value():
    array = fc.device_put(GRID, MESH, P("data"))
    for specs in (None, P()):
        np.testing.assert_array_equal(fc.jit(lambda x: x, mesh=MESH, in_specs=specs, out_specs=P())(array), GRID)


def test_it_stands_beside_specs_and_inside_pytrees():
    def body(params, batch, scale):
        assert params["w"].shape == (2, 6) and params["b"].shape == () and batch.shape == (4, 6)
        return params["w"] * scale + fc.all_reduce(np.sum(batch), "model")

    step = fc.jit(body, mesh=MESH, in_specs=({"w": fc.AUTO, "b": fc.AUTO}, P("model"), fc.AUTO), out_specs=P("data"))
    w = fc.device_put(GRID, MESH, P("data"))
    np.testing.assert_array_equal(step({"w": w, "b": 1.0}, GRID, np.float32(2)), GRID * 2 + GRID.sum())
    chain = fc.jit(lambda x: x * 2, mesh=MESH, in_specs=fc.AUTO, out_specs=P("data"))
    np.testing.assert_array_equal(chain(chain(w)), GRID * 4)


def test_static_and_donated_arguments():
    step = fc.jit(lambda n, x: x * n, mesh=MESH, in_specs=fc.AUTO, out_specs=P("data"), static_argnums=0, donate_argnums=1)
    array = fc.device_put(GRID, MESH, P("data"))
    np.testing.assert_array_equal(step(3, array), GRID * 3)
    wrong(DeletedArrayError, lambda: step(3, array), "donated")


def test_what_it_does_not_fit():
    other = fc.device_put(X, LINE, P("data"))

    def call():
        step = fc.jit(lambda params: params["x"], mesh=MESH, in_specs=fc.AUTO, out_specs=P())
        return step({"x": other})

    wrong(ShardingError, call, "params['x'] of <lambda>", "P('data')", repr(LINE), repr(MESH), "fc.device_put", line=2)
    wrong(ShardingError, lambda: fc.jit(lambda x: x, in_specs=fc.AUTO)(other), "x of <lambda>", repr(LINE))
    wrong(ShardingError, lambda: fc.jit(lambda x: x, mesh=MESH, in_specs="AUTO"), "fc.P('AUTO')")


def test_it_is_one_object():
    assert repr(fc.AUTO) == "fc.AUTO"
    assert copy.deepcopy(fc.AUTO) is pickle.loads(pickle.dumps(fc.AUTO)) is fc.AUTO


@pytest.mark.slow
@pytest.mark.processes
def test_processes_take_their_own_blocks():
    def totals():
        mesh = fc.make_mesh({"i": fc.world_size()})
        mine = fc.from_local(np.full(3, fc.rank() + 1.0), mesh, P("i"))
        body = lambda x, whole: fc.all_reduce(np.sum(x), "i") * whole
        steps = [fc.jit(body, mesh=mesh, in_specs=specs, out_specs=P()) for specs in (fc.AUTO, (P("i"), P()))]
        return [float(step(mine, 2.0)) for step in steps for _ in range(2)]

    assert fc.launch(totals, 2) == [[18.0] * 4] * 2
