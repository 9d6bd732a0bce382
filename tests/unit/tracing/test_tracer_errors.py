"""Every refusal inside a traced function: values asked for, assignments, functions not traced, leaks, gradients."""

import copy
import math
import pickle
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll.arrays import array
from funccoll.errors import (
    ConcretizationError,
    DTypeError,
    InPlaceError,
    LeakedTracerError,
    MissingMethodError,
    ShapeError,
    TraceError,
    UnsupportedError,
)
from funccoll.tracing import tracer
from tests.support.groups import in_groups
from tests.support.misuse import LINE, X, check_paths, run, wrong

pytestmark = pytest.mark.covers("errors")

# ---------------------------------------------------------------- values that a trace does not have


def python_if(x):
    if x[0] > 0:
        return x
    return -x


def python_while(x):
    while x[0] > 0:
        x = x - 1
    return x


def python_and(x):
    return (x[0] > 0) and x


def python_not(x):
    return not x[0]


def python_assert(x):
    assert x[0] > 0
    return x


def python_in(x):
    return 1.0 in x


@pytest.mark.parametrize("body", [python_if, python_while, python_and, python_not, python_assert, python_in])
def test_python_control_flow_points_into_the_function(body):
    with pytest.raises(ConcretizationError) as caught:
        run(body)
    start = body.__code__.co_firstlineno
    assert caught.value.source.line == start + 1
    assert f"test_tracer_errors.py:{start + 1} in {body.__name__}" in str(caught.value)
    remedies = ("np.where(condition, a, b)", "fc.cond(condition,", "fc.while_loop(test,", "&, | and ~", "static argument")
    for part in ("if, while, and, or, not, assert", "{data}", *remedies):
        assert part in str(caught.value)


VALUES = {
    "float()": lambda x: float(x[0]),
    "int()": lambda x: int(x[0]),
    "complex()": lambda x: complex(x[0]),
    ".item()": lambda x: x[0].item(),
    ".tolist()": lambda x: x.tolist(),
    ".tobytes()": lambda x: x.tobytes(),
    "index()": lambda x: range(x[0].astype(np.int32)),
    "fc.asarray(a)[i] in place of a[i]": lambda x: np.arange(4.0)[x[0].astype(np.int32)],
    "use fc.asarray(values)[i]": lambda x: [1.0, 2.0][x[0].astype(np.int32)],
    "np.asarray": lambda x: np.asarray(x),
    "fc.asarray([...])": lambda x: np.array([x[0], x[1]]),
    "np.asarray, or a library": lambda x: np.random.default_rng(0).permutation(x),
    "float() needs": lambda x: math.exp(x[0]),
    "a format": lambda x: f"{x[0]:.3f}",
    "pickle": lambda x: pickle.dumps(x),
    "fc.fori_loop(0, n, body, init) in place of range(n)": lambda x: range(x[0].astype(np.int32)),
    "fc.fori_loop(0, n, body, init) in place of range(int(n))": lambda x: range(int(x[0])),
    "fc.scan(body, init, xs)": lambda x: ["row"][x[0].astype(np.int32)],
    "fc.at(a)[i].set(x)": lambda x: np.zeros(2).__setitem__(slice(None), x),
}


@pytest.mark.parametrize("part", VALUES)
def test_values_are_not_known_while_tracing(part):
    with pytest.raises(ConcretizationError) as caught:
        run(VALUES[part])
    message = str(caught.value)
    assert part in message
    assert "arrays have types and no values" in message
    assert caught.value.source.line == VALUES[part].__code__.co_firstlineno
    assert f"test_tracer_errors.py:{caught.value.source.line}" in message


PRINTS = {
    "a format": lambda loss: print(f"{loss:.3f}"),
    "float()": lambda loss: print(float(loss)),
    ".item()": lambda loss: print(loss.item()),
    ".tolist()": lambda loss: print(loss.tolist()),
}


@pytest.mark.parametrize("what", PRINTS)
def test_a_value_that_is_printed_while_tracing_names_debug_print_first(what):
    with pytest.raises(ConcretizationError) as caught:
        run(lambda x: PRINTS[what](np.sum(x)))
    _, _, remedy = str(caught.value).split("\n")[0].split(". ", 2)
    assert remedy.startswith('Print it with fc.debug.print("{:.3f}", x)')


@pytest.mark.parametrize(
    "body",
    [
        lambda x, n: x.reshape(n),
        lambda x, n: list(n),
        lambda x, n: np.sum(x, axis=n),
        lambda x, n: np.split(x, n),
    ],
)
def test_a_traced_number_where_a_known_one_is_needed(body):
    with pytest.raises(TraceError, match=r"a traced number of type i64\[\].*static arg.*fc\.fori_loop\(0, n, body, init\)"):
        fc.jit(body)(np.arange(4.0), np.int64(2))


