"""Every refusal of meshes, specs, collectives and jit: what, where (the user's line), which shapes and axes, the remedy."""

import dataclasses
import pickle
import re
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import (
    DeletedArrayError,
    DTypeError,
    MeshError,
    PlannedError,
    PytreeError,
    ShapeError,
    ShardingError,
    TraceError,
    UnsupportedError,
    VaryingError,
)
from tests.support.misuse import LINE, X, run, wrong

pytestmark = pytest.mark.covers("errors")

# ---------------------------------------------------------------- axes and specs


def test_unknown_axis_in_a_spec_names_it_at_the_line_of_jit():
    def call():
        fc.jit(lambda x: x, mesh=LINE, in_specs=(P("rows"),), out_specs=P())

    wrong(MeshError, call, "unknown axis", "P('rows')", "in_specs", "{'data': 4}", "['data']", line=1)
    wrong(MeshError, lambda: run(lambda x: x, out=P("rows")), "'rows'", "out_specs", "{'data': 4}")
    wrong(MeshError, lambda: fc.device_put(X, LINE, P("rows")), "unknown axis", "'rows'", "add 'rows' to the mesh")
    wrong(MeshError, lambda: fc.Sharding(LINE, P("rows")), "'rows'", "{'data': 4}")


def test_spec_without_a_mesh_asks_for_the_mesh():
    wrong(MeshError, lambda: fc.jit(lambda x: x, in_specs=(P("data"),)), "'data'", "mesh=fc.make_mesh", "forgotten")


def test_unknown_axis_in_a_collective_points_into_the_body():
    def call():
        def body(x):
            y = x + 1
            return fc.all_reduce(y, "rows")

        return run(body, out=P())

    wrong(MeshError, call, "all_reduce", "unknown axis 'rows'", "{'data': 4}", line=3)


@pytest.mark.parametrize("axis", [None, 0, 1.5, [["data"]], P(None, "data"), LINE, {"data": 4}])
def test_an_axis_that_is_no_name(axis):
    wrong(MeshError, lambda: run(lambda x: fc.all_reduce(x, axis)), "all_reduce", "name of a mesh axis", "{'data': 4}")


def test_axes_given_twice_or_not_at_all():
    wrong(ShardingError, lambda: P("data", "data"), "'data' twice", "only one dimension", "None")
    wrong(ShardingError, lambda: P(("data", "model"), "data"), "'data' twice")
    wrong(MeshError, lambda: run(lambda x: fc.all_reduce(x, ("data", "data"))), "twice")
    wrong(MeshError, lambda: run(lambda x: fc.all_reduce(x, ())), "no axis was given", "{'data': 4}")


@pytest.mark.parametrize("entry", [0, 1.5, ("data", 1), (("data",),), {"data"}])
def test_an_entry_of_a_spec_that_is_no_axis(entry):
    wrong(ShardingError, lambda: P(None, entry), "P entry 1", "tuple", 'P("data")')


def test_what_stands_in_place_of_a_spec():
    wrong(ShardingError, lambda: fc.jit(lambda x: x, mesh=LINE, in_specs=("data",)), "in_specs", "fc.P('data')")
    wrong(ShardingError, lambda: fc.jit(lambda x: x, mesh=LINE, out_specs="data"), "out_specs", "fc.P('data')")
    wrong(ShardingError, lambda: fc.jit(lambda x: x, mesh=LINE, in_specs=(3,)), "in_specs", "3 is not a partition spec")
    wrong(ShardingError, lambda: fc.device_put(X, LINE, "data"), "fc.P('data')")
    wrong(ShardingError, lambda: fc.device_put(X, LINE, ("data", None)), "fc.P('data', None)")
    wrong(ShardingError, lambda: fc.device_put(X, fc.Sharding(LINE, P("data")), P()), "has a spec already")
    wrong(ShardingError, lambda: fc.Sharding(LINE, "data"), "fc.P('data')")
    wrong(ShardingError, lambda: fc.Sharding(None, P()), "fc.make_mesh")


def test_a_dimension_that_does_not_divide_names_the_argument():
    step = fc.jit(lambda params, batch: params, mesh=LINE, in_specs=(P(), P("data")), out_specs=P())

    def call():
        step(X, {"x": np.zeros((6, 3)), "y": np.zeros(8)})

    wrong(ShardingError, call, "batch['x'] of <lambda>", "(6, 3)", "dimension 0", "size 6", "'data'", "Pad it to 8", line=1)
    wrong(ShapeError, lambda: run(lambda x: fc.reduce_scatter(x, "data")), "(2,)", "4 does not divide", "Pad it to 4")
    wrong(ShapeError, lambda: run(lambda x: fc.all_to_all(x, "data", split_dim=0, concat_dim=0)), "all_to_all", "(2,)")


