"""Reducers of a module's gradients: their common part, and the mean over all ranks without a communication hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..collectives.functions import all_reduce
from ..parallel.buckets import BucketAssignment
from ..parallel.gradient_reducer import GradientReducer, Reduction
from .parameters import GradientSlot
from .sparse_gradients import SparseReduction
from .tensor_memory import HostMemory, Types

__all__ = ["MeanReducer", "SlotReducer"]


class SlotReducer(GradientReducer):
    """A reducer of a module's gradients. Its blocks of this process come from `GradientSlot.local` and go to `take`.

    The reduction of the last bucket has one more argument and result: bytes of flags. The result has the bits that are set on
    some rank. `settle` then ends the backward pass.
    """

    def __init__(self, slots: Sequence[GradientSlot], memory: HostMemory, label: str, flags: int):
        self._slots, self._memory, self._label, self._flags = slots, memory, label, flags

    def reductions(self, assignment: BucketAssignment) -> list[Reduction]:
        """Return the reductions of all buckets. All ranks call it."""
        return [self.reduction(assignment, number) for number in range(len(assignment.buckets))]

    def settle(self, flags: bytes) -> Sequence[tuple[int, Any]]:
        """End a backward pass. Return (parameter, result) for gradients that reductions have not returned.

        `flags` has, for each parameter, the bits of all ranks.
        """
        return ()

    def _compile(self, fn: Callable[..., Sequence[Any]], types: Types, assignment: BucketAssignment, number: int) -> Reduction:
        """Compile a function of blocks as the program of a bucket; the last bucket's has flags, too."""
        label = self._label_of(assignment, number)
        if assignment.is_last(number):
            return self._memory.compile_with_flags(fn, types, self._flags, label)
        return self._memory.compile(fn, types, label)

    def _label_of(self, assignment: BucketAssignment, number: int) -> str:
        return f"{self._label}: bucket {number} of {len(assignment.buckets)}"


class MeanReducer(SlotReducer):
    """The mean over all ranks. Each bucket of dense gradients takes one all_reduce; sparse ones take a `SparseReduction`."""

    op = "mean"

    def reduction(self, assignment: BucketAssignment, number: int) -> Reduction:
        """Return the bucket's program."""
        slots, mesh, op = [self._slots[i] for i in assignment.buckets[number]], self._memory.host, self.op
        if slots[0].sparse:
            flags = self._flags if assignment.is_last(number) else 0
            return SparseReduction(slots[0], mesh, self._label_of(assignment, number), flags)

        def reduce(*blocks: Any) -> Sequence[Any]:
            return all_reduce(list(blocks), mesh.axis_names, op=op)

        return self._compile(reduce, [(slot.block_shape, slot.dtype) for slot in slots], assignment, number)