def test_what_needs_no_value_works():
    def body(x):
        assert len(x) == 2
        assert x.shape == (2,) and x.dtype == np.float32 and x.varying == {"data"}
        assert str(x) == repr(x) == f"{x}" == "Tracer(f32[2]{data})"
        assert copy.deepcopy(x) is x and copy.copy(x) is x
        assert not hasattr(x, "numpy") and not hasattr(x, "sort")
        first, second = x
        return np.stack([first, second])

    np.testing.assert_array_equal(run(body), X)


# ---------------------------------------------------------------- assignment


def set_item(x):
    x[0] = 1


def add_out(x):
    np.add(x, 1, out=np.zeros(2, np.float32))


def ndarray_iadd(x):
    y = np.zeros(2, np.float32)
    y += x


def sum_out(x):
    np.sum(x, out=np.zeros((), np.float32))


def clip_out_by_position(x):
    np.clip(x, 0, 1, np.zeros(2, np.float32))


def dot_out_by_position(x):
    np.dot(x, x, np.zeros((), np.float32))


@pytest.mark.parametrize("body", [set_item, add_out, ndarray_iadd, sum_out, clip_out_by_position, dot_out_by_position])
def test_in_place(body):
    with pytest.raises(InPlaceError) as caught:
        run(body)
    last = body.__code__.co_firstlineno + (2 if body is ndarray_iadd else 1)
    assert f"test_tracer_errors.py:{last} in {body.__name__}" in str(caught.value)
    assert "returned value" in str(caught.value) or "fc.at(x)" in str(caught.value)


def test_assignment_into_a_numpy_array_names_the_remedy():
    def fill(x):
        out = np.zeros(2)
        out[0] = x[0]  # NumPy asks for float(x[0]), and puts a ValueError over the answer
        return out

    for traced in (run, lambda f: fc.grad(lambda x: f(x).sum())(X)):
        with pytest.raises(ConcretizationError, match=r"out = fc\.at\(out\)\[i\]\.set\(x\)") as caught:
            traced(fill)
        assert f"test_tracer_errors.py:{fill.__code__.co_firstlineno + 2} in fill" in str(caught.value)
        assert caught.value.__suppress_context__


def test_augmented_assignment_to_a_traced_name_is_no_assignment():
    def body(x):
        y = x
        y += 1
        return y * x

    np.testing.assert_array_equal(run(body), (X + 1) * X)


# ---------------------------------------------------------------- what is not traced


def test_unsupported_functions_say_what_to_write():
    wrong(UnsupportedError, lambda: run(lambda x: np.polymul(x, x)), "np.polymul", "Write np.convolve(x, y) in", "outside the")
    wrong(UnsupportedError, lambda: run(lambda x: np.frompyfunc(abs, 1, 1)(x)), "the ufunc abs")
    wrong(UnsupportedError, lambda: run(lambda x: np.roots(x)), "np.roots", "fc.supported_functions()")
    wrong(UnsupportedError, lambda: run(lambda x: np.add.reduceat(x, [0])), "np.add.reduceat")
    wrong(InPlaceError, lambda: run(lambda x: np.add.at(x, 0, 1)), "np.add.at", "fc.at(x)[index].add(value)")
    wrong(UnsupportedError, lambda: run(lambda x: np.add(x, 1, where=x > 0)), "np.add", "where")
    for function in (np.nonzero, np.unique, np.argwhere):
        remedy = "fc.unique(x, size=n)" if function is np.unique else "np.where(condition, x, y)"
        wrong(UnsupportedError, lambda: run(function), f"np.{function.__name__}", "depends on values", remedy)
    wrong(InPlaceError, lambda: run(lambda x: np.fill_diagonal(np.outer(x, x), 0)), "np.fill_diagonal", "fc.at(x)[index].set")
    wrong(InPlaceError, lambda: run(lambda x: np.copyto(np.zeros(2), x)), "np.copyto", "fc.at(a)[index].set(x)")
    wrong(UnsupportedError, lambda: run(lambda x: np.where(x > 0)), "depends on values", "np.where(condition, x, y)")
    wrong(UnsupportedError, lambda: run(lambda x: x[x > 0]), "mask", "np.where(mask, x, 0)")
    wrong(UnsupportedError, lambda: run(lambda x: x[: x[0].astype(int)]), "slice", "x[start + np.arange(size)]")