@pytest.mark.parametrize(
    ("axes", "words"), [("data", "axis 'data' (size 2)"), (("data", "model"), "axes 'data', 'model' (size 4)")]
)
def test_axes_stand_in_messages_as_words(axes, words):
    both = fc.make_mesh({"data": 2, "model": 2})
    x, short = np.ones((4, 2)), words.partition(" (")[0]

    def told(kind, body, words):
        with pytest.raises(kind, match=re.escape(words)):
            run(body, x, spec=P(axes), out=P(), mesh=both)

    told(ShapeError, lambda x: fc.reduce_scatter(x[:1], axes), f"reduce_scatter over {words}: dimension 0 of shape (1, 2) has")
    told(VaryingError, lambda x: fc.own_slice(x, axes), f"own_slice over {short}: the operand")
    told(VaryingError, lambda x: fc.grad_hook(x, lambda g: g, axes), f"grad_hook over {short}: the value")


def test_a_value_that_is_not_an_array_is_told_by_its_type():
    """Its text may be of many lines, and was cut in the middle of an array."""

    @dataclasses.dataclass
    class Held:
        w: Any

    held = Held(np.ones((8, 8)))
    text = wrong(TraceError, lambda: fc.jit(lambda s: s.w)(held), "s of <lambda> is of type Held, which is not an array. Pass")
    assert "\n  at " in text and text.count("\n") == 1
    wrong(TraceError, lambda: fc.device_put(held, LINE), "device_put: x is of type Held, which")
    wrong(TraceError, lambda: run(lambda x: fc.all_reduce([x, held], "data")), "the operand holds a value of type Held, which")
    wrong(TraceError, lambda: run(lambda x: fc.all_reduce([x, {1, 2}], "data")), "holds a value {1, 2} of type set")
    wrong(TraceError, lambda: fc.jit(lambda s: s)({1, 2}), "s of <lambda> is {1, 2} of type set, which is not an array")


def test_an_instance_as_an_argument_is_no_static_argument():
    """Its attributes would be those of the first call, silently: the remedies are those that follow an assignment."""

    class Model:
        def __init__(self, scale: float):
            self.scale = scale

        @fc.jit
        def apply(self, x):
            return x * self.scale

    model = Model(2.0)
    text = wrong(TraceError, lambda: model.apply(np.ones(2)), "self of apply is of type Model, which is not an array.")
    assert "Make pytrees of its instances (fc.tree.register(Model, flatten, unflatten)), or jit a function of the" in text
    assert "As a static argument it would keep the attributes of the first call." in text
    inner = fc.jit(lambda x, scale: x * scale)  # what the sentences say, done
    for scale in (2.0, 100.0):
        model.scale = scale
        np.testing.assert_array_equal(inner(np.ones(2), model.scale), [scale, scale])
    fc.tree.register(Model, lambda m: ([m.scale], None), lambda _, children: Model(*children))
    for scale in (2.0, 100.0):
        model.scale = scale
        np.testing.assert_array_equal(model.apply(np.ones(2)), [scale, scale])
    wrong(TraceError, lambda: fc.jit(lambda f: f)(lambda: 0), "Pass arrays, numbers and pytrees; a text, a function or another")
    text = wrong(TraceError, lambda: fc.device_put(Model(1.0), LINE), "which is not an array. Pass an array or a number.")
    assert "static" not in text


