"""Groups for tests: drawn at random, of one operation, and of some reductions; their inputs, and their results by NumPy."""

from __future__ import annotations

import inspect
import math
import random

import ml_dtypes
import numpy as np

from funccoll.kernels.native.group import FusedGroup, GroupNumber, GroupStep, GroupValue
from funccoll.kernels.native.ir_text import KernelText
from funccoll.kernels.native.operations import OPERATIONS

__all__ = ["DTYPES", "drawn", "evaluated", "numbers", "operation_of", "reduction", "shape", "softmax", "whole_numbers"]

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


def numbers(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Numbers of all sizes, and special ones."""
    dtype = DTYPES[kind]
    if kind == "bool":
        return rng.random(count) < 0.5
    if kind in ("i32", "i64"):
        x = rng.integers(-70, 70, count).astype(dtype)
        x[:4] = 0, 1, -1, np.iinfo(dtype).min
        return x
    patterns = rng.integers(0, 1 << 8 * dtype.itemsize, count, np.uint64).astype(f"u{dtype.itemsize}").view(dtype)
    usual = (rng.normal(size=count) * 10.0 ** rng.integers(-3, 4, count)).astype(dtype)
    x = np.where(rng.random(count) < 0.5, patterns, usual)
    x[:8] = 0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2
    return x


def operation_of(name: str, kind: str, count: int) -> FusedGroup:
    """The group of one operation of a kind."""
    operation = OPERATIONS[name]
    arity = len(inspect.signature(operation.emit).parameters)
    kinds = ["bool" if name == "where" and k == 0 else kind for k in range(arity)]
    probe = KernelText("probe")
    result = operation.emit(*(probe.load(k, "%p") for k in kinds)).kind
    values = (*(GroupValue(k, (0,)) for k in kinds), GroupValue({"i1": "bool"}.get(result, result), (0,)))
    return FusedGroup((count,), values, tuple(range(arity)), (GroupStep(name, tuple(range(arity)), arity),), (arity,))
