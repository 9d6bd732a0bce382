"""jit: caching, stages, specs, static and donated arguments, and what the local runtime computes how often."""

import inspect
import typing

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.compiler.jit import Compiled, Jitted, Lowered, TracedFunction
from funccoll.errors import Source

pytestmark = pytest.mark.covers("jit")

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
