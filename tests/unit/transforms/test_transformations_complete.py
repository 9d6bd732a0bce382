"""Every primitive has a rule of batching and a forward derivative, or a refusal that is stated here, and the rules are right.

vmap is compared with a loop for every choice of batched operands; jvp with vjp (the inner products with a cotangent and a
tangent agree), with differences, and with itself for each operand alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.collectives import RAGGED
from funccoll.core.interpreter import evaluate
from funccoll.core.ir import _PRIMITIVES, Primitive
from funccoll.core.types import bfloat16, is_inexact, type_of
from funccoll.errors import UnsupportedError, VaryingError
from funccoll.primitives.higher_order import checkpoint_p, custom_vjp_p
from funccoll.primitives.shard_map_call import shard_map_call_p
from funccoll.tracing import batched_evaluation
from funccoll.tracing.trace import stage
from funccoll.transforms.autodiff import backward, forward
from tests.support.cases.linear_collectives import FROM_UNVARYING, LINEAR, NONLINEAR
from tests.support.cases.primitive_examples import Example, examples
from tests.support.groups import in_groups
from tests.support.spmd import MESHES, bits, per_device, stacked

pytestmark = pytest.mark.covers("transformations")

# fmt: off
NO_DERIVATIVE = {
    "argmax", "argmin", "reduce_or", "reduce_and", "random_bits", "random_fold_in", "random_split", "stop_gradient",
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor",
    "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift", "right_shift", "bitwise_count", "isnan",
    "isinf", "isfinite", "signbit", "gcd", "lcm", "axis_index", "barrier", "argsort", "argpartition", "top_k_indices",
    "searchsorted", "random_order",
}
# fmt: on
"""Primitives through which no gradient flows: their results are integers or booleans, or constant by definition."""

REFUSED = {"optimizer_step": "has no gradient", "random_log_gamma": "have no gradient in their parameters"}
"""Primitives whose derivative is refused -> words of the error."""

RULES_ELSEWHERE = {
    "custom_vjp": "tracing/batched_evaluation.py and autodiff stage the functions it carries; tested in test_custom_vmap.py",
    "scan": "tracing/batched_control.py, autodiff/control_rules.py and control_tangents.py; tested in test_control.py",
    "while": "as scan; it has no reverse derivative, which transforms/autodiff/control_rules.py says",
    "cond": "as scan",
    "checkpoint": "transforms/autodiff/rematerialization.py and backward.py; tested in test_rematerialization.py",
    "debug_report": "primitives/debugging.py; no results and no derivative; tested in test_debug.py",
    "snapshot": "made by the pass snapshots alone",
    "pure_callback": "transforms/callbacks.py: a loop, and no derivative; tested in test_callbacks.py",
    "optimization_barrier": "made by checkpoints alone; tested in test_rematerialization.py",
    "shard_map_call": "compiler/program_calls.py; vmap and jvp refuse the call; tested in test_shard_map_gradients.py",
    "winner": "collectives/arg_reduce.py: its operands belong together; tested in test_arg_reduce.py",
    "grad_hook": "tracing/batched_evaluation.py stages its hook; tested in test_custom_vmap.py",
}
SCIPY = {name for name in _PRIMITIVES if name.startswith("scipy.")}
"""SciPy's ufuncs, which share their rules; tested in test_special.py."""
BELONG_TOGETHER = {"window_max_put", "window_max_take"}
"""Primitives of which one operand is made of another: they have no derivative in each alone."""
STEPS = {"ceil", "rint", "sign"}
"""Constant wherever they have a derivative."""
NO_OPERANDS = {"axis_index", "barrier"}
"""Nothing in them can be batched, so vmap binds them as they are."""

COLLECTIVE = {p.name for p in _PRIMITIVES.values() if p.kind in ("collective", "effect", "local")}
QUICK = {True: 1, False: 3}
"""Examples of each primitive that the fast tests take: by whether it is a ufunc, of which all have the same rules."""
PARTS = [pytest.param(False, id="some"), pytest.param(True, id="others", marks=pytest.mark.slow)]


