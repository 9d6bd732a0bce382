"""Uneven inputs: ranks whose inputs have ended take part in the others' passes, with zeros, until all have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..collectives import all_gather
from ..compiler.per_device import compile_per_device
from ..errors import UnevenBatchesError
from ..mesh import Mesh

__all__ = ["UnevenInputs"]

_ACTIVE, _GRADIENTS, _BUFFERS = range(3)


class UnevenInputs:
    """The state of one `join` block: which ranks still have inputs.

    Before each forward pass of a rank that has, all ranks tell each other; one that has ended does so in the place of each.
    """

    def __init__(self, mesh: Mesh, label: str, throw: bool):
        self.nranks, self.throw = mesh.size, throw
        self.active = list(range(mesh.size))
        """The ranks that had inputs when it was told last."""
        gather = lambda x: [all_gather(x, mesh.axis_names, stack=True)]
        self._gather = compile_per_device(gather, [((3,), np.dtype(np.int64))], mesh, f"{label}: join")

    def tell(self, gradients: bool, buffers: bool) -> None:
        """Tell the others of a forward pass, and whether it averages gradients and broadcasts buffers."""
        self._exchange([1, gradients, buffers])

    def follow(self, buffers: Callable[[], None], gradients: Callable[[], None]) -> None:
        """Take part in the passes of the others until they have ended, by these functions."""
        while rows := self._exchange([0, 0, 0]):
            if any(row[_BUFFERS] for row in rows):
                buffers()
            if any(row[_GRADIENTS] for row in rows):
                gradients()

    def _exchange(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the rows of the active ranks; none when all have ended."""
        rows = self._gather(np.array(mine, np.int64))[0].reshape(-1, 3).tolist()
        active = [rank for rank, row in enumerate(rows) if row[_ACTIVE]]
        if self.throw and 0 < len(active) < self.nranks:
            ended = [str(rank) for rank in range(self.nranks) if rank not in active]
            ranks = f"rank{'s' * (len(ended) > 1)} {', '.join(ended)}"
            raise UnevenBatchesError(
                f"the inputs of {ranks} have ended, and those of others have not. Give all ranks the same number, or "
                "join(throw_on_early_termination=False)."
            )
        if active:
            self.active = active
        return [rows[rank] for rank in active]
