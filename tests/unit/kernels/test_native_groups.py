"""Native kernels of groups: NumPy's results for random groups, written nowhere else, with the same bits on every processor."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.kernels import object_cache
from funccoll.kernels.native import machine_code
from funccoll.kernels.native.compiled_groups import call_copies, functions, kernel_of
from funccoll.kernels.native.fast_call import module_of
from funccoll.kernels.native.group import FusedGroup, GroupStep, GroupValue
from funccoll.kernels.native.group_kernel import BLOCK_ROWS, BLOCK_VECTORS, fits, group_kernel
from funccoll.kernels.native.ir_text import LANES
from tests.support.cases.drawn_groups import DTYPES, drawn, evaluated, reduction, shape, softmax, whole_numbers
from tests.support.example_counts import examples

pytestmark = [
    pytest.mark.covers("jit"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]

BEST = machine_code.processor_level()
LEVELS = machine_code.LEVELS[: machine_code.LEVELS.index(BEST) + 1] if BEST else ()
SHORT = (2, 3, 4, 5, 7, 8)
"""Lengths of rows of which a vector holds several."""
GUARD = 64
"""The bytes before and behind each result and workspace that no kernel may write."""


def guarded(size, itemsize):
    """Memory between guards: the whole, and its address. It has the alignment of its elements, and no more."""
    memory = np.full(size + 2 * GUARD + 64 + itemsize, 0xA5, np.uint8)
    return memory, -memory.ctypes.data % 64 + GUARD + itemsize % 64


@functools.lru_cache(maxsize=64)
def compiled(group, cpu):
    """The kernel's function of addresses."""
    kernel = group_kernel("kernel", group)
    address = object_cache.load("kernel", machine_code.object_code(module_of([kernel]), cpu))
    count = kernel.inputs + kernel.outputs + bool(kernel.workspace_bytes)
    return kernel, ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * count)(address)


def run(group, inputs, cpu, shared=()):
    """The results of a kernel. `shared` are pairs (output, input) that have one memory."""
    kernel, function = compiled(group, cpu)
    blocks, arrays, taken = [], [], dict(shared)

    def memory(count, dtype):
        block, start = guarded(count * dtype.itemsize, dtype.itemsize)
        blocks.append((block, start, count * dtype.itemsize))
        return block[start : start + count * dtype.itemsize].view(dtype)

    for x in inputs:
        arrays.append(memory(x.size, x.dtype))
        arrays[-1][...] = x.ravel()
    before = [a.copy() for a in arrays]
    for n, v in enumerate(group.outputs):
        made = memory(math.prod(shape(group, v)), DTYPES[group.values[v].kind])
        arrays.append(arrays[taken[n]] if n in taken else made)
    addresses = [a.ctypes.data for a in arrays]
    if kernel.workspace_bytes:  # which holds anything when the kernel begins
        block, start = guarded(kernel.workspace_bytes, 64)
        block[start : start + kernel.workspace_bytes] = 0xFF
        blocks.append((block, start, kernel.workspace_bytes))
        addresses.append(block.ctypes.data + start)
    function(*addresses)
    for block, start, size in blocks:
        assert (block[:start] == 0xA5).all()
        assert (block[start + size :] == 0xA5).all()
    for k, x in enumerate(before):
        if k not in taken.values():
            assert arrays[k].tobytes() == x.tobytes()
    outputs = arrays[len(group.inputs) :]
    return [a.copy().reshape(shape(group, v)) for a, v in zip(outputs, group.outputs, strict=True)]


def same(found, wanted):
    assert [f.dtype for f in found] == [w.dtype for w in wanted]
    for f, w in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(f.astype(np.float64), w.astype(np.float64))


def check(group, inputs):
    """Compare all levels, and all memory that a result may share, with NumPy; the results must be exact."""
    wanted = evaluated(group, inputs)
    for cpu in LEVELS:
        same(run(group, inputs, cpu), wanted)
    aliases = sorted(kernel_of(group).aliases)
    for first in aliases:  # as many at once as there are, beginning with each
        shared, taken = dict([first]), {first[1]}
        for n, k in aliases:
            if n not in shared and k not in taken:
                shared[n] = k
                taken.add(k)
        same(run(group, inputs, BEST, tuple(shared.items())), wanted)


