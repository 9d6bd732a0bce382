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
    """log(sum(exp(x))) along `axis`, without overflow; -inf, with gradient 0, where all are -inf."""
    given, x = as_traceable(x), wide(x)
    top = stop_gradient(np.max(x, axis=axis, keepdims=True))
    top = np.where(np.isfinite(top), top, np.zeros((), x.dtype))
    total = np.sum(np.exp(x - top), axis=axis, keepdims=True)
    nothing = total == 0  # only where all are -inf: a logarithm of 0 would have the gradient NaN
    out = narrow(np.where(nothing, -np.inf, np.log(np.where(nothing, 1.0, total)) + top), given)
    if keepdims:
        return out
    return np.squeeze(out, axis=tuple(range(x.ndim)) if axis is None else axis)


@explains_keywords("fc.nn.log_softmax")
def log_softmax(x: Float[Any, "*s"], axis: int | tuple[int, ...] | None = -1) -> Float[Any, "*s"]:
    """x - logsumexp(x) along `axis`. Any shape with at least one dimension; the dtype is kept.

    -inf stays -inf; where all are -inf the result is NaN.
    """
    given, x = as_traceable(x), wide(x)
    shifted = x - stop_gradient(np.max(x, axis=axis, keepdims=True))
    return narrow(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True)), given)


@explains_keywords("fc.nn.softmax")
def softmax(x: Float[Any, "*s"], axis: int | tuple[int, ...] | None = -1) -> Float[Any, "*s"]:
    """exp(x) / sum(exp(x)) along `axis`, without overflow. The dtype is kept.

    -inf gets 0 (a mask); where all are -inf the result is NaN.
    """
    given, x = as_traceable(x), wide(x)
    powers = np.exp(x - stop_gradient(np.max(x, axis=axis, keepdims=True)))
    return narrow(powers / np.sum(powers, axis=axis, keepdims=True), given)


@explains_keywords("fc.nn.one_hot")
def one_hot(labels: Integer[Any, "*s"], num_classes: int, dtype: Any = np.float32) -> Shaped[Any, "*s {num_classes}"]:
    """Labels (integers, shape s) as rows of the identity: shape s + (num_classes,); zeros for labels outside."""
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
    """The cross-entropy of each example, -Σ p log softmax(logits) over the classes along `axis`: take its np.mean.

    `labels` are integers, of the shape of the logits without `axis`, or probabilities p of the shape of the logits, which need
    not sum to 1. `label_smoothing` ε takes (1 - ε) p + ε / classes in place of p. A logit of -inf is a class that is excluded:
    it costs nothing where p is 0, and is infinite elsewhere. The result has the dtype of the logits; 16-bit floats are computed
    in float32.

    Raises: ShapeError for shapes that do not fit, smoothing outside of [0, 1], and labels outside of 0 to classes - 1 that are
    known while tracing; IndexError for a traced one, in the call (a negative one is shown less the number of classes). Give
    examples that are to be left out any label, and the weight 0. DTypeError.
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
    """The logits of the labels' classes, as booleans of the logits' shape."""
    wanted = (*shape[:axis], *shape[axis + 1 :])
    if tuple(labels.shape) != wanted:
        raise ShapeError(
            f"cross_entropy: labels of shape {tuple(labels.shape)} for logits of shape {shape}, whose classes are along axis "
            f"{axis}: they must have shape {wanted}."
        )
    classes = shape[axis]
    if is_traced(labels):
        # Reading a table raises IndexError in the call, at the user's line, as other indices do; negative ones must not wrap.
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
