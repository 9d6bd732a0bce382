"""Programs whose bits depend on the order of arrays in memory: transposed, sliced and broadcast values around collectives.

A program is a list of steps, each four numbers: an operation, two earlier values, and what the operation makes of it. So
hypothesis draws them, and every process of a job makes the same ones. `process_cases.py` has the case that runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P, nn
from tests.support.spmd import stacked

Steps = Sequence[tuple[int, int, int, int]]

SHAPES = [(24, 40), (12, 8, 20), (96, 120), (160, 128)]
"""Of one device's block: below what is computed into shared memory, above it, and above what stays as it is as a result."""
_MOST = 1 << 15
_AXIS = "d"


def vary(x: Any) -> Any:
    return x if _AXIS in x.varying else fc.pvary(x, _AXIS)


def _dim(x: Any, c: int) -> int:
    return c % x.ndim


def _divisible(x: Any, c: int, n: int) -> int | None:
    """A dimension that n divides."""
    found = [d for d in range(x.ndim) if x.shape[d] % n == 0 and x.shape[d]]
    return found[c % len(found)] if found else None


def _on_dim(call: Callable[[Any, int, int], Any]) -> Callable[..., Any]:
    def step(x: Any, y: Any, c: int, n: int) -> Any:
        dim = _divisible(x, c, n)
        return fc.all_reduce(vary(x), _AXIS) if dim is None else call(vary(x), dim, n)

    return step


def _region(x: Any, c: int, part: slice) -> Any:
    return x[(slice(None),) * _dim(x, c) + (part,)]


def _permuted(x: Any, c: int) -> Any:
    order = list(range(x.ndim))
    for k in range(x.ndim - 1, 0, -1):
        c, j = divmod(c, k + 1)
        order[k], order[j] = order[j], order[k]
    return np.transpose(x, order)


def _meeting(x: Any, y: Any) -> Any:
    """The sum of two values where their shapes allow it, in whatever order their dimensions are."""
    if x.shape == y.shape:
        return y + x
    if x.shape == y.shape[::-1]:
        return np.transpose(y) + x
    return np.tanh(x) * np.float32(1.5) - x


def _product(x: Any) -> Any:
    x = np.atleast_2d(x)
    return (np.swapaxes(x, -1, -2) @ x) / np.float32(x.shape[-2])


def _einsum(x: Any, c: int) -> Any:
    if x.ndim == 2:
        return np.einsum(("ij,kj->ki", "ij,ik->jk", "ij->j", "ij,ij->i")[c % 4], *[x] * (1 if c % 4 == 2 else 2))
    if x.ndim == 3:
        return np.einsum(("aij,akj->kai", "aij->ja", "aij,aik->kj")[c % 3], *[x] * (1 if c % 3 == 1 else 2))
    return np.sum(x, axis=-1)


def _loop(x: Any) -> Any:
    def body(carry: Any, scale: Any) -> Any:
        mean = fc.all_reduce(np.transpose(carry), _AXIS, op="mean")
        return np.transpose(np.tanh(np.transpose(carry) + mean * scale)), np.sum(carry, axis=0)

    carry, sums = fc.scan(body, vary(x), np.float32([0.5, 0.25, 0.125]))
    return carry + np.sum(sums, axis=0)


def _branch(x: Any) -> Any:
    branches = (lambda x: np.transpose(np.sin(np.transpose(x))), lambda x: np.flip(x, 0) * np.float32(0.5))
    return fc.cond(fc.axis_index(_AXIS) == 0, *branches, vary(x))


