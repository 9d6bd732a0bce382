"""Random programs whose results fc.AUTO has to lay out, with what NumPy makes of the whole arrays.

A program is a list of steps on values. Each is applied to the whole arrays by NumPy, together with *owners*: for each mesh axis
an array that says which device along it has an element, or LOST where a step on blocks is not the step on the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P

AXES = ("a", "b")
MESH = fc.make_mesh({"a": 2, "b": 2})
LOST = None
INPUTS = [
    ((4, 4), P("a")),
    ((4, 4), P("a", "b")),
    ((4, 8), P(None, "a")),
    ((8, 4), P(("a", "b"))),
    ((4, 8), P(None, ("b", "a"))),
    ((4, 4, 4), P(None, "b", "a")),
    ((4, 4), P()),
    ((8,), P("b")),
    ((4, 1), P("a")),
    ((1, 4), P(None, "a")),
    ((4, 2), P("b")),
    ((4,), P()),
    ((), P()),
    ((4, 4, 2), P("a", None)),
]


@dataclass
class Value:
    """A whole array, its owners, and an array of the shape of one device's block."""

    whole: np.ndarray
    owners: dict[str, Any] = field(default_factory=dict)
    block: np.ndarray = field(default_factory=lambda: np.zeros(()))
    sure: bool = True
    """False where an error is as good as a layout."""

    def dims_of(self, axis: str) -> list[int]:
        """The dimensions along which the owner changes."""
        t = self.owners[axis]
        assert t is not None
        return [d for d in range(t.ndim) if (t != t.take([0], d)).any()]

    def row(self, dim: int) -> tuple[str, ...]:
        """The axes that split a dimension, the outermost first."""
        found = [a for a in self.owners if self.owners[a] is not LOST and self.dims_of(a) == [dim]]
        return tuple(sorted(found, key=lambda a: np.count_nonzero(np.diff(self.owners[a], axis=dim))))

    @property
    def spec(self) -> P | None:
        """The spec that gives each device its elements; None where there is none."""
        if any(t is LOST for t in self.owners.values()):
            return None
        spec = P(*(self.row(d) for d in range(self.whole.ndim)))
        if set(spec.axes) != set(self.owners):
            return None
        try:
            placed = owners_of(self.whole.shape, spec)
        except fc.FunccollError:
            return None
        return spec if all(np.array_equal(self.owners[a], t) for a, t in placed.items()) else None


def owners_of(shape: tuple[int, ...], spec: P) -> dict[str, Any]:
    """For each axis of a spec the device along it that has an element."""
    sharding = fc.Sharding(MESH, spec)
    owners = {a: np.zeros(shape, int) for a in spec.axes}
    for at in MESH.walk(AXES):
        for a, t in owners.items():
            t[sharding.index(shape, at)] = at[a]
    return owners


def split_input(shape: tuple[int, ...], spec: P, start: float) -> Value:
    """An input with distinct elements."""
    sharding = fc.Sharding(MESH, spec)
    whole = np.sin(np.arange(np.prod(shape, dtype=int)) * 1.7 + start).reshape(shape)
    return Value(whole, owners_of(shape, spec), np.zeros(sharding.shard_shape(shape)))


Step = Callable[..., Any]
"""From one device's blocks (traced) to a block."""


def moved(v: Value, step: Step, blocks: Step | None = None) -> Value:
    """A step that only moves elements, of the whole and of owners."""
    return Value(step(v.whole), {a: LOST if t is LOST else step(t) for a, t in v.owners.items()}, (blocks or step)(v.block))


def in_blocks(v: Value, dim: int, step: Step) -> Value:
    """A step along a dimension, of each device's part of it."""
    pieces = 2 ** len(v.row(dim))
    cut = lambda x: np.concatenate([step(part) for part in np.split(x, pieces, axis=dim)], axis=dim)
    return Value(cut(v.whole), {a: LOST if t is LOST else cut(t) for a, t in v.owners.items()}, step(v.block))


def whole_along(v: Value, dim: int, step: Step, change: Step) -> Value:
    """A step along a dimension, which blocks cannot take for the whole; `change` is what it does to owners."""
    owners = {a: LOST if t is LOST or dim in v.dims_of(a) else change(t) for a, t in v.owners.items()}
    return Value(step(v.whole), owners, step(v.block))


