"""Host memory and NumPy as a device. (NumPy's library imports kernels, which not every process needs; so `device` is apart.)"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..core.ir import Program
from .array_library import NUMPY, ArrayLibrary
from .device import Run

__all__ = ["HostDevice"]


class HostDevice:
    """Private memory of this process, and NumPy. Calls are synchronous."""

    library: ArrayLibrary = NUMPY

    @property
    def allocate(self) -> Callable[..., np.ndarray]:
        """See `Device`."""
        return np.empty

    def new_block(self, value: np.ndarray) -> np.ndarray:
        """See `Device`. It is read-only."""
        out = self.allocate(value.shape, value.dtype)
        out[...] = value
        out.flags.writeable = False
        return out

    def wait(self) -> None:
        """See `Device`."""

    def record(self, run: Run, program: Program) -> Run:
        """See `Device`."""
        return run

    def execution(self, run: Run) -> str:
        """See `Device`."""
        return "NumPy, one operation after the other"
