"""Reduction of sparse gradients, such as those of embeddings with sparse=True: rows of all ranks are gathered and added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..collectives.functions import all_gather, all_reduce
from ..compiler.compile_spmd import SpmdFunction, compile_spmd
from ..core.mesh import Mesh
from ..errors import ModuleError
from .parameters import GradientSlot
from .tensors import as_array, as_tensor

__all__ = ["SparseReduction"]

_COUNT = np.dtype(np.int64)


class SparseReduction:
    """The mean of a parameter's sparse gradients, as one coalesced tensor with the same bits on all ranks.

    A first collective gives all ranks the number of rows of each, with the flags of the module's parameters. A second one
    gathers the rows. They are padded to a power of two, so few sizes are compiled.
    """

    def __init__(self, slot: GradientSlot, mesh: Mesh, label: str, flags: int):
        self.slot, self.mesh, self.label = slot, mesh, label
        axes = mesh.axis_names
        types: list[Any] = [((1,), _COUNT)]

        def counts(count: Any, *more: Any) -> Sequence[Any]:
            return [all_gather(count, axes), *(all_reduce(x, axes, op="or") for x in more)]

        if flags:
            types.append(((flags,), np.dtype(np.uint8)))
        self._counts = compile_spmd(counts, types, mesh, f"{label}, rows")
        self._gathers: dict[int, SpmdFunction] = {}

    def __call__(self, gradient: Any, *flags: np.ndarray) -> Sequence[Any]:
        """Return the mean, and the flags of all ranks. No gradient counts as zeros."""
        slot = self.slot
        if gradient is None:
            empty = torch.zeros(0, *slot.shape[1:], dtype=slot.torch_dtype)
            gradient = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), empty, slot.shape)
        elif gradient.layout is not torch.sparse_coo:
            raise ModuleError(
                f"the gradient of {slot.name!r} is dense, and its embedding has sparse=True: tied weights, and weights that "
                "are also used elsewhere, have dense gradients. Give the embedding sparse=False."
            )
        gradient = gradient.coalesce()
        counts, *found = self._counts(np.array([gradient._nnz()], _COUNT), *flags)
        counts = counts.tolist()
        capacity = 1 << max(max(counts) - 1, 0).bit_length()
        indices = np.zeros((gradient.sparse_dim(), capacity), _COUNT)
        values = np.zeros((capacity, *gradient.values().shape[1:]), slot.dtype)
        indices[:, : gradient._nnz()] = as_array(gradient.indices())
        values[: gradient._nnz()] = as_array(gradient.values())
        if capacity not in self._gathers:
            self._gathers[capacity] = self._compile(indices, values)
        all_indices, all_values = self._gathers[capacity](indices, values)
        ours = np.concatenate([block[:, :n] for block, n in zip(all_indices, counts, strict=True)], axis=1)
        rows = np.concatenate([block[:n] for block, n in zip(all_values, counts, strict=True)])
        summed = torch.sparse_coo_tensor(torch.from_numpy(ours), as_tensor(rows), slot.shape, check_invariants=False)
        return [(summed.coalesce() / len(counts)).coalesce(), *found]

    def _compile(self, *blocks: np.ndarray) -> SpmdFunction:
        gather = lambda *xs: [all_gather(x, self.mesh.axis_names, stack=True) for x in xs]
        return compile_spmd(gather, [(x.shape, x.dtype) for x in blocks], self.mesh, self.label)
