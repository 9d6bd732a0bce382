"""Cases for the tests of communication hooks: a step that reduces one bucket, and each algorithm once more in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P, comm_hooks
from funccoll.core.mesh import Mesh
from funccoll.parallel.buckets import Bucket, CommHook

HOOKS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: comm_hooks.all_reduce,
    "float16": comm_hooks.float16,
    "bfloat16": comm_hooks.bfloat16,
    "int8": lambda: comm_hooks.int8(16),
    "power_sgd": lambda: comm_hooks.power_sgd(2, min_compression_rate=1),
    "power_sgd in bfloat16": lambda: comm_hooks.power_sgd(inner=comm_hooks.bfloat16()),
    "power_sgd in int8": lambda: comm_hooks.power_sgd(inner=comm_hooks.int8(8)),
    "int8 of bfloat16": lambda: comm_hooks.bfloat16(comm_hooks.int8()),
    "float16 of power_sgd of bfloat16": lambda: comm_hooks.float16(comm_hooks.power_sgd(inner=comm_hooks.bfloat16())),
}


def reducer(hook: Any, axis: Any = "data") -> Callable[[Any, Any], tuple[Any, Any]]:
    """`(states, gradients) -> (states, sums)` of one device, for a hook with or without state."""

    def reduce(states: Any, gradients: Any) -> tuple[Any, Any]:
        bucket = Bucket(tuple(gradients), tuple(f"[{i}]" for i in range(len(gradients))), 0, axis)
        states, bucket = hook.reduce(tuple(states), bucket) if isinstance(hook, CommHook) else (states, hook(bucket))
        return tuple(states), list(bucket.gradients)

    return reduce


def step_of(hook: Any, mesh: Any, axis: Any = "data") -> Any:
    """`reducer` over a mesh: arrays have one block for each device in front, but for the sums, which do not vary."""

    def body(states: Any, gradients: Any) -> Any:
        states, gradients = fc.tree.map(lambda x: x[0], (states, gradients))
        states, sums = reducer(hook, axis)(states, gradients)
        return fc.tree.map(lambda x: x[None], states), sums

    every = P(axis)
    return fc.jit(body, mesh=mesh, in_specs=(every, every), out_specs=(every, P()))


def first_states(hook: Any, gradients: Sequence[np.ndarray]) -> Any:
    """The first states of all devices, made in a trace; `gradients` have one block for each device in front."""
    if not isinstance(hook, CommHook):
        return ()
    count = len(gradients[0])
    mesh = Mesh({"data": 1}, range(1))  # a virtual device, in a process of a job too
    init = fc.jit(lambda gs: tuple(hook.init(g) for g in gs), mesh=mesh, in_specs=P(), out_specs=P())
    states = init([g[0] for g in gradients])
    return fc.tree.map(lambda s: np.stack([np.asarray(s)] * count), states)


def bytes_sent(lowered: Any) -> int:
    """Bytes that one device sends, by algorithms that send the least (Chan et al. 2007)."""
    factor = {"all_reduce": lambda p: 2 * (p - 1) / p, "all_to_all": lambda p: (p - 1) / p, "all_gather": lambda p: p - 1}
    return round(sum(factor[row.kind](row.size) * row.nbytes for row in lowered.collectives()))


# ---------------------------------------------------------------- the algorithms in NumPy


def quantised(x: np.ndarray, count: int, length: int) -> np.ndarray:
    """The values that are sent for a vector in blocks."""
    out = np.zeros_like(x)
    for block in range(count):
        at = slice(block * length, (block + 1) * length)
        scale = np.max(np.abs(x[at]), initial=0) / x.dtype.type(127)
        if scale > 0:
            out[at] = np.rint(x[at] / scale) * scale
    return out


def int8_step(errors: np.ndarray, gradients: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(errors, sum) of flat gradients (devices, n) by two phases, one device after the other."""
    devices, n = gradients.shape
    part = -(-n // devices)
    count = -(-part // block_size)
    length = -(-part // count)
    width = count * length
    padded = np.zeros((devices, devices * width), gradients.dtype)
    padded[:, :n] = gradients + errors
    sent = np.stack(
        [np.concatenate([quantised(row[q * width : (q + 1) * width], count, length) for q in range(devices)]) for row in padded]
    )
    left, result = padded - sent, []
    for owner in range(devices):
        at = slice(owner * width, (owner + 1) * width)
        total = np.zeros(width, gradients.dtype)
        for row in sent:
            total = total + row[at]
        result.append(quantised(total, count, length))
        left[owner, at] += total - result[-1]
    return left[:, :n], np.concatenate(result)[:n]


def power_sgd_step(errors: np.ndarray, q: np.ndarray, matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(errors, Q, sum) of matrices (devices, rows, columns), by Householder's QR in float64.

    The columns of Q can have other signs and lengths.
    """
    m = matrices.astype(np.float64) + errors
    p, _ = np.linalg.qr(sum(x @ q for x in m))
    qs = [x.T @ p for x in m]
    return np.stack([x - p @ y.T for x, y in zip(m, qs)]), sum(qs), p @ sum(qs).T


# ---------------------------------------------------------------- processes


def hooks(n: int, same: Any) -> None:
    """Three steps of every hook, on a matrix, a vector, and a stack of matrices."""
    rng = np.random.default_rng(n)
    shapes = ((24, 40), (37,), (6, 5, 8))
    steps = [[rng.normal(size=(n, *shape)).astype(np.float32) for shape in shapes] for _ in range(3)]
    for make in HOOKS.values():
        hook = make()
        leaves, tree = fc.tree.flatten((first_states(hook, steps[0]), steps))

        def body(*leaves: Any, hook: Any = hook, tree: Any = tree) -> Any:
            states, steps = fc.tree.map(lambda x: x[0], tree.unflatten(leaves))
            sums = []
            for gradients in steps:
                states, summed = reducer(hook, "d")(states, gradients)
                sums.append(summed)
            return fc.tree.map(lambda x: x[None], states), sums

        same(body, {"d": n}, tuple(leaves), P("d"), (P("d"), P()))
