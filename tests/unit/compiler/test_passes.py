"""Passes: what each rewrites, and that none changes a bit of any result."""

import copy
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll import collectives as c
from funccoll.compiler.passes import PASSES, STAGES, run_passes
from funccoll.compiler.passes.buffers import plan_buffers
from funccoll.compiler.passes.combine_collectives import COMBINE_BYTES, combine
from funccoll.core.interpreter import evaluate
from funccoll.core.ir import Equation, Literal, Program, Var
from funccoll.core.types import ArrayType
from funccoll.primitives.elementwise import UFUNCS
from tests.support.pass_programs import choose, compiled, programs, run_program

pytestmark = pytest.mark.covers("passes")

MESH = fc.make_mesh({"data": 4, "model": 2})
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def names(program):
    return [e.primitive.name for e in program.equations]


# ------------------------------------------------------------------ dead code, common subexpressions


def test_dead_code_drops_unused_work_and_unused_operands():
    def fn(x):
        np.tanh(x)
        kept, _ = fc.all_reduce((x, x * 2), "data")
        return fc.pvary(kept, "data")

    before, after = programs(fn, X)
    assert "tanh" in names(before)
    assert "tanh" not in names(after)
    (reduce,) = after.collectives()
    assert len(reduce.inputs) == 1


def test_dead_code_keeps_barriers_and_drops_unused_constants():
    table = np.arange(100.0)

    def fn(x):
        table + np.sum(x)
        fc.barrier("data")
        return x

    _, after = programs(fn, X)
    assert names(after) == ["barrier"]
    assert after.constants == ()


def test_common_subexpressions_are_computed_once():
    def fn(x):
        return np.tanh(x) * 2.0 + np.tanh(x) * 2.0 + fc.all_reduce(x, "data") + fc.all_reduce(x, "data")

    _, after = programs(fn, X)
    assert names(after).count("tanh") == 1
    assert names(after).count("multiply") == 1
    assert names(after).count("all_reduce") == 1


@pytest.mark.usefixtures("numpy_compute")
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_stacks_each_result_once(reverse):
    """Also where a gradient's residuals are among the results of the function."""

    def loss(w, xs):
        def body(h, x):
            y = np.tanh(h * w + x)
            return y, (y, y, h)

        last, (ys, same, before) = fc.scan(body, np.zeros(3, np.float32), xs, reverse=reverse)
        return np.sum(last + np.sum(ys**2 + 2 * same - before, axis=0))

    w, xs = X[0, :3], X[:, 1:4]
    step = fc.value_and_grad(loss, (0, 1))
    traced, lowered = programs(step, w, xs, in_specs=P(), out_specs=P(), mesh=fc.make_mesh({"d": 1}))
    forward = [next(e for e in p.equations if e.primitive.name == "scan") for p in (traced, lowered)]
    assert [len(e.outputs) - e.params["carry"] for e in forward] == [5, 2]  # what y is, and the carry before it
    wanted = evaluate(traced, [value for _, value in traced.constants], [w, xs])[0]
    found = fc.tree.leaves(fc.jit(step)(w, xs))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


def test_literals_of_different_dtype_or_sign_of_zero_are_not_common():
    def fn(x):
        return np.copysign(x, np.float32(0.0)), np.copysign(x, np.float32(-0.0))

    _, after = programs(fn, X, out_specs=(P("data"), P("data")))
    assert names(after).count("copysign") == 2


# ------------------------------------------------------------------ algebra


ALGEBRA = {
    "own_slice(all_reduce)": (
        lambda x: fc.own_slice(fc.all_reduce(x, "data"), "data", dim=1),
        ["reduce_scatter"],
    ),
    "all_gather(reduce_scatter)": (
        lambda x: fc.pvary(fc.all_gather(fc.reduce_scatter(x, "data", dim=1, op="mean"), "data", dim=1), "data"),
        ["all_reduce", "pvary"],
    ),
    "own_slice(all_gather)": (lambda x: fc.own_slice(fc.all_gather(x, "data"), "data"), []),
    "all_to_all twice": (
        lambda x: fc.all_to_all(fc.all_to_all(x, "data", split_dim=1, concat_dim=0), "data", split_dim=0, concat_dim=1),
        [],
    ),
    "permute twice": (
        lambda x: fc.permute(fc.permute(x, "data", pairs=[(0, 1), (1, 2)]), "data", pairs=[(1, 3), (2, 0), (3, 1)]),
        ["permute"],
    ),
    "broadcast(pvary)": (
        lambda x: x + fc.broadcast(fc.pvary(fc.all_reduce(x, "data"), "data"), "data", root=2),
        ["all_reduce", "pvary", "add"],
    ),
}


