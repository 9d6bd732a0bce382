"""Compiled programs on virtual devices."""

import copy
import logging
import traceback
import weakref
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import DeletedArrayError, DTypeError, MeshError, ShapeError, UnsupportedError

pytestmark = pytest.mark.covers("jit")

MESH = fc.make_mesh({"data": 4, "model": 2})
X = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.mark.usefixtures("numpy_compute")
def test_what_does_not_vary_is_computed_once(monkeypatch):
    calls = []
    from funccoll.primitives.elementwise import UFUNCS

    sin = UFUNCS[np.sin]
    object.__setattr__(sin, "reference", lambda x, **kw: (calls.append(x.shape), np.sin(x, **kw))[1])
    try:
        step = fc.jit(
            lambda x, w: np.sum(x) * np.sin(w),
            mesh=MESH,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
        )
        step(X, np.ones(4, np.float32))
        assert len(calls) == 1
        fc.jit(lambda x: np.sin(x), mesh=MESH, in_specs=P("data"), out_specs=P("data"))(X)
        assert len(calls) == 1 + 4  # one for each coordinate along "data", not for each of the 8 devices
    finally:
        object.__setattr__(sin, "reference", np.sin)


def test_the_design_is_silent_by_default(caplog, capfd):
    with caplog.at_level(logging.WARNING):
        fc.jit(lambda x: x + 1, mesh=MESH)(X)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.DEBUG, logger="funccoll"):
        fc.jit(lambda x: x + 2, mesh=MESH)(X)
    assert "compiled" in caplog.text


def test_large_values_in_blocks_equal_the_left_fold():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4, 70_001)).astype(np.float32)
    out = fc.jit(lambda v: fc.all_reduce(v, "data"), mesh=MESH, in_specs=P("data"), out_specs=P())(x)
    expected = ((x[:1] + x[1:2]) + x[2:3]) + x[3:]
    np.testing.assert_array_equal(np.asarray(out), expected)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda f: cloudpickle.loads(cloudpickle.dumps(f))])
def test_copies_and_pickles(how, called):
    f = fc.jit(lambda x, n: x * n, static_argnums=1)
    if called:
        f(X, 2)
    g = how(f)
    np.testing.assert_array_equal(g(X, 3), X * 3)
    assert type(g) is type(f) and g is not f and repr(g) == repr(f)


def test_threads_may_call_one_function():
    from concurrent.futures import ThreadPoolExecutor

    step = fc.jit(lambda x: fc.all_reduce(np.tanh(x), "data"), mesh=MESH, in_specs=P("data"), out_specs=P())
    expected = np.asarray(step(X))
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: np.asarray(step(X)), range(200)):
            np.testing.assert_array_equal(out, expected)


def test_tracebacks_show_the_users_frames(monkeypatch):

    def inner(x):
        return np.reshape(x, (3, 3))

    def outer(x):
        return inner(np.tanh(x))

    def files():
        with pytest.raises(ValueError, match="do not fill shape") as caught:
            fc.jit(outer)(X)
        return [(f.filename == __file__, f.name) for f in traceback.extract_tb(caught.value.__traceback__)]

    monkeypatch.delenv("FUNCCOLL_TRACEBACK", raising=False)
    assert [name for users, name in files() if users] == ["files", "outer", "inner"]
    assert len(files()) <= 4
    monkeypatch.setenv("FUNCCOLL_TRACEBACK", "full")
    assert len(files()) > 8


def _missing(x):
    return {}["a"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: fc.jit(_missing)(X),
        lambda: fc.jit(_missing).lower(X),
        lambda: fc.jit(fc.vmap(_missing))(X),
        lambda: fc.jit(fc.grad(lambda x: np.sum(_missing(x))))(X),
        lambda: fc.jit(lambda x: fc.pure_callback(_missing, fc.ArrayType(X.shape, X.dtype), x))(X),
        lambda: fc.jit(lambda x: fc.scan(lambda c, _: (_missing(c), None), x, None, length=2)[0])(X),
    ],
)
def test_exceptions_of_the_users_own_show_no_frames_of_ours(call, monkeypatch):
    monkeypatch.delenv("FUNCCOLL_TRACEBACK", raising=False)
    with pytest.raises(KeyError) as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert {f.filename for f in frames} == {__file__} and frames[-1].name == "_missing", frames


def test_a_fault_of_funccoll_shows_all_frames(monkeypatch):
    monkeypatch.delenv("FUNCCOLL_TRACEBACK", raising=False)
    monkeypatch.setattr("funccoll.compiler.function_on_mesh.stage", None)
    with pytest.raises(TypeError) as caught:
        fc.jit(_missing)(X)
    package = str(Path(fc.__file__).parent)
    assert sum(f.filename.startswith(package) for f in traceback.extract_tb(caught.value.__traceback__)) >= 3


