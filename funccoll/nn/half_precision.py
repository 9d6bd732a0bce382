"""Floats of 16 bits: nn computes them in float32, and rounds once."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.types import is_inexact
from ..ops.registry import as_traceable

__all__ = ["narrow", "wide"]


def wide(x: Any) -> Any:
    """Return 16-bit floats as float32. Their squares overflow, and long sums of them lose their digits."""
    x = as_traceable(x)
    return x.astype(np.float32) if is_inexact(x.dtype) and x.dtype.itemsize == 2 else x


def narrow(out: Any, like: Any) -> Any:
    """Return a result in the dtype of the argument, if that is a float."""
    return out.astype(like.dtype) if is_inexact(like.dtype) and out.dtype != like.dtype else out
