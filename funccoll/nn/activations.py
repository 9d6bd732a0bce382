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
    """Return max(x, 0), elementwise. Its gradient at 0 is 0.

    Args:
        x: An array of any shape.

    Returns:
        An array with the shape and dtype of `x`.

    Example:
        >>> print(fc.nn.relu(np.array([-1.0, 0.0, 2.0])))
        [0. 0. 2.]
    """
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
    """Return 1 / (1 + exp(-x)), elementwise. It does not overflow, and is accurate at both ends.

    Args:
        x: Floats of any shape.

    Returns:
        An array with the shape and dtype of `x`.

    Example:
        >>> print(fc.nn.sigmoid(np.array([-1000.0, 0.0, 1000.0])))
        [0.  0.5 1. ]
    """
    return _sigmoid(as_traceable(x))


@custom_vjp
def _sigmoid(x: Any) -> Any:
    small = np.exp(-np.abs(x))
    one = np.ones((), small.dtype)  # NumPy 2.0 adds the number 1 to a bfloat16 in float32
    return np.where(x >= 0, one, small) / (one + small)


def _sigmoid_forward(x: Any) -> tuple[Any, Any]:
    out = _sigmoid(x)  # uses its rule: higher derivatives must not see the abs, with its corner at 0
    return out, out


def _sigmoid_backward(out: Any, ct: Any) -> tuple[Any]:
    return (ct * out * (1 - out),)


_sigmoid.defvjp(_sigmoid_forward, _sigmoid_backward)


def erf(x: Float[Any, "*s"]) -> Float[Any, "*s"]:
    """Return the error function of each element. It is exact and slow, with one libm call an element.

    Args:
        x: Real floats of any shape.

    Returns:
        An array with the shape and dtype of `x`.

    Example:
        >>> print(fc.nn.erf(np.array([-1.0, 0.0, 1.0])).round(4))
        [-0.8427  0.      0.8427]
    """
    return bind(erf_p, as_traceable(x))


def gelu(x: Float[Any, "*s"], approximate: bool | str = True) -> Float[Any, "*s"]:
    """Return the Gaussian error linear unit x Φ(x), elementwise. Φ is the distribution function of the normal distribution.

    Source: Hendrycks and Gimpel, 2016.

    Args:
        x: Floats of any shape. 16-bit floats are computed in float32.
        approximate: True (the default, as in JAX) computes Φ with tanh, and False with erf. torch's "tanh" and "none" mean the
            same.

    Returns:
        An array with the shape and dtype of `x`.

    Raises:
        DTypeError: If `approximate` is another word.

    Example:
        >>> x = np.array([-1.0, 0.0, 1.0])
        >>> print(fc.nn.gelu(x).round(4))
        [-0.1588  0.      0.8412]
        >>> print(fc.nn.gelu(x, approximate=False).round(4))
        [-0.1587  0.      0.8413]
    """
    given, x = as_traceable(x), wide(x)
    if isinstance(approximate, str):
        if approximate not in ("tanh", "none"):
            raise DTypeError(f'gelu: approximate={approximate!r} must be True ("tanh", the default) or False ("none").')
        approximate = approximate == "tanh"
    if approximate:
        return narrow(_gelu_by_tanh(x), given)
    return narrow(0.5 * x * (1 + erf(x * math.sqrt(0.5))), given)


_GELU_SCALE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh(x: Any) -> Any:
    return np.tanh(_GELU_SCALE * (x + _GELU_CUBE * (x * x * x)))


@custom_vjp
def _gelu_by_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + _gelu_tanh(x))


def _gelu_backward(x: Any, ct: Any) -> tuple[Any]:
    """With t = tanh(u): (1 + t) / 2 + x (1 - t²) u' / 2, in 9 operations beside t. By the chain rule they would be 17."""
    t = _gelu_tanh(x)
    half_slope = 1.5 * _GELU_SCALE * _GELU_CUBE * (x * x) + 0.5 * _GELU_SCALE
    return (ct * ((1 + t) * (0.5 + x * (1 - t) * half_slope)),)


_gelu_by_tanh.defvjp(lambda x: (_gelu_by_tanh(x), x), _gelu_backward)


def silu(x: Float[Any, "*s"]) -> Float[Any, "*s"]:
    """Return x sigmoid(x), elementwise. It is also called swish.

    At -inf the result is 0. A plain product there would be NaN.

    Source: Elfwing, Uchibe and Doya, 2018.

    Args:
        x: Floats of any shape. 16-bit floats are computed in float32.

    Returns:
        An array with the shape and dtype of `x`.

    Example:
        >>> print(fc.nn.silu(np.array([-np.inf, 0.0, 1.0])).round(4))
        [0.     0.     0.7311]
    """
    given, x = as_traceable(x), wide(x)
    return narrow(np.where(x == -np.inf, np.zeros((), x.dtype), x) * sigmoid(x), given)


def softplus(x: Float[Any, "*s"]) -> Float[Any, "*s"]:
    """Return log(1 + exp(x)), elementwise, without overflow. Its gradient is sigmoid(x).

    Args:
        x: Floats of any shape. 16-bit floats are computed in float32.

    Returns:
        An array with the shape and dtype of `x`.

    Example:
        >>> print(fc.nn.softplus(np.array([-1000.0, 0.0, 1000.0])).round(4))
        [0.000e+00 6.931e-01 1.000e+03]
    """
    given, x = as_traceable(x), wide(x)
    return narrow(_softplus(x), given)


@custom_vjp
def _softplus(x: Any) -> Any:
    return np.logaddexp(x, np.zeros((), x.dtype))


_softplus.defvjp(lambda x: (np.logaddexp(x, np.zeros((), x.dtype)), x), lambda x, ct: (ct * sigmoid(x),))


@explains_keywords("fc.nn.dropout")
def dropout(key: UInt64[Any, "2"], x: Float[Any, "*s"], rate: Any) -> Float[Any, "*s"]:
    """Set each element to 0 with probability `rate`, and divide the others by 1 - rate. The expected value is then `x`.

    The same key drops the same elements. Leave dropout out for evaluation.

    Source: Srivastava et al., 2014.

    Args:
        key: A key of `fc.random.key`. Fold the device's index into it if each device should drop other elements.
        x: Floats of any shape.
        rate: A scalar from 0 to 1. At 1 all elements are 0. A traced rate is not checked.

    Returns:
        An array with the shape and dtype of `x`.

    Raises:
        ShapeError: If `rate` is not a scalar, or is known and outside of [0, 1].

    Example:
        >>> print(fc.nn.dropout(fc.random.key(0), np.ones(8), 0.5))
        [2. 2. 2. 0. 0. 2. 0. 0.]
    """
    x, rate = as_traceable(x), as_traceable(rate)
    if rate.ndim:
        raise ShapeError(f"dropout: rate has shape {tuple(rate.shape)}; it must be a scalar.")
    if not is_traced(rate) and not 0 <= rate <= 1:
        raise ShapeError(f"dropout: rate={rate} is not a probability: it must be from 0 to 1.")
    keep = 1 - rate
    factor = (1 / np.where(keep > 0, keep, np.ones((), keep.dtype))).astype(x.dtype)
    return np.where(bernoulli(key, keep, tuple(x.shape)), x * factor, np.zeros((), x.dtype))