def test_errors_at_run_time_and_outside_jit_show_no_frames_of_ours(monkeypatch):
    monkeypatch.delenv("FUNCCOLL_TRACEBACK", raising=False)
    at, pick = fc.jit(lambda x, i: fc.at(x)[i].set(0.0)), fc.jit(lambda tree, i: tree["x"][i])
    solve = fc.jit(np.linalg.inv)
    one, bad = np.array([1]), np.array([70])
    at(X, one), pick({"x": X}, one), pick({"x": X}, 1), solve(np.eye(2))  # the later calls are the quick ones
    both = fc.make_mesh({"i": 2})
    split = fc.jit(lambda x, i: fc.all_reduce(fc.at(x)[i].add(1.0), "i"), mesh=both, in_specs=(P("i"), P()), out_specs=P())
    cases = {
        "at": (lambda: at(X, bad), IndexError),
        "first": (lambda: fc.jit(lambda x, i: fc.at(x)[i].get())(X, bad), IndexError),
        "pytree": (lambda: pick({"x": X}, bad), IndexError),
        "number": (lambda: pick({"x": X}, 99), IndexError),
        "devices": (lambda: split(X, bad), IndexError),
        "singular": (lambda: solve(np.zeros((2, 2))), np.linalg.LinAlgError),
        "outside": (lambda: fc.all_reduce(X, "i"), MeshError),
        "positional": (lambda: fc.permute(X, "i", [(0, 1)]), MeshError),
        "keyword": (lambda: fc.all_reduce(X, axis_name="i"), UnsupportedError),
        "index": (lambda: fc.axis_index("i"), MeshError),
        "eager at": (lambda: fc.at(X)[99].set(0.0), ShapeError),
        "gradient": (lambda: fc.grad(lambda w: np.sum(w * 2))(np.arange(3)), DTypeError),
        "vmap": (lambda: fc.vmap(lambda x, y: x + y)(X, X[:, :3]), ShapeError),
        "decorator": (lambda: fc.jit(mesh=both, in_specs=P("model"))(np.sum), MeshError),
    }
    ours = lambda error: [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename.startswith(("<funccoll", str(Path(fc.__file__).parent)))
    ]
    for name, (call, kind) in cases.items():
        with pytest.raises(kind) as caught:
            call()
        assert not ours(caught.value), name
        assert "test_local_programs.py:" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ())), name
    monkeypatch.setenv("FUNCCOLL_TRACEBACK", "full")
    with pytest.raises(IndexError) as caught:
        at(X, bad)
    assert ours(caught.value)


def test_a_deleted_array_is_refused_every_time():
    mesh = fc.make_mesh({"d": 2})
    donate = fc.jit(lambda x: x + 1, mesh=mesh, in_specs=P("d"), out_specs=P("d"), donate_argnums=0)
    total = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    x = fc.device_put(np.ones(4), mesh, P("d"))
    total(x)
    donate(x)
    for _ in range(3):
        with pytest.raises(DeletedArrayError):
            total(x)
    assert len(total.dispatcher._by_fast_key) == 1


def test_an_int_too_large_for_int64_is_not_taken_for_one_that_fits():
    body = lambda n: n * 1
    same, fresh = fc.jit(body), fc.jit(body)
    assert int(same(1)) == 1
    large, wanted = same(2**63), fresh(2**63)
    assert (large.dtype, int(large)) == (wanted.dtype, int(wanted))
    assert np.asarray(large).dtype == large.dtype
    assert int(same(1)) == 1


def test_a_keyword_leaves_the_other_defaults_what_they_are():
    def f(x, axis=0, options=[1, 2], y=None, *, scale=2):  # noqa: B006  (a default that is not hashable)
        assert type(axis) is int and options == [1, 2] and scale == 2
        return (x + y).sum(axis=axis)

    jitted, x = fc.jit(f), np.arange(6.0).reshape(2, 3)
    for _ in range(2):
        np.testing.assert_array_equal(jitted(x, y=x), 2 * x.sum(axis=0))
    assert len(jitted.dispatcher.executables) == 1
    split = fc.jit(lambda x, n=1, y=None: fc.all_reduce(x * n + y, "d"), mesh=fc.make_mesh({"d": 2}), in_specs=(P("d"), P("d")))
    np.testing.assert_array_equal(split(x, y=x), 2 * x.sum(axis=0, keepdims=True))


def test_programs_used_longest_ago_are_dropped(monkeypatch):
    monkeypatch.setattr("funccoll.compiler.dispatcher.CACHE_SIZE", 8)
    traced = []

    @fc.jit
    def double(x):
        traced.append(x.shape)
        return x * 2

    def call(n):
        assert (np.asarray(double(np.ones(n))) == 2).all()

    for n in range(1, 30):
        call(n)
        call(1)  # quickly, in between
        assert len(double.dispatcher.executables) <= 8
    assert traced == [(n,) for n in range(1, 30)]
    call(2)
    assert traced[-1] == (2,) and len(traced) == 30


def test_caches_can_be_cleared():
    double = fc.jit(lambda x: x * 2)
    mesh = fc.make_mesh({"d": 2})
    total = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    x = fc.device_put(np.ones(4), mesh, P("d"))
    compiled = []
    for _ in range(2):
        for _ in range(3):
            assert (np.asarray(double(np.ones(3))) == 2).all() and (np.asarray(total(x)) == 2).all()
        compiled.append([*double.dispatcher.executables, *total.dispatcher.executables])
        fc.clear_caches()
        assert all(not f.fast_paths and not f.dispatcher.executables and not f.dispatcher._by_fast_key for f in (double, total))
    assert len(compiled[0]) == len(compiled[1]) == 2 and not set(map(id, compiled[0])) & set(map(id, compiled[1]))
    kept = weakref.ref(compiled[0][1])
    compiled.clear()
    assert kept() is None
