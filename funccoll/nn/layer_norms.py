"""Normalization of single examples: over their last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.keyword_errors import explains_keywords
from ..errors import ShapeError
from ..ops.registry import as_traceable
from ..primitives.elementwise import broadcast_shapes
from .half_precision import narrow, wide

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["layer_norm", "rms_norm"]


@explains_keywords("fc.nn.layer_norm")
def layer_norm(
    x: Float[Any, "*s n"], scale: Float[Any, "n"] | None = None, bias: Float[Any, "n"] | None = None, *, eps: float = 1e-5
) -> Float[Any, "*s n"]:
    """Normalize over the last dimension: (x - mean) / sqrt(variance + eps), then `* scale + bias`.

    Source: Ba, Kiros and Hinton, 2016.

    Args:
        x: Floats of shape (..., n). 16-bit floats are normalized in float32.
        scale: The factors, of shape (n,), or None.
        bias: The offsets, of shape (n,), or None.
        eps: The number added to the variance.

    Returns:
        An array with the shape of `x`.

    Raises:
        ShapeError: If `x` is a scalar, or if `scale` or `bias` does not fit it.

    Example:
        >>> print(fc.nn.layer_norm(np.array([1.0, 2.0, 3.0])).round(3))
        [-1.225  0.     1.225]
    """
    given, x = _checked("layer_norm", x, scale=scale, bias=bias)
    centred = x - np.mean(x, axis=-1, keepdims=True)
    out = narrow(centred / np.sqrt(np.mean(np.square(centred), axis=-1, keepdims=True) + eps), given)
    if scale is not None:
        out = out * scale
    return out if bias is None else out + bias


@explains_keywords("fc.nn.rms_norm")
def rms_norm(x: Float[Any, "*s n"], scale: Float[Any, "n"] | None = None, *, eps: float = 1e-6) -> Float[Any, "*s n"]:
    """Divide by the root mean square over the last dimension: x / sqrt(mean(x²) + eps), then `* scale`.

    Source: Zhang and Sennrich, 2019.

    Args:
        x: Floats of shape (..., n). 16-bit floats are normalized in float32.
        scale: The factors, of shape (n,), or None.
        eps: The number added to the mean of the squares.

    Returns:
        An array with the shape of `x`.

    Raises:
        ShapeError: If `x` is a scalar, or if `scale` does not fit it.

    Example:
        >>> print(fc.nn.rms_norm(np.array([3.0, 4.0])).round(3))
        [0.849 1.131]
    """
    given, x = _checked("rms_norm", x, scale=scale)
    out = narrow(x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps), given)
    return out if scale is None else out * scale


def _checked(what: str, x: Any, **parameters: Any) -> tuple[Any, Any]:
    """Return x as an array, and in the dtype to compute in. Raises ShapeError if a parameter's shape does not fit."""
    given = as_traceable(x)
    shape = tuple(given.shape)
    if not shape:
        raise ShapeError(f"{what}: x is a scalar, and has no last dimension to normalize.")
    for name, parameter in parameters.items():
        if isinstance(parameter, (tuple, list)) or type(parameter) is int:  # torch's normalized_shape
            raise ShapeError(
                f"{what}: {name} is {parameter!r}, and not a shape but the numbers that are multiplied or added. The last "
                f"dimension is normalized, whichever it is: leave {name} out, or pass an array of shape {shape[-1:]}."
            )
        found = () if parameter is None else tuple(np.shape(parameter))
        try:
            broadcast_shapes(what, [shape, found])
        except ShapeError:
            raise ShapeError(
                f"{what}: {name} has shape {found}, and x {shape}: {name} has one number for each element of the last "
                f"dimension, shape {shape[-1:]}."
            ) from None
    return given, wide(given)
