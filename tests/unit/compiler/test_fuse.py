"""Fused programs: what becomes a group, that it computes what NumPy does, and that nothing outside it changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.compiler.generate import in_execution_order
from funccoll.compiler.passes import operand_views, rematerialize, result_places
from funccoll.config import FUSE
from funccoll.core.ir import Program
from funccoll.kernels.native import machine_code
from funccoll.primitives.fused import fused_p
from tests.support.cases.fused_programs import random_program
from tests.support.example_counts import examples

pytestmark = [
    pytest.mark.covers("jit"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]
RNG = np.random.default_rng(0)


def values(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


def fused(fn: Any, *arguments: Any, **specs: Any) -> Program:
    """The program of a function as it runs."""
    jitted: Any = fc.jit(fn, **specs)
    return in_execution_order(jitted.lower(*arguments).program, fused=True)


def groups(program: Program) -> list[Program]:
    return [eqn.params["body"] for eqn in program.equations if eqn.primitive is fused_p]


def by_numpy(fn, *arguments):
    """Results of the compiled function without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FUSE, "0")
        return fc.jit(fn)(*arguments)


def layer_norm(x, scale, shift):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + np.float32(1e-5)) * scale + shift


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


# ------------------------------------------------------------ groups


def test_the_gradient_of_layer_norm_and_gelu_is_one_kernel():
    loss = lambda x, scale, shift: fc.nn.gelu(layer_norm(x, scale, shift)).sum()
    program = fused(fc.grad(loss, (0, 1, 2)), values(4, 8, 64), values(64), values(64))
    (eqn,) = program.equations
    assert eqn.primitive is fused_p and len(eqn.params["body"].equations) > 40


def test_a_group_ends_at_products_and_collectives():
    def fn(x, w):
        y = softmax(np.tanh(x) @ w)
        return np.exp(fc.all_reduce(y, "i")) * 2

    program = fused(fn, values(8, 16, 64), values(64, 32), mesh=fc.make_mesh({"i": 2}), in_specs=(P("i"), P()), out_specs=P())
    names = [eqn.primitive.name for eqn in program.equations]
    assert names.count("fused") == 3 and names.index("fused") < names.index("matmul") < names.index("all_reduce")


