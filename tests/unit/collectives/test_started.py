"""Started collectives: what a start and `done` record, their errors, and the bits, gradients and batches of plain calls."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.collectives import started
from funccoll.errors import MeshError, TraceError, UnsupportedError

pytestmark = pytest.mark.covers("collectives", "overlap")

MESH = fc.make_mesh({"d": 2})
X = np.arange(16, dtype=np.float32).reshape(8, 2)
CALLS = {
    "all_reduce": {"op": "max"},
    "all_gather": {"dim": 1},
    "reduce_scatter": {},
    "all_to_all": {"split_dim": 0, "concat_dim": 1},
    "permute": {"pairs": [(0, 1)]},
    "broadcast": {"root": 1},
    "reduce": {"root": 1},
    "gather": {},
    "scatter": {},
    "inclusive_scan": {},
    "exclusive_scan": {"op": "max"},
    "arg_reduce": {},
}
"""Every collective -> keywords."""


def jitted(fn):
    return fc.jit(fn, mesh=MESH, in_specs=P("d"), out_specs=P("d"))


def vary(tree):
    return fc.tree.map(lambda x: fc.pvary(x, "d"), tree)


def start_of(name):
    return getattr(fc, f"{name}_start")


def test_every_start_of_the_table_is_public_and_no_other():
    assert {f"{name}_start" for name in CALLS} | {"done"} == set(started.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_a_started_collective_has_the_bits_signature_and_batch_of_the_plain_one(name):
    plain, start, how = getattr(fc, name), start_of(name), CALLS[name]
    assert [*inspect.signature(start).parameters] == [*inspect.signature(plain).parameters]

    def with_start(x):
        h = start({"a": x, "b": 2 * x}, "d", **how)
        y = np.tanh(x)
        return vary((fc.done(h), y))

    def without(x):
        return vary((plain({"a": x, "b": 2 * x}, "d", **how), np.tanh(x)))

    found, wanted = (fc.tree.leaves(jitted(f)(X)) for f in (with_start, without))
    assert [np.asarray(x).tobytes() for x in found] == [np.asarray(x).tobytes() for x in wanted]
    marks = [e.started for e in jitted(with_start).trace(X).program.collectives()]
    assert marks and all(marks)
    batch = np.stack([X, X[::-1]], 1)
    of_batch = fc.vmap(lambda x: fc.done(start(x, "d", **how)), in_axes=1)
    lowered = jitted(lambda x: vary(of_batch(x))).lower(batch)
    assert all(e.started for e in lowered.program.collectives())


def test_the_transpose_of_a_started_collective_is_started_and_the_text_says_so():
    def fn(x):
        return fc.grad(lambda y: np.sum(fc.done(fc.all_to_all_start(y * y, "d", split_dim=0, concat_dim=1)) ** 2))(x)

    program = jitted(fn).trace(X).program
    assert [e.started for e in program.collectives() if e.primitive.name == "all_to_all"] == [True, True]
    assert program.text().count("all_to_all[started, ") == 2
    plain = jitted(lambda x: fc.grad(lambda y: np.sum(fc.all_to_all(y * y, "d", split_dim=0, concat_dim=1) ** 2))(x))
    assert np.asarray(jitted(fn)(X)).tobytes() == np.asarray(plain(X)).tobytes()
    assert plain.trace(X).program.fingerprint != program.fingerprint


def test_starts_in_checkpoints_loops_and_branches_are_kept():
    def step(c, _):
        return c * fc.done(fc.all_reduce_start(c, "d")), None

    def fn(x):
        x = fc.checkpoint(lambda y: fc.pvary(fc.done(fc.all_reduce_start(np.sin(y), "d")), "d"))(x)
        x = fc.scan(step, x, None, length=2)[0]
        return fc.cond(True, lambda y: y * fc.done(fc.all_reduce_start(y, "d")), lambda y: y, x)

    program = jitted(fc.grad(lambda x: np.sum(fn(x)))).lower(X).program
    assert len({e.source.line for e, _ in program.executed() if e.started}) == 3  # of the checkpoint, the loop and the branch


def test_starts_are_not_combined():
    def fn(x):
        h = fc.all_reduce_start(x, "d")
        return fc.done(fc.all_reduce_start(x + 1, "d")) + fc.done(h)

    lowered = fc.jit(fn, mesh=MESH, in_specs=P("d"), out_specs=P()).lower(X)
    assert len(lowered.program.collectives()) == 2


USES = {
    "operand": lambda h, x: h + x,
    "right operand": lambda h, x: x @ h,
    "ufunc": lambda h, x: np.sin(h),
    "function": lambda h, x: np.stack([x, h]),
    "index": lambda h, x: h[0],
    "number": lambda h, x: float(h),
    "comparison": lambda h, x: np.where(h > 0, x, x),
    "array": lambda h, x: np.asarray(h),
    "collective": lambda h, x: fc.all_reduce(h, "d"),
    "carry": lambda h, x: fc.scan(lambda c, _: (c, None), h, None, length=2),
    "argument of a branch": lambda h, x: fc.cond(x[0, 0] > 0, lambda y: y, lambda y: y, h),
}


@pytest.mark.parametrize("use", USES)
def test_a_future_is_not_an_array(use):
    def fn(x):
        h = fc.all_reduce_start(x, "d")
        return USES[use](h, x)

    with pytest.raises(TraceError, match=r"all_reduce_start at test_started.py:\d+ \(fn\) is used as an array.*fc.done\(h\)"):
        jitted(fn)(X)


def test_a_future_has_the_type_of_its_result():
    def fn(x):
        h = fc.all_gather_start(x, "d")
        assert (h.shape, h.dtype, h.type.varying) == ((8, 2), np.float32, frozenset())
        assert "all_gather_start" in repr(h)
        with pytest.raises(AttributeError, match=r"no attribute 'sum': it is not an array"):
            h.sum()
        two = fc.all_gather_start((x, x), "d")
        with pytest.raises(AttributeError, match="of 2 arrays"):
            _ = two.shape
        fc.done(two)
        return vary(fc.done(h))

    jitted(fn)(X)


def twice(x):
    h = fc.all_reduce_start(x, "d")
    fc.done(h)
    return fc.done(h)


def not_done(x):
    fc.all_reduce_start(x, "d")
    return x


def in_an_iteration(x):
    return fc.scan(lambda c, _: (not_done(c), None), x, None, length=2)[0]


def out_of_an_iteration(x):
    return fc.scan(lambda c, _: (c, fc.all_reduce_start(c, "d")), x, None, length=2)[0]


def under_grad(x):
    return fc.grad(lambda y: np.sum(not_done(y)))(x)


def done_in_a_loop(x):
    h = fc.all_reduce_start(x, "d")
    return fc.scan(lambda c, _: (c + fc.done(h), None), x, None, length=2)[0]


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (twice, r"is done already"),
        (not_done, r"is never done: not_done ends without it. Call fc.done\(h\) in not_done"),
        (lambda x: fc.all_reduce_start(x, "d"), r"is never done: <lambda> returns it"),
        (in_an_iteration, r"is never done"),
        (out_of_an_iteration, r"is never done: .* returns it"),
        (under_grad, r"is never done"),
        (done_in_a_loop, r"belongs to the trace of done_in_a_loop, and this is <lambda>"),
    ],
)
def test_a_future_is_done_once_where_it_was_started(fn, why):
    with pytest.raises(TraceError, match=r"fc.Future of all_reduce_start at test_started.py:\d+ .*" + why):
        jitted(fn)(X)


def test_done_takes_futures_alone_and_starts_need_a_mesh():
    with pytest.raises(TraceError, match=r"takes what a start returned, such as fc\.all_reduce_start, not a Tracer"):
        jitted(fc.done)(X)
    with pytest.raises(MeshError, match=r"all_reduce_start was called outside .* fc.start\(f, \*args\)"):
        fc.all_reduce_start(X, "d")
    with pytest.raises(UnsupportedError, match="has no argument 'async_op'"):
        jitted(lambda x: fc.all_reduce_start(x, "d", async_op=True))(X)
