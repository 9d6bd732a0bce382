"""Array libraries: they hold the arrays of a type of device, and compute with them. NumPy's, for CPUs, is here."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ..arrays.array_like import to_numpy
from ..core.ir import Equation
from ..primitives.indexing import getitem_p, realize
from .native_convolution import native_convolution

__all__ = ["NUMPY", "ArrayLibrary", "NumpyLibrary"]


class ArrayLibrary(Protocol):
    """A library of arrays: NumPy, or CuPy on GPUs."""

    array_type: type
    """The type of its arrays."""
    namespace: Any
    """Its module: `numpy`, `cupy`."""
    specialises: bool
    """True if the function of an equation also depends on its types, not only on its primitive and parameters."""

    def asarray(self, x: Any, what: str = "x") -> Any:
        """Return an argument as an array of the library: itself if it is one, else a copy or a view of it.

        `what` is its name in messages. Raise TraceError, DTypeError or DeviceError.
        """
        ...

    def upload(self, value: Any) -> Any:
        """Return an array of the library with the elements of a NumPy array or scalar."""
        ...

    def download(self, block: Any) -> np.ndarray:
        """Return an array of the library as one of NumPy."""
        ...

    def copy(self, block: Any) -> Any:
        """Return a new C-contiguous array with the same elements."""
        ...

    def literal(self, value: np.ndarray, eqn: Equation) -> Any:
        """Return a scalar constant in the form that an equation's function takes."""
        ...

    def compute(self, eqn: Equation) -> Callable[..., Any]:
        """Return the function of one equation, from its operands' blocks to its output's.

        The function of a ufunc takes `out=`, an array.
        """
        ...

    def check(self) -> None:
        """Wait for the device, and raise the errors that earlier computations have found."""
        ...


class NumpyLibrary:
    """NumPy. It holds the arrays in host memory. A primitive's reference computes it."""

    array_type = np.ndarray
    namespace = np
    specialises = False

    def asarray(self, x: Any, what: str = "x") -> np.ndarray:
        """See `ArrayLibrary`."""
        return to_numpy(x, what)

    def upload(self, value: Any) -> Any:
        """See `ArrayLibrary`."""
        return value

    def download(self, block: Any) -> np.ndarray:
        """See `ArrayLibrary`."""
        return np.asarray(block)

    def copy(self, block: Any) -> np.ndarray:
        """See `ArrayLibrary`."""
        return np.array(block, order="C")

    def literal(self, value: np.ndarray, eqn: Equation) -> Any:
        """See `ArrayLibrary`."""
        return value

    def compute(self, eqn: Equation) -> Callable[..., Any]:
        """See `ArrayLibrary`."""
        if eqn.primitive is getitem_p and len(eqn.inputs) == 1:  # slices, in a tenth of the reference's time
            index = realize(eqn.params["recipe"], ())
            is_element = all(isinstance(place, int) for place in index)  # an array too: a collective cannot bind a scalar
            return operator.itemgetter((*index, ...) if is_element else index)
        convolution = native_convolution(eqn)
        if convolution is not None:
            return convolution
        reference = eqn.primitive.reference
        return functools.partial(reference, **eqn.params) if eqn.params else reference

    def check(self) -> None:
        """See `ArrayLibrary`. NumPy raises its errors at once."""


NUMPY = NumpyLibrary()