def ours() -> dict[str, Primitive]:
    """All primitives but those that tests define."""
    modules = {name: p.infer.__module__ for name, p in _PRIMITIVES.items()}
    theirs = "funccoll.transforms.custom_primitives"
    defined = {name for name, m in modules.items() if m.startswith("funccoll.") and m != theirs}
    made_by_compiler = {"fused", "fused_scan"}
    return {
        name: p for name, p in _PRIMITIVES.items() if (name in defined or p.ufunc is not None) and name not in made_by_compiler
    }


def computed() -> list[str]:
    """Primitives that have examples. They are not looked up in `examples()`, which takes as long as many a test."""
    return sorted(set(ours()) - COLLECTIVE - set(RULES_ELSEWHERE) - SCIPY)


def each(check: Callable[[Example], None], these: list[Example], others: bool) -> None:
    """Check some of the examples, or all others; what is raised says for which one."""
    for i, example in enumerate(these):
        if (i >= QUICK[example.primitive.ufunc is not None]) == others:
            try:
                check(example)
            except BaseException as error:
                error.add_note(f"The example is {example.name}: {example}")
                raise


# ---------------------------------------------------------------- completeness


def test_every_primitive_has_examples():
    missing = set(computed()) - set(examples())
    assert not missing, f"primitives without an example (primitive_examples.py says what to do): {sorted(missing)}"
    assert not set(examples()) - set(computed())


def test_every_primitive_has_a_batching_rule():
    missing = {name for name, p in ours().items() if p.batch is None} - set(RULES_ELSEWHERE) - NO_OPERANDS
    assert not missing, f"primitives without a rule of vmap: {sorted(missing)}"


def test_every_primitive_has_derivatives_or_a_stated_reason():
    without = {name for name, p in ours().items() if p.vjp is None} - set(RULES_ELSEWHERE)
    assert without == NO_DERIVATIVE & set(ours()), "a vjp rule is missing, or NO_DERIVATIVE names one that has it"
    forwards = {name for name, p in ours().items() if p.vjp is None and p.jvp is not None}
    assert not forwards, f"a forward derivative without a vjp: {sorted(forwards)}"


def test_no_primitive_has_a_gradient_and_silently_no_tangent():
    """Each primitive with a rule of its own in reverse mode has one in forward mode; jvp refuses calls on a mesh instead."""
    backwards = {custom_vjp_p, checkpoint_p, *backward.RULES} - {shard_map_call_p}
    assert backwards == {custom_vjp_p, *forward.RULES}


def test_rules_elsewhere_exist():
    """custom_vjp apart, whose rules are the user's, each primitive has an entry where its rules are looked up."""
    of = {name: _PRIMITIVES[name] for name in RULES_ELSEWHERE if name not in ("custom_vjp", "shard_map_call")}
    assert all(p.batch or p in batched_evaluation.RULES or name == "grad_hook" for name, p in of.items())
    shown = {"debug_report", "snapshot"}  # no result depends on them
    assert all(p.jvp or p.vjp or p in forward.RULES for name, p in of.items() if name not in shown)


def test_every_collective_is_tested_below():
    elsewhere = {*map(str, RAGGED)}  # in test_ragged.py
    tested = {name.split()[0] for name in (*LINEAR, *NONLINEAR)} | NO_OPERANDS | elsewhere
    assert tested == COLLECTIVE


# ---------------------------------------------------------------- vmap


def others(x: np.ndarray) -> list[np.ndarray]:
    """Three elements of a batch from one, in whose place each may stand: matrices stay positive, indices in range."""
    if is_inexact(x.dtype):
        return [x, (x * 0.9).astype(x.dtype), (x * 1.1).astype(x.dtype)]
    if x.dtype == np.bool_ and not x.ndim:
        return [x, ~x, x]
    return [x, np.roll(x, 1), np.roll(x, 2)]