@pytest.mark.parametrize("case", ALGEBRA)
def test_algebra_rewrites_and_keeps_the_bits(case):
    fn, expected = ALGEBRA[case]
    before, after = programs(fn, X)
    assert names(after) == expected
    copies = [X[2 * i : 2 * i + 2] for i in range(4)]
    plain, rewritten = run_program(before, copies), run_program(after, copies)
    for a, b in zip(plain[0], rewritten[0], strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_algebra_leaves_what_would_move_more():
    def used_twice(x):
        total = fc.all_reduce(x, "data")
        return fc.own_slice(total, "data", dim=1), fc.pvary(total, "data")

    _, after = programs(used_twice, X, out_specs=(P("data"), P("data")))
    assert "all_reduce" in names(after)
    assert "reduce_scatter" not in names(after)

    def other_axes(x):
        return fc.own_slice(fc.all_reduce(x, "data"), "model", dim=1)

    _, after = programs(other_axes, X, out_specs=P("model"))
    assert names(after) == ["all_reduce", "own_slice"]

    def back_over_other_axes(x):
        return fc.all_to_all(fc.all_to_all(x, "a", split_dim=1, concat_dim=0), "b", split_dim=0, concat_dim=1)

    square = fc.make_mesh({"a": 2, "b": 2})
    _, after = programs(back_over_other_axes, X, in_specs=P(("a", "b")), out_specs=P(("a", "b")), mesh=square)
    assert names(after) == ["all_to_all", "all_to_all"]


def test_nothing_is_rewritten_across_a_barrier():
    def fn(x):
        total = fc.all_reduce(x, "data")
        fc.barrier("data")
        return fc.own_slice(total, "data", dim=1)

    _, after = programs(fn, X)
    assert names(after) == ["all_reduce", "barrier", "own_slice"]


# ------------------------------------------------------------------ combine


def test_small_independent_collectives_become_one():
    def fn(x):
        return sum(fc.all_reduce(x * k, "data") for k in range(1, 6))

    before, after = programs(fn, X, out_specs=P())
    assert len(before.collectives()) == 5
    (one,) = after.collectives()
    assert len(one.inputs) == 5


def test_dependent_collectives_stay_in_order():
    def fn(x):
        first = fc.all_reduce(x, "data")
        second = fc.all_reduce(np.tanh(first) * x, "data")
        return second, fc.all_reduce(x + 1, "data")

    _, after = programs(fn, X, out_specs=(P(), P()))
    assert [len(e.inputs) for e in after.collectives()] == [2, 1]


def test_a_long_chain_may_wait_for_a_merged_collective():
    def fn(x):
        y = fc.all_reduce(x, "data")
        for _ in range(2000):
            y = y + 1
        return y, fc.all_reduce(x * 2, "data")

    _, after = programs(fn, X, out_specs=(P(), P()))
    assert [len(e.inputs) for e in after.collectives()] == [2]
    after.check()


def test_only_equal_kinds_axes_ops_and_dtypes_are_combined():
    def fn(x):
        return (
            fc.all_reduce(x, "data"),
            fc.all_reduce(x, "data", op="max"),
            fc.all_reduce(x.astype(np.float64), "data"),
            fc.all_reduce(fc.pvary(x, "model"), ("data", "model")),
        )

    _, after = programs(fn, X, out_specs=P())
    assert [len(e.inputs) for e in after.collectives()] == [1, 1, 1, 1]


def test_combine_respects_its_limit_and_barriers():
    def fn(x):
        a = [fc.all_reduce(x * k, "data") for k in (1, 2, 3)]
        fc.barrier("data")
        return [*a, fc.all_reduce(x * 4, "data")]

    before, _ = programs(fn, X, out_specs=[P()] * 4)
    small = combine(before, limit=2 * 2 * 8 * 4)
    small.check()
    assert [len(e.inputs) for e in small.collectives()] == [2, 1, 0, 1]
    assert all(e.inputs[0].type.nbytes <= COMBINE_BYTES for e in before.collectives() if e.inputs)


def test_a_bucket_of_gradients_is_combined_with_nothing_else():
    def fn(x):
        return [fc.all_reduce(x * k, "data") for k in range(1, 6)]

    before, _ = programs(fn, X, out_specs=[P()] * 5)
    numbers = dict(zip(before.collectives(), (0, 1, 1, 0, 2), strict=True))
    marked = before.replace(equations=tuple(e.replace(bucket=numbers.get(e, 0)) for e in before.equations))
    after = combine(marked).check().collectives()
    assert sorted((e.bucket, len(e.inputs)) for e in after) == [(0, 2), (1, 2), (2, 1)]


@st.composite
def collective_programs(draw):
    """Random single-assignment programs of adds, first powers and all_reduces over values of one shape."""
    count = draw(st.integers(1, 4))
    varying, plain = ArrayType((2,), np.dtype(np.float32), frozenset({"data"})), ArrayType((2,), np.dtype(np.float32))
    inputs = [Var(varying) for _ in range(count)]
    values, equations = list(inputs), []
    for _ in range(draw(st.integers(1, 25))):
        a, b = (draw(st.sampled_from(values)) for _ in range(2))
        out = Var(varying)
        if draw(st.booleans()):
            reduced = Var(plain)
            params = {"axes": ("data",), "op": draw(st.sampled_from(["sum", "max"])), "size": 4, "algorithm": None}
            equations.append(Equation(c.all_reduce_p, (a,), (reduced,), params, None, draw(st.integers(0, 2))))
            equations.append(Equation(c.pvary_p, (reduced,), (out,), {"axes": ("data",)}, None))
        elif draw(st.integers(0, 9)) == 0:
            equations.append(Equation(c.barrier_p, (), (), {"axes": ("data",), "size": 4, "algorithm": None}, None))
            continue
        elif draw(st.integers(0, 4)) == 0:
            equations.append(Equation(UFUNCS[np.power], (a, Literal(np.array(1, np.float32))), (out,), {}, None))
        else:
            equations.append(Equation(UFUNCS[np.add], (a, b), (out,), {}, None))
        values.append(out)
    outputs = tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=4)))
    return Program({"data": 4, "model": 2}, (), tuple(inputs), tuple(equations), outputs)


