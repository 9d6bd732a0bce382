"""Schedules in the compiler: `algorithm=`, the choice, the proof at `.lower()`, and the bits that the runtime computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import ScheduleError
from funccoll.schedules import Move
from funccoll.schedules.registry import _ALGORITHMS
from tests.support.cases import schedule_calls
from tests.support.cases.schedule_calls import CALLS, REDUCTIONS, forced, numbers, of
from tests.support.groups import in_groups
from tests.support.spmd import bits, per_device

pytestmark = pytest.mark.covers("algorithm-argument")

SIZES = range(1, 9)
MESHES = {p: fc.make_mesh({"x": p}) for p in SIZES}
GRID = fc.make_mesh({"hosts": 2, "each": 3})


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("p", [3, 6, *(pytest.param(p, marks=pytest.mark.slow) for p in (1, 2, 4, 5, 7, 8))])
@pytest.mark.parametrize("kind", CALLS)
def test_every_algorithm_gives_the_same_values(kind: str, p: int):
    mesh = MESHES[p]
    whole, x = numbers(mesh, np.int64), numbers(mesh)
    default = forced(kind, None, mesh)
    for how in fc.schedules.algorithms(kind, p):
        run = forced(kind, how, mesh)
        assert of(run.lower(x), kind).algorithm == how
        assert bits(run(whole)) == bits(default(whole)), how
        if kind in REDUCTIONS:
            np.testing.assert_allclose(run(x), default(x), rtol=1e-5, atol=1e-3)
        else:
            assert bits(run(x)) == bits(default(x)), how


@pytest.mark.parametrize("p", [4, *(pytest.param(p, marks=pytest.mark.slow) for p in (1, 2, 3, 8))])
@pytest.mark.parametrize("kind", CALLS)
def test_gradients_do_not_depend_on_the_algorithm(kind: str, p: int):
    mesh = MESHES[p]
    x = numbers(mesh, np.int64).astype(np.float64)  # sums of small integers are exact in any order

    def gradient(how: str | None) -> Any:
        def loss(x: Any) -> Any:
            y = CALLS[kind](x, "x", p, how)
            total = np.sum(y * y)
            return fc.all_reduce(total, "x") if "x" in total.varying else total

        return per_device(mesh, fc.grad(loss))(x)

    expected = gradient(None)
    assert np.any(np.asarray(expected)) or (kind == "exclusive_scan" and p == 1)  # nothing is before it
    for how in fc.schedules.algorithms(kind, p):
        assert bits(gradient(how)) == bits(expected), how


@pytest.mark.parametrize("axes", [("hosts", "each"), ("each", "hosts"), "each", "hosts"])
@in_groups("kind", CALLS)
def test_over_axes_of_a_grid(kind: str, axes: Any):
    x = numbers(GRID, np.int64)
    p = int(np.prod([GRID.shape[a] for a in np.atleast_1d(axes)]))
    for how in fc.schedules.algorithms(kind, p):
        assert bits(forced(kind, how, GRID, axes)(x)) == bits(forced(kind, None, GRID, axes)(x)), how


def test_hierarchical_takes_the_first_axis_for_hosts():
    cube = fc.make_mesh({"a": 2, "b": 3, "c": 2})
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for mesh, axes, levels in (
            (GRID, ("hosts", "each"), (2, 3)),
            (GRID, ("each", "hosts"), (3, 2)),
            (GRID, "each", None),
            (cube, ("b", "c", "a"), (3, 4)),
        ):
            found = of(forced(kind, "hierarchical", mesh, axes).lower(numbers(mesh)), kind)
            assert found.digest == fc.schedules.build(kind, found.nranks, "hierarchical", levels=levels).digest
        both = {fc.schedules.build(kind, 6, "hierarchical", levels=levels).digest for levels in ((2, 3), (3, 2))}
        assert len(both) == 2


# ---------------------------------------------------------------- the program


def test_the_algorithm_is_part_of_the_program():
    mesh, x = MESHES[4], numbers(MESHES[4])
    lowered = {how: forced("all_reduce", how, mesh).lower(x) for how in (None, "ring", "recursive_doubling")}
    chosen = of(lowered[None], "all_reduce").algorithm
    assert f"algorithm={chosen!r}" in lowered[None].as_text()
    assert len({v.fingerprint for v in lowered.values()}) == 3
    assert forced("all_reduce", chosen, mesh).lower(x).fingerprint == lowered[None].fingerprint
    assert [r.schedule for r in lowered["ring"].collectives()] == ["ring"]
    assert "ring" in repr(lowered["ring"].collectives()) and "ring" in lowered["ring"].collectives()._repr_html_()
    traced = forced("all_reduce", "ring", mesh).trace(x)
    assert traced.collectives().rows[0].schedule == "ring"
    compiled = lowered["ring"].compile()
    assert compiled.schedules == lowered["ring"].schedules and compiled.fingerprint == lowered["ring"].fingerprint


def test_every_collective_of_a_program_has_a_proved_schedule():
    def step(x: Any) -> Any:
        fc.barrier("x", algorithm="dissemination")
        y = fc.all_gather(fc.reduce_scatter(x, "x"), "x", dim=1)
        fc.barrier("x")
        return fc.pvary(y, "x"), fc.permute(x, "x", pairs=[(0, 1)])

    lowered = per_device(MESHES[4], step).lower(numbers(MESHES[4], np.float32, (8, 3)))
    assert list(lowered.schedules) == lowered.program.collectives()
    for equation, schedule in lowered.schedules.items():
        assert (schedule.kind, schedule.algorithm) == (equation.primitive.name, equation.params["algorithm"])
        assert schedule.nranks == equation.params["size"] == 4
        assert "_proof" in vars(schedule)
    assert next(iter(lowered.schedules.values())).algorithm == "dissemination"
    assert of(lowered, "permute").collective.pairs == ((0, 1),)


def test_forced_algorithms_inside_a_custom_rule():
    @fc.custom_vjp
    def total(x: Any) -> Any:
        return fc.all_reduce(x, "x", algorithm="ring")

    total.defvjp(lambda x: (total(x), None), lambda _, ct: (fc.pvary(fc.all_reduce(ct, "x", algorithm="circulant"), "x"),))
    lowered = per_device(MESHES[4], lambda x: total(x)).lower(numbers(MESHES[4]))
    assert [s.algorithm for s in lowered.schedules.values()] == ["ring"]

    wrong = fc.custom_vjp(lambda x: fc.all_reduce(x, "x", algorithm="rnig"))
    wrong.defvjp(lambda x: (wrong(x), None), lambda _, ct: (ct,))
    error = refusal(lambda x: wrong(x))
    assert "unknown algorithm 'rnig'" in str(error) and error.source.line == line_of(wrong.fn)


def test_what_cannot_run_is_proved_when_it_is_asked_for():
    def lowered(p: int, how: str | None = None) -> Any:
        mesh = fc.abstract_mesh({"x": p})
        step = fc.jit(lambda x: fc.all_reduce(x, "x", algorithm=how), mesh=mesh, in_specs=P("x"), out_specs=P())
        return step.lower(np.broadcast_to(np.float32(0), (p,)))

    huge = lowered(1_000_000)  # a schedule of so many ranks would not fit into memory
    assert huge.collectives().rows[0].schedule == fc.schedules.algorithms("all_reduce")[0]
    assert len(huge.fingerprint) == 64 and "schedules" not in vars(huge)
    with pytest.raises(fc.errors.MeshError, match="no devices"):
        huge.compile()
    assert "schedules" in vars(lowered(256)) and [s.nranks for s in lowered(300).schedules.values()] == [300]


def test_combine_does_not_mix_algorithms():
    def step(x: Any) -> Any:
        hows = ("ring", None, "ring", "circulant", None)
        return [fc.all_reduce(x * k, "x", algorithm=how) for k, how in enumerate(hows)]

    lowered = per_device(MESHES[4], step).lower(numbers(MESHES[4]))
    found = sorted((s.algorithm, len(e.inputs)) for e, s in lowered.schedules.items())
    assert [(how, n) for how, n in found if how in ("ring", "circulant")] == [("circulant", 1), ("ring", 2)]
    assert len(found) == 3


def algebra_of(fn: Callable[[Any], Any]) -> list[tuple[str, str]]:
    lowered = per_device(MESHES[4], fn).lower(numbers(MESHES[4], np.float32, (8, 8)))
    return [(e.primitive.name, s.algorithm) for e, s in lowered.schedules.items()]


def test_algebra_leaves_forced_collectives_of_another_kind_alone():
    (free,) = algebra_of(lambda x: fc.own_slice(fc.all_reduce(x, "x"), "x"))
    assert free[0] == "reduce_scatter"
    assert algebra_of(lambda x: fc.own_slice(fc.all_reduce(x, "x", algorithm="ring"), "x")) == [("all_reduce", "ring")]
    ((kind, _),) = algebra_of(lambda x: fc.all_gather(fc.reduce_scatter(x, "x"), "x"))
    assert kind == "all_reduce"
    for first, second in (("ring", None), (None, "ring"), ("ring", "ring")):
        found = algebra_of(lambda x: fc.all_gather(fc.reduce_scatter(x, "x", algorithm=first), "x", algorithm=second))
        assert [kind for kind, _ in found] == ["reduce_scatter", "all_gather"]
        assert [how for _, how in found if how == "ring"] == [how for how in (first, second) if how]
    # What moves nothing in the end goes, forced or not.
    assert algebra_of(lambda x: fc.own_slice(fc.all_gather(x, "x", algorithm="ring"), "x")) == []


def test_algebra_composes_permutes_of_one_algorithm():
    with_algorithm("permute", "straight", lambda p, pairs: straight(pairs))
    try:

        def twice(first: str | None, second: str | None) -> list[tuple[str, str]]:
            pairs = [(0, 1), (1, 2)]
            return algebra_of(
                lambda x: fc.permute(fc.permute(x, "x", pairs=pairs, algorithm=first), "x", pairs=pairs, algorithm=second)
            )

        assert twice("straight", "straight") == [("permute", "straight")]
        assert len(twice(None, None)) == 1
        assert len(twice(None, "straight")) == len(twice("straight", None)) == 2
    finally:
        del _ALGORITHMS["permute"]["straight"]


def test_transposes_of_the_same_kind_keep_the_algorithm():
    def kinds(call: Callable[[Any], Any]) -> list[tuple[str, str]]:
        def loss(x: Any) -> Any:
            y = call(x)
            return fc.all_reduce(np.sum(y * y), "x", algorithm="ring") if "x" in y.varying else np.sum(y * y)

        traced = per_device(MESHES[4], fc.grad(loss)).trace(numbers(MESHES[4], np.float32, (8, 8)))
        found = [(e.primitive.name, e.params["algorithm"]) for e in traced.program.collectives()]
        return [f for f in found if f != ("all_reduce", "ring")]

    exchanged = kinds(lambda x: fc.all_to_all(x, "x", split_dim=0, concat_dim=1, algorithm="bruck"))
    assert exchanged == [("all_to_all", "bruck")] * 2
    name = fc.schedules.algorithms("permute", 4)[0]
    assert kinds(lambda x: fc.permute(x, "x", pairs=[(0, 1)], algorithm=name)) == [("permute", name)] * 2
    assert kinds(lambda x: fc.gather(x, "x", algorithm="binomial")) == [("gather", "binomial"), ("scatter", None)]
    assert kinds(lambda x: fc.scatter(x, "x", algorithm="binomial")) == [("scatter", "binomial"), ("gather", None)]
    assert kinds(lambda x: fc.reduce_scatter(x, "x", algorithm="ring")) == [("reduce_scatter", "ring"), ("all_gather", None)]
    assert kinds(lambda x: fc.reduce(x, "x", algorithm="binomial")) == [("reduce", "binomial"), ("broadcast", None)]
    assert kinds(lambda x: fc.pvary(fc.broadcast(x, "x", algorithm="binomial"), "x")) == [
        ("broadcast", "binomial"),
        ("all_reduce", None),
    ]
    assert kinds(lambda x: fc.all_reduce(x, "x", op="max", algorithm="ring")) == [("all_reduce", None)]


# ---------------------------------------------------------------- errors


def refusal(call: Callable[[Any], Any], mesh: fc.Mesh = MESHES[4]) -> ScheduleError:
    """The error of a jitted step, which names this file and the line of the call."""
    with pytest.raises(ScheduleError) as caught:
        per_device(mesh, call)(numbers(mesh, np.float32, (8, 8)))
    assert isinstance(caught.value, ValueError)
    return caught.value


def line_of(call: Callable[..., Any]) -> int:
    return call.__code__.co_firstlineno


def test_an_unknown_algorithm():
    call = lambda x: fc.all_reduce(x, "x", algorithm="rnig")
    error = refusal(call)
    choices = ", ".join(fc.schedules.algorithms("all_reduce", 4))
    assert "unknown algorithm 'rnig' for all_reduce." in str(error) and f"For 4 ranks there are: {choices}." in str(error)
    assert (error.source.file, error.source.line) == (__file__, line_of(call))
    for kind, how in {"barrier": "ring", "gather": "ring", "permute": "ring"}.items():
        error = refusal(lambda x: (fc.barrier("x", algorithm=how), x)[1] if kind == "barrier" else CALLS[kind](x, "x", 4, how))
        assert f"unknown algorithm {how!r} for {kind}" in str(error)


def test_an_unknown_algorithm_is_found_by_every_stage():
    step = per_device(MESHES[4], lambda x: fc.broadcast(x, "x", algorithm="nothing"))
    for stage in (step.trace, step.lower, step):
        with pytest.raises(ScheduleError, match="unknown algorithm 'nothing' for broadcast"):
            stage(np.ones((4, 2)))


def test_a_number_of_devices_that_an_algorithm_cannot_do():
    call = lambda x: fc.all_gather(x, "x", algorithm="recursive_doubling")
    per_device(MESHES[4], call)(np.ones((4, 2)))
    error = refusal(call, MESHES[6])
    assert "all_gather algorithm 'recursive_doubling' needs a power of two of ranks, not 6" in str(error)
    assert "ring" in str(error).split("For 6 ranks there are: ")[1] and error.source.line == line_of(call)


@pytest.mark.parametrize("wrong", [True, 1, ["ring"], b"ring"], ids=repr)
@in_groups("kind", [*CALLS, "barrier"])
def test_what_is_no_name(kind: str, wrong: Any):
    call = lambda x: fc.barrier("x", algorithm=wrong) if kind == "barrier" else CALLS[kind](x, "x", 4, wrong)
    error = refusal(call)
    assert f"{kind}: algorithm={wrong!r} must be the name of an algorithm" in str(error)
    assert error.source.file == (__file__ if kind == "barrier" else schedule_calls.__file__)  # the line that calls it


def with_algorithm(kind: str, name: str, function: Any, **options: Any) -> None:
    """Register for a test; the caller takes it away again."""
    fc.schedules.algorithm(kind, name=name, **options)(function)


def straight(pairs: Any) -> Any:
    """A permute in one round."""
    if pairs:
        source, destination = np.array(pairs).T
        yield Move((destination, "output", 0), (source, "input", 0))


def forgets_the_last(p):
    """Every rank adds all vectors but the last one."""
    yield Move((np.arange(p), "output", 0), [(i, "input", 0) for i in range(p - 1)])  # here


def adds_them_all(p):
    yield Move((np.arange(p), "output", 0), [(i, "input", 0) for i in reversed(range(p))])


def test_a_wrong_algorithm_of_the_users_is_refused_before_anything_runs():
    with_algorithm("all_reduce", "mine", forgets_the_last)
    try:
        traced: list[int] = []

        def call(x: Any) -> Any:
            traced.append(1)
            return fc.all_reduce(x, "x", algorithm="mine")

        step = per_device(MESHES[4], call)
        step.trace(np.ones((4, 3)))
        for stage in (step.lower, step):
            with pytest.raises(ScheduleError) as caught:
                stage(np.ones((4, 3)))
            text = str(caught.value)
            assert "mine" in text and "rank 3 is missing" in text and "output[0] of rank 0" in text
            source = caught.value.source
            assert (source.file, source.line) == (__file__, line_of(forgets_the_last) + 2)
            (note,) = caught.value.__notes__
            assert note.startswith("in the schedule of all_reduce, algorithm 'mine', called at test_schedules_compiler.py:")
            assert all(frame.name != "prove" for frame in caught.traceback[:2])
        assert len(traced) == 3
    finally:
        del _ALGORITHMS["all_reduce"]["mine"]


def test_an_algorithm_that_is_defined_anew_is_the_one_that_runs():
    x = numbers(MESHES[4], np.float32, (33,))
    try:
        for function in (forgets_the_last, adds_them_all):
            function.__qualname__ = "mine"  # as when a notebook's cell runs again
            with_algorithm("all_reduce", "mine", function)
            step = forced("all_reduce", "mine", MESHES[4])
            if function is forgets_the_last:
                with pytest.raises(ScheduleError, match="rank 3 is missing"):
                    step(x)
        assert bits(step(x).shards[2][0]) == bits(((x[3] + x[2]) + x[1]) + x[0])
        first = step.lower(x).fingerprint

        def left(p):
            yield Move((np.arange(p), "output", 0), [(i, "input", 0) for i in range(p)])

        left.__qualname__ = "mine"
        with_algorithm("all_reduce", "mine", left)
        assert forced("all_reduce", "mine", MESHES[4]).lower(x).fingerprint != first  # another order under the same name
    finally:
        del _ALGORITHMS["all_reduce"]["mine"]


def test_importing_funccoll_has_schedules_and_no_numba():
    code = """
import sys, funccoll as fc
assert not [m for m in sys.modules if m.startswith("funccoll.schedules")]  # 40 ms that wait for the first collective
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=fc.make_mesh({"d": 2}), in_specs=fc.P("d"), out_specs=fc.P())
assert step(fc.device_put([1.0, 2.0], step.mesh, fc.P("d")))[0] == 3
assert fc.schedules is sys.modules["funccoll.schedules"] and fc.schedules.build
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
