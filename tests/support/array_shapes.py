"""Shapes of arrays that change in place."""

import warnings

import numpy as np


def set_shape(array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Change an array's shape in place, as another thread could; NumPy deprecates that from 2.5 on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        array.shape = shape