def test_what_something_outside_reads_is_a_result():
    def fn(x):
        y = np.exp(x) + 1
        z = y * 2
        return (z + np.sort(y, axis=-1)) * z, np.reshape(z, (-1,))  # sort is not fused, and neither are views

    x = values(128, 128)
    first, second = groups(fused(fn, x))
    assert len(first.outputs) == 2 and len(second.outputs) == 1
    for got, want in zip(fc.jit(fn)(x), by_numpy(fn, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_path_through_other_operations_keeps_groups_apart():
    def fn(x):
        y = np.exp(x)
        return np.sort(y, axis=-1) * y + x  # one group with `y` would read what it makes

    assert [len(g.equations) for g in groups(fused(fn, values(128, 128)))] == [1, 2]


def test_groups_do_not_wait_for_each_other():
    """Two domains that meet through views: a path may lead back to a group from an equation behind its last one."""

    def loss(x, scale, shift):
        grouped = x.reshape(2, 4, 2, 5, 5)
        centered = grouped - grouped.mean((2, 3, 4), keepdims=True)
        normal = centered / np.sqrt((centered**2).mean((2, 3, 4), keepdims=True) + np.float32(1e-5))
        return np.tanh(normal.reshape(x.shape) * scale[:, None, None] + shift[:, None, None]).sum()

    arguments = values(2, 8, 5, 5), values(8), values(8)
    for got, want in zip(
        fc.jit(fc.grad(loss, (0, 1, 2)))(*arguments), by_numpy(fc.grad(loss, (0, 1, 2)), *arguments), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_small_groups_of_plain_arithmetic_stay_numpys_and_functions_do_not():
    plain = lambda x: (x + 1) * 2
    assert not groups(fused(plain, values(8))) and groups(fused(plain, values(100_000)))
    assert groups(fused(np.exp, values(8)))  # its bits should not depend on shapes


def test_a_large_reduction_is_a_kernel_and_a_small_one_is_not():
    x = values(64, 8, 16, 4)
    total = lambda x: x.sum(axis=(1, 3))
    assert len(groups(fused(total, x))) == 1 and not groups(fused(total, x[:4]))
    np.testing.assert_allclose(fc.jit(total)(x), x.sum(axis=(1, 3), dtype=np.float64), rtol=1e-6, atol=1e-5)


def test_sixteen_bits_and_integers_and_bools():
    def fn(x, n, flag):
        y = np.where(flag & (n > 3), x * 2, -x)
        return y + x, n * 2 + n, np.sum(n, axis=0), (n == 4) | flag

    n = RNG.integers(-9, 9, size=(33, 70)).astype(np.int32)
    flag = RNG.random((70,)) < 0.5
    for dtype in (np.float16, fc.bfloat16, np.float64):
        x = values(33, 70).astype(dtype)
        assert groups(fused(fn, x, n, flag))
        for got, want in zip(fc.jit(fn)(x, n, flag), by_numpy(fn, x, n, flag), strict=True):
            assert got.dtype == want.dtype and np.asarray(got).tobytes() == np.asarray(want).tobytes()


# ------------------------------------------------------------ what later groups compute again


def test_a_gradient_computes_again_what_costs_less_than_reading_it():
    """gelu's gradient reads its operand, not five arrays that its forward pass wrote for it."""
    loss = lambda x, w, bias: ((fc.nn.gelu(x @ w + bias) @ w) ** 2).sum()
    arguments = values(64, 512), values(512, 512) / 16, values(512)
    found = groups(fused(fc.grad(loss, (0, 2)), *arguments))
    forward, backward = found[0], found[-1]
    assert len(forward.outputs) == 1 and any(eqn.primitive.name == "tanh" for eqn in backward.equations)
    got, want = fc.jit(fc.grad(loss, (0, 2)))(*arguments), by_numpy(fc.grad(loss, (0, 2)), *arguments)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_reductions_and_what_others_read_are_not_computed_again():
    def fn(x, w):
        y = np.exp(x)
        scaled = y / y.sum(-1, keepdims=True)
        return np.tanh(scaled @ w) * y, np.tanh(w @ scaled) * scaled  # a product reads `scaled`, so it is in memory

    first, *others = groups(fused(fn, values(256, 256), values(256, 256)))
    assert [v.type.shape for v in first.outputs] == [(256, 256)]
    assert sum(eqn.primitive.name == "exp" for other in others for eqn in other.equations) == 1


def test_what_is_computed_again_has_the_same_bits(monkeypatch):
    def loss(x, w, scale):
        y = softmax(x @ w)
        return (np.tanh(y * scale) @ w).sum() + (layer_norm(y, scale, scale) @ w).max()

    arguments = values(100, 300), values(300, 300) / 16, values(300)
    gradient = fc.value_and_grad(loss, (0, 1, 2))
    again = fused(gradient, *arguments)
    moved = fc.tree.leaves(fc.jit(gradient)(*arguments))
    monkeypatch.setattr(rematerialize, "_COST", -1)
    other = lambda *xs: gradient(*xs)
    assert len(again.equations) <= len(fused(other, *arguments).equations)
    assert sum(len(g.outputs) for g in groups(again)) < sum(len(g.outputs) for g in groups(fused(other, *arguments)))
    for a, b in zip(moved, fc.tree.leaves(fc.jit(other)(*arguments)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# ------------------------------------------------------------ operands that are views


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return a * cos - b * sin, b * cos + a * sin


def test_slices_and_transposes_are_read_where_they_lie():
    x, cos, sin = values(4, 16, 8, 64), values(16, 1, 32), values(16, 1, 32)
    (eqn,) = fused(rotated, x, cos, sin).equations
    assert eqn.primitive is fused_p and [a.type.shape for a in eqn.inputs].count(x.shape) == 2
    for fn, *arguments in (
        (rotated, x, cos, sin),
        (lambda x: softmax(x.swapaxes(1, 2)), x),
        (lambda x: np.exp(x[::-1, 3:9:2, None]) * x[-1, 0, 0], x),
        (lambda x: np.tanh(x.reshape(64, 8, 64).transpose(1, 0, 2)[2]), x),
        (lambda x: np.exp(x.T) + np.exp(x[:, :, :, 1:]).sum(), x),  # these are copied: no rows of 32
    ):
        for got, want in zip(fc.tree.leaves(fc.jit(fn)(*arguments)), fc.tree.leaves(by_numpy(fn, *arguments)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)


def test_memory_that_a_group_reads_twice_is_not_written_to():
    def fn(x):
        y = np.sort(x, axis=-1)  # memory of the program's own
        return np.exp(y) * 2 + y[::-1]

    x = values(64, 64)
    eqn = fused(fn, x).equations[-1]
    assert eqn.inputs[0] is eqn.inputs[1] and not eqn.params["aliases"]
    np.testing.assert_allclose(fc.jit(fn)(x), by_numpy(fn, x), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------ results


@given(st.integers(0, 1 << 32))
@example(1194)  # a value that two groups read along different axes
@examples(600, few=12)
def test_random_programs_compute_what_numpy_does(seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rematerialize, "_LEAST_BYTES", seed % 2 << 16)
        for views in (operand_views, result_places):
            patch.setattr(views, "LEAST_ROW", 1 + seed // 2 % 2 * 31)
        compare_with_numpy(seed)


def compare_with_numpy(seed):
    fn, arguments = random_program(seed)
    before = [x.copy() for x in arguments]
    got, want = fc.jit(fn)(*arguments), by_numpy(fn, *arguments)
    for x, y in zip(arguments, before, strict=True):
        assert x.tobytes() == y.tobytes()
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        # x - mean(x) and its gradient cancel, so one rounding of a sum of equal terms counts thousands of times.
        bound = {4: 2e-2, 8: 1e-10}[arguments[0].dtype.itemsize] * max(1.0, np.abs(theirs).max(initial=0))
        assert np.abs(mine - theirs).max(initial=0) <= bound


def test_a_sum_counts_what_repeats_along_an_outer_axis_once():
    def fn(x):
        y = np.exp(x)
        return (np.broadcast_to(y, (3, *x.shape)) * 2).max(axis=(0, 1)), y.sum(axis=0), y.sum()

    x = values(150, 4)
    for got, want in zip(fc.jit(fn)(x), by_numpy(fn, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_result_takes_no_operands_memory_of_another_shape():
    def fn(x, w):
        y = np.exp(x @ w)[:, None]  # (8, 1, 64)
        z = np.reshape(y * 2 + 1, (8, 64))
        return np.sort(z * 3 + np.tanh(z), axis=0) + np.reshape(np.exp(y), (8, 64))[::-1]

    x, w = values(8, 16), values(16, 64) / 8
    np.testing.assert_allclose(fc.jit(fn)(x, w), by_numpy(fn, x, w), rtol=1e-5)


def test_donated_arguments_are_written_to_and_others_are_not():
    def adam(p, m, v, g):
        m = m * np.float32(0.9) + g * np.float32(0.1)
        v = v * np.float32(0.99) + g * g * np.float32(0.01)
        return p - np.float32(0.1) * m / (np.sqrt(v) + np.float32(1e-8)), m, v

    fresh = lambda: [fc.asarray(x) for x in (p, m, v)]
    p, m, v, g = values(300, 40), values(300, 40), values(300, 40) ** 2, values(300, 40)
    want = by_numpy(adam, p, m, v, g)
    step: Any = fc.jit(adam, donate_argnums=(0, 1, 2))
    for _ in range(3):
        given = fresh()
        got = step(*given, g)
        assert all(x.is_deleted() for x in given)
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def test_functions_have_one_result_on_every_mesh_and_in_every_program():
    x = values(8, 33)
    alone = np.asarray(fc.jit(lambda x: np.exp(x))(x))
    for devices in (1, 2, 8):
        mesh = fc.make_mesh({"i": devices})
        step = fc.jit(lambda x: np.exp(x), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        assert np.asarray(step(x)).tobytes() == alone.tobytes()
    among = fc.jit(lambda x: (softmax(x) + np.tanh(x), np.exp(x)))(x)[1]
    assert np.asarray(among).tobytes() == alone.tobytes()


def test_what_a_rank_shows_changes_no_bits(capsys):
    def step(x, show):
        y = np.exp(x) * 2
        if show:
            fc.debug.print("{}", y.sum())
        return (softmax(y) + y).sum(axis=0), y.sum(axis=0)

    x = values(40, 33)
    plain, shown = (fc.jit(lambda x, show=show: step(x, show)) for show in (False, True))
    for a, b in zip(plain(x), shown(x), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert capsys.readouterr().out
    assert plain.lower(x).compile()._generated.identity == shown.lower(x).compile()._generated.identity


def test_the_reference_evaluates_the_members():
    program = fused(softmax, x := values(40, 33))
    (eqn,) = program.equations
    (got,) = eqn.primitive.reference(x, **eqn.params)
    np.testing.assert_array_equal(got, softmax(x))


# ------------------------------------------------------------ what users see


def test_the_text_shows_kernels():
    lowered = fc.jit(softmax).lower(values(40, 33))
    assert "fused" not in lowered.as_text()
    text = lowered.as_text(fused=True)
    assert "= fused a" in text and "kernel: {" in text and "reduce_max" in text


def test_the_variable_switches_kernels_off(monkeypatch):
    monkeypatch.setenv(FUSE, "0")
    assert not groups(fused(softmax, values(40, 33)))
    assert machine_code.compute_mode() == "NumPy (FUNCCOLL_FUSE=0)"
