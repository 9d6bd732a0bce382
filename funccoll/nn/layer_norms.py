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
    """(x - mean) / sqrt(variance + eps) over the last dimension (n), then `* scale + bias` (shape (n,) each).

    Raises: ShapeError. Source: Ba, Kiros and Hinton, 2016.
    """
    given, x = _checked("layer_norm", x, scale=scale, bias=bias)
    centred = x - np.mean(x, axis=-1, keepdims=True)
    out = narrow(centred / np.sqrt(np.mean(np.square(centred), axis=-1, keepdims=True) + eps), given)
    if scale is not None:
        out = out * scale
    return out if bias is None else out + bias


@explains_keywords("fc.nn.rms_norm")
def rms_norm(x: Float[Any, "*s n"], scale: Float[Any, "n"] | None = None, *, eps: float = 1e-6) -> Float[Any, "*s n"]:
    """x / sqrt(mean(x²) + eps) over the last dimension (n), then `* scale` (shape (n,)).

    Raises: ShapeError. Source: Zhang and Sennrich, 2019.
    """
    given, x = _checked("rms_norm", x, scale=scale)
    out = narrow(x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps), given)
    return out if scale is None else out * scale


def _checked(what: str, x: Any, **parameters: Any) -> tuple[Any, Any]:
    """x as an array, and in the dtype in which it is computed. Raises ShapeError for parameters of other shapes."""
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
