"""Batch normalization over the devices of a mesh axis, in training and in evaluation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..collectives.functions import Axes, all_gather, mesh_axes, pvary
from ..core.interpreter import current_interpreter
from ..core.types import is_inexact
from ..errors import DTypeError, MeshError, ShapeError
from ..ops.elementwise import result_dtype
from ..ops.registry import as_traceable, dims
from ..tracing.trace import value_type
from ..transforms.autodiff.custom_rules import stop_gradient

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

__all__ = ["BatchStats", "batch_norm", "sync_batch_norm", "update_running_stats"]


class BatchStats(NamedTuple):
    """Statistics of a batch, equal on all devices that they are over.

    `mean` and `var` have the dimensions that are not reduced; `var` is the biased variance, divided by `count`: the
    number of elements behind each mean, or the sum of their weights, a scalar.
    """

    mean: Any
    var: Any
    count: Any


def sync_batch_norm(
    x: Float[Any, "*s"],
    scale: Float[Any, "*c"] | None = None,
    bias: Float[Any, "*c"] | None = None,
    *,
    axis: Axes | None = "data",
    reduce_dims: int | tuple[int, ...] | None = None,
    weights: Shaped[Any, "..."] | None = None,
    eps: float = 1e-5,
) -> tuple[Float[Any, "*s"], BatchStats]:
    """Batch normalization with the statistics of the batches of all devices along `axis`.

    (x - mean) / sqrt(var + eps), then `* scale + bias`; both have the shape of the dimensions that are not reduced, as the
    statistics have. Mean and variance are over `reduce_dims` (all dimensions but the last; `(0, 2, 3)` for images with
    channels first) and over `axis`; None is this device's own batch, and so is an axis over which neither `x` nor `weights`
    vary. The dtype of `x` is kept; 16-bit floats are computed, and their statistics returned, in float32.

    `weights`, of the first dimensions of `x` (or 1 in their place), say how often an element counts: 0 for padding, which
    must be finite. So devices have different numbers of rows; where all weights are 0, mean and variance are 0.

    One all_gather of count, mean and variance, and all_reduces of as much in the backward pass. Returns the result and the
    batch's statistics, for `update_running_stats`. Raises: ShapeError, DTypeError; MeshError for an axis outside a mesh.

    Sources: Ioffe and Szegedy, 2015; Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979.
    """
    x, dtype, over = _batch("sync_batch_norm", x, reduce_dims)
    if axis is not None and not current_interpreter().axis_sizes:
        raise MeshError(
            f"sync_batch_norm over {axis!r} was called outside a mesh: a function traced by fc.jit(fn, mesh=...) has one. "
            "With axis=None it normalizes over the batch of one device."
        )
    axes = () if axis is None else mesh_axes("sync_batch_norm", axis)
    if weights is not None:
        weights = _leading("sync_batch_norm", as_traceable(weights), x, over)
    varying = {a for value in (x, weights) if value is not None for a in value_type(value).varying}
    axes = tuple(a for a in axes if a in varying)
    centred, own = _centred(x, weights, over)
    mean, squares, count = own if not axes else _combined(*all_gather(pvary(own, axes), axes, stack=True))
    var = squares / _nonzero(count)
    factor = 1 / np.sqrt(var + eps)
    if scale is not None:
        factor = factor * _features("scale", scale, x, over)
    offset = (own[0] - mean) * factor  # the centre of `centred` is the device's own mean
    if bias is not None:
        offset = offset + _features("bias", bias, x, over)
    return (centred * factor + offset).astype(dtype), BatchStats(np.squeeze(mean, over), np.squeeze(var, over), count)


def _centred(x: Any, weights: Any, over: tuple[int, ...]) -> tuple[Any, tuple[Any, Any, Any]]:
    """x - mean, and (mean, sum of the squares of x - mean, count), on one device.

    NumPy adds the rows of a float32 one by one, so that the mean of many rows far from 0 is wrong by more than they differ.
    Of what is left when it is subtracted the mean is accurate. Any shift gives the same function: it has no gradient.
    """
    sizes = (1,) * x.ndim if weights is None else weights.shape
    count: Any = np.asarray(math.prod(x.shape[d] for d in over if sizes[d] == 1), x.dtype)
    if weights is not None:
        count = count * np.sum(weights)

    def mean_of(value: Any) -> Any:
        return np.sum(value if weights is None else value * weights, over, keepdims=True) / _nonzero(count)

    shift = stop_gradient(mean_of(x))
    shifted = x - shift
    rest = mean_of(shifted)
    centred = shifted - rest
    squares = np.square(centred)
    if weights is not None:
        squares = squares * weights
    return centred, (shift + rest, np.sum(squares, over, keepdims=True), count)


def _combined(means: Any, squares: Any, counts: Any) -> tuple[Any, Any, Any]:
    """(mean, sum of squares, count) of all batches together from those of each, stacked in front."""
    count = np.sum(counts)
    counts = np.reshape(counts, (-1,) + (1,) * (means.ndim - 1))
    shift = stop_gradient(np.sum(counts * means, 0) / _nonzero(count))  # as in `_centred`
    mean = shift + np.sum(counts * (means - shift), 0) / _nonzero(count)
    return mean, np.sum(squares + counts * np.square(means - mean), 0), count


def _nonzero(count: Any) -> Any:
    """A count to divide by: sums of nothing are 0."""
    return np.where(count == 0, np.ones((), count.dtype), count)


def batch_norm(
    x: Float[Any, "*s"],
    scale: Float[Any, "*c"] | None = None,
    bias: Float[Any, "*c"] | None = None,
    *,
    mean: Float[Any, "*c"],
    var: Float[Any, "*c"],
    reduce_dims: int | tuple[int, ...] | None = None,
    eps: float = 1e-5,
) -> Float[Any, "*s"]:
    """Batch normalization with given statistics, the running ones: the form for evaluation. It does not communicate.

    (x - mean) / sqrt(var + eps), then `* scale + bias`; all four have the shape of the dimensions that are not in
    `reduce_dims` (all but the last). The dtype of `x` is kept.
    """
    x, dtype, over = _batch("batch_norm", x, reduce_dims)
    factor = 1 / np.sqrt(_features("var", var, x, over) + eps)
    if scale is not None:
        factor = factor * _features("scale", scale, x, over)
    out = (x - _features("mean", mean, x, over)) * factor
    if bias is not None:
        out = out + _features("bias", bias, x, over)
    return out.astype(dtype)


def update_running_stats(running: tuple[Any, Any], stats: BatchStats, momentum: Any = 0.1) -> tuple[Any, Any]:
    """Running (mean, variance), moved towards those of a batch: (1 - momentum) * running + momentum * batch's.

    The convention of torch: `momentum` is the weight of the new batch (1 / n for the n-th gives their average), and the
    running variance is the unbiased one. Start with zeros and ones. dtypes are kept, no gradient flows, and a batch whose
    weights are all 0 changes nothing.
    """
    mean, var = (as_traceable(value) for value in running)
    new = stop_gradient(stats)
    unbiased = new.var * (new.count / np.maximum(new.count - 1, 1))

    def moved(old: Any, value: Any) -> Any:
        dtype = result_dtype(old, value)
        rate = np.where(new.count > 0, as_traceable(momentum).astype(dtype), np.zeros((), dtype))
        return ((1 - rate) * old.astype(dtype) + rate * value.astype(dtype)).astype(old.dtype)

    return moved(mean, new.mean), moved(var, unbiased)


def _batch(name: str, x: Any, reduce_dims: int | tuple[int, ...] | None) -> tuple[Any, np.dtype, tuple[int, ...]]:
    """(x in the dtype to compute in, its own dtype, the dimensions to reduce, counted from the front)."""
    x = as_traceable(x)
    if not is_inexact(x.dtype) or x.dtype.kind == "c":
        raise DTypeError(f"{name}: x has dtype {x.dtype}, and a batch is normalized in real floats: use x.astype(np.float32).")
    if reduce_dims is None:
        if x.ndim < 2:
            raise ShapeError(f"{name}: x of shape {x.shape} has no dimension before its last one: give reduce_dims.")
        reduce_dims = tuple(range(x.ndim - 1))
    try:
        over = dims(reduce_dims, x.ndim)
    except (TypeError, ValueError):
        raise ShapeError(
            f"{name}: reduce_dims={reduce_dims!r} must be different dimensions of x, which has shape {x.shape}."
        ) from None
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x, x.dtype, over


def _features(name: str, value: Any, x: Any, over: tuple[int, ...]) -> Any:
    """`value`, of the shape of the dimensions that are not reduced, to broadcast against `x`, in the dtype of `x`."""
    value = as_traceable(value)
    shape = tuple(n for d, n in enumerate(x.shape) if d not in over)
    if value.shape != shape:
        raise ShapeError(
            f"batch norm: {name} has shape {value.shape}, and x, of shape {x.shape}, has {shape} where dimensions {over} are "
            "reduced. Name the reduced ones in reduce_dims."
        )
    return np.reshape(value, tuple(1 if d in over else n for d, n in enumerate(x.shape))).astype(x.dtype)


def _leading(name: str, weights: Any, x: Any, over: tuple[int, ...]) -> Any:
    """Weights of the first dimensions of `x`, to broadcast against it."""
    sizes = list(zip(weights.shape, x.shape, strict=False))
    if weights.ndim > x.ndim or any(w != 1 and (w != n or d not in over) for d, (w, n) in enumerate(sizes)):
        raise ShapeError(
            f"{name}: weights have shape {weights.shape}, and x {x.shape}, of which dimensions {over} are reduced: they must "
            "have the sizes of its first dimensions, or 1, and 1 where a dimension is not reduced."
        )
    return np.reshape(weights, weights.shape + (1,) * (x.ndim - weights.ndim)).astype(x.dtype)