def test_unsupported_methods():
    for name in ("fill", "sort", "put", "partition", "resize"):
        wrong(MissingMethodError, lambda: run(lambda x: getattr(x, name)(0)), f".{name}", "in place", "fc.at(x)")
    for name in ("flat", "tofile", "ctypes"):
        wrong(MissingMethodError, lambda: run(lambda x: getattr(x, name)), f".{name}", "cannot be traced")
    wrong(MissingMethodError, lambda: run(lambda x: x.at[0].set(1)), "fc.at(x)[index].set(value)")
    wrong(MissingMethodError, lambda: run(lambda x: fc.at(x)[0].divide(2)), ".divide", ".add")
    assert issubclass(MissingMethodError, AttributeError)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        run(lambda x: x.nonsense())


def test_other_type_errors_stay_as_they_are():
    with pytest.raises(TypeError) as caught:
        fc.jit(lambda x: x + len(3))(X)
    assert not hasattr(caught.value, "__notes__")


@in_groups(("name", "here"), {**tracer._ELSEWHERE, "permute": "np.transpose(x, axes)"}.items())
def test_methods_of_torch_say_what_they_are_here(name, here):
    wrong(MissingMethodError, lambda: run(lambda x: getattr(x, name)()), f"a traced array has no .{name}; here it is {here}.")
    assert not run(lambda x: x + hasattr(x, name))[0] and not hasattr(tracer.Tracer, name)
    check_paths(here)


@pytest.mark.parametrize(("name", "here"), {**array._ELSEWHERE, "numpy": "np.asarray(arr)"}.items())
def test_methods_of_other_libraries_arrays_say_what_they_are_here(name, here):
    arr: Any = fc.asarray(np.ones(2))
    wrong(MissingMethodError, lambda: getattr(arr, name)(), f"an Array has no .{name}; here it is {here}.")
    assert not hasattr(arr, name)
    check_paths(here)


def test_arguments_that_do_not_fit_show_the_call():
    wrong(ShapeError, lambda: run(lambda x: np.sum(x, axis=4)), "np.sum(f32[2]{data}, axis=4)", "out of bounds")
    wrong(ShapeError, lambda: run(lambda x: x.transpose(0, 1)), "np.transpose(f32[2]{data}", "out of bounds")
    wrong(UnsupportedError, lambda: run(lambda x: x.sum("data")), "np.sum(f32[2]{data}", "'str'")
    wrong(ShapeError, lambda: run(lambda x: x.reshape(7)), "(2,)", "(7,)")
    wrong(ShapeError, lambda: run(lambda x: x @ np.ones(5)), "matmul", "(2,) @ (5,)", "sharded")
    wrong(ShapeError, lambda: run(lambda x: x + np.ones(5)), "add", "(2,), (5,)", "broadcast", "Is one of them sharded")
    wrong(ShapeError, lambda: run(lambda x: np.einsum("i->k", x)), "'i->k'", "'k'")
    wrong(ShapeError, lambda: run(lambda x: x[7]), "index 7", "(2,)")
    wrong(ShapeError, lambda: run(lambda x: x[0, 0]), "too many indices", "(2,)")
    wrong(ShapeError, lambda: run(lambda x: x[:1.5]), "slice", "integers or None")
    wrong(ShapeError, lambda: run(lambda x: x["a":]), "slice", "integers or None")
    wrong(ShapeError, lambda: run(lambda x: x[::0]), "slice", "must not be 0")
    wrong(DTypeError, lambda: run(lambda x: x.astype("junk")), "astype('junk')")
    wrong(DTypeError, lambda: run(lambda x: x & 1), "np.bitwise_and", "float32")
    wrong(ShapeError, lambda: run(lambda x: fc.random.normal(0, (2,))), "fc.random.key(seed)", "i64[]")
    wrong(ShapeError, lambda: run(lambda x: fc.random.normal(fc.random.key(0), None)), "tuple of integers", "None")


# ---------------------------------------------------------------- leaks


class Keeper:
    kept = None


