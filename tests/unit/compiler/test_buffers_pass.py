"""Buffers of programs: which values share memory."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.compiler.passes.buffers import plan_buffers
from tests.support.pass_programs import programs, run_program

pytestmark = pytest.mark.covers("passes")

MESH = fc.make_mesh({"data": 4, "model": 2})
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def test_elementwise_chains_reuse_one_buffer():
    def fn(x):
        return -np.tanh(np.sin(x) + 1.0)

    _, after = programs(fn, X)
    buffers = plan_buffers(after)
    assert len(buffers.reuse) == 3  # all but the first, whose operand is the caller's


def test_large_results_of_collectives_are_reused_between_processes():
    """Only those that every rank receives, and not what a collective reads, or an output of the program."""

    def fn(x):
        wide = np.broadcast_to(x, (600, *x.shape))
        dead, rooted = fc.all_reduce(wide * 2, "data") * 0.5, fc.reduce(wide * 3, "data") * 0.5
        again, kept = fc.all_gather(wide[:150], "data"), fc.all_reduce(wide * 4, "data")
        return dead, rooted, fc.pvary(again, "data") * 0.5, kept, kept * 0.5, fc.all_reduce(x, "data") * 0.5

    specs = (P(), P("data"), P("data"), P(), P(), P())
    _, after = programs(fn, np.ones((8, 16), np.float32), out_specs=specs)
    made = {v: eqn.primitive.name for eqn in after.equations for v in eqn.outputs}
    halves = [eqn for eqn in after.equations if eqn.primitive.name == "multiply" and eqn.outputs[0] in after.outputs]

    def reused(**how):
        reuse = plan_buffers(after, **how).reuse
        return [made[eqn.inputs[reuse[eqn.outputs[0]]]] for eqn in halves if eqn.outputs[0] in reuse]

    assert len(halves) == 5
    assert reused(aliases=False) == ["all_reduce"]
    assert reused() == []  # virtual devices share them


@pytest.mark.usefixtures("numpy_compute")
def test_views_keep_their_memory_alive():
    def fn(x):
        a = np.sin(x)
        top = a[:1]
        b = np.cos(a)  # must not be written into a: top is read later
        return b + top

    expected = np.cos(np.sin(X)) + np.repeat(np.sin(X[::2]), 2, axis=0)
    out = fc.jit(fn, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(X)
    np.testing.assert_array_equal(np.asarray(out), expected)


def test_what_waits_in_line_is_planned_in_linear_time():
    def fn(x):
        reduced = fc.all_reduce([x * i for i in range(3000)], "data")  # one operation with 3000 operands
        views = [reduced[0]]
        for _ in range(6000):
            views.append(views[-1][::-1])
        return sum(reduced) + views[-1]

    lowered = fc.jit(fn, mesh=MESH, in_specs=P("data"), out_specs=P()).lower(X[:, :1])
    start = time.process_time()
    lowered.compile()
    assert time.process_time() - start < 60  # measured: 0.4 s; about 80 s when every class was copied


def test_shared_copies_are_never_written():
    """What does not vary is one array for all devices; a device must not overwrite it for the others."""

    def fn(x, w):
        scale = np.sin(w)  # computed once
        wide = fc.pvary(scale, "data")
        return np.exp(wide) + x, np.negative(scale)

    w = np.float32([1.0, 2.0])
    a, b = fc.jit(fn, mesh=MESH, in_specs=(P("data"), P()), out_specs=(P("data"), P()))(X[:, :2].copy(), w)
    np.testing.assert_array_equal(np.asarray(a), np.exp(np.sin(w)) + X[:, :2])
    np.testing.assert_array_equal(np.asarray(b), -np.sin(w))


OPERATIONS = (
    lambda a, b: a + b,
    lambda a, b: np.maximum(a, b),
    lambda a, b: np.sin(a),
    lambda a, b: a[::-1],
    lambda a, b: np.transpose(a),
    lambda a, b: np.broadcast_to(np.sum(a, axis=0), a.shape),
    lambda a, b: np.reshape(np.ravel(a), a.shape) * 0.5,
    lambda a, b: fc.at(a)[0].add(b[1]),
    lambda a, b: np.where(a > b, a, b),
    lambda a, b: fc.pvary(fc.all_reduce(a, "data"), "data") * 0.25,
    lambda a, b: fc.permute(a, "data", pairs=[(i, (i + 1) % 4) for i in range(4)]),
    lambda a, b: fc.pvary(fc.broadcast(b, "data", root=1), "data"),
)


@pytest.mark.usefixtures("numpy_compute")
@given(st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 99), st.integers(0, 99)), max_size=25))
def test_buffer_reuse_never_changes_a_value(steps):
    def fn(x, y):
        values = [x, y]
        for op, i, j in steps:
            values.append(OPERATIONS[op](values[i % len(values)], values[j % len(values)]))
        return values[-1], values[len(values) // 2]

    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(12, 3)), rng.normal(size=(12, 3))
    lowered = fc.jit(fn, mesh=MESH, in_specs=(P("data"), P("data")), out_specs=(P("data"), P("data"))).lower(x, y)
    copies = [[v[3 * i : 3 * i + 3] for i in range(4)] for v in (x, y)]
    plain = run_program(lowered.program, *copies)
    reused = lowered.compile()(x, y)
    for a, b in zip(plain, reused, strict=True):
        assert np.concatenate(a).tobytes() == np.asarray(b).tobytes()
