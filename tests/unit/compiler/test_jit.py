"""jit: caching, stages, specs, static and donated arguments, and what the local runtime computes how often."""

import copy
import inspect
import logging
import traceback
import typing
import weakref
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.compiler.jit import Compiled, Jitted, Lowered, TracedFunction
from funccoll.errors import DeletedArrayError, DTypeError, MeshError, ShapeError, Source, UnsupportedError

MESH = fc.make_mesh({"data": 4, "model": 2})
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def counting(fn):
    """`fn`, and a list that grows by one each time it is traced."""
    traces = []

    def counted(*args, **kwargs):
        traces.append(None)
        return fn(*args, **kwargs)

    return counted, traces


# ------------------------------------------------------------------ the cache


def test_traced_once_for_each_type_structure_and_static_value():
    fn, traces = counting(lambda x, k=1: fc.tree.map(lambda v: v * k, x))
    step = fc.jit(fn, mesh=MESH, in_specs=P("data"), out_specs=P("data"), static_argnums=1)
    for value in (X, X + 1, fc.device_put(X, MESH, P("data")), fc.device_put(X, MESH, P(None, "model"))):
        step(value, 1)
    assert len(traces) == 1
    step(X.astype(np.float64), 1)
    step(X[:4], 1)
    step({"a": X}, 1)
    step({"b": X}, 1)
    step(X, 2)
    assert len(traces) == 6
    step(X, 2)
    assert len(traces) == 6


def test_static_values_that_compare_equal_but_differ_are_apart():
    step = fc.jit(lambda x, k: x * k, static_argnums=1)
    ints = np.arange(3)
    assert step(ints, 2).dtype == np.int64
    assert step(ints, 2.0).dtype == np.float64
    assert step(ints, True).dtype == np.int64
    first = fc.jit(lambda x, k: x * k[0][0], static_argnums=1)
    assert first(ints, ((2,),)).dtype == np.int64
    assert first(ints, ((2.0,),)).dtype == np.float64
    assert [float(np.copysign(1, step(1.0, k))) for k in (0.0, -0.0)] == [1, -1]


def test_resharded_arguments_give_equal_results():
    step = fc.jit(lambda x: np.tanh(x), mesh=MESH, in_specs=P("data", "model"), out_specs=P("data", "model"))
    expected = np.tanh(X)
    for spec in (P(), P("data"), P("model", "data"), P(("model", "data")), P(None, "model")):
        np.testing.assert_array_equal(np.asarray(step(fc.device_put(X, MESH, spec))), expected)


def test_python_scalars_stay_weak():
    def fn(x, rate, n):
        return x * rate, x * (rate * 0.5), rate * n, n // 2, np.where(x > 0, x, rate), -rate * x

    x = np.float32([1.0, -2.0])
    for ours, numpys in zip(fc.jit(fn)(x, 0.1, 3), fn(x, 0.1, 3), strict=True):
        assert ours.dtype == np.asarray(numpys).dtype
        np.testing.assert_array_equal(np.asarray(ours), numpys)
    strong = fc.jit(fn)(x, np.float64(0.1), 3)
    assert strong[0].dtype == np.float64


def test_a_step_counter_stays_weak_from_step_to_step():
    """In plain NumPy `t` would stay a Python int, and float32 parameters float32."""
    fn, traces = counting(lambda w, t, rate: (w * (1 - 0.9**t) - rate * w, t + 1, rate * 0.5))
    step = fc.jit(fn, mesh=MESH)
    w, t, rate = np.ones(3, np.float32), 1, 0.1
    plain = (w, t, rate)
    state = (w, t, rate)
    for _ in range(4):
        state = step(*state)
        plain = fn(*plain)
        assert state[0].dtype == plain[0].dtype == np.float32
        np.testing.assert_allclose(np.asarray(state[0]), plain[0], rtol=1e-6)
    assert (int(state[1]), state[1].weak, state[2].weak) == (5, int, float)
    assert len(traces) == 1 + 4  # ours once, plain four times
    assert repr(state[1]).startswith("Array(5, weak i64[]")
    assert step(state[0], np.int64(5), 0.1)[0].dtype == np.float64  # NumPy's own scalars are strong


