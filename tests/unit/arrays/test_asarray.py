"""`fc.asarray`: a constant that a traced index may choose from, inside a traced function and made once outside."""

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import ConcretizationError, DTypeError, LeakedTracerError, TraceError, UnsupportedError
from tests.support.misuse import LINE, X, wrong

pytestmark = pytest.mark.covers("nn")

TABLE = np.arange(12, dtype=np.float32).reshape(4, 3) ** 2
SPLIT = {"mesh": LINE, "in_specs": (P("data"),), "out_specs": P("data")}
OUTSIDE = fc.asarray(TABLE)
ROWS = np.array([3, 0, 1, 1])


@pytest.mark.parametrize("rows", [lambda i: fc.asarray(TABLE)[i], lambda i: OUTSIDE[i], lambda i: fc.asarray(OUTSIDE)[i]])
def test_a_traced_index_chooses_from_a_constant(rows):
    np.testing.assert_array_equal(fc.jit(rows, **SPLIT)(ROWS), TABLE[ROWS])
    np.testing.assert_array_equal(fc.jit(lambda i: rows(i[0]), **{**SPLIT, "out_specs": P("data")})(ROWS), TABLE[ROWS].ravel())


def test_every_form_of_index():
    for choose in (lambda t, i: t[i, 1:], lambda t, i: t[:, i % 3], lambda t, i: t[None, i, i % 3], lambda t, i: t[[i[0], 2]]):
        for make in (lambda: fc.asarray(TABLE), lambda: OUTSIDE):
            np.testing.assert_array_equal(fc.jit(lambda i: choose(make(), i))(ROWS), choose(TABLE, ROWS))


def test_numpy_alone_cannot_and_the_message_says_what_can():
    wrong(ConcretizationError, lambda: fc.jit(lambda i: TABLE[i])(ROWS), "fc.asarray(a)[i] in place of a[i]")
    wrong(UnsupportedError, lambda: fc.jit(lambda i: OUTSIDE[: i[0]])(ROWS), "a slice with traced bounds")


def test_one_constant_serves_all_its_uses():
    def body(i):
        return fc.asarray(TABLE)[i] + fc.asarray(TABLE)[i % 2] * OUTSIDE[i] + OUTSIDE[i % 2]

    program = fc.jit(body).trace(ROWS).program
    assert len(program.constants) == 2
    np.testing.assert_array_equal(fc.jit(body)(ROWS), TABLE[ROWS] + TABLE[ROWS % 2] * TABLE[ROWS] + TABLE[ROWS % 2])


def test_it_is_a_snapshot():
    table = TABLE.copy()
    outside = fc.asarray(table)
    step = fc.jit(lambda i: fc.asarray(table)[i] + outside[i])
    first = step(ROWS)
    table[:] = -1
    np.testing.assert_array_equal(step(ROWS), first)
    np.testing.assert_array_equal(outside, TABLE)


def test_it_is_equal_on_all_devices_and_its_gradient_flows_to_what_is_traced():
    def body(i, w):
        assert fc.asarray(TABLE).varying == set() and fc.asarray(TABLE)[i].varying == {"data"}
        return fc.grad(lambda w: fc.all_reduce(np.sum(fc.asarray(TABLE)[i] * w), "data"))(w)

    got = fc.jit(body, mesh=LINE, in_specs=(P("data"), P()), out_specs=P())(ROWS, np.ones(3, np.float32))
    np.testing.assert_array_equal(got, TABLE[ROWS].sum(0))


def test_lists_numbers_and_dtypes():
    def body(x):
        chosen = fc.asarray([x[0], 2.0, x[1]])[np.argmax(x)]
        assert fc.asarray(2.5).weak is float and (x * fc.asarray(2.5)).dtype == np.float32
        assert fc.asarray(2.5, np.float64).weak is None and fc.asarray(2, "int8").dtype == np.int8
        assert fc.asarray(x) is x and fc.asarray(x, np.int32).dtype == np.int32
        assert fc.asarray(ROWS, fc.bfloat16).dtype == fc.bfloat16
        return chosen, fc.asarray([[1, 2], [3, 4]])[1] * x[0]

    chosen, row = fc.jit(body)(np.array([1, 5, 3], np.float32))
    assert float(chosen) == 2.0 and row.dtype == np.float64
    np.testing.assert_array_equal(row, [3, 4])


def test_outside_it_is_an_array():
    assert type(OUTSIDE) is fc.Array and OUTSIDE.dtype == np.float32 and fc.asarray(OUTSIDE) is OUTSIDE
    assert fc.asarray(OUTSIDE, np.float64).dtype == np.float64 and fc.asarray(2).weak is int and fc.asarray(2, int).weak is None
    np.testing.assert_array_equal(OUTSIDE[1:], TABLE[1:])
    np.testing.assert_array_equal(fc.jit(lambda t: t * 2, **SPLIT)(OUTSIDE), TABLE * 2)
    split = fc.device_put(TABLE, LINE, P("data"))
    np.testing.assert_array_equal(fc.jit(lambda i: split[i])(ROWS), TABLE[ROWS])


def test_what_it_does_not_take():
    for inside in (lambda call: call(None), lambda call: fc.jit(call)(X)):
        wrong(DTypeError, lambda: inside(lambda _: fc.asarray(X, "junk")), "asarray: dtype='junk'", "np.float32")
        wrong(DTypeError, lambda: inside(lambda _: fc.asarray("text")), "asarray: x", "text is not an array")
        wrong(TraceError, lambda: inside(lambda _: fc.asarray({"a": X})), "asarray: x", "not an array")
    kept = []
    fc.jit(lambda i: kept.append(i) or i)(ROWS)
    wrong(LeakedTracerError, lambda: OUTSIDE[kept[0]], "an argument of <lambda>")
