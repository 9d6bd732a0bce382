"""All cases of NumPy's functions: each module adds its own to `CASES`."""

import fourier_cases
import linear_algebra_cases
import numpy_function_cases
from numpy_cases import CASES

__all__ = ["CASES", "fourier_cases", "linear_algebra_cases", "numpy_function_cases"]
