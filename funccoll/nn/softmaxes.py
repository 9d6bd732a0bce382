"""Logarithms and quotients of sums of exponentials, and the losses made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.interpreter import Traced
from ..core.keyword_errors import explains_keywords
from ..core.types import is_inexact
from ..errors import DTypeError, ShapeError, at_source, traced_source
from ..ops.indexing import getitem
from ..ops.registry import as_traceable, is_traced, normalize_dim
from ..transforms.autodiff.custom_rules import stop_gradient
from .half_precision import narrow, wide

if TYPE_CHECKING:
    from jaxtyping import Float, Integer, Shaped

__all__ = ["cross_entropy", "log_softmax", "logsumexp", "one_hot", "softmax"]


@explains_keywords("fc.nn.logsumexp")
def logsumexp(x: Float[Any, "*s"], axis: int | tuple[int, ...] | None = -1, keepdims: bool = False) -> Float[Any, "..."]:
    """Return log(sum(exp(x))) along `axis`, without overflow.

    If all elements along `axis` are -inf, the result is -inf, with the gradient 0.

    Args:
        x: Floats with at least one dimension. 16-bit floats are computed in float32.
        axis: The dimension to reduce, a tuple of them, or None for all.
        keepdims: True keeps reduced dimensions, with the size 1.

    Returns:
        An array with the dtype of `x`, without the reduced dimensions.

    Example:
        >>> print(fc.nn.logsumexp(np.array([1000.0, 1000.0])).round(4))
        1000.6931
    """
    given, x = as_traceable(x), wide(x)
    top = stop_gradient(np.max(x, axis=axis, keepdims=True))
    top = np.where(np.isfinite(top), top, np.zeros((), x.dtype))
    total = np.sum(np.exp(x - top), axis=axis, keepdims=True)
    nothing = total == 0  # only if all are -inf: the gradient of log(0) would be NaN
    out = narrow(np.where(nothing, -np.inf, np.log(np.where(nothing, 1.0, total)) + top), given)
    if keepdims:
        return out
    return np.squeeze(out, axis=tuple(range(x.ndim)) if axis is None else axis)


@explains_keywords("fc.nn.log_softmax")
def log_softmax(x: Float[Any, "*s"], axis: int | tuple[int, ...] | None = -1) -> Float[Any, "*s"]:
    """Return x - logsumexp(x) along `axis`.

    An element of -inf stays -inf. If all along `axis` are -inf, the result is NaN.

    Args:
        x: Floats with at least one dimension. 16-bit floats are computed in float32.
        axis: The dimension of the sum, a tuple of them, or None for all.

    Returns:
        An array with the shape and dtype of `x`.

    Example:
        >>> print(fc.nn.log_softmax(np.array([0.0, 0.0, -np.inf])).round(4))
        [-0.6931 -0.6931    -inf]
    """
    given, x = as_traceable(x), wide(x)
    shifted = x - stop_gradient(np.max(x, axis=axis, keepdims=True))
    return narrow(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True)), given)


@explains_keywords("fc.nn.softmax")
def softmax(x: Float[Any, "*s"], axis: int | tuple[int, ...] | None = -1) -> Float[Any, "*s"]:
    """Return exp(x) / sum(exp(x)) along `axis`, without overflow.

    You can mask elements with -inf: they get 0. If all along `axis` are -inf, the result is NaN.

    Args:
        x: Floats with at least one dimension. 16-bit floats are computed in float32.
        axis: The dimension of the sum, a tuple of them, or None for all.

    Returns:
        An array with the shape and dtype of `x`.

    Example:
        >>> print(fc.nn.softmax(np.array([0.0, 0.0, -np.inf])))
        [0.5 0.5 0. ]
    """
    given, x = as_traceable(x), wide(x)
    powers = np.exp(x - stop_gradient(np.max(x, axis=axis, keepdims=True)))
    return narrow(powers / np.sum(powers, axis=axis, keepdims=True), given)


@explains_keywords("fc.nn.one_hot")
def one_hot(labels: Integer[Any, "*s"], num_classes: int, dtype: Any = np.float32) -> Shaped[Any, "*s {num_classes}"]:
    """Return labels as rows of the identity matrix. A label outside of [0, num_classes) gets zeros.

    Args:
        labels: Integers of any shape.
        num_classes: The number of classes, known while tracing.
        dtype: The dtype of the result.

    Returns:
        An array of the labels' shape with `num_classes` as one more dimension at the end.

    Raises:
        ShapeError: If `labels` are not integers, or `num_classes` is not one that is at least 0.

    Example:
        >>> print(fc.nn.one_hot(np.array([0, 2]), 3))
        [[1. 0. 0.]
         [0. 0. 1.]]
    """
    labels = as_traceable(labels)
    if labels.dtype.kind not in "iu":
        raise ShapeError(f"one_hot: labels have dtype {labels.dtype}; they must be integers.")
    if isinstance(num_classes, bool) or not isinstance(num_classes, (int, np.integer)) or num_classes < 0:
        raise ShapeError(f"one_hot: num_classes={num_classes!r} must be an integer, at least 0, known while tracing.")
    return (np.expand_dims(labels, -1) == np.arange(num_classes)).astype(dtype)


@explains_keywords("fc.nn.cross_entropy")
def cross_entropy(
    logits: Float[Any, "*s"], labels: Shaped[Any, "..."], *, label_smoothing: float = 0.0, axis: int = -1
) -> Float[Any, "..."]:
    """Return the cross-entropy of each example, -Σ p log softmax(logits) over the classes along `axis`. Take its `np.mean`.

    A logit of -inf excludes a class. It costs nothing if the class has the probability 0, and is infinite otherwise. To leave
    an example out, give it any label of a class, and multiply its loss by 0.

    Args:
        logits: Real floats. 16-bit floats are computed in float32.
        labels: Integers from 0 to classes - 1, of the shape of the logits without `axis`. Or probabilities p, of the shape of
            the logits, which need not sum to 1.
        label_smoothing: A known number ε from 0 to 1. (1 - ε) p + ε / classes takes the place of p.
        axis: The dimension of the classes.

    Returns:
        An array with the dtype of `logits`, and their shape without `axis`.

    Raises:
        ShapeError: If shapes do not fit, `label_smoothing` is outside of [0, 1], or a label known while tracing is not a
            class.
        DTypeError: If `logits` are not real floats, or `labels` neither integers nor probabilities.
        IndexError: In the call, if a traced label is not a class. The message shows a negative one less the number of classes.

    Example:
        >>> logits = np.array([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> print(fc.nn.cross_entropy(logits, np.array([0, 1])).round(4))
        [0.2395 1.0986]
    """
    given, logits, labels = as_traceable(logits), wide(logits), as_traceable(labels)
    if not is_inexact(given.dtype) or given.dtype.kind == "c" or labels.dtype.kind in "bc":
        raise DTypeError(
            f"cross_entropy: logits of dtype {given.dtype} and labels of {labels.dtype}; they must be real floats, and "
            "integers or probabilities."
        )
    if isinstance(label_smoothing, Traced) or not 0 <= label_smoothing <= 1:
        raise ShapeError(f"cross_entropy: label_smoothing={label_smoothing} must be a known number from 0 to 1.")
    if not logits.ndim:
        raise ShapeError("cross_entropy: the logits are a scalar; they need a dimension for the classes.")
    axis = normalize_dim(axis, logits.ndim)
    shifted = logits - stop_gradient(np.max(logits, axis=axis, keepdims=True))
    total = np.log(np.sum(np.exp(shifted), axis=axis))
    if labels.dtype.kind in "iu":
        hit = _hits(labels, tuple(logits.shape), axis)
        chosen = _sum_where(hit, shifted, axis)
        mass: Any = 1.0
    else:
        if tuple(labels.shape) != tuple(logits.shape):
            raise ShapeError(
                f"cross_entropy: probabilities of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}: they "
                "must be equal. (Labels that are numbers of classes are integers.)"
            )
        labels = labels.astype(total.dtype)
        excluded = (labels == 0) & np.isinf(shifted)  # 0 * inf is NaN
        chosen = np.sum(labels * np.where(excluded, np.zeros((), total.dtype), shifted), axis=axis)
        mass = np.sum(labels, axis=axis)
    loss = mass * total - chosen
    if label_smoothing:
        spread = total - np.mean(shifted, axis=axis)
        loss = (1 - label_smoothing) * loss + label_smoothing * spread
    return narrow(loss, given)


def _hits(labels: Any, shape: tuple[int, ...], axis: int) -> Any:
    """Return which logits are those of the labels' classes, as booleans of the logits' shape."""
    wanted = (*shape[:axis], *shape[axis + 1 :])
    if tuple(labels.shape) != wanted:
        raise ShapeError(
            f"cross_entropy: labels of shape {tuple(labels.shape)} for logits of shape {shape}, whose classes are along axis "
            f"{axis}: they must have shape {wanted}."
        )
    classes = shape[axis]
    if is_traced(labels):
        # Reading a table raises IndexError in the call, at the user's line, as other indices do. Negative labels must not wrap.
        labels = labels.astype(np.int64)
        line = traced_source()
        with at_source(line and replace(line, role="a label of fc.nn.cross_entropy")):
            labels = getitem(np.arange(classes), np.where(labels < 0, labels - classes, labels))
    elif ((labels < 0) | (labels >= classes)).any():
        first = tuple(map(int, np.argwhere((labels < 0) | (labels >= classes))[0]))
        at = f" at index {first[0] if len(first) == 1 else first}" if first else ""
        raise ShapeError(f"cross_entropy: label {labels[first]}{at} is outside [0, {classes}), the numbers of the classes.")
    numbers = np.arange(classes).reshape(-1, *(1,) * (len(shape) - 1 - axis))
    return np.expand_dims(labels, axis) == numbers


def _sum_where(hit: Any, x: Any, axis: int) -> Any:
    return np.sum(np.where(hit, x, np.zeros((), x.dtype)), axis=axis)
