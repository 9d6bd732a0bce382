"""Array libraries: what holds the arrays of a type of device and computes with them. NumPy's, for CPUs, is here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ..arrays.array_like import to_numpy
from ..core.ir import Equation
from ..primitives.optimizers import optimizer_step_p
from .fused_step import fused_step

__all__ = ["NUMPY", "ArrayLibrary", "NumpyLibrary"]


class ArrayLibrary(Protocol):
    """A library of arrays: NumPy, or CuPy on GPUs."""

    array_type: type
    """The type of its arrays."""
    namespace: Any
    """Its module: `numpy`, `cupy`."""
    specialises: bool
    """True when the function of an equation depends on its types as well, and not on its primitive and parameters alone."""

    def asarray(self, x: Any, what: str = "x") -> Any:
        """Return an argument as an array of the library: itself where it is one, else a copy or a view of it.

        `what` names it in messages. Raises TraceError, DTypeError, DeviceError.
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
        """Return a scalar constant as an equation's function takes it."""
        ...

    def compute(self, eqn: Equation) -> Callable[..., Any]:
        """Return the function of one equation: from its operands' blocks to its output's.

        Of a ufunc it takes `out=`, an array; of a primitive that works in place, a tuple of arrays and Nones.
        """
        ...

    def check(self) -> None:
        """Raise what the computations so far have found wrong, after the device was waited for."""
        ...


class NumpyLibrary:
    """NumPy, which holds the arrays in host memory. A primitive's reference computes it."""

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
        if eqn.primitive is optimizer_step_p:
            return fused_step(eqn)
        reference = eqn.primitive.reference
        return functools.partial(reference, **eqn.params) if eqn.params else reference

    def check(self) -> None:
        """See `ArrayLibrary`. NumPy has raised it."""


NUMPY = NumpyLibrary()
