"""Batch normalization over the devices of a mesh axis, in training and in evaluation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..collectives.argument_checks import Axes, mesh_axes
from ..collectives.functions import all_gather, pvary
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
    """Statistics of a batch, equal on all devices of the axes they are over.

    Args:
        mean: The mean. It has the dimensions that are not reduced.
        var: The biased variance, divided by `count`. It has the shape of `mean`.
        count: A scalar: the number of elements behind each mean, or the sum of their weights.
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
    """Normalize a batch with the statistics of the batches of all devices along `axis`. This is the form for training.

    The result is (x - mean) / sqrt(var + eps), then `* scale + bias`. Mean and variance are over `reduce_dims` and over
    `axis`. 16-bit floats are computed in float32, and so are their statistics. Weights let devices have different numbers of
    rows: pad the batches and give the padding the weight 0. If all weights are 0, mean and variance are 0.

    It communicates one all_gather of count, mean and variance, and all_reduces of the same size in the backward pass.

    Sources: Ioffe and Szegedy, 2015; Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979.

    Args:
        x: This device's batch, in real floats.
        scale: The factors, of the shape of the dimensions that are not reduced, or None.
        bias: The offsets, of the same shape, or None.
        axis: The mesh axes whose devices share statistics. With None each device uses its own batch. The same holds for an
            axis over which neither `x` nor `weights` vary.
        reduce_dims: The dimensions to reduce, by default all but the last. Use `(0, 2, 3)` for images with channels first.
        weights: How often each element counts. They have the first dimensions of `x`, or 1 in place of some. Padding, with the
            weight 0, must be finite.
        eps: The number added to the variance.

    Returns:
        The normalized batch, with the shape and dtype of `x`, and its `BatchStats` for `update_running_stats`.

    Raises:
        ShapeError: If `scale`, `bias` or `weights` do not fit `x`.
        DTypeError: If `x` does not hold real floats.
        MeshError: If you name an axis outside a function traced for a mesh.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> spec = {"in_specs": P("data"), "out_specs": (P("data"), P())}
        >>> normalize = fc.jit(lambda x: fc.nn.sync_batch_norm(x), mesh=mesh, **spec)
        >>> out, stats = normalize(np.array([[0.0], [2.0], [4.0], [6.0]]))
        >>> print(np.round(out, 3).T, stats.mean, stats.var, stats.count)
        [[-1.342 -0.447  0.447  1.342]] [3.] [5.] 4.0
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
    """Return x - mean, and (mean, sum of the squares of x - mean, count), on one device.

    NumPy adds the rows of a float32 one by one. The mean of many rows far from 0 is then wrong by more than the rows differ.
    The mean of what is left after subtracting it is accurate. Any shift gives the same function, so the shift has no gradient.
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
    """Combine the (mean, sum of squares, count) of all batches, stacked in front, into those of one batch."""
    count = np.sum(counts)
    counts = np.reshape(counts, (-1,) + (1,) * (means.ndim - 1))
    shift = stop_gradient(np.sum(counts * means, 0) / _nonzero(count))  # as in `_centred`
    mean = shift + np.sum(counts * (means - shift), 0) / _nonzero(count)
    return mean, np.sum(squares + counts * np.square(means - mean), 0), count


def _nonzero(count: Any) -> Any:
    """Return a count to divide by. Sums of nothing are 0."""
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
    """Normalize a batch with given statistics, such as the running ones. This is the form for evaluation.

    It does not communicate. The result is (x - mean) / sqrt(var + eps), then `* scale + bias`. The statistics, `scale` and
    `bias` have the shape of the dimensions that are not reduced.

    Source: Ioffe and Szegedy, 2015.

    Args:
        x: The batch, in real floats.
        scale: The factors, or None.
        bias: The offsets, or None.
        mean: The mean to subtract.
        var: The variance to divide by.
        reduce_dims: The dimensions over which the statistics were taken, by default all but the last.
        eps: The number added to the variance.

    Returns:
        The normalized batch, with the shape and dtype of `x`.

    Raises:
        ShapeError: If a statistic, `scale` or `bias` does not fit `x`.
        DTypeError: If `x` does not hold real floats.

    Example:
        >>> x = np.array([[0.0, 10.0], [2.0, 30.0]])
        >>> print(fc.nn.batch_norm(x, mean=np.array([1.0, 20.0]), var=np.array([1.0, 100.0])).round(3))
        [[-1. -1.]
         [ 1.  1.]]
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
    """Move running statistics towards those of a batch: (1 - momentum) * running + momentum * batch's.

    The convention is torch's. `momentum` is the weight of the new batch, and the running variance is the unbiased one. Start
    with zeros and ones. No gradient flows through the update, and a batch whose weights are all 0 changes nothing.

    Args:
        running: The running (mean, variance).
        stats: The `BatchStats` that `sync_batch_norm` returned.
        momentum: A scalar from 0 to 1. With 1 / n in the n-th step you get the average of all batches.

    Returns:
        The new (mean, variance), with the dtypes of `running`.

    Example:
        >>> stats = fc.nn.BatchStats(np.array([2.0]), np.array([4.0]), np.float64(5.0))
        >>> print(fc.nn.update_running_stats((np.zeros(1), np.ones(1)), stats))
        (array([0.2]), array([1.4]))
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
            f"batch norm: {name} has shape {value.shape}, and x, of shape {x.shape}, has {shape} when dimensions {over} are "
            "reduced. Name the reduced dimensions in reduce_dims."
        )
    return np.reshape(value, tuple(1 if d in over else n for d, n in enumerate(x.shape))).astype(x.dtype)


def _leading(name: str, weights: Any, x: Any, over: tuple[int, ...]) -> Any:
    """Reshape weights of the first dimensions of `x`, so that they broadcast against it."""
    sizes = list(zip(weights.shape, x.shape, strict=False))
    if weights.ndim > x.ndim or any(w != 1 and (w != n or d not in over) for d, (w, n) in enumerate(sizes)):
        raise ShapeError(
            f"{name}: weights have shape {weights.shape}, and x {x.shape}, of which dimensions {over} are reduced: they must "
            "have the sizes of its first dimensions, or 1, and 1 for a dimension that is not reduced."
        )
    return np.reshape(weights, weights.shape + (1,) * (x.ndim - weights.ndim)).astype(x.dtype)
