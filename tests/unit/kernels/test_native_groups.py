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
from hypothesis import given, settings
from hypothesis import strategies as st

from funccoll.kernels import object_cache
from funccoll.kernels.native import machine_code
from funccoll.kernels.native.compiled_groups import call_copies, functions, kernel_of
from funccoll.kernels.native.fast_call import module_of
from funccoll.kernels.native.group import FusedGroup, GroupNumber, GroupStep, GroupValue
from funccoll.kernels.native.group_kernel import BLOCK_ROWS, BLOCK_VECTORS, fits, group_kernel
from funccoll.kernels.native.ir_text import LANES

pytestmark = [
    pytest.mark.covers("jit"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]

BEST = machine_code.processor_level()
LEVELS = machine_code.LEVELS[: machine_code.LEVELS.index(BEST) + 1] if BEST else ()
DTYPES = {
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "half": np.dtype(np.float16),
    "bfloat": np.dtype(ml_dtypes.bfloat16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}
FUNCTIONS = {"where": np.where, "stop_gradient": lambda x: x, "reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min}
GUARD = 64
"""The bytes before and behind each result and workspace that no kernel may write."""


def kept_shape(group, value):
    """The shape of a value beside others: 1 along the axes that it lacks."""
    return tuple(n if axis in group.values[value].axes else 1 for axis, n in enumerate(group.sizes))


def shape(group, value):
    return tuple(group.sizes[axis] for axis in group.values[value].axes)


def evaluated(group, inputs):
    """The results by NumPy, step by step. Sums are added in float64 or int64, and rounded once."""
    values = {
        v: x.astype(DTYPES[group.values[v].kind]).reshape(kept_shape(group, v))
        for v, x in zip(group.inputs, inputs, strict=True)
    }
    for step in group.steps:
        dtype, wanted = DTYPES[group.values[step.result].kind], kept_shape(group, step.result)
        operands = [np.asarray(o.number, DTYPES[o.kind]) if isinstance(o, GroupNumber) else values[o] for o in step.operands]
        if step.operation == "convert":
            found = operands[0]
        elif step.operation.startswith("reduce_"):
            (x,) = operands
            axes = tuple(a for a in group.values[step.operands[0]].axes if a not in group.values[step.result].axes)
            wide = x.astype(np.int64 if dtype.kind in "iub" else np.float64)
            with np.errstate(invalid="ignore"):
                found = FUNCTIONS[step.operation](wide, axis=axes, keepdims=True)
        else:
            operation = FUNCTIONS.get(step.operation) or getattr(np, step.operation)
            found = operation(*operands)
        values[step.result] = np.broadcast_to(found.astype(dtype), wanted)
    return [values[v].reshape(shape(group, v)) for v in group.outputs]


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


class Draft:
    """A group while it is drawn. Its numbers are small and whole, so that every order of sums is exact in each kind."""

    def __init__(self, seed, short):
        self.random, self.short = random.Random(seed), short
        pick = self.random.choice
        self.sizes: tuple[int, ...] = tuple(
            pick([2, 3, 5, 17, 31, 32, 33, 40, 70, 130, 300]) for _ in range(pick([0, 1, 2, 2, 3, 3, 4]))
        )
        while math.prod(self.sizes) > 40_000:
            self.sizes = self.sizes[1:]
        if short:
            self.sizes = pick([2, 5, 16, 33, 70, 257]), pick([2, 3, 4, 5, 7, 8, 10, 15, 16])
        self.values, self.bounds, self.steps, self.fixed = [], [], [], set()
        axes = range(len(self.sizes))
        self.row: tuple[int, ...] = (1,) if short else tuple(axes[pick(axes) :]) if axes and self.chance(0.7) else ()
        kinds = ["float"] * 6 + [*DTYPES]
        self.inputs = [self.new(pick(kinds), self.some_axes(), 3) for _ in range(pick([1, 2, 3]))]

    def chance(self, probability):
        return self.random.random() < probability

    def some_axes(self):
        """Axes of an input: mostly all of them."""
        if self.chance(0.5):
            return range(len(self.sizes))
        kept = [a for a in range(len(self.sizes)) if a not in self.row and self.chance(0.6)]
        return (*kept, *(self.row if self.chance(0.6) else ()))

    def new(self, kind, axes, bound):
        self.values.append(GroupValue(kind, tuple(axes)))
        self.bounds.append(bound)
        return len(self.values) - 1

    def step(self, operation, operands, kind, axes, bound):
        result = self.new(kind, axes, bound)
        self.steps.append(GroupStep(operation, tuple(operands), result))
        return result

    def operand(self, kind):
        """A value that steps may read, converted to a kind."""
        v = self.random.choice([k for k in range(len(self.values)) if k not in self.fixed])
        found = self.values[v].kind
        if found == kind:
            return v
        axes = self.values[v].axes
        if kind in ("i32", "i64") and found in ("float", "double", "half", "bfloat"):  # which no kernel converts
            return self.step("where", [self.positive(v), GroupNumber(kind, 1), GroupNumber(kind, -2)], kind, axes, 2)
        return self.step("convert", [v], kind, axes, self.bounds[v])

    def positive(self, v):
        kind = self.values[v].kind
        return v if kind == "bool" else self.step("greater", [v, GroupNumber(kind, 0)], "bool", self.values[v].axes, 1)

    def grow(self):
        """Add an operation, with what converts its operands."""
        kind = self.random.choice(["float"] * 6 + ["double", "half", "bfloat", "i32", "i64"])
        if self.sizes and self.chance(0.45):
            self.reduce(kind)
            return
        x, y = self.operand(kind), self.operand(kind)
        axes = sorted({*self.values[x].axes, *self.values[y].axes})
        a, b = self.bounds[x], self.bounds[y]
        bounds = {"add": a + b, "subtract": a + b, "multiply": a * b, "where": max(b, 1)}
        bounds |= dict.fromkeys(("maximum", "minimum"), max(a, b))
        operation = self.random.choice([name for name, bound in bounds.items() if bound <= 64] or ["maximum"])
        if operation == "where":
            self.step("where", [self.positive(x), y, GroupNumber(kind, 1)], kind, axes, bounds[operation])
            return
        if kind[0] != "i" and self.chance(0.4):  # what costs more than to read it again
            for number in (0.25, 4):
                x = self.step("divide", [x, GroupNumber(kind, number)], kind, self.values[x].axes, 4 * a)
            self.bounds[x] = a
        self.step(operation, [x, y], kind, axes, bounds[operation])

    def reduce(self, kind):
        """Add a reduction: of rows, whose result may be read, or of any axes, whose result is only an output."""
        x = self.operand(kind)
        axes, bound = self.values[x].axes, self.bounds[x]
        operation = self.random.choice(["reduce_sum", "reduce_sum", "reduce_max", "reduce_min"])
        inside = bool(self.row) and {*self.row} <= {*axes} and (self.short or self.chance(0.7))
        keeps = inside or self.chance(0.5), not inside and self.chance(0.5)  # outer axes, the row
        left = [a for a in axes if (keeps[1] if a in self.row else inside or (keeps[0] and self.chance(0.5)))]
        if left == [*axes]:
            return
        if self.short and not inside:
            return
        if operation == "reduce_sum":
            bound *= math.prod(self.sizes[a] for a in axes if a not in left)
            if kind == "half" and bound > 60_000:
                return
        result = self.step(operation, [x], kind, left, bound)
        if inside and bound > 64:  # whatever is computed of it is small and whole, too
            sign = self.step("greater", [result, GroupNumber(kind, 0)], "bool", left, 1)
            self.step("where", [sign, GroupNumber(kind, 2), GroupNumber(kind, -1)], kind, left, 2)
            self.fixed.add(result)
        elif not inside:
            self.fixed.add(result)

    def group(self):
        """The group of what was drawn. Its domain has the axes that something varies over, and its inputs are read."""
        read = {o for s in self.steps for o in s.operands if isinstance(o, int)}
        made = [s.result for s in self.steps]
        more = self.random.sample(made, min(2, len(made)))
        used = [v for v in self.inputs if v in read]
        order = [*used, *made]
        number = {v: k for k, v in enumerate(order)}
        axes = sorted({a for v in order for a in self.values[v].axes})
        place = {a: k for k, a in enumerate(axes)}
        return FusedGroup(
            tuple(self.sizes[a] for a in axes),
            tuple(GroupValue(self.values[v].kind, tuple(place[a] for a in self.values[v].axes)) for v in order),
            tuple(number[v] for v in used),
            tuple(
                GroupStep(s.operation, tuple(number[o] if isinstance(o, int) else o for o in s.operands), number[s.result])
                for s in self.steps
            ),
            tuple(number[v] for v in made if v not in read or v in more),
        )


def drawn(seed, short=False):
    """A random group; of `short` rows, several of which are in one vector."""
    draft = Draft(seed, short)
    for _ in range(draft.random.randint(1, 8)):
        draft.grow()
    if not draft.steps:
        x = draft.values[draft.inputs[0]]
        draft.step("stop_gradient", [draft.inputs[0]], x.kind, x.axes, 3)
    return draft.group()


def whole_numbers(group, seed):
    """Arrays for the inputs, of small whole numbers."""
    generator = np.random.default_rng(seed)
    for v in group.inputs:
        low, high = (0, 2) if group.values[v].kind == "bool" else (-3, 4)
        yield generator.integers(low, high, shape(group, v)).astype(DTYPES[group.values[v].kind])


@pytest.mark.parametrize("axes", [(1, 2), (0, 2), (2,), (0, 1), (1,)])
@pytest.mark.parametrize("operation", ["reduce_sum", "reduce_max"])
def test_a_value_counts_once_along_the_axes_that_it_lacks(axes, operation):
    whole, part = GroupValue("float", (0, 1, 2)), GroupValue("float", axes)
    for kept in itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(len(axes))):
        steps = GroupStep("negative", (0,), 2), GroupStep(operation, (1,), 3)
        group = FusedGroup((3, 4, 40), (whole, part, whole, GroupValue("float", kept)), (0, 1), steps, (2, 3))
        check(group, list(whole_numbers(group, 0)))


@pytest.mark.parametrize("short", [False, True])
@settings(max_examples=40, deadline=None)
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


@settings(max_examples=40, deadline=None)
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


def reduction(operation, sizes, kept, kind="float"):
    """The group of one reduction."""
    values = GroupValue(kind, tuple(range(len(sizes)))), GroupValue(kind, kept)
    return FusedGroup(sizes, values, (0,), (GroupStep(operation, (0,), 1),), (1,))


def softmax(sizes, kind="float"):
    axes = tuple(range(len(sizes)))
    whole, row = GroupValue(kind, axes), GroupValue(kind, axes[:-1])
    steps = (
        GroupStep("reduce_max", (0,), 1),
        GroupStep("subtract", (0, 1), 2),
        GroupStep("exp", (2,), 3),
        GroupStep("reduce_sum", (3,), 4),
        GroupStep("divide", (3, 4), 5),
    )
    return FusedGroup(sizes, (whole, row, whole, whole, row, whole), (0,), steps, (5,))


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


@pytest.mark.parametrize("kind", ["float", "double", "half"])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8])
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
