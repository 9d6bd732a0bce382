"""Data parallelism: the mean loss over an axis, gradients reduced in buckets while they complete."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from ..autodiff.custom_rules import grad_hook
from ..autodiff.reverse import vjp
from ..collectives import Axes, all_reduce, mesh_axes
from ..errors import PlannedError, ShapeError, TraceError, VaryingError
from ..ops.registry import as_traceable
from ..tracing.trace import stage, value_type
from ..types import ArrayType, is_inexact

__all__ = ["data_parallel", "make_buckets"]

MIB = 1 << 20


def make_buckets(types: Sequence[ArrayType], order: Sequence[int], caps: Sequence[float]) -> list[list[int]]:
    """Group parameter numbers, taken in `order`, into buckets of one dtype.

    `caps` are sizes in bytes: one for each bucket in turn, the last for all that follow. A bucket is closed when
    the next parameter would make it larger than its cap; a parameter over the cap has a bucket of its own.
    """
    buckets: list[list[int]] = []
    filling: dict[np.dtype, tuple[list[int], float]] = {}  # dtype -> its open bucket, and that bucket's cap
    for i in order:
        dtype, nbytes = types[i].dtype, types[i].nbytes
        bucket, cap = filling.get(dtype, ([], 0.0))
        if not bucket or sum(types[k].nbytes for k in bucket) + nbytes > cap:
            bucket, cap = [], caps[min(len(buckets), len(caps) - 1)]
            buckets.append(bucket)
            filling[dtype] = (bucket, cap)
        bucket.append(i)
    return buckets


def data_parallel(
    loss_fn: Callable[..., Any],
    axis: Axes = "data",
    *,
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    comm_hook: Callable[..., Any] | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """`loss_fn(params, *batch)` made data parallel over `axis`.

    Returns a function with loss_fn's signature, to use inside `fc.jit`: its value is the mean over `axis` of the
    devices' losses, and its gradient in `params` (equal on all devices) is the mean gradient. Gradients are
    reduced in buckets, in the order in which the backward pass completes them: one all_reduce for each bucket, as
    soon as the bucket's last gradient is complete. Sizes are in MiB (2^20 bytes); the first bucket is small, so that
    communication starts early; buckets hold one dtype. With `has_aux`, loss_fn returns `(loss, aux)`, and aux
    is returned as it is on each device.

    Raises: VaryingError when the parameters vary over `axis`, or the loss does not (it is reduced already);
    MeshError outside a traced function with a mesh.

    Source: Li et al., "PyTorch Distributed", VLDB 2020.
    """
    if not callable(loss_fn):
        raise TraceError(f"data_parallel takes a function loss_fn(params, *batch), not {loss_fn!r:.60}.")
    if comm_hook is not None:
        raise PlannedError("data_parallel(comm_hook=...) is planned, not in this version; leave it out.")
    for name, size in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not size > 0:
            raise ShapeError(f"data_parallel: {name} must be a positive number of MiB, not {size!r}.")

    @functools.wraps(loss_fn)
    def wrapped(params: Any, *batch: Any) -> Any:
        axes = mesh_axes("data_parallel", axis)
        leaves, treedef = optree.tree_flatten(params)
        leaves = [as_traceable(leaf) for leaf in leaves]
        types = [value_type(leaf) for leaf in leaves]
        hooked = [i for i, t in enumerate(types) if is_inexact(t.dtype)]
        for i in hooked:
            own = [a for a in axes if a in types[i].varying]
            if own:
                raise VaryingError(
                    f"data_parallel over {', '.join(map(repr, own))}: params{''.join(f'[{p!r}]' for p in treedef.paths()[i])}, "
                    f"of type {types[i]}, varies over it already, so each device has a gradient of its own and there is "
                    "nothing to reduce. Pass parameters that are equal on all devices along the axis (P() in in_specs)."
                )

        def loss_of(chosen: Sequence[Any]) -> Any:
            full = list(leaves)
            for i, value in zip(hooked, chosen, strict=True):
                full[i] = value
            result = loss_fn(treedef.unflatten(full), *batch)
            if not has_aux:
                return _mean_loss(result, axes)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TraceError(f"data_parallel(has_aux=True): {loss_fn!r} must return (loss, aux).")
            return _mean_loss(result[0], axes), result[1]

        order = _completion_order(loss_of, [types[i] for i in hooked], axis, has_aux)
        caps = (first_bucket_mb * MIB, bucket_cap_mb * MIB)
        wide: list[Any] = [None] * len(hooked)
        for bucket in make_buckets([types[i] for i in hooked], order, caps):
            values = grad_hook([leaves[hooked[k]] for k in bucket], _sum_over(axis), axis)
            for k, value in zip(bucket, values, strict=True):
                wide[k] = value
        return loss_of(wide)

    return wrapped


def _mean_loss(loss: Any, axes: tuple[str, ...]) -> Any:
    """The mean over the devices of one scalar on each."""
    found = value_type(loss) if hasattr(loss, "dtype") or isinstance(loss, (int, float)) else None
    if found is None or found.shape or not is_inexact(found.dtype) or found.dtype.kind == "c":
        raise TraceError(
            "data_parallel: the loss function must return one real floating-point scalar, the mean loss of its batch, and it "
            f"returned {found or type(loss).__name__}. Reduce it with np.mean; has_aux=True carries more."
        )
    equal = [a for a in axes if a not in found.varying]
    if equal:
        raise VaryingError(
            f"data_parallel over {', '.join(map(repr, equal))}: the loss, of type {found}, is equal on all devices along it "
            "already. Return the mean loss of this device's own batch from the loss function, without an all_reduce over "
            "that axis: data_parallel takes the mean over the devices."
        )
    return all_reduce(loss, axes, op="mean")


def _sum_over(axis: Axes) -> Callable[[Any], Any]:
    """The hook of a bucket: the transpose of pvary.

    The mean loss has already divided the cotangents (once, as a scalar), so that derivatives of any order and of the
    batch are correct.
    """

    def reduce_bucket(gradients: Any) -> Any:
        return all_reduce(gradients, axis, op="sum")

    return reduce_bucket


def _completion_order(loss_of: Callable[..., Any], types: Sequence[ArrayType], axis: Axes, has_aux: bool) -> list[int]:
    """The parameters' numbers in the order in which a backward pass completes their gradients.

    Found by a trace that is discarded, with a separate hook on each parameter.
    """
    order: list[int] = []
    reduce_gradients = _sum_over(axis)

    def record(number: int) -> Callable[[Any], Any]:
        def hook(gradients: Any) -> Any:
            order.append(number)
            return reduce_gradients(gradients)

        return hook

    def hooked(values: Sequence[Any]) -> Any:
        return loss_of([grad_hook([v], record(i), axis)[0] for i, v in enumerate(values)])

    def backward(*values: Any) -> list[Any]:
        loss, pullback, *_ = vjp(hooked, values, has_aux=has_aux)
        pullback(np.ones((), loss.dtype))
        return []

    stage(backward, types, label="completion order")
    return order + [i for i in range(len(types)) if i not in order]