def together(step: Step, *values: Value) -> Value | None:
    """An elementwise step; None where the shapes of blocks or of whole arrays do not fit each other."""
    try:
        whole, block = step(*(v.whole for v in values)), step(*(v.block for v in values))
    except ValueError:
        return None
    owners: dict[str, Any] = {}
    for v in values:
        for a, t in v.owners.items():
            # Blocks of one element that are repeated beside whole ones: of which NumPy knows nothing.
            placed: Any = LOST if t is LOST or not _repeats_whole(v, whole, block) else np.broadcast_to(t, whole.shape)
            if a in owners and owners[a] is not LOST and placed is not LOST:
                placed = placed if np.array_equal(owners[a], placed) else LOST
            elif a in owners:
                placed = LOST
            owners[a] = placed
    return Value(whole, owners, block)


def _repeats_whole(v: Value, whole: np.ndarray, block: np.ndarray) -> bool:
    lead = whole.ndim - v.whole.ndim
    repeats = lambda x, result: [n != result.shape[lead + d] for d, n in enumerate(x.shape)]
    return repeats(v.block, block) == repeats(v.whole, whole)


def merge(d: int) -> Step:
    return lambda x: np.reshape(x, (*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :]))


def cut(d: int, k: int, outer: bool) -> Step:
    """A dimension as two, of which the one or the other has k elements."""

    def step(x: Any) -> Any:
        rest = x.shape[d] // k
        return np.reshape(x, (*x.shape[:d], *((k, rest) if outer else (rest, k)), *x.shape[d + 1 :]))

    return step


def at(d: int, index: Any) -> tuple:
    return (slice(None),) * d + (index,)


