"""Loops as one kernel: which ones become one, that it computes what NumPy does, and that signals are answered meanwhile."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.compiler.codegen.fused_calls import run_loop
from funccoll.compiler.generate import in_execution_order
from funccoll.config import CHECK, FUSE
from funccoll.core.ir import Equation
from funccoll.kernels.native import machine_code
from funccoll.kernels.native.compiled_groups import functions, kernel_of
from funccoll.kernels.native.loop import FusedLoop, LoopState
from funccoll.kernels.native.loop_kernel import iterations_of_call
from funccoll.primitives.fused import fused_scan_p
from tests.support.cases.loop_programs import random_loop
from tests.support.example_counts import examples

pytestmark = [
    pytest.mark.covers("control-flow"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]
RNG = np.random.default_rng(0)


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (RNG.normal(size=shape) / 3).astype(dtype)


def loops(fn: Any, *arguments: Any, **specs: Any) -> list[Equation]:
    """The loops of a program that are kernels, and those that are not, at all depths."""
    jitted: Any = fc.jit(fn, **specs)
    program = in_execution_order(jitted.lower(*arguments).program, fused=True).check()
    return [eqn for eqn, _ in program.executed() if eqn.primitive.name in ("fused_scan", "scan", "while")]


def names(fn: Any, *arguments: Any, **specs: Any) -> list[str]:
    return [eqn.primitive.name for eqn in loops(fn, *arguments, **specs)]


def by_numpy(fn: Any, *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FUSE, "0")
        return fc.jit(fn)(*arguments)


def assert_like_numpy(fn: Any, *arguments: Any) -> None:
    found, wanted = (fc.tree.leaves(run(*arguments)) for run in (fc.jit(fn), lambda *a: by_numpy(fn, *a)))
    for got, want in zip(found, wanted, strict=True):
        got, want = np.asarray(got), np.asarray(want)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        scale = float(np.abs(want).max(initial=1e-3)) if want.dtype.kind == "f" else 0
        np.testing.assert_allclose(got, want, rtol=0, atol=scale * (1e-4 if want.dtype == np.float32 else 1e-11))


def rnn(w, xs, reverse=False):
    def cell(h, x):
        h = np.tanh(h @ w + x)
        return h, h

    return fc.scan(cell, np.zeros(xs.shape[1:], xs.dtype), xs, reverse=reverse)


# ------------------------------------------------------------ values


@examples(400, 6)
@given(seed=st.integers(0, 1 << 32))
def test_random_loops_compute_what_numpy_does(seed):
    fn, arguments = random_loop(seed)
    assert set(names(fn, *arguments)) == {"fused_scan"}
    assert_like_numpy(fn, *arguments)


@pytest.mark.parametrize("batch", [(), (1,), (32,)])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_recurrent_network_and_its_gradient(batch, reverse):
    loss = lambda w, xs: sum((y**2).sum() for y in rnn(w, xs, reverse))
    arguments = values(40, 40), values(9, *batch, 40)
    assert names(fc.grad(loss, (0, 1)), *arguments) == ["fused_scan", "fused_scan"]
    assert_like_numpy(fc.value_and_grad(loss, (0, 1)), *arguments)


def test_gates_of_a_cell_and_their_gradient():
    def loss(w, xs):
        def cell(state, x):
            h, c = state
            i, f, o, u = np.split(np.concatenate([x, h], -1) @ w, 4, -1)
            c = fc.nn.sigmoid(f) * c + fc.nn.sigmoid(i) * np.tanh(u)
            h = fc.nn.sigmoid(o) * np.tanh(c)
            return (h, c), {"h": h, "gates": (i, o)}

        zeros = np.zeros((xs.shape[1], 16), xs.dtype)
        _, ys = fc.scan(cell, (zeros, zeros), xs)
        return (ys["h"] ** 2).mean() + ys["gates"][0].sum()

    arguments = values(32, 64), values(6, 5, 16)
    assert names(fc.grad(loss, (0, 1)), *arguments) == ["fused_scan", "fused_scan"]
    assert_like_numpy(fc.grad(loss, (0, 1)), *arguments)


def test_a_stencil_and_its_gradient():
    def heat(x):
        around = lambda x: np.roll(x, 1, 0) + np.roll(x, -1, 0) + np.roll(x, 1, 1) + np.roll(x, -1, 1)
        return fc.fori_loop(0, 7, lambda i, x: x + np.float32(0.1) * (around(x) - 4 * x) + i, x)

    x = values(12, 40)
    assert names(heat, x) == ["fused_scan"] and names(fc.grad(lambda x: (heat(x) ** 2).sum()), x) == ["fused_scan"] * 2
    assert_like_numpy(fc.grad(lambda x: (heat(x) ** 2).sum()), x)
    assert_like_numpy(heat, x)


def test_carries_that_stay_change_places_and_are_read_late():
    def fn(a, b, c, xs):
        def body(carry, x):
            a, b, c, kept, n = carry
            return (b, a, c + a, kept, n + 1), (c, a * x, n, b[0], np.float32(3))

        return fc.scan(body, (a, b, c, a, 5), xs)

    arguments = values(33), values(33), values(33), values(7, 33)
    assert names(fn, *arguments) == ["fused_scan"]
    assert_like_numpy(fn, *arguments)


def test_what_still_reads_the_carry_does_not_write_over_it():
    w = values(70, 70)
    for body in (lambda h: h @ w, lambda h: h * (1 + h[:1]), lambda h: np.roll(h, 1, 0), lambda h: np.transpose(h)):
        fn = lambda h, body=body: fc.fori_loop(0, 3, lambda i, h: body(h), h)
        assert names(fn, values(70, 70)) == ["fused_scan"]
        assert_like_numpy(fn, values(70, 70))


@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.uint32, np.bool_])
def test_other_dtypes(dtype):
    one = np.ones((), dtype)
    step = (lambda c, x: (c ^ x, c & x)) if dtype == np.bool_ else (lambda c, x: (c * (one + one) + x, c - x))
    fn = lambda c, xs: fc.scan(step, c, xs)
    arguments = (np.arange(20) % 3).astype(dtype), (np.arange(100).reshape(5, 20) % 7).astype(dtype)
    assert names(fn, *arguments) == ["fused_scan"]
    assert_like_numpy(fn, *arguments)


def test_one_iteration_and_none():
    for length in (0, 1):
        assert_like_numpy(rnn, values(8, 8), values(length, 2, 8))


def test_vmap_of_a_loop_in_a_loop_and_of_stacks_of_matrices():
    loss = lambda w, xs: rnn(w, xs)[1].sum()
    for axes, w in (((None, 0), values(16, 16)), ((0, 0), values(4, 16, 16))):
        fn = fc.vmap(fc.grad(loss, (0, 1)), axes)
        assert names(fn, w, values(4, 5, 16)) == ["fused_scan", "fused_scan"]
        assert_like_numpy(fn, w, values(4, 5, 16))
    nested = lambda w, xs: fc.fori_loop(0, 3, lambda i, total: total + rnn(w, xs + total)[1].sum(), np.float32(0))
    assert names(nested, values(16, 16), values(4, 16)) == ["scan", "fused_scan"]
    assert_like_numpy(nested, values(16, 16), values(4, 16))


def test_arguments_are_not_written_to_and_donated_ones_are():
    fn = lambda h, xs: fc.scan(lambda h, x: (np.tanh(h * 2 + x), h), h, xs)
    h, xs = values(2000), values(3, 2000)
    before = h.copy(), xs.copy()
    wanted = fc.jit(fn)(h, xs)
    np.testing.assert_array_equal(h, before[0])
    np.testing.assert_array_equal(xs, before[1])
    for got, want in zip(fc.jit(fn, donate_argnums=0)(h, xs), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    twice = lambda xs: fc.scan(lambda h, x: (h + xs[0] * x, h), xs[0], xs)  # the carry begins as what the body captures
    assert_like_numpy(twice, xs)


# ------------------------------------------------------------ bits


def test_devices_have_the_bits_of_one(monkeypatch):
    monkeypatch.setenv(CHECK, "1")
    w, xs = values(40, 40), values(6, 4, 40)
    mesh = fc.make_mesh({"i": 2})
    on_mesh = fc.jit(lambda w, xs: rnn(w, xs)[1], mesh=mesh, in_specs=(P(), P(None, "i")), out_specs=P(None, "i"))
    halves = [np.asarray(fc.jit(rnn)(w, np.ascontiguousarray(xs[:, k : k + 2]))[1]) for k in (0, 2)]
    np.testing.assert_array_equal(np.asarray(on_mesh(w, xs)), np.concatenate(halves, 1))


def test_a_gradient_on_a_mesh():
    mesh = fc.make_mesh({"i": 2})

    def step(w, xs):
        return fc.grad(lambda w: fc.all_reduce((rnn(w, xs)[1] ** 2).sum(), "i"))(w)

    w, xs = values(16, 16), values(5, 4, 16)
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": (P(), P(None, "i")), "out_specs": P()}
    found = fc.jit(step, **specs)(w, xs)
    np.testing.assert_allclose(found, fc.jit(fc.grad(lambda w: (rnn(w, xs)[1] ** 2).sum()))(w), rtol=1e-4, atol=1e-5)


def test_what_all_devices_share_is_a_loop_of_its_own(monkeypatch):
    monkeypatch.setenv(CHECK, "1")

    def fn(x, scale):
        def body(carry, v):
            count, factor, h = carry
            return (count + 1, factor * scale, np.tanh(h * factor + v) * count), (h, factor)

        return fc.scan(body, (0, scale, x[0]), x)

    x, scale = values(6, 4, 30), np.float32(0.9)
    shared, own = P(), P("i")
    specs: dict[str, Any] = {"in_specs": (P(None, "i"), P()), "out_specs": ((shared, shared, own), (P(None, "i"), shared))}
    specs["mesh"] = fc.make_mesh({"i": 2})
    assert names(fn, x, scale, **specs) == ["fused_scan", "fused_scan"]
    runs: list[Any] = [fc.jit(fn, **specs), fc.jit(fn)]
    found, wanted = (fc.tree.leaves(run(x, scale)) for run in runs)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


# ------------------------------------------------------------ what stays a loop


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("a sort", lambda h, x: (np.sort(h), None)),
        ("an index that may be wrong", lambda h, x: (h + h[h.argmax()], None)),
        ("a report", lambda h, x: (fc.debug.print("{}", h.sum()) or h * 2, None)),
        ("a complex number", lambda h, x: ((h * 1j).real, None)),
        (
            "a large product",
            lambda h, x: (np.tanh(np.broadcast_to(h[:, None], (64, 500)).T @ np.ones((64, 900), h.dtype))[0, :64], None),
        ),
    ],
)
def test_other_loops_stay(what, body):
    assert names(lambda h: fc.scan(body, h, None, length=3), values(64)) == ["scan"], what


def test_a_collective_in_the_body_keeps_the_loop():
    fn = lambda h: fc.fori_loop(0, 3, lambda i, h: fc.all_reduce(h, "i") * np.float32(0.3), h)
    specs: dict[str, Any] = {"mesh": fc.make_mesh({"i": 2}), "in_specs": P("i"), "out_specs": P("i")}
    assert names(lambda h: fn(h) * 1, values(2, 4), **specs) == ["scan"]


def test_the_variable_keeps_loops(monkeypatch):
    monkeypatch.setenv(FUSE, "0")
    assert names(rnn, values(8, 8), values(3, 8)) == ["scan"]


def test_the_text_shows_the_loop_and_fingerprints_do_not():
    lowered = fc.jit(rnn).lower(values(8, 8), values(3, 8))
    text = lowered.as_text(fused=True)
    assert "fused_scan[carry=1, consts=1, length=3, reverse=False]" in text and "kernel:" in text and "matmul" in text
    assert "fused" not in lowered.as_text()
    fused = in_execution_order(lowered.program, fused=True)
    assert fused.fingerprint == in_execution_order(lowered.program, fused=False).fingerprint


def test_the_reference_is_the_scan():
    w, xs = values(8, 8), values(3, 8)
    (eqn,) = loops(rnn, w, xs)
    zeros = np.zeros(8, np.float32)
    by_kernel = fc.jit(rnn)(w, xs)
    for got, want in zip(eqn.primitive.reference(w, zeros, xs, **eqn.params), by_kernel, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------ calls


def described(fn: Any, *arguments: Any) -> FusedLoop:
    (eqn,) = loops(fn, *arguments)
    assert eqn.primitive is fused_scan_p
    return eqn.params["loop"]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [4, 5])
def test_calls_of_few_iterations_go_on_where_the_last_one_ended(length, reverse):
    w, xs = values(24, 24), values(length, 3, 24)
    loop = described(lambda w, xs: rnn(w, xs, reverse), w, xs)
    function, work = functions([loop])[loop], kernel_of(loop).workspace_bytes
    found = []
    for count in (length, 2, 1):
        results = np.empty((3, 24), np.float32), np.empty((length, 3, 24), np.float32)
        run_loop(function, (w, np.zeros((3, 24), np.float32), xs, *results), 2, work, length, count)
        found.append([r.tobytes() for r in results])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_products_of_several_iterations_are_one(batch, reverse):
    """The sums of a gradient: whole blocks, a shorter last one, and calls that end within blocks."""

    def fn(total, a, b):
        def body(total, row):
            x, y = row
            return total + np.transpose(x) @ np.tanh(y), None

        return fc.scan(body, total, (a, b), reverse=reverse)[0]

    arguments = values(7, 40), values(75, batch, 7), values(75, batch, 40)
    loop = described(fn, *arguments)
    assert loop.block == 32 // batch and loop.block_calls[0] and loop.block_calls[1]
    assert_like_numpy(fn, *arguments)
    function, work = functions([loop])[loop], kernel_of(loop).workspace_bytes
    found = []
    for count in (75, 10, 1):
        result = np.empty((7, 40), np.float32)
        run_loop(function, (*arguments, result), 1, work, 75, count)
        found.append(result.tobytes())
    assert found[0] == found[1] == found[2]


def test_a_sum_that_something_reads_is_not_deferred():
    def fn(total, a):
        def body(total, x):
            total = total + np.transpose(x) @ x
            return total, total.sum()

        return fc.scan(body, total, a)

    arguments = values(7, 7), values(9, 1, 7)
    assert described(fn, *arguments).block_calls == ((), ())
    assert_like_numpy(fn, *arguments)


def test_an_interrupt_ends_a_long_loop_between_calls():
    calls = []

    def function(*arrays):
        calls.append([*arrays[-1][:2]])
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return True

    with pytest.raises(KeyboardInterrupt):
        run_loop(function, (), 0, 64, 10**9, 1000)
    assert calls == [[0, 1000], [1000, 2000]]


def test_a_call_takes_milliseconds():
    long = described(lambda x: fc.fori_loop(0, 10**6, lambda i, x: np.tanh(x), x), values(1000))
    count = iterations_of_call(long)
    assert 10 < count < 10_000 and kernel_of(long).cost > 10**6  # so that other threads run meanwhile
    assert long.states == (LoopState(4000, None),)
