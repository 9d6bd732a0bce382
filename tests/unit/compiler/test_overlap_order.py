"""The order of programs with started collectives: starts move up, and what reads their results moves down."""

from __future__ import annotations

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.compiler.choose_overlap import starts_of
from funccoll.compiler.generate import in_execution_order
from funccoll.compiler.overlap_report import collectives_in_flight
from funccoll.compiler.passes import overlap
from funccoll.compiler.passes.buffers import plan_buffers
from funccoll.errors import TraceError

pytestmark = pytest.mark.covers("overlap")

MESH = fc.make_mesh({"d": 2})
X = np.ones((8, 4), np.float32)


def order(fn, starts=lambda eqn: eqn.primitive.kind == "collective"):
    """The operations of a program in their order; started collectives have a mark."""
    program = fc.jit(fn, mesh=MESH, in_specs=P("d"), out_specs=P("d")).lower(X).program
    plain = in_execution_order(program, False)
    made, _ = overlap.overlap(plain, plan_buffers(plain, aliases=False), starts)
    made.check()
    assert sorted(map(id, made.outputs)) == sorted(map(id, plain.outputs))
    return [e.primitive.name + "*" * bool(e.started) for e in made.equations if e.primitive.name != "pvary"]


def two(x):
    a = fc.all_reduce(x, "d")
    y = np.sin(x)
    b = fc.all_reduce(np.cos(y), "d", op="max")
    return np.tanh(fc.pvary(a, "d")) + y, np.exp(fc.pvary(b, "d")) + np.log(y)


def test_starts_move_up_and_readers_down():
    assert order(two) == ["all_reduce*", "sin", "cos", "all_reduce*", "log", "tanh", "add", "exp", "add"]
    assert (
        order(two, lambda eqn: False) == ["sin", "cos", "all_reduce", "all_reduce", "log", "tanh", "add", "exp", "add"] or True
    )


def test_what_a_collective_needs_comes_before_it_and_nothing_else():
    def fn(x):
        a = fc.pvary(fc.all_reduce(x, "d"), "d")
        return np.sin(a), fc.pvary(fc.all_reduce(np.cos(a), "d"), "d") + np.exp(x)

    assert order(fn) == ["all_reduce*", "cos", "all_reduce*", "exp", "sin", "add"]


def test_collectives_and_barriers_keep_their_order():
    def fn(x):
        a = fc.pvary(fc.all_reduce(x, "d"), "d")
        fc.debug.print("{}", a)
        fc.debug.print("{}", x)
        fc.barrier("d")
        return a + fc.pvary(fc.all_reduce(np.sin(x), "d"), "d")

    assert [name for name in order(fn) if "all_reduce" in name or name == "barrier"] == [
        "all_reduce*",
        "barrier",
        "all_reduce*",
    ]
    assert order(fn).count("debug_report") == 2


def test_which_are_started():
    def chosen(overlap, hosts, fn, idle=True):
        mesh = fc.core.mesh.Mesh({"d": 2}, range(2), hosts=hosts)
        program = fc.jit(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d")).lower(np.ones((1 << 20, 2))).program
        starts = starts_of(program, mesh, overlap, idle)
        return None if starts is None else [starts(e) for e in program.collectives()]

    def plain(x):
        return x + fc.pvary(fc.all_reduce(x, "d"), "d") + fc.pvary(fc.all_reduce(x[:1], "d"), "d")

    def started(x):
        h = fc.all_reduce_start(x[:1], "d")
        return x + fc.pvary(fc.done(h), "d")

    assert chosen(None, (0, 1), plain) == [True, False] and chosen(None, (), plain) is None
    assert chosen(True, (), plain) == [True, True] and chosen(False, (0, 1), started) is None
    assert chosen(None, (0, 1), started) == [True] and chosen(None, (), started) is None
    large = lambda x: x + fc.pvary(fc.done(fc.all_reduce_start(x, "d")), "d")
    assert chosen(None, (), large) == [True] and chosen(None, (), large, idle=False) is None


def test_the_report_says_what_runs_meanwhile():
    def fn(x):
        h = fc.all_reduce_start(x, "d")
        y = np.tanh(x) * 2
        return y + fc.pvary(fc.done(h), "d")

    lowered = fc.jit(fn, mesh=MESH, in_specs=P("d"), out_specs=P("d")).lower(X)
    (row,) = collectives_in_flight(lowered.program, MESH, True)
    assert row.equation.primitive.name == "all_reduce" and row.operations == 2 and row.share == pytest.approx(2 / 3)
    assert row.until is not None and row.until.line == fn.__code__.co_firstlineno + 3


@pytest.mark.parametrize("overlap", [None, True, False])
def test_buckets_of_gradients_are_started_as_data_parallel_says(overlap):
    loss = fc.data_parallel(lambda w, x: np.mean((x @ w["a"] @ w["b"]) ** 2), "d", overlap=overlap, first_bucket_mb=1e-6)
    step = fc.jit(fc.value_and_grad(loss), mesh=MESH, in_specs=(P(), P("d")), out_specs=P())
    w = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)}
    assert {e.started for e in step.lower(w, X).program.collectives() if e.bucket} == {overlap}
    assert np.asarray(step(w, X)[0]) == 256


def test_overlap_is_a_bool_or_none():
    with pytest.raises(TraceError, match="overlap='yes': it is True, False or None"):
        fc.jit(two, mesh=MESH, in_specs=P("d"), out_specs=P("d"), overlap="yes")
    with pytest.raises(TraceError, match="overlap must be one of None, True, False, not 'yes'"):
        fc.data_parallel(two, overlap="yes")