def choose(draw: Callable[[int], int], values: list[Value]) -> tuple[Step, tuple[int, ...], Value] | None:
    """A step on some of the values, and what it makes of whole arrays; None for one that does not fit."""
    i = draw(len(values))
    v = values[i]
    ndim = v.whole.ndim
    kind = draw(30)
    if kind < 3 or not ndim:
        step = [np.sin, lambda x: x * 2 + 1, lambda x: fc.fori_loop(0, 2, lambda _, c: c * 0.5, x)][kind % 3]
        plain = [np.sin, lambda x: x * 2 + 1, lambda x: x * 0.25][kind % 3]
        return step, (i,), Value(plain(v.whole), v.owners, v.block)
    d, e = draw(ndim), draw(ndim)
    along = v.row(d)
    if kind < 6:
        j = draw(len(values))
        step = [np.add, lambda x, y: np.where(x > 0, x, y), np.maximum][kind % 3]
        made = together(step, v, values[j])
        return None if made is None else (step, (i, j), made)
    if kind == 6:
        order = list(itertools.permutations(range(ndim)))[draw(6) % max(1, np.prod(range(1, ndim + 1), dtype=int))]
        step = lambda x: np.transpose(x, order)
    elif kind == 7:
        step = lambda x: np.expand_dims(x, d)
        return step, (i,), _doubtful(v, moved(v, step))
    elif kind == 8 and ndim > 1:
        d = draw(ndim - 1)
        step = merge(d)
        return step, (i,), _doubtful(v, moved(v, step))
    elif kind == 9 and v.block.shape[d] % 2 == 0:
        outer = bool(draw(2))
        step = cut(d, 2, outer)
        if outer and along:
            parts = v.whole.shape[d] // v.block.shape[d]
            return step, (i,), _doubtful(v, moved(v, cut(d, 2 * parts, True), step))
        return step, (i,), _doubtful(v, moved(v, step))
    elif kind == 10:
        start, stop = draw(2), v.block.shape[d] - draw(2)
        step = lambda x: x[at(d, slice(start, stop))]
        return step, (i,), in_blocks(v, d, step)
    elif kind == 11:
        step = lambda x: np.concatenate([x, x[at(d, slice(0, 1))]], axis=d)
        return step, (i,), in_blocks(v, d, step)
    elif kind == 12:
        width = [(1, draw(2)) if k == d else (0, 0) for k in range(ndim)]
        filled = lambda x: np.pad(x, width, mode="edge" if x.dtype.kind == "i" else "constant")  # owners of zeros: the block's
        return lambda x: np.pad(x, width), (i,), in_blocks(v, d, filled)
    elif kind in (13, 14):
        step = [np.flip, np.sort, np.cumsum, np.argsort][draw(4)]
        return lambda x: step(x, axis=d) * 1.0, (i,), whole_along(v, d, lambda x: step(x, axis=d) * 1.0, lambda t: t)
    elif kind == 15:
        keep, name = bool(draw(2)), [np.sum, np.max, np.mean][draw(3)]
        step = lambda x: name(x, axis=d, keepdims=keep)
        return step, (i,), whole_along(v, d, step, lambda t: np.max(t, axis=d, keepdims=keep))
    elif kind == 16:
        step = [lambda x: x[at(d, 0)], lambda x: x[at(d, np.array([0, -1]))], lambda x: np.take(x, [[0, 0]], axis=d)][draw(3)]
        return step, (i,), whole_along(v, d, step, step)
    elif kind == 17:
        j = draw(len(values))
        w = values[j]
        if not w.whole.ndim:
            return None
        try:
            whole, block = v.whole @ w.whole, v.block @ w.block
        except ValueError:
            return None
        owners: dict[str, Any] = {}
        of_w = max(w.whole.ndim - 2, 0)  # the contracted dimension
        for x, contracted, wide in ((v, ndim - 1, w.whole.ndim > 1), (w, of_w, ndim > 1 and w.whole.ndim > 1)):
            for a, t in x.owners.items():
                if t is LOST or contracted in x.dims_of(a) or (a in v.owners and a in w.owners):
                    owners[a] = LOST
                    continue
                kept = np.max(t, axis=contracted)
                kept = np.expand_dims(kept, -1 if x is v else -2) if wide else kept
                owners[a] = np.broadcast_to(kept, whole.shape)
        if ndim > 2 or w.whole.ndim > 2:  # stacks: broadcasting of blocks and of whole arrays may differ
            owners = dict.fromkeys(owners, LOST) if whole.shape[:-2] != block.shape[:-2] else owners
        return np.matmul, (i, j), Value(whole, owners, block)
    elif kind == 18 and along and v.spec is not None:
        step = lambda x: fc.all_reduce(np.sum(x, axis=d), along)
        rest = {a: LOST if t is LOST else np.max(t, axis=d) for a, t in v.owners.items() if a not in along}
        return step, (i,), Value(np.sum(v.whole, axis=d), rest, np.sum(v.block, axis=d))
    elif kind == 19 and along and v.spec is not None:
        some = along[draw(len(along)) :]
        step = lambda x: fc.all_gather(x, some, dim=d)
        rest = {a: t for a, t in v.owners.items() if a not in some}
        return step, (i,), Value(v.whole, rest, np.concatenate([v.block] * 2 ** len(some), axis=d))
    elif kind == 20 and along and d != e and v.spec is not None and v.block.shape[e] % 2 == 0:
        some = along[-1:]
        step = lambda x: fc.all_to_all(x, some, split_dim=e, concat_dim=d)
        block = np.concatenate(np.split(v.block, 2, axis=e), axis=d)
        return step, (i,), Value(v.whole, {**v.owners, some[0]: _innermost(v, e)}, block)
    elif kind == 21 and v.block.shape[d] % 2 == 0 and len(v.owners) < 2 and v.spec is not None:
        axis = next(a for a in AXES if a not in v.owners)
        step = lambda x: fc.own_slice(x, axis, dim=d)
        return step, (i,), Value(v.whole, {**v.owners, axis: _innermost(v, d)}, np.split(v.block, 2, axis=d)[0])
    elif kind == 22 and len(along) == 1 and v.spec is not None:
        step = lambda x: fc.permute(x, along, pairs=[(0, 1), (1, 0)])
        swap = lambda x: np.concatenate(np.split(x, 2, axis=d)[::-1], axis=d)
        owners = {a: t if a in along or t is LOST else swap(t) for a, t in v.owners.items()}
        return step, (i,), Value(swap(v.whole), owners, v.block)
    elif kind == 23:
        start = draw(2)
        region = at(d, slice(start, None))
        step = fc.grad(lambda x: np.sum(np.sin(x[region])))
        cosine = lambda x: np.concatenate([0 * x[at(d, slice(0, start))], np.cos(x[region])], axis=d)
        return step, (i,), Value(in_blocks(v, d, cosine).whole, v.owners, v.block)
    elif kind == 24 and ndim > 1:
        step = lambda x: fc.vmap(lambda row: np.sum(np.sin(row), axis=0))(x)
        plain = lambda x: np.sum(np.sin(x), axis=1)
        return step, (i,), whole_along(v, 1, plain, lambda t: np.max(t, axis=1))
    elif kind == 25:
        step = lambda x: fc.scan(lambda carry, row: (carry, row * 2), 0.0, x)[1]
        return step, (i,), whole_along(v, 0, lambda x: x * 2, lambda t: t)
    elif kind == 26 and along and v.spec is not None and (summed := np.sum(v.block, axis=d)).ndim:
        e = draw(summed.ndim)
        if summed.shape[e] % 2:
            return None
        some, inner = along[:-1], along[-1:]
        reduced = lambda x: fc.all_reduce(np.sum(x, axis=d), some) if some else np.sum(x, axis=d)
        step = lambda x: fc.reduce_scatter(reduced(x), inner, dim=e)
        rest = {a: np.max(t, axis=d) for a, t in v.owners.items() if a not in along}
        made = Value(np.sum(v.whole, axis=d), rest, summed)
        made.owners[inner[0]] = _innermost(made, e)
        made.block = np.split(summed, 2, axis=e)[0]
        return step, (i,), made
    elif kind == 27:
        start = draw(2)
        step = lambda x: fc.at(x)[at(d, slice(start, None, 2))].multiply(3.0)

        def scaled(x: np.ndarray) -> np.ndarray:
            x = np.array(x)
            x[at(d, slice(start, None, 2))] *= 3 if x.dtype.kind == "f" else 1
            return x

        return step, (i,), in_blocks(v, d, scaled)
    elif kind == 28:
        step = lambda x: fc.cond(np.int32(1) == 1, fc.checkpoint(np.sin), lambda x: x * 0.0, x)
        return step, (i,), Value(np.sin(v.whole), v.owners, v.block)
    elif kind == 29 and ndim > 1:
        step = lambda x: np.einsum("i...,i...->...i", x, x)
        return step, (i,), moved(Value(v.whole**2, v.owners, v.block), lambda x: np.moveaxis(x, 0, -1))
    else:
        return None
    return step, (i,), moved(v, step)


