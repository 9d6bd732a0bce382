"""Kernels of groups for GPUs, without one: their text runs on this processor, thread by thread, and is assembled for GPUs.

NumPy has the results of random groups of small whole numbers, which every order of sums gives. Elementwise functions have the
bits of CPU kernels, for numbers of all kinds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.kernels.native import gpu_group, gpu_rows, machine_code
from funccoll.kernels.native.gpu_group import GpuGroup
from funccoll.kernels.native.group import FusedGroup
from funccoll.kernels.native.operations import OPERATIONS
from funccoll.kernels.native.ptx_code import ptx_of, why_no_ptx
from funccoll.kernels.native.thread_text import ThreadText
from tests.support.cases.drawn_groups import (
    DTYPES,
    drawn,
    evaluated,
    numbers,
    operation_of,
    reduction,
    shape,
    softmax,
    whole_numbers,
)
from tests.support.example_counts import examples
from tests.support.fakes.gpu_threads import ORDER, SimulatedGroup
from tests.unit.kernels import test_native_groups as native

pytestmark = [
    pytest.mark.covers("gpu-fusion"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
    pytest.mark.skipif(why_no_ptx() is not None, reason=str(why_no_ptx())),
]
ARCHITECTURES = (8, 0), (9, 0), (10, 0)
FEW = {"LONGEST": 600, "CHUNK": 300, "FOLD": 40, "_LONG": 64, "ROWS": 4, "COLUMN": 3}
"""Sizes of pieces that make small groups take all kinds of launches."""


def made(group: FusedGroup) -> GpuGroup:
    """The kernels of a group, by the sizes of pieces that hold now."""
    return gpu_group._Group("kernel", group).made()


def run(group: FusedGroup, inputs: Sequence[np.ndarray], order: np.ndarray = ORDER, blocks: int = 3) -> list[np.ndarray]:
    """The results of a group's kernels. Memory has the alignment that GPUs need, and guards around it."""
    kernels, arrays, guards = made(group), [], []

    def memory(size: int, poison: int) -> np.ndarray:
        block, start = native.guarded(size, 64)
        block[start : start + size] = poison
        guards.append((block, start, size))
        return block[start : start + size]

    for x in inputs:
        arrays.append(memory(x.nbytes, 0).view(x.dtype))
        arrays[-1][...] = x.ravel()
    for v in group.outputs:
        dtype = DTYPES[group.values[v].kind]
        arrays.append(memory(math.prod(shape(group, v)) * dtype.itemsize, 0xA5).view(dtype))
    arrays.append(memory(kernels.workspace_bytes, 0xFF))
    SimulatedGroup(kernels, len(arrays))([a.ctypes.data for a in arrays], blocks, order)
    for block, start, size in guards:
        assert (block[:start] == 0xA5).all()
        assert (block[start + size :] == 0xA5).all()
    for x, a in zip(inputs, arrays, strict=False):
        assert a.tobytes() == x.tobytes()
    outputs = arrays[len(inputs) : -1]
    return [a.reshape(shape(group, v)) for a, v in zip(outputs, group.outputs, strict=True)]


# ---------------------------------------------------------------- results


@examples(300, 8)
@given(seed=st.integers(0, 1 << 32), short=st.booleans(), few=st.booleans(), large=st.booleans())
def test_random_groups(seed: int, short: bool, few: bool, large: bool) -> None:
    """`few` elements make several launches, and `large` domains have indices of 64 bits."""
    group = drawn(seed, short)
    inputs = list(whole_numbers(group, seed))
    order = np.random.default_rng(seed).permutation(ORDER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_rows, "_LARGE", 0 if large else 1 << 29)
        for name, size in FEW.items() if few else ():
            patch.setattr(gpu_group, name, size)
        native.same(run(group, inputs, order, blocks=1 + seed % 4), evaluated(group, inputs))


@pytest.mark.parametrize("size", [5, 33, 100, 1030])
def test_softmax(size: int) -> None:
    """Rows in a part of a warp, in a warp, and in a block. The order of threads changes nothing."""
    x = np.random.default_rng(0).normal(size=(7, size)).astype(np.float32)
    group = softmax(x.shape)
    (found,) = run(group, [x])
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(found, e / e.sum(1, keepdims=True), rtol=1e-6)
    assert run(group, [x], ORDER[::-1])[0].tobytes() == found.tobytes()
    assert run(group, [x], blocks=100)[0].tobytes() == found.tobytes()


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [((300, 40), (0,)), ((300, 40), (0, 1)), ((300, 1200), (0,)), ((7, 4200), (1,)), ((7, 4200), (0, 1)), ((2, 70_000), (1,))],
)
def test_long_sums_are_added_in_float64(sizes: tuple[int, int], axes: tuple[int, ...]) -> None:
    x = (np.random.default_rng(0).random(sizes) + 1).astype(np.float32)
    kept = tuple(a for a in (0, 1) if a not in axes)
    (found,) = run(reduction("reduce_sum", x.shape, kept), [x])
    np.testing.assert_allclose(found, x.astype(np.float64).sum(axes), rtol=1e-6)


