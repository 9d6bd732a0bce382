"""Model functions in NumPy, numerically stable: for arrays and inside traced functions, with gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .autodiff.custom_rules import custom_vjp, stop_gradient
from .batch_norm import BatchStats, batch_norm, sync_batch_norm, update_running_stats
from .errors import ShapeError
from .ir import bind
from .ops.registry import as_traceable
from .primitives.elementwise import erf_p
from .types import is_inexact

if TYPE_CHECKING:
    from jaxtyping import Float, Integer, Shaped

__all__ = [
    "BatchStats", "batch_norm", "erf", "gelu", "layer_norm", "log_softmax", "logsumexp", "one_hot", "relu", "sigmoid",
    "softmax", "sync_batch_norm", "update_running_stats",
]  # fmt: skip


def relu(x: Shaped[Any, "*s"]) -> Shaped[Any, "*s"]:
    """max(x, 0), elementwise; its gradient at 0 is 0. Any shape; the dtype is kept."""
    return _relu(as_traceable(x))


@custom_vjp
def _relu(x: Any) -> Any:
    return np.maximum(x, np.zeros((), x.dtype))


def _relu_forward(x: Any) -> tuple[Any, Any]:
    return np.maximum(x, np.zeros((), x.dtype)), x


def _relu_backward(x: Any, ct: Any) -> tuple[Any]:
    return (np.where(x > 0, ct, np.zeros((), ct.dtype)),)


_relu.defvjp(_relu_forward, _relu_backward)


def sigmoid(x: Float[Any, "*s"]) -> Float[Any, "*s"]:
    """1 / (1 + exp(-x)), elementwise, without overflow, accurate at both ends. Any shape; the dtype is kept."""
    return _sigmoid(as_traceable(x))


@custom_vjp
def _sigmoid(x: Any) -> Any:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, np.ones((), small.dtype), small) / (1 + small)


def _sigmoid_forward(x: Any) -> tuple[Any, Any]:
    out = _sigmoid(x)  # with its rule: higher derivatives do not see the abs, which has a corner at 0
    return out, out


def _sigmoid_backward(out: Any, ct: Any) -> tuple[Any]:
    return (ct * out * (1 - out),)


_sigmoid.defvjp(_sigmoid_forward, _sigmoid_backward)


def erf(x: Float[Any, "*s"]) -> Float[Any, "*s"]:
    """The error function, elementwise, for real floats. Exact, and slow: one libm call for each element."""
    return bind(erf_p, as_traceable(x))


def gelu(x: Float[Any, "*s"], approximate: bool = True) -> Float[Any, "*s"]:
    """Gaussian error linear unit, elementwise: x Φ(x). Any shape; the dtype is kept.

    With `approximate`, the tanh form. Source: Hendrycks and Gimpel, 2016.
    """
    given, x = as_traceable(x), _wide(x)
    if approximate:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return _narrow(0.5 * x * (1 + np.tanh(inner)), given)
    return _narrow(0.5 * x * (1 + erf(x * math.sqrt(0.5))), given)


def _wide(x: Any) -> Any:
    """16-bit floats as float32: their squares overflow, and long sums of them lose their digits."""
    x = as_traceable(x)
    return x.astype(np.float32) if is_inexact(x.dtype) and x.dtype.itemsize == 2 else x


def _narrow(out: Any, like: Any) -> Any:
    """A result in the dtype of the argument, where that is a float."""
    return out.astype(like.dtype) if is_inexact(like.dtype) and out.dtype != like.dtype else out


def logsumexp(
    x: Float[Any, "*s"], axis: int | tuple[int, ...] | None = -1, keepdims: bool = False
) -> Float[Any, "..."]:
    """log(sum(exp(x))) along `axis`, without overflow; -inf, with gradient 0, where all are -inf."""
    given, x = as_traceable(x), _wide(x)
    top = stop_gradient(np.max(x, axis=axis, keepdims=True))
    top = np.where(np.isfinite(top), top, np.zeros((), x.dtype))
    total = np.sum(np.exp(x - top), axis=axis, keepdims=True)
    nothing = total == 0  # only where all are -inf: a logarithm of 0 would have the gradient NaN
    out = _narrow(np.where(nothing, -np.inf, np.log(np.where(nothing, 1.0, total)) + top), given)
    if keepdims:
        return out
    return np.squeeze(out, axis=tuple(range(x.ndim)) if axis is None else axis)


def log_softmax(x: Float[Any, "*s"], axis: int = -1) -> Float[Any, "*s"]:
    """x - logsumexp(x) along `axis`. Any shape with at least one dimension; the dtype is kept.

    -inf stays -inf; where all are -inf the result is NaN.
    """
    given, x = as_traceable(x), _wide(x)
    shifted = x - stop_gradient(np.max(x, axis=axis, keepdims=True))
    return _narrow(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True)), given)


def softmax(x: Float[Any, "*s"], axis: int = -1) -> Float[Any, "*s"]:
    """exp(x) / sum(exp(x)) along `axis`, without overflow. The dtype is kept.

    -inf gets 0 (a mask); where all are -inf the result is NaN.
    """
    given, x = as_traceable(x), _wide(x)
    powers = np.exp(x - stop_gradient(np.max(x, axis=axis, keepdims=True)))
    return _narrow(powers / np.sum(powers, axis=axis, keepdims=True), given)


def one_hot(
    labels: Integer[Any, "*s"], num_classes: int, dtype: Any = np.float32
) -> Shaped[Any, "*s {num_classes}"]:
    """Labels (integers, shape s) as rows of the identity: shape s + (num_classes,); zeros for labels outside."""
    labels = as_traceable(labels)
    if labels.dtype.kind not in "iu":
        raise ShapeError(f"one_hot: labels have dtype {labels.dtype}; they must be integers.")
    if isinstance(num_classes, bool) or not isinstance(num_classes, (int, np.integer)) or num_classes < 0:
        raise ShapeError(f"one_hot: num_classes={num_classes!r} must be an integer, at least 0, known while tracing.")
    return (np.expand_dims(labels, -1) == np.arange(num_classes)).astype(dtype)


def layer_norm(
    x: Float[Any, "*s n"], scale: Float[Any, "n"] | None = None, bias: Float[Any, "n"] | None = None, *, eps: float = 1e-5
) -> Float[Any, "*s n"]:
    """(x - mean) / sqrt(variance + eps) over the last dimension (n), then `* scale + bias` (shape (n,) each).

    Source: Ba, Kiros and Hinton, 2016.
    """
    given, x = as_traceable(x), _wide(x)
    centred = x - np.mean(x, axis=-1, keepdims=True)
    out = _narrow(centred / np.sqrt(np.mean(np.square(centred), axis=-1, keepdims=True) + eps), given)
    if scale is not None:
        out = out * scale
    return out if bias is None else out + bias
