"""Errors of collectives: the line, the axes, the shapes, what to do."""

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import DTypeError, MeshError, ShapeError, TraceError, UnsupportedError, VaryingError
from tests.support.misuse import X, run, wrong

pytestmark = pytest.mark.covers("errors")

OUTSIDE = {
    "all_reduce": lambda: fc.all_reduce(X, "data"),
    "all_gather": lambda: fc.all_gather(X, "data"),
    "permute": lambda: fc.permute(X, "data", pairs=[(0, 1)]),
    "broadcast": lambda: fc.broadcast(X, "data"),
    "barrier": lambda: fc.barrier("data"),
    "axis_index": lambda: fc.axis_index("data"),
    "axis_size": lambda: fc.axis_size("data"),
    "pvary": lambda: fc.pvary(X, "data"),
    "own_slice": lambda: fc.own_slice(X, "data"),
    "grad_hook": lambda: fc.grad_hook([X], lambda g: g, "data"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_collective_outside_a_mesh(name):
    wrong(MeshError, OUTSIDE[name], name, "outside a mesh", "fc.jit(fn, mesh=")


def test_a_collective_in_a_function_jitted_without_a_mesh():
    wrong(MeshError, lambda: fc.jit(lambda x: fc.all_reduce(x, "data"))(X), "outside a mesh", "mesh=")


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "reduce", "gather", "scatter"])
def test_a_collective_over_an_axis_its_operand_does_not_vary_over(name):
    collective = getattr(fc, name)
    wrong(
        VaryingError,
        lambda: run(lambda x: collective(x, "data"), spec=P()),
        name,
        "'data'",
        "f32[8]",
        "does not vary",
        "fc.pvary(x, 'data')",
        "Drop the collective",
        *(["fc.own_slice(x, 'data')"] if name in ("scatter", "reduce_scatter") else []),
    )


def test_own_slice_of_what_varies():
    wrong(VaryingError, lambda: run(lambda x: fc.own_slice(x, "data")), "f32[2]{data}", "varies over it", "fc.scatter")


@pytest.mark.parametrize("op", ["avg", "SUM", "", None, np.add, ["sum"]])
def test_an_unknown_op(op):
    wrong(UnsupportedError, lambda: run(lambda x: fc.all_reduce(x, "data", op=op)), "unknown op", repr(op), "sum, mean")


@pytest.mark.parametrize("root", [4, -1, "0", None, 1.0, True])
def test_a_root_that_does_not_exist(root):
    wrong(ShapeError, lambda: run(lambda x: fc.broadcast(x, "data", root=root)), f"root={root!r}", "0 to 3", "data")


def test_a_root_that_is_traced():
    wrong(ShapeError, lambda: run(lambda x: fc.broadcast(x, "data", root=x[0])), "root=Tracer", "integer")


@pytest.mark.parametrize("dim", [1, -2, None, "0", 0.0, True])
def test_a_dim_that_does_not_exist(dim):
    wrong(ShapeError, lambda: run(lambda x: fc.all_gather(x, "data", dim=dim)), f"dim={dim!r}", "(2,)", "-1 to 0")


def test_split_and_concat_dims_have_their_own_names():
    wrong(ShapeError, lambda: run(lambda x: fc.all_to_all(x, "data", split_dim=7, concat_dim=0)), "split_dim=7")
    wrong(ShapeError, lambda: run(lambda x: fc.all_to_all(x, "data", split_dim=0, concat_dim=7)), "concat_dim=7")
    wrong(ShapeError, lambda: run(lambda x: fc.all_gather(x[0], "data")), "dim=0", "()", "no dimensions")


@pytest.mark.parametrize(
    ("pairs", "part"),
    [
        ([(0, 9)], "destination 9"),
        ([(-1, 0)], "source -1"),
        ([(0, 1), (2, 1)], "destination appears twice"),
        ([(0, 1), (0, 2)], "source appears twice"),
        (3, "[(0, 1), (1, 0)]"),
        ([0, 1], "[(0, 1), (1, 0)]"),
        ({0: 1}, "[(0, 1), (1, 0)]"),
        ([(0.5, 1)], "[(0, 1), (1, 0)]"),
        ("ab", "[(0, 1), (1, 0)]"),
        (None, "permute"),
    ],
)
def test_pairs_that_are_none(pairs, part):
    wrong(ShapeError, lambda: run(lambda x: fc.permute(x, "data", pairs=pairs)), "permute", part)


def test_operands_that_are_no_arrays():
    for operand in ("text", object(), np.sum, {"a": ["text"]}):
        wrong(TraceError, lambda: run(lambda x: fc.all_reduce(operand, "data")), "all_reduce", "not an array", "pytree")
        wrong(TraceError, lambda: run(lambda x: fc.all_gather(operand, "data")), "all_gather", "not an array", "pytree")


def test_ops_that_a_dtype_lacks():
    def reduced(op, dtype):
        return lambda: run(lambda x: fc.all_reduce(x, "data", op=op), X.astype(dtype), out=P())

    wrong(DTypeError, reduced("max", np.complex64), "'max'", "c64[2]{data}", "no order", "np.abs")
    wrong(DTypeError, reduced("min", np.complex128), "'min'", "c128", "no order")
    wrong(DTypeError, lambda: run(lambda x: np.max(x), X.astype(np.complex64), out=P()), "complex", "no order")
    wrong(DTypeError, reduced("and", np.float32), "'and'", "f32", "integers or booleans")
    wrong(DTypeError, reduced("sum", np.bool_), "'sum'", "booleans", "astype")
    wrong(DTypeError, reduced("mean", np.int32), '"mean"', "i32", "astype(np.float32)")
