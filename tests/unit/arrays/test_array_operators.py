"""Operators and conversions of Arrays, and how they look."""

import gc
import io
import pickle
import traceback
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.core.c_extension import extension
from tests.support.misuse import LINE, X
from tests.support.same_arrays import identity, same

pytestmark = [pytest.mark.usefixtures("small_collections"), pytest.mark.covers("arrays")]

MESH = fc.make_mesh({"data": 4, "model": 2})
GRID = np.arange(48, dtype=np.float32).reshape(8, 6)


# ---------------------------------------------------------------- operators, conversions


def test_operators_compute_on_the_global_value():
    arr, whole = fc.device_put(GRID, MESH, P("data")), fc.device_put(GRID + 1, MESH, P(None, "model"))
    for got, expected in [
        (arr + 1, GRID + 1),
        (1 - arr, 1 - GRID),
        (arr * whole, GRID * (GRID + 1)),
        (arr / 2, GRID / 2),
        (arr**2, GRID**2),
        (-arr, -GRID),
        (abs(-arr), GRID),
        (arr @ GRID.T, GRID @ GRID.T),
        (GRID + arr, GRID + GRID),
        (arr // 2, GRID // 2),
        (arr % 3, GRID % 3),
        (np.tanh(arr), np.tanh(GRID)),
        (np.add(arr, whole), GRID + GRID + 1),
        (arr[2:4, 1], GRID[2:4, 1]),
        (np.sum(arr, axis=0), GRID.sum(axis=0)),
        (np.concatenate([arr, whole]), np.concatenate([GRID, GRID + 1])),
        (arr.astype(np.int32), GRID.astype(np.int32)),
        (np.float32(2) * arr, np.float32(2) * GRID),
    ]:
        assert isinstance(got, np.ndarray) and same(got, expected)
    assert (arr == GRID).all() and (arr != whole).all() and (arr < whole).all() and (whole >= arr).all()
    assert [row.tolist() for row in arr] == GRID.tolist() == arr.tolist()
    with pytest.raises(TypeError, match="unhashable"):
        hash(arr)


def test_methods_are_those_of_the_global_value():
    arr = fc.device_put(GRID, MESH, P("data", "model"))
    for name, args in [("sum", (0,)), ("mean", ()), ("max", (1,)), ("argmax", ()), ("reshape", (6, 8)), ("std", ())]:
        assert same(getattr(arr, name)(*args), getattr(GRID, name)(*args))
    assert same(arr.T, GRID.T) and same(np.mean(arr, axis=1), GRID.mean(axis=1))
    assert same(arr.sum(keepdims=True), GRID.sum(keepdims=True))
    assert arr.itemsize == 4 and arr.take(1) == 1 and arr.swapaxes(0, 1).shape == (6, 8)
    assert round(fc.device_put(np.float32(2.71875), LINE), 2) == 2.72 and round(fc.device_put(2.7, LINE)) == 3
    with pytest.raises(fc.errors.MissingMethodError, match=r"no .sort: use np.asarray\(arr\).sort"):
        arr.sort()
    assert not hasattr(arr, "nothing") and not hasattr(arr, "sort")


def test_scalar_conversions():
    seven = fc.device_put(np.int64(7), LINE)
    assert int(seven) == 7 and float(seven) == 7.0 and complex(seven) == 7 and bool(seven) and seven.item() == 7
    assert list(range(seven)) == list(range(7)) and f"{seven:03d}" == "007" and str(seven) == f"{seven}" == "7"
    assert f"{fc.device_put(np.float32(0.5), LINE):.3f}" == "0.500"
    with pytest.raises(ValueError, match="ambiguous"):
        bool(fc.device_put(X, LINE))
    with pytest.raises((TypeError, ValueError)):
        float(fc.device_put(X, LINE))


def test_arrays_are_leaves_of_pytrees():
    arr = fc.device_put(X, LINE, P("data"))
    tree = {"a": [arr, None], "b": (arr,)}
    assert len(fc.tree.leaves(tree)) == 2
    assert same(fc.tree.map(lambda a: a + 1, tree)["b"][0], X + 1)


def test_an_array_inside_a_traced_function_is_a_constant():
    arr = fc.device_put(np.float32(3), LINE)
    assert same(fc.jit(lambda x: x * arr, mesh=LINE, in_specs=P("data"), out_specs=P("data"))(X), X * 3)
    assert same(fc.jit(lambda x: arr + x)(X), X + 3)
    assert same(fc.grad(lambda x: np.sum(x * arr))(X), np.full(8, 3, np.float32))


def test_pickle_carries_the_value():
    arr = fc.device_put(GRID, MESH, P("data", "model"))
    copy = pickle.loads(pickle.dumps(arr))
    assert same(copy, arr) and copy.sharding == arr.sharding
    step = identity(P("data", "model"))
    assert same(step(copy), GRID)
    assert pickle.loads(pickle.dumps(arr)).layout is copy.layout is deepcopy(arr).layout  # known to every call's cache


def test_pickles_of_the_first_layout_load():
    """Meshes and arrays that were pickled when `core/mesh.py` was `mesh.py`."""
    devices = b"c__builtin__\nxrange\nK\x00K\x02K\x01\x87R"
    mesh = b"\x80\x02cfunccoll.mesh\nMesh\n(}X\x01\x00\x00\x00dK\x02s" + devices + b"NNX\x03\x00\x00\x00cpu)tR"
    spec = b"cfunccoll.mesh\nP\nX\x01\x00\x00\x00d\x85\x81"
    rest = b"X\x07\x00\x00\x00varyingc__builtin__\nfrozenset\n]X\x01\x00\x00\x00da\x85Rub"
    sharding = b"cfunccoll.mesh\nSharding\n)\x81}(X\x04\x00\x00\x00mesh" + mesh[2:] + b"X\x04\x00\x00\x00spec" + spec + rest
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00f8\x89\x88\x87R"
    layout = b"cfunccoll.arrays.array_layout\nlayout_of\n(K\x02\x85" + dtype + sharding + b"NtR"
    blocks = b"](cnumpy\narray\n]G\x00\x00\x00\x00\x00\x00\x00\x00a\x85Rcnumpy\narray\n]G@\x00\x00\x00\x00\x00\x00\x00a\x85Re"
    assert pickle.loads(mesh + b".") == fc.make_mesh({"d": 2})
    assert pickle.loads(b"\x80\x02" + spec + b".") == fc.P("d")
    array = pickle.loads(b"\x80\x02cfunccoll.arrays.array\nArray\n" + layout + blocks + b"\x86R.")
    assert np.array_equal(array, [0.0, 2.0]) and array.sharding.spec == fc.P("d")
    since = sharding.replace(b"cfunccoll.mesh\nSharding", b"cfunccoll.core.mesh\nSharding")  # when it stood beside Mesh
    assert pickle.loads(b"\x80\x02" + since + b".") == array.sharding


def test_a_donated_array_is_not_pickled():
    arr = fc.device_put(X, LINE, P("data"))
    fc.jit(lambda x: x, mesh=LINE, in_specs=P("data"), out_specs=P("data"), donate_argnums=0)(arr)
    with pytest.raises(fc.errors.DeletedArrayError):
        pickle.dumps(arr)


# ---------------------------------------------------------------- how they look


def test_repr_shows_value_type_and_place():
    arr = fc.device_put(GRID, MESH, P("data", None))
    assert repr(arr).startswith("Array([[")
    assert repr(arr).endswith("f32[8,6], P('data', None) on Mesh({'data': 4, 'model': 2}))")
    assert len(repr(fc.device_put(np.zeros((1000, 1000)), LINE))) < 400
    assert "bf16[2]" in repr(fc.device_put(np.ones(2, fc.bfloat16), LINE))
    assert repr(fc.device_put(np.zeros(0), LINE))


@pytest.mark.parametrize("specs", [P(), {"w": P("data"), "b": P()}, {"w": [P("data"), P(None, "model")], "b": P()}], ids=str)
def test_device_put_of_a_dict_names_the_tree_map_for_a_prefix_of_specs(specs):
    x = {"w": [GRID, GRID], "b": 1.0}
    with pytest.raises(fc.errors.TraceError, match=r"fc\.tree\.map\(lambda spec, part: ") as caught:
        fc.device_put(x, MESH, P())
    advice = str(caught.value).partition("prefix of it: ")[2].splitlines()[0].removesuffix(".")
    put = eval(advice, {"fc": fc, "mesh": MESH, "specs": specs, "x": x})
    of_w = [P(), P()] if isinstance(specs, P) else specs["w"] if isinstance(specs["w"], list) else [P("data"), P("data")]
    assert fc.spec_like(put) == {"w": of_w, "b": P()}
    assert all(np.array_equal(a, b) for a, b in zip(fc.tree.leaves(put), fc.tree.leaves(x), strict=True))


def test_html_shows_which_device_holds_what():
    html = fc.device_put(GRID, MESH, P("data", "model"))._repr_html_()
    for device in range(8):
        assert f"device {device}" in html
    for part in ("data=3", "model=1", "[2:4, 0:3]", "[6:8, 3:6]", "P(&#x27;data&#x27;, &#x27;model&#x27;)"):
        assert part in html
    assert html.count("[:, :]") == 0
    assert "<pre style='font-family:monospace;white-space:pre;" in html  # columns stay columns, whatever the page
    assert fc.device_put(GRID, MESH)._repr_html_().count("[:, :]") == 8
    assert "<script" not in html and html.count("<div") == html.count("</div") and html.count("<td") == html.count("</td")
    assert "device 7" in MESH._repr_html_() or ">7<" in MESH._repr_html_()
    assert len(fc.device_put(np.zeros((512, 512)), fc.make_mesh({"data": 512}), P("data"))._repr_html_()) < 20_000


def test_words_of_jax(line):
    x = fc.device_put(np.arange(4.0), line, P("data"))
    assert x.block_until_ready() is x and x.is_deleted() is False
    fc.jit(lambda x: x + 1, mesh=line, in_specs=P("data"), out_specs=P("data"), donate_argnums=0)(x)
    assert x.is_deleted() is True
    with pytest.raises(fc.errors.DeletedArrayError):
        x.block_until_ready()
    with pytest.raises(ValueError, match="out_specs"):
        fc.jit(lambda x: x, mesh=line, in_specs=P("data"), out_specs=P())(np.ones(4))


@pytest.mark.parametrize("other", [None, "a", b"a"])
def test_nothing_and_texts_equal_no_element(other):
    x = np.arange(3.0)
    for found in (fc.device_put(x, fc.make_mesh({"d": 1})) == other, fc.jit(lambda x: x == other)(x)):
        assert np.asarray(found).tolist() == [False] * 3
    assert np.asarray(fc.jit(lambda x: (other != x) & (x > 0))(x)).tolist() == [False, True, True]


def test_whole_values_are_buffers_with_the_c_extension():
    """NumPy asks for a buffer first: it is read-only, holds the block, and what has none goes on by `__array__`."""
    whole, split = (fc.device_put(np.arange(8.0), fc.make_mesh({"d": 4}), spec) for spec in (P(), P("d")))
    assert not np.asarray(whole).flags.writeable and np.asarray(whole).tolist() == np.asarray(split).tolist()
    with pytest.raises((BufferError, TypeError)):
        memoryview(split)
    if extension is None:
        with pytest.raises(TypeError):
            memoryview(whole)
        return
    view = memoryview(whole)
    assert view.readonly and view.format == "d" and view.shape == (8,)
    del whole
    gc.collect()
    assert view.tolist() == list(range(8))
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(view)[0] = 1
    with pytest.raises((BufferError, TypeError), match="read-write"):
        io.BytesIO(bytes(64)).readinto(fc.asarray(np.zeros(8)))


def test_errors_of_calls_on_arrays_end_at_the_users_line(monkeypatch):
    """Whatever NumPy or an Array raises: the traceback shows none of funccoll's frames."""
    monkeypatch.delenv("FUNCCOLL_TRACEBACK", raising=False)
    a = fc.device_put(GRID, MESH, P("data"))
    x: Any = a
    bf = fc.device_put(GRID.astype(fc.bfloat16), MESH, P("data"))
    calls = {
        "operator": lambda: a + np.ones(3),
        "reflected": lambda: np.ones(3) @ x,
        "comparison": lambda: a < "x",
        "unary": lambda: ~a,
        "method": lambda: a.reshape(5),
        "index": lambda: a[9],
        "number": lambda: float(a),
        "item": lambda: a.item(),
        "missing": lambda: x.ptp,
        "no name": lambda: x.ptpt,
        "assignment": lambda: x.__setitem__(0, 1),
        "view": lambda: np.array(bf, copy=False),
        "length": lambda: len(fc.asarray(1.0)),
        "block": lambda: a.local,
        "device_put": lambda: fc.device_put(np.ones(7), MESH, P("data", "model")),
        "no object": lambda: fc.asarray(object()),
        "from_local": lambda: fc.from_local([1, 2], MESH, P("data")),
        "words": lambda: fc.device_put(a, mash=MESH),
        "mesh": lambda: fc.make_mesh({"i": 0}),
        "process_allgather": lambda: fc.process_allgather([object()]),
    }
    for name, call in calls.items():
        with pytest.raises(Exception) as caught:
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [f.filename for f in frames] == [__file__] * 2, name
    monkeypatch.setenv("FUNCCOLL_TRACEBACK", "full")
    with pytest.raises(ValueError) as caught:
        calls["operator"]()
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 2
