"""Normalization of single examples: over their last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..keywords import explains_keywords
from ..ops.registry import as_traceable
from .half_precision import narrow, wide

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["layer_norm", "rms_norm"]


@explains_keywords("fc.nn.layer_norm")
def layer_norm(
    x: Float[Any, "*s n"], scale: Float[Any, "n"] | None = None, bias: Float[Any, "n"] | None = None, *, eps: float = 1e-5
) -> Float[Any, "*s n"]:
    """(x - mean) / sqrt(variance + eps) over the last dimension (n), then `* scale + bias` (shape (n,) each).

    Source: Ba, Kiros and Hinton, 2016.
    """
    given, x = as_traceable(x), wide(x)
    centred = x - np.mean(x, axis=-1, keepdims=True)
    out = narrow(centred / np.sqrt(np.mean(np.square(centred), axis=-1, keepdims=True) + eps), given)
    if scale is not None:
        out = out * scale
    return out if bias is None else out + bias


@explains_keywords("fc.nn.rms_norm")
def rms_norm(x: Float[Any, "*s n"], scale: Float[Any, "n"] | None = None, *, eps: float = 1e-6) -> Float[Any, "*s n"]:
    """x / sqrt(mean(x²) + eps) over the last dimension (n), then `* scale` (shape (n,)).

    Source: Zhang and Sennrich, 2019.
    """
    given, x = as_traceable(x), wide(x)
    out = narrow(x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps), given)
    return out if scale is None else out * scale