# ------------------------------------------------------------------ stages


def test_stages():
    step = fc.jit(lambda x: fc.all_reduce(np.tanh(x), "data"), mesh=MESH, in_specs=P("data"), out_specs=P())
    traced = step.trace(X)
    lowered = traced.lower()
    compiled = lowered.compile()
    assert isinstance(step, Jitted)
    assert (type(traced), type(lowered), type(compiled)) == (TracedFunction, Lowered, Compiled)
    np.testing.assert_array_equal(np.asarray(compiled(X)), np.asarray(step(X)))
    for stage in (traced, lowered, compiled):
        name = None if stage is traced else next(iter(lowered.schedules.values())).algorithm
        assert f"all_reduce[algorithm={name!r}, axes=('data',), op='sum', size=4]" in stage.as_text()
        assert "all_reduce" in stage._repr_html_()
        assert str(stage) == stage.as_text()
        cost = stage.cost_analysis()
        assert cost == {"flops": 8.0, "bytes accessed": 128.0, "collectives": 1.0, "collective bytes": 32.0}
    (row,) = lowered.collectives()
    assert (row.kind, row.op, row.axes, row.size, row.nbytes) == ("all_reduce", "sum", ("data",), 4, 32)
    assert row.source.file == __file__
    ((equation, schedule),) = lowered.schedules.items()
    assert row.schedule == schedule.algorithm and equation is lowered.program.equations[-1]
    assert traced.collectives().rows[0].schedule == ""
    assert 'align:left">test_jit.py:' in lowered.collectives()._repr_html_()
    cell = Source("/tmp/ipykernel_7/3656971157.py", 4, "f")  # in a process that is not the notebook's kernel
    assert (str(cell), cell.as_note) == ("cell:4 (f)", "  at cell:4 in f")
    assert lowered.fingerprint == step.lower(X).fingerprint


def test_tracing_needs_types_only_and_no_devices():
    class Shape:
        shape, dtype = (8000, 4), np.dtype(np.float32)

    mesh = fc.abstract_mesh({"data": 1000})
    lowered = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()).lower(Shape())
    assert lowered.collectives().rows[0].nbytes == 8 * 4 * 4
    with pytest.raises(fc.errors.MeshError, match="no devices"):
        lowered.compile()


def test_compiled_refuses_other_arguments():
    compiled = fc.jit(lambda x: x + 1).lower(X).compile()
    with pytest.raises(ValueError, match=r"float32\[4, 4\], and it was compiled for float32\[8, 4\]"):
        compiled(X[:4])
    with pytest.raises(ValueError, match="structure"):
        compiled(X, X)


def test_matmul_flops():
    lowered = fc.jit(lambda a, b: a @ b).lower(np.ones((3, 4)), np.ones((4, 5)))
    assert lowered.cost_analysis()["flops"] == 2 * 3 * 4 * 5


# ------------------------------------------------------------------ arguments


def test_specs_are_prefixes():
    tree = {"a": X, "b": (X, [X])}
    seen = {}

    def fn(t, y):
        seen["types"] = fc.tree.map(lambda v: (v.shape, v.varying), t)
        return t

    specs = ({"a": P("data"), "b": P(None, "model")}, None)
    out = fc.jit(fn, mesh=MESH, in_specs=specs, out_specs={"a": P("data"), "b": P(None, "model")})(tree, X)
    assert seen["types"]["a"] == ((2, 4), {"data"})
    assert seen["types"]["b"][1][0] == ((8, 2), {"model"})
    for ours in fc.tree.leaves(out):
        np.testing.assert_array_equal(np.asarray(ours), X)


def test_keywords_static_names_and_defaults():
    def fn(x, scale=2.0, *, power=1):
        return (x * scale) ** power

    step = fc.jit(fn, mesh=MESH, in_specs=(P("data"), P()), out_specs=P("data"), static_argnames="power")
    np.testing.assert_array_equal(np.asarray(step(x=X, scale=np.float32(3.0), power=2)), (X * np.float32(3)) ** 2)
    np.testing.assert_array_equal(np.asarray(step(X, np.float32(3.0))), X * np.float32(3))
    with pytest.raises(TypeError, match="scal"):
        step(X, scal=1.0)
    np.testing.assert_array_equal(np.asarray(step(x=X, scale=np.float32(3.0))), X * np.float32(3))  # power's default