@given(collective_programs(), st.integers(8, 64))
def test_every_pass_keeps_the_bits_and_the_types(program, limit):
    rng = np.random.default_rng(1)
    inputs = [[rng.normal(size=2).astype(np.float32) for _ in range(4)] for _ in program.inputs]
    expected = run_program(program.check(), *inputs)
    for rewrite in (*PASSES, lambda p: combine(p, limit)):
        program = rewrite(program).check()
        result = run_program(program, *inputs)
        for a, b in zip(expected, result, strict=True):
            assert [x.tobytes() for x in a] == [x.tobytes() for x in b]
    reused = compiled(program, MESH, plan_buffers(program))(*inputs)
    for a, b in zip(expected, reused, strict=True):
        assert [x.tobytes() for x in a] == [x.tobytes() for x in b]


# ------------------------------------------------------------------ the pipeline


def test_fingerprint_depends_on_meaning_only():
    def one(x):
        return np.tanh(x) + 1.0

    def two(x):
        result = np.tanh(x)

        return result + 1.0

    def three(x):
        return np.tanh(x) + 2.0

    prints = [programs(f, X)[0].fingerprint for f in (one, two, three)]
    assert prints[0] == prints[1] != prints[2]
    table = np.arange(2.0)
    captured = [programs(lambda x, t=t: x[:, :2] + t, X)[0].fingerprint for t in (table, table + 1, table.copy())]
    assert captured[0] == captured[2] != captured[1]


def test_copies_of_a_program_mean_the_same():
    program = programs(lambda x: fc.all_reduce(np.sum(x[:, :2] @ np.ones(2)) + 1.0, "data"), X, out_specs=P())[0]
    for again in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert again.check().fingerprint == program.fingerprint
        assert run_passes(again, choose).fingerprint == run_passes(program, choose).fingerprint


def test_check_refuses_broken_programs():
    from funccoll.errors import FunccollError

    program, _ = programs(lambda x: np.tanh(x) + x, X)
    first, second = program.equations
    with pytest.raises(FunccollError, match="not defined yet"):
        program.replace(equations=(second, first)).check()
    with pytest.raises(FunccollError, match="assigned twice"):
        program.replace(equations=(first, first, second)).check()
    wrong = first.replace(outputs=(Var(ArrayType((1,), np.dtype(np.float64))),))
    with pytest.raises(FunccollError, match="the stated type is"):
        program.replace(equations=(wrong,), outputs=()).check()
    with pytest.raises(FunccollError, match="output of the program"):
        program.replace(equations=()).check()


def test_stages_lists_every_pass():
    folder = Path(sys.modules["funccoll.compiler.passes"].__file__).parent
    modules = [run.__module__.rpartition(".")[2] for passes in STAGES.values() for run in passes]
    parts = {"__init__", "rewrite", "group_drafts", "rematerialize"}  # the last two are parts of `fuse`
    assert sorted(modules) == sorted({p.stem for p in folder.glob("*.py")} - parts)


def calls_of(functions, run):
    """What `run` returns, and which of the functions it calls, in the order of their first calls."""
    codes, called = {f.__code__: f for f in functions}, {}
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: event == "call" and frame.f_code in codes and called.setdefault(codes[frame.f_code]))
    try:
        return run(), tuple(called)
    finally:
        sys.setprofile(before)


def test_each_stage_runs_its_passes_in_order():
    traced = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=MESH, in_specs=P("data"), out_specs=P()).trace(X)
    every = [run for passes in STAGES.values() for run in passes]
    lowered, called = calls_of(every, traced.lower)
    assert called == STAGES["lower"]
    _, called = calls_of(every, lowered.compile)
    assert called == STAGES["compile"][:-1]  # the last one is for processes


def test_run_passes_checks_after_each(monkeypatch):
    from funccoll.compiler import passes

    program, _ = programs(lambda x: np.tanh(x), X)
    monkeypatch.setattr(passes, "PASSES", (lambda p: p.replace(equations=()),))
    with pytest.raises(fc.FunccollError):
        run_passes(program, choose, check=True)
