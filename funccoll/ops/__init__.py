"""NumPy's functions over traced arrays. Importing this package fills the table."""

from . import elementwise, indexing, linalg, reductions, shaping
from .registry import FUNCTIONS, call_function

__all__ = ["FUNCTIONS", "call_function", "elementwise", "indexing", "linalg", "reductions", "shaping"]
