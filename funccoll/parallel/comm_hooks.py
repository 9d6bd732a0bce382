"""Communication hooks: how the gradients of a bucket are summed over the devices, with fewer bytes.

    dp = fc.data_parallel(loss_fn, comm_hook=fc.comm_hooks.power_sgd(rank=2, inner=fc.comm_hooks.bfloat16()))
    loss, gradients, state = dp.value_and_grad(params, batch, state=state)  # inside fc.jit; the first state: dp.init(params)

A hook is a pure function `hook(bucket) -> bucket`, or a `CommHook` if it has state. Each returns the sum of the devices'
gradients, in the shapes and dtype that it was given. All devices get the same bits.

A lossy hook with error feedback keeps in its state what it leaves out of a sum, and adds it to the next gradients. So all of
it is applied in the end (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014). Compression is for real floats:
gradients of other dtypes are summed as they are. NaNs and infinities reach every device, as NaN or infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import random
from ..collectives import functions as collectives
from ..core.types import bfloat16 as bfloat16_dtype
from ..core.types import is_inexact
from ..errors import ShapeError, TraceError
from ..ops.indexing import at
from ..ops.registry import as_traceable
from ..tracing.trace import value_type
from .buckets import Bucket, CommHook

__all__ = ["Bucket", "CommHook", "all_reduce", "bfloat16", "float16", "int8", "power_sgd"]

Hook = Callable[[Bucket], Bucket] | CommHook


def all_reduce(bucket: Bucket) -> Bucket:
    """Sum a bucket by one call of `fc.all_reduce`: the default hook.

    Args:
        bucket: The bucket of this device.

    Returns:
        The bucket with the sums over the axis.

    References:
        Li et al., "PyTorch Distributed", VLDB 2020.
    """
    return bucket.all_reduce()


def float16(inner: Hook = all_reduce) -> Hook:
    """Return a hook that casts wider floats to float16 (2 bytes), sums them by `inner`, and casts the sums back.

    Each device's addend is rounded to 11 binary digits. A number above 65,504 becomes infinite, and one below 6e-5 loses
    digits. On CPUs NumPy converts to float16 much more slowly than to bfloat16.

    Args:
        inner: The hook that sums the cast gradients.

    Returns:
        A hook; a `CommHook` if `inner` is one, with its state.

    Raises:
        TraceError: If `inner` is not a hook.

    References:
        Micikevicius et al., "Mixed precision training", ICLR 2018; torch's fp16_compress_hook.
    """
    return _casting(np.dtype(np.float16), inner, "float16")


def bfloat16(inner: Hook = all_reduce) -> Hook:
    """Return a hook that casts wider floats to bfloat16 (2 bytes), sums them by `inner`, and casts the sums back.

    bfloat16 has the range of float32, and 8 binary digits.

    Args:
        inner: The hook that sums the cast gradients.

    Returns:
        A hook; a `CommHook` if `inner` is one, with its state.

    Raises:
        TraceError: If `inner` is not a hook.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> loss = fc.data_parallel(lambda w, x: np.mean(w * x), comm_hook=fc.comm_hooks.bfloat16())
        >>> step = fc.jit(fc.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        >>> print(step(np.float32(1), np.float32([1, 3])))
        2.0

    References:
        Kalamkar et al., "A study of bfloat16 for deep learning training", 2019; torch's bf16_compress_hook.
    """
    return _casting(bfloat16_dtype, inner, "bfloat16")


def int8(block_size: int = 256) -> CommHook:
    """Return a hook that sends 8-bit integers with one scale for each block, with error feedback.

    It has two phases, so that it saves bytes on any number of devices. First each device quantizes its gradients to -127 ...
    127 times the scale, which is the largest magnitude of the block over 127. It sends a part of them to every other device
    (all_to_all), and adds up the part that it receives in float32. Then it quantizes the sums and sends them to all
    (all_gather). Each phase sends about 1 + 4 / block_size bytes for each element, a quarter of float32's.

    The state of a gradient is an array of its shape, float32 or wider. It holds this device's own rounding errors, and in its
    own part those of the sums too. A block with a NaN or an infinity comes out as NaNs or infinities, and leaves the errors as
    they were. A block of numbers below 1e-36 (in float32) waits in the errors. A bucket that would not shrink is summed as it
    is, its kept errors included.

    Args:
        block_size: The largest number of elements with one scale.

    Returns:
        A `CommHook`.

    Raises:
        ShapeError: If `block_size` is not an integer of at least 1.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> loss_fn = lambda params, x: np.mean(x @ params["w"])
        >>> hook = fc.comm_hooks.int8()
        >>> dp = fc.DataParallel({"w": np.zeros(2)}, loss_fn, fc.optim.sgd(1.0), mesh=mesh, comm_hook=hook)
        >>> loss = dp.step(np.ones((4, 2)))
        >>> print(dp.params["w"])
        [-1. -1.]

    References:
        The two phases are those of Tang et al., "1-bit Adam", ICML 2021 (DeepSpeed). Scales for blocks are in Alistarh et al.,
        "QSGD", NeurIPS 2017, with random rounding instead of error feedback.
    """
    _require_count("int8", "block_size", block_size)

    def init(gradient: Any) -> Any:
        type = value_type(gradient)
        return np.zeros(type.shape, _wide(type.dtype)) if _is_real_float(type.dtype) else ()

    def reduce(states: Any, bucket: Bucket) -> tuple[Any, Bucket]:
        if not _is_real_float(bucket.dtype):
            return states, bucket.all_reduce()
        errors, dtype, axis = bucket.replace(states), bucket.dtype, bucket.axis
        old = errors.buffer()
        total = bucket.buffer().astype(old.dtype) + old  # of this device
        size, devices = total.size, collectives.axis_size(axis)
        count, length = _block_shape(-(-size // devices), block_size)
        if devices * count * (length + old.dtype.itemsize) >= size * dtype.itemsize:
            sent = total.astype(dtype)
            result = bucket.from_buffer(sent).all_reduce()
            kept = _finite_or(total - sent.astype(old.dtype), old)
            return errors.from_buffer(kept).gradients, result

        padding = devices * count * length - size
        blocks = (np.pad(total, (0, padding)) if padding else total).reshape(devices, count, length)
        sent = _quantised(blocks)
        received = collectives.all_to_all(sent, axis, split_dim=0, concat_dim=0)
        part = np.sum(_values(received), axis=0)
        sent_part = _quantised(part)
        result = _values(collectives.all_gather(sent_part, axis)).reshape(-1)[:size]
        error, own = blocks - _values(sent), collectives.axis_index(axis)
        error = at(error)[own].set(error[own] + (part - _values(sent_part)))  # .add() is much slower in NumPy
        kept = _finite_or(error.reshape(-1)[:size], old)
        return errors.from_buffer(kept).gradients, bucket.from_buffer(result.astype(dtype))

    reduce.__qualname__ = "comm_hooks.int8"  # the name in errors
    return CommHook(init, reduce)


def power_sgd(rank: int = 1, *, min_compression_rate: float = 2, seed: int = 0, inner: Hook = all_reduce) -> CommHook:
    """Return a PowerSGD hook: each gradient, as a matrix M, is summed as a product P Qᵀ of low rank.

    M has the shape (first dimension, all others). One power iteration computes P = M Q, sums it over the devices and makes its
    columns orthonormal, then sums Q = Mᵀ P. The sum of the M is P Qᵀ. The next step starts with this Q (warm start). What P Qᵀ
    leaves out of this device's M is added to the next gradient (error feedback). `rank` (rows + columns) elements are sent
    instead of rows · columns.

    All P's and all uncompressed gradients of a bucket are summed in one call, and all Q's in a second. The state of a
    compressed gradient is the error, of its shape, and Q (columns, rank), both float32 or wider, and what `inner` keeps. What
    cancels between the devices stays in their errors. What `inner` rounds is not in them. A NaN or infinity makes the whole
    matrix NaN, and leaves errors and Q as they were.

    Args:
        rank: The rank of the product.
        min_compression_rate: A gradient is summed uncompressed if it has fewer than two dimensions, or compression saves less
            than this factor.
        seed: The first Q is random numbers made from it.
        inner: The hook that makes both calls, on buckets in which P's or Q's replace gradients.

    Returns:
        A `CommHook`.

    Raises:
        ShapeError: If the rank is not an integer of at least 1, the rate is not a positive number, or `fc.random.key` does not
            take the seed.
        TraceError: If `inner` is not a hook.

    References:
        Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.
    """
    _require_count("power_sgd", "rank", rank)
    rate = min_compression_rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
        raise ShapeError(f"comm_hooks.power_sgd: min_compression_rate must be a positive number, not {rate!r}.")
    key = random.key(seed)
    calls = _with_state("power_sgd", inner)

    def factors(gradient: Any) -> tuple[int, int, int]:
        """(rows, columns, rank) of a gradient; rank 0 if it is summed uncompressed."""
        type = value_type(gradient)
        rows, columns = (type.shape[0], math.prod(type.shape[1:])) if type.ndim > 1 else (type.size, 1)
        shrinks = rows * columns > rate * rank * (rows + columns)
        return rows, columns, min(rank, rows, columns) if type.ndim > 1 and shrinks and _is_real_float(type.dtype) else 0

    def init(gradient: Any) -> Any:
        rows, columns, kept = factors(gradient)
        type = value_type(gradient)
        if not kept:
            return {"inner": calls.init(gradient)}
        wide = _wide(type.dtype)
        return {
            "error": np.zeros(type.shape, wide),
            "q": random.normal(random.fold_in(random.fold_in(key, rows), columns), (columns, kept), wide),
            "inner": calls.init(np.zeros((rows, kept), type.dtype)),
            "inner_q": calls.init(np.zeros((columns, kept), type.dtype)),
        }

    def reduce(states: Any, bucket: Bucket) -> tuple[Any, Bucket]:
        dtype, wide = bucket.dtype, _wide(bucket.dtype)
        shapes = [factors(g) for g in bucket.gradients]
        chosen = [i for i, (_, _, kept) in enumerate(shapes) if kept]
        matrices = {i: _as_wide(bucket.gradients[i], wide) + states[i]["error"] for i in chosen}
        matrices = {i: m.reshape(shapes[i][:2]) for i, m in matrices.items()}

        sent = list(bucket.gradients)
        for i, matrix in matrices.items():
            sent[i] = (matrix @ states[i]["q"]).astype(dtype)
        inner, first = calls.reduce(tuple(s["inner"] for s in states), bucket.replace(sent))
        new = [{**state, "inner": kept} for state, kept in zip(states, inner, strict=True)]
        if not chosen:
            return tuple(new), first

        ps = {i: _orthonormal(_as_wide(first.gradients[i], wide)) for i in chosen}
        own = [(matrices[i].T @ ps[i]).astype(dtype) for i in chosen]
        names = tuple(bucket.names[i] for i in chosen)
        inner, second = calls.reduce(
            tuple(states[i]["inner_q"] for i in chosen), replace(bucket, gradients=tuple(own), names=names)
        )
        sums = list(first.gradients)
        for i, own_q, q, kept in zip(chosen, own, second.gradients, inner, strict=True):
            q, shape, old = _as_wide(q, wide), value_type(bucket.gradients[i]).shape, states[i]
            sums[i] = (ps[i] @ q.T).reshape(shape).astype(dtype)
            error = (matrices[i] - ps[i] @ _as_wide(own_q, wide).T).reshape(shape)
            new[i] |= {"error": _finite_or(error, old["error"]), "q": _next_start(q, old["q"]), "inner_q": kept}
        return tuple(new), bucket.replace(sums)

    reduce.__qualname__ = "comm_hooks.power_sgd"  # the name in errors
    return CommHook(init, reduce)


# ---------------------------------------------------------------- hooks as values


def _with_state(name: str, hook: Hook) -> CommHook:
    """Return a hook without state as one whose state is empty."""
    if isinstance(hook, CommHook):
        return hook
    _require_called(name, hook)
    if not callable(hook):
        raise TraceError(f"comm_hooks.{name}: inner must be a function hook(bucket) -> bucket or a CommHook, not {hook!r:.60}.")
    return CommHook(lambda gradient: (), lambda states, bucket: (states, hook(bucket)))


def _casting(dtype: np.dtype, inner: Hook, name: str) -> Hook:
    """Return a hook that runs `inner` on a bucket of a narrower dtype."""
    calls = _with_state(name, inner)

    def cast(gradients: Sequence[Any]) -> list[Any]:
        leaves = [as_traceable(g) for g in gradients]
        return [g.astype(dtype) if _is_real_float(g.dtype) and g.dtype.itemsize > dtype.itemsize else g for g in leaves]

    def reduce(states: Any, bucket: Bucket) -> tuple[Any, Bucket]:
        states, reduced = calls.reduce(states, bucket.replace(cast(bucket.gradients)))
        return states, reduced.replace([g.astype(bucket.dtype) for g in reduced.gradients])

    def stateless(bucket: Bucket) -> Bucket:
        return reduce(((),) * len(bucket.gradients), bucket)[1]

    reduce.__qualname__ = stateless.__qualname__ = f"comm_hooks.{name}"  # the name in errors
    return CommHook(lambda gradient: calls.init(cast([gradient])[0]), reduce) if isinstance(inner, CommHook) else stateless


def _require_called(name: str, value: Any) -> None:
    """Raise for a bucket in the place of an option: the hook's maker was given as the hook."""
    if isinstance(value, Bucket):
        raise TraceError(f"comm_hooks.{name} makes a hook, and was called with a bucket: give comm_hooks.{name}() as the hook.")


def _require_count(name: str, argument: str, value: Any) -> None:
    _require_called(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ShapeError(f"comm_hooks.{name}: {argument} must be an integer of at least 1, not {value!r}.")


# ---------------------------------------------------------------- numbers


def _is_real_float(dtype: np.dtype) -> bool:
    return is_inexact(dtype) and dtype.kind != "c"


def _wide(dtype: np.dtype) -> np.dtype:
    """The dtype in which sums and errors are kept: float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _as_wide(x: Any, wide: np.dtype) -> Any:
    return as_traceable(x).astype(wide)


def _finite_or(x: Any, otherwise: Any) -> Any:
    """`x` if it is finite, else `other`: an error that is not finite would stay for ever."""
    return np.where(np.isfinite(x), x, otherwise)


def _block_shape(size: int, block_size: int) -> tuple[int, int]:
    """(number, length) of blocks of equal length that hold `size` elements with the least padding."""
    count = -(-size // block_size)
    return count, -(-size // max(count, 1))


def _quantised(blocks: Any) -> tuple[Any, Any]:
    """(int8, scales) of blocks along the last dimension.

    A scale is 0 if it would have too few digits to divide by. If it is not finite, no product with it is.
    """
    scale = np.max(np.abs(blocks), axis=-1, keepdims=True) / 127
    scale = np.where(scale < np.finfo(scale.dtype).tiny, 0, scale)
    return np.rint(blocks / np.where(scale > 0, scale, np.inf)).astype(np.int8), scale


def _values(quantised: tuple[Any, Any]) -> Any:
    """The floats that int8 and scales stand for."""
    numbers, scale = quantised
    return numbers.astype(scale.dtype) * scale


def _unit(columns: Any) -> Any:
    """Columns of length 1, or 0 for columns of zeros."""
    columns = columns / _not_zero(np.max(np.abs(columns), axis=0, keepdims=True))  # without scaling, a square may overflow
    return columns / _not_zero(np.sqrt(np.sum(columns * columns, axis=0, keepdims=True)))


def _not_zero(x: Any) -> Any:
    return np.where(x == 0, 1, x)


def _orthonormal(matrix: Any) -> Any:
    """Orthonormal columns by Gram-Schmidt; 0 in place of a column that depends on those before it.

    Each column is projected twice. That makes it orthogonal to working precision unless it depends on the others (Giraud,
    Langou and Rozložník, "The loss of orthogonality in the Gram-Schmidt orthogonalization process", 2005). A dependent column
    is left out: its remaining rounding errors, made a unit vector, would be counted twice.
    """
    tolerance = 100 * np.finfo(matrix.dtype).eps
    done: list[Any] = []
    for column in range(matrix.shape[1]):
        vector = _unit(matrix[:, column : column + 1])
        for _ in range(2 if done else 0):
            basis = np.concatenate(done, axis=1)
            vector = vector - basis @ (basis.T @ vector)
        dependent = np.max(np.abs(vector), axis=0, keepdims=True) <= tolerance
        done.append(np.where(dependent, 0, _unit(vector)))
    return np.concatenate(done, axis=1)


def _next_start(q: Any, old: Any) -> Any:
    """The start of the next power iteration: `q` with columns of length 1, and the old column if one is 0 or not finite."""
    size = np.max(np.abs(q), axis=0, keepdims=True)
    return np.where((size > 0) & np.isfinite(size), _unit(q), old)
