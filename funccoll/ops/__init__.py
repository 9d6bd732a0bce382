"""NumPy's functions over traced arrays. Importing this package fills the table."""

from . import decompositions, elementwise, fourier, indexing, linalg, norms, reductions, shaping
from .registry import FUNCTIONS, call_function

__all__ = [
    "FUNCTIONS", "call_function", "decompositions", "elementwise", "fourier", "indexing", "linalg", "norms", "reductions",
    "shaping",
]  # fmt: skip