@pytest.mark.parametrize("axes", [(1, 2), (0, 2), (2,), (0, 1), (1,)])
@pytest.mark.parametrize("operation", ["reduce_sum", "reduce_max"])
def test_a_value_counts_once_along_the_axes_that_it_lacks(axes, operation):
    whole, part = GroupValue("float", (0, 1, 2)), GroupValue("float", axes)
    for kept in itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(len(axes))):
        steps = GroupStep("negative", (0,), 2), GroupStep(operation, (1,), 3)
        group = FusedGroup((3, 4, 40), (whole, part, whole, GroupValue("float", kept)), (0, 1), steps, (2, 3))
        check(group, list(whole_numbers(group, 0)))


@pytest.mark.parametrize("short", [False, True])
@examples(100)
@given(seed=st.integers(0, 1 << 32))
def test_random_groups(short, seed):
    group = drawn(seed, short)
    assert fits(group)
    check(group, list(whole_numbers(group, seed)))


def in_other_memory(group, arrays, seed):
    """The group with operands that are parts of other arrays, some in another order of axes, and these arrays."""
    chance, values, memory = random.Random(seed), [*group.values], []
    for v, x in zip(group.inputs, arrays, strict=True):
        x, axes = x.reshape(shape(group, v)), range(len(group.values[v].axes))
        rows = bool(axes) and group.values[v].axes[-1] == len(group.sizes) - 1
        order = chance.sample(axes[:-1] if rows else axes, len(axes) - rows) + [*axes[len(axes) - rows :]]
        starts, ends = ([chance.randint(0, 2) for _ in axes] for _ in range(2))
        whole = np.zeros([starts[a] + x.shape[a] + ends[a] for a in order], x.dtype)
        cut = (slice(starts[a], starts[a] + x.shape[a]) for a in order)
        part = whole[(*cut, ...)].transpose(np.argsort(order))
        part[...] = x
        offset = part.__array_interface__["data"][0] - whole.ctypes.data
        strides = tuple(s // x.itemsize for s in part.strides)
        values[v] = dataclasses.replace(values[v], strides=strides, offset=offset // x.itemsize)
        memory.append(whole)
    return dataclasses.replace(group, values=tuple(values)), memory


@examples(100)
@given(seed=st.integers(0, 1 << 32))
def test_operands_in_other_memory(seed):
    group = drawn(seed)
    arrays = list(whole_numbers(group, seed))
    other, memory = in_other_memory(group, arrays, seed)
    if fits(other):  # a row that is reduced lies in one piece
        same(run(other, memory, BEST), evaluated(group, arrays))


def test_rows_lie_in_one_piece():
    group = softmax((4, 6, 40))
    (whole, *rest), other = group.values, GroupValue("float", (0, 1, 2), (6 * 80, 80, 2))
    assert fits(group) and not fits(dataclasses.replace(group, values=(other, *rest)))
    group = reduction("reduce_sum", (4, 6, 40), (0,))
    value = dataclasses.replace(whole, strides=(6 * 50, 50, 1))
    summed = dataclasses.replace(group, values=(value, group.values[1]))
    assert fits(summed)
    step = GroupStep("subtract", (0, 1), 2)
    assert not fits(dataclasses.replace(summed, values=(*summed.values, whole), steps=(*group.steps, step), outputs=(2,)))


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ((3, 40 * BLOCK_VECTORS * LANES + 7), (0,)),  # rows of several blocks
        ((5 * BLOCK_ROWS + 3, 70), (1,)),  # blocks of rows
        ((700_000,), ()),
        ((2, 9000, 5), (0, 2)),
        ((9000, 70), ()),
    ],
)
def test_sums_of_float32_are_accurate_and_have_one_order(sizes, kept):
    group = reduction("reduce_sum", sizes, kept)
    x = np.random.default_rng(0).random(sizes, np.float32)
    found = {run(group, [x], cpu)[0].tobytes() for cpu in LEVELS}
    (wanted,) = evaluated(group, [x])
    assert len(found) == 1
    total = np.frombuffer(found.pop(), np.float32).reshape(wanted.shape)
    np.testing.assert_allclose(total, x.sum(axis=tuple({*range(len(sizes))} - {*kept}), dtype=np.float64), rtol=2e-7)


