"""All cases of NumPy's functions: each module adds its own to `CASES`."""

from tests.support.cases import fourier_cases, linear_algebra_cases, numpy_function_cases
from tests.support.cases.numpy_cases import CASES

__all__ = ["CASES", "fourier_cases", "linear_algebra_cases", "numpy_function_cases"]
