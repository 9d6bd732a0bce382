"""The exit code of a process that fails after its program has ended: Python has no way to set it then."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from ..errors import PeerFailure
from .host import PEER_FAILURE_EXIT_CODE

__all__ = ["end_with_failure"]


def end_with_failure() -> None:
    """Let this process end with Python's exit code for an error, or that of a PeerFailure, after all `atexit` functions.

    The error is `sys.last_value`.
    """
    setattr(sys, _LastObject.__name__, _LastObject())


class _LastObject:
    """An object that ends the process when Python deletes it.

    It belongs to `sys`, whose objects are deleted last. By then all `atexit` functions have run. Functions that C libraries
    register, as mpi4py does, have not.
    """

    def __init__(self) -> None:
        error = getattr(sys, "last_value", None)
        self.code = PEER_FAILURE_EXIT_CODE if isinstance(error, PeerFailure) else 1

    def __del__(self, end: Callable[[int], Any] = os._exit) -> None:
        end(self.code)
