"""Functions of single elements, and dropout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.interpreter import bind
from ..core.keyword_errors import explains_keywords
from ..errors import DTypeError, ShapeError
from ..ops.registry import as_traceable, is_traced
from ..primitives.elementwise import erf_p
from ..random import bernoulli
from ..transforms.autodiff.custom_rules import custom_vjp
from .half_precision import narrow, wide

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped, UInt64

__all__ = ["dropout", "erf", "gelu", "relu", "sigmoid", "silu", "softplus"]


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


def gelu(x: Float[Any, "*s"], approximate: bool | str = True) -> Float[Any, "*s"]:
    """Gaussian error linear unit, elementwise: x Φ(x). Any shape; the dtype is kept.

    With `approximate` (True by default, as in JAX), the tanh form; torch's "tanh" and "none" are True and False. Raises:
    DTypeError for another word. Source: Hendrycks and Gimpel, 2016.
    """
    given, x = as_traceable(x), wide(x)
    if isinstance(approximate, str):
        if approximate not in ("tanh", "none"):
            raise DTypeError(f'gelu: approximate={approximate!r} must be True ("tanh", the default) or False ("none").')
        approximate = approximate == "tanh"
    if approximate:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return narrow(0.5 * x * (1 + np.tanh(inner)), given)
    return narrow(0.5 * x * (1 + erf(x * math.sqrt(0.5))), given)


def silu(x: Float[Any, "*s"]) -> Float[Any, "*s"]:
    """x sigmoid(x), elementwise, also called swish. Any shape; the dtype is kept. 0 at -inf, where x * 0 would be NaN.

    Source: Elfwing, Uchibe and Doya, 2018.
    """
    given, x = as_traceable(x), wide(x)
    return narrow(np.where(x == -np.inf, np.zeros((), x.dtype), x) * sigmoid(x), given)


def softplus(x: Float[Any, "*s"]) -> Float[Any, "*s"]:
    """log(1 + exp(x)), elementwise, without overflow; its gradient is sigmoid(x). Any shape; the dtype is kept."""
    given, x = as_traceable(x), wide(x)
    return narrow(_softplus(x), given)


@custom_vjp
def _softplus(x: Any) -> Any:
    return np.logaddexp(x, np.zeros((), x.dtype))


_softplus.defvjp(lambda x: (np.logaddexp(x, np.zeros((), x.dtype)), x), lambda x, ct: (ct * sigmoid(x),))


@explains_keywords("fc.nn.dropout")
def dropout(key: UInt64[Any, "2"], x: Float[Any, "*s"], rate: Any) -> Float[Any, "*s"]:
    """Elements of `x` set to 0 with probability `rate`, the others divided by 1 - rate: so the expected value is x.

    `rate` is a scalar in [0, 1]; a traced one is not checked. At 1 all is 0. For evaluation, leave it out. The same key drops
    the same elements. Source: Srivastava et al., 2014.
    """
    x, rate = as_traceable(x), as_traceable(rate)
    if rate.ndim:
        raise ShapeError(f"dropout: rate has shape {tuple(rate.shape)}; it must be a scalar.")
    if not is_traced(rate) and not 0 <= rate <= 1:
        raise ShapeError(f"dropout: rate={rate} is not a probability: it must be from 0 to 1.")
    keep = 1 - rate
    factor = (1 / np.where(keep > 0, keep, np.ones((), keep.dtype))).astype(x.dtype)
    return np.where(bernoulli(key, keep, tuple(x.shape)), x * factor, np.zeros((), x.dtype))
