"""Announcements of a rank's next act, for ranks that may be at different places of a program."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..collectives.functions import all_reduce
from ..compiler.compile_spmd import SpmdFunction, compile_spmd
from ..core.mesh import Mesh
from .forward_passes import ForwardPasses

__all__ = ["FORWARD", "Announcements"]

FORWARD, REDUCES, GOES_ON, SKIPS = 1, 2, 4, 8
"""Acts of ranks."""


class Announcements:
    """The acts that the ranks of a mesh announce to each other. If acts differ, `discard` drops the gradients."""

    def __init__(self, mesh: Mesh, label: str, passes: ForwardPasses, discard: Callable[[], None]):
        self._mesh, self._label, self._passes, self._discard = mesh, label, passes, discard
        self._exchange: SpmdFunction | None = None

    def any_skips(self, own: bool) -> bool:
        """Return True if `own` is true on any rank. All ranks call it."""
        return bool(self.announce(SKIPS if own else GOES_ON) & SKIPS)

    def reduction(self) -> None:
        """Announce a reduction."""
        self.announce(REDUCES)

    def announce(self, act: int) -> int:
        """Announce this rank's next act, and return the bits of all ranks' acts. Raise ModuleError on all ranks if acts differ.

        It comes before reductions of modules whose buffers are broadcast, before `skip_if`, and before a forward pass that
        follows one without a backward pass. Otherwise one rank's broadcast could meet another rank's reduction.
        """
        if self._exchange is None:
            either = lambda x: [all_reduce(x, self._mesh.axis_names, op="or")]
            self._exchange = compile_spmd(either, [((1,), np.dtype(np.uint8))], self._mesh, f"{self._label}: acts")
        found = int(self._exchange(np.array([act], np.uint8))[0][0])
        if found not in (FORWARD, REDUCES, GOES_ON, SKIPS, GOES_ON | SKIPS):
            self._discard()
            does = "begins a forward pass" if act == FORWARD else "calls skip_if()"
            error = self._passes.divergence(self._mesh, act == REDUCES, does)
            self._passes.forget()
            raise error
        return found