def _doubtful(v: Value, made: Value) -> Value:
    """A reshape to or from dimensions of which each device has one element leaves open where the axis goes."""
    new_ones = made.block.shape.count(1) > v.block.shape.count(1)
    known = [a for a, t in v.owners.items() if t is not LOST]
    made.sure = not any(new_ones or any(v.block.shape[d] < 2 for d in v.dims_of(a)) for a in known)
    return made


def _innermost(v: Value, dim: int) -> np.ndarray:
    """The owners along an axis that splits each device's block along a dimension."""
    n = v.block.shape[dim]
    numbers = np.arange(v.whole.shape[dim]) % n // max(1, n // 2)
    return np.broadcast_to(numbers.reshape([-1 if k == dim else 1 for k in range(v.whole.ndim)]), v.whole.shape)


def random_program(draw: Callable[[int], int], most: int) -> tuple[list[tuple[Any, P]], Callable[..., Any], Value]:
    """Inputs with their specs, a function of one device's blocks, and what NumPy makes of the whole arrays."""
    given = [INPUTS[draw(len(INPUTS))] for _ in range(1 + draw(3))]
    values = [split_input(*one, start=float(k)) for k, one in enumerate(given)]
    inputs = [(v.whole, spec) for v, (_, spec) in zip(values, given, strict=True)]
    steps = []
    for _ in range(most):
        found = choose(draw, values)
        if found is None or found[2].whole.ndim > 4 or not 0 < found[2].block.size <= found[2].whole.size <= 4096:
            continue
        found[2].sure &= all(values[k].sure for k in found[1])
        steps.append(found[:2])
        values.append(found[2])

    def program(*blocks: Any) -> Any:
        made = list(blocks)
        for step, operands in steps:
            made.append(step(*(made[k] for k in operands)))
        return made[-1]

    return inputs, program, values[-1]