def test_a_static_keyword_may_stand_before_an_array_given_by_keyword():
    def fn(a, n, b, *, m=1):
        return a * n + b * m

    step = fc.jit(fn, mesh=MESH, in_specs=P("data"), out_specs=P("data"), static_argnames=("n", "m"))
    for out in (step(X, n=3, b=X), step(a=X, b=X, n=3), step(X, 3, b=X, m=1), step(X, 3, X)):
        np.testing.assert_array_equal(np.asarray(out), X * 4)


def test_signature_and_documentation_survive():
    def fn(x: int, y: str = "a") -> float:
        """Docs."""
        return 0.0

    jitted = fc.jit(fn, static_argnames="y")
    assert inspect.signature(jitted) == inspect.signature(fn)
    assert (jitted.__name__, jitted.__doc__) == ("fn", "Docs.")
    assert typing.get_type_hints(jitted.fn)["x"] is int


def test_methods_can_be_jitted():
    class Model:
        scale = 3.0

        @fc.jit(static_argnums=0)
        def apply(self, x):
            return x * self.scale

    model = Model()
    np.testing.assert_array_equal(np.asarray(model.apply(X)), X * 3)
    np.testing.assert_array_equal(model.apply.fn(X), X * 3)
    assert model.apply.trace(X).lower().fingerprint == model.apply.lower(X).fingerprint
    assert (model.apply.__name__, str(inspect.signature(model.apply))) == ("apply", "(x)")
    assert "fc.jit apply" in repr(model.apply)


def test_jit_without_a_mesh_nests():
    double = fc.jit(lambda x: x * 2)
    outer = fc.jit(lambda x: fc.all_reduce(double(x), "data"), mesh=MESH, in_specs=P("data"), out_specs=P())
    np.testing.assert_array_equal(np.asarray(outer(X)), 2 * X.reshape(4, 2, 4).sum(0))
    assert fc.grad(lambda x: np.sum(double(x)))(X).sum() == 2 * X.size


def test_donated_arrays_are_given_up_and_nothing_is_lost_on_error():
    step = fc.jit(lambda x, y: (x + y, y), mesh=MESH, in_specs=P("data"), out_specs=P("data"), donate_argnums=0)
    x, y = (fc.device_put(X, MESH, P("data")) for _ in range(2))
    for _ in range(3):  # through the first call and the fast path
        x, _ = step(x, y)
    np.testing.assert_array_equal(np.asarray(x), X * 4)
    gone = x
    x, _ = step(x, y)
    assert gone.is_deleted()
    assert "deleted" in repr(gone)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="donated"):
            step(gone, y)
    with pytest.raises(RuntimeError, match="donated"):
        np.asarray(gone)
    with pytest.raises(RuntimeError, match="donated"):
        step(x, gone)
    assert not x.is_deleted()  # refused before anything was given up
    step(X, y)  # a NumPy array is the caller's: donating it does nothing


def test_donation_counts_call_positions():
    step = fc.jit(lambda k, x: x * k, static_argnums=0, donate_argnums=1)
    x = fc.device_put(X, fc.make_mesh({"d": 1}))
    step(2, x)
    assert x.is_deleted()
    y = fc.device_put(X, fc.make_mesh({"d": 1}))
    fc.jit(lambda k, y: y * k, static_argnums=0, donate_argnums=-1)(2, y)
    assert y.is_deleted()
    z = fc.device_put(X, fc.make_mesh({"d": 1}))
    for options in ({"donate_argnums": -1}, {"static_argnums": -1}):  # the last parameter, not the call's last argument
        np.testing.assert_array_equal(np.asarray(fc.jit(lambda z, k=2: z * k, **options)(z)), X * 2)
    assert not z.is_deleted()


# ------------------------------------------------------------------ outputs