def test_in_a_job_a_dimension_that_does_not_divide_may_be_of_a_ranks_own_block():
    mesh = fc.Mesh({"data": 4}, range(4), 1)
    step = fc.jit(lambda x: x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    own = "If it is this rank's own block, pass fc.from_local(x, mesh, P('data')). For a global value: pad it to 4, or use None"
    sizes = "do not divide evenly (into 1, 1, 0, 0), and in a function all devices have one shape. "
    wrong(ShardingError, lambda: step(X[:2]), "x of <lambda> of shape (2,)", sizes + own)
    whole = fc.device_put(X[:2], LINE)  # an Array has a global shape: its blocks are not meant
    assert "from_local" not in wrong(ShardingError, lambda: step(whole), sizes + "Pad it to 4")


def test_a_collective_without_in_specs_asks_for_them():
    both = fc.make_mesh({"a": 2, "b": 2})
    equal = "all_reduce over axis 'data': the operand f32[8] does not vary over it. No in_specs were given to fc.jit, so every "
    asked = "argument of <lambda> is whole on each device: was in_specs=P('data') forgotten? If not, drop the collective."
    wrong(VaryingError, lambda: fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=LINE)(X), equal + asked)

    def inside():
        fc.jit(fc.grad(lambda x: np.sum(fc.all_gather(x, ("a", "b")))), mesh=both)(X)  # in a trace of its own

    wrong(VaryingError, inside, "in_specs=P(('a', 'b')) forgotten?", line=1)
    given = "Drop the collective, or use fc.pvary(x, 'data')"
    assert "in_specs" not in wrong(VaryingError, lambda: run(lambda x: fc.all_reduce(x, "data"), spec=P()), given)
    no_arguments = lambda: fc.jit(lambda: fc.all_reduce(np.float32(1), "data"), mesh=LINE)()
    assert "in_specs" not in wrong(VaryingError, no_arguments, given)


def test_more_spec_entries_than_dimensions():
    wrong(ShardingError, lambda: run(lambda x: x, spec=P("data", None)), "x of <lambda>", "(8,)", "2 entries", "Drop")
    wrong(ShardingError, lambda: run(lambda x: np.sum(x), out=P("data")), "result of <lambda>", "0 dimension", "Drop")
    wrong(ShardingError, lambda: fc.from_local([1.0] * 4, LINE, P("data")), "from_local", "0 dimension")


def test_lists_of_numbers_that_were_meant_as_arrays():
    def step(batch):
        return batch

    rows = [[1, 2], [3, 4], [5, 6], [7, 8]]
    said = "is a list of numbers, each of which is an argument of its own, and P('data') is for the dimensions of one array"
    wrong(ShardingError, lambda: run(step, rows), f"batch of step {said}. Pass np.asarray(batch).")
    wrong(ShardingError, lambda: run(step, {"x": X, "y": (rows, [1])}), "batch['y'] of step is a tuple of numbers")
    wrong(ShardingError, lambda: run(step, [X, rows[0]]), f"batch[1] of step {said}. Pass np.asarray(batch[1]).")
    wrong(ShardingError, lambda: run(step, [X, 1]), "batch[1] of step has shape ()", "Drop the entries")
    assert [*map(int, run(step, rows[0], spec=P(), out=P()))] == rows[0]


def test_one_number_from_each_device_needs_a_dimension():
    wrong(ShardingError, lambda: run(lambda x: x.sum(), out=P("data")), "on each device", "P('data')", "return x[None]")
    wrong(DTypeError, lambda: fc.grad(lambda p: p["w"])({"w": 1.0, "n": 3}), "p['n'] has dtype int64", "argnums")


def test_out_specs_that_claim_replication():
    message = wrong(VaryingError, lambda: run(lambda x: (x, x), out=(P("data"), P())), "out_specs of <lambda>", "result[1]")
    for part in ("f32[2]{data}", "P()", "'data'", "fc.all_reduce", "fc.all_gather", "name 'data'"):
        assert part in message
    step = fc.jit(lambda x: x, mesh=LINE, in_specs=P("data"))

    def call():
        x = X + 1
        return step(x)

    wrong(VaryingError, call, "out_specs was not given", line=2)


# ---------------------------------------------------------------- meshes and the job


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", True, None])
def test_sizes_that_are_none(size):
    wrong(MeshError, lambda: fc.make_mesh({"data": size}), "'data'", repr(size), "at least 1")
    wrong(MeshError, lambda: fc.abstract_mesh({"data": size}), "'data'", repr(size))


@pytest.mark.parametrize("axes", [[4, 2], 4, None, "data", [("data", 4)]])
def test_a_mesh_from_something_else(axes):
    wrong(MeshError, lambda: fc.make_mesh(axes), '{"data": 4}', repr(axes))


def test_axis_names_that_are_none():
    wrong(MeshError, lambda: fc.make_mesh({0: 4}), "name 0", "string")
    wrong(MeshError, lambda: fc.make_mesh({"my axis": 4}), "'my axis'", "letters")