OPERATIONS: tuple[Callable[[Any, Any, int, int], Any], ...] = (
    lambda x, y, c, n: _permuted(x, c),
    lambda x, y, c, n: np.transpose(x),
    lambda x, y, c, n: np.flip(x, _dim(x, c)),
    lambda x, y, c, n: _region(x, c, slice(None, None, -1 if c % 2 else 2)),
    lambda x, y, c, n: _region(x, c, slice(0, max(x.shape[_dim(x, c)] // 2, 1))),
    lambda x, y, c, n: np.broadcast_to(x, (2, *x.shape)) if x.ndim < 3 and x.size < _MOST else np.sum(x, axis=_dim(x, c)),
    lambda x, y, c, n: np.reshape(x, (*x.shape[1:], x.shape[0])),
    lambda x, y, c, n: np.reshape(x, -1) if x.ndim > 1 else np.expand_dims(x, c % 2),
    lambda x, y, c, n: np.concatenate([x, np.float32(2) * x], axis=_dim(x, c)),
    lambda x, y, c, n: np.stack([x, np.flip(x, 0)], axis=c % (x.ndim + 1)) if x.ndim < 3 else x[0],
    lambda x, y, c, n: _meeting(x, y),
    lambda x, y, c, n: _meeting(y, x),
    lambda x, y, c, n: np.tanh(x),
    lambda x, y, c, n: np.where(x > 0, x, np.float32(0.5) * x),
    lambda x, y, c, n: _product(x),
    lambda x, y, c, n: _einsum(x, c),
    lambda x, y, c, n: np.cumsum(x, axis=_dim(x, c)) / np.float32(x.shape[_dim(x, c)]),
    lambda x, y, c, n: np.sort(x, axis=_dim(x, c)),
    lambda x, y, c, n: x - np.mean(x, axis=_dim(x, c), keepdims=True),
    lambda x, y, c, n: np.abs(np.fft.rfft(x, axis=_dim(x, c))).astype(np.float32),
    lambda x, y, c, n: fc.all_reduce(vary(x), _AXIS, op=("sum", "mean", "max")[c % 3]),
    lambda x, y, c, n: fc.all_reduce(vary(np.transpose(x)), _AXIS, op="mean"),
    lambda x, y, c, n: fc.all_gather(vary(x), _AXIS, dim=_dim(x, c)) if x.size < _MOST else _region(x, c, slice(0, 5)),
    lambda x, y, c, n: fc.all_gather(vary(x), _AXIS, dim=_dim(x, c), stack=True)[0],
    _on_dim(lambda x, dim, n: fc.reduce_scatter(x, _AXIS, dim=dim)),
    _on_dim(lambda x, dim, n: fc.all_to_all(x, _AXIS, split_dim=dim, concat_dim=x.ndim - 1 - dim)),
    _on_dim(lambda x, dim, n: fc.own_slice(fc.all_reduce(x, _AXIS), _AXIS, dim=dim)),
    _on_dim(lambda x, dim, n: fc.own_slice(fc.broadcast(x, _AXIS), _AXIS, dim=dim)),
    _on_dim(lambda x, dim, n: fc.scatter(x, _AXIS, dim=dim, root=n - 1)),
    lambda x, y, c, n: fc.permute(vary(x), _AXIS, pairs=[(i, (i + 1) % n) for i in range(n - c % 2)]),
    lambda x, y, c, n: fc.broadcast(vary(x), _AXIS, root=c % n),
    lambda x, y, c, n: fc.reduce(vary(x), _AXIS, root=c % n),
    lambda x, y, c, n: fc.gather(vary(x), _AXIS, dim=_dim(x, c)) if x.size < _MOST else _region(x, c, slice(1, None)),
    lambda x, y, c, n: _loop(x),
    lambda x, y, c, n: _branch(x),
)


def program(steps: Steps, n: int) -> Callable[[Any], Any]:
    """A function of one block: the last value, and sums along the first dimension of what no step has read."""

    def run(x: Any) -> Any:
        values, read = [x], set()
        for operation, first, second, choice in steps:
            a, b = first % len(values), second % len(values)
            found = OPERATIONS[operation % len(OPERATIONS)](values[a], values[b], choice, n)
            read.update((a, b))
            if 0 < found.size <= 4 * _MOST and found.ndim:
                values.append(found)
        unread = [v for i, v in enumerate(values) if i not in read]
        return [vary(values[-1]), *(vary(np.sum(v, axis=0)) for v in unread)]

    return run


def gradient(steps: Steps, n: int) -> Callable[[Any], Any]:
    def loss(x: Any) -> Any:
        total = sum(np.sum(np.tanh(y)) for y in program(steps, n)(x))
        return fc.all_reduce(vary(total), _AXIS)

    return lambda x: [fc.grad(loss)(x)]


def random_steps(rng: np.random.Generator, length: int) -> list[tuple[int, int, int, int]]:
    """Steps of which most read the value before."""
    return [
        (
            int(rng.integers(len(OPERATIONS))),
            k if rng.random() < 0.7 else int(rng.integers(k + 1)),
            int(rng.integers(k + 1)),
            int(rng.integers(1 << 10)),
        )
        for k in range(length)
    ]


def block_values(shape: Sequence[int], n: int, seed: int) -> np.ndarray:
    """One block for each device, in front."""
    return np.random.default_rng(seed).normal(size=(n, *shape)).astype(np.float32)


def memory_orders(n: int, same: Any, count: int | None = None, seed: int = 0) -> None:
    """Random programs and gradients (fewer on two devices, in `make test`), and arguments of all orders."""
    every = P(_AXIS)
    rng = np.random.default_rng([n, seed])
    for k in range(count or (10 if n == 2 else 24)):
        steps = random_steps(rng, 2 + k % 7)
        x = block_values(SHAPES[k % len(SHAPES)], n, k)
        given = x if k % 3 else np.asfortranarray(x)
        same(stacked((gradient if k % 4 == 3 else program)(steps, n)), {_AXIS: n}, (given,), every, every)
    _arguments(n, same)
    _memory_of_others(n, same)
    _situations(n, same)
    _between_programs(n, same)


def _sums(x: Any) -> Any:
    """Sums and products whose bits depend on the strides of what they read."""
    square = x[:, : x.shape[0]] if x.shape[0] <= x.shape[1] else x[: x.shape[1]]
    return [np.sum(x, axis=0), np.sum(x, axis=1), np.sum(x), square @ np.flip(square, 0), np.cumsum(x, axis=0)[-1], np.std(x)]


def arguments(rows: int, columns: int) -> dict[str, np.ndarray]:
    """The same kind of values in many orders."""
    values = lambda *shape: np.random.default_rng(math.prod(shape)).normal(size=shape).astype(np.float32)
    odd = np.empty(4 * rows * columns + 1, np.uint8)[1:].view(np.float32).reshape(rows, columns)
    odd[...] = values(rows, columns)
    overlapping = np.lib.stride_tricks.as_strided(values(rows + columns), (rows, columns), (4, 4))
    return {
        "C": values(rows, columns),
        "Fortran": np.asfortranarray(values(rows, columns)),
        "flipped": values(rows, columns)[::-1, ::-1],
        "sliced": values(2 * rows, 3 * columns)[::2, 1::3],
        "broadcast row": np.broadcast_to(values(columns), (rows, columns)),
        "broadcast column": np.broadcast_to(values(rows, 1), (rows, columns)),
        "odd address": odd,
        "overlapping": overlapping,
        "a field": values(rows, columns, 3)[..., 1],
        "read only": np.asfortranarray(values(rows, columns)),
    }


def _arguments(n: int, same: Any) -> None:
    """Arguments, captured constants, and shards along either dimension."""
    given = arguments(32 * n, 48 * n)
    given["read only"].flags.writeable = False
    for spec in (P(_AXIS), P(None, _AXIS), P()):

        def each(*xs: Any) -> Any:
            found = []
            for x in xs:
                found += [*_sums(x), *_sums(np.tanh(x)), *_sums(fc.all_reduce(vary(np.transpose(x)), _AXIS))]
            return [vary(y)[None] for y in found]

        same(each, {_AXIS: n}, [*given.values()], spec, P(_AXIS))
    constants = [*given.values()]
    same(lambda x: [vary(y)[None] for c in constants for y in _sums(c * x[0, 0])], {_AXIS: n}, constants[:1], P(), P(_AXIS))


def _reduced(x: Any, op: str = "sum") -> Any:
    """The sum of a value whose dimensions are reversed."""
    return fc.all_reduce(np.transpose(x), _AXIS, op=op)


def _body(carry: Any, row: Any) -> Any:
    branches = (lambda c: np.tanh(c).T, lambda c: np.flip(c, 0))
    carry = fc.cond(fc.all_reduce(np.sum(row), _AXIS) > 0, *branches, carry)
    return carry + fc.pvary(_reduced(carry, "mean"), _AXIS), np.sum(carry, axis=0)


SITUATIONS: dict[str, Callable[[Any, int], Any]] = {
    "dimensions of size 1": lambda x, n: [_reduced(x[:1]), fc.all_gather(x[:, :1].T, _AXIS, dim=0), _reduced(x[0, 0])],
    "decompositions": lambda x, n: [*np.linalg.qr(_reduced(x)), *np.linalg.svd(_reduced(x[:, :24]), full_matrices=False)],
    "systems": lambda x, n: [np.linalg.solve(_reduced(x[:, :48]), x[:, 48:]), np.linalg.inv(_reduced(x[:, :48]))],
    "transforms": lambda x, n: [np.fft.rfft(_reduced(x), axis=0).real, fc.all_reduce(np.fft.rfft(x.T, axis=0), _AXIS).imag],
    "sorted": lambda x, n: [np.sort(_reduced(x), axis=0), fc.top_k(_reduced(x), 5)[0], np.argsort(_reduced(x), axis=1)],
    "mapped": lambda x, n: [
        fc.vmap(lambda c: fc.all_reduce(c, _AXIS), in_axes=1, out_axes=1)(x),
        fc.vmap(lambda c: fc.all_gather(c, _AXIS), in_axes=1, out_axes=0)(x),
    ],
    "tangents": lambda x, n: [*fc.jvp(_reduced, (x,), (np.flip(x, 1),)), fc.linearize(_reduced, x)[1](np.sin(x))],
    "cotangents": lambda x, n: fc.vjp(_reduced, x)[1](np.sin(_reduced(x))),
    "checkpoint": lambda x, n: fc.grad(lambda x: np.sum(fc.checkpoint(lambda x: np.tanh(_reduced(x)).T @ _reduced(x))(x)))(x),
    "pieces": lambda x, n: fc.grad(lambda x: np.sum(_reduced(x)[::2] * _reduced(x)[1::2] + _reduced(x)[np.arange(48) % 5]))(x),
    "joined": lambda x, n: [np.concatenate([_reduced(x), x.T], axis=1), *np.split(_reduced(x.T.reshape(48, 96)), 4, axis=1)],
    "callbacks": lambda x, n: fc.pure_callback(np.asfortranarray, fc.ArrayType((96, 48), x.dtype), _reduced(x)),
    "half": lambda x, n: [_reduced(x.astype(t)).astype(np.float32) for t in (np.float16, fc.bfloat16)],
    "other dtypes": lambda x, n: [_reduced(x * 1j).imag, _reduced((x * 9).astype(np.int32)), _reduced(x > 0, "or")],
    "random": lambda x, n: _reduced(fc.random.normal(fc.random.fold_in(fc.random.key(0), fc.axis_index(_AXIS)), (96, 48))),
    "several operands": lambda x, n: fc.all_reduce(
        [x, x.T, x[::-1], x[:, ::2], np.sin(x).T, np.broadcast_to(x, (2, 48, 96))], _AXIS
    ),
    "algorithms": lambda x, n: [
        fc.all_reduce(np.transpose(x), _AXIS, algorithm=how) for how in fc.schedules.algorithms("all_reduce", n)
    ],
    "loops": lambda x, n: fc.scan(_body, vary(x[:, :48].T), np.transpose(x.reshape(48, 8, 12), (1, 2, 0)), reverse=True),
    "own decisions": lambda x, n: fc.while_loop(
        lambda c: c[0] <= fc.axis_index(_AXIS), lambda c: (c[0] + 1, np.transpose(np.sin(np.transpose(c[1])))), (0, vary(x.T))
    )[1],
}


def _situations(n: int, same: Any) -> None:
    """All in one program."""

    def every(x: Any) -> Any:
        found = [y for situation in SITUATIONS.values() for y in fc.tree.leaves(situation(x[0], n))]
        sums = [np.sum(y, axis=k) for y in found if y.ndim > 1 for k in (0, 1)]
        return [vary(y)[None] for y in (*sums, *(y for y in found if y.ndim < 2))]

    same(every, {_AXIS: n}, (block_values((48, 96), n, 4),), P(_AXIS), P(_AXIS))
    # An axis of one device, alone and with the other.
    for axes in ("m", (_AXIS, "m")):
        one = lambda x, axes=axes: np.sum(fc.all_reduce(fc.pvary(x[0].T, "m"), axes), axis=0)
        same(lambda x, one=one: vary(one(x))[None], {_AXIS: n, "m": 1}, (block_values((48, 96), n, 5),), P(_AXIS), P(_AXIS))


def _memory_of_others(n: int, same: Any) -> None:
    """Values that are computed into shared memory, into a collective's result, or into a dead operand."""

    def published(x: Any, w: Any) -> Any:
        y = np.tanh(x[0].T)
        batches = np.transpose(x[0].reshape(2, -1, 4, x.shape[2]), (1, 0, 2, 3))
        z = np.matmul(batches, np.swapaxes(batches, 2, 3))
        read = [np.sum(fc.all_reduce(v, _AXIS), axis=0) for v in (y, z)]
        return [vary(v)[None] for v in (*read, np.sum(y, axis=0), np.sum(z, axis=0), np.sum(z, axis=(0, 3)))]

    def written(x: Any, w: Any) -> Any:
        both = fc.all_reduce(x[0], _AXIS) + np.sin(w.T)
        again = np.cos(w.T) + fc.all_reduce(x[0], _AXIS, op="max")
        return [vary(np.sum(np.tanh(v * np.float32(2)), axis=k))[None] for v in (both, again) for k in (0, 1)]

    x = block_values((160, 128), n, 2)
    for function in (published, written):
        same(function, {_AXIS: n}, (x, block_values((128, 160), 1, 3)[0]), (P(_AXIS), P()), P(_AXIS))


def _between_programs(n: int, same: Any) -> None:
    """Results that another program takes, as they are and redistributed."""

    def run(function: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any) -> Any:
        jitted = fc.jit(function, mesh=same.mesh({_AXIS: n}), in_specs=in_specs, out_specs=out_specs)
        found = jitted(*args)
        same.results(found)
        return found

    def sums(*xs: Any) -> Any:
        return [vary(y)[None] for x in xs for y in _sums(x)]

    rows, columns = P(_AXIS), P(None, _AXIS)
    x = block_values((96 * n, 120), 1, n)[0]
    a, b = run(lambda x: (np.sin(x.T), np.swapaxes(x, 0, 1)), rows, columns, x)
    run(sums, columns, rows, a, b)
    moved, total = run(lambda x: (x.T, fc.all_reduce(x.T, _AXIS)), rows, (columns, P()), x)
    again = fc.redistribute(moved, rows)
    run(sums, (rows, P()), rows, again, total)


# ---------------------------------------------------------------- a transformer

_WIDTH, _HEADS, _WORDS, _LENGTH = 64, 4, 50, 24


def _parameters() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    normal = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
    layer = lambda: {
        "qkv": normal(3, _HEADS, _WIDTH // _HEADS, _WIDTH),
        "out": normal(_HEADS, _WIDTH // _HEADS, _WIDTH),
        "up": normal(_WIDTH, 4 * _WIDTH),
        "down": normal(_WIDTH, 4 * _WIDTH),
        "scales": np.ones((2, _WIDTH), np.float32),
    }
    return {"words": normal(_WORDS, _WIDTH), "places": normal(_LENGTH, _WIDTH), "layers": [layer(), layer()]}


_OVER_MODEL = {
    "qkv": P(None, "model"),
    "out": P("model"),
    "up": P(None, "model"),
    "down": P(None, "model"),
    "scales": P(),
}


def _layer(layer: dict[str, Any], x: Any) -> Any:
    """Megatron's: the heads and the hidden layer are split over "model", and each half ends with one all_reduce."""
    given = fc.pvary(nn.rms_norm(x, layer["scales"][0]), "model")
    q, k, v = (np.einsum("hdc,btc->bhtd", w, given) for w in (layer["qkv"][0], layer["qkv"][1], layer["qkv"][2]))
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) / np.float32(np.sqrt(_WIDTH // _HEADS))
    weights = nn.softmax(np.where(np.tri(x.shape[1], dtype=bool), scores, np.float32(-1e9)))
    x = x + fc.all_reduce(np.einsum("hdc,bhtk,bhkd->btc", layer["out"], weights, v), "model")
    given = fc.pvary(nn.rms_norm(x, layer["scales"][1]), "model")
    return x + fc.all_reduce(np.einsum("cf,btf->btc", layer["down"], np.tanh(given @ layer["up"])), "model")


def _loss(parameters: dict[str, Any], words: Any) -> Any:
    given, wanted = words[:, :-1], words[:, 1:]
    table = fc.asarray(parameters["words"])
    x = table[given] + parameters["places"][: given.shape[1]]
    for layer in parameters["layers"]:
        x = _layer(layer, x)
    logits = x @ parameters["words"].T  # tied: the gradient has a transposed part
    return fc.all_reduce(np.mean(nn.cross_entropy(logits, wanted)), "data", op="mean")


def transformers(n: int, same: Any) -> None:
    """Steps of a transformer, of which every gradient is compared, on data × model in all ways."""
    words = np.random.default_rng(6).integers(0, _WORDS, (4 * n, _LENGTH))
    optimizer = fc.optim.sgd(0.5, momentum=0.9)
    for data, model in [(n, 1), (1, n), *([(2, n // 2)] if n == 4 else [])]:
        if _HEADS % model:
            continue
        specs = {"words": P(), "places": P(), "layers": [_OVER_MODEL] * 2}
        of_state = fc.optim.SgdState(P(), specs)

        def step(parameters: Any, state: Any, words: Any) -> Any:
            loss, gradients = fc.value_and_grad(lambda p: _loss(p, words))(parameters)
            updates, state = optimizer.update(gradients, state, parameters)
            return loss, gradients, fc.optim.apply_updates(parameters, updates), state

        run = fc.jit(
            step,
            mesh=same.mesh({"data": data, "model": model}),
            in_specs=(specs, of_state, P("data")),
            out_specs=(P(), specs, specs, of_state),
            donate_argnums=(0, 1),
        )
        parameters = _parameters()
        state = optimizer.init(parameters)
        for _ in range(3):
            loss, gradients, parameters, state = run(parameters, state, words)
            same.results([loss, gradients, parameters])