def test_results_never_share_memory_with_arguments_or_constants():
    table = np.ones((8, 4), np.float32)

    def fn(x, y):
        return x, x[:1], fc.permute(y, "data", pairs=[(i, i) for i in range(4)]), table, np.transpose(x), y.reshape(-1)

    specs = (P(), P(), P("data"), P(), P(), P("data"))
    x, y = X.copy(), X.copy()
    out = fc.jit(fn, mesh=MESH, in_specs=(P(), P("data")), out_specs=specs)(x, y)
    x[...], y[...], table[...] = -1, -1, -1
    for ours, expected in zip(out, (X, X[:1], X, np.ones((8, 4)), X.T, X.reshape(-1)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), expected)


def test_an_unvarying_result_may_be_laid_out_over_an_axis():
    out = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=MESH, in_specs=P("data"), out_specs=P(("data", "model")))(X)
    np.testing.assert_array_equal(np.asarray(out), np.tile(X.reshape(4, 2, 4).sum(0), (8, 1)))


def test_constants_none_and_scalars_can_be_returned():
    a, b, c = fc.jit(lambda x: (3.0, None, np.float32(2)), mesh=MESH, in_specs=P())(X)
    assert (float(a), b, float(c)) == (3.0, None, 2.0)
    assert fc.jit(lambda: {"one": 1})()["one"].item() == 1


def test_floating_point_warnings_are_silent_inside_only():
    with np.errstate(all="raise"):
        out = fc.jit(lambda x: np.log(x) / x)(np.zeros(2))
        assert np.isnan(np.asarray(out)).all() or np.isinf(np.asarray(out)).all()
        with pytest.raises(FloatingPointError):
            np.log(np.zeros(2))


# ------------------------------------------------------------------ the local runtime


def test_what_does_not_vary_is_computed_once(monkeypatch):
    calls = []
    from funccoll.primitives.elementwise import UFUNCS

    sin = UFUNCS[np.sin]
    object.__setattr__(sin, "reference", lambda x, **kw: (calls.append(x.shape), np.sin(x, **kw))[1])
    try:
        step = fc.jit(
            lambda x, w: np.sum(x) * np.sin(w),
            mesh=MESH, in_specs=(P("data"), P()), out_specs=P("data"),
        )  # fmt: skip
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


@pytest.mark.parametrize("call", [
    lambda: fc.jit(_missing)(X), lambda: fc.jit(_missing).lower(X), lambda: fc.jit(fc.vmap(_missing))(X),
    lambda: fc.jit(fc.grad(lambda x: np.sum(_missing(x))))(X),
    lambda: fc.jit(lambda x: fc.pure_callback(_missing, fc.ArrayType(X.shape, X.dtype), x))(X),
    lambda: fc.jit(lambda x: fc.scan(lambda c, _: (_missing(c), None), x, None, length=2)[0])(X),
])  # fmt: skip
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
        "pytree": (lambda: pick({"x": X}, bad), IndexError), "number": (lambda: pick({"x": X}, 99), IndexError),
        "devices": (lambda: split(X, bad), IndexError), "singular": (lambda: solve(np.zeros((2, 2))), np.linalg.LinAlgError),
        "outside": (lambda: fc.all_reduce(X, "i"), MeshError), "positional": (lambda: fc.permute(X, "i", [(0, 1)]), MeshError),
        "keyword": (lambda: fc.all_reduce(X, axis_name="i"), UnsupportedError),
        "index": (lambda: fc.axis_index("i"), MeshError),
        "eager at": (lambda: fc.at(X)[99].set(0.0), ShapeError),
        "gradient": (lambda: fc.grad(lambda w: np.sum(w * 2))(np.arange(3)), DTypeError),
        "vmap": (lambda: fc.vmap(lambda x, y: x + y)(X, X[:, :3]), ShapeError),
        "decorator": (lambda: fc.jit(mesh=both, in_specs=P("model"))(np.sum), MeshError),
    }  # fmt: skip
    ours = lambda error: [f for f in traceback.extract_tb(error.__traceback__)
                          if f.filename.startswith(("<funccoll", str(Path(fc.__file__).parent)))]  # fmt: skip
    for name, (call, kind) in cases.items():
        with pytest.raises(kind) as caught:
            call()
        assert not ours(caught.value), name
        assert "test_jit.py:" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ())), name
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