def test_a_leaked_tracer_says_where_it_was_made():
    kept, keeper = [], Keeper()

    def body(x):
        y = x * 2
        kept.append(y)
        keeper.kept = x
        return y

    run(body)
    made = f"test_tracer_errors.py:{body.__code__.co_firstlineno + 1} (body)"
    wrong(LeakedTracerError, lambda: kept[0] + 1, "f32[2]{data}", f"made at {made}", "Return it", line=0)
    wrong(LeakedTracerError, lambda: keeper.kept + 1, "an argument of body", "f32[2]{data}", line=0)
    wrong(LeakedTracerError, lambda: np.sum(kept[0]), "made at", line=0)
    wrong(LeakedTracerError, lambda: float(np.sum(kept)), "made at", line=0)
    wrong(LeakedTracerError, lambda: float(kept[0]), "made at", line=0)
    wrong(LeakedTracerError, lambda: run(lambda x: x + kept[0]), "made at", line=0)
    wrong(LeakedTracerError, lambda: fc.grad(lambda x: np.sum(x * kept[0]))(X[:2]), "made at", line=0)
    wrong(LeakedTracerError, lambda: run(lambda x: kept[0]), "made at")
    wrong(LeakedTracerError, lambda: fc.jit(lambda x: x, mesh=LINE)(kept[0]), "made at", line=0)


def test_a_tracer_leaked_by_grad():
    kept = []

    def loss(w):
        kept.append(w * 3)
        return np.sum(kept[0])

    fc.grad(loss)(X)
    wrong(LeakedTracerError, lambda: kept[0] * 2, f"test_tracer_errors.py:{loss.__code__.co_firstlineno + 1} (loss)")


def test_a_failed_trace_leaves_nothing_behind():
    for _ in range(2):
        with pytest.raises(ConcretizationError):
            run(lambda x: float(x[0]))
        np.testing.assert_array_equal(run(lambda x: x + 1), X + 1)
        assert np.add(X, 1).dtype == np.float32
        wrong(fc.FunccollError, lambda: fc.axis_index("data"), "outside a mesh")


# ---------------------------------------------------------------- arguments that are no arrays of ours


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (np.array([object()]), "Python objects"),
        (np.array(["a"]), "text"),
        (np.array([b"a"]), "text"),
        ("a", "text"),
        (np.array(["2020-01-01"], "M8[D]"), "astype(np.int64)"),
        (np.zeros(1, "m8[s]"), "astype(np.int64)"),
        (np.zeros(2, np.longdouble), "astype(np.float64)"),
        (np.zeros(2, np.clongdouble), "astype(np.complex128)"),
        (np.zeros(2, [("a", "f4")]), "dict of arrays"),
    ],
)
def test_dtypes_that_are_not_carried(value, part):
    f = fc.jit(lambda x, batch: x)
    dtype = str(np.asarray(value).dtype)
    wrong(DTypeError, lambda: f(X, {"y": value}), "batch['y'] of <lambda>", dtype, part, "Supported: bool", line=0)
    wrong(DTypeError, lambda: fc.device_put(value, LINE), "device_put: x", part)


def test_values_that_are_no_arrays():
    f = fc.jit(lambda batch: batch)
    for value in (object(), np.sin, {1, 2}):
        wrong(TraceError, lambda: f({"y": value}), "batch['y'] of <lambda>", type(value).__name__, "not an array")
        wrong(TraceError, lambda: fc.device_put(value, LINE), "device_put: x", "not an array")
    wrong(DTypeError, lambda: f(2**70), "batch of <lambda>", str(2**70), "64 bits")
    wrong(ShapeError, lambda: fc.device_put([[1], [1, 2]], LINE), "device_put: x", "inhomogeneous")
    wrong(TraceError, lambda: f(np.ma.array([1.0, 2.0], mask=[0, 1])), "masked", "filled")
    wrong(TraceError, lambda: fc.device_put(np.ma.array([1.0]), LINE), "masked")
    masked = np.ma.array([1.0, 2.0], mask=[0, 1])
    for use in (fc.grad(np.sum), fc.nn.softmax, lambda m: fc.vjp(np.sin, m), lambda m: fc.jit(lambda x: x + m)(X[:2])):
        with pytest.raises(TraceError, match="mask would be lost"):
            use(masked)
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.asmatrix(X[:2])
    step = fc.jit(lambda x: x * x)
    step(X[:2])
    for use in (fc.grad(np.sum), fc.nn.softmax, lambda m: fc.jit(lambda x: x + m)(X[:2]), step, fc.process_allgather):
        with pytest.raises(TraceError, match=r"np\.matrix: its x \* y is a product of matrices.*np\.asarray\(x\)"):
            use(matrix)
    wrong(TraceError, lambda: fc.process_allgather(None), "process_allgather", "NoneType")


def test_a_thread_that_imports_numpy_ma_disturbs_no_trace(monkeypatch):
    """The module is there, and empty, before its classes are: the first np.unique of a process imports it."""
    monkeypatch.setitem(sys.modules, "numpy.ma", ModuleType("numpy.ma"))
    assert (fc.jit(lambda x: x + np.ones(3))(np.zeros(3)) == 1).all()