def test_devices_that_are_none():
    wrong(MeshError, lambda: fc.Mesh({"data": 2}, 2), "devices=2", "one integer id")
    wrong(MeshError, lambda: fc.Mesh({"data": 2}, ["a", "b"]), "one integer id")
    wrong(MeshError, lambda: fc.Mesh({"data": 2}, [0]), "2 places, and 1 devices")
    wrong(MeshError, lambda: fc.Mesh({"data": 2}, [0, 0]), "twice")


def test_looking_up_what_a_mesh_does_not_have():
    for call in (lambda: LINE["rows"], lambda: LINE.groups("rows"), lambda: LINE.axis_size("rows")):
        wrong(MeshError, call, "unknown axis 'rows'", "['data']")
    for call in (lambda: LINE[0], lambda: LINE.groups(None), lambda: LINE.groups(3)):
        wrong(MeshError, call, "by its name", "['data']")
    wrong(MeshError, lambda: LINE.coordinates(9), "device 9", "4 devices")
    wrong(MeshError, lambda: LINE.coordinates("a"), "device 'a'")
    wrong(MeshError, lambda: LINE.position({"data": 4}), "data=4", "size 4")
    wrong(MeshError, lambda: LINE.position({"rows": 0}), "'rows'")
    with pytest.raises(TypeError, match="not iterable"):
        list(LINE)