@pytest.mark.parametrize("operation", ["reduce_max", "reduce_min"])
@pytest.mark.parametrize("size", [8, 70, 1100])
def test_a_maximum_with_nan_is_nan(operation: str, size: int) -> None:
    x = np.zeros((5, size), np.float32)
    x[1, size // 2], x[2], x[3] = np.nan, -0.0, np.inf
    (found,) = run(reduction(operation, x.shape, (0,)), [x])
    np.testing.assert_array_equal(found, getattr(np, operation[7:])(x, axis=1))


def operations() -> list[Any]:
    """Each operation with each kind. The tests that are not slow have those that differ by lanes, and a few more."""
    quick = {("sin", "float"), ("cos", "double"), ("fmod", "float"), ("remainder", "double"), ("tanh", "float")}
    names = {"float": "float", "double": "double", "i32": "i32", "i64": "i64", "bool": "i1"}
    return [
        pytest.param(name, kind, marks=() if (name, kind) in quick else pytest.mark.slow)
        for name, operation in OPERATIONS.items()
        for kind, computed in names.items()
        if computed in operation.kinds
    ]


@pytest.mark.parametrize(("name", "kind"), operations())
def test_an_operation_has_the_bits_of_cpu_kernels(name: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    for count in (800, 801):  # in vectors, and one by one
        group = operation_of(name, kind, count)
        inputs = [numbers(group.values[v].kind, count, rng) for v in group.inputs]
        (wanted,), (found,) = native.run(group, inputs, native.BEST), run(group, inputs)
        same = wanted.view(f"u{wanted.itemsize}") == found.view(f"u{wanted.itemsize}")
        if wanted.dtype.kind == "f":  # what a NaN says is a matter of the processor
            same |= np.isnan(wanted) & np.isnan(found)
        assert same.all(), [(x[~same][:3], wanted[~same][:3], found[~same][:3]) for x in inputs]


# ---------------------------------------------------------------- the simulation


def test_the_simulation_finds_a_missing_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    group = reduction("reduce_sum", (3, 1100), (0,))
    x = np.arange(3300, dtype=np.float32).reshape(3, 1100)
    wanted = evaluated(group, [x])
    native.same(run(group, [x], ORDER[::-1]), wanted)
    monkeypatch.setattr(ThreadText, "barrier", lambda self: None)
    for order in (ORDER, ORDER[::-1]):
        with pytest.raises(AssertionError, match="not equal"):
            native.same(run(group, [x], order, blocks=1), wanted)


def test_threads_that_wait_for_each_other_are_an_error() -> None:
    text = ThreadText("kernel_0", 1)
    after = text.when(text.compared("eq", text.number("thread"), 0))
    text.barrier()
    text.close(after)
    text.line("  ret void")
    alone = GpuGroup(text.text("ptr addrspace(1) %work"), (gpu_group.GpuLaunch("kernel_0", 1),), 0)
    with pytest.raises(AssertionError, match="threads of a block of kernel_0 wait for others"):
        SimulatedGroup(alone, 1)([0], 1)


# ---------------------------------------------------------------- PTX and machine code


def check_ptx(ptx: str) -> None:
    """Each operation is rounded by itself, as IEEE 754 says, and none is atomic."""
    floats = re.findall(r"\b(?:add|sub|mul|fma|div|sqrt|rcp|mad)\.[\w.]*f(?:32|64)\b", ptx)
    assert all(re.fullmatch(r"(add|sub|mul|fma|div|sqrt|rcp)\.rn\.f(32|64)", name) for name in floats), set(floats)
    assert not re.search(r"\b(atom|red|approx|ftz)\b", ptx)
    assert ptx.count(".entry") >= 1
    assert "\n.target sm_80\n" in ptx


def assembled(group: GpuGroup, cc: tuple[int, int]) -> None:
    """Assemble a group. Its machine code has neither a stack nor spills, and a block of 256 threads can run it."""
    from funccoll.kernels.cuda_groups import compile_group

    kernel = compile_group(group, cc)
    assert kernel.code[:4] == b"\x7fELF"
    check_ptx(kernel.ptx)
    free = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert kernel.log.count(free) == kernel.log.count("spill stores") == len(group.launches), kernel.log
    assert max(map(int, re.findall(r"used (\d+) registers", kernel.log))) * 256 <= 1 << 16


@pytest.mark.parametrize("cc", ARCHITECTURES, ids=["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("few", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_random_groups_are_assembled(cc: tuple[int, int], few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings are not installed: pip install 'funccoll[cuda13]'")
    for name, size in FEW.items() if few else ():
        monkeypatch.setattr(gpu_group, name, size)
    monkeypatch.setattr(gpu_rows, "_LARGE", 0 if few else 1 << 29)
    for seed in range(3 * cc[0], 3 * cc[0] + 3):
        assembled(made(drawn(seed, seed % 3 == 0)), cc)


@pytest.mark.parametrize(("name", "kind"), operations())
def test_an_operation_is_assembled(name: str, kind: str) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings are not installed: pip install 'funccoll[cuda13]'")
    for cc in ARCHITECTURES if name in ("tan", "power", "fmod") else ARCHITECTURES[1:2]:
        assembled(made(operation_of(name, kind, 800)), cc)


def test_the_same_text_is_made_again() -> None:
    group = softmax((64, 256))
    assert made(group) == made(group)
    assert ptx_of(made(group).text) == ptx_of(made(group).text)
