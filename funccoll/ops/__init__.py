"""NumPy's functions over traced arrays. Importing this package fills the table.

It imports `primitives`, which its functions bind.
"""

from . import (
    accumulations,
    creation,
    decompositions,
    elementwise,
    fourier,
    indexing,
    joining,
    linalg,
    nanfunctions,
    norms,
    pointwise,
    reductions,
    shaping,
    sorting,
    statistics,
)
from .registry import FUNCTIONS, call_function

__all__ = [
    "FUNCTIONS",
    "accumulations",
    "call_function",
    "creation",
    "decompositions",
    "elementwise",
    "fourier",
    "indexing",
    "joining",
    "linalg",
    "nanfunctions",
    "norms",
    "pointwise",
    "reductions",
    "shaping",
    "sorting",
    "statistics",
]