def test_a_mesh_that_does_not_fit_the_job(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert (fc.world_size(), fc.rank()) == (8, 3)
    wrong(MeshError, lambda: fc.make_mesh({"data": 4}), "{'data': 4}", "4 devices", "8 processes", "Start it with 4")


@pytest.mark.parametrize(("size", "rank"), [("two", "0"), ("0", "0"), ("-2", "0"), ("2", "2")])
def test_an_environment_that_is_no_job(monkeypatch, size, rank):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    wrong(MeshError, lambda: fc.make_mesh({"data": 2}), f"WORLD_SIZE={size!r}", f"RANK={rank!r}", "Unset both")


def test_an_abstract_mesh_does_not_run():
    abstract = fc.abstract_mesh({"data": 4})
    wrong(MeshError, lambda: run(lambda x: x, mesh=abstract), "no devices", "fc.make_mesh({'data': 4})")
    wrong(MeshError, lambda: fc.device_put(X, abstract, P("data")), "no devices", "fc.make_mesh({'data': 4})")
    wrong(MeshError, lambda: fc.from_local([X] * 4, abstract, P("data")), "no devices")


# ---------------------------------------------------------------- jit: options, arguments, results


def test_what_jit_does_not_take():
    wrong(TraceError, lambda: fc.jit(3, mesh=LINE), "takes a function", "not 3", "@fc.jit(mesh=mesh")
    wrong(TraceError, lambda: fc.jit(LINE), "takes a function")
    wrong(ShardingError, lambda: fc.jit(lambda x: x, mesh={"data": 4}), "fc.make_mesh", "{'data': 4}")
    for option in ("static_argnums", "donate_argnums"):
        for value in ("x", 1.5, None, True, (0, "x")):
            wrong(TraceError, lambda: fc.jit(lambda x: x, **{option: value}), option, repr(value), "positions")
        wrong(TraceError, lambda: fc.jit(lambda x: x, **{option: 5}), option, "5", "x")
    wrong(TraceError, lambda: fc.jit(lambda x: x, static_argnames="n"), "'n'", "x")
    wrong(TraceError, lambda: fc.jit(lambda x: x, static_argnames=0), "static_argnames=0", "names")
    wrong(TraceError, lambda: fc.jit(lambda x: x, static_argnums=0, donate_argnums=0), "both static and donated")


def test_specs_that_do_not_fit_the_arguments():
    two = fc.jit(lambda x, y: x, mesh=LINE, in_specs=(P("data"),), out_specs=P("data"))
    wrong(PytreeError, lambda: two(X, X), "in_specs of <lambda>", "1 entries", "2 argument", "one spec")
    three = fc.jit(lambda x: x, mesh=LINE, in_specs=(P("data"), P()), out_specs=P("data"))
    wrong(PytreeError, lambda: three(X), "in_specs", "2 entries", "1 argument")
    keys = fc.jit(lambda d: d["x"], mesh=LINE, in_specs=({"x": P("data"), "z": P()},), out_specs=P("data"))
    message = wrong(PytreeError, lambda: keys({"x": X, "y": X}), "in_specs[0]", "'x', 'z'", "'x', 'y'", "one P for")
    assert "array([" not in message
    wrong(PytreeError, lambda: run(lambda x: (x, x), out=(P("data"),)), "out_specs is a tuple of 1", "a tuple of 2")
    wrong(PytreeError, lambda: run(lambda x: x, out=(P("data"),)), "out_specs", "results have one value")


def test_results_that_are_no_arrays():
    for result in ("hi", object(), np.sin, fc.jit, {"a": [X, object()]}):
        wrong(TraceError, lambda: fc.jit(lambda x: result)(X), "<lambda> returned", "arrays, numbers, and pytrees")
    wrong(TraceError, lambda: fc.jit(lambda x: {"a": [x, object()]})(X), "result['a'][1]")
    wrong(DTypeError, lambda: fc.jit(lambda x: np.array(["a"]))(X), "result of <lambda>", "<U1")


def test_static_arguments_must_be_hashable():
    f = fc.jit(lambda x, n: x * n[0], static_argnums=1)
    wrong(TraceError, lambda: f(X, [2]), "static argument n of", "not hashable", "[2]", "tuple")
    g = fc.jit(lambda x, mode=None: x, static_argnames="mode")
    wrong(TraceError, lambda: g(X, mode={}), "static argument mode of", "not hashable")


def test_keywords_that_do_not_fit():
    wrong(TraceError, lambda: fc.jit(lambda x: x)(y=X), "missing a required argument: 'x'")

    def keyword_only(x, *, n):
        return x

    wrong(TraceError, lambda: fc.jit(keyword_only)(X, n=2), "keyword-only", "'n'", "static_argnames")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        fc.jit(lambda x, y: x)(X)


def test_jitted_functions_on_traced_arrays():
    inner = fc.jit(lambda y: y, mesh=LINE, in_specs=P("data"), out_specs=P("data"))
    wrong(TraceError, lambda: run(lambda x: inner(x)), "inside another function with a mesh", ".fn")
    wrong(TraceError, lambda: fc.jit(inner)(X), "jitted function with a mesh", "inside a traced function", ".fn")
    wrong(ShardingError, lambda: fc.grad(lambda x: np.sum(inner(x)))(X), "reduce_sum takes an Array f32[8]", "P('data')")
    wrong(TraceError, lambda: run(lambda x: fc.device_put(x, LINE, P("data"))), "device_put", "shard already")
    wrong(TraceError, lambda: run(lambda x: fc.from_local([x] * 4, LINE, P("data"))), "from_local: block 0", "shard")


def test_donated_arrays_are_gone():
    step = fc.jit(lambda x: x + 1, mesh=LINE, in_specs=(P("data"),), out_specs=P("data"), donate_argnums=0)
    arr = fc.device_put(X, LINE, P("data"))
    step(arr)
    assert arr.is_deleted()
    for use in (lambda: step(arr), lambda: np.asarray(arr), lambda: arr.shards, lambda: float(arr), lambda: arr + 1):
        wrong(DeletedArrayError, use, "f32[8]", "donated", "donate_argnums", "result")
    assert "deleted" in repr(arr)
    assert "deleted" in arr._repr_html_()


def test_a_compiled_function_checks_its_arguments():
    compiled = fc.jit(lambda x: x).lower(X).compile()
    wrong(ShapeError, lambda: compiled(X[:2]), "x of <lambda>", "float32[2]", "float32[8]")
    wrong(PytreeError, lambda: compiled(X, X), "structure", "args is a tuple of 2", "a tuple of 1", "compiles again")
    wrong(DTypeError, lambda: compiled("a"), "x of", "<U1")
    wrong(TraceError, lambda: compiled(object()), "x of", "not an array")


# ---------------------------------------------------------------- the exceptions themselves


def test_errors_travel_between_processes_unchanged():
    with pytest.raises(MeshError) as caught:
        fc.make_mesh({"data": 0})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is MeshError
    assert str(copy) == str(caught.value)
    assert copy.source == caught.value.source


def test_existing_handlers_keep_working():
    for kind, builtin in [
        (MeshError, ValueError),
        (ShardingError, ValueError),
        (ShapeError, ValueError),
        (PytreeError, ValueError),
        (DTypeError, TypeError),
        (VaryingError, TypeError),
        (TraceError, TypeError),
        (PlannedError, NotImplementedError),
        (DeletedArrayError, RuntimeError),
        (UnsupportedError, TypeError),
    ]:
        assert issubclass(kind, builtin)
        assert issubclass(kind, fc.FunccollError)
