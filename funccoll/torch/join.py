"""Uneven inputs. Ranks without more inputs take part in the others' passes, with zeros, until all have ended."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..collectives.functions import all_gather
from ..compiler.compile_spmd import compile_spmd
from ..core.mesh import Mesh
from ..errors import ModuleError, UnevenBatchesError

__all__ = ["UnevenInputs"]

_ENDED, _FORWARD, _BUFFERS, _GRADIENTS, _GOES_ON, _SKIPS = range(6)
_DOES = {
    _FORWARD: "begins a forward pass",
    _BUFFERS: "begins a forward pass that broadcasts buffers",
    _GRADIENTS: "averages gradients",
    _GOES_ON: "calls skip_if()",
}
"""The next act of a rank with inputs, in the words of an error."""


class UnevenInputs:
    """The state of one `join` block: the ranks that still have inputs.

    Each forward pass, reduction and `skip_if` begins with an exchange between all ranks. A rank that has ended takes part in
    each of them.
    """

    def __init__(self, mesh: Mesh, label: str, throw: bool):
        self.nranks, self.throw = mesh.size, throw
        self.active = list(range(mesh.size))
        """The ranks that had inputs at the last exchange."""
        gather = lambda x: [all_gather(x, mesh.axis_names, stack=True)]
        self._gather = compile_spmd(gather, [((1,), np.dtype(np.int64))], mesh, f"{label}: join")

    def forward(self, buffers: bool) -> None:
        """Announce a forward pass, and whether it broadcasts buffers."""
        self._exchange(_BUFFERS if buffers else _FORWARD)

    def reduce(self) -> None:
        """Announce that gradients are averaged now."""
        self._exchange(_GRADIENTS)

    def any_skips(self, own: bool) -> bool:
        """Announce whether this rank wants to skip a step. Return True if any rank does."""
        return _SKIPS in self._exchange(_SKIPS if own else _GOES_ON)

    def follow(self, buffers: Callable[[], None], gradients: Callable[[], None]) -> None:
        """Take part in the other ranks' passes, by these functions, until they have ended."""
        while acts := self._exchange(_ENDED):
            if acts[0] == _BUFFERS:
                buffers()
            if acts[0] == _GRADIENTS:
                gradients()

    def _exchange(self, act: int) -> list[int]:
        """Return the acts of the active ranks, which are all alike; an empty list if all have ended."""
        acts = self._gather(np.array([act], np.int64))[0].ravel().tolist()
        active = [rank for rank, act in enumerate(acts) if act != _ENDED]
        if self.throw and 0 < len(active) < self.nranks:
            ended = [str(rank) for rank in range(self.nranks) if rank not in active]
            ranks = f"rank{'s' * (len(ended) > 1)} {', '.join(ended)}"
            raise UnevenBatchesError(
                f"the inputs of {ranks} have ended, and those of others have not. Give all ranks the same number, or "
                "join(throw_on_early_termination=False)."
            )
        if active:
            self.active = active
        does = {rank: _DOES[min(acts[rank], _GOES_ON)] for rank in active}
        if len(set(does.values())) > 1:
            texts = ", ".join(f"rank {rank} {text}" for rank, text in does.items())
            raise ModuleError(
                f"in join, all ranks with inputs act in one order, and {texts}. A rank has left out a part of its step."
            )
        return [acts[rank] for rank in active]