def choices(operands: int) -> list[tuple[bool, ...]]:
    """Every choice of batched operands; of more than four: each of some alone, all but it, and all."""
    if operands <= 4:
        return list(itertools.product((True, False), repeat=operands))[:-1]
    alone = np.eye(operands, dtype=bool)[:: max(operands // 4, 1)]
    return [tuple(map(bool, row)) for row in (*alone, *~alone, np.ones(operands))]


def close(found: Any, wanted: Any) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if not is_inexact(found.dtype):
        np.testing.assert_array_equal(found, wanted)
        return
    digits = 2 if found.dtype == bfloat16 else np.finfo(found.dtype).precision - 1
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    np.testing.assert_allclose(found.astype(wide), wanted.astype(wide), rtol=2 * 10.0**-digits, atol=10.0**-digits)


def traced(fn: Callable[..., Any], *args: np.ndarray) -> list[Any]:
    """The result of `fn` by a program, whose types are checked."""
    program, captured = stage(lambda *xs: fc.tree.leaves(fn(*xs)), [type_of(x) for x in args])
    return evaluate(program.check(), captured, args)[0]


def loop_of(example: Example) -> None:
    """Compare vmap with a loop, for every choice of batched operands."""
    batches = [others(x) for x in example.operands]
    for batched in choices(len(batches)):
        args = [np.stack(b) if flag else b[0] for b, flag in zip(batches, batched)]
        loop = [example(*(b[i] if flag else b[0] for b, flag in zip(batches, batched))) for i in range(3)]
        wanted = [np.stack(each) for each in zip(*loop)] if example.primitive.multiple else [np.stack(loop)]
        mapped = fc.vmap(example, tuple(0 if flag else None for flag in batched))
        for found in (fc.tree.leaves(mapped(*args)), traced(mapped, *args)):
            for one, want in zip(found, wanted, strict=True):
                close(one, want)


@pytest.mark.parametrize("others", PARTS)
@in_groups("name", computed())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_vmap_is_a_loop(name, others):
    each(loop_of, examples()[name], others)


def empty_batch_of(example: Example) -> None:
    args = [np.stack(others(x))[:0] for x in example.operands]
    found = fc.tree.leaves(fc.vmap(example)(*args))
    types = example.primitive.infer(*map(type_of, example.operands), **example.params)
    assert [(y.shape, y.dtype) for y in found] == [((0, *t.shape), t.dtype) for t in types]


@pytest.mark.parametrize("others", PARTS)
@in_groups("name", computed())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_vmap_of_an_empty_batch(name, others):
    each(empty_batch_of, examples()[name], others)


# ---------------------------------------------------------------- jvp


def differentiable(example: Example) -> bool:
    return example.smooth and example.primitive.vjp is not None and any(is_inexact(x.dtype) for x in example.operands)


def of_inexact(example: Example) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """The example as a function of those operands that have derivatives, and the operands."""
    places = [i for i, x in enumerate(example.operands) if is_inexact(x.dtype)]

    def fn(*xs: Any) -> Any:
        full = list(example.operands)
        for i, x in zip(places, xs, strict=True):
            full[i] = x
        return example(*full)

    return fn, [example.operands[i] for i in places]


def noise(x: Any, rng: np.random.Generator) -> np.ndarray:
    x = np.asarray(x)
    values = rng.normal(size=x.shape) + (1j * rng.normal(size=x.shape) if x.dtype.kind == "c" else 0)
    return values.astype(x.dtype)


def pairing(a: Any, b: Any) -> float:
    return sum(float(np.real(np.sum(np.asarray(x, np.complex128) * y))) for x, y in zip(a, b, strict=True))


def derivatives_of(example: Example) -> None:
    """Compare jvp with vjp, with a linearization, with itself for each operand alone, and with differences."""
    fn, xs = of_inexact(example)
    rng = np.random.default_rng(0)
    out, pull = fc.vjp(fn, *xs)
    vs = tuple(noise(x, rng) for x in xs)
    value, tangent = fc.jvp(fn, tuple(xs), vs)
    outs, values, tangents = (list(map(np.asarray, fc.tree.leaves(y))) for y in (out, value, tangent))
    for y, again, t in zip(outs, values, tangents, strict=True):
        close(again, y)
        assert (t.shape, t.dtype) == (y.shape, y.dtype)
        assert is_inexact(y.dtype) or not t.any()
    floats = [k for k, y in enumerate(outs) if is_inexact(y.dtype)]
    if not floats:
        return
    parts = [np.real(np.empty(0, x.dtype)).dtype for x in (*xs, *(outs[k] for k in floats))]
    accuracy = {2: 3e-2, 4: 1e-4, 8: 1e-9}[min(p.itemsize for p in parts)]

    cts = [noise(y, rng) if k in floats else np.zeros_like(y) for k, y in enumerate(outs)]
    left, right = pairing(cts, tangents), pairing(pull(cts if example.primitive.multiple else cts[0]), vs)
    np.testing.assert_allclose(left, right, rtol=accuracy, atol=accuracy)
    by_program = traced(lambda *both: fc.jvp(fn, both[: len(xs)], both[len(xs) :])[1], *xs, *vs)
    for t, kept, again in zip(tangents, fc.tree.leaves(fc.linearize(fn, *xs)[1](*vs)), by_program, strict=True):
        close(kept, t)
        close(again, t)

    wide = lambda y: np.asarray(y).astype(np.complex128 if np.asarray(y).dtype.kind == "c" else np.float64)
    alone = [fc.jvp(lambda x, i=i: fn(*xs[:i], x, *xs[i + 1 :]), (xs[i],), (v,))[1] for i, v in enumerate(vs)]
    for k, each in enumerate(zip(*map(fc.tree.leaves, alone))):
        np.testing.assert_allclose(sum(map(wide, each)), wide(tangents[k]), rtol=accuracy, atol=accuracy)
    if accuracy == 1e-9:
        ends = [fc.tree.leaves(fn(*(x + step * v for x, v in zip(xs, vs)))) for step in (1e-6, -1e-6)]
        for k in floats:
            np.testing.assert_allclose((ends[0][k] - ends[1][k]) / 2e-6, tangents[k], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("others", PARTS)
@in_groups(
    "name",
    [
        name
        for name in computed()
        if name not in {*NO_DERIVATIVE, *REFUSED, *BELONG_TOGETHER, *STEPS}
        and not name.startswith(("fft.", "linalg."))  # test_numpy_gradients.py has their gradients along a direction
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_jvp(name, others):
    smooth = list(filter(differentiable, examples()[name]))
    assert smooth, f"{name} has a derivative, and no example at which it is differentiable"
    each(derivatives_of, smooth, others)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_derivatives_say_so(name):
    fn, xs = of_inexact(examples()[name][0])
    for derivative in (lambda: fc.jvp(fn, tuple(xs), tuple(xs)), lambda: fc.vjp(fn, *xs)[1](fn(*xs))):
        with pytest.raises(UnsupportedError, match=REFUSED[name]):
            derivative()


# ---------------------------------------------------------------- collectives


ALL = {**LINEAR, **NONLINEAR}


SLOW = [name for name in ALL if sum(n.split()[0] == name.split()[0] for n in list(ALL)[: list(ALL).index(name)])]
"""All but the first of each collective."""
QUICKLY = [n for n in ALL if n not in SLOW]
SOME = [pytest.param(QUICKLY, id="one of each"), pytest.param(SLOW, id="others", marks=pytest.mark.slow)]


def start(name: str, x: Any) -> Any:
    return fc.broadcast(x, "data") if name in FROM_UNVARYING else x


def varying(x: Any) -> Any:
    return fc.pvary(x, "data")


@pytest.mark.parametrize("names", SOME)
def test_a_batched_collective_is_a_loop_of_them(names):
    """Two operands, of which one or both are batched: the same bits as the collective of each element."""

    def both(x: Any, y: Any) -> Any:
        results = {}
        for name, op in ((name, ALL[name]) for name in names):
            for axes in ((0, 0), (0, None), (None, 1)) if name in SLOW else ((0, None),):
                pair = lambda x, y, op=op: (
                    op((x, y), "data", 4) if name not in FROM_UNVARYING else (op(x, "data", 4), op(y, "data", 4))
                )
                of_x, of_y = (start(name, v) for v in (x, np.moveaxis(y, 0, 1) if axes[1] == 1 else y))
                mapped = fc.vmap(pair, axes)(of_x if axes[0] == 0 else of_x[0], of_y if axes[1] is not None else of_y[0])
                each = [
                    pair(start(name, x[i if axes[0] == 0 else 0]), start(name, y[i if axes[1] is not None else 0]))
                    for i in range(3)
                ]
                loop = tuple(np.stack(z) for z in zip(*each))
                results[f"{name} {axes}"] = fc.tree.map(varying, (mapped, loop))
        return results

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 4, 3, 8, 4))
    for name, (mapped, loop) in per_device(MESHES["line"], both)(x, y).items():
        for one, two in zip(mapped, loop, strict=True):
            assert bits(one) == bits(two), name


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in ALL])
def test_a_batched_collective_is_one(name):
    """One equation moves a whole batch, and an operand that is not batched only once."""
    mapped = lambda x, y: fc.tree.map(varying, fc.vmap(lambda x, y: ALL[name]([x, y], "data", 4), (0, None))(x, y))
    operand = lambda shape: np.zeros(shape, np.float32)
    spec = P() if name in FROM_UNVARYING else P("data")
    step = fc.jit(stacked(mapped), mesh=MESHES["line"], in_specs=spec, out_specs=P("data"))
    program = step.trace(operand((4, 3, 8, 4)), operand((4, 8, 4))).program
    kind = name.split()[0]
    found = [eqn for eqn in program.equations if eqn.primitive.name == kind]
    assert [len(eqn.inputs) for eqn in found] == ([1, 1] if name in FROM_UNVARYING else [2])
    assert {a.type.shape for eqn in found for a in eqn.inputs} in ({(3, 8, 4), (1, 8, 4)}, {(3, 8, 4), (8, 4)})


@pytest.mark.parametrize("names", SOME)
def test_jvp_of_collectives(names):
    """The tangent of a loss through each collective is the inner product of its gradient and the tangent, twice over."""

    def both(x: Any, v: Any) -> Any:
        results = {}
        for name, op in ((name, ALL[name]) for name in names):

            def loss(x: Any, op: Any = op) -> Any:
                y = op(0.5 * np.tanh(x) + 1, "data", 4)
                y = np.sum(np.cos(np.arange(y.size)).reshape(y.shape) * np.sin(y) * y)
                return fc.all_reduce(y, "data") if "data" in y.varying else y

            def slope(x: Any, v: Any, loss: Any = loss) -> Any:
                total = np.sum(fc.grad(loss)(x) * v)
                return fc.all_reduce(total, "data") if "data" in total.varying else total

            of_x, of_v = start(name, x), start(name, v)
            forward = lambda x, loss=loss, of_v=of_v: fc.jvp(loss, (x,), (of_v,))[1]
            first = forward(of_x), fc.linearize(loss, of_x)[1](of_v), slope(of_x, of_v)
            second = fc.jvp(forward, (of_x,), (of_v,))[1], fc.jvp(lambda x: slope(x, of_v), (of_x,), (of_v,))[1]
            results[name] = fc.tree.map(varying, (first, second))
        return results

    rng = np.random.default_rng(1)
    x, v = rng.normal(size=(2, 4, 4, 4))
    for name, (first, second) in per_device(MESHES["line"], both)(x, v).items():
        for values in (first, second):
            for other in values[1:]:
                np.testing.assert_allclose(np.asarray(values[0]), np.asarray(other), rtol=1e-9, err_msg=name)
        assert np.all(np.asarray(first[0]) != 0)


def test_jvp_of_a_reduce_scatter_of_an_extremum_is_refused(line):
    bad = lambda x: fc.jvp(lambda x: fc.reduce_scatter(x, "data", op="max"), (x,), (x,))[1]
    with pytest.raises(VaryingError, match="no gradient"):
        per_device(line, bad)(np.ones((4, 4)))