@pytest.mark.parametrize("kind", ["float", "double"])
def test_quotients_of_rows_are_rounded_once(kind):
    """By one number they are computed as products, and corrected: the same bits as a division's."""
    dtype, generator = DTYPES[kind], np.random.default_rng(4)
    limits, length = np.finfo(dtype), 32 * LANES
    whole, row = GroupValue(kind, (0, 1)), GroupValue(kind, (0,))
    bits, spread = limits.nmant, 4 if kind == "float" else 40
    y = [np.ldexp(1 + generator.integers(0, 1 << bits, 40) / (1 << bits), generator.integers(-spread, spread, 40))]
    y += [
        [0.0, -0.0, np.inf, np.nan, limits.tiny, limits.max, limits.smallest_subnormal, 1 - limits.epsneg, 2 - limits.eps, -3]
    ]
    y = np.concatenate(y).astype(dtype)
    x = generator.standard_normal((len(y), length)).astype(dtype)
    with np.errstate(all="ignore"):
        near = (y[:, None] * np.arange(1, length // 2 + 1)).astype(dtype)  # quotients near whole numbers
        x[:, : length // 2] = np.where(np.isfinite(near), np.nextafter(near, near * 2), 1)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, limits.tiny, limits.smallest_subnormal, limits.max, 1e-31, -1e31]
    x[::2, 600 : 600 + len(special)] = special
    group = FusedGroup((len(y), length), (whole, row, whole), (0, 1), (GroupStep("divide", (0, 1), 2),), (2,))
    with np.errstate(all="ignore"):
        wanted = x / y[:, None]
    for cpu in LEVELS:
        (found,) = run(group, [x, y], cpu)
        np.testing.assert_array_equal(found, wanted)
        assert (np.signbit(found) == np.signbit(wanted))[~np.isnan(wanted)].all()


def test_sums_of_equal_numbers_are_accurate():
    """Each addition in float32 rounds the same way: short blocks keep the error small."""
    for sizes, kept, bound in (((1 << 20,), (), 2e-7), ((5000, 70), (1,), 1.5e-6)):
        x = np.full(sizes, 0.1, np.float32)
        (found,) = run(reduction("reduce_sum", sizes, kept), [x], BEST)
        np.testing.assert_allclose(found, x.sum(axis=0, dtype=np.float64), rtol=bound)


@pytest.mark.parametrize("sizes", [(3, 4), (4, 33), (2, 300), (5, 32), (70,), (3, 64), (3, 100)])
@pytest.mark.parametrize("kind", ["float", "double", "half", "bfloat"])
def test_softmax(sizes, kind):
    group, dtype = softmax(sizes, kind), DTYPES[kind]
    x = (3 * np.random.default_rng(1).standard_normal(sizes)).astype(dtype)
    found = {run(group, [x], cpu, shared)[0].tobytes() for cpu in LEVELS for shared in ((), ((0, 0),))}
    assert len(found) == 1
    y = np.frombuffer(found.pop(), dtype).reshape(sizes).astype(np.float64)
    terms = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True).astype(np.float64))
    # The difference, the exponential and the sum are rounded, too.
    tolerance = 16 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(y, terms / terms.sum(axis=-1, keepdims=True), rtol=tolerance, atol=1e-7)


def signed(sizes, kind):
    """The group of x with the sign of its row's maximum, which may be 0 or -0."""
    whole, row = GroupValue(kind, (0, 1)), GroupValue(kind, (0,))
    steps = GroupStep("reduce_max", (0,), 1), GroupStep("copysign", (0, 1), 2)
    return FusedGroup(sizes, (whole, row, whole), (0,), steps, (2,))


@pytest.mark.parametrize(
    ("length", "kind"),
    [
        *((length, "float") for length in SHORT),
        *(
            pytest.param(length, kind, marks=() if length in few else pytest.mark.slow)
            for kind, few in (("double", (2, 5, 8)), ("half", (3, 7)))
            for length in SHORT
        ),
    ],
)
def test_short_rows_have_the_results_of_rows_alone(length, kind):
    x = (3 * np.random.default_rng(length).standard_normal((21, length))).astype(DTYPES[kind])
    x[3, 0], x[4], x[5, -1], x[6], x[7, ::2] = np.nan, -np.inf, np.inf, -0.0, -0.0
    x[8], x[8, 1] = 0.0, -0.0
    for group in (
        softmax,
        signed,
        *(lambda s, k, o=o: reduction(o, s, (0,), k) for o in ("reduce_sum", "reduce_max", "reduce_min")),
    ):
        pairs = np.concatenate([run(group((2, length), kind), [x[[k, k]]], BEST)[0][:1] for k in range(len(x))])
        for cpu in LEVELS:
            assert run(group(x.shape, kind), [x], cpu)[0].tobytes() == pairs.tobytes()


@pytest.mark.parametrize("length", [2, 5, 16, 32, 64, 100, 128, 200])
@pytest.mark.parametrize("kind", ["float", "double"])
def test_the_sum_of_negative_zeros_is_zero(length, kind):
    """As NumPy's, whose sums begin with 0. The first of equal numbers is their maximum."""
    zeros = np.full((40, length), -0.0, DTYPES[kind])
    for operation, sign in (("reduce_sum", False), ("reduce_max", True)):
        for sizes in ((40, length), (1, length)):
            group = reduction(operation, sizes if sizes[0] > 1 else sizes[1:], (0,) if sizes[0] > 1 else (), kind)
            (found,) = run(group, [zeros[: sizes[0]].reshape(group.sizes)], BEST)
            assert not found.any() and (np.signbit(found) == sign).all()


@pytest.mark.parametrize("sizes", [(2, 5), (2, 33), (2, 96), (2, 200), (40, 2)])
@pytest.mark.parametrize("kept", [(0,), (1,), ()])
@pytest.mark.parametrize("operation", ["reduce_max", "reduce_min", "reduce_sum"])
def test_reductions_of_nan_and_infinities(sizes, kept, operation):
    group = reduction(operation, sizes, kept)
    _, function = compiled(group, BEST)
    work = np.zeros(kernel_of(group).workspace_bytes + 1, np.uint8)
    for place, number in itertools.product(range(0, math.prod(sizes), 7), [np.nan, np.inf, -np.inf]):
        x = np.full(sizes, -np.inf if operation == "reduce_max" else np.inf, np.float32)
        x.flat[place] = number
        (wanted,) = evaluated(group, [x])
        found = np.empty_like(wanted)
        addresses = [x.ctypes.data, found.ctypes.data, work.ctypes.data]
        function(*addresses[: 2 + (work.size > 1)])
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", ["i32", "i64"])
@pytest.mark.parametrize("kept", [(0,), (1,), ()])
def test_sums_of_integers_wrap(kind, kept):
    group = reduction("reduce_sum", (3, 40), kept, kind)
    limits = np.iinfo(DTYPES[kind])
    x = np.random.default_rng(2).integers(limits.min, limits.max, (3, 40), DTYPES[kind])
    same(run(group, [x], BEST), [x.sum(axis=tuple({0, 1} - {*kept}), dtype=x.dtype)])


@pytest.fixture
def objects(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("objects")
def test_functions_of_several_groups():
    many = softmax((4, 33)), reduction("reduce_sum", (3, 40), (1,)), softmax((20_000, 33))
    found = functions([*many, many[0]])
    assert found.keys() == {*many}
    assert kernel_of(many[2]).cost > 100 * kernel_of(many[0]).cost  # it gives up Python's lock
    for group in many:
        (x,) = whole_numbers(group, 0)
        (wanted,) = evaluated(group, [x])
        out, size = np.empty_like(wanted), kernel_of(group).workspace_bytes
        work = [np.empty(size, np.uint8)] if size else []
        assert found[group](x, out, *work) is True
        np.testing.assert_allclose(out, wanted, rtol=1e-6)


@pytest.mark.usefixtures("objects")
def test_arrays_that_a_kernel_refuses_are_copied():
    group = reduction("reduce_max", (3, 40), (0,))
    function, size = functions([group])[group], kernel_of(group).workspace_bytes
    work = [np.empty(size, np.uint8)] if size else []
    x = np.random.default_rng(3).standard_normal((3, 40)).astype(np.float32)
    strided, odd = np.zeros((3, 80), np.float32)[:, ::2], np.zeros(481, np.uint8)[1:].view(np.float32).reshape(3, 40)
    sparse, frozen = np.zeros(6, np.float32)[::2], np.zeros(3, np.float32)
    frozen.flags.writeable = False
    for array, out in [(strided, np.zeros(3, np.float32)), (odd, np.zeros(3, np.float32)), (x, sparse)]:
        array[...] = x
        assert function(array, out, *work) is False
        assert not out.any()
        call_copies(function, [array, out, *work], 1, size)
        np.testing.assert_array_equal(out, x.max(axis=1))
    assert function(x, frozen, *work) is False


@pytest.mark.parametrize("seed", range(5))
def test_the_text_depends_on_the_group_alone(seed):
    assert group_kernel("kernel", drawn(seed)) == group_kernel("kernel", drawn(seed))


def test_sums_that_need_much_memory_are_refused():
    assert fits(reduction("reduce_sum", (30, 1000, 40), (1, 2)))
    assert not fits(reduction("reduce_sum", (3, 1000, 1000), (1, 2)))
    assert fits(reduction("reduce_sum", (1000, 1000, 3), (0, 1)))  # a row's sum needs none
